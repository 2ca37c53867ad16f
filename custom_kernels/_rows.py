"""Rows of a cache in two parts: many that a step never touches, and a few recent ones that it writes anew.

MLX's CUDA back end copies an array to write one row of it, so one growing array would cost its size at every step
(docs/log.md). With `SplitRows` a step rewrites `recent` alone; kernels choose the part for each row that they read.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import mlx.core as mx


class SplitRows(NamedTuple):
    """`old` [B, S, D] with S >= 1, `recent` [B, R, D], `base` int32 [1] on the device, 0 <= base <= S.

    Entry j is recent[:, j - base] when base <= j < base + R, and old[:, j] below base; there are no others. What
    `old` holds from base on does not count.
    """

    old: mx.array
    recent: mx.array
    base: mx.array

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the array which it stands for, as long as it can become: [B, S + R, D]."""
        B, S, D = self.old.shape
        return B, S + self.recent.shape[1], D

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def dtype(self) -> mx.Dtype:
        return self.old.dtype


Rows = mx.array | SplitRows


def rows_fault(rows: SplitRows) -> str:
    """What is wrong with these rows, or ""."""
    old, recent, base = rows
    fits = old.ndim == recent.ndim == 3 and old.dtype == recent.dtype
    fits = fits and (old.shape[0], old.shape[2]) == (recent.shape[0], recent.shape[2])
    if fits and 0 not in (old.shape[1], recent.shape[1]) and base.shape == (1,) and base.dtype == mx.int32:
        return ""
    return (
        f"got old rows {old.dtype} {old.shape}, recent rows {recent.dtype} {recent.shape} and base {base.dtype}"
        f" {base.shape}, expected [B, S, D], [B, R, D] of one dtype with S and R above 0, and int32 [1]"
    )


def end(rows: Rows) -> int | mx.array:
    """How many entries there are: a number, or int32 [1] where it changes from step to step."""
    return rows.base + rows.recent.shape[1] if isinstance(rows, SplitRows) else rows.shape[1]


def valid(rows: Rows, index: mx.array) -> mx.array:
    """Which of the indices [..] name an entry."""
    return (index >= 0) & (index < end(rows))


def after(rows: Rows, other: mx.array) -> Rows:
    """The same rows, not read before `other` is computed: an order without an evaluation."""
    if isinstance(rows, SplitRows):
        old, recent = mx.depends([rows.old, rows.recent], [other])
        return SplitRows(old, recent, rows.base)
    return mx.depends([rows], [other])[0]


def gather(rows: Rows, index: mx.array) -> mx.array:
    """Entries at index int32 [B, ..] -> [B, .., D]; zeros where the index names none."""
    named = valid(rows, index)
    if isinstance(rows, SplitRows):
        recent = index >= rows.base
        new = _pick(rows.recent, mx.where(named & recent, index - rows.base, 0))
        picked = mx.where(recent[..., None], new, _pick(rows.old, mx.where(recent, 0, index)))
    else:
        picked = _pick(rows, index)
    return mx.where(named[..., None], picked, 0)


def part(rows: Rows, first: int, end: int) -> mx.array:
    """Entries first .. end - 1, or to the last one, as an array: zeros where there is none."""
    if not isinstance(rows, SplitRows):
        return rows[:, first:end]
    index = mx.arange(first, min(end, rows.shape[1]), dtype=mx.int32)
    return gather(rows, mx.broadcast_to(index, (rows.shape[0], index.size)))


def ring_ref(ring: mx.array, rows: mx.array, at: mx.array, *, axis: int) -> mx.array:
    """A new array: `ring` with its rows (at + i) % R along `axis` replaced by `rows` i = 0 .. L - 1, where L <= R."""
    R, L = ring.shape[axis], rows.shape[axis]
    if L == 0:
        return ring
    place = mx.remainder(mx.arange(R, dtype=mx.int32) - at, R)  # of each ring row among the new ones
    shape = [1] * ring.ndim
    shape[axis] = R
    new = mx.take(rows, mx.minimum(place, L - 1), axis=axis)
    return mx.where((place < L).reshape(shape), new, ring)


def _pick(rows: mx.array, index: mx.array) -> mx.array:
    B, S, D = rows.shape
    if S == 0:
        return mx.zeros((*index.shape, D), dtype=rows.dtype)
    of_batch = (mx.arange(B, dtype=mx.int32) * S).reshape(B, *[1] * (index.ndim - 1))
    return rows.reshape(B * S, D)[mx.clip(index, 0, S - 1) + of_batch]
