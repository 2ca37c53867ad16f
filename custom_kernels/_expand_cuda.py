"""CUDA bodies of `expand_matmul`: the tensor-core products of `_quant_cuda.py`, whose results expand the streams."""

from __future__ import annotations

import mlx.core as mx

from . import _quant_cuda
from ._kernel import Kernel
from ._octet import FORMAT_IDS, ceil_div

HEADER = (
    _quant_cuda.HEADER
    + """
namespace ds4 {

// Channel c of a row in all M streams of C channels; mix: the row's post [M], then comb [M source, M destination].
template <int M>
struct Channel {
  bf16 streams[M];  // not yet numbers: to convert is to wait for the read
  float coefficients[M + M * M];
  __device__ __forceinline__ void read(const bf16* h, const float* mix, int row, int C, int c) {
#pragma unroll
    for (int j = 0; j < M; j++) streams[j] = h[((size_t)row * M + j) * C + c];
#pragma unroll
    for (int i = 0; i < M + M * M; i++) coefficients[i] = mix[row * (M + M * M) + i];
  }
  __device__ __forceinline__ void expand(float added, bf16* expanded, int row, int C, int c) const {
#pragma unroll
    for (int k = 0; k < M; k++) {
      float sum = coefficients[M + k] * __bfloat162float(streams[0]);
#pragma unroll
      for (int j = 1; j < M; j++) sum = fmaf(coefficients[M + j * M + k], __bfloat162float(streams[j]), sum);
      expanded[((size_t)row * M + k) * C + c] = bf16(fmaf(coefficients[k], added, sum));
    }
  }
};

}  // namespace ds4
"""
)

# What a thread's first result expands is read before the barrier where the sums meet: the registers of the product are
# free by then, and the reads are on their way while the slowest warp finishes.
_DECLARED = """
    ds4::Channel<STREAMS> channel;
"""
_READ = """{
        const int row = 2 * t + (warp & 1), column = 16 * tile + g + 8 * (warp >> 1);
        if (warp < 4 && row < M && column < N) channel.read((const bf16*)h, mix, row, N, column);
      }
      __syncthreads();"""
_STORE = """{
        if (S == 1 || e >= 32 * S) channel.read((const bf16*)h, mix, n, N, r);
        channel.expand(round_bf16(sum), (bf16*)expanded, n, N, r);
      }"""


def _project_source() -> str:
    store = "y[(size_t)n * N + r] = T(sum);"
    product, _, end = _quant_cuda.DENSE_SOURCE.rpartition("__syncthreads();")
    assert end.count(store) == 1
    return _DECLARED + product + _READ + end.replace(store, _STORE)


def _sum_source() -> str:
    begin, _, end = _quant_cuda.SUM_SOURCE.partition("    float sum = 0.f;\n")
    read = "    channel.read((const ds4::bf16*)h, mix, n, N, r);\n    float sum = 0.f;\n"
    expand = "channel.expand(ds4::round_bf16(sum), (ds4::bf16*)expanded, n, N, r);"
    return _DECLARED + begin + read + end.replace("STORE", expand)


def _kernel(name: str, inputs: list[str], source: str) -> Kernel:
    names, text = [*inputs, "h", "mix"], {"cuda_source": source, "cuda_header": HEADER}
    return Kernel(name, names, ["expanded"], None, **text, exact=False, family="expand_matmul")


_project = _kernel("expand_project_mma", ["x", "codes", "scales", "supers"], _project_source())
_sum_pairs = _kernel("expand_sum_pairs", ["pairs", "shared"], _sum_source())


def takes(h: mx.array, mix: mx.array) -> bool:
    """Whether the bodies take streams of these types: those of the model."""
    return h.dtype == mx.bfloat16 and mix.dtype == mx.float32


def project(x: mx.array, weight, h: mx.array, mix: mx.array) -> mx.array:
    """x bfloat16 [.., K], up to 8 rows; as `expand_matmul.project_expand`."""
    format, planes = weight
    tiles = ceil_div(h.shape[-1], 16)
    warps = _quant_cuda.split(tiles, x.shape[-1] // 128)
    template = [("F", FORMAT_IDS[format]), ("S", warps), ("NT", 1), ("G", 1)]
    return _launch(_project, [x, *_quant_cuda.planes_of(planes)], template, tiles, 32 * warps, h, mix)


def experts(a: mx.array, down, chosen: mx.array, shared, h: mx.array, mix: mx.array) -> mx.array:
    """a bfloat16 [N, slots, F], N up to 8; as `expand_matmul.experts_expand`."""
    inputs, template, threads = _quant_cuda.down_pairs(a, *down, chosen, shared)
    return _launch(_sum_pairs, inputs, template, ceil_div(threads, 256), 256, h, mix)


def _launch(kernel: Kernel, inputs, template, blocks: int, threads: int, h: mx.array, mix: mx.array) -> mx.array:
    return kernel(
        inputs=[*inputs, h, mix],
        template=[*template, ("STREAMS", h.shape[-2])],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[h.shape],
        output_dtypes=[mx.bfloat16],
    )[0]
