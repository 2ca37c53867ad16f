// How each format's codes become fragments of A, and its products with columns of x; behind `_quant_mma.h`.

namespace ds4 {

// Sums of 16 columns of x, those of a sub-block of Q2_K: columns that have them (WithSums) multiply the minima as sums(i,
// part), one fragment of B for 256 columns. A sum is float32, as three bfloat16 that add up to it.
struct WithSums {};
struct ColumnSums {
  static constexpr int STEP = 3 * 16;  // numbers of a row for 256 columns
  // Sub-block `sub` of a step, with two octets of x.
  static __device__ __forceinline__ void put(bf16* step, int sub, const uint4& first, const uint4& second) {
    const u32 pairs[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sum += __int_as_float(pairs[i] << 16);
      sum += __int_as_float(pairs[i] & 0xffff0000u);
    }
    // Lane t of the fragment has sub-blocks 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    bf16* const to = step + sub % 8 / 2 * 4 + sub / 8 * 2 + sub % 2;
#pragma unroll
    for (int part = 0; part < 3; part++) {
      to[16 * part] = bf16(sum);
      sum -= __bfloat162float(bf16(sum));
    }
  }
};

// A format: UNIT columns a step; CODES, SCALES and SUPERS bytes of a step in each plane, SCALES in copies of PIECE
// bytes (0: as HalfCopies has them), and how far lanes t lie apart in the planes and the columns; SWIZZLE: which
// bits of a row's number move its codes in the ring (_quant_ring.h); SCALED: whether block sums meet scales, where a
// step has four blocks to decode(). load() takes the bytes of a step for rows g and g + 8 from memory or from the
// ring, multiply() adds its products. Widths are whole units.
template <int F>
struct Weight;

template <>
struct Weight<Q8_0> {
  static constexpr int FORMAT = Q8_0, UNIT = 128, CODES = 128, SCALES = 8, SUPERS = 0, PIECE = 8, SWIZZLE = 3;
  static constexpr int LANE_CODES = 8, LANE_SCALES = 0, LANE_COLUMNS = 8;
  static constexpr bool SCALED = true;
  uint2 q[2][4], s[2];
  // Bytes 128 + q, which are (128 + q) 2^-133 as bfloat16, as q / 64.
  static __device__ __forceinline__ u32 sixty_fourths(u32 p) { return fma2(p, 0x7f007f00u, 0xc000c000u); }
  template <class From>
  __device__ __forceinline__ void load(const From& from, int unit) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < 4; i++) q[r][i] = from.codes8(r, 32 * i);
      s[r] = from.scales8(r);
    }
  }
  __device__ __forceinline__ void decode(u32 (&a)[2][4], float (&scale)[2], int i, int t, const uint4*) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 first = q[r][i].x ^ 0x80808080u, second = q[r][i].y ^ 0x80808080u;
      a[r][0] = sixty_fourths(__byte_perm(first, 0, 0x4140));
      a[r][1] = sixty_fourths(__byte_perm(first, 0, 0x4342));
      a[r][2] = sixty_fourths(__byte_perm(second, 0, 0x4140));
      a[r][3] = sixty_fourths(__byte_perm(second, 0, 0x4342));
      u32 pair = i < 2 ? s[r].x : s[r].y;
      scale[r] = 64.f * half_bits(i & 1 ? pair >> 16 : pair & 0xffff);
    }
  }
  template <int NT, class X>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], X& x, int t, const uint4* grid) {
    scaled_blocks(acc, *this, x, t, grid);
  }
};

