"""The end of a sublayer: its last product, and the expansion of the streams by what the product gives.

    y  = bf16(x W^T),  or  bf16(sum over experts of bf16(a W2[e]^T) + bf16(s W2^T))
    h' = expand(y, h, mix)

The formulas are those of quant_matmul.py, expert_matmul.py and hyper_connection.py, with their roundings in between.

Kernels (up to 8 rows), within tolerance of the references and bit for bit the two launches that each stands for: a
channel of h' needs y at that channel only. y itself is not kept. Bytes: the weight once, h in, h' out. More rows take
the launches one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod

import mlx.core as mx
import numpy as np

from mlx_ds4.formats import planes as block_planes

from . import _expand_cuda, _quant_cuda
from ._case import Case
from ._expert_sources import DOWN_SUMS, FEW_HEADER, PAIRS
from ._hyper_sources import EXPAND_HEADER
from ._kernel import Kernel, tickets
from ._octet import (
    FORMAT_IDS,
    OCTET_HEADER,
    ceil_div,
    check_planes,
    kernel_takes,
    numbers,
    plane_inputs,
    power_of_two,
    rows_per_simdgroup,
    x_input,
)
from ._random_planes import BYTES, random_planes, weights_of
from ._switches import backend, enabled
from .expert_matmul import Plan, SharedDown, expert_down, expert_down_ref, few_pairs
from .hyper_connection import STREAMS, expand, expand_ref
from .quant_matmul import MOST_ROWS, SIMDGROUPS, quant_matmul, quant_matmul_ref

Weight = tuple[str, block_planes.Planes]

# What a lane does with v, the sum at channel c of a row.
_STORE = """
            hyper_expand<M, C>(h, mix + row * uint(M + M * M), float(bfloat16_t(v)),
                               ulong(row) * ulong(M * C) + ulong(c), expanded);
"""

_PROJECT_SOURCE = (
    """
    // A simdgroup owns R channels of all ROWS rows. octets: of a row of x.
    const uint rows = uint(ROWS);
    uint lane = thread_index_in_simdgroup;
    uint first = thread_position_in_grid.x / 32u * uint(R);
    ulong at[ROWS], lines[R];
    float sum[R * ROWS];
    for (uint r = 0; r < uint(R); r++) lines[r] = ulong(metal::min(first + r, uint(C - 1)));
    for (uint m = 0; m < rows; m++) at[m] = ulong(m) * ulong(octets[0]);
    octet_sums<FORMAT, WIDE, R, ROWS>(x, at, codes, scales, supers, lines, octets[0], lane, sum);
    float v = 0.0f;  // every lane holds all sums: lane r * ROWS + m finishes sum r * ROWS + m
    for (uint i = 0; i < uint(R * ROWS); i++)
        if (lane == i) v = sum[i];
    uint row = lane % rows, c = first + lane / rows;
    if (lane < uint(R * ROWS) && c < uint(C)) {
"""
    + _STORE
    + """
    }
"""
)

_EXPERTS_SOURCE = (
    """
    // A simdgroup goes through the distinct experts for R outputs of every row, as in expert_down. sizes: octets of a,
    // outputs, K, pairs, octets of the shared expert's a.
    const uint rows = sizes[3] / sizes[2];
"""
    + PAIRS
    + DOWN_SUMS
    + """
    if (lane < rows) {
        for (uint r = 0; r < uint(R); r++) {
            uint row = lane, c = first + r;
            float v = total[r];
            if (c >= outputs) break;
"""
    + _STORE
    + """
        }
    }
