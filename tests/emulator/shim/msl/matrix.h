// 8x8 simdgroup matrices.  Each lane holds two neighbours of one row; the layout is the one that Apple's
// compiled kernels use, so thread_elements() means the same here.
#pragma once

namespace metal {
MSL_INLINE uint msl_matrix_row(uint lane) { return (lane / 4 & 4u) + (lane / 2) % 4; }
MSL_INLINE uint msl_matrix_column(uint lane) { return (lane / 4 & 2u) * 2 + (lane % 2) * 2; }
// The lane that holds (row, column).
MSL_INLINE uint msl_matrix_lane(uint row, uint column) {
  return (row & 4u) << 2 | (column & 4u) << 1 | (row & 3u) << 1 | (column >> 1 & 1u);
}

template <class T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<T>, "simdgroup_matrix holds half, bfloat or float");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint row = msl_matrix_row(msl_current->lane), column = msl_matrix_column(msl_current->lane);
    elements[0] = row == column ? diagonal : T(0);
    elements[1] = row == column + 1 ? diagonal : T(0);
  }
  thread vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C>
MSL_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.elements[0] = v;
  m.elements[1] = v;
  return m;
}

// A rendezvous without data; matrix operations need the whole simdgroup.
MSL_INLINE void msl_whole_simdgroup(const char* what) {
  uint nothing = 0, active, all[32];
  msl_exchange(&nothing, sizeof nothing, &active, what, all);
  if (active != 0xffffffffu) msl_inactive_lane(what);
}

MSL_INLINE ulong msl_matrix_offset(uint k, ulong per_row, ulong2 origin, bool transpose) {
  ulong row = msl_matrix_row(msl_current->lane), column = msl_matrix_column(msl_current->lane) + k;
  return transpose ? (origin.y + column) * per_row + origin.x + row
                   : (origin.y + row) * per_row + origin.x + column;
}
#define MSL_MATRIX_MEMORY(SPACE)                                                                            \
  template <class T>                                                                                        \
  MSL_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, const SPACE T* source,                \
                                 ulong per_row = 8, ulong2 origin = {0, 0}, bool transpose = false) {       \
    msl_whole_simdgroup("simdgroup_load");                                                                  \
    for (uint k = 0; k < 2; k++) d.elements[k] = source[msl_matrix_offset(k, per_row, origin, transpose)];  \
  }                                                                                                         \
  template <class T>                                                                                        \
  MSL_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> s, SPACE T* target, ulong per_row = 8,          \
                                  ulong2 origin = {0, 0}, bool transpose = false) {                         \
    msl_whole_simdgroup("simdgroup_store");                                                                 \
    for (uint k = 0; k < 2; k++) target[msl_matrix_offset(k, per_row, origin, transpose)] = s.elements[k];  \
  }
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)

template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                              simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                                              simdgroup_matrix<C, 8, 8> c) {
  float mine[4] = {float(a.elements[0]), float(a.elements[1]), float(b.elements[0]), float(b.elements[1])};
  float all[32][4];
  uint active;
  msl_exchange(mine, sizeof mine, &active, "simdgroup_multiply_accumulate", all);
  if (active != 0xffffffffu) msl_inactive_lane("simdgroup_multiply_accumulate");
  uint row = msl_matrix_row(msl_current->lane), column = msl_matrix_column(msl_current->lane);
  float s0 = float(c.elements[0]), s1 = float(c.elements[1]);
  for (uint k = 0; k < 8; k++) {
    float left = all[msl_matrix_lane(row, k)][k & 1u];
    uint right = msl_matrix_lane(k, column);
    s0 += left * all[right][2];
    s1 += left * all[right][3];
  }
  d.elements[0] = D(s0);
  d.elements[1] = D(s1);
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}
}  // namespace metal
