// CUDA's names in plain C++ for one block at a time: threads are fibers (the emulator's stack switch) that change where a
// warp or the block waits.
// Values that a warp exchanges go through `mailbox`. `_cuda_ptx.h` has its counterpart at the end.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "../emulator/runtime/stack_switch.h"

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;

struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct uint4 { unsigned x, y, z, w; };
static int2 make_int2(int x, int y) { return {x, y}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
struct Index { int x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

template <class To, class From>
static To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static float __int_as_float(int i) { return bits_as<float>(i); }
static int __float_as_int(float f) { return bits_as<int>(f); }

// bfloat16, rounded to nearest even.
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float f) {
    uint32_t u = bits_as<uint32_t>(f);
    bits = f != f ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  explicit operator float() const { return bits_as<float>(uint32_t(bits) << 16); }
};
static __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
static float __bfloat162float(__nv_bfloat16 b) { return float(b); }
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float f) : bits(bits_as<uint16_t>((_Float16)f)) {}
};
static __half __ushort_as_half(unsigned short u) { return bits_as<__half>(u); }
static float __half2float(__half h) { return float(bits_as<_Float16>(h.bits)); }

static unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  uint64_t both = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(both >> (8 * ((select >> (4 * i)) & 7)) & 255) << (8 * i);
  return out;
}
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static int __ffsll(unsigned long long x) { return __builtin_ffsll((long long)x); }
template <class T>
static T __ldg(const T* p) { return *p; }

// Fibers.
enum Wait { NOTHING, WARP, TEAM, BLOCK, DONE };
static int team_threads = 1024;
struct Fiber {
  void* sp;
  std::vector<uint8_t> stack;
  Wait wait;
};
static std::vector<Fiber> fibers;
static void* scheduler;
static std::function<void()> thread_body;
static uint32_t mailbox[1024][16];

static void wait_for(Wait what) {
  Fiber& me = fibers[threadIdx.x];
  me.wait = what;
  emulator_switch(&me.sp, scheduler);
}
static void start() {
  thread_body();
  wait_for(DONE);
}
static void resume(int i) {
  threadIdx.x = i;
  fibers[i].wait = NOTHING;
  emulator_switch(&scheduler, fibers[i].sp);
}
// Threads that wait for `what` go on once every living one of the group [from, to) does.
static bool release(int from, int to, Wait what) {
  for (int i = from; i < to; i++)
    if (fibers[i].wait != what && fibers[i].wait != DONE) return false;
  bool any = false;
  for (int i = from; i < to; i++)
    if (fibers[i].wait == what) resume(i), any = true;
  return any;
}
static void run_block(int threads) {
  if ((int)fibers.size() != threads) {
    fibers.clear();
    fibers.resize(threads);
    for (Fiber& f : fibers) f.stack.resize(256 * 1024);
  }
  for (Fiber& f : fibers) f.sp = fresh_stack(f.stack.data() + f.stack.size(), start);
  for (int i = 0; i < threads; i++) resume(i);
  for (bool going = true; going;) {
    going = false;
    for (int w = 0; w < threads; w += 32)
      while (release(w, w + 32, WARP)) going = true;
    for (int w = 0; w < threads; w += team_threads)
      going |= release(w, min(w + team_threads, threads), TEAM);
    going |= release(0, threads, BLOCK);
  }
  for (Fiber& f : fibers)
    if (f.wait != DONE) fprintf(stderr, "cuda_host: threads wait for one another at different places\n"), abort();
}
// CUDA promises no order of blocks: each is so many behind the one before, around the grid.
extern "C" int block_step = 1;
static void run_grid(int x, int y, int z, int threads, std::function<void()> body) {
  thread_body = body;
  blockDim = {threads, 1, 1};
  gridDim = {x, y, z};
  const int count = x * y * z;
  int step = block_step;
  while (std::gcd(step, count) != 1) step++;  // so that all are met
  for (int i = 0, at = step > 0 ? 0 : count - 1; i < count; i++, at = ((at + step) % count + count) % count) {
    blockIdx = {at % x, at / x % y, at / x / y};
    run_block(threads);
  }
}

