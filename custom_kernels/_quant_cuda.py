"""CUDA bodies of the quantized products: tensor cores, for one row and a few.

Up to 8 rows of a dense product have the body of `_dense_few_cuda.py` where a block has room for it. From 128 rows on
(K-quants never) `_quant_tile_cuda.py` takes over, for many rows of experts `_expert_tile_cuda.py`. The portable Metal
text runs on CUDA too, but there six rows cost six times the multiply-adds. These kernels (header `_quant_mma.h`) let 8
activation rows ride in one mma for the price of one. A row's sums are taken in an order that depends on the weight's
shape alone, so one-row, six-row and prefill results are equal bit for bit.

Estimate: bytes are the planes once plus activations from cache; per weight about 1.5 operations (Q8_0, Q2_K), 2
(IQ2_XXS) or 3 (MXFP4), against 28 T/s on an H200: Q8_0 is bound by memory, IQ2_XXS and Q2_K by arithmetic.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import mlx.core as mx

from . import _dense_few_cuda
from ._expert_down_cuda import DOWN_FEW_SOURCE, SUM_SOURCE
from ._expert_few_cuda import GATE_UP_FEW_SOURCE
from ._kernel import Kernel, float_bits
from ._octet import FORMAT_IDS, ceil_div, iq2_words
from ._tiles_cuda import PTX

# Columns of one step; no entry: a float format, which the portable text multiplies.
_UNITS = {"Q8_0": 128, "MXFP4": 128, "FP8": 128, "Q4_K": 256, "Q2_K": 256, "IQ2_XXS": 256}
SMS = 132
_DENSE_FEW_BLOCKS = SMS  # at a time
_DENSE_FEW_WARPS = 24  # of a block, at most
# Measured: where each warp has tiles of its own, or some blocks have a quarter more tiles than others, and for MXFP4
# and IQ2_XXS, blocks that live for one tile are faster.
_DENSE_FEW_SPLIT, _DENSE_FEW_UNEVEN = 2, 1.1
_DENSE_FEW_FORMATS = ("Q8_0", "Q4_K", "Q2_K", "FP8")
DOWN_WARPS = 4  # of a block
_DOWN_BLOCKS = 6  # at a time on a multiprocessor
_DOWN_ROUNDS = 2  # of them: with one, some multiprocessors have only long blocks, of experts
_DOWN_HELD = 18688  # bytes of a block for activations, and the grid of IQ2_XXS: four rows of the model
RING = 4608  # bytes of a warp's ring
GATE_UP_SPLIT = 8  # parts of the width, whose sums are added up at the end
_TEAM, _TEAMS = 4, 4  # warps that share an item of gate and up; teams of a block, the only one on a multiprocessor
_WIDE_RING = 2 * 2176  # bytes of a warp's ring where IQ2_XXS has wide tables: two steps of two matrices
# Rings of its warps, and sums of its teams. The wide tables are 64 KB at a multiple of their size: rings lie before
# them as far as there is room, for all but two. An A100's block may have 163 KB.
_SUMS = _TEAMS * 2 * GATE_UP_SPLIT * 256
_GATE_UP_BYTES = {False: _TEAM * _TEAMS * RING + _SUMS, True: 2 * 65536 + 2 * _WIDE_RING + _SUMS}

HEADER = (
    PTX + f"#include <cuda_fp16.h>\n#define DS4_RING {RING}\n"
    f"static __device__ const unsigned int IQ2_WORDS[512] = {{{', '.join(f'{word}u' for word in iq2_words())}}};\n"
    + "".join(f"#define DS4_{name} {number}\n" for name, number in FORMAT_IDS.items())
    + "".join((Path(__file__).parent / f"_quant_{part}.h").read_text() for part in ("mma", "formats", "ring"))
)
IQ2_TABLES = (Path(__file__).parent / "_iq2_tables.h").read_text()
_FEW = [(Path(__file__).parent / f"_few_{part}.h").read_text() for part in ("mma", "iq2")]
FEW_HEADER = HEADER + IQ2_TABLES + "".join(_FEW)

_PROLOGUE = """
    using namespace ds4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    __shared__ uint4 grid_s[F == IQ2_XXS ? 256 : 1];
    if (F == IQ2_XXS) {
      stage_grid(grid_s);
      __syncthreads();
    }
