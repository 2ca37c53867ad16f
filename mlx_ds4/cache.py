"""All state of a batch of sequences: window rows, compressed rows, index keys, open groups, n-gram history.

The cache is a sequence of `LayerCache`, one per layer, plus the position and the n-gram history; mlx-lm's
loops can drive it (`[c.state for c in cache]`). Arrays are replaced, never changed in place, so `copy()` costs
references only. Every layer keeps `REWIND` rows more than attention needs, so that `trim(n)` takes back
the last steps exactly: as if they had never been run.
"""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np

from mlx_ds4.config import ModelConfig

# Positions that can be taken back; a verification step has at most six rows.
REWIND = 8
_FIRST_CAPACITY = 256
_CAPACITY_STEP = 8192


class GrowingRows:
    """Rows [B, capacity, D] of which the first `length` count; capacity grows in steps, not per row."""

    def __init__(self) -> None:
        self.data: mx.array | None = None
        self.length = 0

    def append(self, rows: mx.array) -> None:
        """Adds rows [B, n, D] behind the last one."""
        count = rows.shape[1]
        if count == 0:
            return
        need = self.length + count
        if self.data is None:
            self.data = mx.zeros((rows.shape[0], _capacity(need), rows.shape[2]), dtype=rows.dtype)
        elif need > self.data.shape[1]:
            extra = _capacity(need) - self.data.shape[1]
            self.data = mx.pad(self.data, [(0, 0), (0, extra), (0, 0)])
        self.data = mx.slice_update(self.data, rows, mx.array([self.length]), axes=(1,))
        self.length = need

    @property
    def rows(self) -> mx.array:
        """The live rows [B, length, D]."""
        if self.data is None:
            raise ValueError("the cache holds no compressed rows yet, expected a step of their source layer first")
        return self.data[:, : self.length]


class LayerCache:
    """State of one layer. Layers that own no compressed rows leave those parts empty."""

    def __init__(self, config: ModelConfig, layer: int):
        owner = config.owns_kv(layer)
        self.window: mx.array | None = None  # bfloat16 [B, last positions, D], oldest first
        self.compressed = GrowingRows() if owner else None
        self.index_keys = GrowingRows() if owner else None
        # float32 compressor rows (value, gate) of the last positions, for groups that are still open.
        self.recent: tuple[mx.array, mx.array] | None = None
        self._window_keep = config.sliding_window - 1 + REWIND
        self._ratio = config.ratio(layer)

    def store_window(self, rows: mx.array) -> None:
        """Keeps the newest rows of [B, n, D] (old window followed by the step's rows)."""
        self.window = rows[:, -self._window_keep :]

    def store_recent(self, values: mx.array, gates: mx.array) -> None:
        self.recent = (values[:, -(REWIND + 1) :], gates[:, -(REWIND + 1) :])

    def trim(self, count: int, offset: int) -> None:
        """Takes back `count` positions of which `offset` remain."""
        if self.window is not None:
            self.window = self.window[:, : self.window.shape[1] - count]
        if self.recent is not None:
            values, gates = self.recent
            self.recent = (values[:, : values.shape[1] - count], gates[:, : gates.shape[1] - count])
        for rows in (self.compressed, self.index_keys):
            if rows is not None:
                rows.length = offset // self._ratio

    @property
    def state(self) -> list[mx.array]:
        arrays = [self.window, *(self.recent or ())]
        arrays += [rows.data for rows in (self.compressed, self.index_keys) if rows is not None]
        return [array for array in arrays if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)


