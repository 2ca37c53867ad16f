"""Byte-level BPE: the tokenizer of DeepSeek V4.1, from a GGUF's arrays or from a `tokenizer.json`.

Pre-tokenization and merging are done by `tokenizers`; added tokens (the special spellings) are matched by
`Tokenizer`, so that text can be encoded with and without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any


class TokenizerError(ValueError):
    """A tokenizer file or metadata that is damaged, incomplete or of another kind, or text that is not Unicode."""


def byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level vocabularies spell bytes, in the order of the bytes."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


BYTE_OF = {char: byte for byte, char in enumerate(byte_alphabet())}
# Turns a spelling into Latin-1 text; characters of Latin-1 that spell no byte go where Latin-1 cannot follow.
_TO_LATIN = dict.fromkeys(range(256), 65535) | {ord(char): byte for char, byte in BYTE_OF.items()}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


# What GGUF calls joyai-llm: up to three digits; runs of CJK and kana; one ASCII punctuation mark with the ASCII
# letters after it, a word with at most one leading character, punctuation with its newlines, newlines, spaces.
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
JOYAI = {
    "type": "Sequence",
    "pretokenizers": [
        _split(r"\p{N}{1,3}"),
        _split("[一-龥\u3040-\u309f\u30a0-\u30ff]+"),
        _split(
            _ASCII_PUNCTUATION + "[A-Za-z]+"
            "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*"
            "|\\s*[\r\n]+"
            "|\\s+(?!\\S)"
            "|\\s+"
        ),
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}

# Two added tokens that older DeepSeek tokenizers spell differently; the ids are the same.
_RENAMED = {"<｜place▁holder▁no▁799｜>": "<｜System｜>", "<｜image2｜>": "<｜deepseek_image｜>"}


class ByteBPE:
    """A byte-level BPE vocabulary.

    tokens: all spellings by id, added ones included.
    merges: pairs of spellings, best first.
    added: id -> whether the file calls it special, for every added token.
    splits: the pre-tokenizer in the form of `tokenizer.json`.
    """

    first_space = False  # no space is put before the text

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[tuple[str, str]],
        added: Mapping[int, bool],
        splits: Mapping[str, Any] = JOYAI,
    ) -> None:
        self.tokens = list(tokens)
        self.merges = merges
        self.splits = splits
        self.added = dict(sorted(added.items()))
        for old, new in _RENAMED.items():
            if new not in self.tokens and old in self.tokens:
                self.tokens[self.tokens.index(old)] = new
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise TokenizerError(f"Found the token {_show(twice)} twice; every token needs its own spelling.")
        self._engine = self._build()
        self._missing = bytes(byte for char, byte in BYTE_OF.items() if char not in self.ids)

    def _build(self) -> Any:
        import tokenizers

        shell = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        try:
            engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=self.ids, merges=self.merges))
            splits = tokenizers.Tokenizer.from_str(json.dumps({**shell, "pre_tokenizer": self.splits}))
        except Exception as error:  # the package raises plain Exception
            raise TokenizerError(f"Found a vocabulary that `tokenizers` refuses: {_line(error)}.") from None
        engine.pre_tokenizer = splits.pre_tokenizer
        return engine

    def encode_plain(self, text: str, first: bool) -> list[int]:
        """Ids of text in which no spelling is special."""
        if self._missing and (lacking := set(text.encode("utf-8")) & set(self._missing)):
            raise TokenizerError(f"Found byte {min(lacking)} in the text, for which this vocabulary has no token.")
        return self._engine.encode(text, add_special_tokens=False).ids

    def piece_bytes(self, i: int) -> bytes:
        """The bytes of a token; one with a character outside the byte alphabet stands for its own spelling."""
        token = self.tokens[i]
        try:
            return token.translate(_TO_LATIN).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode("utf-8")

    def drops_space(self, i: int) -> bool:
        """Whether the token loses a space at the start of a text: never."""
        return False

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Spelling -> id of the tokens that are matched as a whole."""
        return {self.tokens[i]: i for i in self.added}

    def gguf_metadata(self) -> dict[str, Any]:
        """The `tokenizer.ggml.*` arrays; a pre-tokenizer that GGUF has no name for comes as its JSON besides."""
        out = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "joyai-llm",
            "tokenizer.ggml.tokens": list(self.tokens),
            "tokenizer.ggml.token_type": [3 if self.added.get(i) else 1 for i in range(len(self.tokens))],
            "tokenizer.ggml.merges": [f"{left} {right}" for left, right in self.merges],
        }
        if not _same_splits(self.splits, JOYAI):
            out["tokenizer.huggingface.json"] = json.dumps(self.to_json(), ensure_ascii=False)
        return out

    def to_json(self) -> dict[str, Any]:
        """The content of a `tokenizer.json` that gives the same ids."""
        base = len(self.tokens)
        while base and base - 1 in self.added:
            base -= 1
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": self.tokens[i], **flags, "special": special} for i, special in self.added.items()
            ],
            "normalizer": None,
            "pre_tokenizer": self.splits,
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": dict(zip(self.tokens[:base], range(base), strict=True)),
                "merges": [list(pair) for pair in self.merges],
            },
        }


