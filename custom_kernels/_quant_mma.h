// Block-quantized weights times bfloat16 rows on NVIDIA tensor cores (mma m16n8k16, float32 sums).
//
// A warp owns 16 weight rows (the matrix A) and 8 NT activation rows (the columns of B). Lane (g = lane / 4, t = lane % 4)
// holds codes of weight rows g and g + 8 and the activation row 8 i + g. Sums may take columns in any order, as long
// as A and B agree: here lane t owns an "octet", the 8 consecutive columns 32 b + 8 t of block b, so that every format
// decodes from whole 4- or 8-byte words and two mma steps consume one block of 32.
//
// Codes become bfloat16 exactly (integers up to 8 bits, e2m1, e4m3, IQ2 magnitudes); scales multiply the float32 block sums.
// K-quants: integer products that fit bfloat16 are folded into A, minima ride in a second sum over the same B.

namespace ds4 {

typedef unsigned int u32;
typedef __nv_bfloat16 bf16;

enum { Q8_0 = 0, Q4_K = 1, Q2_K = 2, IQ2_XXS = 3, MXFP4 = 4, FP8 = 5 };

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
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Weights are read once: keep them out of L1, which holds the activations.
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
__device__ __forceinline__ float half_bits(u32 h) { return __half2float(__ushort_as_half((unsigned short)h)); }

const u32 BIAS = 0x43004300u;  // 128 in both halves: 0x4300 | u is 128 + u for u < 128

// Bytes (0, 1) and (2, 3) of w, each below 128, as bfloat16 pairs.
__device__ __forceinline__ u32 low_pair(u32 w) { return sub2(__byte_perm(w, 0x43, 0x4140), BIAS); }
__device__ __forceinline__ u32 high_pair(u32 w) { return sub2(__byte_perm(w, 0x43, 0x4342), BIAS); }
// The same for signed bytes: 128 + (q & 127), minus 128 or 256 by the sign bit.
__device__ __forceinline__ u32 signed_pair(u32 p) { return sub2(p & 0xff7fff7fu, p & 0xff80ff80u); }
// Byte i of w in both halves.
__device__ __forceinline__ u32 spread(u32 w, int i) { return sub2(__byte_perm(w, 0x43, 0x4040 + 0x0101 * i), BIAS); }

// The planes of one matrix and of one of its rows.
struct Planes {
  const unsigned char* codes;
  const unsigned char* scales;
  const unsigned char* supers;
};

// Activation rows of this lane's columns; a missing row reads as zeros.
template <int NT>
struct Rows {
  const bf16* p[NT];
  __device__ __forceinline__ uint4 octet(int i, int column) const {
    return p[i] ? __ldg((const uint4*)(p[i] + column)) : make_uint4(0, 0, 0, 0);
  }
};

// One block of 32 columns: two steps of A against the rows; p += A B.
template <int NT>
__device__ __forceinline__ void block32(float (&p)[NT][4], const u32 (&a)[2][4], const Rows<NT>& x, int column) {
#pragma unroll
  for (int i = 0; i < NT; i++) {
    uint4 v = x.octet(i, column);
    mma(p[i], a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y);
    mma(p[i], a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w);
  }
}
template <int NT>
__device__ __forceinline__ void clear(float (&p)[NT][4]) {
#pragma unroll
  for (int i = 0; i < NT; i++) p[i][0] = p[i][1] = p[i][2] = p[i][3] = 0.f;
}
template <int NT>
__device__ __forceinline__ void add_scaled(float (&acc)[NT][4], const float (&p)[NT][4], float s0, float s1) {
#pragma unroll
  for (int i = 0; i < NT; i++) {
    acc[i][0] = fmaf(s0, p[i][0], acc[i][0]);
    acc[i][1] = fmaf(s0, p[i][1], acc[i][1]);
    acc[i][2] = fmaf(s1, p[i][2], acc[i][2]);
    acc[i][3] = fmaf(s1, p[i][3], acc[i][3]);
  }
}

// A format: UNIT columns a step; load() issues the reads of a step for both rows, multiply() adds its products.
template <int F>
struct Weight;

template <>
struct Weight<Q8_0> {
  static constexpr int UNIT = 128;
  uint2 q[2][4];
  u32 s[2];
  __device__ __forceinline__ void load(const Planes (&w)[2], int blocks, int unit, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        q[r][i] = 4 * unit + i < blocks ? read8(w[r].codes + 128 * unit + 32 * i + 8 * t) : make_uint2(0, 0);
      s[r] = 4 * unit + t < blocks ? ((const unsigned short*)w[r].scales)[4 * unit + t] : 0;
    }
  }
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], const Rows<NT>& x, int blocks, int unit, int t, const uint4*) {
    const int quad = threadIdx.x & 28;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float s0 = half_bits(__shfl_sync(~0u, s[0], quad + i)), s1 = half_bits(__shfl_sync(~0u, s[1], quad + i));
      if (4 * unit + i >= blocks) break;
      u32 a[2][4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        a[r][0] = signed_pair(__byte_perm(q[r][i].x, 0x43, 0x4140));
        a[r][1] = signed_pair(__byte_perm(q[r][i].x, 0x43, 0x4342));
        a[r][2] = signed_pair(__byte_perm(q[r][i].y, 0x43, 0x4140));
        a[r][3] = signed_pair(__byte_perm(q[r][i].y, 0x43, 0x4342));
      }
      float p[NT][4];
      clear(p);
      block32(p, a, x, 128 * unit + 32 * i + 8 * t);
      add_scaled(acc, p, s0, s1);
    }
  }
};

