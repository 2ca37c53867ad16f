// What kernels for at most 8 rows have beside `_quant_mma.h`. The sums are those of product(), bit for bit.

namespace ds4 {

// The sum of S warps from warp `from` on at element e of a tile, as the launch for one matrix adds it up; a warp's
// sums begin where its ring does.
template <int S>
__device__ __forceinline__ float team_sum(const float* part, int from, int e) {
  if (S == 1) return part[from * (RING / 4) + e];
  float sum = 0.f;
#pragma unroll
  for (int s = 0; s < S; s++) sum += part[(from + s) * (RING / 4) + e];
  return sum;
}

// IQ2_XXS with tables that cost a warp no bank conflicts, for blocks that live long enough to make them. Row i of 256
// bytes: 8 copies of entry i of the grid, 32 of the signs of the seven bits i / 2; a lane reads those in its banks. The
// table lies at a multiple of its size, so a byte permutation makes an address: a byte of the codes in the lane's own.
struct WideIq2 : Weight<IQ2_XXS> {
  static constexpr int TABLES = 65536;  // bytes
  // By all threads; needs a barrier before use.
  static __device__ __forceinline__ void stage(uint4* tables) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) {
      const u32 low = IQ2_WORDS[2 * i], high = IQ2_WORDS[2 * i + 1];
      const uint4 v = make_uint4(low_pair(low), high_pair(low), low_pair(high), high_pair(high));
      u32 s = i / 2;
      s |= (__popc(s) & 1) << 7;
      s = (s & 0x55) | ((s & 0xaa) << 15);  // even columns in the low half, odd ones in the high half
      s = (s << 15 & 0x80008000u) | (s << 12 & 0x40004000u) | (s << 9 & 0x20002000u) | (s << 6 & 0x10001000u);
#pragma unroll
      for (int c = 0; c < 8; c++) {
        uint4* const copies = tables + 16 * i + ((c + i) & 7);  // lanes begin in different banks
        copies[0] = v;
        copies[8] = make_uint4(s, s, s, s);
      }
    }
  }
  struct Reader {
    u32 grid, signs, byte_t, power;
    __device__ __forceinline__ Reader(const uint4* tables, int t) {
      const u32 lane = threadIdx.x & 31, table = shared_address(tables);
      grid = opaque(table + 16 * (lane & 7));
      signs = opaque(table + 128 + 4 * lane);
      byte_t = opaque(0x7604 + (t << 4));
      power = opaque(1u << (25 - 7 * t));
    }
  };
  // Block j of a step: fragments of A and the scales of rows g and g + 8.
  __device__ __forceinline__ void decode(u32 (&a)[2][4], float (&scale)[2], int j, const Reader& reader) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 index = j & 1 ? q[r][j / 2].z : q[r][j / 2].x, rest = j & 1 ? q[r][j / 2].w : q[r][j / 2].y;
      const uint4 v = read16_shared(__byte_perm(index, reader.grid, reader.byte_t));
      const u32 sign = read4_shared(__byte_perm(rest * reader.power, reader.signs, 0x7634));
      a[r][0] = v.x ^ (sign & 0x80008000u);
      a[r][1] = v.y ^ (sign << 1 & 0x80008000u);
      a[r][2] = v.z ^ (sign << 2 & 0x80008000u);
      a[r][3] = v.w ^ (sign << 3 & 0x80008000u);
      // d (2 s + 1) / 8, exact, by way of 2^21 + s / 4: the highest four bits on top of a float whose last bit is 1/4.
      scale[r] = half_bits(d[r]) * (__int_as_float(upper_product(rest, 16, 0x4a000000u)) - 2097151.875f);
    }
  }
};

// Columns that stay until all matrices are done.
template <class X>
struct Kept {
  const X& x;
  __device__ __forceinline__ uint4 octet(int i, int column) const { return x.octet(i, column); }
  __device__ __forceinline__ void done(int) const {}
};

// How few rows multiply a step of gate and of up. WIDE where the block has room for wide tables.
template <int F, bool WIDE>
struct Few : Weight<F> {
  static constexpr int TABLES = 0;
  static __device__ __forceinline__ void stage(uint4*) {}
  struct Reader {
    const uint4* grid;
    int t;
    __device__ __forceinline__ Reader(const uint4* grid, int t) : grid(grid), t(t) {}
  };
  template <class X>
  static __device__ __forceinline__ void multiply_both(
      Few (&w)[2], float (&one)[1][4], float (&two)[1][4], const X& x, const Reader& reader) {
    const Kept<X> kept = {x};
    w[0].multiply(one, kept, reader.t, reader.grid);
    w[1].multiply(two, kept, reader.t, reader.grid);
  }
};
template <>
struct Few<IQ2_XXS, true> : WideIq2 {
  template <class X>
  static __device__ __forceinline__ void multiply_both(
      Few (&w)[2], float (&one)[1][4], float (&two)[1][4], const X& x, const Reader& reader) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint4 v = x.octet(0, 32 * j);
#pragma unroll
      for (int m = 0; m < 2; m++) {
        u32 a[2][4];
        float scale[2], p[4];
        w[m].decode(a, scale, j, reader);
        block32(p, a, v);
        add_scaled(m ? two[0] : one[0], p, scale[0], scale[1]);
      }
    }
  }
};

// product() of two matrices of one format with the same row of x, one step of each after the other.
template <int F>
__device__ __forceinline__ void two_products(
    float (&one)[1][4], float (&two)[1][4], const Planes& w1, const Planes& w2, const Run& run, const Rows<1>& x,
    const uint4* tables, u32 ring) {
  typedef Few<F, false> W;
  const Planes both[2] = {w1, w2};
  const int t = threadIdx.x & 3;
  const typename W::Reader reader(tables, t);
  Stream<W, 2> stream(ring);
  stream.open(both, run);
  stream.fill(NoneNext());
  HeldRow<W> columns(x.p[0] + t * W::LANE_COLUMNS, x.real);
  auto read = [&](int unit) { columns.read(unit * W::UNIT); };
  stream.multiply_run(both, run, NoneNext(), read, [&](W(&now)[2], bool) {
    W::multiply_both(now, one, two, columns, reader);
  });
}

}  // namespace ds4
