"""Expert routing: sqrt-softplus scores, a bias that only orders, normalized weights.

    s_i = sqrt(softplus(z_i));  chosen = the k largest s_i + bias_i (ties: lower id)
    w_i = s_i / (sum of chosen s + 1e-20) * factor

All float32 (architecture notes 8.1). softplus is max(z, 0) + log1p(exp(-|z|)): the plain form underflows to zero
below z of about -16.6. A row's result does not depend on the rows beside it.

Kernel, within tolerance (its log1p differs in the last bits, so a choice can differ only where two biased scores do):
one launch instead of about 30, in which the coefficients of a hyper-connection may ride. Bytes: E logits and biases in,
2 k numbers out. NaN scores are never chosen; with fewer
than k numbers the list ends in -1 with weight 0.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ._case import Case
from ._hyper_sources import COEFFICIENTS_CALL, COEFFICIENTS_HEADER
from ._kernel import Kernel, float_bits
from ._switches import enabled
from .hyper_connection import RIDER_INPUTS, RIDER_OUTPUTS, SUMS, SiteSums, coefficients, coefficients_ref, random_sums
from .topk import top_k_ref

MOST_EXPERTS = 1024  # 32 registers a lane of the simdgroup that chooses
_MOST_THREADS = 512
MOST_CHOSEN = 32  # one a lane
_MOST_BESIDE = 8  # rows; with many, groups of which one simdgroup works would cost more than a launch

ROUTER_HEADER = """
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

// An expert's score, and a key that sorts as the biased scores do (which are never -0.0); 0: never to be chosen.
inline float router_score(float z) {
    return metal::precise::sqrt(metal::max(z, 0.0f) + router_log1p(metal::precise::exp(-metal::abs(z))));
}
inline uint router_key(float biased) {
    uint bits = as_type<uint>(biased);
    return biased > -3.0e38f ? ((bits >> 31) != 0u ? ~bits : bits | 0x80000000u) : 0u;
}

// A whole simdgroup: the K best of E keys, ties to the lower expert, ascending, and their weights. Lane l holds experts
// l, l + 32, ..; both arrays are filled up to a multiple of 32, the keys with 0.
template <int E, int K>
inline void router_choose(
    const threadgroup float* scores, const threadgroup uint* ranked, uint lane, float factor, device int* chosen,
    device float* weights) {
    constexpr int PER = (E + 31) / 32;
    uint keys[PER];
    #pragma unroll
    for (uint i = 0; i < uint(PER); i++) keys[i] = ranked[lane + 32u * i];
    int mine = -1;  // the expert of round `lane`
    for (int round = 0; round < K; round++) {
        uint best = 0u;
        #pragma unroll
        for (uint i = 0; i < uint(PER); i++) best = metal::max(best, keys[i]);
        best = simd_max(best);
        uint at = uint(E);
        #pragma unroll
        for (uint i = 0; i < uint(PER); i++)
            if (keys[i] == best) at = metal::min(at, lane + 32u * i);
        uint winner = simd_min(at);
        if (best == 0u) winner = uint(E);  // nothing is left
        #pragma unroll
        for (uint i = 0; i < uint(PER); i++)
            if (lane + 32u * i == winner) keys[i] = 0u;
        if (int(lane) == round && winner < uint(E)) mine = int(winner);
    }
    float weight = mine < 0 ? 0.0f : scores[metal::max(mine, 0)];
    float total = simd_sum(weight);
    // Ascending ids, the empty ones last.
    int id = mine < 0 ? E : mine;
    int rank = 0;
    for (int other = 0; other < K; other++) {
        int k = simd_shuffle(id, ushort(other));
        if (k < id || (k == id && other < int(lane))) rank++;
    }
    if (int(lane) < K) {
        chosen[rank] = mine;
        weights[rank] = weight / (total + 1e-20f) * factor;
    }
}
"""

_SOURCE = """
    // A threadgroup of SG simdgroups owns one row: thread t scores the experts t, t + 32 SG, ... Then the first
    // simdgroup chooses.
    constexpr int PER = (E + 31) / 32;
    threadgroup float scores[32 * PER];
    threadgroup uint ranked[32 * PER];
    uint t = thread_position_in_threadgroup.x;
    ulong row = ulong(threadgroup_position_in_grid.x);
    BESIDE
    for (uint e = t; e < uint(32 * PER); e += 32u * uint(SG)) {
        uint key = 0u;
        if (e < uint(E)) {
            float b = bias[e];
            float score = router_score(logits[row * ulong(E) + ulong(e)]);
            scores[e] = score;
            key = router_key(b + score);
        }
        ranked[e] = key;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t < 32u)  // one whole simdgroup
        router_choose<E, K>(
            scores, ranked, t, as_type<float>(FACTOR_BITS), chosen + row * ulong(K), weights + row * ulong(K));
