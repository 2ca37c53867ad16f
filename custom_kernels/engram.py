"""Engram gate: how much of a looked-up n-gram value each residual stream takes in.

    dot_m = sum_c h_m[c] qk_m[c] key_m[c] * rsqrt(mean h_m^2 + eps) * rsqrt(mean key_m^2 + eps) * C^-0.5
    g_m   = sigmoid(copysign(sqrt(max(|dot_m|, 1e-6)), dot_m));   h_m <- h_m + g_m value

float32 inside, statistics per stream, one rounding to bfloat16 (architecture notes 9.6).
"""

from __future__ import annotations

import mlx.core as mx


def engram_update(h: mx.array, keys: mx.array, value: mx.array, qk: mx.array, *, eps: float) -> mx.array:
    """h [.., M, C], keys [.., M, C], value [.., C], qk float32 [M, C] -> bfloat16 [.., M, C]."""
    return engram_update_ref(h, keys, value, qk, eps=eps)


def engram_update_ref(h: mx.array, keys: mx.array, value: mx.array, qk: mx.array, *, eps: float) -> mx.array:
    gate = engram_gate(engram_dot(h, keys, qk, eps=eps))
    update = gate[..., None] * value.astype(mx.float32)[..., None, :]
    return (h.astype(mx.float32) + update).astype(mx.bfloat16)


def engram_dot(h: mx.array, keys: mx.array, qk: mx.array, *, eps: float) -> mx.array:
    """The normalized dot product of each stream, float32 [.., M]."""
    h, keys = h.astype(mx.float32), keys.astype(mx.float32)
    norms = mx.rsqrt((h * h).mean(axis=-1) + eps) * mx.rsqrt((keys * keys).mean(axis=-1) + eps)
    return (h * qk * keys).sum(axis=-1) * norms * h.shape[-1] ** -0.5


def engram_gate(dot: mx.array) -> mx.array:
    """sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)); the sign of a zero is its sign bit."""
    root = mx.sqrt(mx.maximum(mx.abs(dot), 1e-6))
    negative = (dot.view(mx.uint32) >> 31) != 0
    return mx.sigmoid(mx.where(negative, -root, root))
