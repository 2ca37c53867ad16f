// Stands in for MLX's complex.h, whose methods are qualified by address space: C++ cannot parse that.
#pragma once

template <typename T>
struct complex_t {
  T real;
  T imag;
  constexpr complex_t(T r = T(0), T i = T(0)) : real(r), imag(i) {}
};
typedef complex_t<float> complex64_t;
