"""Routed experts: gate and up with clamped SwiGLU and the routing weight, then the down projection and the sum.

    g, u = bf16(x W1[e]^T), bf16(x W3[e]^T)                                     products float32, rounded once
    a = bf16(w * (silu(min(g, limit)) * clip(u, -limit, limit)))                float32 inside
    y = bf16(sum over chosen e, ascending, of bf16(a W2[e]^T) + bf16(s W2^T))   float32 sum, rounded once

The last term is the shared expert's, s its own SwiGLU (shared_expert.py).

Architecture notes 8.2. A weight is (format, planes) with a leading expert axis. Where the trained formats ask for FP8
inputs, the caller rounds x and a. A row's result does not depend, bit for bit, on the rows that ride with it while they
are at most `MOST_ROWS`.

Kernels, all within tolerance of the reference. With D distinct experts among the chosen, out x in each:

* `expert_gate_up`, `expert_down` (up to 8 rows): one launch each, the shared expert's last matrix in the second. They
  read the planes of D experts once (bytes a weight: quant_matmul.py), whatever number of rows chose them: the groups of
  an expert's first pair serve all. At one row of top-6, 5120 x 2304, gate/up IQ2_XXS, down Q2_K, shared Q8_0: 36 MB +
  36 MB in two launches.
* CUDA: tensor cores instead (`_quant_cuda.py`, more rows `_expert_tile_cuda.py`), a row's bits the same for any number.
* `expert_gate_up_tile`, `expert_down_tile` (more rows): pairs sorted by expert on the device, tiles of 32 pairs x 64
  outputs by matrix units; an expert's planes are read once per 32 of its rows, experts without rows never. About ten
  small launches sort and count, two multiply, K + 1 add up; [N, K, in + out] in bfloat16 of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_ds4.formats import planes as block_planes

from . import _expert_tile_cuda, _quant_cuda
from ._case import Case
from ._expert_sources import (
    DOWN_SOURCE,
    DOWN_TILE_SOURCE,
    FEW_HEADER,
    GATE_UP_SOURCE,
    GATE_UP_TILE_SOURCE,
    MANY_HEADER,
)
from ._kernel import Kernel, floats
from ._octet import (
    FORMAT_IDS,
    TILE_OUT,
    TILE_ROWS,
    TILE_THREADS,
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
from .quant_matmul import quant_matmul, quant_matmul_ref
from .shared_expert import clamped_swiglu_ref

Weight = tuple[str, dict[str, mx.array]]
# What the expert that all rows share adds: a [N, F] of its SwiGLU, and its last matrix.
SharedDown = tuple[mx.array, Weight]
# Pairs (row, slot) in the order of their experts, where an expert's pairs start, where its tiles start, most tiles. The
# starts are int32 [experts + 1].
Plan = tuple[mx.array, mx.array, mx.array, int]

# More rows go through tiles; not yet measured on a Mac.
MOST_ROWS = 8
_MOST_PAIRS = 64  # two for each lane, and the bits of a mask
_SIMDGROUPS = 4
# Up to this many (row, expert) pairs the reference dequantizes their matrices together, without asking the host.
_GATHERED_PAIRS = 8


def _kernel(name: str, inputs: list[str], output: str, source: str, header: str) -> Kernel:
    return Kernel(name, inputs, [output], source, header, exact=False, family="expert_matmul")


_GATE_UP_PLANES = [f"{which}_{plane}" for which in ("gate", "up") for plane in ("codes", "scales", "supers")]
_ONE = ["codes", "scales", "supers"]
_SHARED = [f"shared_{plane}" for plane in _ONE]
_gate_up_kernel = _kernel(
    "expert_gate_up", ["x", "sizes", "limit", "chosen", "weights", *_GATE_UP_PLANES], "a", GATE_UP_SOURCE, FEW_HEADER
)
_down_kernel = _kernel(
    "expert_down", ["x", "sizes", "chosen", *_ONE, "shared_x", *_SHARED], "y", DOWN_SOURCE, FEW_HEADER
)
_gate_up_tile_kernel = _kernel(
    "expert_gate_up_tile",
    ["x", "sizes", "limit", "weights", "order", "starts", "tile_starts", *_GATE_UP_PLANES],
    "a",
    GATE_UP_TILE_SOURCE,
    MANY_HEADER,
)
_down_tile_kernel = _kernel(
    "expert_down_tile",
    ["x", "sizes", "order", "starts", "tile_starts", "codes", "scales", "supers"],
    "y",
    DOWN_TILE_SOURCE,
    MANY_HEADER,
)


def plan_pairs(chosen: mx.array, experts: int) -> Plan | None:
    """What the products of many rows need to know of the choice: `plan` of both, made once. None for few rows and where
    no kernel runs."""
    if few_pairs(*chosen.shape) or not enabled("expert_matmul"):
        return None
    return _plan(chosen, experts)


def expert_swiglu(
    x: mx.array,
    gate: Weight,
    up: Weight,
    chosen: mx.array,
    weights: mx.array,
    *,
    limit: float,
    plan: Plan | None = None,
) -> mx.array:
    """x bfloat16 [N, C], chosen int32 [N, K] distinct per row, weights float32 [N, K] -> a bfloat16 [N, K, F].

    gate and up may differ in format. `plan`: of `plan_pairs`, else made here. No rows give an empty result. Raises
    ValueError for an unknown format or planes of another width; expert numbers are not checked.
    """
    N, K = chosen.shape
    for format, planes in (gate, up):
        check_planes("expert_swiglu", format, planes, x.shape[-1])
    if not _launches(chosen, gate, up):
        return expert_swiglu_ref(x, gate, up, chosen, weights, limit=limit)
    F = gate[1]["codes"].shape[-2]
    E = gate[1]["codes"].shape[0]
    if backend() == "cuda" and gate[0] == up[0] and _quant_cuda.takes(x, gate[0], x.shape[-1]):
        inputs = (x, gate[0], gate[1], up[1], chosen, weights, limit)
        if not few_pairs(N, K):
            return _expert_tile_cuda.gate_up(*inputs, *(plan or _plan(chosen, E))[:2])
        if _quant_cuda.takes_gate_up(gate[0]):
            return _quant_cuda.gate_up_few(*inputs)
    words, wide = x_input(x)
    formats = [("FG", FORMAT_IDS[gate[0]]), ("FU", FORMAT_IDS[up[0]]), ("WIDE", wide)]
    planes = [*plane_inputs(*gate), *plane_inputs(*up)]
    out = {"output_shapes": [(N, K, F)], "output_dtypes": [mx.bfloat16]}
    octets = x.shape[-1] // 8
    if few_pairs(N, K):
        R = rows_per_simdgroup(N * K * F, 4 if N == 1 else 2)
        return _gate_up_kernel(
            inputs=[words, numbers(octets, F, K, N * K), floats(limit), chosen, weights, *planes],
            template=[*formats, ("R", R), ("MOST", power_of_two(N))],
            grid=(ceil_div(F, R * _SIMDGROUPS) * 32 * _SIMDGROUPS, N * K, 1),
            threadgroup=(32 * _SIMDGROUPS, 1, 1),
            **out,
        )[0]
    order, starts, tile_starts, tiles = plan or _plan(chosen, E)
    return _gate_up_tile_kernel(
        inputs=[words, numbers(octets, F, K, E), floats(limit), weights, order, starts, tile_starts, *planes],
        template=formats,
        grid=(ceil_div(F, TILE_OUT // 2) * TILE_THREADS, tiles, 1),
        threadgroup=(TILE_THREADS, 1, 1),
        **out,
    )[0]


def expert_swiglu_ref(
    x: mx.array, gate: Weight, up: Weight, chosen: mx.array, weights: mx.array, *, limit: float
) -> mx.array:
    K = chosen.shape[1]
    weights = weights.reshape(-1, 1)

    def one(expert: mx.array | int, pairs: mx.array) -> mx.array:
        rows = x[pairs // K]
        return clamped_swiglu_ref(
            _product_ref(rows, gate, expert), _product_ref(rows, up, expert), limit, weights[pairs]
        )

    return _each_expert(chosen, one, gate[1])


def expert_down(
    a: mx.array, down: Weight, chosen: mx.array, shared: SharedDown | None = None, *, plan: Plan | None = None
) -> mx.array:
    """a [N, K, F], chosen int32 [N, K] ascending per row -> bfloat16 [N, C].

    The result of `expert_swiglu`, perhaps rounded to FP8, through the chosen experts and summed; then, of `shared` =
    (a [N, F'], weight [C, F']), the shared expert's product, rounded to bfloat16 like theirs. `plan` and errors as in
    `expert_swiglu`.
    """
    N, K, F = a.shape
    check_planes("expert_down", *down, F)
    weights = [down] if shared is None else [down, shared[1]]
    if shared is not None:
        check_planes("expert_down", *shared[1], shared[0].shape[-1])
    if not _launches(chosen, *weights):
        return expert_down_ref(a, down, chosen, shared)
    E, C, _ = down[1]["codes"].shape
    few = few_pairs(N, K)
    if backend() == "cuda" and (_quant_cuda.takes_down(a, down[0]) if few else _quant_cuda.takes(a, down[0], F)):
        if few:
            if shared is not None and not _quant_cuda.takes(shared[0], shared[1][0], shared[0].shape[-1]):
                shared = quant_matmul(shared[0], *shared[1])
            return _quant_cuda.down_few(a, *down, chosen, shared)
        return _sum(_expert_tile_cuda.down(a, *down, *(plan or _plan(chosen, E))[:2]), shared)
    words, wide = x_input(a)
    formats = [("FORMAT", FORMAT_IDS[down[0]]), ("WIDE", wide)]
    planes = plane_inputs(*down)
    if few:
        other, weight = (a, down) if shared is None else shared
        other_words, other_wide = x_input(other)
        R = rows_per_simdgroup(C, 2)
        sizes = numbers(F // 8, C, K, N * K, other.shape[-1] // 8)
        formats += [("SHARED", shared is not None), ("FS", FORMAT_IDS[weight[0]]), ("WIDE_SHARED", other_wide)]
        return _down_kernel(
            inputs=[words, sizes, chosen, *planes, other_words, *plane_inputs(*weight)],
            template=[*formats, ("R", R), ("MOST", power_of_two(N))],
            grid=(ceil_div(C, R * _SIMDGROUPS) * 32 * _SIMDGROUPS, 1, 1),
            threadgroup=(32 * _SIMDGROUPS, 1, 1),
            output_shapes=[(N, C)],
            output_dtypes=[mx.bfloat16],
        )[0]
    order, starts, tile_starts, tiles = plan or _plan(chosen, E)
    y = _down_tile_kernel(
        inputs=[words, numbers(F // 8, C, K, E), order, starts, tile_starts, *planes],
        template=formats,
        grid=(ceil_div(C, TILE_OUT) * TILE_THREADS, tiles, 1),
        threadgroup=(TILE_THREADS, 1, 1),
        output_shapes=[(N, K, C)],
        output_dtypes=[mx.bfloat16],
    )[0]
    return _sum(y, shared)


def expert_down_ref(a: mx.array, down: Weight, chosen: mx.array, shared: SharedDown | None = None) -> mx.array:
    flat = a.reshape(-1, a.shape[-1])
    y = _each_expert(chosen, lambda expert, pairs: _product_ref(flat[pairs], down, expert), down[1])
    return _sum(y, shared, quant_matmul_ref)


def _launches(chosen: mx.array, *weights: Weight) -> bool:
    return (
        enabled("expert_matmul") and chosen.size > 0 and all(kernel_takes(format, planes) for format, planes in weights)
    )


def few_pairs(rows: int, chosen: int) -> bool:
    return rows <= MOST_ROWS and rows * chosen <= _MOST_PAIRS


def _plan(chosen: mx.array, experts: int) -> Plan:
    """Computed on the device; the number of tiles is the bound that holds for every choice."""
    flat = chosen.reshape(-1)
    counts = mx.zeros(experts, dtype=mx.int32).at[flat].add(1)
    zero = mx.zeros(1, dtype=mx.int32)
    starts, tile_starts = (
        mx.concatenate([zero, mx.cumsum(n)]) for n in (counts, (counts + (TILE_ROWS - 1)) // TILE_ROWS)
    )
    return mx.argsort(flat), starts, tile_starts, flat.size // TILE_ROWS + min(flat.size, experts)


def _sum(y: mx.array, shared: SharedDown | None, product: Callable = quant_matmul) -> mx.array:
    """[N, K, C] -> bfloat16 [N, C], in the order of K, in float32; the shared expert's product comes last."""
    total = y[:, 0].astype(mx.float32)
    for slot in range(1, y.shape[1]):
        total = total + y[:, slot].astype(mx.float32)
    if shared is not None:
        total = total + product(shared[0], *shared[1]).astype(mx.float32)
    return total.astype(mx.bfloat16)