"""

DENSE_SOURCE = (
    """
    // Block: 16 weight rows; its S warps take units of the width in turn. blockIdx.y: 8 NT rows of x [.., G K].
    // Weight rows come in G groups of equal size; group i reads columns i K .. of x.
"""
    + _PROLOGUE
    + """
    const int tile = blockIdx.x, first = 8 * NT * blockIdx.y;
    const int M = rows_of(x_shape, x_ndim), K = width_of(x_shape, x_ndim) / G, N = codes_shape[0];
    __shared__ uint4 rings[S * RING / 16];
    float* const part = (float*)rings;  // sums of warp s begin where its ring does
    const Planes w = {(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers};
    Rows<NT> rows;
    for (int i = 0; i < NT; i++) {
      const int n = first + 8 * i + g;
      rows.p[i] = (const bf16*)x + (size_t)min(n, M - 1) * G * K + (size_t)(16 * tile / (N / G)) * K;
    }
    float acc[NT][4];
    clear(acc);
    rows.real = first + g < M;
    product<F, NT>(acc, w, {0, tile, N, K, warp, S, K / Weight<F>::UNIT}, rows, grid_s, ring_of(rings, warp));
    if (S > 1) {
      for (int i = 0; i < NT; i++)
        for (int c = 0; c < 4; c++) part[warp * RING / 4 + 128 * i + 32 * c + lane] = acc[i][c];
      __syncthreads();
    }
    for (int e = threadIdx.x; e < NT * 128; e += 32 * S) {
      const int i = e / 128, c = e / 32 % 4, n = first + 8 * i + 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1);
      float sum = 0.f;
      if (S > 1) {
        for (int s = 0; s < S; s++) sum += part[s * RING / 4 + e];
      } else {
        for (int k = 0; k < NT; k++)
          for (int j = 0; j < 4; j++) sum = k == i && j == c ? acc[k][j] : sum;
      }
      if (n < M && r < N) y[(size_t)n * N + r] = T(sum);
    }
