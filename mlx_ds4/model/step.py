"""What the layers of one forward pass share: positions, rotary tables, the published selections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import mlx.core as mx
import numpy as np

from mlx_ds4.cache import REWIND, LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels._kernel import tickets
from mlx_ds4.custom_kernels.rope import rope_frequencies, rope_table

Rotation = tuple[mx.array, mx.array]


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
    its intermediate arrays under `L<layer>.<name>`. What follows from the positions comes as arrays made on the host
    when first asked for, so that a compiled graph can take them as inputs. Windows begin at position `seen_from` at
    the earliest.
    """

    def __init__(
        self,
        config: ModelConfig,
        start: int,
        length: int,
        trace: dict[str, mx.array] | None = None,
        seen_from: int = 0,
    ):
        self._set(config, StepShape.of(config, start, length), {}, trace)
        self.start = start
        self.positions = np.arange(start, start + length)
        self._seen_from = seen_from

    @classmethod
    def traced(cls, config: ModelConfig, shape: StepShape, arrays: dict[str, mx.array]) -> Step:
        """A pass of this shape over the `inputs()` of another; it knows no numbers."""
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

    def inputs(self) -> dict[str, mx.array]:
        """Every array that a short step may ask for."""
        ratios = sorted({r for r in self.config.compress_ratios if r})
        for ratio in ratios:
            self.visible(ratio)
            self.rotation(ratio)
            if self.entries(ratio):
                self.group_rotation(ratio)
        self.rotation(0)
        self.at()
        self.tickets()
        self.window_list()
        return self._arrays

    def at(self) -> mx.array:
        """The position where the step starts, int32 [1]."""
        return self._array("at", lambda: mx.array([self.start], dtype=mx.int32))

    def tickets(self) -> mx.array:
        """What the launches of this step count arrivals in, int32: each needs the results of the one before."""
        return self._array("tickets", tickets)

    def rotation(self, ratio: int) -> Rotation:
        """cos and sin of this step's positions for a layer of the given compression ratio."""
        return self._rotation(ratio > 0, 1, lambda: self.positions)

    def group_rotation(self, ratio: int) -> Rotation:
        """cos and sin of the entries completed in this step: entry j turns at position j * ratio."""
        return self._rotation(
            True, ratio, lambda: np.arange(self.start // ratio, (self.start + self.length) // ratio) * ratio
        )

    def visible(self, ratio: int) -> mx.array:
        """Compressed entries that each row may see, int32 [L]: those complete at its position."""
        return self._array(f"visible{ratio}", lambda: mx.array(((self.positions + 1) // ratio).astype(np.int32)))

    def window_list(self) -> mx.array:
        """Rows that each position sees in what its layer keeps of the last ones, int32 [1, L, W]: slots of the ring in
        a short step, rows of `LayerCache.extend` in a long one.

        Oldest first, padded with -1: a row at position p sees max(`seen_from`, p - W + 1) .. p.
        """
        return self._array("window", lambda: mx.array(self._window_list()[None].astype(np.int32)))

    def _window_list(self) -> np.ndarray:
        width = self.config.sliding_window
        seen = np.maximum(self.positions - width + 1, self._seen_from)[:, None] + np.arange(width)
        rows = seen % (width + REWIND) if self.short else seen - max(0, self.start - (width - 1))
        return np.where(seen <= self.positions[:, None], rows, -1)

    def _rotation(self, compressed: bool, ratio: int, positions: Callable[[], np.ndarray]) -> Rotation:
        """Of plain layers, or of compressed ones at multiples of `ratio`."""
        name = f"turn{ratio}" if compressed else "turn"
        if f"{name}.cos" not in self._arrays:
            table = rope_table(positions(), layer_frequencies(self.config, compressed))
            self._arrays[f"{name}.cos"], self._arrays[f"{name}.sin"] = table
        return self._arrays[f"{name}.cos"], self._arrays[f"{name}.sin"]

    def _array(self, name: str, make: Callable[[], mx.array]) -> mx.array:
        if name not in self._arrays:
            self._arrays[name] = make()
        return self._arrays[name]


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
