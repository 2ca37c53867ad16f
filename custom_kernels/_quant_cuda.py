"""CUDA bodies of the quantized products: tensor cores, for one row and a few.

From 128 rows on (K-quants never) `_quant_tile_cuda.py` takes over, for many rows of experts `_expert_tile_cuda.py`. The
portable Metal text runs on CUDA too, but there six rows cost six times the multiply-adds. These kernels (header
`_quant_mma.h`) let 8 activation rows ride in one mma for the price of one. A row's sums are taken in an order that
depends on the weight's shape alone, so one-row, six-row and prefill results are equal bit for bit.

Estimate: bytes are the planes once plus activations from cache; per weight about 2 integer operations (Q8_0, IQ2_XXS)
or 3 (MXFP4, Q2_K), against 28 T/s on an H200: Q8_0 is bound by memory, IQ2_XXS and Q2_K by arithmetic.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from ._kernel import Kernel
from ._octet import FORMAT_IDS, ceil_div, iq2_words
from ._tiles_cuda import PTX

# Columns of one step; no entry: a float format, which the portable text multiplies.
_UNITS = {"Q8_0": 128, "MXFP4": 128, "FP8": 128, "Q4_K": 256, "Q2_K": 256, "IQ2_XXS": 256}
_SMS = 132
GATE_UP_SPLIT = 4
DOWN_WARPS = 4

HEADER = (
    PTX + "#include <cuda_fp16.h>\n"
    f"static __device__ const unsigned int IQ2_WORDS[512] = {{{', '.join(f'{word}u' for word in iq2_words())}}};\n"
    + "".join(f"#define DS4_{name} {number}\n" for name, number in FORMAT_IDS.items())
    + (Path(__file__).parent / "_quant_mma.h").read_text()
)

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
    __shared__ float part[S > 1 ? S * NT * 128 : 1];
    const Planes w = {(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers};
    Rows<NT> rows;
    for (int i = 0; i < NT; i++) {
      const int n = first + 8 * i + g;
      rows.p[i] = (const bf16*)x + (size_t)min(n, M - 1) * G * K + (size_t)(16 * tile / (N / G)) * K;
    }
    float acc[NT][4];
    clear(acc);
    product<F, NT>(acc, w, 0, tile, N, K, rows, warp, S, K / Weight<F>::UNIT, grid_s);
    if (S > 1) {
      for (int i = 0; i < NT; i++)
        for (int c = 0; c < 4; c++) part[(warp * NT + i) * 128 + 32 * c + lane] = acc[i][c];
      __syncthreads();
    }
    for (int e = threadIdx.x; e < NT * 128; e += 32 * S) {
      const int i = e / 128, c = e / 32 % 4, n = first + 8 * i + 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1);
      float sum = 0.f;
      if (S > 1) {
        for (int s = 0; s < S; s++) sum += part[s * NT * 128 + e];
      } else {
        for (int k = 0; k < NT; k++)
          for (int j = 0; j < 4; j++) sum = k == i && j == c ? acc[k][j] : sum;
      }
      if (n < M && r < N) y[(size_t)n * N + r] = T(sum);
    }
"""
)

# Both expert bodies: the pairs (row, slot) that chose an expert are the columns of one tile.
_FEW_PAIRS = """
    // At most 64 pairs: every warp holds all choices, two a lane, and knows the pairs of an expert as a bit mask.
    const int P = rows_of(chosen_shape, chosen_ndim) * width_of(chosen_shape, chosen_ndim);
    const int choice = lane < P ? chosen[lane] : -1, choice2 = lane + 32 < P ? chosen[lane + 32] : -1;
    auto expert_of = [&](int q) { return __shfl_sync(~0u, q < 32 ? choice : choice2, q & 31); };
    auto chosen_by = [&](int e) {
      return (unsigned long long)__ballot_sync(~0u, choice2 == e) << 32 | __ballot_sync(~0u, choice == e);
    };
    auto pair_of = [](unsigned long long mask, int column) {
      for (int i = 0; i < column; i++) mask &= mask - 1;
      return __ffsll(mask) - 1;
    };
"""

_GATE_UP_MAIN = """
    float up[NT][4], gate[NT][4];
    clear(gate);
    clear(up);
    product<F, NT, Weight<F>::SHALLOW>(
        gate, w1, (size_t)expert * N, tile, N, K, rows, warp, S, K / Weight<F>::UNIT, grid_s);
    product<F, NT, Weight<F>::SHALLOW>(
        up, w3, (size_t)expert * N, tile, N, K, rows, warp, S, K / Weight<F>::UNIT, grid_s);
    for (int i = 0; i < NT; i++)
      for (int c = 0; c < 4; c++) {
        part[(warp * NT + i) * 128 + 32 * c + lane] = gate[i][c];
        part[((S + warp) * NT + i) * 128 + 32 * c + lane] = up[i][c];
      }
    __syncthreads();
    for (int e = threadIdx.x; e < NT * 128; e += 32 * S) {
      const int i = e / 128, c = e / 32 % 4, n = 8 * i + 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1);
      float a = 0.f, b = 0.f;
      for (int s = 0; s < S; s++) {
        a += part[s * NT * 128 + e];
        b += part[(S + s) * NT * 128 + e];
      }
      a = fminf(round_bf16(a), LIMIT);
      b = fminf(fmaxf(round_bf16(b), -LIMIT), LIMIT);
      if (n < count && r < N) y[(size_t)PAIR(n) * N + r] = bf16(weights[PAIR(n)] * (a / (1.f + expf(-a)) * b));
    }
"""