"""
)


def _kernel(name: str, inputs: list[str], source: str, family: str, header: str = HEADER, **limits) -> Kernel:
    text = {"cuda_source": source, "cuda_header": header}
    return Kernel(name, inputs, ["y"], None, **text, **limits, exact=False, family=family)


_ONE = ["codes", "scales", "supers"]
_TWO = [f"{plane}{index}" for index in (1, 3) for plane in _ONE]
_dense = _kernel("quant_matmul_mma", ["x", *_ONE], DENSE_SOURCE, "quant_matmul")
_dense_few = _kernel(
    "quant_matmul_few_mma",
    ["x", *_ONE],
    _dense_few_cuda.SOURCE,
    "quant_matmul",
    HEADER + _dense_few_cuda.HEADER,
    shared_memory=224 << 10,  # a block has a multiprocessor to itself
    cuda_bounds=(32 * _DENSE_FEW_WARPS, 1),
)
_gate_up_few = {
    wide: _kernel(
        f"expert_swiglu_few{'_wide' * wide}_mma",
        ["x", *_TWO, "chosen", "weights"],
        GATE_UP_FEW_SOURCE,
        "expert_matmul",
        FEW_HEADER,
        shared_memory=_GATE_UP_BYTES[wide],
        cuda_bounds=(32 * _TEAM * _TEAMS, 1),
    )
    for wide in (False, True)
}
DOWN_INPUTS = ["x", *_ONE, "chosen", "shared", *[f"shared_{plane}" for plane in _ONE]]
DOWN_BOUNDS = (32 * DOWN_WARPS, _DOWN_BLOCKS)
_down_few = _kernel("expert_down_few_mma", DOWN_INPUTS, DOWN_FEW_SOURCE, "expert_matmul", cuda_bounds=DOWN_BOUNDS)
_sum_pairs = _kernel(
    "expert_sum_pairs",
    ["pairs", "shared"],
    SUM_SOURCE.replace("STORE", "y[at] = __float2bfloat16(sum);"),
    "expert_matmul",
    "#include <cuda_bf16.h>\n",
)


def takes(x: mx.array, format: str, width: int, rows_of_weight: int = 16) -> bool:
    """Whether the tensor-core kernels take x against a weight of this format and width; groups are whole tiles."""
    return format in _UNITS and x.dtype == mx.bfloat16 and width % _UNITS[format] == 0 and rows_of_weight % 16 == 0


def dense(x: mx.array, format: str, planes: dict[str, mx.array], *, groups: int, out_dtype: mx.Dtype) -> mx.array:
    """x bfloat16 [.., groups * K] times a weight of N rows (N / groups of them for each slice of x) -> [.., N]."""
    *leading, width = x.shape
    M, N = prod(leading), planes["codes"].shape[0]
    if plan := _few_plan(M, format, N, width // groups, groups):
        template, grid, threads = plan
        return _dense_few(
            inputs=[x, *planes_of(planes)],
            template=[*template, ("T", out_dtype)],
            grid=grid,
            threadgroup=(threads, 1, 1),
            output_shapes=[(*leading, N)],
            output_dtypes=[out_dtype],
        )[0]
    tiles = ceil_div(N, 16)
    warps = split(tiles, width // groups // 128)
    nt = 1 if M <= 8 else 4
    return _dense(
        inputs=[x, *planes_of(planes)],
        template=[("F", FORMAT_IDS[format]), ("S", warps), ("NT", nt), ("G", groups), ("T", out_dtype)],
        grid=(tiles * 32 * warps, ceil_div(M, 8 * nt), 1),
        threadgroup=(32 * warps, 1, 1),
        output_shapes=[(*leading, N)],
        output_dtypes=[out_dtype],
    )[0]


def _few_plan(
    M: int, format: str, N: int, K: int, groups: int
) -> tuple[list[tuple[str, int]], tuple[int, int, int], int] | None:
    """(template, grid, threads of a block) for a launch of the body for few rows, N x K all in all; None where it has
    no room or is no faster."""
    tiles, warps = ceil_div(N // groups, 16), split(ceil_div(N, 16), K // 128)
    blocks = min(max(_DENSE_FEW_BLOCKS // groups, 1), tiles)
    each = ceil_div(tiles, blocks)
    uneven = each * blocks > _DENSE_FEW_UNEVEN * tiles
    if M > 8 or format not in _DENSE_FEW_FORMATS or warps < _DENSE_FEW_SPLIT or uneven or not _dense_few.has_room:
        return None
    rounds = ceil_div(each, _DENSE_FEW_WARPS // warps)
    for teams in range(ceil_div(each, rounds), 0, -1):
        steps = _dense_few_cuda.steps(format, M, K, teams * warps, _dense_few.shared_memory)
        if steps >= 2:
            template = {"F": FORMAT_IDS[format], "S": warps, "TEAMS": teams, "STEPS": steps, "G": groups}
            template |= {"STEP_BYTES": _dense_few_cuda.STEP_BYTES[format]}
            threads = 32 * warps * teams
            return list(template.items()), (blocks * threads, groups, 1), threads
    return None


def takes_gate_up(format: str) -> bool:
    """Whether a block has room on this device for `gate_up_few` of this format."""
    return _gate_up_few[format == "IQ2_XXS"].has_room


def gate_up_few(x, format, gate, up, chosen, weights, limit: float) -> mx.array:
    """The clamped, weighted SwiGLU of every (row, slot) pair, at most 64 of them: bfloat16 [rows, slots, F]."""
    F = gate["codes"].shape[1]
    template = {"F": FORMAT_IDS[format], "S": GATE_UP_SPLIT, "TEAM": _TEAM, "TEAMS": _TEAMS, "SLOTS": chosen.shape[1]}
    wide = format == "IQ2_XXS"
    template |= {"BYTES": _WIDE_RING if wide else RING, "LIMIT_BITS": float_bits(limit)}
    blocks = min(ceil_div(ceil_div(F, 16) * chosen.size, _TEAMS), SMS)
    threads = 32 * _TEAM * _TEAMS
    return _gate_up_few[wide](
        inputs=[x, *planes_of(gate), *planes_of(up), chosen, weights],
        template=list(template.items()),
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*chosen.shape, F)],
        output_dtypes=[mx.bfloat16],
    )[0]


def down_few(a, format, planes, chosen, shared) -> mx.array:
    """The experts' outputs of a [rows, slots, F], each rounded, summed over slots: [rows, C]. Last is added `shared`:
    values [rows, C], (a [rows, F'], weight) to multiply, or None."""
    inputs, template, threads = down_pairs(a, format, planes, chosen, shared)
    return _sum_pairs(
        inputs=inputs,
        template=template,
        grid=(ceil_div(threads, 256) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(a.shape[0], planes["codes"].shape[1])],
        output_dtypes=[mx.bfloat16],
    )[0]


def down_pairs(a, format, planes, chosen, shared) -> tuple[list[mx.array], list[tuple[str, int]], int]:
    """Launches the products of `down_few`; inputs, template and threads of the launch of SUM_SOURCE that adds them."""
    inputs, template, blocks, shape = down_call(a, format, planes, chosen, shared)
    (pairs,) = _down_few(
        inputs=inputs,
        template=template,
        grid=(blocks * 32 * DOWN_WARPS, 1, 1),
        threadgroup=(32 * DOWN_WARPS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.bfloat16],
    )
    values, kinds = shared if isinstance(shared, mx.array) else pairs, dict(template)
    return [pairs, values], [(name, kinds[name]) for name in ("SLOTS", "SHARED")], a.shape[0] * shape[1]


def takes_down(a: mx.array, format: str) -> bool:
    """Whether `down_few` and `down_pairs` take a [rows, slots, F] against a weight of this format: the sums of a row's
    columns have to find room."""
    width = a.shape[-1]
    return takes(a, format, width) and _sums_bytes(format, width) <= _DOWN_HELD - 4096


def _sums_bytes(format: str, width: int) -> int:
    """Of a row, as ColumnSums has them."""
    return width // 256 * 96 if format == "Q2_K" else 0


def down_call(a, format, planes, chosen, shared) -> tuple[list[mx.array], list[tuple[str, int]], int, tuple[int, int]]:
    """Inputs, template and blocks of a launch of DOWN_FEW_SOURCE, and the shape of y."""
    values, other, mode = a, (format, planes), 0
    if isinstance(shared, mx.array):
        values, mode = shared, 1
    elif shared is not None:
        (values, other), mode = shared, 2
    C, (rows, slots) = planes["codes"].shape[1], chosen.shape
    tiles = ceil_div(C, 16)
    share = split(tiles, values.shape[-1] // 128) if mode == 2 else 1
    template = {"F": FORMAT_IDS[format], "S": DOWN_WARPS, "SLOTS": slots, "SHARED": mode}
    held = _DOWN_HELD - 4096 * ("IQ2_XXS" in (format, other[0]))
    template |= {"FS": FORMAT_IDS[other[0]], "SS": share, "HELD": held}
    row = 2 * a.shape[-1] + 64 + _sums_bytes(format, a.shape[-1])
    template["HELD_ROWS"] = min(held // row, 8)  # 8 columns of a tile
    blocks = min(ceil_div(tiles, DOWN_WARPS) * chosen.size + tiles * (mode == 2), _DOWN_ROUNDS * _DOWN_BLOCKS * SMS)
    blocks = max(blocks, chosen.size + 1)  # each has one part of one matrix
    inputs = [a, *planes_of(planes), chosen, values, *planes_of(other[1])]
    return inputs, list(template.items()), blocks, (chosen.size + rows * (mode == 2), C)


def planes_of(planes: dict[str, mx.array]) -> list[mx.array]:
    return [planes["codes"], planes["scales"], planes.get("supers", planes["scales"])]


def split(tiles: int, units: int) -> int:
    """Warps that share 16 rows: enough of them for the card, each with work; depends on the weight alone."""
    warps = 1
    while warps < 8 and warps * 4 <= units and tiles * warps < 16 * SMS:
        warps *= 2
    return warps