def _product_ref(x: mx.array, weight: Weight, expert: mx.array | int) -> mx.array:
    """x [P, in] through one expert, or row i through expert[i] -> bfloat16 [P, out]."""
    format, planes = weight
    planes = {name: plane[expert] for name, plane in planes.items()}
    w = block_planes.dequantize(format, planes)
    x = x.astype(mx.float32)
    y = x @ w.T if w.ndim == 2 else (x[:, None] @ w.swapaxes(-1, -2))[:, 0]
    return y.astype(mx.bfloat16)


def _each_expert(
    chosen: mx.array, one: Callable[[mx.array | int, mx.array], mx.array], planes: dict[str, mx.array]
) -> mx.array:
    """[N, K, ..] of one(expert, pairs) -> [pairs, ..]: few pairs at once, many by expert, which asks the host for the
    choice and keeps one dequantized expert alive at a time. `planes` give the width of an empty result."""
    if chosen.size == 0:
        return mx.zeros((*chosen.shape, next(iter(planes.values())).shape[-2]), dtype=mx.bfloat16)
    if chosen.size <= _GATHERED_PAIRS:
        y = one(chosen.reshape(-1), mx.arange(chosen.size))
        return y.reshape(*chosen.shape, -1)
    flat = np.array(chosen).reshape(-1)
    order = np.argsort(flat, kind="stable")
    parts = []
    for expert in np.unique(flat):
        pairs = order[np.searchsorted(flat[order], expert) :][: np.count_nonzero(flat == expert)]
        parts.append(one(int(expert), mx.array(pairs)))
        mx.eval(parts[-1])
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return mx.concatenate(parts)[mx.array(back)].reshape(*chosen.shape, -1)


