"""Compressor pooling for ratio 2: two tokens become one entry, channel by channel.

    (w0, w1) = softmax(g_{2j}, g_{2j+1});  u_j = w0 a_{2j} + w1 a_{2j+1}

float32 inside, one rounding to bfloat16 (the norm that follows reads the rounded value, as the reference does;
architecture notes 6.2). No bias, no overlap between groups.
"""

from __future__ import annotations

import mlx.core as mx


def pool_pairs(values: mx.array, gates: mx.array) -> mx.array:
    """values, gates float32 [.., 2 G, D] -> bfloat16 [.., G, D]."""
    return pool_pairs_ref(values, gates)


def pool_pairs_ref(values: mx.array, gates: mx.array) -> mx.array:
    shape = (*values.shape[:-2], values.shape[-2] // 2, 2, values.shape[-1])
    values, gates = values.reshape(shape), gates.reshape(shape)
    weights = mx.exp(gates - gates.max(axis=-2, keepdims=True))
    weights = weights / weights.sum(axis=-2, keepdims=True)
    return (weights * values).sum(axis=-2).astype(mx.bfloat16)
