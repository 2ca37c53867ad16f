"""All state of a batch of sequences: window rows, compressed rows, index keys, open groups, n-gram history.

The cache is a sequence of `LayerCache`, one per layer, plus the position and the n-gram history; mlx-lm's
loops can drive it (`[c.state for c in cache]`). Arrays are replaced, never changed in place, so `copy()` costs
references only, and a step makes new arrays of fixed small shapes only: rings, which hold position p in slot
p % size, and the recent part of the compressed rows. Rings keep what a rewind of `REWIND` positions needs, so `trim(n)`
takes back the last steps exactly: as if they had never been run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels._rows import SplitRows
from mlx_ds4.custom_kernels.compress import PENDING

# Positions that can be taken back; a verification step has at most six rows.
REWIND = 8
# How prompts are run: all rows through all layers, or decoder layers over the last rows only (`Model.forward`).
PREFILL_MODES = ("exact", "replay")
# Rows of the part of a growing cache that a step rewrites; half of them move to the old part when it is full.
RECENT = 512
_CAPACITY_STEP = 8192


class GrowingRows:
    """Rows of one layer that only grow, as `SplitRows`: at least the last `REWIND` stay in the part that steps write.

    `length` rows count. Rows from `base` on lie in `recent`; the old part is copied only when rows move into it.
    """

    def __init__(self, width: int) -> None:
        self.old: mx.array | None = None
        self.recent: mx.array | None = None
        self.base = self.length = 0
        self._marks: tuple[mx.array, mx.array] | None = None
        self._width = width

    @property
    def places(self) -> tuple[int, int]:
        """`base`, and the slot of the next row in `recent`."""
        return self.base, self.length - self.base

    @property
    def marks(self) -> tuple[mx.array, mx.array]:
        """`places` at the last `begin` or `append` as kernels read them, int32 [1] each: made at the first use behind
        it, which is before a `put`."""
        if self._marks is None:
            self._marks = tuple(mx.array([place], dtype=mx.int32) for place in self.places)
        return self._marks

    @property
    def split(self) -> SplitRows:
        return SplitRows(self.old, self.recent, self.marks[0])

    def bind(self, marks: tuple[mx.array, mx.array]) -> None:
        """Sets the `marks`, which a traced step has as its own arrays."""
        self._marks = marks

    def begin(self, batch: int, room: int) -> None:
        """Before a step: makes the arrays, and room in `recent` for so many rows, at most `REWIND`."""
        if self.recent is None:
            self.old = mx.zeros((batch, _capacity(1), self._width), dtype=mx.bfloat16)
            self.recent = mx.zeros((batch, RECENT, self._width), dtype=mx.bfloat16)
        if self.length - self.base + room > RECENT:
            self._move(self.recent[:, : self.length - self.base], self.length)
        self._marks = None

    def put(self, recent: mx.array, count: int) -> None:
        """After a short step: `recent` with `count` rows more."""
        self.recent = recent
        self.length += count

    def append(self, rows: mx.array) -> None:
        """Adds rows [B, n, D] behind the last one."""
        if rows.shape[1] == 0:
            return
        if self.recent is None:
            self.begin(rows.shape[0], 0)
        live = mx.concatenate([self.recent[:, : self.length - self.base], rows], axis=1)
        self._move(live, self.length + rows.shape[1])
        self._marks = None

    def _move(self, live: mx.array, length: int) -> None:
        """Makes `live` the rows from `base` to `length`; all but the last become old ones if `recent` would be full."""
        moved = live.shape[1] - RECENT // 2 if live.shape[1] > RECENT - REWIND else 0
        if moved:
            short = self.base + moved - self.old.shape[1]
            if short > 0:
                extra = _capacity(self.base + moved) - self.old.shape[1]
                self.old = mx.pad(self.old, [(0, 0), (0, extra), (0, 0)])
            self.old = mx.slice_update(self.old, live[:, :moved], mx.array([self.base]), axes=(1,))
            self.base += moved
        kept = live[:, moved:]
        self.recent = mx.pad(kept, [(0, 0), (0, RECENT - kept.shape[1]), (0, 0)])
        self.length = length

    @property
    def rows(self) -> mx.array:
        """The live rows [B, length, D], copied."""
        if self.recent is None:
            raise ValueError("the cache holds no compressed rows yet, expected a step of their source layer first")
        return mx.concatenate([self.old[:, : self.base], self.recent[:, : self.length - self.base]], axis=1)


class LayerCache:
    """State of one layer. Layers that own no compressed rows leave those parts empty.

    `window` bfloat16 [B, sliding window + REWIND, D] and `pending` float32 [B, 2, 16, D] (values and gates of the
    compressor, for pairs that are still open) are rings. `begin` goes before each step.
    """

    def __init__(self, config: ModelConfig, layer: int):
        c, owner = config, config.owns_kv(layer)
        self.window: mx.array | None = None
        self.pending: mx.array | None = None
        self.compressed = GrowingRows(c.head_dim) if owner else None
        self.index_keys = GrowingRows(c.index_head_dim) if owner else None
        self._sizes = (c.sliding_window, c.head_dim)
        self._ratio = c.ratio(layer)

    def begin(self, batch: int, start: int, length: int) -> None:
        """Before a step of `length` positions from `start` on."""
        if self.window is None:
            span, width = self._sizes
            self.window = mx.zeros((batch, span + REWIND, width), dtype=mx.bfloat16)
            if self.compressed is not None and self._ratio == 2:
                self.pending = mx.zeros((batch, 2, PENDING, width))
        if self.compressed is not None:
            # A long step appends; a short one writes in place.
            room = (start + length) // self._ratio - start // self._ratio if length <= REWIND else 0
            self.compressed.begin(batch, room)
            self.index_keys.begin(batch, room)

    def extend(self, rows: mx.array, start: int) -> mx.array:
        """For a long step: the rows of the positions before `start` that it can see, then `rows` [B, n, D]; the ring
        keeps the newest."""
        size, span = self.window.shape[1], self._sizes[0]
        first = max(0, start - (span - 1))
        end = start + rows.shape[1]
        if first < start:
            before = mx.take(self.window, mx.array(np.arange(first, start) % size), axis=1)
            rows = mx.concatenate([before, rows], axis=1)
        kept = np.arange(max(first, end - size), end)
        place = np.zeros(size, dtype=np.int32)
        place[kept % size] = kept - first
        self.window = mx.take(rows, mx.array(place), axis=1)
        return rows

    def trim(self, offset: int) -> None:
        """Takes back the positions from `offset` on: rings need nothing, a position finds its own slot."""
        for rows in (self.compressed, self.index_keys):
            if rows is not None:
                rows.length = offset // self._ratio

    @property
    def inputs(self) -> list[mx.array]:
        """What a short step reads, in the order that `twin` takes; `GrowingRows.marks` come with the step."""
        arrays = [self.window]
        if self.compressed is not None:
            arrays += [self.compressed.old, self.compressed.recent, self.index_keys.old, self.index_keys.recent]
        return arrays if self.pending is None else [*arrays, self.pending]

    def twin(self, inputs: list[mx.array], marks: Callable[[int], tuple[mx.array, mx.array]]) -> LayerCache:
        """A cache of these arrays, for a step that is traced; `marks` of the compressed rows of a ratio."""
        other = copy.copy(self)
        other.window = inputs[0]
        other.pending = inputs[5] if len(inputs) > 5 else None
        if self.compressed is not None:
            other.compressed, other.index_keys = copy.copy(self.compressed), copy.copy(self.index_keys)
            other.compressed.old, other.compressed.recent, other.index_keys.old, other.index_keys.recent = inputs[1:5]
            for rows in (other.compressed, other.index_keys):
                rows.bind(marks(self._ratio))
        return other

    @property
    def outputs(self) -> list[mx.array]:
        """What a short step has made anew, in the order that `take` takes."""
        arrays = [self.window]
        if self.compressed is not None:
            arrays += [self.compressed.recent, self.index_keys.recent]
        return arrays if self.pending is None else [*arrays, self.pending]

    def take(self, outputs: list[mx.array], entries: tuple[int, ...]) -> None:
        """Takes over the `outputs` of a twin, in a step that completes entries[r - 1] of compression ratio r."""
        self.window = outputs[0]
        if self.compressed is not None:
            self.compressed.put(outputs[1], entries[self._ratio - 1])
            self.index_keys.put(outputs[2], entries[self._ratio - 1])
        if self.pending is not None:
            self.pending = outputs[3]

    @property
    def state(self) -> list[mx.array]:
        arrays = [self.window, self.pending]
        arrays += [
            a for rows in (self.compressed, self.index_keys) if rows is not None for a in (rows.old, rows.recent)
        ]
        return [array for array in arrays if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)


class DraftRings:
    """The drafter's state of one sequence: what its stages see of the positions that the model has processed.

    `rows` bfloat16 [stages, n, D] are finished; the positions behind them wait as the taps of each step until a
    proposal needs them, so that serial steps cost no more than these. Both end at `offset`; the oldest are dropped when
    there are more than the window and `REWIND`.
    """

    def __init__(self, window: int):
        self.rows: mx.array | None = None
        self._waiting: list[Sequence[mx.array]] = []  # of each step its taps [m, C], oldest first
        self.offset = 0
        self.keep = window + REWIND

    def append(self, taps: Sequence[mx.array], end: int) -> None:
        """Adds the taps [m, C] of the last m positions before `end`; after a gap what was held is forgotten."""
        if end - len(taps[0]) != self.offset:
            self.rows, self._waiting = None, []
        waiting, first = [*self._waiting, taps], 0
        count = sum(len(some[0]) for some in waiting)
        if count >= self.keep:
            self.rows = None
        while (left := count - len(waiting[first][0])) >= self.keep:
            count, first = left, first + 1
        self._waiting = waiting[first:]
        self.offset = end

    @property
    def taps(self) -> mx.array | None:
        """The waiting taps side by side, [m, taps * C], of at most the window and `REWIND` positions."""
        if not self._waiting:
            return None
        every = [parts[0] if len(parts) == 1 else mx.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        return mx.concatenate(every, axis=-1)[-self.keep :]

    def finish(self, rows: mx.array) -> None:
        """Replaces the waiting taps by their rows [stages, m, D]."""
        rows = rows if self.rows is None else mx.concatenate([self.rows, rows], axis=1)
        self.rows, self._waiting = rows[:, -self.keep :], []

    def trim(self, offset: int) -> None:
        """Forgets the positions from `offset` on."""
        count = max(0, self.offset - offset)
        self.offset -= count
        waiting = list(self._waiting)
        while count and waiting:
            taps = waiting.pop()
            left = len(taps[0]) - count
            count = max(0, -left)
            if left > 0:
                waiting.append([tap[:left] for tap in taps])
        self._waiting = waiting
        if self.rows is not None and count:
            self.rows = self.rows[:, : self.rows.shape[1] - count]

    @property
    def nbytes(self) -> int:
        held = [tap for taps in self._waiting for tap in taps] + ([] if self.rows is None else [self.rows])
        return sum(array.nbytes for array in held)


class Cache:
    """State of a batch of equally long sequences.

    `offset` is the number of positions processed; `rewindable` how many of the last ones `trim` can take back.
    `rings` is the drafter's part, made by speculative decoding of one sequence. `prefill_mode` is fixed when the cache
    is made: state of mode "replay" is an approximation, and no step or copy turns one mode into the other. In it
    the windows of decoder layers hold the positions from `decoder_start` on; in "exact" state that stays 0.
    """

    def __init__(self, config: ModelConfig, prefill_mode: str = "exact"):
        check_prefill_mode(config, prefill_mode)
        self.config = config
        self.prefill_mode = prefill_mode
        self.decoder_start = 0
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

    def begin(self, batch: int, count: int) -> None:
        """Before a step of `count` positions: what it needs, as `LayerCache.begin`."""
        for layer in self.layers:
            layer.begin(batch, self.offset, count)

    def places(self) -> dict[int, tuple[int, int]]:
        """`GrowingRows.places` by compression ratio: all owners of a ratio take the same steps, so theirs agree."""
        found: dict[int, tuple[int, int]] = {}
        for number, layer in enumerate(self.layers):
            for rows in (layer.compressed, layer.index_keys):
                if rows is not None and found.setdefault(self.config.ratio(number), rows.places) != rows.places:
                    raise RuntimeError(f"layer {number} holds other rows than its cache: make it by steps of the model")
        return found

    def advance(self, count: int, ids: np.ndarray | None, decoder_rows: int | None = None) -> None:
        """Ends a step of `count` positions whose mapped n-gram ids are `ids` [B, count]; decoder layers ran over the
        last `decoder_rows` of them (default: all)."""
        self.offset += count
        if decoder_rows is not None and decoder_rows < count:
            self.decoder_start = self.offset - decoder_rows
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
        self.decoder_start = min(self.decoder_start, self.offset)
        for layer in self.layers:
            layer.trim(self.offset)
        if self.history is not None:
            self.history = self.history[:, : self.history.shape[1] - count]
        if self.rings is not None:
            self.rings.trim(self.offset)
        return count

    def missing_rows(self, kept: int, count: int) -> int:
        """How many positions decoder layers would lack if `count` new ones followed the first `kept` of this cache:
        at the end they must have run over the last `config.replay_rows`, or over all there are."""
        want = min(self.config.replay_rows, kept + count)
        return max(0, want - count - max(0, kept - self.decoder_start))

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


def check_prefill_mode(config: ModelConfig, prefill_mode: str) -> None:
    """Raises ValueError for a mode that does not exist, or that the model has no layers for."""
    if prefill_mode not in PREFILL_MODES:
        raise ValueError(f"prefill_mode is {prefill_mode!r}, expected one of {', '.join(map(repr, PREFILL_MODES))}")
    if prefill_mode == "replay" and config.first_decoder_layer is None:
        raise ValueError("prefill_mode is 'replay', but this model has no KV source layer to cut at: use 'exact'")


def _capacity(rows: int) -> int:
    """Rows of an old part that holds so many: with the recent part a power of two, then whole steps, which is what a
    row of scores is wide (top-k takes 16,384 in one launch)."""
    wide = rows + RECENT
    if wide > _CAPACITY_STEP:
        return -(-wide // _CAPACITY_STEP) * _CAPACITY_STEP - RECENT
    return (1 << (wide - 1).bit_length()) - RECENT
