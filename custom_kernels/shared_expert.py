"""The first half of a feed-forward part: the router's logits, and gate, up and clamped SwiGLU of the shared expert.

    z    = r Wr^T                                                               float32
    g, u = bf16(x W1^T), bf16(x W3^T)                                           products float32, rounded once
    a    = bf16(silu(min(g, limit)) * clip(u, -limit, limit))                   float32 inside

Architecture notes 8.1 and 8.2. r and x are the same rows; where the trained formats ask for FP8 inputs, the caller
rounds x. A row's result does not depend, bit for bit, on the rows beside it while they are at most 8.

Kernel `shared_expert` (up to 8 rows), within tolerance of the reference and bit for bit what the router's product, the
two products and the SwiGLU give one after another, in one launch instead of three or four. Bytes: the three matrices
once (5120 x 384 F32 and twice 5120 x 2304 Q8_0: 33 MB); the products never reach memory. On CUDA tensor cores multiply.
More rows take the launches one by one; `clamped_swiglu` is one of them.

`shared_swiglu_routed` also chooses the experts and makes a site's coefficients: on CUDA in the same launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_ds4.formats import planes as block_planes

from . import _quant_group_cuda, _shared_routed_cuda
from ._case import Case
from ._expert_sources import SHARED_HEADER, SHARED_SOURCE, SWIGLU_HEADER, SWIGLU_SOURCE
from ._kernel import Kernel, floats, tickets
from ._octet import (
    FORMAT_IDS,
    ceil_div,
    check_planes,
    kernel_takes,
    numbers,
    plane_inputs,
    rows_per_simdgroup,
    x_input,
)
from ._random_planes import BYTES, random_planes, weights_of
from ._switches import backend, enabled
from .hyper_connection import SUMS, SiteSums, random_sums
from .quant_matmul import MOST_ROWS, SIMDGROUPS, quant_matmul, quant_matmul_group, quant_matmul_ref
from .router import route_beside, route_beside_ref

Weight = tuple[str, block_planes.Planes]

_PLANES = [f"{matrix}_{plane}" for matrix in ("router", "gate", "up") for plane in ("codes", "scales", "supers")]
_kernel = functools.partial(Kernel, exact=False, family="shared_expert")
_shared_kernel = _kernel(
    "shared_expert", ["r", "x", "sizes", "limit", *_PLANES], ["logits", "a"], SHARED_SOURCE, SHARED_HEADER
)
_swiglu_kernel = _kernel(
    "clamped_swiglu", ["gate", "up", "weight", "limit", "sizes"], ["a"], SWIGLU_SOURCE, SWIGLU_HEADER
)
_SWIGLU_THREADS = 256


def shared_swiglu(
    x: mx.array, gate: Weight, up: Weight, router_x: mx.array, router: Weight, *, limit: float
) -> tuple[mx.array, mx.array]:
    """x, router_x [N, C] -> (router logits float32 [N, E], a bfloat16 [N, F]).

    `router_x` is x before a rounding to FP8, or x itself. The three weights may differ in format. Raises ValueError for
    an unknown format or weights of another width.
    """
    for weight in (gate, up, router):
        check_planes("shared_swiglu", *weight, x.shape[-1])
    if not _launches(x, gate, up, router_x, router):
        logits = quant_matmul(router_x, *router, out_dtype=mx.float32)
        return logits, clamped_swiglu(*quant_matmul_group(x, [gate, up]), limit)
    N, E, F = x.shape[0], router[1]["codes"].shape[0], gate[1]["codes"].shape[0]
    if backend() == "cuda":
        return _quant_group_cuda.shared_swiglu(x, gate, up, router_x, router, limit)
    words, wide = x_input(x)
    router_words = words if router_x is x else x_input(router_x)[0]
    R = rows_per_simdgroup(E + F, 4 if N <= 4 else 2)
    blocks = ceil_div(E, R * SIMDGROUPS) + ceil_div(F, R * SIMDGROUPS)
    formats = [(f"F{name}", FORMAT_IDS[weight[0]]) for name, weight in zip("RGU", (router, gate, up), strict=True)]
    planes = [array for weight in (router, gate, up) for array in plane_inputs(*weight)]
    logits, a = _shared_kernel(
        inputs=[router_words, words, numbers(x.shape[-1] // 8, E, F), floats(limit), *planes],
        template=[*formats, ("WIDE", wide), ("R", R), ("M", N)],
        grid=(blocks * 32 * SIMDGROUPS, 1, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(N, E), (N, F)],
        output_dtypes=[mx.float32, mx.bfloat16],
    )
    return logits, a


def shared_swiglu_routed(
    x: mx.array,
    gate: Weight,
    up: Weight,
    router_x: mx.array,
    router: Weight,
    bias: mx.array,
    sums: SiteSums,
    *,
    k: int,
    factor: float,
    limit: float,
    counts: mx.array | None = None,
) -> tuple[mx.array, ...]:
    """The two results of `shared_swiglu`, and the four of `route_beside(logits, bias, sums, k=k, factor=factor)`.

    `counts`: int32 zeros, `_kernel.tickets()`, that no launch uses which may run at the same time; zeros again behind
    this one; without them there are two launches. Raises ValueError as they do.
    """
    routed = (
        backend() == "cuda" and counts is not None and enabled("router") and _launches(x, gate, up, router_x, router)
    )
    if routed and _shared_routed_cuda.takes(x, gate, router, k, sums):
        for weight in (gate, up, router):
            check_planes("shared_swiglu", *weight, x.shape[-1])
        options = {"k": k, "factor": factor, "limit": limit}
        return tuple(
            _shared_routed_cuda.shared_swiglu_routed(x, gate, up, router_x, router, bias, sums, counts, **options)
        )
    logits, a = shared_swiglu(x, gate, up, router_x, router, limit=limit)
    return logits, a, *route_beside(logits, bias, sums, k=k, factor=factor)


def _launches(x: mx.array, gate: Weight, up: Weight, router_x: mx.array, router: Weight) -> bool:
    if not enabled("shared_expert") or not 0 < x.shape[0] <= MOST_ROWS or router_x.dtype != x.dtype:
        return False
    if not all(kernel_takes(*weight) for weight in (gate, up, router)):
        return False
    return backend() != "cuda" or _quant_group_cuda.takes_shared(x, gate[0], up[0], router[0])


def shared_swiglu_ref(
    x: mx.array, gate: Weight, up: Weight, router_x: mx.array, router: Weight, *, limit: float
) -> tuple[mx.array, mx.array]:
    logits = quant_matmul_ref(router_x, *router, out_dtype=mx.float32)
    return logits, clamped_swiglu_ref(quant_matmul_ref(x, *gate), quant_matmul_ref(x, *up), limit)


def shared_swiglu_routed_ref(
    x, gate, up, router_x, router, bias: mx.array, sums: SiteSums, *, k: int, factor: float, limit: float
) -> tuple[mx.array, ...]:
    logits, a = shared_swiglu_ref(x, gate, up, router_x, router, limit=limit)
    return logits, a, *route_beside_ref(logits, bias, sums, k=k, factor=factor)


def clamped_swiglu(gate: mx.array, up: mx.array, limit: float, weight: mx.array | None = None) -> mx.array:
    """gate, up [.., F] -> bfloat16 [.., F]; `weight` float32 [.., 1] is the routing weight (architecture notes 8.2).

    The gate branch is clamped from above only. One launch instead of about 8 where both inputs are bfloat16.
    """
    bfloat16 = gate.dtype == mx.bfloat16 and up.dtype == mx.bfloat16
    if gate.size == 0 or not bfloat16 or not enabled("shared_expert"):
        return clamped_swiglu_ref(gate, up, limit, weight)
    some = floats(1.0) if weight is None else weight
    return _swiglu_kernel(
        inputs=[gate, up, some, floats(limit), numbers(gate.shape[-1], gate.size)],
        template=[("WEIGHTED", weight is not None)],
        grid=(ceil_div(gate.size, _SWIGLU_THREADS) * _SWIGLU_THREADS, 1, 1),
        threadgroup=(_SWIGLU_THREADS, 1, 1),
        output_shapes=[gate.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def clamped_swiglu_ref(gate: mx.array, up: mx.array, limit: float, weight: mx.array | None = None) -> mx.array:
    g = mx.minimum(gate.astype(mx.float32), limit)
    u = mx.clip(up.astype(mx.float32), -limit, limit)
    a = g * mx.sigmoid(g) * u
    return (a if weight is None else weight * a).astype(mx.bfloat16)


def cases() -> list[Case]:
    def inputs(rng: np.random.Generator, rows: int, C: int, E: int, F: int, formats: list[str], same: bool):
        x, other = (mx.array(rng.standard_normal((rows, C)).astype(np.float32)).astype(mx.bfloat16) for _ in range(2))
        planes = [random_planes(rng, f, n, C) for f, n in zip(formats, (F, F, E), strict=True)]
        return [x, *([] if same else [other]), *[array for some in planes for array in some.values()]]

    def run(op: Callable, formats: list[str], same: bool, x: mx.array, *arrays: mx.array):
        router_x, arrays = (x, arrays) if same else (arrays[0], arrays[1:])
        gate, up, router = weights_of(formats, arrays)
        return op(x, gate, up, router_x, router, limit=1.0)

    def case(rows: int, C: int, E: int, F: int, *formats: str, same: bool = True, large: bool = False):
        return Case(
            f"shared_expert/{'_'.join(f.lower() for f in formats)}_{rows}x{C}_{E}+{F}{'' if same else '_rounded'}",
            functools.partial(run, shared_swiglu, formats, same),
            functools.partial(run, shared_swiglu_ref, formats, same),
            functools.partial(inputs, rows=rows, C=C, E=E, F=F, formats=formats, same=same),
            tolerance=2e-3,  # a unit in the last place of gate or up may be several of their product
            bytes=int(C * (F * sum(BYTES[f] for f in formats[:2]) + E * BYTES[formats[2]]))
            + rows * (2 * C + 4 * E + 2 * F),
            large=large,
        )

    def routed(rows: int, C: int, E: int, F: int, k: int, *formats: str, large: bool = False):
        def arrays(rng: np.random.Generator):
            made = inputs(rng, rows, C, E, F, list(formats), True)
            return [mx.array(rng.standard_normal(E, dtype=np.float32)), *random_sums(rng, rows), *made]

        def call(op: Callable, bias: mx.array, dots, base, scale, x: mx.array, *planes: mx.array):
            gate, up, router = weights_of(formats, planes)
            sums = SiteSums(dots, base, scale, **SUMS)
            counts = {"counts": tickets()} if op is shared_swiglu_routed else {}
            return op(x, gate, up, x, router, bias, sums, k=k, factor=1.5, limit=1.0, **counts)

        return Case(
            f"shared_expert/routed_{'_'.join(f.lower() for f in formats)}_{rows}x{C}_{E}+{F}_k{k}",
            functools.partial(call, shared_swiglu_routed),
            functools.partial(call, shared_swiglu_routed_ref),
            arrays,
            tolerance=2e-3,
            bytes=int(C * (F * sum(BYTES[f] for f in formats[:2]) + E * BYTES[formats[2]]))
            + rows * (2 * C + 4 * E + 2 * F),
            large=large,
        )

    def act(rows: int, width: int, weighted: bool, large: bool = False):
        def arrays(rng: np.random.Generator):
            pair = (mx.array(rng.standard_normal((rows, width)).astype(np.float32) * 8) for _ in range(2))
            weight = [mx.array(rng.random((rows, 1), dtype=np.float32))] if weighted else []
            return [*(x.astype(mx.bfloat16) for x in pair), *weight]

        return Case(
            f"shared_expert/clamped_swiglu_{rows}x{width}",
            lambda gate, up, weight=None: clamped_swiglu(gate, up, 10.0, weight),
            lambda gate, up, weight=None: clamped_swiglu_ref(gate, up, 10.0, weight),
            arrays,
            tolerance=2e-7,
            bytes=6 * rows * width,
            large=large,
        )

    return [
        act(3, 67, True),
        act(1, 96, False),
        act(1, 2304, False, large=True),
        case(1, 96, 9, 67, "Q8_0", "Q8_0", "F32"),
        case(3, 256, 8, 33, "Q4_K", "MXFP4", "BF16", same=False),
        case(8, 64, 17, 40, "FP8", "FP8", "F16"),
        routed(1, 128, 40, 33, 6, "Q8_0", "Q8_0", "F32"),
        routed(6, 256, 70, 64, 3, "Q4_K", "MXFP4", "Q8_0"),  # more rows than warps
        *[routed(rows, 5120, 384, 2304, 6, "Q8_0", "Q8_0", "F32", large=True) for rows in (1, 6)],
        case(1, 5120, 384, 2304, "Q8_0", "Q8_0", "F32", large=True),
        case(6, 5120, 384, 2304, "Q8_0", "Q8_0", "F32", large=True),
    ]
