"""What enters a cache, in one launch: perhaps a norm, the rotation of the tail, and the rounding of the cache's format.

    y = fake_quant(rope(rms_norm(x, weight, eps)))        without a weight: fake_quant(rope(x))

Window KV (norm, fp8), compressed KV (fp4_e4m3), index keys (norm, fp4) and index queries (fp4); architecture notes 3.4.
Norm and rotation round to bfloat16 as they do on their own, so the result is that of the three ops one after the other.
`into` writes the rows of a step into a small ring in the same launch, as a new array: the cache's own write would be
a launch more, and copies as much. `norm_and_entry` also takes along the norm of the low-rank query of the same layer
and the coefficients of its site.

Kernels, within tolerance (the order of the norm's sum, and products that a GPU may fuse, differ; a value that rounds
the other way there can move to the next code); the forms give the same bits. Bytes: x once in, once out; a ring of R
rows 4 R D more. One launch instead of three, four with the ring, six with the query's norm and the
coefficients.
"""

from __future__ import annotations

import functools
from math import prod

import mlx.core as mx
import numpy as np

from ._cache_entry_sources import ENTRY_SOURCE, ring_source
from ._case import Case
from ._hyper_sources import COEFFICIENTS_HEADER
from ._kernel import Kernel, float_bits
from ._rows import ring_ref
from ._switches import enabled
from .fake_quant import FAKE_QUANT_HEADER, KINDS, fake_quant_fp4_e4m3_ref, fake_quant_fp4_ref, fake_quant_fp8_ref
from .hyper_connection import RIDER_INPUTS, RIDER_OUTPUTS, SUMS, SiteSums, coefficients, coefficients_ref, random_sums
from .rms_norm import rms_norm, rms_norm_ref, simdgroups_for
from .rope import rope_ref, rope_table

_ROUNDINGS = {"fp8": fake_quant_fp8_ref, "fp4": fake_quant_fp4_ref, "fp4_e4m3": fake_quant_fp4_e4m3_ref}
_WIDEST = 1024  # one thread a value

