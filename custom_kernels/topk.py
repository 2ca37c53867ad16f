"""Exact top-k with one tie rule: higher score first, then the lower index.

Used for compressed entries, candidate blocks and experts, so that every selection is deterministic on
every device (architecture notes 7.4, 8.1).
"""

from __future__ import annotations

import mlx.core as mx


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices of the k best scores, int32 [.., min(k, n)], ascending, padded with -1 at the end.

    scores float32 [.., n]. Entries of -inf or NaN are never chosen; equal scores go to the lower index
    (0.0 and -0.0 are equal). n = 0 gives an empty last axis.
    """
    return top_k_ref(scores, k)


def top_k_ref(scores: mx.array, k: int) -> mx.array:
    n = scores.shape[-1]
    if n == 0:
        return mx.zeros(scores.shape, dtype=mx.int32)
    chosen = top_k_mask(scores, k)
    index = mx.arange(n, dtype=mx.int32)
    order = mx.sort(mx.where(chosen, index, n), axis=-1)[..., : min(k, n)]
    return mx.where(order == n, -1, order)


def top_k_mask(scores: mx.array, k: int) -> mx.array:
    """The same selection as a bool mask [.., n]."""
    n = scores.shape[-1]
    scores = mx.where(mx.isnan(scores), -mx.inf, scores)
    if k >= n:
        return scores > -mx.inf
    least = mx.sort(scores, axis=-1)[..., n - k, None]
    above, equal = scores > least, scores == least
    room = k - above.astype(mx.int32).sum(axis=-1, keepdims=True)
    rank = mx.cumsum(equal.astype(mx.int32), axis=-1)
    return (above | (equal & (rank <= room))) & (scores > -mx.inf)
