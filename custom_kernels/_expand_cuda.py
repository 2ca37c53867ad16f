"""CUDA bodies of `expand_matmul`: the tensor-core products of few rows, whose results expand the streams.

A block has one warp more than multiply. It makes the coefficients of all rows while the others wait for weights, reads
the streams of a tile before its sums are there, and expands them while the others are at the next tile.
"""

from __future__ import annotations

from math import prod

import mlx.core as mx

from . import _quant_cuda
from ._expert_few_cuda import DOWN_SETUP, DOWN_TASKS, DOWN_VALUE
from ._kernel import Kernel, floats
from ._octet import FORMAT_IDS, ceil_div

HEADER = (
    _quant_cuda.FEW_HEADER
    + """
namespace ds4 {

__device__ __forceinline__ float xor_sum(float x, int from, int to) {
  for (int step = from; step < to; step <<= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A warp: the coefficients of ROWS rows, as hyper_coefficients in _hyper_sources.py makes them; to: pre, post, comb of
// each. The rows' chains of divisions run side by side, and the sweeps are no straight line: a block reads its
// instructions once, from far away.
template <int M, int PARTS, int ITERS, int ROWS>
__device__ __forceinline__ void coefficients_of(
    const float* dots, const float* base, const float* scale, const float* eps, float width, float* to) {
  constexpr int OUTPUTS = M * (M + 2);
  const int lane = threadIdx.x & 31, o = lane < M * M ? lane + 2 * M : lane - M * M;
  const float own_scale = lane < OUTPUTS ? scale[lane < M * M ? 2 : o / M] : 0.f;
  const float own_base = lane < OUTPUTS ? base[o] : 0.f;
  float m[ROWS], squares[ROWS], g[ROWS];
#pragma unroll
  for (int n = 0; n < ROWS; n++) m[n] = squares[n] = 0.f;
#pragma unroll (ROWS < 4 ? 8 : 2)
  for (int part = 0; part < PARTS; part++) {
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      const float* const mine = dots + (n * PARTS + part) * (OUTPUTS + 1);
      if (lane < OUTPUTS) m[n] += mine[o];
      squares[n] += mine[OUTPUTS];
    }
  }
#pragma unroll
  for (int n = 0; n < ROWS; n++) {
    m[n] *= rsqrtf(squares[n] / width + eps[1]);
    if (lane < OUTPUTS) m[n] = m[n] * own_scale + own_base;
    float top = m[n];
    for (int step = 1; step < M; step <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    g[n] = expf(m[n] - top);
    g[n] = g[n] / xor_sum(g[n], 1, M) + eps[0];
  }
#pragma unroll 1
  for (int i = 0; i < ITERS; i++) {
    if (i > 0) {
#pragma unroll
      for (int n = 0; n < ROWS; n++) g[n] = g[n] / (xor_sum(g[n], 1, M) + eps[0]);
    }
#pragma unroll
    for (int n = 0; n < ROWS; n++) g[n] = g[n] / (xor_sum(g[n], M, M * M) + eps[0]);
  }
#pragma unroll
  for (int n = 0; n < ROWS; n++) {
    const float gate = 1.f / (1.f + expf(-m[n]));
    if (lane < OUTPUTS) to[n * (2 * M + M * M) + o] = o >= 2 * M ? g[n] : o < M ? gate + eps[0] : 2.f * gate;
  }
}

// A warp's values of one tile of 16 channels in ROWS rows, two rows at a time, and their places in the M streams.
template <int M, int ROWS>
struct Expansion {
  float streams[(ROWS + 1) / 2][M];

  __device__ __forceinline__ void read(const bf16* h, int tile, int C) {
    const int lane = threadIdx.x & 31, c = min(16 * tile + lane % 16, C - 1);
#pragma unroll
    for (int i = 0; i < (ROWS + 1) / 2; i++)
#pragma unroll
      for (int j = 0; j < M; j++)
        streams[i][j] = __bfloat162float(h[((size_t)min(2 * i + lane / 16, ROWS - 1) * M + j) * C + c]);
  }

  // value(row, channel of the tile): what is added to the streams, before its rounding.
  template <typename Value>
  __device__ __forceinline__ void write(
      Value value, const float* known, int tile, int C, bf16* y, bf16* expanded) const {
    const int lane = threadIdx.x & 31, c = 16 * tile + lane % 16;
#pragma unroll
    for (int i = 0; i < (ROWS + 1) / 2; i++) {
      const int n = 2 * i + lane / 16;
      if (n >= ROWS || c >= C) continue;
      const bf16 rounded = bf16(value(n, lane % 16));
      const float added = __bfloat162float(rounded);
      const float* const coefficients = known + n * (2 * M + M * M);
      y[(size_t)n * C + c] = rounded;
#pragma unroll
      for (int k = 0; k < M; k++) {
        float sum = coefficients[2 * M + k] * streams[i][0];
#pragma unroll
        for (int j = 1; j < M; j++) sum = fmaf(coefficients[2 * M + j * M + k], streams[i][j], sum);
        expanded[((size_t)n * M + k) * C + c] = bf16(fmaf(coefficients[M + k], added, sum));
      }
    }
  }
};

}  // namespace ds4
"""
)

# The last warp: every row's coefficients; the first block keeps them.
_KNOWN = """
      constexpr int SIZE = 2 * STREAMS + STREAMS * STREAMS;
      coefficients_of<STREAMS, PARTS, ITERS, ROWS>(dots, base, scale, eps, (float)(STREAMS * C), known);
      __syncwarp();
      for (int e = lane; blockIdx.x == 0 && e < ROWS * SIZE; e += 32) {
        const int row = e / SIZE, i = e % SIZE;
        if (i < STREAMS) pre[row * STREAMS + i] = known[e];
        else if (i < 2 * STREAMS) post[row * STREAMS + i - STREAMS] = known[e];
        else comb[row * STREAMS * STREAMS + i - 2 * STREAMS] = known[e];
      }
"""

