"""Lightning-indexer scores: score[l, j] = sum over heads of w[l, h] * max(0, q[l, h] . k[j]).

Rectified before the signed head weight. float32 throughout; `bf16=True` reproduces the roundings of the
vendor's reference (dot, product with the weight and sum each stored as bfloat16), which makes ties at the
selection boundary common (architecture notes 7.3).
"""

from __future__ import annotations

import mlx.core as mx

# Elements of the [rows, heads, keys] block computed at a time: bounds memory at any context length.
_TILE_ELEMENTS = 1 << 23


def index_scores(q: mx.array, weights: mx.array, keys: mx.array, *, bf16: bool = False) -> mx.array:
    """q [B, L, H, D], weights [B, L, H], keys [B, S, D] -> float32 [B, L, S], unmasked."""
    return index_scores_ref(q, weights, keys, bf16=bf16)


def index_scores_ref(q: mx.array, weights: mx.array, keys: mx.array, *, bf16: bool = False) -> mx.array:
    B, L, H, _ = q.shape
    S = keys.shape[1]
    step = max(1, _TILE_ELEMENTS // max(1, B * L * H))
    parts = [_scores(q, weights, keys[:, start : start + step], bf16) for start in range(0, S, step)]
    if not parts:
        return mx.zeros((B, L, 0), dtype=mx.float32)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _scores(q: mx.array, weights: mx.array, keys: mx.array, bf16: bool) -> mx.array:
    q, keys, weights = q.astype(mx.float32), keys.astype(mx.float32), weights.astype(mx.float32)
    B, L, H, D = q.shape
    dots = (q.reshape(B, L * H, D) @ keys.swapaxes(1, 2)).reshape(B, L, H, -1)
    if not bf16:
        return (weights[..., None] * mx.maximum(dots, 0)).sum(axis=2)
    dots = mx.maximum(dots.astype(mx.bfloat16), 0)
    products = (weights.astype(mx.bfloat16)[..., None] * dots).astype(mx.float32)
    return products.sum(axis=2).astype(mx.bfloat16).astype(mx.float32)
