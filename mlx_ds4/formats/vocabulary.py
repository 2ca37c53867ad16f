"""The vocabulary inside a GGUF file: consistency of tokens, token types and merges."""

from __future__ import annotations

import numpy as np

from mlx_ds4.formats.gguf_header import show
from mlx_ds4.formats.metadata_reader import MetadataReader


def byte_alphabet() -> list[str]:
    """The 256 characters by which GPT-2 vocabularies spell bytes, in the order of the bytes."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + rest.index(byte)) for byte in range(256)]


def check_tokenizer(reader: MetadataReader) -> None:
    """Checks every `tokenizer.ggml.*` array of a byte-level BPE ("gpt2") or SentencePiece ("llama") vocabulary.

    Raises FormatError through `reader`; missing byte tokens are a warning.
    """
    vocab = reader.value("deepseek41.vocab_size", "u32")
    model = reader.value("tokenizer.ggml.model", "string")
    if model not in ("gpt2", "llama"):
        reader.fail(f"tokenizer.ggml.model is {show(model)}, expected 'gpt2' (or 'llama', SentencePiece)")
    tokens = reader.value("tokenizer.ggml.tokens", "[string]")
    if len(tokens) != vocab:
        reader.fail(f"tokenizer.ggml.tokens has {len(tokens)} entries, expected vocab_size {vocab}")
    known = set(tokens)
    if len(known) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        reader.fail(f"tokenizer.ggml.tokens holds {show(twice)} twice, expected different tokens")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        wrong = next(i for i, token in enumerate(tokens) if any(0xD800 <= ord(c) < 0xE000 for c in token))
        reader.fail(f"token {wrong} of tokenizer.ggml.tokens is not UTF-8: the file is damaged")
    kinds = reader.value("tokenizer.ggml.token_type", "[i32]")
    if len(kinds) != vocab:
        reader.fail(f"tokenizer.ggml.token_type has {len(kinds)} entries, expected vocab_size {vocab}")
    allowed = (1, 3) if reader.strict else range(1, 7)
    if len(unknown := np.setdiff1d(kinds, list(allowed))):
        reader.fail(f"tokenizer.ggml.token_type holds {int(unknown[0])}, expected one of {list(allowed)}")
    for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"):
        value = reader.value(key, "u32")
        if not 0 <= value < vocab:
            reader.fail(f"{key} is {value}, expected a token below {vocab}")
    if model == "gpt2":
        pre = reader.value("tokenizer.ggml.pre", "string")
        if pre != "joyai-llm":
            reader.fail(f"tokenizer.ggml.pre is {show(pre)}, expected 'joyai-llm'")
        _check_merges(reader, known)


def _check_merges(reader: MetadataReader, known: set[str]) -> None:
    merges = reader.value("tokenizer.ggml.merges", "[string]")
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            reader.fail(f"merge {rank} of tokenizer.ggml.merges is {show(merge)}, expected two parts and one space")
        if left not in known or right not in known or left + right not in known:
            reader.fail(f"merge {rank} of tokenizer.ggml.merges is {show(merge)}, expected parts and join to be tokens")
    alphabet = byte_alphabet()
    if foreign := set("".join(merges)) - {*alphabet, " "}:
        reader.fail(f"tokenizer.ggml.merges uses {show(min(foreign))}, expected only the 256 characters of bytes")
    if missing := sum(char not in known for char in alphabet):
        reader.warnings.append(f"{missing} of the 256 byte tokens are missing, some text cannot be encoded")
