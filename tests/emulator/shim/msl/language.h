// Address-space words, scalar types and constants.
#pragma once

// clang's OpenCL attributes act as address spaces in C++ too.  The numbered `address_space(n)` form would
// be type-checked just as well, but memory accesses through it are not instrumented.
#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define constant const __attribute__((opencl_constant))
#define thread __attribute__((annotate_type("thread")))

// The driver writes this before each threadgroup variable.  One page or more each: most overruns then
// end in memory that belongs to no variable, and are seen.
#define MSL_THREADGROUP_VARIABLE static __attribute__((section("msl_threadgroup"), used, aligned(4096)))

#define MSL_INLINE inline __attribute__((always_inline))
#define METAL_FUNC inline __attribute__((always_inline))

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

template <class T, class S>
MSL_INLINE T as_type(S s) {
  static_assert(sizeof(T) == sizeof(S), "as_type needs two types of one size");
  return __builtin_bit_cast(T, s);
}

// clang calls these for plain struct copies.
extern "C" {
void* memcpy(void*, const void*, unsigned long) noexcept;
void* memset(void*, int, unsigned long) noexcept;
}

#define INFINITY (__builtin_inff())
#define HUGE_VALF (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920929e-7f
#define HALF_MAX ((half)65504.0f)
#define M_PI_F 3.14159265358979f
#define M_LOG2E_F 1.44269504088896f
#define M_LN2_F 0.693147180559945f
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 0xffffffffu
#define CHAR_BIT 8
