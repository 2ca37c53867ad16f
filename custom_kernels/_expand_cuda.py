"""CUDA bodies of `expand_matmul`: the tensor-core products of `_quant_cuda.py`, whose results expand the streams."""

from __future__ import annotations

import mlx.core as mx

from . import _quant_cuda
from ._expert_down_cuda import DOWN_FEW_SOURCE
from ._kernel import Kernel
from ._octet import FORMAT_IDS, ceil_div

HEADER = (
    _quant_cuda.HEADER
    + """
namespace ds4 {

// Channels c .. c + V - 1 of a row in all M streams of C channels; mix: the row's post [M], then comb [M source, M
// destination].
template <int M, int V>
struct Channels {
  typedef typename Either<V == 4, unsigned long long, unsigned short>::type Bits;
  Bits streams[M];  // not yet numbers: to convert is to wait for the read
  float coefficients[M + M * M];
  static __device__ __forceinline__ float number(Bits bits, int v) {
    return __int_as_float((u32)(bits >> 16 * v) << 16);
  }
  // Another block may have written them.
  static __device__ __forceinline__ Bits fresh(const bf16* p) { return *(const volatile Bits*)p; }
  __device__ __forceinline__ void read(const bf16* h, const float* mix, int row, int C, int c) {
#pragma unroll
    for (int j = 0; j < M; j++) streams[j] = *(const Bits*)(h + ((size_t)row * M + j) * C + c);
#pragma unroll
    for (int i = 0; i < M + M * M; i++) coefficients[i] = mix[row * (M + M * M) + i];
  }
  // added: sums that are rounded here.
  __device__ __forceinline__ void expand(const float (&added)[V], bf16* expanded, int row, int C, int c) const {
#pragma unroll
    for (int k = 0; k < M; k++) {
      bf16 values[V];
#pragma unroll
      for (int v = 0; v < V; v++) {
        float sum = coefficients[M + k] * number(streams[0], v);
#pragma unroll
        for (int j = 1; j < M; j++) sum = fmaf(coefficients[M + j * M + k], number(streams[j], v), sum);
        values[v] = bf16(fmaf(coefficients[k], round_bf16(added[v]), sum));
      }
      Bits bits;
      memcpy(&bits, values, sizeof(bits));
      *(Bits*)(expanded + ((size_t)row * M + k) * C + c) = bits;
    }
  }
};

}  // namespace ds4
"""
)

# What a thread's first result expands is read before the barrier where the sums meet: the registers of the product are
# free by then, and the reads are on their way while the slowest warp finishes.
_DECLARED = """
    ds4::Channels<STREAMS, 1> channel;
"""
_READ = """{
        const int row = 2 * t + (warp & 1), column = 16 * tile + g + 8 * (warp >> 1);
        if (warp < 4 && row < M && column < N) channel.read((const bf16*)h, mix, row, N, column);
      }
      __syncthreads();"""
_STORE = """{
        if (S == 1 || e >= 32 * S) channel.read((const bf16*)h, mix, n, N, r);
        channel.expand({sum}, (bf16*)expanded, n, N, r);
      }"""


