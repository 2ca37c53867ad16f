// Metal's names on CUDA, for kernel texts in the portable subset (docs/kernels.md). MLX puts this text before the
// kernel, after its own headers. The address-space words are taken out by _portable.py, never by a macro.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __half float16_t;
typedef __nv_bfloat16 bfloat;
typedef __nv_bfloat16 bfloat16_t;

#define METAL_FUNC __device__ __forceinline__
#define MSL_TABLE(T, name, n) static __device__ const T name[n]

// ---- where a thread is; lanes are numbered as in Metal, x fastest ----
namespace msl {
constexpr unsigned all_lanes = 0xffffffffu;
METAL_FUNC uint index_in_group() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
METAL_FUNC uint lane() { return index_in_group() & 31u; }
METAL_FUNC uint group_size() { return blockDim.x * blockDim.y * blockDim.z; }
} // namespace msl

namespace metal {

// ---- vectors: components x y z w and [], no swizzles; the three-component ones are padded as in Metal ----
template <class T, int N> struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec;
#define MSL_VEC_COMMON(N) \
  vec() = default; \
  METAL_FUNC vec(T s) { for (int i = 0; i < N; i++) (*this)[i] = s; } \
  template <class U> METAL_FUNC explicit vec(const vec<U, N>& o) { for (int i = 0; i < N; i++) (*this)[i] = T(o[i]); } \
  METAL_FUNC T& operator[](int i) { return (&x)[i]; } \
  METAL_FUNC const T& operator[](int i) const { return (&x)[i]; }
template <class T> struct alignas(sizeof(T) * 2) vec<T, 2> {
  T x, y;
  MSL_VEC_COMMON(2)
  METAL_FUNC vec(T a, T b) : x(a), y(b) {}
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 3> {
  T x, y, z;
  MSL_VEC_COMMON(3)
  METAL_FUNC vec(T a, T b, T c) : x(a), y(b), z(c) {}
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 4> {
  T x, y, z, w;
  MSL_VEC_COMMON(4)
  METAL_FUNC vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  METAL_FUNC vec(const vec<T, 2>& a, const vec<T, 2>& b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
};
// The scalar's type is that of the vector (no deduction), so that float4 * 2.0f and uint4 >> 4 both fit.
template <class T> struct msl_same { typedef T type; };
#define MSL_VEC_OP(op) \
  template <class T, int N> METAL_FUNC vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> r; for (int i = 0; i < N; i++) r[i] = a[i] op b[i]; return r; } \
  template <class T, int N> METAL_FUNC vec<T, N> operator op(const vec<T, N>& a, typename msl_same<T>::type b) { \
    vec<T, N> r; for (int i = 0; i < N; i++) r[i] = a[i] op b; return r; } \
  template <class T, int N> METAL_FUNC vec<T, N> operator op(typename msl_same<T>::type a, const vec<T, N>& b) { \
    vec<T, N> r; for (int i = 0; i < N; i++) r[i] = a op b[i]; return r; } \
  template <class T, int N> METAL_FUNC vec<T, N>& operator op##=(vec<T, N>& a, const vec<T, N>& b) { return a = a op b; }
MSL_VEC_OP(+) MSL_VEC_OP(-) MSL_VEC_OP(*) MSL_VEC_OP(/)
MSL_VEC_OP(&) MSL_VEC_OP(|) MSL_VEC_OP(^) MSL_VEC_OP(>>) MSL_VEC_OP(<<)
template <class T, int N> METAL_FUNC vec<T, N> operator-(const vec<T, N>& a) {
  vec<T, N> r; for (int i = 0; i < N; i++) r[i] = -a[i]; return r; }
template <class T, int N> METAL_FUNC T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T s = a[0] * b[0]; for (int i = 1; i < N; i++) s += a[i] * b[i]; return s; }

// ---- bits ----
template <class T, class S> METAL_FUNC T as_type(S s) {
  static_assert(sizeof(T) == sizeof(S), "as_type needs two types of one size");
  T t; memcpy(&t, &s, sizeof(T)); return t; }
METAL_FUNC uint popcount(uint x) { return __popc(x); }
METAL_FUNC int popcount(int x) { return __popc(x); }
METAL_FUNC ulong popcount(ulong x) { return __popcll(x); }
METAL_FUNC uint clz(uint x) { return __clz(x); }
METAL_FUNC int clz(int x) { return __clz(x); }
METAL_FUNC ulong clz(ulong x) { return __clzll(x); }
METAL_FUNC uint ctz(uint x) { return x ? __ffs(x) - 1 : 32; }
METAL_FUNC int ctz(int x) { return x ? __ffs(x) - 1 : 32; }
METAL_FUNC ulong ctz(ulong x) { return x ? __ffsll(x) - 1 : 64; }
METAL_FUNC uint reverse_bits(uint x) { return __brev(x); }
METAL_FUNC uint mulhi(uint a, uint b) { return __umulhi(a, b); }
METAL_FUNC uint rotate(uint x, uint k) { return __funnelshift_l(x, x, k); }
METAL_FUNC uint extract_bits(uint x, uint offset, uint bits) { return bits ? (x << (32 - offset - bits)) >> (32 - bits) : 0; }

// ---- barriers ----
struct mem_flags { enum flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 }; };
METAL_FUNC mem_flags::flags operator|(mem_flags::flags a, mem_flags::flags b) { return mem_flags::flags(int(a) | int(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags::flags) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(mem_flags::flags) { __syncwarp(); }

// ---- simdgroup functions: every lane of the warp must arrive, which the emulator enforces ----
template <class T> METAL_FUNC T simd_shuffle(T x, ushort lane) { return __shfl_sync(msl::all_lanes, x, lane); }
template <class T> METAL_FUNC T simd_broadcast(T x, ushort lane) { return __shfl_sync(msl::all_lanes, x, lane); }
template <class T> METAL_FUNC T simd_broadcast_first(T x) { return __shfl_sync(msl::all_lanes, x, 0); }
template <class T> METAL_FUNC T simd_shuffle_xor(T x, ushort m) { return __shfl_xor_sync(msl::all_lanes, x, m); }
template <class T> METAL_FUNC T simd_shuffle_down(T x, ushort d) { return __shfl_down_sync(msl::all_lanes, x, d); }
template <class T> METAL_FUNC T simd_shuffle_up(T x, ushort d) { return __shfl_up_sync(msl::all_lanes, x, d); }
#define MSL_SIMD_REDUCE(name, join) \
  template <class T> METAL_FUNC T name(T x) { \
    for (int step = 16; step; step >>= 1) { T y = __shfl_xor_sync(msl::all_lanes, x, step); x = join; } \
    return x; }
MSL_SIMD_REDUCE(simd_sum, x + y)
MSL_SIMD_REDUCE(simd_product, x * y)
MSL_SIMD_REDUCE(simd_max, x < y ? y : x)
MSL_SIMD_REDUCE(simd_min, y < x ? y : x)
MSL_SIMD_REDUCE(simd_or, x | y)
MSL_SIMD_REDUCE(simd_and, x & y)
MSL_SIMD_REDUCE(simd_xor, x ^ y)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800  // one instruction for integers, not five shuffles in a chain
#define MSL_SIMD_INTEGER(T) \
  METAL_FUNC T simd_sum(T x) { return __reduce_add_sync(msl::all_lanes, x); } \
  METAL_FUNC T simd_max(T x) { return __reduce_max_sync(msl::all_lanes, x); } \
  METAL_FUNC T simd_min(T x) { return __reduce_min_sync(msl::all_lanes, x); }
MSL_SIMD_INTEGER(uint) MSL_SIMD_INTEGER(int)
#endif
#define MSL_SIMD_PREFIX(name, op, neutral) \
  template <class T> METAL_FUNC T simd_prefix_inclusive_##name(T x) { \
    for (uint step = 1; step < 32; step <<= 1) { \
      T y = __shfl_up_sync(msl::all_lanes, x, step); if (msl::lane() >= step) x = y op x; } \
    return x; } \
  template <class T> METAL_FUNC T simd_prefix_exclusive_##name(T x) { \
    T y = __shfl_up_sync(msl::all_lanes, simd_prefix_inclusive_##name(x), 1); return msl::lane() ? y : T(neutral); }
MSL_SIMD_PREFIX(sum, +, 0)
MSL_SIMD_PREFIX(product, *, 1)
struct simd_vote {
  typedef ulong vote_t;
  vote_t v;
  METAL_FUNC explicit simd_vote(vote_t x) : v(x) {}
  METAL_FUNC explicit operator vote_t() const { return v; }
  METAL_FUNC bool all() const { return v == msl::all_lanes; }
  METAL_FUNC bool any() const { return v != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool b) { return simd_vote(__ballot_sync(msl::all_lanes, b)); }
METAL_FUNC bool simd_any(bool b) { return __any_sync(msl::all_lanes, b); }
METAL_FUNC bool simd_all(bool b) { return __all_sync(msl::all_lanes, b); }

// ---- atomics, on device and threadgroup memory ----
enum memory_order { memory_order_relaxed };
template <class T> using atomic = T;
typedef uint atomic_uint;
typedef int atomic_int;
typedef float atomic_float;
template <class T> METAL_FUNC T atomic_load_explicit(const T* p, memory_order) { return *(const volatile T*)p; }
template <class T, class U> METAL_FUNC void atomic_store_explicit(T* p, U v, memory_order) { atomicExch(p, T(v)); }
#define MSL_ATOMIC(name, f) \
  template <class T, class U> METAL_FUNC T atomic_##name##_explicit(T* p, U v, memory_order) { return f(p, T(v)); }
MSL_ATOMIC(exchange, atomicExch)
MSL_ATOMIC(fetch_add, atomicAdd)
MSL_ATOMIC(fetch_sub, atomicSub)
MSL_ATOMIC(fetch_max, atomicMax)
MSL_ATOMIC(fetch_min, atomicMin)
MSL_ATOMIC(fetch_or, atomicOr)
MSL_ATOMIC(fetch_and, atomicAnd)
MSL_ATOMIC(fetch_xor, atomicXor)
template <class T, class U> METAL_FUNC bool atomic_compare_exchange_weak_explicit(
    T* p, T* expected, U desired, memory_order, memory_order) {
  T seen = atomicCAS(p, *expected, T(desired)); bool same = seen == *expected; *expected = seen; return same; }

// ---- 8x8 matrices in Metal's lane layout, multiplied by shuffles: for right results, not for speed ----
template <class T, int R, int C> struct simdgroup_matrix {
  vec<T, 2> e;
  METAL_FUNC vec<T, 2>& thread_elements() { return e; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
METAL_FUNC uint msl_row() { uint l = msl::lane(); return ((l / 4) & 4) + (l / 2) % 4; }
METAL_FUNC uint msl_column() { uint l = msl::lane(); return ((l / 4) & 2) * 2 + (l % 2) * 2; }
METAL_FUNC uint msl_owner(uint r, uint c) { return ((r & 4) << 2) | ((c & 4) << 1) | ((r & 3) << 1) | ((c >> 1) & 1); }
template <class T, int R, int C> METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m; m.e = vec<T, 2>(v); return m; }
template <class T> METAL_FUNC void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& m, const T* p, ulong stride = 8, vec<ulong, 2> origin = 0, bool transposed = false) {
  p += origin.y * stride + origin.x;
  uint r = msl_row(), c = msl_column();
  for (int k = 0; k < 2; k++) m.e[k] = transposed ? p[(c + k) * stride + r] : p[r * stride + c + k]; }
template <class T> METAL_FUNC void simdgroup_store(
    simdgroup_matrix<T, 8, 8> m, T* p, ulong stride = 8, vec<ulong, 2> origin = 0, bool transposed = false) {
  p += origin.y * stride + origin.x;
  uint r = msl_row(), c = msl_column();
  for (int k = 0; k < 2; k++) p[transposed ? (c + k) * stride + r : r * stride + c + k] = m.e[k]; }
template <class D, class A, class B, class C> METAL_FUNC void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  uint row = msl_row(), column = msl_column();
  float s0 = float(c.e.x), s1 = float(c.e.y);
  for (uint k = 0; k < 8; k++) {
    uint la = msl_owner(row, k), lb = msl_owner(k, column);
    float a0 = __shfl_sync(msl::all_lanes, float(a.e.x), la), a1 = __shfl_sync(msl::all_lanes, float(a.e.y), la);
    float v = (k & 1) ? a1 : a0;
    s0 += v * __shfl_sync(msl::all_lanes, float(b.e.x), lb);
    s1 += v * __shfl_sync(msl::all_lanes, float(b.e.y), lb);
  }
  d.e = vec<D, 2>(D(s0), D(s1)); }
template <class D, class A, class B> METAL_FUNC void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0.0f))); }

