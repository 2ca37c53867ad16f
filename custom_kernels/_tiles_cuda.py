"""What the CUDA bodies share: PTX (`_cuda_ptx.h`), and for selection and attention one tensor-core product.

Sums take channels in any order as long as A and B agree: a lane reads the octet 8 t .. 8 t + 7 of each 32 channels,
which serves two products.
"""

from __future__ import annotations

from pathlib import Path

PTX = "#include <cuda_bf16.h>\n" + (Path(__file__).parent / "_cuda_ptx.h").read_text()

HEADER = (
    PTX
    + """
namespace ds4_tiles {
using namespace ds4_ptx;
typedef __nv_bfloat16 bf16;
// 32 channels of rows a (g) and b (g + 8) against column g
__device__ __forceinline__ void product(float (&c)[4], const uint4& a, const uint4& b, const uint4& column) {
  mma(c, a.x, b.x, a.y, b.y, column.x, column.y);
  mma(c, a.z, b.z, a.w, b.w, column.z, column.w);
}
// 16 bytes, or zeros
__device__ __forceinline__ uint4 octet(const bf16* p, bool present) {
  return present ? __ldg((const uint4*)p) : make_uint4(0, 0, 0, 0);
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
)