// e4m3 codes; one power-of-two scale for each 32x32 tile, so the 16 rows of a warp share it.
template <>
struct Weight<FP8> {
  static constexpr int UNIT = 128;
  uint2 q[2][4];
  u32 s;
  __device__ __forceinline__ void load(const Planes (&w)[2], int blocks, int unit, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        q[r][i] = 4 * unit + i < blocks ? read8(w[r].codes + 128 * unit + 32 * i + 8 * t) : make_uint2(0, 0);
    s = 4 * unit + t < blocks ? w[0].scales[4 * unit + t] : 0;
  }
  // sign, exponent and mantissa moved to bfloat16's places; 2^120 makes up for the exponent bias.
  static __device__ __forceinline__ u32 value(u32 p) {
    return mul2(((p & 0x00800080u) << 8) | ((p & 0x007f007fu) << 4), 0x7b807b80u);
  }
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], const Rows<NT>& x, int blocks, int unit, int t, const uint4*) {
    const int quad = threadIdx.x & 28;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float scale = exp2f((float)__shfl_sync(~0u, s, quad + i) - 127.f);
      if (4 * unit + i >= blocks) break;
      u32 a[2][4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        a[r][0] = value(__byte_perm(q[r][i].x, 0, 0x4140));
        a[r][1] = value(__byte_perm(q[r][i].x, 0, 0x4342));
        a[r][2] = value(__byte_perm(q[r][i].y, 0, 0x4140));
        a[r][3] = value(__byte_perm(q[r][i].y, 0, 0x4342));
      }
      float p[NT][4];
      clear(p);
      block32(p, a, x, 128 * unit + 32 * i + 8 * t);
      add_scaled(acc, p, scale, scale);
    }
  }
};

