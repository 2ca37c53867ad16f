"""What the layers of one forward pass share: positions, rotary tables, the published selections."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import mlx.core as mx
import numpy as np

from mlx_ds4.cache import REWIND, LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels._kernel import TICKETS, tickets
from mlx_ds4.custom_kernels.rope import host_rope_table, rope_frequencies
from mlx_ds4.custom_kernels.step_values import Kind, step_values

Rotation = tuple[mx.array, mx.array]
# Of packed values: name, where it begins, its shape.
Layout = tuple[tuple[str, int, tuple[int, ...]], ...]
_ALIGNED = 4  # words: kernels may read 16 bytes at a time
Places = dict[int, tuple[int, int]]  # `GrowingRows.places` by compression ratio
_MARKS = ("base", "slot")  # their names in a layout


class Reach(IntEnum):
    """How the rows of a step choose among the compressed entries of a ratio."""

    NONE = 0  # there are none
    ALL = 1  # no more than top-k: every one that is visible
    TOP = 2  # the best ones
    BLOCKS = 3  # the best ones, among candidate blocks where a layer asks for them


@dataclass(frozen=True)
class StepShape:
    """All that a pass depends on beside its arrays: passes of one shape can share a compiled graph.

    `entries` and `reach` have one value for each compression ratio from 1 on.
    """

    length: int
    entries: tuple[int, ...]  # completed in this step
    reach: tuple[Reach, ...]

    @classmethod
    def of(cls, config: ModelConfig, start: int, length: int) -> StepShape:
        ratios = range(1, max(config.compress_ratios, default=0) + 1)
        ends = [(start // r, (start + length) // r) for r in ratios]
        reach = tuple(_reach(config, r, b) for r, (_, b) in zip(ratios, ends, strict=True))
        return cls(length, tuple(b - a for a, b in ends), reach)


def as_array(tokens: mx.array | np.ndarray) -> mx.array:
    """Token ids of the device or of the host, where the device may read them."""
    return mx.array(tokens.astype(np.int32)) if isinstance(tokens, np.ndarray) else tokens


def _reach(config: ModelConfig, ratio: int, total: int) -> Reach:
    if total == 0:
        return Reach.NONE
    if total <= config.index_topk:
        return Reach.ALL
    source = config.candidate_source_layer_id
    listed = 0 <= source < config.num_hidden_layers and config.ratio(source) == ratio
    many = -(-total // config.candidate_block_size) > config.candidate_topk_blocks
    return Reach.BLOCKS if listed and many else Reach.TOP


class Step:
    """One pass over `length` new positions that start at `start`.

    Layers publish here what later layers of the SAME pass read: the top-k list (`selection`), the candidate blocks
    (`candidates`) and the owner of the compressed rows (`source`). With a `trace` dict every module notes
    its intermediate arrays under `L<layer>.<name>`. What follows from the positions is computed on the host when first
    asked for; a compiled graph takes all of it as one array (`packed`, `unpack`), or makes it (`on_device`). Windows
    begin at position `seen_from` at the earliest. `places` are the cache's, for what is packed.
    """

    def __init__(
        self,
        config: ModelConfig,
        start: int,
        length: int,
        trace: dict[str, mx.array] | None = None,
        seen_from: int = 0,
        places: Places | None = None,
    ):
        self._set(config, StepShape.of(config, start, length), {}, trace)
        self.start = start
        self.positions = np.arange(start, start + length)
        self._seen_from = seen_from
        self._places = places
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @classmethod
    def traced(cls, config: ModelConfig, shape: StepShape, arrays: dict[str, mx.array]) -> Step:
        """A pass of this shape over the `packed` values of another; it knows no numbers."""
        step = cls.__new__(cls)
        step._set(config, shape, arrays, None)
        return step

    def tail(self, rows: int, seen_from: int) -> Step:
        """The pass of the decoder layers over the last `rows` positions, when the KV owner has published for all."""
        tail = Step(self.config, self.start + self.length - rows, rows, self._trace, seen_from)
        tail.source, tail.published = self.source, True
        if self.candidates is not None:
            tail.candidates = self.candidates[:, self.length - rows :]
        return tail

    def _set(
        self, config: ModelConfig, shape: StepShape, arrays: dict[str, mx.array], trace: dict[str, mx.array] | None
    ) -> None:
        self.config = config
        self.shape = shape
        self.length = shape.length
        self.selection: mx.array | None = None  # int32 [B, L, k], ascending, -1 = none
        self.candidates: mx.array | None = None  # int32 [B, L, blocks], ascending, -1 = none
        self.source: LayerCache | None = None
        self.published = False  # whether the owner has already added its entries: `Layer.publish`
        self.taps: list[mx.array] = []
        self.layer = 0
        self._trace = trace
        self._arrays = arrays

    def note(self, name: str, value: mx.array) -> None:
        if self._trace is not None:
            self._trace[f"L{self.layer}.{name}"] = value

    @property
    def traces(self) -> bool:
        """Whether notes are kept."""
        return self._trace is not None

    @property
    def short(self) -> bool:
        """Whether the step is one of decoding or verification, which writes into rings."""
        return self.length <= REWIND

    def entries(self, ratio: int) -> int:
        """Compressed entries that this step completes."""
        return self.shape.entries[ratio - 1]

    def reach(self, ratio: int) -> Reach:
        return self.shape.reach[ratio - 1]

    def layout(self, with_tokens: bool = False) -> Layout:
        """Where every value that a short step may ask for stands in `packed`; for `on_device`, also tokens [1, L]."""
        ratios = _ratios(self.config)
        turns = sorted({0, *([1] if ratios else []), *[r for r in ratios if self.entries(r)]})
        pairs = self.config.qk_rope_head_dim // 2
        shapes = {"at": (1,), "tickets": (TICKETS,), "window": (1, self.length, self.config.sliding_window)}
        shapes |= {f"visible {r}": (self.length,) for r in ratios}
        shapes |= {f"{name} {r}": (1,) for r in ratios for name in _MARKS}
        for r in turns:
            count = self.entries(r) if r > 1 else self.length
            shapes |= {f"cos {r}": (count, pairs), f"sin {r}": (count, pairs)}
        shapes |= {"tokens": (1, self.length)} if with_tokens else {}
        layout, end = [], 0
        for name, shape in shapes.items():
            layout.append((name, end, shape))
            end += -(-prod(shape) // _ALIGNED) * _ALIGNED
        return tuple(layout)

    @property
    def numbers(self) -> list[int]:
        """What the host alone knows: the start, and the places of each ratio's rows."""
        return [self.start, *(place for r in _ratios(self.config) for place in self._places[r])]

    def packed(self, layout: Layout) -> mx.array:
        """All these values, int32 [n]: made on the host."""
        name, begin, shape = layout[-1]
        words = np.zeros(begin + prod(shape), dtype=np.int32)
        for name, begin, shape in layout:
            words[begin : begin + prod(shape)] = self._value(name).reshape(-1).view(np.int32)
        return mx.array(words)

    def at(self) -> mx.array:
        """The position where the step starts, int32 [1]."""
        return self._array("at")

    def tickets(self) -> mx.array:
        """What the launches of this step count arrivals in, int32: each needs the results of the one before."""
        if "tickets" not in self._arrays:
            self._arrays["tickets"] = tickets()
        return self._arrays["tickets"]

    def marks(self, ratio: int) -> tuple[mx.array, mx.array]:
        """`GrowingRows.marks` of a ratio, from the `places`."""
        return tuple(self._array(f"{name} {ratio}") for name in _MARKS)

    def rotation(self, ratio: int) -> Rotation:
        """cos and sin of this step's positions for a layer of the given compression ratio."""
        return self._rotation(min(ratio, 1))

    def group_rotation(self, ratio: int) -> Rotation:
        """cos and sin of the entries completed in this step: entry j turns at position j * ratio."""
        return self._rotation(ratio)

    def visible(self, ratio: int) -> mx.array:
        """Compressed entries that each row may see, int32 [L]: those complete at its position."""
        return self._array(f"visible {ratio}")

    def window_list(self) -> mx.array:
        """Rows that each position sees in what its layer keeps of the last ones, int32 [1, L, W]: slots of the ring in
        a short step, rows of `LayerCache.extend` in a long one.

        Oldest first, padded with -1: a row at position p sees max(`seen_from`, p - W + 1) .. p.
        """
        return self._array("window")

    def _rotation(self, ratio: int) -> Rotation:
        return self._array(f"cos {ratio}"), self._array(f"sin {ratio}")

    def _array(self, name: str) -> mx.array:
        if name not in self._arrays:
            self._arrays[name] = mx.array(self._value(name))
        return self._arrays[name]

    def _value(self, name: str) -> np.ndarray:
        """What stands under a name, int32 or float32, from the positions."""
        what, _, ratio = name.partition(" ")
        if what == "at":
            return np.array([self.start], dtype=np.int32)
        if what == "tickets":
            return np.zeros(TICKETS, dtype=np.int32)
        if what == "visible":
            return ((self.positions + 1) // int(ratio)).astype(np.int32)
        if what in _MARKS:
            return np.array([self._places[int(ratio)][_MARKS.index(what)]], dtype=np.int32)
        if what == "window":
            return self._window_list()[None].astype(np.int32)
        return self._table(int(ratio))[what == "sin"]

    def _table(self, ratio: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin: 0, of plain layers; 1, of compressed ones; beyond, at the starts of completed groups."""
        if ratio not in self._tables:
            ends = np.arange(self.start // max(ratio, 1), (self.start + self.length) // max(ratio, 1))
            frequencies = layer_frequencies(self.config, ratio > 0)
            self._tables[ratio] = host_rope_table(ends * max(ratio, 1), frequencies)
        return self._tables[ratio]

    def _window_list(self) -> np.ndarray:
        width = self.config.sliding_window
        seen = np.maximum(self.positions - width + 1, self._seen_from)[:, None] + np.arange(width)
        rows = seen % (width + REWIND) if self.short else seen - max(0, self.start - (width - 1))
        return np.where(seen <= self.positions[:, None], rows, -1)


def unpack(words: mx.array, layout: Layout) -> dict[str, mx.array]:
    """The arrays of a layout by name."""
    numbers = words.view(mx.float32)
    return {
        name: (numbers if _is_real(name) else words)[begin : begin + prod(shape)].reshape(shape)
        for name, begin, shape in layout
    }


def on_device(pairs: Sequence[mx.array], config: ModelConfig, layout: Layout) -> mx.array:
    """`Step.packed` of a step, made on the device; where `step_values.launches()`. `pairs`: `Step.numbers` and, where
    the layout has them, the tokens behind them, `in_pairs`."""
    width = config.sliding_window
    return step_values(pairs, *_recipe(config, layout), width=width, slots=width + REWIND)


@functools.lru_cache(maxsize=64)
def _recipe(config: ModelConfig, layout: Layout) -> tuple[mx.array, mx.array, mx.array]:
    """What `step_values` makes the words of a layout from: the spec, and the frequencies of both kinds of layers."""
    ratios = _ratios(config)
    name, begin, shape = layout[-1]
    spec = np.zeros((begin + prod(shape), 4), dtype=np.int32)
    for name, begin, shape in layout:
        what, _, ratio = name.partition(" ")
        part = spec[begin : begin + prod(shape)]
        index = np.indices(shape).reshape(len(shape), -1)
        if what == "at":
            part[:, 0] = Kind.NUMBER
        elif what in _MARKS:
            part[:, 0], part[:, 1] = Kind.NUMBER, 1 + 2 * ratios.index(int(ratio)) + _MARKS.index(what)
        elif what == "visible":
            part[:] = np.stack(np.broadcast_arrays(Kind.VISIBLE, index[0], int(ratio), 0), axis=-1)
        elif what == "window":
            part[:] = np.stack(np.broadcast_arrays(Kind.SLOT, index[1], index[2], 0), axis=-1)
        elif what == "tokens":
            part[:] = np.stack(np.broadcast_arrays(Kind.NUMBER, 1 + 2 * len(ratios) + index[1], 0, 0), axis=-1)
        elif what in ("cos", "sin"):
            kind = Kind.SIN if what == "sin" else Kind.COS
            part[:] = np.stack(np.broadcast_arrays(kind, *index, int(ratio)), axis=-1)
    return mx.array(spec), *(mx.array(layer_frequencies(config, compressed)) for compressed in (False, True))


def _ratios(config: ModelConfig) -> list[int]:
    """The compression ratios of a model."""
    return sorted({r for r in config.compress_ratios if r})


def _is_real(name: str) -> bool:
    return name.startswith(("cos", "sin"))


@functools.lru_cache(maxsize=8)  # asked for at every step, always with the same config
def layer_frequencies(config: ModelConfig, compressed: bool) -> np.ndarray:
    """Rotary frequencies: plain for window-only layers, YaRN on another base for compressed ones."""
    if not compressed:
        return rope_frequencies(config.qk_rope_head_dim, config.rope_theta)
    return rope_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=config.rope_factor,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
        original_length=config.rope_original_length,
    )
