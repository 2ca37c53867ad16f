"""CUDA bodies for several matrices over one input of up to 8 rows, whatever their formats, in one launch.

A quantized matrix is multiplied by tensor cores as in `_quant_cuda.py`: as many warps as there share 16 rows, so that
the sums have the bits of a launch of its own. Float matrices are multiplied in float32 as the portable text does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import mlx.core as mx

from mlx_ds4.formats import planes as block_planes

from . import _quant_cuda
from ._kernel import Kernel, float_bits
from ._octet import FORMAT_IDS, ceil_div

Weight = tuple[str, block_planes.Planes]

_FLOATS = tuple(block_planes.FLOATS.values())
_FLOAT_ROWS = 2  # as in the header
_FEWEST_WARPS = 4

HEADER = (
    _quant_cuda.FEW_HEADER
    + """
namespace ds4 {

const int FLOAT_ROWS = 2;  // rows of a float matrix for a warp
enum { F32 = DS4_F32, F16 = DS4_F16, BF16 = DS4_BF16 };

// Eight values from octet o of a row on.
template <int F>
__device__ __forceinline__ void float_octet(float (&v)[8], const unsigned char* row, int o) {
  if (F == F32) {
    const uint4 a = read16(row + 32 * o), b = read16(row + 32 * o + 16);
    const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __int_as_float(w[i]);
  } else {
    const uint4 a = F == BF16 ? __ldg((const uint4*)(row + 16 * o)) : read16(row + 16 * o);
    const u32 w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[2 * i] = F == F16 ? half_bits(w[i] & 0xffff) : __int_as_float(w[i] << 16);
      v[2 * i + 1] = F == F16 ? half_bits(w[i] >> 16) : __int_as_float(w[i] & 0xffff0000u);
    }
  }
}