"""
)

_STREAMS, _OUTPUTS = ["h", "mix"], ["expanded"]
_ONE = ["codes", "scales", "supers"]
_kernel = functools.partial(Kernel, exact=False, family="expand_matmul")
_project_kernel = _kernel(
    "expand_project", ["x", "octets", *_ONE, *_STREAMS], _OUTPUTS, _PROJECT_SOURCE, OCTET_HEADER + EXPAND_HEADER
)
_experts_kernel = _kernel(
    "expand_experts",
    ["x", "sizes", "chosen", *_ONE, "shared_x", *[f"shared_{plane}" for plane in _ONE], *_STREAMS],
    _OUTPUTS,
    _EXPERTS_SOURCE,
    FEW_HEADER + EXPAND_HEADER,
)


def project_expand(x: mx.array, weight: Weight, h: mx.array, mix: mx.array) -> mx.array:
    """expand(y, h, mix) with y = `quant_matmul(x, *weight)`: x [.., in], weight [C, in]. Errors as there."""
    check_planes("project_expand", *weight, x.shape[-1])
    N = prod(x.shape[:-1])
    if not _launches(N, h, mix, (x, weight)):
        return expand(quant_matmul(x, *weight), h, mix)
    if backend() == "cuda":
        return _expand_cuda.project(x, weight, h, mix)
    words, wide = x_input(x)
    R = rows_per_simdgroup(h.shape[-1], 4 if N <= 4 else 2)
    return _launch(
        _project_kernel,
        [words, numbers(x.shape[-1] // 8), *plane_inputs(*weight)],
        [("FORMAT", FORMAT_IDS[weight[0]]), ("WIDE", wide), ("R", R), ("ROWS", N)],
        h,
        mix,
        R,
    )


def project_expand_ref(x: mx.array, weight: Weight, h: mx.array, mix: mx.array) -> mx.array:
    return expand_ref(quant_matmul_ref(x, *weight), h, mix)


def experts_expand(
    a: mx.array,
    down: Weight,
    chosen: mx.array,
    shared: SharedDown,
    h: mx.array,
    mix: mx.array,
    *,
    plan: Plan | None = None,
    counts: mx.array | None = None,
) -> mx.array:
    """expand(y, h, mix) with y = `expert_down(a, down, chosen, shared, plan=plan)` in the shape of the streams.
    Errors as there.

    `counts`: int32 zeros, `_kernel.tickets()`, that no launch uses which may run at the same time; zeros again behind
    this one; without them CUDA takes two launches.
    """
    for weight, width in ((down, a.shape[-1]), (shared[1], shared[0].shape[-1])):
        check_planes("experts_expand", *weight, width)
    N, K, F = a.shape
    C = h.shape[-1]
    if not few_pairs(N, K) or not _launches(N, h, mix, (a, down), shared):
        y = expert_down(a, down, chosen, shared, plan=plan).reshape(*h.shape[:-2], C)
        return expand(y, h, mix)
    if backend() == "cuda":
        return _expand_cuda.experts(a, down, chosen, shared, h, mix, counts)
    words, wide = x_input(a)
    shared_words, shared_wide = x_input(shared[0])
    R = rows_per_simdgroup(C, 2)
    sizes = numbers(F // 8, C, K, N * K, shared[0].shape[-1] // 8)
    formats = [("FORMAT", FORMAT_IDS[down[0]]), ("WIDE", wide), ("SHARED", True), ("FS", FORMAT_IDS[shared[1][0]])]
    return _launch(
        _experts_kernel,
        [words, sizes, chosen, *plane_inputs(*down), shared_words, *plane_inputs(*shared[1])],
        [*formats, ("WIDE_SHARED", shared_wide), ("R", R), ("MOST", power_of_two(N))],
        h,
        mix,
        R,
    )


def experts_expand_ref(
    a: mx.array, down: Weight, chosen: mx.array, shared: SharedDown, h: mx.array, mix: mx.array
) -> mx.array:
    y = expert_down_ref(a, down, chosen, shared).reshape(*h.shape[:-2], h.shape[-1])
    return expand_ref(y, h, mix)


def _launches(rows: int, h: mx.array, mix: mx.array, *products: tuple[mx.array, Weight]) -> bool:
    if not enabled("expand_matmul") or not 0 < rows <= MOST_ROWS or h.shape[-2] not in STREAMS:
        return False
    if backend() == "cuda" and not (
        _expand_cuda.takes(h, mix)
        and all(_quant_cuda.takes(x, w[0], x.shape[-1]) for x, w in products)
        and all(_quant_cuda.takes_down(x, w[0]) for x, w in products if x.ndim == 3)  # of experts
    ):
        return False
    return all(kernel_takes(*weight) for _, weight in products)


def _launch(kernel: Kernel, inputs, template, h: mx.array, mix: mx.array, R: int) -> mx.array:
    M, C = h.shape[-2:]
    return kernel(
        inputs=[*inputs, h, mix],
        template=[*template, ("M", M), ("C", C)],
        grid=(ceil_div(C, R * SIMDGROUPS) * 32 * SIMDGROUPS, 1, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[h.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def cases() -> list[Case]:
    # y is kept small against the streams: a product rounded to the other side, a unit in the last place of y, then
    # stays within this part of the largest stream.
    small, tolerance = 0.125, 2e-3

    def normal(rng: np.random.Generator, *shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32))

    def streams(rng: np.random.Generator, rows: int, M: int, C: int) -> list[mx.array]:
        return [normal(rng, rows, M, C).astype(mx.bfloat16), normal(rng, rows, M + M * M)]

    def projection(rows: int, M: int, C: int, width: int, format: str, large: bool = False) -> Case:
        def inputs(rng: np.random.Generator) -> list[mx.array]:
            planes = random_planes(rng, format, C, width)
            return [(small * normal(rng, rows, width)).astype(mx.bfloat16), *streams(rng, rows, M, C), *planes.values()]

        def run(op: Callable, x: mx.array, *arrays: mx.array) -> mx.array:
            (weight,) = weights_of([format], arrays[2:])
            return op(x, weight, *arrays[:2])

        return Case(
            f"expand_matmul/{format.lower()}_{rows}x{width}_to_{M}x{C}",
            functools.partial(run, project_expand),
            functools.partial(run, project_expand_ref),
            inputs,
            tolerance=tolerance,
            bytes=int(C * width * BYTES[format]) + 2 * rows * (width + C * (2 * M + 1)),
            large=large,
        )

    def experts(rows: int, chosen: int, E: int, M: int, C: int, F: int, *formats: str, large: bool = False) -> Case:
        def inputs(rng: np.random.Generator) -> list[mx.array]:
            a, s = ((small * normal(rng, *some)).astype(mx.bfloat16) for some in ((rows, chosen, F), (rows, F)))
            choice = np.sort(np.argsort(rng.random((rows, E)), axis=1)[:, :chosen], axis=1).astype(np.int32)
            planes = [random_planes(rng, f, *shape) for f, shape in zip(formats, ((E, C, F), (C, F)), strict=True)]
            arrays = [array for some in planes for array in some.values()]
            return [a, s, mx.array(choice), *streams(rng, rows, M, C), *arrays]

        def run(op: Callable, a: mx.array, s: mx.array, choice: mx.array, *arrays: mx.array) -> mx.array:
            down, shared = weights_of(formats, arrays[2:])
            counts = {"counts": tickets()} if op is experts_expand else {}
            return op(a, down, choice, (s, shared), *arrays[:2], **counts)

        return Case(
            f"expand_matmul/{'_'.join(f.lower() for f in formats)}_{rows}x{chosen}_of_{E}_{F}_to_{M}x{C}",
            functools.partial(run, experts_expand),
            functools.partial(run, experts_expand_ref),
            inputs,
            tolerance=tolerance,
            bytes=int(C * F * (min(E, rows * chosen) * BYTES[formats[0]] + BYTES[formats[1]])) + 4 * rows * M * C,
            large=large,
        )

    return [
        projection(1, 4, 40, 96, "Q8_0"),
        projection(3, 2, 67, 256, "Q4_K"),
        projection(8, 1, 33, 64, "BF16"),
        experts(1, 6, 7, 4, 40, 64, "Q8_0", "Q8_0"),
        experts(5, 3, 8, 2, 67, 256, "Q2_K", "F16"),
        experts(3, 2, 5, 4, 168, 256, "Q2_K", "Q8_0"),
        experts(8, 3, 5, 2, 67, 256, "MXFP4", "Q4_K"),
        *[projection(rows, 4, 5120, 8192, "Q8_0", large=True) for rows in (1, 6)],
        *[experts(rows, 6, 384, 4, 5120, 2304, "Q2_K", "Q8_0", large=True) for rows in (1, 6)],
    ]