static void __syncthreads() { wait_for(BLOCK); }
static void __threadfence() {}
static int atomicAdd(int* p, int v) { return *p += v, *p - v; }
static void __syncwarp() { wait_for(WARP); }
static int lane_base() { return threadIdx.x & ~31; }
template <class T>
static T __shfl_sync(unsigned, T x, int lane) {
  static_assert(sizeof(T) == 4, "");
  mailbox[threadIdx.x][0] = bits_as<uint32_t>(x);
  wait_for(WARP);
  T out = bits_as<T>(mailbox[lane_base() | (lane & 31)][0]);
  wait_for(WARP);
  return out;
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T x, int other) {
  return __shfl_sync(mask, x, (threadIdx.x & 31) ^ other);
}
static unsigned __ballot_sync(unsigned, bool vote) {
  mailbox[threadIdx.x][0] = vote;
  wait_for(WARP);
  unsigned out = 0;
  for (int i = 0; i < 32; i++) out |= mailbox[lane_base() | i][0] << i;
  wait_for(WARP);
  return out;
}
static unsigned __match_any_sync(unsigned, int x) {
  mailbox[threadIdx.x][0] = x;
  wait_for(WARP);
  unsigned out = 0;
  for (int i = 0; i < 32; i++) out |= unsigned(mailbox[lane_base() | i][0] == (uint32_t)x) << i;
  wait_for(WARP);
  return out;
}
static bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

