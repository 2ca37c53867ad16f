// In place of the two headers that MLX puts in front of a kernel: what our texts use of them. Most of the time that NVRTC
// takes for a kernel goes into the rest, cuda::std and cooperative groups (docs/kernels.md). The layout of Shape and
// Strides is that of kernel arguments, so it has to be MLX's (`KNOWN` in _cuda_cache.py).
#ifndef MLX_DS4_STAND_IN
#define MLX_DS4_STAND_IN
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;

namespace cooperative_groups {}

namespace mlx::core::cu {
template <class T> struct PerDimension {
  T values[10];
  __device__ constexpr const T& operator[](int i) const { return values[i]; }
};
using Shape = PerDimension<int32_t>;
using Strides = PerDimension<int64_t>;
} // namespace mlx::core::cu
#endif
