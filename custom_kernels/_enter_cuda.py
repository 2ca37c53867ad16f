"""CUDA: the first products of an attention layer, and in the same launch what its window keeps of them.

Blocks of the low-rank query's and the entry's matrices count their arrivals; the last one norms the query and makes the
entry, a warp for each. Nothing waits for another block. Other blocks copy the ring and make a site's coefficients. The
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

// A warp: every `shares`th run of 32 values of a row of D in shared memory, normed, turned in its last 2 P and rounded.
// Runs are what simdgroups have in the launch of its own. One after the other: unrolled, the text is too long for the
// cache of instructions, which is cold.
template <int D, int P, int KIND, int BLOCK, typename G>
__device__ __forceinline__ void enter(
    const bf16* x, const G* weight, const float* cosine, const float* sine, float eps, int share, int shares,
    bf16* to) {
  const int lane = threadIdx.x & 31;
  float sum = 0.f;
#pragma unroll 4
  for (int i = 0; i < D / 32; i++) {
    const float v = __bfloat162float(x[32 * i + lane]);
    sum += ds4_metal::simd_sum(v * v);
  }
  const float scale = rsqrtf(sum / (float)D + eps);
#pragma unroll 1
  for (int i = share; i < D / 32; i += shares) {
    const int t = 32 * i + lane, turned = max(t + 2 * P, D) - D;
    const float c = cosine[turned / 2], s = sine[turned / 2];
    float value = round_bf16((float)weight[t] * (__bfloat162float(x[t]) * scale));
    const float other = __shfl_xor_sync(~0u, value, 1);
    if (t + 2 * P >= D) value = round_bf16((t & 1) == 0 ? value * c - other * s : other * s + value * c);
    const u32 bits = ds4_metal::fq_round<KIND, BLOCK>((u32)__float_as_int(value) >> 16);
    ((unsigned short*)to)[t] = (unsigned short)bits;
  }
}

// A warp: one row of C values in shared memory, normed. A launch of its own has SG simdgroups for it, whose sums are
// added up last.
template <int C, int SG, typename G>
__device__ __forceinline__ void norm_query(const bf16* x, const G* weight, float eps, bf16* to) {
  constexpr int VALUES = (C + 32 * SG - 1) / (32 * SG);
  const int lane = threadIdx.x & 31;
  float mine = 0.f;
#pragma unroll 2
  for (int s = 0; s < SG; s++) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      const int channel = 32 * (s + SG * i) + lane;
      const float v = __bfloat162float(x[min(channel, C - 1)]);
      if (channel < C) square += v * v;
    }
    square = ds4_metal::simd_sum(square);
    mine = lane == s ? square : mine;
  }
  const float scale = rsqrtf(ds4_metal::simd_sum(mine) / (float)C + eps);
#pragma unroll 8
  for (int channel = lane; channel < C; channel += 32)
    to[channel] = bf16((float)weight[channel] * (__bfloat162float(x[channel]) * scale));
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
_FINISH = (
    f"""
    if ({_MATRIX.replace("#", "0")} ||
        {_MATRIX.replace("#", "1")}) {{"""
    + arrive("ENTRY_BLOCKS")
    + """
      const float eps = __int_as_float(EPS_BITS);
      const int first = (at[0] % size + size) % size;
      // What other blocks have written, once into shared memory, where the sums were: 16 bytes a thread, or a value.
      bf16* const held = (bf16*)rings;  // [M][C], then [M][D]
      for (int i = threadIdx.x; i < M * (C + D) / WORD; i += 32 * W) {
        const int e = i * WORD;
        const bf16* const from = e < M * C ? (const bf16*)y0 + e : (const bf16*)y1 + (e - M * C);
        if (WORD == 8) read16_fresh_if(true, *(uint4*)(held + e), from);
        else *(volatile unsigned short*)(held + e) = *(const volatile unsigned short*)from;
      }
      __syncthreads();
      const int shares = max((W - M) / M, 1);  // warps of an entry
      for (int task = threadIdx.x >> 5; task < M * (shares + 1); task += W) {
        const int row = task < M ? task : (task - M) / shares;
        if (task < M) {
          ds4::norm_query<C, SG>(held + row * C, q_weight, eps, (bf16*)qr + (size_t)row * C);
        } else {
          const int at_turn = row % length * P, slot = (first + row % length) % size;
          ds4::enter<D, P, KIND, BLOCK>(
              held + M * C + row * D, weight, cosine + at_turn, sine + at_turn, eps, (task - M) % shares, shares,
              (bf16*)ring + (size_t)(row / length * size + slot) * D);
        }
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
        [*[f"y{i}" for i in range(count)], "qr", "ring", *RIDER_OUTPUTS],
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
    fits = fits and 2 * sums.rows * (C + D) <= RING * _quant_group_cuda.warps_of(weights, x.shape[-1])
    return fits and all(_quant_group_cuda.takes(x, format) for format, _ in weights)


def products_and_entry(
    x, weights, dtypes, q_weight, cos, sin, kind: str, kv_weight, eps: float, sums: SiteSums, into, at, counts
) -> list[mx.array]:
    """As `entry_matmul.products_and_entry`, for what `takes` allows: the products, qr, the ring, pre and mix."""
    call, blocks, each, warps = _quant_group_cuda.group_call(x, weights, dtypes)
    (C, D), (number, block) = (y[-1] for y in call["output_shapes"][:2]), KINDS[kind]
    M = x.shape[0] * x.shape[1]
    call["inputs"] += [q_weight, kv_weight, cos, sin, into, at, counts]
    call["template"] += [
        *[("C", C), ("SG", simdgroups_for(C)), ("D", D), ("P", cos.shape[-1]), ("KIND", number), ("BLOCK", block)],
        *[("EPS_BITS", float_bits(eps)), ("ENTRY_BLOCKS", sum(each[:2]))],
        ("WORD", 8 if C % 8 == 0 else 1),
    ]
    call["output_shapes"] += [call["output_shapes"][0], into.shape]
    call["output_dtypes"] += [mx.bfloat16] * 2
    blocks += ceil_div(M, warps) + ceil_div(into.size // 8, 32 * warps)
    return _kernels[len(weights)](**sums.behind(call), grid=(blocks * 32 * warps, 1, 1), threadgroup=(32 * warps, 1, 1))