// A warp: R rows of a float matrix from `first` on times M rows of x, of which MOST is a bound, added up in the order
// of the portable text.
template <int F, int MOST, int R, typename T>
__device__ __forceinline__ void float_rows(
    const bf16* x, int M, int K, const void* codes, int N, int first, T* y) {
  if (first >= N) return;
  const int lane = threadIdx.x & 31, size = F == F32 ? 4 : 2;
  float sum[R][MOST];
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int m = 0; m < MOST; m++) sum[r][m] = 0.f;
#pragma unroll 4  // reads of several octets on their way at a time
  for (int o = lane; o < K / 8; o += 32) {
    float w[R][8];
#pragma unroll
    for (int r = 0; r < R; r++)
      float_octet<F>(w[r], (const unsigned char*)codes + (size_t)min(first + r, N - 1) * K * size, o);
#pragma unroll
    for (int m = 0; m < MOST; m++) {
      float v[8];
      float_octet<BF16>(v, (const unsigned char*)(x + (size_t)min(m, M - 1) * K), o);
#pragma unroll
      for (int r = 0; r < R; r++) {
        float dot = w[r][0] * v[0];
#pragma unroll
        for (int i = 1; i < 8; i++) dot = fmaf(w[r][i], v[i], dot);
        sum[r][m] += dot;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int m = 0; m < MOST; m++) {
      float total = sum[r][m];
      for (int step = 16; step > 0; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
      if (lane == 0 && m < M && first + r < N) y[(size_t)m * N + first + r] = T(total);
    }
}

// One of several matrices that share the blocks of a launch: W warps a block, S of them for 16 weight rows; `block`
// counts from this matrix on and is taken down by its blocks where it lies behind them. Whether it was one of them.
template <int F, int S, int W, int MOST, typename T>
__device__ __forceinline__ bool matrix(
    int& block, const bf16* x, int M, int K, const void* codes, const void* scales, const void* supers, int N, T* y,
    uint4* rings, const uint4* grid) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  constexpr bool FLOAT = F == F32 || F == F16 || F == BF16;
  constexpr int TEAMS = W / S, ROWS = FLOAT ? FLOAT_ROWS * W : 16 * TEAMS;
  const int blocks = (N + ROWS - 1) / ROWS;
  if (block >= blocks) {
    block -= blocks;
    return false;
  }
  if constexpr (FLOAT) {
    float_rows<F, MOST, FLOAT_ROWS>(x, M, K, codes, N, block * ROWS + warp * FLOAT_ROWS, y);
  } else {
    const int tile = block * TEAMS + warp / S;
    const Planes w = {(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers};
    Rows<1> rows;
    rows.p[0] = x + (size_t)min(g, M - 1) * K;
    rows.real = g < M;
    float acc[1][4];
    clear(acc);
    if (16 * tile < N)
      product<F, 1>(
          acc, w, {0, tile, N, K, warp % S, S, K / Weight<F>::UNIT}, rows, grid, ring_of(rings, warp));
    float* const part = (float*)rings;
    for (int c = 0; c < 4; c++) part[warp * (RING / 4) + 32 * c + lane] = acc[0][c];
    __syncthreads();
    for (int i = threadIdx.x; i < TEAMS * 128; i += 32 * W) {
      const int team = i / 128, e = i % 128, c = e / 32, n = 2 * t + (c & 1);
      const int r = 16 * (block * TEAMS + team) + g + 8 * (c >> 1);
      if (n < M && r < N) y[(size_t)n * N + r] = T(team_sum<S>(part, team * S, e));
    }
  }
  return true;
}

}  // namespace ds4
"""
)

GROUP_SOURCE = """
    // Blocks of W warps; those of matrix 0 come first. x [.., K], up to 8 rows M.
    using namespace ds4;
    __shared__ uint4 grid_s[GRID ? 256 : 1];
    __shared__ uint4 rings[W * RING / 16];
    if (GRID) {
      stage_grid(grid_s);
      __syncthreads();
    }
    int block = blockIdx.x;
    const int M = rows_of(x_shape, x_ndim), K = width_of(x_shape, x_ndim);
    const bf16* const rows = (const bf16*)x;
"""
_GROUP_MATRIX = """
    if (matrix<F#, S#, W, MOST>(
            block, rows, M, K, codes#, scales#, supers#, codes#_shape[0], y#, rings, grid_s))
      return;
"""


def _group_kernel(count: int) -> Kernel:
    planes = [f"{name}{i}" for i in range(count) for name in ("codes", "scales", "supers")]
    return Kernel(
        f"quant_matmul_mma_{count}",
        ["x", *planes],
        [f"y{i}" for i in range(count)],
        None,
        cuda_source=GROUP_SOURCE + "".join(_GROUP_MATRIX.replace("#", str(i)) for i in range(count)),
        cuda_header=HEADER,
        exact=False,
        family="quant_matmul",
    )


_group_kernels = {count: _group_kernel(count) for count in range(2, 6)}


def _most(rows: int) -> int:
    """A bound on the rows of float matrices. It has two values only: each is a compilation of two seconds, for which a
    verification of another length than before would wait."""
    return 1 if rows == 1 else 8


def takes(x: mx.array, format: str) -> bool:
    """Whether a matrix of this format may share a launch over x [.., K]."""
    if format in _FLOATS:
        return x.dtype == mx.bfloat16 and x.shape[-1] % 8 == 0
    return _quant_cuda.takes(x, format, x.shape[-1])


def together(x: mx.array, weights: Sequence[Weight], dtypes: Sequence[mx.Dtype]) -> list[mx.array]:
    """x bfloat16 [.., K], up to 8 rows, times two to five matrices that `takes` allows: a list of [.., N]."""
    call, blocks, _, warps = group_call(x, weights, dtypes)
    grid = (blocks * 32 * warps, 1, 1)
    return _group_kernels[len(weights)](**call, grid=grid, threadgroup=(32 * warps, 1, 1))


def group_call(
    x: mx.array, weights: Sequence[Weight], dtypes: Sequence[mx.Dtype]
) -> tuple[dict[str, list[Any]], int, list[int], int]:
    """What a launch of GROUP_SOURCE and its matrices gets, its blocks, those of each matrix, and the warps of each."""
    *leading, K = x.shape
    M = prod(leading)
    rows = [planes["codes"].shape[0] for _, planes in weights]
    splits = [_split(format, N, K) for (format, _), N in zip(weights, rows, strict=True)]
    warps = warps_of(weights, K)
    template = [(f"F{i}", FORMAT_IDS[format]) for i, (format, _) in enumerate(weights)]
    template += [(f"S{i}", split) for i, split in enumerate(splits)]
    template += [("W", warps), ("MOST", _most(M)), ("GRID", any(format == "IQ2_XXS" for format, _ in weights))]
    each = [_blocks(format, N, s, warps) for (format, _), N, s in zip(weights, rows, splits, strict=True)]
    call = {
        "inputs": [x, *[plane for format, planes in weights for plane in _planes(planes)]],
        "template": template,
        "output_shapes": [(*leading, N) for N in rows],
        "output_dtypes": list(dtypes),
    }
    return call, sum(each), each, warps


def warps_of(weights: Sequence[Weight], width: int) -> int:
    """The warps of a block: as many as share 16 rows of any of these matrices."""
    return max(_FEWEST_WARPS, *(_split(format, planes["codes"].shape[0], width) for format, planes in weights))


def _split(format: str, rows: int, width: int) -> int:
    """Warps that share 16 rows of a quantized matrix: those of a launch of its own."""
    return 1 if format in _FLOATS else _quant_cuda.split(ceil_div(rows, 16), width // 128)


def _blocks(format: str, rows: int, split: int, warps: int) -> int:
    return ceil_div(rows, _FLOAT_ROWS * warps if format in _FLOATS else 16 * (warps // split))


def _planes(planes: block_planes.Planes) -> list[mx.array]:
    scales = planes.get("scales", planes["codes"])
    return [planes["codes"], scales, planes.get("supers", scales)]


SHARED_SOURCE = """
    // Blocks of W warps: first the router's rows, which read r, then 16 rows of gate and of up for each S warps, which
    // read x [.., K], up to 8 rows M.
    using namespace ds4;
    __shared__ uint4 grid_s[GRID ? 256 : 1];
    __shared__ uint4 rings[W * RING / 16];
    float* const part = (float*)rings;
    if (GRID) {
      stage_grid(grid_s);
      __syncthreads();
    }
    int block = blockIdx.x;
    const int M = rows_of(x_shape, x_ndim), K = width_of(x_shape, x_ndim), N = gate_codes_shape[0];
    const bool routes = matrix<FR, SR, W, MOST>(
        block, (const bf16*)r, M, K, router_codes, router_scales, router_supers, router_codes_shape[0], logits, rings,
        grid_s);
    if (routes) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    constexpr int TEAMS = W / S;
    const float LIMIT = __int_as_float(LIMIT_BITS);
    typedef const unsigned char* Bytes;
    const Planes w1 = {(Bytes)gate_codes, (Bytes)gate_scales, (Bytes)gate_supers};
    const Planes w3 = {(Bytes)up_codes, (Bytes)up_scales, (Bytes)up_supers};
    const int tile = block * TEAMS + warp / S;
    Rows<1> rows;
    rows.p[0] = (const bf16*)x + (size_t)min(g, M - 1) * K;
    rows.real = g < M;
    const u32 ring = ring_of(rings, warp);
    float gate[1][4], up[1][4];
    clear(gate);
    clear(up);
    if (FG == FU && 16 * tile < N) {
      two_products<FG>(gate, up, w1, w3, {0, tile, N, K, warp % S, S, K / Weight<FG>::UNIT}, rows, grid_s, ring);
    } else if (16 * tile < N) {
      product<FG, 1>(gate, w1, {0, tile, N, K, warp % S, S, K / Weight<FG>::UNIT}, rows, grid_s, ring);
      product<FU, 1>(up, w3, {0, tile, N, K, warp % S, S, K / Weight<FU>::UNIT}, rows, grid_s, ring);
    }
    for (int c = 0; c < 4; c++) {
      part[warp * (RING / 4) + 32 * c + lane] = gate[0][c];
      part[warp * (RING / 4) + 128 + 32 * c + lane] = up[0][c];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TEAMS * 128; i += 32 * W) {
      const int team = i / 128, e = i % 128, c = e / 32, n = 2 * t + (c & 1);
      const int row = 16 * (block * TEAMS + team) + g + 8 * (c >> 1);
      const float a1 = fminf(round_bf16(team_sum<S>(part, team * S, e)), LIMIT);
      const float b1 = fminf(fmaxf(round_bf16(team_sum<S>(part + 128, team * S, e)), -LIMIT), LIMIT);
      if (n < M && row < N) a[(size_t)n * N + row] = bf16(a1 * (1.f / (1.f + expf(-a1))) * b1);
    }
"""

SHARED_INPUTS = [
    "r",
    "x",
    *[f"{matrix}_{plane}" for matrix in ("router", "gate", "up") for plane in ("codes", "scales", "supers")],
]
_shared = Kernel(
    "shared_expert_mma",
    SHARED_INPUTS,
    ["logits", "a"],
    None,
    cuda_source=SHARED_SOURCE,
    cuda_header=HEADER,
    exact=False,
    family="shared_expert",
)


def takes_shared(x: mx.array, gate: str, up: str, router: str) -> bool:
    """Whether the fused first half takes matrices of these formats over x [.., C]: gate and up by tensor cores."""
    return takes(x, router) and all(f not in _FLOATS and takes(x, f) for f in (gate, up))


def shared_swiglu(
    x: mx.array, gate: Weight, up: Weight, router_x: mx.array, router: Weight, limit: float
) -> tuple[mx.array, mx.array]:
    """(logits float32 [M, E], a bfloat16 [M, F]), as `shared_expert.shared_swiglu` says; M up to 8."""
    call, blocks, _, warps = shared_call(x, gate, up, router_x, router, limit)
    logits, a = _shared(**call, grid=(blocks * 32 * warps, 1, 1), threadgroup=(32 * warps, 1, 1))
    return logits, a


def shared_call(
    x: mx.array, gate: Weight, up: Weight, router_x: mx.array, router: Weight, limit: float
) -> tuple[dict[str, list[Any]], int, int, int]:
    """What a launch of SHARED_SOURCE gets, its blocks, those among them for the router, and the warps of each."""
    (M, K), F, E = x.shape, gate[1]["codes"].shape[0], router[1]["codes"].shape[0]
    split, router_split, warps = _split(gate[0], F, K), _split(router[0], E, K), warps_of([gate, router], K)
    router_blocks = _blocks(router[0], E, router_split, warps)
    template = [(f"F{name}", FORMAT_IDS[w[0]]) for name, w in zip("RGU", (router, gate, up), strict=True)]
    template += [("SR", router_split), ("S", split), ("W", warps), ("MOST", _most(M))]
    template += [("GRID", "IQ2_XXS" in (router[0], gate[0], up[0])), ("LIMIT_BITS", float_bits(limit))]
    call = {
        "inputs": [router_x, x, *[plane for _, planes in (router, gate, up) for plane in _planes(planes)]],
        "template": template,
        "output_shapes": [(M, E), (M, F)],
        "output_dtypes": [mx.float32, mx.bfloat16],
    }
    return call, router_blocks + _blocks(gate[0], F, split, warps), router_blocks, warps
