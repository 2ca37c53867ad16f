"""What the CUDA bodies of selection and attention share: one tensor-core product, reading 8 channels at a time.

Fragments of mma m16n8k16, with lane = 4 g + t: a0 row g, a1 row g + 8 (channels 2 t, 2 t + 1), a2 and a3 the same
rows 8 channels on; b0 and b1 these channels of column g; c rows g and g + 8, columns 2 t and 2 t + 1. Sums take
channels in any order as long as A and B agree: a lane reads the octet 8 t .. 8 t + 7 of each 32 channels, which serves
two products.
"""

from __future__ import annotations

HEADER = """
#include <cuda_bf16.h>
namespace ds4_tiles {
typedef __nv_bfloat16 bf16;
__device__ __forceinline__ void mma(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 32 channels of rows a (g) and b (g + 8) against column g
__device__ __forceinline__ void product(float (&c)[4], const uint4& a, const uint4& b, const uint4& column) {
  mma(c, a.x, b.x, a.y, b.y, column.x, column.y);
  mma(c, a.z, b.z, a.w, b.w, column.z, column.w);
}
// 16 bytes, or zeros
__device__ __forceinline__ uint4 octet(const bf16* p, bool present) {
  return present ? __ldg((const uint4*)p) : make_uint4(0, 0, 0, 0);
}
// b0 and b1 of 16 rows of 8 channels in shared memory that lie as rows; lanes 0 .. 15 give the rows' addresses
__device__ __forceinline__ void transposed(unsigned& b0, unsigned& b1, const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(b0), "=r"(b1)
               : "r"((unsigned)__cvta_generic_to_shared(p)));
}
__device__ __forceinline__ float warp_max(float x) {
  for (int i = 16; i > 0; i >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}
}  // namespace ds4_tiles
"""