_PROJECT_SOURCE = (
    """
    // Blocks go round the tiles of 16 weight rows; S warps take units of the width in turn, as in `quant_matmul_mma`.
    // x [ROWS, K], ROWS up to 8; streams h [ROWS, STREAMS, C]. One barrier a tile: the shares of two tiles have room.
    using namespace ds4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __shared__ uint4 grid_s[F == IQ2_XXS ? 256 : 1];
    __shared__ float known[ROWS * (2 * STREAMS + STREAMS * STREAMS)];
    __shared__ float part[2][S * 128];
    if (F == IQ2_XXS) {
      stage_grid(grid_s);
      __syncthreads();
    }
    const int K = width_of(x_shape, x_ndim), tiles = (C + 15) / 16;
    int turn = 0;
    if (warp == S) {
"""
    + _KNOWN
    + """
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        Expansion<STREAMS, ROWS> streams;
        streams.read((const bf16*)h, tile, C);
        __syncthreads();
        streams.write(
            [&](int n, int i) { return team_sum<S>(part[turn], 0, element_of(i, n)); }, known, tile, C, (bf16*)y,
            (bf16*)expanded);
      }
    } else {
      const Planes w = {(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers};
      const bf16* const row = (const bf16*)x + (size_t)min(lane >> 2, ROWS - 1) * K;
      stream_tiles<F>(
          w, blockIdx.x, gridDim.x, tiles, C, K, row, warp, S, K / Weight<F>::UNIT, grid_s,
          [&](int, const float(&sums)[4]) {
            for (int c = 0; c < 4; c++) part[turn][warp * 128 + 32 * c + lane] = sums[c];
            turn ^= 1;
            __syncthreads();
          });
    }
"""
)

_EXPERTS_SOURCE = (
    """
    // Block: 16 output rows of all distinct experts, by S warps. Streams h [ROWS, STREAMS, C], ROWS up to 8.
"""
    + DOWN_SETUP
    + """
    __shared__ float known[ROWS * (2 * STREAMS + STREAMS * STREAMS)];
    Expansion<STREAMS, ROWS> streams;
    if (warp == S) {
"""
    + _KNOWN
    + """
      streams.read((const bf16*)h, tile, C);
    } else {
"""
    + DOWN_TASKS
    + """
    }
    __syncthreads();
"""
    + DOWN_VALUE
    + "    if (warp == S) streams.write(value, known, tile, C, (bf16*)y, (bf16*)expanded);\n"
)

_STREAMS = ["h", "dots", "base", "scale", "eps"]
_OUTPUTS = ["y", "expanded", "pre", "post", "comb"]


def _kernel(name: str, inputs: list[str], source: str) -> Kernel:
    return Kernel(
        name,
        [*inputs, *_STREAMS],
        _OUTPUTS,
        None,
        cuda_source=source,
        cuda_header=HEADER,
        exact=False,
        family="expand_matmul",
    )


_project = _kernel("expand_project_mma", ["x", "codes", "scales", "supers"], _PROJECT_SOURCE)
_experts = _kernel("expand_experts_mma", _quant_cuda.DOWN_FEW_INPUTS, _EXPERTS_SOURCE)


def takes(streams) -> bool:
    """Whether the bodies take streams of these types: those of the model."""
    return [array.dtype for array in streams] == [mx.bfloat16, *[mx.float32] * 3]


def project(x, weight, streams, *, iters: int, eps: float, norm_eps: float) -> tuple[mx.array, ...]:
    """x bfloat16 [.., K], up to 8 rows; as `expand_matmul.project_expand`."""
    format, planes = weight
    C = planes["codes"].shape[0]
    warps = _quant_cuda.split(ceil_div(C, 16), x.shape[-1] // 128)
    template = [("F", FORMAT_IDS[format]), ("S", warps)]
    inputs = [x, *_quant_cuda.planes_of(planes)]
    blocks = min(ceil_div(C, 16), _quant_cuda.SMS)
    return _launch(_project, inputs, template, blocks, warps, prod(x.shape[:-1]), streams, iters, eps, norm_eps)


def experts(a, down, chosen, shared, streams, *, iters: int, eps: float, norm_eps: float) -> tuple[mx.array, ...]:
    """a bfloat16 [N, slots, F], N up to 8; as `expand_matmul.experts_expand`."""
    inputs, template = _quant_cuda.down_inputs(a, *down, chosen, shared)
    blocks, warps = ceil_div(streams[0].shape[-1], 16), _quant_cuda.DOWN_WARPS
    return _launch(_experts, inputs, template, blocks, warps, a.shape[0], streams, iters, eps, norm_eps)


def _launch(kernel, inputs, template, blocks: int, warps: int, rows: int, streams, iters, eps, norm_eps):
    h, dots, base, scale = streams
    *leading, M, C = h.shape
    sizes = [("STREAMS", M), ("C", C), ("ROWS", rows), ("PARTS", dots.shape[-2]), ("ITERS", iters)]
    return tuple(
        kernel(
            inputs=[*inputs, h, dots, base, scale, floats(eps, norm_eps)],
            template=[*template, *sizes],
            grid=(blocks * 32 * (warps + 1), 1, 1),
            threadgroup=(32 * (warps + 1), 1, 1),
            output_shapes=[(*leading, C), h.shape, (*leading, M), (*leading, M), (*leading, M, M)],
            output_dtypes=[mx.bfloat16, mx.bfloat16, *[mx.float32] * 3],
        )
    )