# Behind the products: parts are those of the experts' blocks. y is what SUM_SOURCE calls pairs, and sums are as there.
_FINISH = """
    // Blocks count their arrivals at a part of the channels, and the last one adds up and expands that part: a thread V
    // channels. No block waits for another. A block of the shared matrix may lie across two parts, but no more: it has
    // no more tiles than a part.
    constexpr int ADDED = SLOTS + (SHARED == 2);
    const int span = S * rounds;  // tiles of a part
    int first_part = (part - apart) % each, last_part = first_part;
    if (part < apart) {
      first_part = part * tiles / apart / span;
      last_part = ((part + 1) * tiles / apart - 1) / span;
    }
    __shared__ bool is_last[2];
    __syncthreads();
    if (threadIdx.x <= last_part - first_part) {
      const int p = first_part + threadIdx.x;
      auto sharer_of = [&](int tile) { return ((tile + 1) * apart - 1) / tiles; };
      int arrivals = groups;
      if (SHARED == 2) arrivals += sharer_of(min((p + 1) * span, tiles) - 1) - sharer_of(p * span) + 1;
      // MLX has no array that a launch changes. This one is zeros before the launch and after it.
      int* const ticket = const_cast<int*>(tickets) + p;
      is_last[threadIdx.x] = draw_ticket(ticket) == arrivals - 1;
      if (is_last[threadIdx.x]) *ticket = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int p = first_part; p <= last_part; p++) {
      const int from = 16 * p * span, strips = min(16 * span, N - from) / V;
      const int items = is_last[p - first_part] ? P / SLOTS * strips : 0;
#pragma unroll 1
      for (int i = threadIdx.x; i < items; i += 32 * S) {
        const int n = i / strips, c = from + (i - n * strips) * V;
        typedef Channels<STREAMS, V> Strip;
        Strip strip;
        strip.read((const bf16*)h, mix, n, N, c);
        float sum[V] = {};
#pragma unroll
        for (int s = 0; s < ADDED; s++) {
          const auto bits = Strip::fresh((const bf16*)y + (size_t)(s < SLOTS ? n * SLOTS + s : P + n) * N + c);
          for (int v = 0; v < V; v++) sum[v] += Strip::number(bits, v);
        }
        if (SHARED == 1)
          for (int v = 0; v < V; v++) sum[v] += __bfloat162float(((const bf16*)shared)[(size_t)n * N + c + v]);
        strip.expand(sum, (bf16*)expanded, n, N, c);
      }
    }
"""


def _project_source() -> str:
    store = "y[(size_t)n * N + r] = T(sum);"
    product, _, end = _quant_cuda.DENSE_SOURCE.rpartition("__syncthreads();")
    assert end.count(store) == 1
    return _DECLARED + product + _READ + end.replace(store, _STORE)


def _sum_source() -> str:
    begin, _, end = _quant_cuda.SUM_SOURCE.partition("    float sum = 0.f;\n")
    read = "    channel.read((const ds4::bf16*)h, mix, n, N, r);\n    float sum = 0.f;\n"
    expand = "channel.expand({sum}, (ds4::bf16*)expanded, n, N, r);"
    return _DECLARED + begin + read + end.replace("STORE", expand)


def _kernel(name: str, inputs: list[str], source: str, *others: str, **limits) -> Kernel:
    names, text = [*inputs, "h", "mix"], {"cuda_source": source, "cuda_header": HEADER}
    return Kernel(name, names, ["expanded", *others], None, **text, **limits, exact=False, family="expand_matmul")


_project = _kernel("expand_project_mma", ["x", "codes", "scales", "supers"], _project_source())
_sum_pairs = _kernel("expand_sum_pairs", ["pairs", "shared"], _sum_source())
_experts = _kernel(
    "expand_experts_few_mma",
    [*_quant_cuda.DOWN_INPUTS, "tickets"],
    DOWN_FEW_SOURCE + _FINISH,
    "y",
    cuda_bounds=_quant_cuda.DOWN_BOUNDS,
)


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


def experts(a: mx.array, down, chosen: mx.array, shared, h: mx.array, mix: mx.array, counts=None) -> mx.array:
    """a bfloat16 [N, slots, F], N up to 8; as `expand_matmul.experts_expand`. shared: as `down_few` takes it."""
    C = h.shape[-1]
    # Each part of the channels has a ticket; a part has at least a tile a warp.
    if counts is None or ceil_div(ceil_div(C, 16), _quant_cuda.DOWN_WARPS) > counts.size:
        inputs, template, threads = _quant_cuda.down_pairs(a, *down, chosen, shared)
        return _launch(_sum_pairs, inputs, template, ceil_div(threads, 256), 256, h, mix)
    inputs, template, blocks, pairs = _quant_cuda.down_call(a, *down, chosen, shared)
    template = [*template, ("V", 4 if C % 4 == 0 else 1)]  # whose 8 bytes lie at a multiple of 8
    return _launch(_experts, [*inputs, counts], template, blocks, 32 * _quant_cuda.DOWN_WARPS, h, mix, pairs)


def _launch(
    kernel: Kernel, inputs, template, blocks: int, threads: int, h: mx.array, mix: mx.array, *others: tuple[int, int]
) -> mx.array:
    """others: shapes of further outputs."""
    return kernel(
        inputs=[*inputs, h, mix],
        template=[*template, ("STREAMS", h.shape[-2])],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[h.shape, *others],
        output_dtypes=[mx.bfloat16] * (1 + len(others)),
    )[0]
