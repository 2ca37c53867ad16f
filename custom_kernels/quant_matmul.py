"""Products with stored weights: y = x W^T for Q8_0, Q4_K, Q2_K, IQ2_XXS, MXFP4, FP8 and float ones.

    y[n, o] = cast(sum_i f32(x[n, i]) * W[o, i], out_dtype)        W as `planes.dequantize` gives it

Every projection of the model (architecture notes 3.5); the caller rounds x to FP8 where the trained formats ask for
it. Everything inside is float32, with one rounding at the end. Up to `MOST_ROWS` rows a row's result has the
same bits whatever rows ride with it, so that a verified token equals a decoded one.

Kernels, both within tolerance (the order of the sum differs from the reference's). Estimates for W of o x i:

* `quant_rows` (1 to 8 rows; up to five matrices of any formats over one input): one launch. Reads the planes of W once
  for all rows; x is read by every simdgroup, from cache. Q8_0 1.06 bytes a weight, Q4_K 0.56, Q2_K 0.33, IQ2_XXS 0.26,
  MXFP4 0.53, FP8 1.00. Instructions a weight and row: about 2 to decode, 1.5 for the product.
* CUDA: tensor cores instead (`_quant_cuda.py`, from 128 rows on `_quant_tile_cuda.py`), any number of rows, each with
  the bits that it has alone; up to 8 rows share a launch as above.
* `quant_tile` (more rows): one launch, tiles of 32 rows x 64 outputs by matrix units. Reads W n / 32 times and x
  o / 64 times (from cache where they fit); each weight is decoded once per 32 rows.

An e8m0 scale byte whose power does not fit the shifted exponent (above 240 in MXFP4, 246 in FP8: weights beyond
10^34) acts as infinity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod

import mlx.core as mx
import numpy as np

from mlx_ds4.formats import planes as block_planes

from . import _quant_cuda, _quant_group_cuda, _quant_tile_cuda
from ._case import Case
from ._kernel import Kernel
from ._octet import (
    FORMAT_IDS,
    ROWS_HEADER,
    TILE_HEADER,
    TILE_OUT,
    TILE_ROWS,
    TILE_THREADS,
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

Weight = tuple[str, block_planes.Planes]

# From here on tiles win over one more pass of the rows kernel: by count of operations, not yet measured on a Mac.
MOST_ROWS = 8
SIMDGROUPS = 4  # in a threadgroup of the rows kernel
_MOST_TOGETHER = 5  # matrices in one launch

_ROWS_SOURCE = """
    // A simdgroup owns R weight rows of one matrix and computes them for all M rows of x; grid y is the group of
    // a block-diagonal product. sizes: octets of a row, groups, then the outputs of each matrix.
    uint lane = thread_index_in_simdgroup;
    uint block = threadgroup_position_in_grid.x, g = threadgroup_position_in_grid.y;
    uint part = R * simdgroups_per_threadgroup, here = R * simdgroup_index_in_threadgroup;
"""
_ROWS_MATRIX = """
    if (block < (sizes[2 + I] + part - 1u) / part) {
        quant_rows<FI, WIDE, R, M>(x, codesI, scalesI, supersI, yI, sizes[0], g, sizes[1], sizes[2 + I],
                                       block * part + here, lane);
        return;
    }
    block -= (sizes[2 + I] + part - 1u) / part;
