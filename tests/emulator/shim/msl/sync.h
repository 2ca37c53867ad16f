// Barriers.
#pragma once

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_device_and_threadgroup = 3
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
MSL_INLINE void threadgroup_barrier(mem_flags flags) { msl_threadgroup_barrier(uint(flags)); }
MSL_INLINE void simdgroup_barrier(mem_flags flags) { msl_simdgroup_barrier(uint(flags)); }
}  // namespace metal
using metal::mem_flags;