// ---- mathematics: overload sets, so that calls which are ambiguous in Metal are ambiguous here ----
#define MSL_FLOAT1(name, f) \
  METAL_FUNC float name(float x) { return f(x); } \
  METAL_FUNC half name(half x) { return half(f(float(x))); } \
  METAL_FUNC bfloat name(bfloat x) { return bfloat(f(float(x))); }
#define MSL_FLOAT2(name, f) \
  METAL_FUNC float name(float a, float b) { return f(a, b); } \
  METAL_FUNC half name(half a, half b) { return half(f(float(a), float(b))); } \
  METAL_FUNC bfloat name(bfloat a, bfloat b) { return bfloat(f(float(a), float(b))); }
MSL_FLOAT1(sqrt, sqrtf) MSL_FLOAT1(rsqrt, rsqrtf) MSL_FLOAT1(tanh, tanhf) MSL_FLOAT1(tan, tanf)
MSL_FLOAT1(exp10, exp10f) MSL_FLOAT1(floor, floorf) MSL_FLOAT1(ceil, ceilf) MSL_FLOAT1(round, roundf)
MSL_FLOAT1(rint, rintf) MSL_FLOAT1(trunc, truncf) MSL_FLOAT1(fabs, fabsf) MSL_FLOAT1(abs, fabsf)
MSL_FLOAT2(pow, powf) MSL_FLOAT2(fmod, fmodf) MSL_FLOAT2(copysign, copysignf) MSL_FLOAT2(atan2, atan2f)
MSL_FLOAT2(min, fminf) MSL_FLOAT2(max, fmaxf) MSL_FLOAT2(fmin, fminf) MSL_FLOAT2(fmax, fmaxf)
// Six functions exist in a precise and a fast form; unqualified they are the precise one, as in Metal's safe mode.
namespace precise {
MSL_FLOAT1(exp, expf) MSL_FLOAT1(exp2, exp2f) MSL_FLOAT1(log, logf) MSL_FLOAT1(log2, log2f)
MSL_FLOAT1(sin, sinf) MSL_FLOAT1(cos, cosf)
using metal::sqrt; using metal::rsqrt; using metal::tanh; using metal::pow;
} // namespace precise
using namespace precise;
namespace fast {
MSL_FLOAT1(exp, __expf) MSL_FLOAT1(exp2, exp2f) MSL_FLOAT1(log, __logf) MSL_FLOAT1(log2, __log2f)
MSL_FLOAT1(sin, __sinf) MSL_FLOAT1(cos, __cosf)
using metal::sqrt; using metal::rsqrt; using metal::tanh; using metal::pow;
} // namespace fast
METAL_FUNC float fma(float a, float b, float c) { return fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) { return __hfma(a, b, c); }
METAL_FUNC float ldexp(float x, int e) { return ldexpf(x, e); }
METAL_FUNC bool isnan(float x) { return x != x; }
METAL_FUNC bool isinf(float x) { return fabsf(x) == __int_as_float(0x7f800000); }
METAL_FUNC bool isfinite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }
METAL_FUNC bool signbit(float x) { return __float_as_int(x) < 0; }
METAL_FUNC float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }
METAL_FUNC float saturate(float x) { return __saturatef(x); }
METAL_FUNC float mix(float a, float b, float t) { return a + (b - a) * t; }
METAL_FUNC int abs(int x) { return x < 0 ? -x : x; }
#define MSL_INTEGER(T) \
  METAL_FUNC T min(T a, T b) { return b < a ? b : a; } \
  METAL_FUNC T max(T a, T b) { return a < b ? b : a; }
