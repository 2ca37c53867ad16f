"""What CUDA launches share whose last block does a smaller launch's work, or in which other blocks do.

The work is done by the functions of the smaller launch, which are written for Metal. So the bits are the same.
"""

from __future__ import annotations

from . import _portable

# Metal's names that these functions use; `_cuda_prelude.h` would replace CUDA's vector types, too.
_NAMES = """
namespace ds4_metal {

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long long ulong;
namespace metal {
__device__ inline float max(float a, float b) { return fmaxf(a, b); }
__device__ inline float abs(float x) { return fabsf(x); }
__device__ inline uint max(uint a, uint b) { return a < b ? b : a; }
__device__ inline uint min(uint a, uint b) { return b < a ? b : a; }
__device__ inline int max(int a, int b) { return a < b ? b : a; }
__device__ inline int min(int a, int b) { return b < a ? b : a; }
__device__ inline int clamp(int x, int low, int high) { return min(max(x, low), high); }
__device__ inline uint clz(uint x) { return __clz(x); }
namespace precise {
__device__ inline float exp(float x) { return expf(x); }
__device__ inline float sqrt(float x) { return sqrtf(x); }
__device__ inline float rsqrt(float x) { return rsqrtf(x); }
}
}
template <class To, class From> __device__ inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}
template <class T> __device__ inline T simd_shuffle(T x, ushort lane) { return __shfl_sync(0xffffffffu, x, lane); }
template <class T> __device__ inline T simd_shuffle_xor(T x, ushort by) { return __shfl_xor_sync(0xffffffffu, x, by); }
template <class T> __device__ inline T simd_sum(T x) {
  for (int by = 16; by; by >>= 1) x += simd_shuffle_xor(x, by);
  return x;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ inline uint simd_max(uint x) { return __reduce_max_sync(0xffffffffu, x); }
__device__ inline uint simd_min(uint x) { return __reduce_min_sync(0xffffffffu, x); }
#else
__device__ inline uint simd_max(uint x) {
  for (int by = 16; by; by >>= 1) x = metal::max(x, simd_shuffle_xor(x, by));
  return x;
}
__device__ inline uint simd_min(uint x) {
  for (int by = 16; by; by >>= 1) x = metal::min(x, simd_shuffle_xor(x, by));
  return x;
}
#endif
"""


def metal_functions(header: str) -> str:
    """Functions of a portable header in the namespace ds4_metal, for a CUDA text."""
    return f"{_NAMES}{_portable.translate_functions(header)}\n}}  // namespace ds4_metal\n"


def arrive(blocks: str, at: str = "0") -> str:
    """Only the last of so many blocks goes on, and sees what all have written, if it reads around the first cache. They
    count in ticket number `at`."""
    return f"""
      // MLX has no array that a launch changes. This one is zeros before the launch and after it.
      int* const arrived = const_cast<int*>(tickets) + {at};
      __shared__ bool is_last;
      __syncthreads();
      if (threadIdx.x == 0) is_last = draw_ticket(arrived) == {blocks} - 1;
      __syncthreads();
      if (!is_last) return;
      if (threadIdx.x == 0) *arrived = 0;
"""


# Blocks of W warps for the coefficients of a site of M rows. They come first, because they take longest: a warp a row.
COEFFICIENTS = """
    const int site_blocks = (M + W - 1) / W;
    if (block < site_blocks) {
      const int row = block * W + (threadIdx.x >> 5);
      if (row < M)
        ds4_metal::hyper_coefficients<HC_M, HC_PARTS, HC_ITERS, HC_WIDTH>(
            hc_dots, hc_base, hc_scale, row, threadIdx.x & 31, __int_as_float(HC_SMALL_BITS),
            __int_as_float(HC_EPS_BITS), hc_pre, hc_mix);
      return;
    }
    block -= site_blocks;
"""