// e4m3 codes; one power-of-two scale for each 32x32 tile, so the 16 rows of a warp share it.
template <>
struct Weight<FP8> {
  static constexpr int FORMAT = FP8, UNIT = 128, CODES = 128, SCALES = 4, SUPERS = 0, PIECE = 4, SWIZZLE = 3;
  static constexpr int LANE_CODES = 8, LANE_SCALES = 0, LANE_COLUMNS = 8;
  static constexpr bool SCALED = true;
  uint2 q[2][4];
  u32 s;
  template <class From>
  __device__ __forceinline__ void load(const From& from, int unit) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) q[r][i] = from.codes8(r, 32 * i);
    s = from.scales4(0, 0);
  }
  // sign, exponent and mantissa moved to bfloat16's places; 2^120 makes up for the exponent bias.
  static __device__ __forceinline__ u32 value(u32 p) {
    return mul2(((p & 0x00800080u) << 8) | ((p & 0x007f007fu) << 4), 0x7b807b80u);
  }
  __device__ __forceinline__ void decode(u32 (&a)[2][4], float (&scale)[2], int i, int t, const uint4*) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      a[r][0] = value(__byte_perm(q[r][i].x, 0, 0x4140));
      a[r][1] = value(__byte_perm(q[r][i].x, 0, 0x4342));
      a[r][2] = value(__byte_perm(q[r][i].y, 0, 0x4140));
      a[r][3] = value(__byte_perm(q[r][i].y, 0, 0x4342));
    }
    scale[0] = scale[1] = exp2f((float)((s >> (8 * i)) & 255) - 127.f);
  }
  template <int NT, class X>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], X& x, int t, const uint4* grid) {
    scaled_blocks(acc, *this, x, t, grid);
  }
};

template <>
struct Weight<Q4_K> {
  static constexpr int FORMAT = Q4_K, UNIT = 256, CODES = 128, SCALES = 12, SUPERS = 4, PIECE = 4, SWIZZLE = 3;
  static constexpr int LANE_CODES = 8, LANE_SCALES = 0, LANE_COLUMNS = 8;
  uint2 q[2][4];
  u32 s[2][3];
  u32 super[2];
  template <class From>
  __device__ __forceinline__ void load(const From& from, int unit) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < 4; i++) q[r][i] = from.codes8(r, 32 * i);
#pragma unroll
      for (int i = 0; i < 3; i++) s[r][i] = from.scales4(r, 4 * i);
      super[r] = from.super(r);
    }
  }
  template <int NT, class X>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], X& x, int t, const uint4*) {
    u32 scale[2][2], low[2][2];  // 6-bit scales and minima of the 8 sub-blocks, one a byte
    float d[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      scale[r][0] = s[r][0] & 0x3f3f3f3fu;
      low[r][0] = s[r][1] & 0x3f3f3f3fu;
      scale[r][1] = (s[r][2] & 0x0f0f0f0fu) | ((s[r][0] >> 2) & 0x30303030u);
      low[r][1] = ((s[r][2] >> 4) & 0x0f0f0f0fu) | ((s[r][1] >> 2) & 0x30303030u);
      d[r] = half_bits(super[r] & 0xffff);
    }
    float minima[NT][4];
    clear(minima);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32 a[2][4], m[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 lo = (q[r][j / 2].x >> (4 * (j & 1))) & 0x0f0f0f0fu, hi = (q[r][j / 2].y >> (4 * (j & 1))) & 0x0f0f0f0fu;
        a[r][0] = low_pair(lo);
        a[r][1] = high_pair(lo);
        a[r][2] = low_pair(hi);
        a[r][3] = high_pair(hi);
        m[r] = spread(low[r][j / 4], j & 3);
      }
      float s0 = d[0] * (float)((scale[0][j / 4] >> (8 * (j & 3))) & 255);
      float s1 = d[1] * (float)((scale[1][j / 4] >> (8 * (j & 3))) & 255);
#pragma unroll
      for (int i = 0; i < NT; i++) {
        uint4 v = x.octet(i, 32 * j);
        float p[4];
        block32(p, a, v);
        add_scaled(acc[i], p, s0, s1);
        mma(minima[i], m[0], m[1], m[0], m[1], v.x, v.y);
        mma(minima[i], m[0], m[1], m[0], m[1], v.z, v.w);
      }
      x.done(32 * j);
    }
#pragma unroll
    for (int i = 0; i < NT; i++) add_scaled(acc[i], minima[i], -half_bits(super[0] >> 16), -half_bits(super[1] >> 16));
  }
};