_RING_INPUTS = ["x", "weight", "cosine", "sine", "into", "at"]
_entry_kernel = Kernel(
    "cache_entry",
    ["x", "weight", "cosine", "sine"],
    ["y"],
    ENTRY_SOURCE,
    FAKE_QUANT_HEADER,
    exact=False,
    family="cache_entry",
)
_ring_kernel = Kernel(
    "cache_entry_ring",
    _RING_INPUTS,
    ["ring"],
    ring_source(with_query=False),
    FAKE_QUANT_HEADER,
    exact=False,
    family="cache_entry",
)
_norm_ring_kernel = Kernel(
    "cache_entry_norm_ring",
    [*_RING_INPUTS, "low_rank", "q_weight", *RIDER_INPUTS],
    ["ring", "qr", *RIDER_OUTPUTS],
    ring_source(with_query=True),
    FAKE_QUANT_HEADER + COEFFICIENTS_HEADER,
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
    D, P = x.shape[-1], cos.shape[-1]
    L, H = x.shape[-3:-1] if x.ndim == 4 else (x.shape[-2], 1)
    if not _fits(x, cos, L) or (into is not None and into.dtype != mx.bfloat16) or not enabled("cache_entry"):
        return cache_entry_ref(x, cos, sin, kind, weight=weight, eps=eps, into=into, at=at)
    if into is not None:
        return _write(x, weight, eps, cos, sin, kind, into, at)[0]
    return _entry_kernel(
        inputs=[x.reshape(-1, L, H, D), cos if weight is None else weight, cos, sin],
        template=[("H", H), *_template(D, P, kind, weight, eps)],
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
    sums: SiteSums,
    *,
    into: mx.array,
    at: mx.array,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """`rms_norm(low_rank, q_weight, eps)`, `cache_entry(kv, .., weight=kv_weight, eps=eps, into=into, at=at)` and the
    two of `coefficients(sums)`, in one launch: low_rank [B, L, C], kv bfloat16 [B, L, D], the rest as there. Raises
    ValueError as they do.
    """
    if kind not in KINDS:
        raise ValueError(f"norm_and_entry got the rounding {kind!r}, expected one of {', '.join(KINDS)}; correct it.")
    _check_ring(kv, into, at)
    if low_rank.ndim != 3 or low_rank.shape[:2] != kv.shape[:2] or q_weight.shape != low_rank.shape[2:]:
        raise ValueError(
            f"norm_and_entry got low_rank {low_rank.shape} and q_weight {q_weight.shape} for kv {kv.shape}, expected"
            " [B, L, C] and [C]; pass the tensors of one step."
        )
    fits = low_rank.size > 0 and low_rank.dtype in (mx.bfloat16, mx.float16, mx.float32) and into.dtype == mx.bfloat16
    fits = fits and _fits(kv, cos, kv.shape[1]) and enabled("cache_entry") and enabled("rms_norm")
    if not fits or not sums.takes_kernel:
        ring = cache_entry(kv, cos, sin, kind, weight=kv_weight, eps=eps, into=into, at=at)
        return rms_norm(low_rank, q_weight, eps), ring, *coefficients(sums)
    ring, qr, pre, mix = _write(kv, kv_weight, eps, cos, sin, kind, into, at, (low_rank, q_weight, sums))
    return qr, ring, pre, mix


def _fits(x: mx.array, cos: mx.array, length: int) -> bool:
    D, P = x.shape[-1], cos.shape[-1]
    known = x.dtype == mx.bfloat16 and D % 32 == 0 and D <= _WIDEST and 0 < 2 * P <= D
    return known and x.size > 0 and cos.shape == (length, P)


def _template(
    width: int, pairs: int, kind: str, weight: mx.array | None, eps: float
) -> list[tuple[str, int | bool | mx.Dtype]]:
    number, block = KINDS[kind]
    norm = [("NORMED", weight is not None), ("EPS_BITS", float_bits(eps))]
    return [("D", width), ("P", pairs), *norm, ("KIND", number), ("BLOCK", block)]


def _write(
    x: mx.array,
    weight: mx.array | None,
    eps: float,
    cos: mx.array,
    sin: mx.array,
    kind: str,
    into: mx.array,
    at: mx.array,
    beside: tuple[mx.array, mx.array, SiteSums] | None = None,
) -> list[mx.array]:
    """The launch that writes into a ring: the new ring and, with `beside` = (low_rank, q_weight, sums), the norm and
    the coefficients."""
    B, L, D = x.shape
    simdgroups = simdgroups_for(beside[0].shape[2]) if beside else 0
    threads = max(D, 32 * simdgroups)
    groups = B * L + -(-into.size // 8 // threads)
    call = {
        "inputs": [x, cos if weight is None else weight, cos, sin, into, at],
        "template": [("THREADS", threads), *_template(D, cos.shape[-1], kind, weight, eps)],
        "output_shapes": [into.shape],
        "output_dtypes": [mx.bfloat16],
    }
    if beside:
        low_rank, q_weight, sums = beside
        query = {
            "inputs": [low_rank, q_weight],
            "template": [("C", low_rank.shape[2]), ("SG", simdgroups), ("T", low_rank.dtype)],
            "output_shapes": [low_rank.shape],
            "output_dtypes": [low_rank.dtype],
        }
        groups += B * L + sums.rows
        call = sums.behind({name: values + query[name] for name, values in call.items()})
    kernel = _norm_ring_kernel if beside else _ring_kernel
    return kernel(**call, grid=(groups * threads, 1, 1), threadgroup=(threads, 1, 1))


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
    sums: SiteSums,
    *,
    into: mx.array,
    at: mx.array,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    ring = cache_entry_ref(kv, cos, sin, kind, weight=kv_weight, eps=eps, into=into, at=at)
    return rms_norm_ref(low_rank, q_weight, eps), ring, *coefficients_ref(sums)


def cases() -> list[Case]:
    def normal(rng: np.random.Generator, *shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32) * 3).astype(mx.bfloat16)

    def inputs(rng: np.random.Generator, shape: tuple[int, ...], pairs: int) -> list[mx.array]:
        weight = mx.array(1 + 0.1 * rng.standard_normal(shape[-1], dtype=np.float32))
        table = rope_table(np.arange(shape[1]) * 7 + 5, 1.0 / 1.3 ** np.arange(pairs, dtype=np.float32))
        return [normal(rng, *shape), weight, *table]

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

    def ring(
        shape: tuple[int, int, int], R: int, at: int, pairs: int, kind: str, normed: bool = True, large: bool = False
    ) -> Case:
        def arrays(rng: np.random.Generator) -> list[mx.array]:
            into = normal(rng, shape[0], R, shape[2])
            return [*inputs(rng, shape, pairs), into, mx.array([at], dtype=mx.int32)]

        def run(op, x: mx.array, weight: mx.array, cos: mx.array, sin: mx.array, into: mx.array, at: mx.array):
            return op(x, cos, sin, kind, weight=weight if normed else None, eps=1e-20, into=into, at=at)

        what = "normed_" * normed + kind
        return Case(
            f"cache_entry/ring{R}_at{at}_{what}_{'x'.join(map(str, shape))}_tail{2 * pairs}",
            functools.partial(run, cache_entry),
            functools.partial(run, cache_entry_ref),
            arrays,
            tolerance=1e-6,
            bytes=2 * prod(shape) + 4 * shape[0] * R * shape[2],
            large=large,
        )

    def with_query(shape: tuple[int, int, int], C: int, R: int, at: int, pairs: int, large: bool = False) -> Case:
        def arrays(rng: np.random.Generator) -> list[mx.array]:
            query = [normal(rng, *shape[:2], C), mx.array(1 + rng.standard_normal(C)).astype(mx.bfloat16)]
            into = normal(rng, shape[0], R, shape[2])
            sums = random_sums(rng, *shape[:2])
            return [*query, *inputs(rng, shape, pairs), into, mx.array([at], dtype=mx.int32), *sums]

        def run(op, low_rank, q_weight, kv, weight, cos, sin, into, at, *sums):
            sums = SiteSums(*sums, **SUMS)
            return op(low_rank, q_weight, kv, cos, sin, "fp8", weight, 1e-20, sums, into=into, at=at)

        return Case(
            f"cache_entry/query{C}_ring{R}_at{at}_{'x'.join(map(str, shape))}_tail{2 * pairs}",
            functools.partial(run, norm_and_entry),
            functools.partial(run, norm_and_entry_ref),
            arrays,
            tolerance=1e-5,  # of the coefficients
            bytes=2 * prod(shape) + 4 * shape[0] * (R * shape[2] + shape[1] * (C + 800)),
            large=large,
        )

    return [
        case((2, 3, 96), 8, "fp8", True),
        case((1, 2, 64), 16, "fp4", True),
        case((1, 5, 64), 32, "fp4_e4m3", False),
        case((1, 2, 4, 128), 32, "fp4", False),
        ring((2, 3, 96), 9, 1_048_571, 8, "fp8"),  # over the end of the ring: 8 mod 9
        ring((1, 5, 64), 5, 3, 32, "fp4_e4m3", normed=False),  # all of the ring
        ring((1, 1, 32), 1, 7, 1, "fp4"),
        with_query((2, 3, 96), 160, 9, 7, 8),
        with_query((1, 2, 32), 1290, 3, 2, 4),  # more simdgroups for the query than for an entry
        case((1, 6, 512), 32, "fp8", True, large=True),
        case((1, 6, 32, 128), 32, "fp4", False, large=True),
        *[ring((1, rows, 512), R, 1000, 32, "fp8", large=True) for rows in (1, 6) for R in (136, 512)],
        *[with_query((1, rows, 512), 1280, 136, 1000, 32, large=True) for rows in (1, 6)],
    ]