def cases() -> list[Case]:
    def inputs(
        rng: np.random.Generator,
        rows: int,
        chosen: int,
        experts: int,
        C: int,
        F: int,
        formats: list[str],
        agree: int,
        among: int,
    ):
        x = mx.array(rng.standard_normal((rows, C)).astype(np.float32)).astype(mx.bfloat16)
        s = mx.array(rng.standard_normal((rows, F)).astype(np.float32)).astype(mx.bfloat16)
        a = mx.array(rng.standard_normal((rows, chosen, F)).astype(np.float32)).astype(mx.bfloat16)
        choice = np.sort(np.argsort(rng.random((rows, among)), axis=1)[:, :chosen], axis=1)
        choice = np.sort(rng.permutation(experts)[:among])[choice].astype(np.int32)
        choice[:agree] = choice[:1]
        weights = mx.array(rng.random((rows, chosen), dtype=np.float32))
        shapes = [(experts, F, C), (experts, F, C), (experts, C, F), (C, F)]
        planes = [list(random_planes(rng, f, *s).values()) for f, s in zip(formats, shapes, strict=True)]
        return [x, a, s, mx.array(choice), weights, *[array for some in planes for array in some]]

    def run(swiglu: Callable, down: Callable, formats: list[str], x, a, s, chosen, weights, *arrays):
        stored = list(weights_of(formats, arrays))
        first = swiglu(x, stored[0], stored[1], chosen, weights, limit=10.0)
        return [first, down(a, stored[2], chosen, (s, stored[3]))]

    def case(rows: int, chosen: int, experts: int, C: int, F: int, *formats: str, large: bool = False, among: int = 0):
        """`among`: how many of the experts are chosen at all (0: any), for the time of the reference."""
        among = among or experts
        distinct = min(among, rows * chosen)
        return Case(
            f"expert_matmul/{'_'.join(f.lower() for f in formats[:3])}_{rows}x{chosen}_of_{experts}_{C}x{F}",
            functools.partial(run, expert_swiglu, expert_down, formats),
            functools.partial(run, expert_swiglu_ref, expert_down_ref, formats),
            functools.partial(
                inputs,
                rows=rows,
                chosen=chosen,
                experts=experts,
                C=C,
                F=F,
                formats=formats,
                agree=0 if large else rows // 2,
                among=among,
            ),
            tolerance=2e-3,  # a unit in the last place of gate or up may be several of their product
            bytes=int((sum(BYTES[f] for f in formats[:3]) * distinct + BYTES[formats[3]]) * C * F)
            + 4 * rows * (C + chosen * F),
            large=large,
        )

    q2, real = ("IQ2_XXS", "IQ2_XXS", "Q2_K", "Q8_0"), (384, 5120, 2304)
    return [
        case(1, 6, 7, 256, 256, "Q4_K", "Q4_K", "Q8_0", "Q2_K"),
        case(6, 3, 8, 512, 256, *q2),
        case(2, 1, 3, 64, 32, "MXFP4", "Q8_0", "MXFP4", "F16"),
        case(12, 3, 5, 96, 64, "Q8_0", "MXFP4", "Q8_0", "Q8_0"),
        case(1, 6, *real, *q2, large=True),
        case(6, 6, *real, *q2, large=True),
        case(200, 6, *real, *q2, large=True, among=16),  # 75 pairs an expert: two tiles, the second ragged
        case(6, 6, *real, "MXFP4", "MXFP4", "MXFP4", "FP8", large=True),
        case(6, 6, *real, "Q4_K", "Q4_K", "Q4_K", "Q8_0", large=True),
    ]
