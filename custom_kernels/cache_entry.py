"""What enters a cache, in one launch: perhaps a norm, the rotation of the tail, and the rounding of the cache's format.

    y = fake_quant(rope(rms_norm(x, weight, eps)))        without a weight: fake_quant(rope(x))

Window KV (norm, fp8), compressed KV (fp4_e4m3), index keys (norm, fp4) and index queries (fp4); architecture notes 3.4.
Norm and rotation round to bfloat16 as they do on their own, so the result is that of the three ops one after the other.

Kernel, within tolerance (the order of the norm's sum, and products that a GPU may fuse, differ; a value that rounds the
other way there can move to the next code). Bytes: x once in, once out; one launch instead of three.
"""

from __future__ import annotations

import functools
from math import prod

import mlx.core as mx
import numpy as np

from ._case import Case
from ._kernel import Kernel, enabled, floats
from ._rows import ring_ref
from .fake_quant import FAKE_QUANT_HEADER, KINDS, fake_quant_fp4_e4m3_ref, fake_quant_fp4_ref, fake_quant_fp8_ref
from .rms_norm import rms_norm_ref
from .rope import rope_ref, rope_table

_ROUNDINGS = {"fp8": fake_quant_fp8_ref, "fp4": fake_quant_fp4_ref, "fp4_e4m3": fake_quant_fp4_e4m3_ref}
_WIDEST = 1024  # one thread a value

_ENTRY_SOURCE = """
    // A threadgroup owns one row of D values, a thread one value: neighbours in a pair and in a block are lanes.
    threadgroup float part[32];
    uint t = thread_index_in_threadgroup;
    uint row = threadgroup_position_in_grid.x;
    ulong at = ulong(row) * ulong(D) + ulong(t);
    float v = float(x[at]);
    if (NORMED) {
        float sum = simd_sum(v * v);
        if (t % 32u == 0) part[t / 32u] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum = 0.0f;
        for (uint i = 0; i < uint(D / 32); i++) sum += part[i];
        v = float(bfloat16_t(float(weight[t]) * (v * metal::precise::rsqrt(sum / float(D) + eps[0]))));
    }
    float other = simd_shuffle_xor(v, ushort(1));
    if (t + 2u * uint(P) >= uint(D)) {
        uint entry = row / uint(H) % uint(x_shape[1]) * uint(P) + (t + 2u * uint(P) - uint(D)) / 2u;
        float c = cosine[entry];
        float s = sine[entry];
        v = float(bfloat16_t((t & 1u) == 0u ? v * c - other * s : other * s + v * c));
    }
    uint bits = fq_round<KIND, BLOCK>(as_type<uint>(v) >> 16);
    y[at] = as_type<bfloat16_t>(ushort(bits));
"""

_entry_kernel = Kernel(
    "cache_entry",
    ["x", "weight", "eps", "cosine", "sine"],
    ["y"],
    _ENTRY_SOURCE,
    FAKE_QUANT_HEADER,
    exact=False,
    family="cache_entry",
)


