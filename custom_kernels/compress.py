"""Compressor pooling for ratio 2: two tokens become one entry, channel by channel.

    (w0, w1) = softmax(g_{2j}, g_{2j+1});  u_j = w0 a_{2j} + w1 a_{2j+1}

float32 inside, one rounding to bfloat16 (the norm that follows reads the rounded value, as the reference does;
architecture notes 6.2). No bias, no overlap between groups.
"""

from __future__ import annotations

import mlx.core as mx

from ._rows import ring_ref
from .rms_norm import rms_norm_ref

PENDING = 16  # positions that wait for their pair or may have to be taken back; position p lies in slot p % 16


def compress(
    values: mx.array, gates: mx.array, pending: mx.array, start: mx.array, weight: mx.array, *, entries: int, eps: float
) -> tuple[mx.array, mx.array]:
    """A short step of the compressor: the new pending rows, and the latents of `entries` pairs.

    values, gates float32 [B, L, D] of the positions start .. start + L - 1, L <= 8 (start int32 [1]); pending float32
    [B, 2, 16, D] holds values and gates of the last positions, p in slot p % 16. Returns (latents, pending): the new
    pending holds the new rows too; latents bfloat16 [B, entries, D] are the pairs (2j, 2j + 1) from j = start // 2 on,
    pooled as by `pool_pairs` from the new pending and normed. A pair that the step does not complete is pooled with
    what its slots hold: hide it. Raises ValueError when the shapes do not fit, for L > 8, or entries not 0 .. 8.
    """
    B, L, D = values.shape
    fits = values.shape == gates.shape and pending.shape == (B, 2, PENDING, D) and weight.shape == (D,)
    fits = fits and values.dtype == gates.dtype == pending.dtype == mx.float32
    if not fits or not L <= PENDING // 2 >= entries >= 0 or start.shape != (1,) or start.dtype != mx.int32:
        raise ValueError(
            f"compress got values {values.dtype} {values.shape}, gates {gates.dtype} {gates.shape}, pending"
            f" {pending.dtype} {pending.shape}, start {start.dtype} {start.shape}, weight {weight.shape} and"
            f" {entries} entries, expected float32 [B, L, D] twice with L <= 8, float32 [B, 2, 16, D], int32 [1], [D]"
            " and 0 to 8; pass one short step of one layer, and longer ones to pool_pairs."
        )
    return compress_ref(values, gates, pending, start, weight, entries=entries, eps=eps)


def compress_ref(
    values: mx.array, gates: mx.array, pending: mx.array, start: mx.array, weight: mx.array, *, entries: int, eps: float
) -> tuple[mx.array, mx.array]:
    pending = ring_ref(pending, mx.stack([values, gates], axis=1), start, axis=2)
    slots = mx.remainder(2 * (start // 2) + mx.arange(2 * entries, dtype=mx.int32), PENDING)
    pairs = mx.take(pending, slots, axis=2)
    return rms_norm_ref(pool_pairs_ref(pairs[:, 0], pairs[:, 1]), weight, eps), pending


def pool_pairs(values: mx.array, gates: mx.array) -> mx.array:
    """values, gates float32 [.., 2 G, D] -> bfloat16 [.., G, D]."""
    return pool_pairs_ref(values, gates)


def pool_pairs_ref(values: mx.array, gates: mx.array) -> mx.array:
    shape = (*values.shape[:-2], values.shape[-2] // 2, 2, values.shape[-1])
    values, gates = values.reshape(shape), gates.reshape(shape)
    weights = mx.exp(gates - gates.max(axis=-2, keepdims=True))
    weights = weights / weights.sum(axis=-2, keepdims=True)
    return (weights * values).sum(axis=-2).astype(mx.bfloat16)
