"""Expert routing: sqrt-softplus scores, a bias that only orders, normalized weights.

    s_i = sqrt(softplus(z_i));  chosen = the k largest s_i + bias_i (ties: lower id)
    w_i = s_i / (sum of chosen s + 1e-20) * factor

All float32 (architecture notes 8.1). softplus is max(z, 0) + log1p(exp(-|z|)): the plain form underflows to zero
below z of about -16.6. A row's result does not depend on the rows beside it.

Kernel, within tolerance (its log1p differs in the last bits, so a choice can differ only where two biased scores do):
one launch instead of about 30. Bytes: E logits and biases in, 2 k numbers out. NaN scores are never chosen; with fewer
than k numbers the list ends in -1 with weight 0.
"""

from __future__ import annotations

import functools
from math import prod

import mlx.core as mx
import numpy as np

from ._case import Case
from ._kernel import Kernel, floats
from ._switches import enabled
from .topk import top_k_ref

_MOST_EXPERTS = 1024  # 32 registers a lane
_MOST_CHOSEN = 32  # one a lane

_ROUTER_HEADER = """
// log(1 + e) for 0 <= e <= 1, as 2 artanh(e / (2 + e)): no cancellation for small e.
inline float router_log1p(float e) {
    float s = e / (2.0f + e);
    float w = s * s;
    float p = 0.06666667f;
    p = p * w + 0.07692308f;
    p = p * w + 0.09090909f;
    p = p * w + 0.11111111f;
    p = p * w + 0.14285715f;
    p = p * w + 0.2f;
    p = p * w + 0.33333334f;
    p = p * w + 1.0f;
    return 2.0f * s * p;
}
"""

_ROUTER_SOURCE = """
    // A simdgroup owns one row; lane l holds the scores of experts l, l + 32, ... Each round takes the best one left.
    uint lane = thread_index_in_simdgroup;
    ulong row = ulong(threadgroup_position_in_grid.x);
    constexpr int PER = (E + 31) / 32;
    float score[PER];
    float biased[PER];
    for (int i = 0; i < PER; i++) {
        int e = int(lane) + 32 * i;
        score[i] = 0.0f;
        biased[i] = -3.0e38f;
        if (e < E) {
            float z = logits[row * ulong(E) + ulong(e)];
            float soft = metal::max(z, 0.0f) + router_log1p(metal::precise::exp(-metal::abs(z)));
            score[i] = metal::precise::sqrt(soft);
            float b = score[i] + bias[e];
            if (b > -3.0e38f) biased[i] = b;
        }
    }
    int mine = -1;          // the expert of round `lane`
    float weight = 0.0f;
    for (int round = 0; round < K; round++) {
        float best = -3.0e38f;
        int at = E;
        float s = 0.0f;
        for (int i = 0; i < PER; i++) {
            if (biased[i] > best) {
                best = biased[i];
                at = int(lane) + 32 * i;
                s = score[i];
            }
        }
        float top = simd_max(best);
        int winner = simd_min(best == top ? at : E);
        for (int i = 0; i < PER; i++)
            if (int(lane) + 32 * i == winner) biased[i] = -3.0e38f;
        float winning = simd_shuffle(s, ushort(winner % 32));  // its owner's
        if (int(lane) == round && winner < E) {
            mine = winner;
            weight = winning;
        }
    }
    float total = simd_sum(weight);
    // Ascending ids, the empty ones last.
    int key = mine < 0 ? E : mine;
    int rank = 0;
    for (int other = 0; other < K; other++) {
        int k = simd_shuffle(key, ushort(other));
        if (k < key || (k == key && other < int(lane))) rank++;
    }
    if (int(lane) < K) {
        chosen[row * ulong(K) + ulong(rank)] = mine;
        weights[row * ulong(K) + ulong(rank)] = weight / (total + 1e-20f) * factor[0];
    }
"""

_router_kernel = Kernel(
    "router",
    ["logits", "bias", "factor"],
    ["chosen", "weights"],
    _ROUTER_SOURCE,
    _ROUTER_HEADER,
    exact=False,
    family="router",
)


def route(logits: mx.array, bias: mx.array, *, k: int, factor: float) -> tuple[mx.array, mx.array]:
    """Chosen experts int32 [.., k], ascending, and their weights float32 [.., k] from logits [.., E], bias [E]."""
    *leading, E = logits.shape
    if logits.size == 0 or not enabled("router") or not 8 <= E <= _MOST_EXPERTS or k > min(E, _MOST_CHOSEN):
        return route_ref(logits, bias, k=k, factor=factor)
    chosen, weights = _router_kernel(
        inputs=[logits.astype(mx.float32), bias.astype(mx.float32), floats(factor)],
        template=[("E", E), ("K", k)],
        grid=(32 * prod(leading), 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(*leading, k), (*leading, k)],
        output_dtypes=[mx.int32, mx.float32],
    )
    return chosen, weights


def route_ref(logits: mx.array, bias: mx.array, *, k: int, factor: float) -> tuple[mx.array, mx.array]:
    scores = router_scores(logits)
    chosen = top_k_ref(scores + bias, k)
    weights = mx.where(chosen < 0, 0, mx.take_along_axis(scores, mx.maximum(chosen, 0), axis=-1))
    return chosen, weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * factor


def router_scores(logits: mx.array) -> mx.array:
    """sqrt(softplus(z)) in float32."""
    z = logits.astype(mx.float32)
    return mx.sqrt(mx.maximum(z, 0) + mx.log1p(mx.exp(-mx.abs(z))))


def cases() -> list[Case]:
    def inputs(rng: np.random.Generator, rows: int, experts: int, kind: str) -> list[mx.array]:
        z = rng.standard_normal((rows, experts)) * 4
        bias = rng.standard_normal(experts) * 0.1
        if kind == "very_negative":
            z, bias = -12 - 50 * rng.random((rows, experts)), bias * 1e-3
        if kind == "equal":
            z, bias = np.zeros((rows, experts)), np.zeros(experts)
        return [mx.array(z.astype(np.float32)), mx.array(bias.astype(np.float32))]

    def case(rows: int, experts: int, k: int, kind: str = "normal", large: bool = False) -> Case:
        return Case(
            f"router/{rows}x{experts}_k{k}_{kind}",
            functools.partial(route, k=k, factor=1.5),
            functools.partial(route_ref, k=k, factor=1.5),
            functools.partial(inputs, rows=rows, experts=experts, kind=kind),
            tolerance=4e-6,
            bytes=rows * (4 * experts + 8 * k) + 4 * experts,
            large=large,
        )

    return [
        case(3, 384, 6),
        case(2, 384, 6, "very_negative"),
        case(2, 128, 3, "equal"),
        case(1, 33, 33 - 2),
        case(5, 8, 8),
        case(1, 384, 6, large=True),
        case(2048, 384, 6, large=True),
    ]
