"""What the layers of one forward pass share: positions, rotary tables, the published selections."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_ds4.cache import LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.rope import rope_frequencies, rope_table

Rotation = tuple[mx.array, mx.array]


class Step:
    """One pass over `length` new positions that start at `start`.

    Layers publish here what later layers of the SAME pass read: the top-k list (`selection`), the candidate blocks
    (`candidates`) and the owner of the compressed rows (`source`). With a `trace` dict every module notes
    its intermediate arrays under `L<layer>.<name>`.
    """

    def __init__(self, config: ModelConfig, start: int, length: int, trace: dict[str, mx.array] | None = None):
        self.config = config
        self.start = start
        self.length = length
        self.positions = np.arange(start, start + length)
        self.selection: mx.array | None = None  # int32 [B, L, k], ascending, -1 = none
        self.candidates: mx.array | None = None  # int32 [B, L, blocks], ascending, -1 = none
        self.source: LayerCache | None = None
        self.taps: list[mx.array] = []
        self.layer = 0
        self._trace = trace
        self._rotations: dict[tuple[bool, int], Rotation] = {}

    def note(self, name: str, value: mx.array) -> None:
        if self._trace is not None:
            self._trace[f"L{self.layer}.{name}"] = value

    @property
    def end(self) -> int:
        return self.start + self.length

    def rotation(self, ratio: int) -> Rotation:
        """cos and sin of this step's positions for a layer of the given compression ratio."""
        return self._rotation(ratio > 0, 0, self.positions)

    def group_rotation(self, ratio: int) -> Rotation:
        """cos and sin of the entries completed in this step: entry j turns at position j * ratio."""
        entries = np.arange(self.start // ratio, self.end // ratio)
        return self._rotation(True, ratio, entries * ratio)

    def visible(self, ratio: int) -> mx.array:
        """Compressed entries that each row may see, int32 [L]: those complete at its position."""
        return mx.array(((self.positions + 1) // ratio).astype(np.int32))

    def window_list(self, rows_before: int) -> mx.array:
        """Rows of `near` (the last `rows_before` positions, then this step's) that each row sees, int32 [L, W].

        Oldest first, padded with -1: a row at position p sees max(0, p - W + 1) .. p.
        """
        width = self.config.sliding_window
        seen = np.maximum(self.positions - width + 1, 0)[:, None] + np.arange(width)
        rows = seen - (self.start - rows_before)
        return mx.array(np.where(seen <= self.positions[:, None], rows, -1).astype(np.int32))

    def _rotation(self, compressed: bool, ratio: int, positions: np.ndarray) -> Rotation:
        key = (compressed, ratio)
        if key not in self._rotations:
            self._rotations[key] = rope_table(positions, layer_frequencies(self.config, compressed))
        return self._rotations[key]


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