_EXPERT_PLANES = """
    const Planes w1 = {(const unsigned char*)codes1, (const unsigned char*)scales1, (const unsigned char*)supers1};
    const Planes w3 = {(const unsigned char*)codes3, (const unsigned char*)scales3, (const unsigned char*)supers3};
    __shared__ float part[2 * S * NT * 128];
    const int tile = blockIdx.x, K = width_of(x_shape, x_ndim), N = codes1_shape[1];
    Rows<NT> rows;
"""

_GATE_UP_FEW_SOURCE = (
    """
    // Block (tile, pair): 16 rows of gate and up of the expert of that pair, for all pairs with the same expert;
    // blocks of later pairs of an expert have nothing to do.
"""
    + _PROLOGUE
    + _FEW_PAIRS
    + _EXPERT_PLANES
    + """
    const float LIMIT = __int_as_float(LIMIT_BITS);
    const int pair = blockIdx.y, expert = expert_of(pair);
    const unsigned long long mask = chosen_by(expert);
    if (mask & ((1ull << pair) - 1)) return;
    const int count = __popcll(mask);
    rows.p[0] = (const bf16*)x + (size_t)(pair_of(mask, min(g, count - 1)) / SLOTS) * K;
#define PAIR(n) pair_of(mask, n)
"""
    + _GATE_UP_MAIN
)

DOWN_FEW_SOURCE = (
    """
    // Block: 16 output rows of all distinct experts; a task is one half of the width for one of them, tasks go round
    // the warps, then the shares of the SS warps that would multiply the shared expert's matrix alone. Then the halves
    // are added, rounded, and summed over each row's slots. SHARED: 0 nothing, 1 values to add, 2 a product.
"""
    + _PROLOGUE.replace("F == IQ2_XXS", "(F == IQ2_XXS || FS == IQ2_XXS)")
    + _FEW_PAIRS
    + """
    __shared__ float part[2][64][16];
    __shared__ float share[SHARED == 2 ? SS * 128 : 1];
    const Planes w = {(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers};
    const int tile = blockIdx.x, K = width_of(x_shape, x_ndim), N = codes_shape[1];
    const int units = K / Weight<F>::UNIT, half = (units + 1) / 2;
    int task = 0;
    for (int q = 0; q < P; q++) {
      const int expert = expert_of(q);
      const unsigned long long mask = chosen_by(expert);
      if (mask & ((1ull << q) - 1)) continue;  // an earlier pair chose the same
      const int count = __popcll(mask);
      for (int side = 0; side < 2; side++) {
        if (task++ % S != warp) continue;
        Rows<1> rows;
        rows.p[0] = (const bf16*)x + (size_t)pair_of(mask, min(g, count - 1)) * K;
        float acc[1][4];
        clear(acc);
        product<F, 1, Weight<F>::SHALLOW>(
            acc, w, (size_t)expert * N, tile, N, K, rows, side ? half : 0, 1, side ? units : half, grid_s);
        for (int c = 0; c < 4; c++) {
          const int n = 2 * t + (c & 1);
          if (n < count) part[side][pair_of(mask, n)][g + 8 * (c >> 1)] = acc[0][c];
        }
      }
    }
    if (SHARED == 2) {
      const Planes ws = {
          (const unsigned char*)shared_codes, (const unsigned char*)shared_scales, (const unsigned char*)shared_supers};
      const int width = width_of(shared_shape, shared_ndim);
      Rows<1> rows;
      rows.p[0] = (const bf16*)shared + (size_t)min(g, P / SLOTS - 1) * width;
      for (int s = 0; s < SS; s++) {
        if (task++ % S != warp) continue;
        float acc[1][4];
        clear(acc);
        product<FS, 1>(acc, ws, 0, tile, N, width, rows, s, SS, width / Weight<FS>::UNIT, grid_s);
        for (int c = 0; c < 4; c++) share[s * 128 + 32 * c + lane] = acc[0][c];
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < P / SLOTS * 16; e += 32 * S) {
      const int n = e / 16, r = 16 * tile + e % 16;
      if (r >= N) continue;
      float sum = 0.f;
      for (int s = 0; s < SLOTS; s++) {
        const int pair = n * SLOTS + s;
        sum += round_bf16(part[0][pair][e % 16] + part[1][pair][e % 16]);
      }
      if (SHARED == 1) sum += __bfloat162float(((const bf16*)shared)[(size_t)n * N + r]);
      if (SHARED == 2) {  // the lane and the register that hold row e % 16, column n
        const int at = 32 * ((n & 1) + 2 * (e % 16 / 8)) + 4 * (e % 8) + n / 2;
        float added = SS == 1 ? share[at] : 0.f;
        for (int s = 0; SS > 1 && s < SS; s++) added += share[s * 128 + at];
        sum += round_bf16(added);
      }
      y[(size_t)n * N + r] = bf16(sum);
    }
"""
)