template <>
struct Weight<Q4_K> {
  static constexpr int UNIT = 256;
  uint2 q[2][4];
  u32 s[2][3];
  u32 super[2];
  __device__ __forceinline__ void load(const Planes (&w)[2], int blocks, int unit, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < 4; i++) q[r][i] = read8(w[r].codes + 128 * unit + 32 * i + 8 * t);
#pragma unroll
      for (int i = 0; i < 3; i++) s[r][i] = read4(w[r].scales + 12 * unit + 4 * i);
      super[r] = read4(w[r].supers + 4 * unit);
    }
  }
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], const Rows<NT>& x, int blocks, int unit, int t, const uint4*) {
    u32 scale[2][2], low[2][2];  // 6-bit scales and minima of the 8 sub-blocks, one a byte
    float d[2], dmin[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      scale[r][0] = s[r][0] & 0x3f3f3f3fu;
      low[r][0] = s[r][1] & 0x3f3f3f3fu;
      scale[r][1] = (s[r][2] & 0x0f0f0f0fu) | ((s[r][0] >> 2) & 0x30303030u);
      low[r][1] = ((s[r][2] >> 4) & 0x0f0f0f0fu) | ((s[r][1] >> 2) & 0x30303030u);
      d[r] = half_bits(super[r] & 0xffff);
      dmin[r] = half_bits(super[r] >> 16);
    }
    float minima[NT][4];
    clear(minima);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32 a[2][4], m[2][4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 lo = (q[r][j / 2].x >> (4 * (j & 1))) & 0x0f0f0f0fu, hi = (q[r][j / 2].y >> (4 * (j & 1))) & 0x0f0f0f0fu;
        a[r][0] = low_pair(lo);
        a[r][1] = high_pair(lo);
        a[r][2] = low_pair(hi);
        a[r][3] = high_pair(hi);
        m[r][0] = m[r][1] = m[r][2] = m[r][3] = spread(low[r][j / 4], j & 3);
      }
      float p[NT][4];
      clear(p);
      const int column = 256 * unit + 32 * j + 8 * t;
#pragma unroll
      for (int i = 0; i < NT; i++) {
        uint4 v = x.octet(i, column);
        mma(p[i], a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y);
        mma(minima[i], m[0][0], m[1][0], m[0][1], m[1][1], v.x, v.y);
        mma(p[i], a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w);
        mma(minima[i], m[0][2], m[1][2], m[0][3], m[1][3], v.z, v.w);
      }
      float s0 = d[0] * (float)((scale[0][j / 4] >> (8 * (j & 3))) & 255);
      float s1 = d[1] * (float)((scale[1][j / 4] >> (8 * (j & 3))) & 255);
      add_scaled(acc, p, s0, s1);
    }
    add_scaled(acc, minima, -dmin[0], -dmin[1]);
  }
};

// Scale (4 bit) times code (2 bit) is an integer up to 45: folded into A, so d and dmin act once per 256 columns.
template <>
struct Weight<Q2_K> {
  static constexpr int UNIT = 256;
  uint2 q[2][2];
  uint4 s[2];
  u32 super[2];
  __device__ __forceinline__ void load(const Planes (&w)[2], int blocks, int unit, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int h = 0; h < 2; h++) q[r][h] = read8(w[r].codes + 64 * unit + 32 * h + 8 * t);
      s[r] = read16(w[r].scales + 16 * unit);
      super[r] = read4(w[r].supers + 4 * unit);
    }
  }
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], const Rows<NT>& x, int blocks, int unit, int t, const uint4*) {
    float p[NT][4], minima[NT][4];
    clear(p);
    clear(minima);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32 a[2][4], m[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        // The octet lies in sub-block 2 j + t / 2 of 16 columns.
        u32 word = j < 2 ? s[r].x : j < 4 ? s[r].y : j < 6 ? s[r].z : s[r].w;
        u32 both = word >> (16 * (j & 1) + 8 * (t >> 1));
        u32 scale = spread(both & 15, 0);
        m[r] = spread((both >> 4) & 15, 0);
        u32 shift = mul2(scale, 0xc300c300u);  // -128 scale, exact
        u32 lo = (q[r][j / 4].x >> (2 * (j & 3))) & 0x03030303u, hi = (q[r][j / 4].y >> (2 * (j & 3))) & 0x03030303u;
        a[r][0] = fma2(__byte_perm(lo, 0x43, 0x4140), scale, shift);
        a[r][1] = fma2(__byte_perm(lo, 0x43, 0x4342), scale, shift);
        a[r][2] = fma2(__byte_perm(hi, 0x43, 0x4140), scale, shift);
        a[r][3] = fma2(__byte_perm(hi, 0x43, 0x4342), scale, shift);
      }
      const int column = 256 * unit + 32 * j + 8 * t;
#pragma unroll
      for (int i = 0; i < NT; i++) {
        uint4 v = x.octet(i, column);
        mma(p[i], a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y);
        mma(minima[i], m[0], m[1], m[0], m[1], v.x, v.y);
        mma(p[i], a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w);
        mma(minima[i], m[0], m[1], m[0], m[1], v.z, v.w);
      }
    }
    add_scaled(acc, p, half_bits(super[0] & 0xffff), half_bits(super[1] & 0xffff));
    add_scaled(acc, minima, -half_bits(super[0] >> 16), -half_bits(super[1] >> 16));
  }
};