// Scale (4 bit) times code (2 bit) is an integer up to 45: folded into A, so d and dmin act once per 256 columns. Codes
// and minima stay where they lie in their byte, as subnormal bfloat16; products carry 2^-13, minima 2^-9, which d and
// dmin make up for.
template <>
struct Weight<Q2_K> {
  static constexpr int FORMAT = Q2_K, UNIT = 256, CODES = 64, SCALES = 16, SUPERS = 4, PIECE = 16, SWIZZLE = 0;
  static constexpr int LANE_CODES = 8, LANE_SCALES = 0, LANE_COLUMNS = 8;
  uint2 q[2][2];
  uint4 s[2];
  u32 super[2];
  template <class From>
  __device__ __forceinline__ void load(const From& from, int unit) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int h = 0; h < 2; h++) q[r][h] = from.codes8(r, 32 * h);
      s[r] = from.scales16(r);
      super[r] = from.super(r);
    }
  }
  template <int NT, class X>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], X& x, int t, const uint4*) {
    float d[2], dmin[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      d[r] = 8192.f * half_bits(super[r] & 0xffff);
      dmin[r] = -512.f * half_bits(super[r] >> 16);
    }
    float p[NT][4], minima[NT][4];
    clear(minima);
    constexpr bool SUMMED = __is_base_of(WithSums, X);
    if constexpr (SUMMED) {
      u32 m[4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 own = 0x0100 + 0x0202 * t;
        m[r] = mul2(0x7b807b80u, __byte_perm(s[r].x, s[r].y, own) & 0x00f000f0u);
        m[2 + r] = mul2(0x7b807b80u, __byte_perm(s[r].z, s[r].w, own) & 0x00f000f0u);
      }
#pragma unroll
      for (int part = 2; part >= 0; part--)
#pragma unroll
        for (int i = 0; i < NT; i++) {
          const uint2 v = x.sums(i, part);
          mma(minima[i], m[0], m[1], m[2], m[3], v.x, v.y);
        }
#pragma unroll
      for (int i = 0; i < NT; i++) add_scaled(acc[i], minima[i], dmin[0], dmin[1]);
    }
    clear(p);
    const u32 own = 0x0101 * (t >> 1);  // the octet lies in sub-block 2 j + t / 2 of 16 columns
    u32 scales[2], lows[2];             // of two blocks, one in each half
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int place = 2 * (j & 3);  // of a code in its byte, which therefore is code 2^(place - 133)
      const u32 mask = 0x00030003u << place;
      u32 a[2][4], m[4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if (j % 2 == 0) {  // scales, 4 bits, as their multiples of 2^(120 - place): 2^(127 - place) more, and less
          const u32 word = j == 0 ? s[r].x : j == 2 ? s[r].y : j == 4 ? s[r].z : s[r].w;
          const u32 both = __byte_perm(word, 0x7c7d7e7f, own + (j & 2 ? 0x7260 : 0x5240));
          scales[r] = sub2(both & 0xff0fff0fu, j & 2 ? 0x7c007d00u : 0x7e007f00u);
          lows[r] = both & 0x00f000f0u;
        }
        const uint2 w = q[r][j / 4];
        if constexpr (!SUMMED) {
          m[r] = mul2_by_half(0x7b807b80u, lows[r], j & 1);
          // The same: a fragment takes four registers, and copies were made anew for its second product.
          m[2 + r] = fma2(0x7b807b80u, half_twice(lows[r], j & 1), 0x80008000u);
        }
        a[r][0] = mul2_by_half(__byte_perm(w.x, 0, 0x4140) & mask, scales[r], j & 1);
        a[r][1] = mul2_by_half(__byte_perm(w.x, 0, 0x4342) & mask, scales[r], j & 1);
        a[r][2] = mul2_by_half(__byte_perm(w.y, 0, 0x4140) & mask, scales[r], j & 1);
        a[r][3] = mul2_by_half(__byte_perm(w.y, 0, 0x4342) & mask, scales[r], j & 1);
      }
#pragma unroll
      for (int i = 0; i < NT; i++) {
        uint4 v = x.octet(i, 32 * j);
        add_block(p[i], a, v);
        if constexpr (!SUMMED) {
          mma(minima[i], m[0], m[1], m[2], m[3], v.x, v.y);
          mma(minima[i], m[0], m[1], m[2], m[3], v.z, v.w);
        }
      }
      x.done(32 * j);
    }
#pragma unroll
    for (int i = 0; i < NT; i++) {
      add_scaled(acc[i], p[i], d[0], d[1]);
      if constexpr (!SUMMED) add_scaled(acc[i], minima[i], dmin[0], dmin[1]);
    }
  }
};

