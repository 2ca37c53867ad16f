// The instructions that CUDA C++ has no words for, in one place: tests/cuda_host replaces this file by plain C++ and
// runs the bodies on a CPU.
//
// Fragments of mma m16n8k16, with lane = 4 g + t: a0 row g, a1 row g + 8 (columns 2 t, 2 t + 1), a2 and a3 the same
// rows 8 columns on; b0 and b1 these columns of row g of B; c rows g and g + 8, columns 2 t and 2 t + 1.

namespace ds4_ptx {

typedef unsigned int u32;

// bfloat16 pairs, rounded to nearest even; subnormals are kept.
__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// One half of b in both halves, which costs no instruction where it is used if `high` is known.
__device__ __forceinline__ u32 half_twice(u32 b, bool high) {
  u32 lows, highs;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {h, h};}"
      : "=r"(lows), "=r"(highs)
      : "r"(b));
  return high ? highs : lows;
}
__device__ __forceinline__ u32 mul2_by_half(u32 a, u32 b, bool high) { return mul2(a, half_twice(b, high)); }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// c += A B and c = A B, float32 sums.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_new(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// b0 and b1 of 16 rows of 8 columns in shared memory that lie as rows; lanes 0 .. 15 give the rows' addresses.
__device__ __forceinline__ void transposed(u32& b0, u32& b1, const __nv_bfloat16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(b0), "=r"(b1)
               : "r"(shared_address(p)));
}

// b0 and b1 of rows 0 .. 15 of 8 columns, then of rows 16 .. 31; each lane gives a row's address.
__device__ __forceinline__ void transposed(u32& b0, u32& b1, u32& b2, u32& b3, const __nv_bfloat16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
               : "r"(shared_address(p)));
}
// a0 .. a3 of 16 rows of 16 columns; lanes 0 .. 15 give the rows' addresses, 16 .. 31 these 8 columns on.
__device__ __forceinline__ void fragment(u32& a0, u32& a1, u32& a2, u32& a3, const __nv_bfloat16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a0), "=r"(a1), "=r"(a2), "=r"(a3)
               : "r"(shared_address(p)));
}

// Shared memory whose size the launch gives; all of a kernel's arrays there lie behind this pointer.
__device__ __forceinline__ void* dynamic_shared() {
  extern __shared__ uint4 ds4_dynamic_shared[];
  return ds4_dynamic_shared;
}
__device__ __forceinline__ u32 read4_shared(u32 address) {
  u32 r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address));
  return r;
}
__device__ __forceinline__ u32 read1_shared(u32 address) {
  u32 r;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(address));
  return r;
}
__device__ __forceinline__ u32 read2_shared(u32 address) {
  unsigned short r;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(address));
  return r;
}
__device__ __forceinline__ uint2 read8_shared(u32 address) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address));
  return r;
}
__device__ __forceinline__ uint4 read16_shared(u32 address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address));
  return r;
}
// 16 bytes at address + offset into v, or v as it is.
__device__ __forceinline__ void read16_shared_if(bool condition, uint4& v, u32 address, int offset) {
  asm volatile(
      "{.reg .pred yes; setp.ne.u32 yes, %5, 0; @yes ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "r"(address + offset), "r"((u32)condition));
}
// A barrier of the `threads` threads of one team of a block.
__device__ __forceinline__ void sync_team(int team, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}
// 4, 8 or 16 bytes to shared memory, on their way until this thread waits for them; the copies since the last
// commit_copies() are a group.
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void copy16_async(void* to, const void* from) { copy_async<16>(shared_address(to), from); }
// 16 bytes, or zeros: then from any address of the array.
__device__ __forceinline__ void copy16_async_or_zeros(void* to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(present ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the newest GROUPS groups of this thread are there.
template <int GROUPS>
__device__ __forceinline__ void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One more at a counter in global memory; returns how many there were. What the threads of a block wrote in front of a
// barrier before this, the block that counts last sees behind a barrier after it, in reads past L1.
__device__ __forceinline__ int draw_ticket(int* counter) {
  int r;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(r) : "l"(counter) : "memory");
  return r;
}
__device__ __forceinline__ void read4_fresh_if(bool condition, float& v, const void* p) {
  asm volatile("{.reg .pred yes; setp.ne.u32 yes, %2, 0; @yes ld.global.cg.f32 %0, [%1];}"
               : "+f"(v)
               : "l"(p), "r"((u32)condition)
               : "memory");
}
__device__ __forceinline__ void read16_fresh_if(bool condition, uint4& v, const void* p) {
  asm volatile(
      "{.reg .pred yes; setp.ne.u32 yes, %5, 0; @yes ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"((u32)condition)
      : "memory");
}

// 16 bytes into v, or v as it is.
__device__ __forceinline__ void read16_if(bool condition, uint4& v, const void* p) {
  asm volatile(
      "{.reg .pred yes; setp.ne.u32 yes, %5, 0; @yes ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"((u32)condition));
}

// The upper 32 bits of a product, and a sum.
__device__ __forceinline__ u32 upper_product(u32 a, u32 b, u32 c) {
  u32 r;
  asm("mad.hi.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// Bytes of a and b that the nibbles of `select` name, each below 8; __byte_perm() would mask them.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 select) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select));
  return r;
}

// x, of which the compiler knows nothing.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm("" : "+r"(x));
  return x;
}
template <class T>
__device__ __forceinline__ const T* opaque(const T* p) {
  asm("" : "+l"(p));
  return p;
}

// Reads of what is used once: they leave L1 to the rest.
__device__ __forceinline__ u32 read4(const void* p) {
  u32 r;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}
__device__ __forceinline__ uint2 read8(const void* p) {
  uint2 r;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
  return r;
}
__device__ __forceinline__ uint4 read16(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

}  // namespace ds4_ptx