// The counterpart of _cuda_ptx.h.
namespace ds4_ptx {
typedef unsigned int u32;
static float low_half(u32 w) { return bits_as<float>(w << 16); }
static float high_half(u32 w) { return bits_as<float>(w & 0xffff0000u); }
static u32 pack(float low, float high) { return __nv_bfloat16(low).bits | u32(__nv_bfloat16(high).bits) << 16; }
static u32 sub2(u32 a, u32 b) { return pack(low_half(a) - low_half(b), high_half(a) - high_half(b)); }
static u32 mul2(u32 a, u32 b) { return pack(low_half(a) * low_half(b), high_half(a) * high_half(b)); }
static u32 half_twice(u32 b, bool high) { return high ? (b & 0xffff0000u) | b >> 16 : b << 16 | (b & 0xffff); }
static u32 mul2_by_half(u32 a, u32 b, bool high) { return mul2(a, half_twice(b, high)); }
static u32 fma2(u32 a, u32 b, u32 c) {
  return pack(
      fmaf(low_half(a), low_half(b), low_half(c)), fmaf(high_half(a), high_half(b), high_half(c)));
}
static void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(mailbox[threadIdx.x], mine, sizeof mine);
  wait_for(WARP);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int i = 0; i < 4; i++) {
    const int row = 8 * (i >> 1), column = 2 * t + (i & 1);
    for (int k = 0; k < 16; k++) {
      const int part = k / 2 % 4;
      const u32 a = mailbox[lane_base() | (4 * g + part)][(row ? 1 : 0) + 2 * (k / 8)];
      const u32 b = mailbox[lane_base() | (4 * column + part)][4 + k / 8];
      c[i] += k & 1 ? high_half(a) * high_half(b) : low_half(a) * low_half(b);
    }
  }
  wait_for(WARP);
}
static void mma_new(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  c[0] = c[1] = c[2] = c[3] = 0.f;
  mma(c, a0, a1, a2, a3, b0, b1);
}
// Copies happen where they are waited for, the last moment that the hardware may choose.
struct Copy { void* to; const void* from; int bytes, group; };
static std::vector<Copy> copies[1024];
static int groups[1024];  // that the thread has committed
static void transposed(u32& b0, u32& b1, const __nv_bfloat16* p) {
  memcpy(mailbox[threadIdx.x], &p, sizeof p);
  wait_for(WARP);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u32 out[2];
  for (int m = 0; m < 2; m++) {
    const __nv_bfloat16 *first, *second;
    memcpy(&first, mailbox[lane_base() | (8 * m + 2 * t)], sizeof first);
    memcpy(&second, mailbox[lane_base() | (8 * m + 2 * t + 1)], sizeof second);
    out[m] = first[g].bits | u32(second[g].bits) << 16;
  }
  wait_for(WARP);
  b0 = out[0], b1 = out[1];
}
static void transposed(u32& b0, u32& b1, u32& b2, u32& b3, const __nv_bfloat16* p) {
  // The two-matrix form takes its addresses from lanes 0 .. 15, which here get those of 16 .. 31.
  transposed(b0, b1, p);
  memcpy(mailbox[threadIdx.x] + 2, &p, sizeof p);
  wait_for(WARP);
  const __nv_bfloat16* later;
  memcpy(&later, mailbox[lane_base() | (16 + (threadIdx.x & 15))] + 2, sizeof later);
  wait_for(WARP);
  transposed(b2, b3, later);
}
static void fragment(u32& a0, u32& a1, u32& a2, u32& a3, const __nv_bfloat16* p) {
  memcpy(mailbox[threadIdx.x], &p, sizeof p);
  wait_for(WARP);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u32 out[4];
  for (int m = 0; m < 4; m++) {
    const u32* row;
    memcpy(&row, mailbox[lane_base() | (8 * m + g)], sizeof row);
    out[m] = row[t];
  }
  wait_for(WARP);
  a0 = out[0], a1 = out[1], a2 = out[2], a3 = out[3];
}
static void* dynamic_shared() {
  alignas(65536) static uint4 bytes[228 * 1024 / sizeof(uint4)];  // of an H200's block, of which 1 KB is taken
  return bytes + 64;
}
// Distances from what the hardware has at address 1024; static arrays lie anywhere within 2 GB.
static u32 shared_address(const void* p) { return u32((const char*)p - (const char*)dynamic_shared() + 1024); }
static char* at_shared(u32 address) { return (char*)dynamic_shared() + (int)(address - 1024); }
static u32 read1_shared(u32 address) { return *(const uint8_t*)at_shared(address); }
static u32 read2_shared(u32 address) { return *(const uint16_t*)at_shared(address); }
static u32 read4_shared(u32 address) { return *(const u32*)at_shared(address); }
static uint2 read8_shared(u32 address) { return *(const uint2*)at_shared(address); }
static uint4 read16_shared(u32 address) { return *(const uint4*)at_shared(address); }
static void read16_shared_if(bool condition, uint4& v, u32 address, int offset) {
  if (condition) v = read16_shared(address + offset);
}
static void sync_team(int, int threads) {
  team_threads = threads;
  wait_for(TEAM);
}
template <int BYTES>
static void copy_async(u32 to, const void* from) {
  copies[threadIdx.x].push_back({at_shared(to), from, BYTES, groups[threadIdx.x]});
}
static void copy16_async(void* to, const void* from) { copy_async<16>(shared_address(to), from); }
static void copy16_async_or_zeros(void* to, const void* from, bool present) {
  static const uint4 zeros = {};
  copy16_async(to, present ? from : &zeros);
}
static void commit_copies() { groups[threadIdx.x]++; }
static void finish_copies(int below) {
  std::vector<Copy> later;
  for (const Copy& c : copies[threadIdx.x])
    if (c.group < below) memcpy(c.to, c.from, c.bytes);
    else later.push_back(c);
  copies[threadIdx.x] = later;
}
template <int GROUPS>
static void wait_for_copies_but() { finish_copies(groups[threadIdx.x] - GROUPS); }
static void wait_for_copies() { finish_copies(groups[threadIdx.x] + 1); }
static int draw_ticket(int* counter) { return (*counter)++; }
static void read4_fresh_if(bool condition, float& v, const void* p) {
  if (condition) v = *(const float*)p;
}
static void read16_fresh_if(bool condition, uint4& v, const void* p) {
  if (condition) v = *(const uint4*)p;
}
static void read16_if(bool condition, uint4& v, const void* p) {
  if (condition) v = *(const uint4*)p;
}
static u32 upper_product(u32 a, u32 b, u32 c) { return u32(uint64_t(a) * b >> 32) + c; }
static u32 permute(u32 a, u32 b, u32 select) {
  if (select & 0x8888) fprintf(stderr, "cuda_host: a byte permutation names a sign\n"), abort();
  return __byte_perm(a, b, select);
}
template <class T>
static T opaque(T x) { return x; }
static u32 read4(const void* p) { return *(const u32*)p; }
static uint2 read8(const void* p) { return *(const uint2*)p; }
static uint4 read16(const void* p) { return *(const uint4*)p; }
}  // namespace ds4_ptx