// An octet is one entry of the grid (8 magnitudes as bfloat16 in shared memory) and 7 sign bits with parity.
template <>
struct Weight<IQ2_XXS> {
  static constexpr int UNIT = 256;
  uint4 q[2][4];
  u32 d[2];
  __device__ __forceinline__ void load(const Planes (&w)[2], int blocks, int unit, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < 4; i++) q[r][i] = read16(w[r].codes + 64 * unit + 16 * i);
      d[r] = ((const unsigned short*)w[r].scales)[unit];
    }
  }
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], const Rows<NT>& x, int blocks, int unit, int t, const uint4* grid) {
    float d8[2] = {half_bits(d[0]) * 0.125f, half_bits(d[1]) * 0.125f};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32 a[2][4];
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 index = j & 1 ? q[r][j / 2].z : q[r][j / 2].x, rest = j & 1 ? q[r][j / 2].w : q[r][j / 2].y;
        uint4 v = grid[(index >> (8 * t)) & 255];
        u32 sign = (rest >> (7 * t)) & 127;
        sign |= (__popc(sign) & 1) << 7;
        sign = (sign & 0x55) | ((sign & 0xaa) << 15);  // even columns in the low half, odd ones in the high half
        a[r][0] = v.x ^ ((sign << 15) & 0x80008000u);
        a[r][1] = v.y ^ ((sign << 13) & 0x80008000u);
        a[r][2] = v.z ^ ((sign << 11) & 0x80008000u);
        a[r][3] = v.w ^ ((sign << 9) & 0x80008000u);
        scale[r] = d8[r] * (float)(2 * (rest >> 28) + 1);
      }
      float p[NT][4];
      clear(p);
      block32(p, a, x, 256 * unit + 32 * j + 8 * t);
      add_scaled(acc, p, scale[0], scale[1]);
    }
  }
};