MSL_INTEGER(char) MSL_INTEGER(uchar) MSL_INTEGER(short) MSL_INTEGER(ushort)
MSL_INTEGER(int) MSL_INTEGER(uint) MSL_INTEGER(long) MSL_INTEGER(ulong)
#define MSL_ANY(T) \
  METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  METAL_FUNC T select(T a, T b, bool c) { return c ? b : a; }
MSL_ANY(char) MSL_ANY(uchar) MSL_ANY(short) MSL_ANY(ushort) MSL_ANY(int) MSL_ANY(uint) MSL_ANY(long) MSL_ANY(ulong)
MSL_ANY(float) MSL_ANY(half) MSL_ANY(bfloat)
} // namespace metal

// What Metal code says without metal::, mathematics excepted: CUDA has global functions of those names.
using metal::as_type; using metal::atomic; using metal::atomic_float; using metal::atomic_int; using metal::atomic_uint;
using metal::atomic_compare_exchange_weak_explicit; using metal::atomic_exchange_explicit;
using metal::atomic_fetch_add_explicit; using metal::atomic_fetch_and_explicit; using metal::atomic_fetch_max_explicit;
using metal::atomic_fetch_min_explicit; using metal::atomic_fetch_or_explicit; using metal::atomic_fetch_sub_explicit;
using metal::atomic_fetch_xor_explicit; using metal::atomic_load_explicit; using metal::atomic_store_explicit;
using metal::make_filled_simdgroup_matrix; using metal::mem_flags; using metal::memory_order_relaxed;
using metal::simd_all; using metal::simd_and; using metal::simd_any; using metal::simd_ballot; using metal::simd_broadcast;
using metal::simd_broadcast_first; using metal::simd_max; using metal::simd_min; using metal::simd_or;
using metal::simd_prefix_exclusive_product; using metal::simd_prefix_exclusive_sum;
using metal::simd_prefix_inclusive_product; using metal::simd_prefix_inclusive_sum; using metal::simd_product;
using metal::simd_shuffle; using metal::simd_shuffle_down; using metal::simd_shuffle_up; using metal::simd_shuffle_xor;
using metal::simd_sum; using metal::simd_vote; using metal::simd_xor; using metal::simdgroup_barrier;
using metal::simdgroup_bfloat8x8; using metal::simdgroup_float8x8; using metal::simdgroup_half8x8;
using metal::simdgroup_load; using metal::simdgroup_matrix; using metal::simdgroup_multiply;
using metal::simdgroup_multiply_accumulate; using metal::simdgroup_store; using metal::threadgroup_barrier;

