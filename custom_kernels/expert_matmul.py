"""Routed experts: clamped SwiGLU, the routing weight before the down projection.

g = min(gate, limit);  u = clip(up, -limit, limit);  a = w * silu(g) * u        float32, rounded once
"""

from __future__ import annotations

import mlx.core as mx


def clamped_swiglu(gate: mx.array, up: mx.array, limit: float, weight: mx.array | None = None) -> mx.array:
    """gate, up [.., F] -> bfloat16 [.., F]; `weight` float32 [.., 1] is the routing weight (architecture notes 8.2).

    The gate branch is clamped from above only.
    """
    return clamped_swiglu_ref(gate, up, limit, weight)


def clamped_swiglu_ref(gate: mx.array, up: mx.array, limit: float, weight: mx.array | None = None) -> mx.array:
    g = mx.minimum(gate.astype(mx.float32), limit)
    u = mx.clip(up.astype(mx.float32), -limit, limit)
    a = g * mx.sigmoid(g) * u
    return (a if weight is None else weight * a).astype(mx.bfloat16)