"""

_router_kernel = Kernel(
    "router",
    ["logits", "bias"],
    ["chosen", "weights"],
    _SOURCE.replace("BESIDE", ""),
    ROUTER_HEADER,
    exact=False,
    family="router",
)
_beside_kernel = Kernel(
    "router_beside",
    ["logits", "bias", *RIDER_INPUTS],
    ["chosen", "weights", *RIDER_OUTPUTS],
    _SOURCE.replace(
        "BESIDE",
        """uint rows = uint(hc_dots_shape[0]) * uint(hc_dots_shape[1]);
    if (row >= ulong(rows)) {  // threadgroups behind those of the rows: a row's coefficients
        if (t < 32u)
            """
        + COEFFICIENTS_CALL.replace("HC_ROW", "uint(row) - rows")
        + """
        return;
    }""",
    ),
    ROUTER_HEADER + COEFFICIENTS_HEADER,
    exact=False,
    family="router",
)


def route(logits: mx.array, bias: mx.array, *, k: int, factor: float) -> tuple[mx.array, mx.array]:
    """Chosen experts int32 [.., k], ascending, and their weights float32 [.., k] from logits [.., E], bias [E]."""
    if not _takes_kernel(logits, k):
        return route_ref(logits, bias, k=k, factor=factor)
    call, threads, rows = _call(logits, bias, k, factor)
    chosen, weights = _router_kernel(**call, grid=(threads * rows, 1, 1), threadgroup=(threads, 1, 1))
    return chosen, weights


def route_beside(
    logits: mx.array, bias: mx.array, sums: SiteSums, *, k: int, factor: float
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The two of `route` and the two of `coefficients(sums)`, of as many rows; for a few rows in one launch."""
    if (
        not _takes_kernel(logits, k)
        or not sums.takes_kernel
        or not sums.rows == prod(logits.shape[:-1]) <= _MOST_BESIDE
    ):
        return *route(logits, bias, k=k, factor=factor), *coefficients(sums)
    call, threads, rows = _call(logits, bias, k, factor)
    grid = (2 * threads * rows, 1, 1)
    return tuple(_beside_kernel(**sums.behind(call), grid=grid, threadgroup=(threads, 1, 1)))


def _takes_kernel(logits: mx.array, k: int) -> bool:
    E = logits.shape[-1]
    return logits.size > 0 and enabled("router") and 8 <= E <= MOST_EXPERTS and k <= min(E, MOST_CHOSEN)


def _call(logits: mx.array, bias: mx.array, k: int, factor: float) -> tuple[dict[str, list[Any]], int, int]:
    """What a launch gets, the threads of its groups, and the rows."""
    *leading, E = logits.shape
    threads = min(-(-E // 32) * 32, _MOST_THREADS)
    call = {
        "inputs": [logits.astype(mx.float32), bias.astype(mx.float32)],
        "template": [("E", E), ("K", k), ("SG", threads // 32), ("FACTOR_BITS", float_bits(factor))],
        "output_shapes": [(*leading, k), (*leading, k)],
        "output_dtypes": [mx.int32, mx.float32],
    }
    return call, threads, prod(leading)


def route_ref(logits: mx.array, bias: mx.array, *, k: int, factor: float) -> tuple[mx.array, mx.array]:
    scores = router_scores(logits)
    chosen = top_k_ref(scores + bias, k)
    weights = mx.where(chosen < 0, 0, mx.take_along_axis(scores, mx.maximum(chosen, 0), axis=-1))
    return chosen, weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * factor


def route_beside_ref(
    logits: mx.array, bias: mx.array, sums: SiteSums, *, k: int, factor: float
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    return *route_ref(logits, bias, k=k, factor=factor), *coefficients_ref(sums)


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

    def beside(rows: int, experts: int, streams: int, large: bool = False) -> Case:
        def arrays(rng: np.random.Generator) -> list[mx.array]:
            sums = random_sums(rng, rows, streams=streams)
            return [*inputs(rng, rows, experts, "normal"), *sums]

        def run(op, logits: mx.array, bias: mx.array, *sums: mx.array):
            return op(logits, bias, SiteSums(*sums, **SUMS), k=6, factor=1.5)

        return Case(
            f"router/beside_{rows}x{experts}_{streams}",
            functools.partial(run, route_beside),
            functools.partial(run, route_beside_ref),
            arrays,
            tolerance=1e-5,
            bytes=rows * (4 * experts + 48 + 128 * (streams + 1) ** 2) + 4 * experts,
            large=large,
        )

    return [
        beside(3, 40, 4),
        beside(1, 384, 1),
        beside(6, 384, 4, large=True),
        case(3, 384, 6),
        case(2, 384, 6, "very_negative"),
        case(2, 128, 3, "equal"),
        case(1, 33, 33 - 2),
        case(5, 8, 8),
        case(2, 600, 6),  # more experts than threads
        case(1, 384, 6, large=True),
        case(2048, 384, 6, large=True),
    ]