def from_gguf(metadata: Mapping[str, Any]) -> ByteBPE:
    """From `tokenizer.ggml.tokens`, `merges` and `token_type`.

    A token is an added one if it is neither a byte of the alphabet nor the join of a merge; `token_type` 3 only says
    which of them are special. A `tokenizer.huggingface.json` beside them must list the same tokens and then says how
    text is split.
    """
    pre = metadata.get("tokenizer.ggml.pre")
    if pre != "joyai-llm":
        raise TokenizerError(
            f"Found the pre-tokenizer {_show(pre)}; expected 'joyai-llm', use a file of DeepSeek V4.1."
        )
    tokens = string_list(metadata, "tokenizer.ggml.tokens")
    known = set(tokens)
    merges = []
    for rank, merge in enumerate(string_list(metadata, "tokenizer.ggml.merges")):
        pair = tuple(merge.split(" "))
        if len(pair) != 2 or pair[0] not in known or pair[1] not in known or pair[0] + pair[1] not in known:
            raise TokenizerError(
                f"Found {_show(merge)} as merge {rank}; expected two tokens with one space between them whose join "
                "is a token too: the file is damaged."
            )
        merges.append(pair)
    kinds = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())]
    if len(kinds) != len(tokens):
        raise TokenizerError(f"Found {len(kinds)} token types for {len(tokens)} tokens; expected one for each.")
    made = {left + right for left, right in merges}
    added = {i: kinds[i] == 3 for i, token in enumerate(tokens) if token not in made and token not in BYTE_OF}
    document = metadata.get("tokenizer.huggingface.json")
    if document is None:
        return ByteBPE(tokens, merges, added)
    model = from_json(document, "tokenizer.huggingface.json")
    if model.tokens != ByteBPE(tokens, merges, added).tokens:
        raise TokenizerError(
            "Found different tokens in tokenizer.huggingface.json and tokenizer.ggml.tokens; they must agree."
        )
    return model


def from_json(text: str | bytes, name: str) -> ByteBPE:
    """From the text of a `tokenizer.json`, called `name` in errors: byte-level BPE without a normalizer."""
    try:
        data = json.loads(text)
        return _from_json(data)
    except TokenizerError as error:
        raise TokenizerError(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name} is not JSON ({_line(error)}); copy the file again.") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{name} lacks a part or has one of another type ({_line(error)}).") from None


def _from_json(data: dict[str, Any]) -> ByteBPE:
    model, splits = data["model"], data["pre_tokenizer"]
    if model.get("type") != "BPE" or (data.get("decoder") or {}).get("type") != "ByteLevel":
        raise TokenizerError("Found no byte-level BPE; other kinds are read from a SentencePiece tokenizer.model.")
    options = (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    )
    used = [option for option in options if model.get(option)]
    normalizer = data.get("normalizer")
    if normalizer and normalizer.get("normalizers", True):
        used.append("normalizer")
    steps = splits.get("pretokenizers", [splits])
    if steps[-1:] and steps[-1].get("add_prefix_space"):
        used.append("add_prefix_space")
    flags = ("single_word", "lstrip", "rstrip")
    used += sorted({flag for token in data.get("added_tokens", []) for flag in flags if token.get(flag)})
    if used:
        raise TokenizerError(
            f"Found the option {used[0]}, which DeepSeek's tokenizers do not use and is not implemented."
        )
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise TokenizerError("Found a pre-tokenizer that does not end with ByteLevel; expected byte-level BPE.")
    added = {token["id"]: token for token in data.get("added_tokens", [])}
    spellings = {i: token for token, i in model["vocab"].items()}
    spellings.update({i: token["content"] for i, token in added.items()})
    missing = next((i for i in range(len(spellings)) if not isinstance(spellings.get(i), str)), None)
    if missing is not None:
        raise TokenizerError(f"Found no token with id {missing}; expected ids from 0 on without a gap.")
    tokens = [spellings[i] for i in range(len(spellings))]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    return ByteBPE(tokens, merges, {i: bool(token.get("special")) for i, token in added.items()}, splits)


def _same_splits(a: Any, b: Any) -> bool:
    """Whether two pre-tokenizers in JSON form split alike; offsets do not matter here."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_same_splits(a.get(key), b.get(key)) for key in {*a, *b} - {"trim_offsets"})
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_splits, a, b))
    return a == b


def string_list(metadata: Mapping[str, Any], key: str) -> list[str]:
    """The strings of a metadata array; raises TokenizerError when it is missing or holds anything else."""
    value = metadata.get(key)
    if value is None:
        raise TokenizerError(f"Found no {key}; this file carries no complete tokenizer.")
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise TokenizerError(f"Found something other than strings in {key}; the file is damaged.")
    return list(value)


def _show(value: Any) -> str:
    return f"{value!r:.60}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