"""


def _rows_kernel(count: int) -> Kernel:
    planes = [f"{name}{i}" for i in range(count) for name in ("codes", "scales", "supers")]
    return Kernel(
        "quant_rows" if count == 1 else f"quant_rows_{count}",
        ["x", "sizes", *planes],
        [f"y{i}" for i in range(count)],
        _ROWS_SOURCE + "".join(_ROWS_MATRIX.replace("I]", f"{i}]").replace("I,", f"{i},") for i in range(count)),
        ROWS_HEADER,
        exact=False,
        family="quant_matmul",
    )


_rows_kernels = {count: _rows_kernel(count) for count in range(1, _MOST_TOGETHER + 1)}

_TILE_SOURCE = """
    // A threadgroup of 4 simdgroups owns 32 rows of x times 64 outputs of group g. sizes: octets of a row, groups,
    // outputs, rows.
    threadgroup float xs[32 * 36];
    threadgroup float ws[64 * 36];
    uint t = thread_index_in_threadgroup, line = t / 4u;
    uint octets = sizes[0], groups = sizes[1], outputs = sizes[2];
    uint first = threadgroup_position_in_grid.x * 64u, g = threadgroup_position_in_grid.z;
    uint n0 = threadgroup_position_in_grid.y * 32u;
    uint count = metal::min(sizes[3] - n0, 32u);
    ulong base = ulong(g) * ulong(outputs);
    ulong a_row = base + ulong(metal::min(first + line, outputs - 1u));
    ulong b_row = base + ulong(metal::min(first + line + 32u, outputs - 1u));
    ulong from = (ulong(n0 + line) * ulong(groups) + ulong(g)) * ulong(octets);
    tile_product<FORMAT, FORMAT, WIDE>(x, from, count, codes, scales, supers, a_row, codes, scales, supers, b_row,
                                       octets, t, simdgroup_index_in_threadgroup, xs, ws);
    for (uint i = t; i < 32u * 64u; i += 128u) {
        uint n = i / 64u, j = i % 64u;
        if (n < count && first + j < outputs)
            y[ulong(n0 + n) * ulong(groups) * ulong(outputs) + base + ulong(first + j)]
                = T(ws[n * tile_result_pitch + j]);
    }
"""

_tile_kernel = Kernel(
    "quant_tile",
    ["x", "sizes", "codes", "scales", "supers"],
    ["y"],
    _TILE_SOURCE,
    TILE_HEADER,
    exact=False,
    family="quant_matmul",
)


def quant_matmul(x: mx.array, format: str, planes: block_planes.Planes, *, out_dtype: mx.Dtype = mx.bfloat16):
    """x [.., in] times the weight [out, in] that `planes` hold -> `out_dtype` [.., out].

    Any float x; empty inputs give empty results. Raises ValueError for an unknown format or another width.
    """
    return quant_matmul_group(x, [(format, planes)], out_dtype=out_dtype)[0]


def quant_matmul_ref(x: mx.array, format: str, planes: block_planes.Planes, *, out_dtype: mx.Dtype = mx.bfloat16):
    return (x.astype(mx.float32) @ block_planes.dequantize(format, planes).T).astype(out_dtype)


def quant_matmul_group(
    x: mx.array, weights: Sequence[Weight], *, out_dtype: mx.Dtype | Sequence[mx.Dtype] = mx.bfloat16
) -> list[mx.array]:
    """`quant_matmul` of one x with several weights (format, planes): a list of results, bit for bit as one by one.

    `out_dtype` is one for all, or one for each. Up to five matrices of any formats share a launch where x has few rows.
    """
    dtypes = _dtypes(out_dtype, weights)
    for format, planes in weights:
        check_planes("quant_matmul", format, planes, x.shape[-1])
    results: dict[int, mx.array] = {}
    together: dict[str, list[int]] = {}
    few = prod(x.shape[:-1]) <= MOST_ROWS
    for i, (format, planes) in enumerate(weights):
        if not _launches(x, format, planes):
            results[i] = quant_matmul_ref(x, format, planes, out_dtype=dtypes[i])
        elif few and backend() == "cuda" and _quant_group_cuda.takes(x, format):
            together.setdefault("cuda", []).append(i)
        else:
            together.setdefault("portable", []).append(i)
    for kind, members in together.items():
        most = _MOST_TOGETHER if few else 1
        for start in range(0, len(members), most):
            some = members[start : start + most]
            chosen, kinds = [weights[i] for i in some], [dtypes[i] for i in some]
            if kind == "cuda" and len(some) > 1:
                parts = _quant_group_cuda.together(x, chosen, kinds)
            else:
                parts = _product(x, chosen, 1, kinds)
            results.update(zip(some, parts, strict=True))
    return [results[i] for i in range(len(weights))]


def quant_matmul_group_ref(
    x: mx.array, weights: Sequence[Weight], *, out_dtype: mx.Dtype | Sequence[mx.Dtype] = mx.bfloat16
) -> list[mx.array]:
    dtypes = _dtypes(out_dtype, weights)
    return [quant_matmul_ref(x, *weight, out_dtype=dtype) for weight, dtype in zip(weights, dtypes, strict=True)]


def _dtypes(out_dtype: mx.Dtype | Sequence[mx.Dtype], weights: Sequence[Weight]) -> list[mx.Dtype]:
    if isinstance(out_dtype, mx.Dtype):
        return [out_dtype] * len(weights)
    if len(out_dtype) != len(weights):
        raise ValueError(
            f"quant_matmul got {len(out_dtype)} output dtypes for {len(weights)} weights; give one for each."
        )
    return list(out_dtype)


def grouped_quant_matmul(x: mx.array, format: str, planes: block_planes.Planes, groups: int) -> mx.array:
    """Block-diagonal product: x [.., groups * in], weight rows [groups * rank, in] -> bfloat16 [.., groups * rank].

    Slice g of x meets rows g * rank .. of the weight only. Raises ValueError for sizes that `groups` does not divide.
    """
    if x.shape[-1] % groups or planes["codes"].shape[0] % groups:
        raise ValueError(
            f"grouped_quant_matmul got width {x.shape[-1]} and {planes['codes'].shape[0]} weight rows, expected"
            f" multiples of {groups} groups; pass the group count of this layer."
        )
    check_planes("grouped_quant_matmul", format, planes, x.shape[-1] // groups)
    if not _launches(x, format, planes):
        return grouped_quant_matmul_ref(x, format, planes, groups)
    return _product(x, [(format, planes)], groups, [mx.bfloat16])[0]


def grouped_quant_matmul_ref(x: mx.array, format: str, planes: block_planes.Planes, groups: int) -> mx.array:
    weight = block_planes.dequantize(format, planes)
    weight = weight.reshape(groups, -1, weight.shape[-1])  # [G, rank, in]
    rows = x.astype(mx.float32).reshape(-1, groups, weight.shape[-1]).swapaxes(0, 1)
    y = (rows @ weight.swapaxes(1, 2)).astype(mx.bfloat16)  # [G, rows, rank]
    return y.swapaxes(0, 1).reshape(*x.shape[:-1], weight.shape[0] * weight.shape[1])


def _launches(x: mx.array, format: str, planes: block_planes.Planes) -> bool:
    """Many rows times float weights are MLX's own business; for few it would cast the weight first, each time."""
    few = prod(x.shape[:-1]) <= MOST_ROWS
    floats = format in block_planes.FLOATS.values()
    return enabled("quant_matmul") and x.size > 0 and (few or not floats) and kernel_takes(format, planes)


