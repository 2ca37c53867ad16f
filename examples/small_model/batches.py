"""Batches from a prepared folder: tokens, targets, and the Engram rows of the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_ds4.config import ModelConfig
from mlx_ds4.model.engram import engram_constants

_CUT_SHARE = 8  # one sequence in so many is a cut window


class Data:
    """The arrays of a prepared folder. ValueError when it holds no such thing."""

    def __init__(self, folder: Path):
        missing = [n for n in ("config.json", "token_map.npy", "tokens.npy") if not (folder / n).is_file()]
        if missing:
            raise ValueError(f"{folder}: lacks {', '.join(missing)}: run `prepare` first")
        self.config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
        self.token_map = np.load(folder / "token_map.npy")
        self.tokens, self.held, self.cut = (np.load(folder / f"{name}.npy") for name in ("tokens", "held", "cut"))
        self._hashes = dict(zip(self.config.engram_layer_ids, engram_constants(self.config), strict=True))

    def batch(self, seed: int, step: int, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets int32 [B, L] of one step: random places of the stream behind a begin token, and cut
        windows where they are long enough."""
        rng = np.random.default_rng([seed, step])
        cut = batch // _CUT_SHARE if length < self.cut.shape[1] else 0
        starts = rng.integers(0, len(self.tokens) - length, batch - cut)
        rows = [np.concatenate([[self.config.bos_token_id], self.tokens[s : s + length]]) for s in starts]
        rows += [self.cut[i, : length + 1] for i in rng.integers(0, len(self.cut), cut)]
        ids = np.stack(rows).astype(np.int32)
        return ids[:, :-1], ids[:, 1:]

    def held_batches(self, batch: int, length: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The held-back stream from its start, in sequences of `length` behind a begin token."""
        count = min(most * batch, (len(self.held) - 1) // length)
        rows = self.held[: count * length].reshape(count, length).astype(np.int32)
        ids = np.concatenate([np.full((count, 1), self.config.bos_token_id, np.int32), rows], axis=1)
        for start in range(0, count - batch + 1, batch):
            part = ids[start : start + batch]
            yield part[:, :-1], part[:, 1:]

    def rows(self, ids: np.ndarray) -> dict[int, mx.array]:
        """Engram layer -> table rows int32 [B, L, columns] of sequences that start here."""
        mapped = self.token_map[ids]
        return {
            layer: mx.array(hashing.row_numbers(mapped, ids.shape[1]).astype(np.int32))
            for layer, hashing in self._hashes.items()
        }
