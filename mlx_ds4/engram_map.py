"""The token map of Engram: many ids to one, by what their texts have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mlx_ds4.tokenizer import Tokenizer


def engram_token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Maps every token id to its Engram id: int32 [vocab], numbered in order of first appearance.

    Two tokens share an id when their texts agree after compatibility normalization (NFKC, then NFD), removal of
    accents, lower case and reduction of white space: every run of space, tab, CR and LF is one space, a text that
    is exactly one space stays so, any other loses white space at its ends. A text of which nothing is left stands
    for itself; a token that is no complete UTF-8 stands for its spelling in the vocabulary.
    """
    from tokenizers import Regex, normalizers

    lone_space = "\ue000"
    normalize = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), lone_space),
            normalizers.Strip(),
            normalizers.Replace(lone_space, " "),
        ]
    ).normalize_str
    numbers: dict[str, int] = {}
    out = np.empty(tokenizer.vocab_size, np.int32)
    for i in range(tokenizer.vocab_size):
        text = tokenizer.id_to_bytes(i).decode("utf-8", "replace")
        key = tokenizer.id_to_token(i) if "\ufffd" in text else normalize(text) or text
        out[i] = numbers.setdefault(key, len(numbers))
    return out
