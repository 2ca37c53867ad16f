"""A small byte-level BPE with the released special tokens, for models made from random numbers."""

from __future__ import annotations

from mlx_ds4.byte_bpe import ByteBPE, byte_alphabet
from mlx_ds4.tokenizer import Tokenizer

_FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_LAST = (
    "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>",
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>",
    "<｜deepseek_image｜>",
)  # fmt: skip
_WORDS = (
    " the", " of", " and", " to", " in", " is", " that", " for", " it", " with", " as", " was", " on", " are", " be",
    " this", " have", " from", " or", " not", " by", " you", " which", " one", " can", " model", " token", " time",
    "ing", "tion", "er", "ed", "ly", "ment", "The", "What", " what", " how", " new", " more", " word", " number",
    " read", " write", " layer", " memory", " question", " answer", " because", " between", " should", " would",
)  # fmt: skip
SMALLEST = 256 + len(_FIRST) + len(_LAST)


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens.

    Ids 0, 1, 2 are begin, end and pad; then the 256 bytes, merges, and the role and task tokens at the
    top. ValueError when the vocabulary is smaller than bytes and special tokens need.
    """
    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size is {vocab_size}, a byte-level tokenizer needs at least {SMALLEST}")
    merges = _merges(byte_alphabet(), vocab_size - SMALLEST)
    tokens = [*_FIRST, *sorted(byte_alphabet()), *("".join(pair) for pair in merges), *_LAST]
    last = range(vocab_size - len(_LAST), vocab_size)
    vocabulary = ByteBPE(tokens, merges, {**dict.fromkeys(range(3), True), **dict.fromkeys(last, False)})
    return Tokenizer(vocabulary, {"bos": 0, "eos": 1, "pad": 2})


def _merges(alphabet: list[str], wanted: int) -> list[tuple[str, str]]:
    """Distinct pairs whose products are new: the prefixes of some words, then letters added to letters."""
    known = set(alphabet)
    pairs: list[tuple[str, str]] = []

    def add(left: str, right: str) -> None:
        if len(pairs) < wanted and left + right not in known:
            known.add(left + right)
            pairs.append((left, right))

    for word in _WORDS:
        letters = [alphabet[byte] for byte in word.encode()]
        for end in range(1, len(letters)):
            add("".join(letters[:end]), letters[end])
    letters = [alphabet[byte] for byte in b"etaoinshrdlucmfwypvbgkqjxz"]
    grown = list(letters)
    for left in grown:  # grows while it is walked: products of two letters, then of three, ...
        if len(pairs) == wanted:
            break
        for right in letters:
            add(left, right)
            grown.append(left + right)
    return pairs
