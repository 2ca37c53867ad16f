"""Expert routing: sqrt-softplus scores, a bias that only orders, normalized weights.

    s_i = sqrt(softplus(z_i));  chosen = the k largest s_i + bias_i (ties: lower id)
    w_i = s_i / (sum of chosen s + 1e-20) * factor

All float32 (architecture notes 8.1). softplus is max(z, 0) + log1p(exp(-|z|)): the plain form underflows to zero
below z of about -16.6.
"""

from __future__ import annotations

import mlx.core as mx

from .topk import top_k_ref


def route(logits: mx.array, bias: mx.array, *, k: int, factor: float) -> tuple[mx.array, mx.array]:
    """Chosen experts int32 [.., k], ascending, and their weights float32 [.., k] from logits [.., E]."""
    return route_ref(logits, bias, k=k, factor=factor)


def route_ref(logits: mx.array, bias: mx.array, *, k: int, factor: float) -> tuple[mx.array, mx.array]:
    scores = router_scores(logits)
    chosen = top_k_ref(scores + bias, k)
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return chosen, weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * factor


def router_scores(logits: mx.array) -> mx.array:
    """sqrt(softplus(z)) in float32."""
    z = logits.astype(mx.float32)
    return mx.sqrt(mx.maximum(z, 0) + mx.log1p(mx.exp(-mx.abs(z))))
