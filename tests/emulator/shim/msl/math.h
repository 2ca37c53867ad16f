// Arithmetic functions.  Nearly all are explicit overload sets written by _overloads.py into the build
// cache: with templates, calls that Metal calls ambiguous (min(uint, 1)) would compile here.
#pragma once

namespace metal {
#include <msl/generated_overloads.h>

MSL_INLINE bool select(bool a, bool b, bool c) { return c ? b : a; }
MSL_INLINE int mul24(int a, int b) { return ((a << 8) >> 8) * ((b << 8) >> 8); }
MSL_INLINE uint mul24(uint a, uint b) { return (a & 0xffffffu) * (b & 0xffffffu); }
MSL_INLINE int mad24(int a, int b, int c) { return mul24(a, b) + c; }
MSL_INLINE uint mad24(uint a, uint b, uint c) { return mul24(a, b) + c; }

// Comparisons of vectors give integer vectors here (bool vectors are not modelled): non-zero is true.
template <class V>
MSL_INLINE bool any(V v) {
  bool r = false;
  for (int i = 0; i < msl_shape<V>::length; i++) r |= v[i] != 0;
  return r;
}
template <class V>
MSL_INLINE bool all(V v) {
  bool r = true;
  for (int i = 0; i < msl_shape<V>::length; i++) r &= v[i] != 0;
  return r;
}
MSL_INLINE bool any(bool b) { return b; }
MSL_INLINE bool all(bool b) { return b; }

MSL_INLINE float4 unpack_unorm4x8_to_float(uint x) {
  float4 r;
  for (int i = 0; i < 4; i++) r[i] = ((x >> (8 * i)) & 255u) / 255.0f;
  return r;
}
}  // namespace metal
