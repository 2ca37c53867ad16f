"""CUDA: the first products of an attention layer, and in the same launch what its window keeps of them.

Blocks of the low-rank query's and the entry's matrices count their arrivals; the last one norms the query and makes the
entry. Nothing waits for another block. Other blocks copy the ring and make a site's coefficients. The
sums are those of `cache_entry.py`'s launch.

Estimate: a launch less for a layer; of the 7.4 us that it took on an H200 2 or 3 remain behind the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from . import _quant_group_cuda
from ._finish_cuda import COEFFICIENTS, arrive, metal_functions
from ._hyper_sources import COEFFICIENTS_HEADER
from ._kernel import Kernel, float_bits
from ._octet import ceil_div
from ._quant_cuda import RING
from .fake_quant import FAKE_QUANT_HEADER, KINDS
from .hyper_connection import RIDER_INPUTS, RIDER_OUTPUTS, SiteSums
from .rms_norm import simdgroups_for

_HEADER = (
    _quant_group_cuda.HEADER
    + metal_functions(FAKE_QUANT_HEADER + COEFFICIENTS_HEADER)
    + """
namespace ds4 {

// A warp: 32 values of a row of D, normed, turned where they are among its last 2 P, and rounded.
template <int D, int P, int KIND, int BLOCK>
__device__ __forceinline__ void enter(
    const bf16* x, const float* gain, const float* cosine, const float* sine, float scale, int first, bf16* to) {
  const int t = first + (threadIdx.x & 31), turned = t + 2 * P - D;
  float value = round_bf16(gain[t] * (__bfloat162float(x[t]) * scale));
  const float other = __shfl_xor_sync(~0u, value, 1);
  if (turned >= 0) {
    const float c = cosine[turned / 2], s = sine[turned / 2];
    value = round_bf16((t & 1) == 0 ? value * c - other * s : other * s + value * c);
  }
  const u32 bits = ds4_metal::fq_round<KIND, BLOCK>((u32)__float_as_int(value) >> 16);
  ((unsigned short*)to)[t] = (unsigned short)bits;
}

}  // namespace ds4
"""
)

_BEFORE = (
    """
    const int length = x_shape[1], size = into_shape[1], words = into_shape[0] * size * (D / 8);
"""
    + COEFFICIENTS
    + """
    const int copies = (words + 32 * W - 1) / (32 * W);
    if (block < copies) {  // the rows of the ring that stay, 16 bytes a thread
      const int word = block * 32 * W + threadIdx.x;
      if (word < words) {
        const uint4 old = ((const uint4*)into)[word];
        const int first = (at[0] % size + size) % size, slot = word / (D / 8) % size;
        const int place = slot >= first ? slot - first : slot + size - first;  // how far behind the first new row
        if (place >= length) ((uint4*)ring)[word] = old;
      }
      return;
    }
    block -= copies;
"""
)
_MATRIX = """matrix<F#, S#, W, MOST>(
            block, rows, M, K, codes#, scales#, supers#, codes#_shape[0], y#, rings, grid_s)"""
# The last block runs this text once, and the caches have none of it: an H200 takes 16 us for what 1,000 instructions of
# unrolled loops do for one row. So loops stay loops, all warps share all rows, and reads of global memory come first.
_FINISH = (
    f"""
    bf16* const y0 = (bf16*)low;  // [M][C]
    bf16* const y1 = y0 + (size_t)M * C;  // [M][D]
    if ({_MATRIX.replace("#", "0")} ||
        {_MATRIX.replace("#", "1")}) {{
      constexpr int GAINS = (C + D + 32 * W - 1) / (32 * W), PARTS = SG + D / 32;
      float ahead[GAINS];  // on their way while the ticket is drawn
#pragma unroll
      for (int i = 0; i < GAINS; i++) {{
        const int t = threadIdx.x + 32 * W * i;
        ahead[i] = t < C ? (float)q_weight[t] : (float)weight[min(t - C, D - 1)];
      }}"""
    + arrive("ENTRY_BLOCKS")
    + """
      const float eps = __int_as_float(EPS_BITS);
      const int first = (at[0] % size + size) % size, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
      // Where the sums were: the weights of both norms, sums of squares, scales, and what other blocks have written.
      float* const gains = (float*)rings;    // [C + D]
      float* const sums = gains + C + D;     // [M][PARTS]
      float* const scales = sums + M * PARTS;  // [M] of queries, [M] of entries
      int* const places = (int*)scales + 2 * M;  // [M] of entries in the ring, [M] of their angles
      bf16* const held = (bf16*)rings + (2 * (C + D + M * (PARTS + 4)) + 7) / 8 * 8;  // [M][C], then [M][D]
#pragma unroll 1
      for (int i = threadIdx.x; i < M * (C + D) / WORD; i += 32 * W) {  // 16 bytes, or a value
        if (WORD == 8) copy16_async(held + i * WORD, y0 + i * WORD);
        else *(volatile unsigned short*)(held + i) = *(const volatile unsigned short*)(y0 + i);
      }
#pragma unroll
      for (int i = 0; i < GAINS; i++)
        if (threadIdx.x + 32 * W * i < C + D) gains[threadIdx.x + 32 * W * i] = ahead[i];
      wait_for_copies();
      __syncthreads();
      // Sums that launches of their own add up last: of a query's row for each of SG simdgroups, of an entry for 32
      // values. Two at a time, for a sum over lanes is a chain.
#pragma unroll 1
      for (int task = warp; task < M * PARTS; task += 2 * W) {
        float square[2] = {};
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const int row = min(task + n * W, M * PARTS - 1) / PARTS, part = min(task + n * W, M * PARTS - 1) % PARTS;
          const int width = part < SG ? C : D, begin = 32 * (part < SG ? part : part - SG) + lane;
          const bf16* const x = part < SG ? held + row * C : held + M * C + row * D;
#pragma unroll
          for (int i = 0; i < (C + 32 * SG - 1) / (32 * SG); i++) {
            const int channel = begin + (part < SG ? 32 * SG : D) * i;
            const float v = __bfloat162float(x[min(channel, width - 1)]);
            if (channel < width) square[n] += v * v;
          }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float sum = ds4_metal::simd_sum(square[n]);
          if (lane == 0 && task + n * W < M * PARTS) sums[task + n * W] = sum;
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int task = warp; task < 2 * M; task += W) {
        const float* const of_row = sums + (task < M ? task : task - M) * PARTS;
        float sum = ds4_metal::simd_sum(task < M && lane < SG ? of_row[lane] : 0.f);
#pragma unroll 4
        for (int i = SG; i < PARTS; i++) sum += task < M ? 0.f : of_row[i];
        if (lane == 0) {
          scales[task] = rsqrtf(sum / (float)(task < M ? C : D) + eps);
          const int row = task % M, step = row % length;
          places[task] = task < M ? row / length * size + (first + step) % size : step * P;
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int row = 0; row < M; row++) {
#pragma unroll
        for (int i = 0; i < (C + 32 * W - 1) / (32 * W); i++) {
          const int t = threadIdx.x + 32 * W * i;
          if (t < C)
            ((bf16*)qr)[(size_t)row * C + t] = bf16(gains[t] * (__bfloat162float(held[row * C + t]) * scales[row]));
        }
      }
#pragma unroll 1
      for (int task = warp; task < M * (D / 32); task += W) {
        const int row = task / (D / 32), at_turn = places[M + row];
        ds4::enter<D, P, KIND, BLOCK>(
            held + M * C + row * D, gains + C, cosine + at_turn, sine + at_turn, scales[M + row],
            32 * (task % (D / 32)), (bf16*)ring + (size_t)places[row] * D);
      }
      return;
    }
"""
)