def cache_entry(
    x: mx.array,
    cos: mx.array,
    sin: mx.array,
    kind: str,
    *,
    weight: mx.array | None = None,
    eps: float = 0.0,
    into: mx.array | None = None,
    at: mx.array | None = None,
) -> mx.array:
    """x bfloat16 [B, L, D] or [B, L, H, D], cos and sin [L, pairs], kind "fp8", "fp4" or "fp4_e4m3"; weight [D] asks
    for the norm. Returns bfloat16 of x's shape.

    With `into` bfloat16 [B, R, D] and `at` int32 [1], for x [B, L, D] with L <= R: returns a new array, `into` with
    the rows (at + i) % R replaced by the entries i = 0 .. L - 1; `into` itself stays.

    Raises ValueError for another kind, a width of broken blocks, or parts that do not fit each other.
    """
    if kind not in KINDS:
        raise ValueError(f"cache_entry got the rounding {kind!r}, expected one of {', '.join(KINDS)}; correct it.")
    if into is not None:
        _check_ring(x, into, at)
        return cache_entry_ref(x, cos, sin, kind, weight=weight, eps=eps, into=into, at=at)
    D, P = x.shape[-1], cos.shape[-1]
    L, H = x.shape[-3:-1] if x.ndim == 4 else (x.shape[-2], 1)
    fits = x.dtype == mx.bfloat16 and D % 32 == 0 and D <= _WIDEST and 0 < 2 * P <= D and cos.shape == (L, P)
    if x.size == 0 or not fits or not enabled("cache_entry"):
        return cache_entry_ref(x, cos, sin, kind, weight=weight, eps=eps)
    number, block = KINDS[kind]
    template = {"D": D, "P": P, "H": H, "NORMED": weight is not None, "KIND": number, "BLOCK": block}
    return _entry_kernel(
        inputs=[x.reshape(-1, L, H, D), cos if weight is None else weight, floats(eps), cos, sin],
        template=list(template.items()),
        grid=(prod(x.shape[:-1]) * D, 1, 1),
        threadgroup=(D, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def norm_and_entry(
    low_rank: mx.array,
    q_weight: mx.array,
    kv: mx.array,
    cos: mx.array,
    sin: mx.array,
    kind: str,
    kv_weight: mx.array,
    eps: float,
    *,
    into: mx.array,
    at: mx.array,
) -> tuple[mx.array, mx.array]:
    """`rms_norm(low_rank, q_weight, eps)` and `cache_entry(kv, .., weight=kv_weight, eps=eps, into=into, at=at)`, in
    one launch: low_rank [B, L, C], kv bfloat16 [B, L, D], the rest as there. Raises ValueError as they do.
    """
    return norm_and_entry_ref(low_rank, q_weight, kv, cos, sin, kind, kv_weight, eps, into=into, at=at)


def _check_ring(x: mx.array, into: mx.array, at: mx.array | None) -> None:
    fits = x.ndim == into.ndim == 3 and (x.shape[0], x.shape[2]) == (into.shape[0], into.shape[2])
    if not fits or x.shape[1] > into.shape[1] or at is None or at.shape != (1,) or at.dtype != mx.int32:
        raise ValueError(
            f"cache_entry got x {x.shape}, into {into.shape} and at {None if at is None else (at.dtype, at.shape)},"
            " expected [B, L, D], [B, R, D] with L <= R, and int32 [1]; pass the ring of this layer and a short step."
        )


def cache_entry_ref(
    x: mx.array,
    cos: mx.array,
    sin: mx.array,
    kind: str,
    *,
    weight: mx.array | None = None,
    eps: float = 0.0,
    into: mx.array | None = None,
    at: mx.array | None = None,
) -> mx.array:
    if weight is not None:
        x = rms_norm_ref(x, weight, eps)
    entries = _ROUNDINGS[kind](rope_ref(x, cos, sin))
    return entries if into is None else ring_ref(into, entries, at, axis=1)


def norm_and_entry_ref(
    low_rank: mx.array,
    q_weight: mx.array,
    kv: mx.array,
    cos: mx.array,
    sin: mx.array,
    kind: str,
    kv_weight: mx.array,
    eps: float,
    *,
    into: mx.array,
    at: mx.array,
) -> tuple[mx.array, mx.array]:
    ring = cache_entry_ref(kv, cos, sin, kind, weight=kv_weight, eps=eps, into=into, at=at)
    return rms_norm_ref(low_rank, q_weight, eps), ring


def cases() -> list[Case]:
    def inputs(rng: np.random.Generator, shape: tuple[int, ...], pairs: int) -> list[mx.array]:
        x = mx.array(rng.standard_normal(shape, dtype=np.float32) * 3).astype(mx.bfloat16)
        weight = mx.array(1 + 0.1 * rng.standard_normal(shape[-1], dtype=np.float32))
        return [x, weight, *rope_table(np.arange(shape[1]) * 7 + 5, 1.0 / 1.3 ** np.arange(pairs, dtype=np.float32))]

    def case(shape: tuple[int, ...], pairs: int, kind: str, normed: bool, large: bool = False) -> Case:
        def run(op, x: mx.array, weight: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
            return op(x, cos, sin, kind, weight=weight, eps=1e-20) if normed else op(x, cos, sin, kind)

        what = "normed_" * normed + kind
        return Case(
            f"cache_entry/{what}_{'x'.join(map(str, shape[1:]))}_tail{2 * pairs}",
            functools.partial(run, cache_entry),
            functools.partial(run, cache_entry_ref),
            functools.partial(inputs, shape=shape, pairs=pairs),
            tolerance=1e-6,
            bytes=4 * prod(shape),
            large=large,
        )

    return [
        case((2, 3, 96), 8, "fp8", True),
        case((1, 2, 64), 16, "fp4", True),
        case((1, 5, 64), 32, "fp4_e4m3", False),
        case((1, 2, 4, 128), 32, "fp4", False),
        case((1, 6, 512), 32, "fp8", True, large=True),
        case((1, 6, 32, 128), 32, "fp4", False, large=True),
    ]