// Lane t owns a whole block of 32; e2m1 times its power of two is exact in bfloat16, so nothing is left for the sums.
template <>
struct Weight<MXFP4> {
  static constexpr int UNIT = 128;
  uint4 q[2];
  u32 s[2];
  __device__ __forceinline__ void load(const Planes (&w)[2], int blocks, int unit, int t) {
    const int block = 4 * unit + t;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      q[r] = block < blocks ? read16(w[r].codes + 16 * block) : make_uint4(0, 0, 0, 0);
      s[r] = block < blocks ? w[r].scales[block] : 0;
    }
  }
  // Four nibbles of w from bit `at` on, as two bfloat16 pairs. High and low bytes come from byte tables.
  static __device__ __forceinline__ void values(u32 (&out)[2], u32 w, u32 power) {
    u32 select = w & 0x7777u;
    u32 high = __byte_perm(0x3f3f3f00u, 0x40404040u, select), low = __byte_perm(0xc0800000u, 0xc0804000u, select);
    u32 even = (w << 4) & 0x8080u, odd = w & 0x8080u;  // sign of nibbles 0, 2 and 1, 3 in the tops of bytes 0, 1
    out[0] = mul2(__byte_perm(low, high, 0x5140) ^ __byte_perm(even, odd, 0x4202) & 0x80008000u, power);
    out[1] = mul2(__byte_perm(low, high, 0x7362) ^ __byte_perm(even, odd, 0x5212) & 0x80008000u, power);
  }
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], const Rows<NT>& x, int blocks, int unit, int t, const uint4*) {
    const int block = 4 * unit + t;
    u32 power[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 bits = s[r] ? s[r] << 7 : 0x40;  // 2^-127 is a subnormal bfloat16
      power[r] = bits | (bits << 16);
    }
#pragma unroll
    for (int o = 0; o < 4; o++) {
      u32 a[2][4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 w = o == 0 ? q[r].x : o == 1 ? q[r].y : o == 2 ? q[r].z : q[r].w;
        u32 pair[2];
        values(pair, w, power[r]);
        a[r][0] = pair[0];
        a[r][1] = pair[1];
        values(pair, w >> 16, power[r]);
        a[r][2] = pair[0];
        a[r][3] = pair[1];
      }
#pragma unroll
      for (int i = 0; i < NT; i++) {
        uint4 v = block < blocks ? x.octet(i, 32 * block + 8 * o) : make_uint4(0, 0, 0, 0);
        mma(acc[i], a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y);
        mma(acc[i], a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w);
      }
    }
  }
};

// Bytes of a row of K columns in each plane; FP8 scales have one row for 32 weight rows.
template <int F>
__device__ __forceinline__ Planes row_of(const Planes& w, size_t row, int K) {
  if (F == Q8_0) return {w.codes + row * K, w.scales + row * (K / 32 * 2), nullptr};
  if (F == FP8) return {w.codes + row * K, w.scales + row / 32 * (K / 32), nullptr};
  if (F == MXFP4) return {w.codes + row * (K / 2), w.scales + row * (K / 32), nullptr};
  if (F == IQ2_XXS) return {w.codes + row * (K / 4), w.scales + row * (K / 256 * 2), nullptr};
  if (F == Q2_K) return {w.codes + row * (K / 4), w.scales + row * (K / 16), w.supers + row * (K / 64)};
  return {w.codes + row * (K / 2), w.scales + row * (K / 256 * 12), w.supers + row * (K / 64)};
}

// Adds the products of a warp's 16 rows, from row base + 16 tile of `w` on, with the columns of x: units first, first + step,
// ... of the width K. Rows past the end (N) repeat the last one and are not stored.
template <int F, int NT>
__device__ __forceinline__ void product(
    float (&acc)[NT][4], const Planes& w, size_t base, int tile, int N, int K, const Rows<NT>& x, int first, int step,
    const uint4* grid) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  const int blocks = K / 32, units = (K + Weight<F>::UNIT - 1) / Weight<F>::UNIT;
  const Planes rows[2] = {row_of<F>(w, base + min(16 * tile + g, N - 1), K), row_of<F>(w, base + min(16 * tile + g + 8, N - 1), K)};
  Weight<F> now, next;
  if (first < units) now.load(rows, blocks, first, t);
  for (int unit = first; unit < units; unit += step) {
    if (unit + step < units) next.load(rows, blocks, unit + step, t);
    now.multiply(acc, x, blocks, unit, t, grid);
    now = next;
  }
}

// The IQ2 grid (bytes, IQ2_WORDS) as bfloat16 in shared memory, by all threads; needs a barrier before use.
__device__ __forceinline__ void stage_grid(uint4* grid) {
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    const u32 low = IQ2_WORDS[2 * i], high = IQ2_WORDS[2 * i + 1];
    grid[i] = make_uint4(low_pair(low), high_pair(low), low_pair(high), high_pair(high));
  }
}

__device__ __forceinline__ float round_bf16(float v) { return __bfloat162float(__float2bfloat16(v)); }

}  // namespace ds4