def _make(count: int) -> Kernel:
    planes = [f"{name}{i}" for i in range(count) for name in ("codes", "scales", "supers")]
    rest = "".join(f"    if ({_MATRIX.replace('#', str(i))}) return;\n" for i in range(2, count))
    return Kernel(
        f"entry_matmul_{count}",
        ["x", *planes, "q_weight", "weight", "cosine", "sine", "into", "at", "tickets", *RIDER_INPUTS],
        ["low", *[f"y{i}" for i in range(2, count)], "qr", "ring", *RIDER_OUTPUTS],
        None,
        cuda_source=_quant_group_cuda.GROUP_SOURCE + _BEFORE + _FINISH + rest,
        cuda_header=_HEADER,
        exact=False,
        family="entry_matmul",
    )


_kernels = {count: _make(count) for count in range(2, 6)}


def takes(x: mx.array, weights: Sequence[_quant_group_cuda.Weight], dtypes: Sequence[mx.Dtype], sums: SiteSums) -> bool:
    """Whether the launch takes these matrices, the first two of which are the low-rank query's and the entry's."""
    if not 2 <= len(weights) <= 5 or not sums.takes_kernel or sums.rows != x.shape[0] * x.shape[1]:
        return False
    (C, D), two = (planes["codes"].shape[0] for _, planes in weights[:2]), dtypes[:2]
    fits = D % 32 == 0 and D <= 1024 and two == [mx.bfloat16] * 2
    held = 4 * (C + D) + sums.rows * (4 * (simdgroups_for(C) + D // 32 + 4) + 2 * (C + D)) + 16
    fits = fits and held <= RING * _quant_group_cuda.warps_of(weights, x.shape[-1])
    return fits and all(_quant_group_cuda.takes(x, format) for format, _ in weights)


def products_and_entry(
    x, weights, dtypes, q_weight, cos, sin, kind: str, kv_weight, eps: float, sums: SiteSums, into, at, counts
) -> list[mx.array]:
    """As `entry_matmul.products_and_entry`, for what `takes` allows: the other products, qr, the ring, pre and mix."""
    call, blocks, each, warps = _quant_group_cuda.group_call(x, weights, dtypes)
    (C, D), (number, block) = (y[-1] for y in call["output_shapes"][:2]), KINDS[kind]
    M = x.shape[0] * x.shape[1]
    call["inputs"] += [q_weight, kv_weight, cos, sin, into, at, counts]
    call["template"] += [
        *[("C", C), ("SG", simdgroups_for(C)), ("D", D), ("P", cos.shape[-1]), ("KIND", number), ("BLOCK", block)],
        *[("EPS_BITS", float_bits(eps)), ("ENTRY_BLOCKS", sum(each[:2]))],
        ("WORD", 8 if C % 8 == 0 else 1),
    ]
    # The first two products go no further than the last block, and an output costs the host 2 us.
    call["output_shapes"][:2] = [(M * (C + D),)]
    call["output_shapes"] += [(*x.shape[:-1], C), into.shape]
    call["output_dtypes"][:2] = [mx.bfloat16]
    call["output_dtypes"] += [mx.bfloat16] * 2
    blocks += ceil_div(M, warps) + ceil_div(into.size // 8, 32 * warps)
    threads = 32 * warps
    return _kernels[len(weights)](**sums.behind(call), grid=(blocks * threads, 1, 1), threadgroup=(threads, 1, 1))[1:]