def _product(x: mx.array, weights: Sequence[Weight], groups: int, dtypes: Sequence[mx.Dtype]) -> list[mx.array]:
    """One launch: one matrix, or for few rows and one group several."""
    *leading, width = x.shape
    rows, octets = prod(leading), width // groups // 8
    format, planes = weights[0]
    outputs = [planes["codes"].shape[0] // groups for _, planes in weights]
    if backend() == "cuda" and _quant_cuda.takes(x, format, width // groups, outputs[0] if groups > 1 else 16):
        many = _quant_tile_cuda.takes_many(x, format, planes, groups)
        product = _quant_tile_cuda.product if many else _quant_cuda.dense
        return [product(x, format, planes, groups=groups, out_dtype=dtypes[0])]
    words, wide = x_input(x)
    inputs = [array for weight in weights for array in plane_inputs(*weight)]
    shapes = [(*leading, groups * n) for n in outputs]
    if rows > MOST_ROWS:
        return _tile_kernel(
            inputs=[words, numbers(octets, groups, outputs[0], rows), *inputs],
            template=[("FORMAT", FORMAT_IDS[format]), ("WIDE", wide), ("T", dtypes[0])],
            grid=(ceil_div(outputs[0], TILE_OUT) * TILE_THREADS, ceil_div(rows, TILE_ROWS), groups),
            threadgroup=(TILE_THREADS, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
    R = rows_per_simdgroup(groups * sum(outputs), 4 if rows <= 4 else 2)
    blocks = sum(ceil_div(n, R * SIMDGROUPS) for n in outputs)
    formats = [(f"F{i}", FORMAT_IDS[format]) for i, (format, _) in enumerate(weights)]
    return _rows_kernels[len(weights)](
        inputs=[words, numbers(octets, groups, *outputs), *inputs],
        template=[*formats, ("WIDE", wide), ("R", R), ("M", rows)],
        grid=(blocks * 32 * SIMDGROUPS, groups, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
    )


def cases() -> list[Case]:
    def inputs(
        rng: np.random.Generator, rows: int, width: int, formats: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ):
        x = rng.standard_normal((rows, width)).astype(np.float32)
        x[1:2] = 0  # where there is room, a row of zeros
        planes = [random_planes(rng, format, *shape) for format, shape in zip(formats, shapes, strict=True)]
        return [mx.array(x).astype(mx.bfloat16), *[array for some in planes for array in some.values()]]

    def case(format: str, rows: int, *shapes: tuple[int, int], groups: int = 1, dtype=mx.bfloat16, large: bool = False):
        """`format`: of all matrices, or one for each, joined by "+"; then `dtype` is for the float ones."""
        formats = format.split("+") if "+" in format else [format] * len(shapes)

        def run(one: Callable, grouped: Callable, x: mx.array, *arrays: mx.array):
            weights = list(weights_of(formats, arrays))
            floats = block_planes.FLOATS.values()
            dtypes = [dtype if "+" not in format or name in floats else mx.bfloat16 for name in formats]
            return one(x, weights, out_dtype=dtypes) if groups == 1 else grouped(x, *weights[0], groups)

        width = groups * shapes[0][1]
        outputs = sum(out for out, _ in shapes)
        weight_bytes = int(sum(out * columns * BYTES[f] for f, (out, columns) in zip(formats, shapes, strict=True)))
        what = "+".join("x".join(map(str, shape)) for shape in shapes)
        what += f"_{groups}_groups" * (groups > 1) + "_float32" * (dtype == mx.float32)
        return Case(
            f"quant_matmul/{format.lower()}_{what}_{rows}_row{'s' * (rows > 1)}",
            functools.partial(run, quant_matmul_group, grouped_quant_matmul),
            functools.partial(run, quant_matmul_group_ref, grouped_quant_matmul_ref),
            functools.partial(inputs, rows=rows, width=width, formats=formats, shapes=shapes),
            tolerance=1e-5,
            bytes=weight_bytes + 2 * rows * width + dtype.size * rows * outputs,
            large=large,
        )

    return [
        case("Q8_0", 1, (33, 96), dtype=mx.float32),
        case("Q4_K", 2, (31, 512)),
        case("Q2_K", 3, (33, 768)),
        case("IQ2_XXS", 5, (31, 512), dtype=mx.float32),
        case("MXFP4", 8, (33, 352)),
        case("FP8", 4, (40, 64)),
        case("F16", 2, (33, 96), dtype=mx.float32),
        case("BF16", 1, (31, 64)),
        case("F32", 3, (5, 64), dtype=mx.float32),
        case("Q8_0", 2, (7, 64), (33, 64), (2, 64)),
        case("MXFP4", 1, (7, 128), (33, 128)),
        case("Q8_0+Q8_0+F16+F32", 2, (33, 128), (7, 128), (9, 128), (4, 128), dtype=mx.float32),
        case("Q2_K+MXFP4+BF16+Q4_K+IQ2_XXS", 3, (7, 256), (33, 256), (5, 256), (9, 256), (10, 256), dtype=mx.float32),
        case("Q8_0", 3, (3 * 11, 64), groups=3),
        case("MXFP4", 11, (33, 64), groups=3),
        case("IQ2_XXS", 33, (65, 256), dtype=mx.float32),
        *[
            case(format, rows, shape, large=True)
            for format, shape in [
                ("Q8_0", (32768, 1280)),
                ("Q8_0", (129280, 5120)),
                ("Q4_K", (5120, 8192)),
                ("Q2_K", (25600, 6144)),
                ("IQ2_XXS", (25600, 6144)),
                ("MXFP4", (5120, 8192)),
            ]
            for rows in (1, 6)
        ],
        case("Q8_0", 6, (1280, 5120), (512, 5120), large=True),
        *[
            case(
                "Q8_0+Q8_0+F16+F16+F16",
                rows,
                *[(n, 5120) for n in (1280, 512, 512, 512, 32)],
                dtype=mx.float32,
                large=True,
            )
            for rows in (1, 6)
        ],
        case("Q8_0", 6, (8 * 1024, 4096), groups=8, large=True),
        case("Q8_0", 2048, (5120, 8192), large=True),
    ]
