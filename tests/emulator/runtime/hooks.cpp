// What instrumented kernels call.  They are compiled for ThreadSanitizer and UBSan but linked with these
// functions; no sanitizer runtime is involved.
#include <string.h>

#include "state.h"

#define CALLER __builtin_return_address(0)

// Reads of inputs are by far the most frequent accesses: those in bounds are dealt with here.
template <uint64_t N>
static inline bool read_of(Buffer* b, const uint8_t* p) {
  if (!b || p < b->base || p + N > b->base + b->size) return false;
  launch->accesses++;
  b->bytes_read += N;
  memset(b->touched + (p - b->base), 1, N);  // an input is only ever read
  return true;
}

template <uint64_t N>
static inline void check_read(void* p, bool aligned, void* pc) {
  bool misaligned = aligned && (uintptr_t)p % N;
  if (!misaligned && (read_of<N>(recent_inputs[0], (uint8_t*)p) || read_of<N>(recent_inputs[1], (uint8_t*)p)))
    return;
  check_access(p, N, Access::READ, aligned, pc);
}

template <uint64_t N>
static inline void check_both(void* p, bool aligned, void* pc) {
  check_read<N>(p, aligned, pc);
  check_access(p, N, Access::WRITE, aligned, pc);
}

#pragma GCC visibility push(default)
extern "C" {
#define HOOKS(N)                                                                                 \
  void __tsan_read##N(void* p) { check_read<N>(p, true, CALLER); }                               \
  void __tsan_write##N(void* p) { check_access(p, N, Access::WRITE, true, CALLER); }             \
  void __tsan_read_write##N(void* p) { check_both<N>(p, true, CALLER); }                         \
  void __tsan_volatile_read##N(void* p) { check_read<N>(p, true, CALLER); }                      \
  void __tsan_volatile_write##N(void* p) { check_access(p, N, Access::WRITE, true, CALLER); }    \
  void __tsan_unaligned_read##N(void* p) { check_read<N>(p, false, CALLER); }                    \
  void __tsan_unaligned_write##N(void* p) { check_access(p, N, Access::WRITE, false, CALLER); }  \
  void __tsan_unaligned_read_write##N(void* p) { check_both<N>(p, false, CALLER); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_init() {}
void __tsan_read_range(void* p, unsigned long n) { check_access(p, n, Access::READ, false, CALLER); }
void __tsan_write_range(void* p, unsigned long n) { check_access(p, n, Access::WRITE, false, CALLER); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  check_access((void*)from, n, Access::READ, false, CALLER);
  check_access(to, n, Access::WRITE, false, CALLER);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  check_access((void*)from, n, Access::READ, false, CALLER);
  check_access(to, n, Access::WRITE, false, CALLER);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  check_access(to, n, Access::WRITE, false, CALLER);
  return memset(to, value, n);
}

#define UBSAN(NAME, KIND, TEXT) \
  void __ubsan_handle_##NAME(void*, ...) { fail(KIND, CALLER, TEXT); }
UBSAN(type_mismatch_v1, MISALIGNED, "access at an address that is not aligned for its type")
UBSAN(out_of_bounds, OUT_OF_BOUNDS, "array index out of bounds")
UBSAN(shift_out_of_bounds, UNDEFINED, "shift by the width of the type or more, or by a negative count")
UBSAN(divrem_overflow, UNDEFINED, "integer division by zero, or of the least integer by -1")
UBSAN(float_cast_overflow, UNDEFINED, "float out of the range of the integer type it is converted to")
UBSAN(load_invalid_value, UNDEFINED, "bool that is neither 0 nor 1")
UBSAN(builtin_unreachable, UNDEFINED, "a place declared unreachable was reached")
UBSAN(missing_return, UNDEFINED, "a function that gives a value ended without return")

void msl_inactive_lane(const char* what) {
  fail(INACTIVE_LANE, CALLER, "%s uses the value of a lane that takes no part in it", what);
}

unsigned msl_atomic(void* address, msl_atomic_op op, unsigned value, unsigned expected, unsigned* exchanged) {
  if (launch->checked) {
    Access access = op == MSL_LOAD    ? Access::ATOMIC_LOAD
                    : op == MSL_STORE ? Access::ATOMIC_STORE
                                      : Access::ATOMIC_UPDATE;
    check_access(address, 4, access, true, CALLER);
  }
  unsigned& memory = *(unsigned*)address;
  const unsigned old = memory;
  auto as_float = [](unsigned bits) { return __builtin_bit_cast(float, bits); };
  auto less = [](unsigned a, unsigned b) { return (int)a < (int)b; };
  switch (op) {
    case MSL_LOAD: break;
    case MSL_STORE:
    case MSL_EXCHANGE: memory = value; break;
    case MSL_ADD: memory = old + value; break;
    case MSL_SUB: memory = old - value; break;
    case MSL_MIN_UNSIGNED: memory = value < old ? value : old; break;
    case MSL_MAX_UNSIGNED: memory = old < value ? value : old; break;
    case MSL_MIN_SIGNED: memory = less(value, old) ? value : old; break;
    case MSL_MAX_SIGNED: memory = less(old, value) ? value : old; break;
    case MSL_AND: memory = old & value; break;
    case MSL_OR: memory = old | value; break;
    case MSL_XOR: memory = old ^ value; break;
    case MSL_COMPARE_EXCHANGE:
      *exchanged = old == expected;
      if (*exchanged) memory = value;
      break;
    case MSL_ADD_FLOAT: memory = __builtin_bit_cast(unsigned, as_float(old) + as_float(value)); break;
    case MSL_SUB_FLOAT: memory = __builtin_bit_cast(unsigned, as_float(old) - as_float(value)); break;
  }
  return old;
}

// Rounding to bfloat16 (nearest, ties to even), which older libgcc lacks.
__bf16 __truncsfbf2(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f);
  bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  uint16_t h = nan ? (uint16_t)(u >> 16 | 0x40u) : (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
  return __builtin_bit_cast(__bf16, h);
}
}
#pragma GCC visibility pop
