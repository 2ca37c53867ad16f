// 32-bit atomics, relaxed only, as in every Metal version.
#pragma once

namespace metal {
enum memory_order { memory_order_relaxed = 0 };

// Scoped enumerations and a one-element vector: types of their own, so that `count[i] += 1` on an atomic
// is the compile error that it is in Metal.
enum class atomic_uint : uint {};
enum class atomic_int : int {};
enum class atomic_bool : uint {};
typedef float atomic_float __attribute__((ext_vector_type(1)));

template <class T>
struct msl_atomic_type;
template <>
struct msl_atomic_type<uint> {
  typedef atomic_uint type;
};
template <>
struct msl_atomic_type<int> {
  typedef atomic_int type;
};
template <>
struct msl_atomic_type<bool> {
  typedef atomic_bool type;
};
template <>
struct msl_atomic_type<float> {
  typedef atomic_float type;
};
template <class T>
using atomic = typename msl_atomic_type<T>::type;

// Through an integer, since a pointer cast between address spaces is what the driver refuses in kernels.
#define MSL_ADDRESS(p) ((void*)(uintptr_t)(p))

#define MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, NAME, OP)                                                        \
  MSL_INLINE T NAME(volatile SPACE ATOMIC* p, T v, memory_order) {                                          \
    return __builtin_bit_cast(T, msl_atomic(MSL_ADDRESS(p), OP, __builtin_bit_cast(uint, v), 0, nullptr));  \
  }

#define MSL_ATOMIC_BASE(SPACE, ATOMIC, T)                                                                   \
  MSL_INLINE T atomic_load_explicit(const volatile SPACE ATOMIC* p, memory_order) {                         \
    return __builtin_bit_cast(T, msl_atomic(MSL_ADDRESS(p), MSL_LOAD, 0, 0, nullptr));                      \
  }                                                                                                         \
  MSL_INLINE void atomic_store_explicit(volatile SPACE ATOMIC* p, T v, memory_order) {                      \
    msl_atomic(MSL_ADDRESS(p), MSL_STORE, __builtin_bit_cast(uint, v), 0, nullptr);                         \
  }                                                                                                         \
  MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, atomic_exchange_explicit, MSL_EXCHANGE)                                \
  MSL_INLINE bool atomic_compare_exchange_weak_explicit(volatile SPACE ATOMIC* p, thread T* expected,       \
                                                        T desired, memory_order, memory_order) {            \
    uint exchanged = 0;                                                                                     \
    uint old = msl_atomic(MSL_ADDRESS(p), MSL_COMPARE_EXCHANGE, __builtin_bit_cast(uint, desired),          \
                          __builtin_bit_cast(uint, *expected), &exchanged);                                 \
    if (!exchanged) *expected = __builtin_bit_cast(T, old);                                                 \
    return exchanged != 0;                                                                                  \
  }

#define MSL_ATOMIC_INTEGER(SPACE, ATOMIC, T, MIN, MAX)                                    \
  MSL_ATOMIC_BASE(SPACE, ATOMIC, T)                                                       \
  MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, atomic_fetch_add_explicit, MSL_ADD)                  \
  MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, atomic_fetch_sub_explicit, MSL_SUB)                  \
  MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, atomic_fetch_min_explicit, MIN)                      \
  MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, atomic_fetch_max_explicit, MAX)                      \
  MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, atomic_fetch_and_explicit, MSL_AND)                  \
  MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, atomic_fetch_or_explicit, MSL_OR)                    \
  MSL_ATOMIC_FETCH(SPACE, ATOMIC, T, atomic_fetch_xor_explicit, MSL_XOR)

MSL_ATOMIC_INTEGER(device, atomic_uint, uint, MSL_MIN_UNSIGNED, MSL_MAX_UNSIGNED)
MSL_ATOMIC_INTEGER(threadgroup, atomic_uint, uint, MSL_MIN_UNSIGNED, MSL_MAX_UNSIGNED)
MSL_ATOMIC_INTEGER(device, atomic_int, int, MSL_MIN_SIGNED, MSL_MAX_SIGNED)
MSL_ATOMIC_INTEGER(threadgroup, atomic_int, int, MSL_MIN_SIGNED, MSL_MAX_SIGNED)

// Float atomics exist in device memory only.
MSL_ATOMIC_BASE(device, atomic_float, float)
MSL_ATOMIC_FETCH(device, atomic_float, float, atomic_fetch_add_explicit, MSL_ADD_FLOAT)
MSL_ATOMIC_FETCH(device, atomic_float, float, atomic_fetch_sub_explicit, MSL_SUB_FLOAT)
}  // namespace metal