class DraftRings:
    """The drafter's state of one sequence: what its stages see of the positions that the model has processed.

    `rows` bfloat16 [stages, n, D] are finished; the positions behind them wait as taps, bfloat16 [m, C], until a
    proposal needs them, so that serial steps cost nothing. Both end at `offset`; the oldest are dropped when
    there are more than the window and `REWIND`.
    """

    def __init__(self, window: int):
        self.rows: mx.array | None = None
        self.taps: mx.array | None = None
        self.offset = 0
        self.keep = window + REWIND

    def append(self, taps: mx.array, end: int) -> None:
        """Adds the taps [m, C] of the last m positions before `end`; after a gap what was held is forgotten."""
        if end - len(taps) != self.offset:
            self.rows = self.taps = None
        self.taps = (taps if self.taps is None else mx.concatenate([self.taps, taps]))[-self.keep :]
        if len(self.taps) == self.keep:
            self.rows = None
        self.offset = end

    def finish(self, rows: mx.array) -> None:
        """Replaces the waiting taps by their rows [stages, m, D]."""
        rows = rows if self.rows is None else mx.concatenate([self.rows, rows], axis=1)
        self.rows, self.taps = rows[:, -self.keep :], None

    def trim(self, offset: int) -> None:
        """Forgets the positions from `offset` on."""
        count = max(0, self.offset - offset)
        waiting = 0 if self.taps is None else len(self.taps)
        self.offset -= count
        if self.taps is not None:
            self.taps = self.taps[: waiting - count] if count < waiting else None
        if self.rows is not None and count > waiting:
            self.rows = self.rows[:, : self.rows.shape[1] - (count - waiting)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.rows, self.taps) if array is not None)


class Cache:
    """State of a batch of equally long sequences.

    `offset` is the number of positions processed; `rewindable` how many of the last ones `trim` can take back.
    `rings` is the drafter's part, made by speculative decoding of one sequence.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.layers = [LayerCache(config, layer) for layer in range(config.num_hidden_layers)]
        self.offset = 0
        self.rewindable = 0
        # Mapped n-gram ids of the last positions, int64 [B, <= ngram - 1 + REWIND]; -1 marks a dead position.
        self.history: np.ndarray | None = None
        self.rings: DraftRings | None = None

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self):
        return iter(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def advance(self, count: int, ids: np.ndarray | None) -> None:
        """Ends a step of `count` positions whose mapped n-gram ids are `ids` [B, count]."""
        self.offset += count
        self.rewindable = min(REWIND, self.rewindable + count)
        if ids is not None:
            ids = ids if self.history is None else np.concatenate([self.history, ids], axis=1)
            self.history = ids[:, -(self.config.engram_max_ngram_size - 1 + REWIND) :]

    def trim(self, count: int) -> int:
        """Takes back the last `count` positions exactly and returns `count`.

        Raises ValueError when `count` is negative or above `rewindable`.
        """
        if not 0 <= count <= self.rewindable:
            raise ValueError(
                f"cannot take back {count} of {self.offset} positions, expected 0 to {self.rewindable}: "
                "start from an earlier copy of the cache"
            )
        self.offset -= count
        self.rewindable -= count
        for layer in self.layers:
            layer.trim(count, self.offset)
        if self.history is not None:
            self.history = self.history[:, : self.history.shape[1] - count]
        if self.rings is not None:
            self.rings.trim(self.offset)
        return count

    def is_trimmable(self) -> bool:
        return self.rewindable > 0

    def copy(self) -> Cache:
        """An independent cache of the same content; arrays are shared until a step replaces them."""
        other = copy.copy(self)
        other.layers = []
        for layer in self.layers:
            twin = copy.copy(layer)
            twin.compressed, twin.index_keys = copy.copy(layer.compressed), copy.copy(layer.index_keys)
            other.layers.append(twin)
        other.rings = copy.copy(self.rings)
        return other

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        rings = 0 if self.rings is None else self.rings.nbytes
        return sum(layer.nbytes for layer in self.layers) + rings


def _capacity(rows: int) -> int:
    if rows > _CAPACITY_STEP:
        return -(-rows // _CAPACITY_STEP) * _CAPACITY_STEP
    return max(_FIRST_CAPACITY, 1 << (rows - 1).bit_length())