def _kernel(name: str, inputs: list[str], source: str, family: str) -> Kernel:
    return Kernel(name, inputs, ["y"], None, cuda_source=source, cuda_header=HEADER, exact=False, family=family)


_ONE = ["codes", "scales", "supers"]
_TWO = [f"{plane}{index}" for index in (1, 3) for plane in _ONE]
_dense = _kernel("quant_matmul_mma", ["x", *_ONE], DENSE_SOURCE, "quant_matmul")
_gate_up_few = _kernel("expert_swiglu_few_mma", ["x", *_TWO, "chosen", "weights"], _GATE_UP_FEW_SOURCE, "expert_matmul")
DOWN_FEW_INPUTS = ["x", *_ONE, "chosen", "shared", *[f"shared_{plane}" for plane in _ONE]]
_down_few = _kernel(
    "expert_down_few_mma",
    DOWN_FEW_INPUTS,
    DOWN_FEW_SOURCE,
    "expert_matmul",
)


def takes(x: mx.array, format: str, width: int, rows_of_weight: int = 16) -> bool:
    """Whether the tensor-core kernels take x against a weight of this format and width; groups are whole tiles."""
    return format in _UNITS and x.dtype == mx.bfloat16 and width % _UNITS[format] == 0 and rows_of_weight % 16 == 0


def dense(x: mx.array, format: str, planes: dict[str, mx.array], *, groups: int, out_dtype: mx.Dtype) -> mx.array:
    """x bfloat16 [.., groups * K] times a weight of N rows (N / groups of them for each slice of x) -> [.., N]."""
    *leading, width = x.shape
    M, N = prod(leading), planes["codes"].shape[0]
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


def gate_up_few(x, format, gate, up, chosen, weights, limit: float) -> mx.array:
    """The clamped, weighted SwiGLU of every (row, slot) pair, at most 64 of them: bfloat16 [rows, slots, F]."""
    F = gate["codes"].shape[1]
    template = {"F": FORMAT_IDS[format], "S": GATE_UP_SPLIT, "SLOTS": chosen.shape[1], "NT": 1}
    template["LIMIT_BITS"] = int(np.float32(limit).view(np.int32))
    return _gate_up_few(
        inputs=[x, *planes_of(gate), *planes_of(up), chosen, weights],
        template=list(template.items()),
        grid=(ceil_div(F, 16) * 32 * GATE_UP_SPLIT, chosen.size, 1),
        threadgroup=(32 * GATE_UP_SPLIT, 1, 1),
        output_shapes=[(*chosen.shape, F)],
        output_dtypes=[mx.bfloat16],
    )[0]


def down_few(a, format, planes, chosen, shared) -> mx.array:
    """The experts' outputs of a [rows, slots, F], each rounded, summed over slots: [rows, C]. Last is added `shared`:
    values [rows, C], (a [rows, F'], weight) to multiply, or None."""
    inputs, template = down_inputs(a, format, planes, chosen, shared)
    C = planes["codes"].shape[1]
    return _down_few(
        inputs=inputs,
        template=template,
        grid=(ceil_div(C, 16) * 32 * DOWN_WARPS, 1, 1),
        threadgroup=(32 * DOWN_WARPS, 1, 1),
        output_shapes=[(a.shape[0], C)],
        output_dtypes=[mx.bfloat16],
    )[0]


def down_inputs(a, format, planes, chosen, shared) -> tuple[list[mx.array], list[tuple[str, int]]]:
    """Inputs and template of DOWN_FEW_SOURCE."""
    values, other, mode = a, (format, planes), 0
    if isinstance(shared, mx.array):
        values, mode = shared, 1
    elif shared is not None:
        (values, other), mode = shared, 2
    share = split(ceil_div(planes["codes"].shape[1], 16), values.shape[-1] // 128) if mode == 2 else 1
    template = {"F": FORMAT_IDS[format], "S": DOWN_WARPS, "SLOTS": a.shape[1], "SHARED": mode}
    template |= {"FS": FORMAT_IDS[other[0]], "SS": share}
    return [a, *planes_of(planes), chosen, values, *planes_of(other[1])], list(template.items())


def planes_of(planes: dict[str, mx.array]) -> list[mx.array]:
    return [planes["codes"], planes["scales"], planes.get("supers", planes["scales"])]


def split(tiles: int, units: int) -> int:
    """Warps that share 16 rows: enough of them for the card, each with work; depends on the weight alone."""
    warps = 1
    while warps < 8 and warps * 4 <= units and tiles * warps < 16 * _SMS:
        warps *= 2
    return warps