// Beside MLX's own overloads, which take pointers: the helper for strided inputs, as Metal's prelude has it.
namespace mlx::core::cu {
template <class I> METAL_FUNC I elem_to_loc(I e, const Shape& shape, const Strides& strides, int ndim) {
  I at = 0;
  for (int i = ndim - 1; i >= 0 && e > 0; --i) { at += (e % shape[i]) * I(strides[i]); e /= shape[i]; }
  return at; }
} // namespace mlx::core::cu
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#endif

// ---- macros, last, so that no header above sees them ----
#define uint2 metal::vec<uint, 2>
#define uint3 metal::vec<uint, 3>
#define uint4 metal::vec<uint, 4>
#define ulong2 metal::vec<ulong, 2>
#define int2 metal::vec<int, 2>
#define int3 metal::vec<int, 3>
#define int4 metal::vec<int, 4>
#define float2 metal::vec<float, 2>
#define float3 metal::vec<float, 3>
#define float4 metal::vec<float, 4>
#define half2 metal::vec<half, 2>
#define half4 metal::vec<half, 4>
#define bfloat2 metal::vec<bfloat, 2>
#define bfloat4 metal::vec<bfloat, 4>
#define uchar2 metal::vec<uchar, 2>
#define uchar4 metal::vec<uchar, 4>
#define char2 metal::vec<int8_t, 2>
#define char4 metal::vec<int8_t, 4>
#define ushort2 metal::vec<ushort, 2>
#define ushort4 metal::vec<ushort, 4>
#define thread_position_in_grid \
  uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z)
#define thread_position_in_threadgroup uint3(threadIdx.x, threadIdx.y, threadIdx.z)
#define threadgroup_position_in_grid uint3(blockIdx.x, blockIdx.y, blockIdx.z)
#define threads_per_threadgroup uint3(blockDim.x, blockDim.y, blockDim.z)
#define threadgroups_per_grid uint3(gridDim.x, gridDim.y, gridDim.z)
#define threads_per_grid uint3(gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z)
#define thread_index_in_threadgroup (msl::index_in_group())
#define thread_index_in_simdgroup (msl::lane())
#define simdgroup_index_in_threadgroup (msl::index_in_group() >> 5)
#define simdgroups_per_threadgroup ((msl::group_size() + 31u) >> 5)
#define threads_per_simdgroup 32u
