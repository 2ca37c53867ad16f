// metal::vec, type traits and numeric_limits.
#pragma once

namespace metal {
using ::size_t;
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T, T V>
struct integral_constant {
  typedef T value_type;
  static constexpr T value = V;
  constexpr operator T() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T, class U>
struct conditional {
  typedef T type;
};
template <class T, class U>
struct conditional<false, T, U> {
  typedef U type;
};
template <class T>
struct is_floating_point
    : bool_constant<is_same<T, half>::value || is_same<T, float>::value || is_same<T, bfloat>::value> {};
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};

template <class A, class B>
static constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class U>
using conditional_t = typename conditional<B, T, U>::type;
template <class T>
static constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
static constexpr bool is_integral_v = is_integral<T>::value;
template <class T>
static constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T>
static constexpr bool is_signed_v = __is_signed(T);
template <class A, class B>
static constexpr bool is_convertible_v = __is_convertible(A, B);
template <class T>
using remove_cv_t = __remove_cv(T);
template <class... T>
using void_t = void;

template <class T>
struct numeric_limits {};
#define MSL_INTEGER_LIMITS(T, LOW, HIGH)               \
  template <>                                          \
  struct numeric_limits<T> {                           \
    static constexpr bool is_integer = true;           \
    static constexpr T min() { return LOW; }           \
    static constexpr T lowest() { return LOW; }        \
    static constexpr T max() { return HIGH; }          \
  };
MSL_INTEGER_LIMITS(bool, false, true)
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(signed char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
MSL_INTEGER_LIMITS(uint, 0, 0xffffffffu)
MSL_INTEGER_LIMITS(long, -0x7fffffffffffffffL - 1, 0x7fffffffffffffffL)
MSL_INTEGER_LIMITS(ulong, 0, ~0ul)

#define MSL_FLOAT_LIMITS(T, HIGH, SMALL, EPS)                           \
  template <>                                                           \
  struct numeric_limits<T> {                                            \
    static constexpr bool is_integer = false;                           \
    static constexpr T min() { return (T)SMALL; }                       \
    static constexpr T lowest() { return (T)-HIGH; }                    \
    static constexpr T max() { return (T)HIGH; }                        \
    static constexpr T epsilon() { return (T)EPS; }                     \
    static constexpr T infinity() { return (T)__builtin_inff(); }       \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }    \
  };
MSL_FLOAT_LIMITS(float, 3.402823466e+38f, 1.175494351e-38f, 1.1920929e-7f)
MSL_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-5f, 9.765625e-4f)
MSL_FLOAT_LIMITS(bfloat, 3.38953139e+38f, 1.175494351e-38f, 7.8125e-3f)
}  // namespace metal