// An octet is one entry of the grid (8 magnitudes as bfloat16 in shared memory) and 7 sign bits with parity.
template <>
struct Weight<IQ2_XXS> {
  static constexpr int FORMAT = IQ2_XXS, UNIT = 128, CODES = 32, SCALES = 0, SUPERS = 0, PIECE = 0, SWIZZLE = 0;
  // a step is half a block of 256
  static constexpr int LANE_CODES = 0, LANE_SCALES = 0, LANE_COLUMNS = 8;
  static constexpr bool SCALED = true;
  uint4 q[2][2];
  u32 d[2];
  template <class From>
  __device__ __forceinline__ void load(const From& from, int unit) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < 2; i++) q[r][i] = from.codes16(r, 16 * i);
      d[r] = from.half(r, unit);
    }
  }
  __device__ __forceinline__ void decode(u32 (&a)[2][4], float (&scale)[2], int j, int t, const uint4* grid) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 index = j & 1 ? q[r][j / 2].z : q[r][j / 2].x, rest = j & 1 ? q[r][j / 2].w : q[r][j / 2].y;
      uint4 v = grid[__byte_perm(index, 0, 0x4440 + t)];
      u32 sign = (rest >> (7 * t)) & 127;
      sign |= __popc(sign) << 7;  // only the lowest bit of the count, the parity, is looked at
      sign = (sign & 0x55) | ((sign & 0xaa) << 15);  // even columns in the low half, odd ones in the high half
      a[r][0] = v.x ^ ((sign << 15) & 0x80008000u);
      a[r][1] = v.y ^ ((sign << 13) & 0x80008000u);
      a[r][2] = v.z ^ ((sign << 11) & 0x80008000u);
      a[r][3] = v.w ^ ((sign << 9) & 0x80008000u);
      scale[r] = half_bits(d[r]) * 0.125f * (float)(2 * (rest >> 28) + 1);
    }
  }
  template <int NT, class X>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], X& x, int t, const uint4* grid) {
    scaled_blocks(acc, *this, x, t, grid);
  }
};

// Lane t owns a whole block of 32; e2m1 times its power of two is exact in bfloat16, so nothing is left for the sums.
template <>
struct Weight<MXFP4> {
  static constexpr int FORMAT = MXFP4, UNIT = 128, CODES = 64, SCALES = 4, SUPERS = 0, PIECE = 4, SWIZZLE = 0;
  static constexpr int LANE_CODES = 16, LANE_SCALES = 1, LANE_COLUMNS = 32;
  static constexpr bool SCALED = false;
  uint4 q[2];
  u32 s[2];
  template <class From>
  __device__ __forceinline__ void load(const From& from, int unit) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      q[r] = from.codes16(r, 0);
      s[r] = from.scale1(r);
    }
  }
  // Four nibbles of w from bit 0 on, as two bfloat16 pairs. High and low bytes come from byte tables.
  static __device__ __forceinline__ void values(u32& first, u32& second, u32 w, u32 power) {
    u32 select = w & 0x7777u;
    u32 high = __byte_perm(0x3f3f3f00u, 0x40404040u, select), low = __byte_perm(0xc0800000u, 0xc0804000u, select);
    u32 even = w << 4;  // signs of nibbles 0, 2 and, in w itself, of 1, 3: the tops of bytes 0, 1
    first = mul2(__byte_perm(low, high, 0x5140) ^ (__byte_perm(even, w, 0x4000) & 0x80008000u), power);
    second = mul2(__byte_perm(low, high, 0x7362) ^ (__byte_perm(even, w, 0x5010) & 0x80008000u), power);
  }
  __device__ __forceinline__ void decode(u32 (&a)[2][4], float (&)[2], int o, int t, const uint4*) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 bits = s[r] ? s[r] << 7 : 0x40;  // 2^-127 is a subnormal bfloat16
      u32 power = bits | (bits << 16), w = o == 0 ? q[r].x : o == 1 ? q[r].y : o == 2 ? q[r].z : q[r].w;
      values(a[r][0], a[r][1], w, power);
      values(a[r][2], a[r][3], w >> 16, power);
    }
  }
  template <int NT, class X>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], X& x, int t, const uint4* grid) {
#pragma unroll
    for (int o = 0; o < 4; o++) {
      u32 a[2][4];
      float none[2];
      decode(a, none, o, t, grid);
#pragma unroll
      for (int i = 0; i < NT; i++) add_block(acc[i], a, x.octet(i, 8 * o));
      x.done(8 * o);
    }
  }
};

}  // namespace ds4
