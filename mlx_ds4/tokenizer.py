"""Text to token ids and back, for the byte-level BPE of DeepSeek V4.1 and for SentencePiece models.

`Tokenizer` matches the special spellings itself and leaves the text between them to one of two vocabularies
(`byte_bpe.py`, `sentencepiece_file.py`). That is what lets a message be encoded as mere text next to control tokens.
Decoding joins the bytes of the tokens, so that it never depends on neighbours except inside one character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_ds4 import byte_bpe, chat, sentencepiece_file
from mlx_ds4.byte_bpe import ByteBPE, TokenizerError
from mlx_ds4.sentencepiece_file import SentencePiece

__all__ = ["StreamingDetokenizer", "Tokenizer", "TokenizerError"]

_MAX_FILE = 256 << 20
_DEEPSEEK = {"bos": chat.BOS, "eos": chat.EOS, "pad": "<｜▁pad▁｜>"}
_GGUF_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}


class Tokenizer:
    """A vocabulary with its begin, end and padding tokens; make one with `from_folder` or `from_gguf_metadata`.

    `eos_token_ids` is the set of ids that end a generation; a caller may add to it.
    """

    chat_template = None  # the conversation format is `chat.py`, not a template

    def __init__(self, vocabulary: ByteBPE | SentencePiece, ids: Mapping[str, int]) -> None:
        """`ids` maps bos, eos and pad to token ids; only eos must be there."""
        self._vocabulary = vocabulary
        for name, i in ids.items():
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(f"Found {name} token id {i}; expected one below {self.vocab_size}.")
        if "eos" not in ids:
            raise TokenizerError(f"Found no end token; name it in tokenizer_config.json (usually {chat.EOS}).")
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (ids.get(name) for name in ("bos", "eos", "pad"))
        self.eos_token_ids = {self.eos_token_id}
        special = [spelling for spelling in vocabulary.special_ids if spelling]
        self._lengths: dict[str, list[int]] = {}
        for spelling in sorted(special, key=len, reverse=True):
            lengths = self._lengths.setdefault(spelling[0], [])
            if not lengths or lengths[-1] != len(spelling):
                lengths.append(len(spelling))
        self._starts = re.compile("[" + re.escape("".join(self._lengths)) + "]") if special else None

    # ---------------------------------------------------------------------------------------- sources

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the `tokenizer.ggml.*` records of a GGUF, of model `gpt2` (pre-tokenizer joyai-llm) or `llama`.

        Raises TokenizerError for other kinds, missing records, and arrays that do not fit together.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise TokenizerError(f"Found tokenizer model {kind!r:.60}; expected 'gpt2' or 'llama'.")
        vocabulary: ByteBPE | SentencePiece
        try:
            vocabulary = byte_bpe.from_gguf(metadata) if kind == "gpt2" else sentencepiece_file.from_gguf(metadata)
            ids = {name: vocabulary.ids[text] for name, text in _DEEPSEEK.items() if text in vocabulary.ids}
            for name, key in _GGUF_IDS.items():
                if (value := metadata.get("tokenizer.ggml." + key)) is not None:
                    ids[name] = int(value)
        except TokenizerError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise TokenizerError(
                f"Found a tokenizer record of the wrong type ({error}); the file is damaged."
            ) from None
        return cls(vocabulary, ids)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a folder with a SentencePiece `tokenizer.model` or a byte-level BPE `tokenizer.json`.

        `tokenizer_config.json`, if there, names the begin, end and padding tokens; without it the SentencePiece
        model's own ids or DeepSeek's spellings count. Raises TokenizerError for missing or damaged files.
        """
        folder = Path(path)
        ids: dict[str, int] = {}
        vocabulary: ByteBPE | SentencePiece
        if (folder / "tokenizer.model").is_file():
            try:
                vocabulary, ids = sentencepiece_file.from_bytes(_read(folder / "tokenizer.model"))
            except TokenizerError as error:
                raise TokenizerError(f"{folder / 'tokenizer.model'}: {error}") from None
        elif (folder / "tokenizer.json").is_file():
            file = folder / "tokenizer.json"
            vocabulary = byte_bpe.from_json(_read(file), str(file))
            ids = {name: vocabulary.ids[text] for name, text in _DEEPSEEK.items() if text in vocabulary.ids}
        else:
            raise TokenizerError(
                f"{folder} holds neither tokenizer.json nor tokenizer.model; copy one beside the weights."
            )
        if (folder / "tokenizer_config.json").is_file():
            ids.update(_named_ids(folder / "tokenizer_config.json", vocabulary))
        return cls(vocabulary, ids)

    def save(self, folder: str | Path) -> None:
        """Writes the vocabulary (`tokenizer.json` or `tokenizer.model`) and `tokenizer_config.json`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self._vocabulary, SentencePiece):
            (folder / "tokenizer.model").write_bytes(self._vocabulary.to_bytes())
        else:
            text = json.dumps(self._vocabulary.to_json(), ensure_ascii=False)
            (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        ids = {"bos": self.bos_token_id, "eos": self.eos_token_id, "pad": self.pad_token_id}
        config = {
            "add_bos_token": False,
            "add_eos_token": False,
            **{f"{name}_token": self._vocabulary.tokens[i] for name, i in ids.items() if i is not None},
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def gguf_metadata(self) -> dict[str, Any]:
        """The `tokenizer.ggml.*` records of a GGUF, as plain lists, strings, numbers and bytes.

        `from_gguf_metadata` gives the same tokenizer back. Raises TokenizerError for a unigram SentencePiece model.
        """
        out = self._vocabulary.gguf_metadata()
        ids = {"bos": self.bos_token_id, "eos": self.eos_token_id, "pad": self.pad_token_id}
        out.update({"tokenizer.ggml." + _GGUF_IDS[name]: i for name, i in ids.items() if i is not None})
        return {**out, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": False}

    # ------------------------------------------------------------------------------------- vocabulary

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included."""
        return len(self._vocabulary.tokens)

    @property
    def bos_token(self) -> str | None:
        """The spelling of the begin token, or None."""
        return None if self.bos_token_id is None else self._vocabulary.tokens[self.bos_token_id]

    @property
    def eos_token(self) -> str:
        """The spelling of the end token."""
        return self._vocabulary.tokens[self.eos_token_id]

    def get_vocab(self) -> dict[str, int]:
        """Spelling to id, for every token."""
        return dict(self._vocabulary.ids)

    def token_id(self, text: str) -> int | None:
        """The id of the token with this spelling, or None."""
        return self._vocabulary.ids.get(text)

    def id_to_token(self, i: int) -> str:
        """The token's spelling in the vocabulary (with the byte alphabet or `▁` where those are used)."""
        return self._vocabulary.tokens[self._known(i)]

    def id_to_bytes(self, i: int) -> bytes:
        """The bytes for which a token stands, special tokens with their spelling."""
        return self._vocabulary.piece_bytes(self._known(i))

    def _known(self, i: int) -> int:
        if not 0 <= i < self.vocab_size:
            raise TokenizerError(f"Found token id {i}; expected 0 to {self.vocab_size - 1}.")
        return i

    # --------------------------------------------------------------------------------------- encoding

    def encode(self, text: str, *, add_special_tokens: bool = False, allow_special: bool = True) -> list[int]:
        """The ids of `text`.

        add_special_tokens: put the begin token first, unless the text begins with it.
        allow_special: match the spellings of added tokens; with False they are ordinary text.
        Raises TokenizerError for text that is no Unicode (single surrogates).
        """
        ids = self.encode_segments([(text, allow_special)])
        if add_special_tokens and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """The ids of consecutive (text, whether special spellings count); ordinary text merges across segments."""
        ids: list[int] = []
        plain: list[str] = []
        first = True

        def flush() -> None:
            nonlocal first
            text = "".join(plain)
            plain.clear()
            if text:
                ids.extend(self._vocabulary.encode_plain(_unicode(text), first))
                first = False

        for text, allow_special in segments:
            for piece in self._pieces(text) if allow_special else [text]:
                if isinstance(piece, str):
                    plain.append(piece)
                else:
                    flush()
                    ids.append(piece)
        flush()
        return ids

    def _pieces(self, text: str) -> Iterator[str | int]:
        """Ordinary text and the ids of special spellings, in order; at each place the longest spelling wins."""
        special, done = self._vocabulary.special_ids, 0
        for match in self._starts.finditer(text) if self._starts else ():
            start = match.start()
            if start < done:
                continue
            for length in self._lengths[text[start]]:
                i = special.get(text[start : start + length])
                if i is not None:
                    yield text[done:start]
                    yield i
                    done = start + length
                    break
        yield text[done:]

    def apply_chat_template(
        self,
        messages: Sequence[chat.Message],
        *,
        tools: Sequence[chat.Message] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        thinking_mode: str = "chat",
        reasoning_effort: str | int | None = None,
        drop_thinking: bool = True,
        context: Sequence[chat.Message] | None = None,
        add_bos: bool = True,
    ) -> list[int] | str:
        """The prompt of a conversation, as ids or (tokenize=False) as text; the options are those of `chat.render`.

        In the ids, special spellings inside messages and schemas are ordinary text: no message can forge a role.
        Raises ChatError for bad messages, TokenizerError when the vocabulary lacks a control token that is needed.
        """
        prompt = chat.render(
            messages,
            thinking_mode=thinking_mode,
            reasoning_effort=reasoning_effort,
            drop_thinking=drop_thinking,
            context=context,
            add_bos=add_bos,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
        )
        if not tokenize:
            return prompt.text
        control = [text for text, is_control in prompt.segments if is_control]
        for token in chat.CONTROL_TOKENS:
            if token not in self._vocabulary.special_ids and any(token in text for text in control):
                raise TokenizerError(
                    f"Found no token {token}; this vocabulary cannot hold conversations, encode raw text."
                )
        return self.encode_segments(prompt.segments)

    # --------------------------------------------------------------------------------------- decoding

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens with their spelling.

        Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary stand for nothing.
        """
        out, first = [], True
        for i in ids:
            data, first = self.next_bytes(int(i), first)
            out.append(data)
        return b"".join(out).decode("utf-8", "replace")

    def next_bytes(self, i: int, first: bool) -> tuple[bytes, bool]:
        """The bytes of one id of a sequence, and whether the next one would still be the first ordinary text."""
        if not 0 <= i < self.vocab_size:
            return b"", first
        data = self._vocabulary.piece_bytes(i)
        if self._vocabulary.tokens[i] in self._vocabulary.special_ids:
            return data, first
        return data[1:] if first and self._vocabulary.drops_space(i) else data, False

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """A new streaming detokenizer."""
        return StreamingDetokenizer(self)


class StreamingDetokenizer:
    """Text from ids that come one at a time, with the interface of mlx_lm's detokenizers.

    What has been given out is never taken back: bytes of an unfinished character are held until it is complete or
    cannot be completed. After `finalize`, `text` equals `decode(tokens)`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Starts a new text."""
        self.tokens: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._parts: list[str] = []
        self._read = 0  # parts given out by last_segment

    def add_token(self, token: int) -> None:
        """Takes the next id; ids outside the vocabulary add no text."""
        self.tokens.append(token)
        data, self._first = self._tokenizer.next_bytes(int(token), self._first)
        self._parts.append(self._decoder.decode(data))

    def finalize(self) -> None:
        """Ends the text: bytes of a character that never became complete turn into U+FFFD."""
        self._parts.append(self._decoder.decode(b"", final=True))

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)

    @property
    def last_segment(self) -> str:
        """The text that is new since this was read last."""
        segment = "".join(self._parts[self._read :])
        self._read = len(self._parts)
        return segment


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"Found half of a surrogate pair at character {error.start}; pass valid Unicode."
        ) from None
    return text


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > _MAX_FILE:
            raise TokenizerError(f"{file} has more than {_MAX_FILE >> 20} MiB; this is no tokenizer file.")
        return file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read ({error.strerror}).") from None


def _named_ids(file: Path, vocabulary: ByteBPE | SentencePiece) -> dict[str, int]:
    """The ids of the tokens that a `tokenizer_config.json` names."""
    try:
        config = json.loads(_read(file))
        out = {}
        for name in _DEEPSEEK:
            token = config.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                if token not in vocabulary.ids:
                    raise TokenizerError(f"{file}: the {name} token {token!r:.60} is not in the vocabulary.")
                out[name] = vocabulary.ids[token]
        return out
    except TokenizerError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise TokenizerError(f"{file} is no JSON object that names tokens; copy it again.") from None
