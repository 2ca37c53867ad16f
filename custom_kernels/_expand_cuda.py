"""CUDA bodies of `expand_matmul`: the tensor-core products of `_quant_cuda.py`, whose results expand the streams."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from . import _quant_cuda
from ._kernel import Kernel, floats
from ._octet import FORMAT_IDS, ceil_div

HEADER = (
    _quant_cuda.HEADER
    + """
namespace ds4 {

__device__ __forceinline__ float xor_sum(float x, int from, int to) {
  for (int step = from; step < to; step <<= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A warp: the coefficients of one row, as hyper_coefficients in _hyper_sources.py makes them; to: pre, post, comb.
template <int M, int PARTS, int ITERS>
__device__ __forceinline__ void coefficients_of(
    const float* dots, const float* base, const float* scale, const float* eps, float width, int row, float* to) {
  constexpr int OUTPUTS = M * (M + 2);
  const int lane = threadIdx.x & 31, o = lane < M * M ? lane + 2 * M : lane - M * M;
  const float* mine = dots + (size_t)row * PARTS * (OUTPUTS + 1);
  float m = 0.f, squares = 0.f;
#pragma unroll 8
  for (int part = 0; part < PARTS; part++, mine += OUTPUTS + 1) {
    if (lane < OUTPUTS) m += mine[o];
    squares += mine[OUTPUTS];
  }
  m *= rsqrtf(squares / width + eps[1]);
  if (lane < OUTPUTS) m = m * scale[lane < M * M ? 2 : o / M] + base[o];
  float top = m;
  for (int step = 1; step < M; step <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  float g = expf(m - top);
  g = g / xor_sum(g, 1, M) + eps[0];
  for (int i = 0; i < ITERS; i++) {
    if (i > 0) g = g / (xor_sum(g, 1, M) + eps[0]);
    g = g / (xor_sum(g, M, M * M) + eps[0]);
  }
  const float gate = 1.f / (1.f + expf(-m));
  if (lane < OUTPUTS) to[o] = o >= 2 * M ? g : o < M ? gate + eps[0] : 2.f * gate;
}

// Channel c of a row in all M streams of C channels.
template <int M>
__device__ __forceinline__ void expand_channel(
    const bf16* h, const float* coefficients, float added, int row, int C, int c, bf16* expanded) {
  const size_t at = (size_t)row * M * C + c;
  float streams[M];
#pragma unroll
  for (int j = 0; j < M; j++) streams[j] = __bfloat162float(h[at + (size_t)j * C]);
#pragma unroll
  for (int k = 0; k < M; k++) {
    float sum = coefficients[2 * M + k] * streams[0];
#pragma unroll
    for (int j = 1; j < M; j++) sum = fmaf(coefficients[2 * M + j * M + k], streams[j], sum);
    expanded[at + (size_t)k * C] = bf16(fmaf(coefficients[M + k], added, sum));
  }
}

}  // namespace ds4
"""
)

# Before the product: row i's coefficients by warp i, i + S, ..; the barrier in front of the stores makes them known.
_BEFORE = """
    // As below, and each value expands the streams H [rows, STREAMS, C] at its channel. Up to 8 rows.
    __shared__ float known[8 * (2 * STREAMS + STREAMS * STREAMS)];
    const int hyper_rows = ROWS;
    {
      using namespace ds4;
      constexpr int SIZE = 2 * STREAMS + STREAMS * STREAMS;
      for (int row = threadIdx.x >> 5; row < hyper_rows; row += S)
        coefficients_of<STREAMS, PARTS, ITERS>(dots, base, scale, eps, (float)(STREAMS * C), row, known + row * SIZE);
      if (S == 1 || blockIdx.x == 0) __syncthreads();
      if (blockIdx.x == 0)
        for (int e = threadIdx.x; e < hyper_rows * SIZE; e += 32 * S) {
          const int row = e / SIZE, i = e % SIZE;
          if (i < STREAMS) pre[row * STREAMS + i] = known[e];
          else if (i < 2 * STREAMS) post[row * STREAMS + i - STREAMS] = known[e];
          else comb[row * STREAMS * STREAMS + i - 2 * STREAMS] = known[e];
        }
    }
"""
_STORE = """{
        const bf16 rounded = bf16(sum);
        y[(size_t)n * N + r] = rounded;
        expand_channel<STREAMS>(
            (const bf16*)h, known + n * (2 * STREAMS + STREAMS * STREAMS), __bfloat162float(rounded), n, N, r,
            (bf16*)expanded);
      }"""

_STREAMS = ["h", "dots", "base", "scale", "eps"]
_OUTPUTS = ["y", "expanded", "pre", "post", "comb"]


def _body(source: str, store: str) -> str:
    assert source.count(store) == 1
    return _BEFORE + source.replace(store, _STORE)


def _kernel(name: str, inputs: list[str], source: str, store: str) -> Kernel:
    return Kernel(
        name,
        [*inputs, *_STREAMS],
        _OUTPUTS,
        None,
        cuda_source=_body(source, store),
        cuda_header=HEADER,
        exact=False,
        family="expand_matmul",
    )


_project = _kernel(
    "expand_project_mma", ["x", "codes", "scales", "supers"], _quant_cuda.DENSE_SOURCE, "y[(size_t)n * N + r] = T(sum);"
)
_experts = _kernel(
    "expand_experts_mma",
    _quant_cuda.DOWN_FEW_INPUTS,
    _quant_cuda.DOWN_FEW_SOURCE,
    "y[(size_t)n * N + r] = bf16(sum);",
)


def takes(streams) -> bool:
    """Whether the bodies take streams of these types: those of the model."""
    return [array.dtype for array in streams] == [mx.bfloat16, *[mx.float32] * 3]


def project(x, weight, streams, *, iters: int, eps: float, norm_eps: float) -> tuple[mx.array, ...]:
    """x bfloat16 [.., K], up to 8 rows; as `expand_matmul.project_expand`."""
    format, planes = weight
    C = planes["codes"].shape[0]
    warps = _quant_cuda.split(ceil_div(C, 16), x.shape[-1] // 128)
    template = [("F", FORMAT_IDS[format]), ("S", warps), ("NT", 1), ("G", 1)]
    inputs = [x, *_quant_cuda.planes_of(planes)]
    return _launch(_project, inputs, template, warps, prod(x.shape[:-1]), streams, iters, eps, norm_eps)


def experts(a, down, chosen, shared, streams, *, iters: int, eps: float, norm_eps: float) -> tuple[mx.array, ...]:
    """a bfloat16 [N, slots, F], N up to 8; as `expand_matmul.experts_expand`."""
    inputs, template = _quant_cuda.down_inputs(a, *down, chosen, shared)
    return _launch(_experts, inputs, template, _quant_cuda.DOWN_WARPS, a.shape[0], streams, iters, eps, norm_eps)


def _launch(kernel, inputs, template, warps: int, rows: int, streams, iters: int, eps: float, norm_eps: float):
    h, dots, base, scale = streams
    *leading, M, C = h.shape
    sizes = [("STREAMS", M), ("C", C), ("ROWS", rows), ("PARTS", dots.shape[-2]), ("ITERS", iters)]
    return tuple(
        kernel(
            inputs=[*inputs, h, dots, base, scale, floats(eps, norm_eps)],
            template=[*template, *sizes],
            grid=(ceil_div(C, 16) * 32 * warps, 1, 1),
            threadgroup=(32 * warps, 1, 1),
            output_shapes=[(*leading, C), h.shape, (*leading, M), (*leading, M), (*leading, M, M)],
            output_dtypes=[mx.bfloat16, mx.bfloat16, *[mx.float32] * 3],
        )
    )
