// What kernels for at most 8 rows have beside `_quant_mma.h`: blocks that stay and go from tile to tile, so that weights
// never stop coming. The sums are those of product(), bit for bit.

namespace ds4 {

// The sum of S warps from warp `from` on at element e of a tile, as the launch for one matrix adds it up.
template <int S>
__device__ __forceinline__ float team_sum(const float* part, int from, int e) {
  if (S == 1) return part[from * 128 + e];
  float sum = 0.f;
#pragma unroll
  for (int s = 0; s < S; s++) sum += part[(from + s) * 128 + e];
  return sum;
}

// Where a tile's share of 128 floats holds weight row i of 16 and column n: register and lane of mma's sums.
__device__ __forceinline__ int element_of(int i, int n) { return 32 * ((n & 1) + 2 * (i / 8)) + 4 * (i % 8) + n / 2; }

// The products of a warp with tiles first, first + stride, .. of `tiles`, units from..end by `step` of each as in
// product(); done(tile, sums) after each. Reads run ahead across tiles. There is a unit for every warp.
template <int F, typename Done>
__device__ __forceinline__ void stream_tiles(
    const Planes& w, int first, int stride, int tiles, int N, int K, const bf16* x, int from, int step, int end,
    const uint4* grid, Done done) {
  typedef Weight<F> W;
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  Planes at[2];
  int read_tile = first, read_unit = from;  // what is fetched next
  auto point = [&] {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Planes row = row_of<F>(w, min(16 * read_tile + g + 8 * r, N - 1), K);
      at[r].codes = row.codes + from * W::CODES + t * W::LANE_CODES;
      at[r].scales = row.scales + from * W::SCALES + t * W::LANE_SCALES;
      at[r].supers = row.supers + from * W::SUPERS;
    }
  };
  auto fetch = [&](W& ahead) {
    if (read_tile >= tiles) return;
    ahead.load(at, read_unit);
    read_unit += step;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      at[r].codes += step * W::CODES;
      at[r].scales += step * W::SCALES;
      at[r].supers += step * W::SUPERS;
    }
    if (read_unit >= end) {
      read_unit = from;
      read_tile += stride;
      if (read_tile < tiles) point();
    }
  };
  if (first < tiles) point();
  W ahead[W::DEPTH];
#pragma unroll
  for (int d = 0; d < W::DEPTH; d++) fetch(ahead[d]);
  Rows<1> columns;
  columns.p[0] = x + from * W::UNIT + t * W::LANE_COLUMNS;
  float sums[1][4];
  clear(sums);
  for (int tile = first, unit = from; tile < tiles;) {
#pragma unroll
    for (int d = 0; d < W::DEPTH; d++) {
      if (tile >= tiles) break;
      ahead[d].multiply(sums, columns, t, grid);
      fetch(ahead[d]);
      columns.p[0] += step * W::UNIT;
      unit += step;
      if (unit < end) continue;
      done(tile, sums[0]);
      clear(sums);
      columns.p[0] -= (unit - from) * W::UNIT;
      unit = from;
      tile += stride;
    }
  }
}

// IQ2_XXS with tables that cost a warp no bank conflicts, for blocks that live long enough to make them: 8 copies of
// the grid and 16 of the 128 patterns of signs, each read by the lanes whose banks it fills.
struct WideIq2 : Weight<IQ2_XXS> {
  static constexpr int GRID = 256 * 8, TABLES = GRID + 128 * 16 / 4;  // in uint4
  // By all threads; needs a barrier before use.
  static __device__ __forceinline__ void stage(uint4* tables) {
    for (int i = threadIdx.x; i < GRID; i += blockDim.x) {
      const u32 low = IQ2_WORDS[2 * (i / 8)], high = IQ2_WORDS[2 * (i / 8) + 1];
      tables[i] = make_uint4(low_pair(low), high_pair(low), low_pair(high), high_pair(high));
    }
    u32* signs = (u32*)(tables + GRID);
    for (int i = threadIdx.x; i < 128 * 16; i += blockDim.x) {
      u32 s = i / 16;
      s |= (__popc(s) & 1) << 7;
      s = (s & 0x55) | ((s & 0xaa) << 15);  // even columns in the low half, odd ones in the high half
      signs[i] = (s << 15 & 0x80008000u) | (s << 12 & 0x40004000u) | (s << 9 & 0x20002000u) | (s << 6 & 0x10001000u);
    }
  }
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4], const Rows<NT>& x, int t, const uint4* tables) {
    const int lane = threadIdx.x & 31;
    const unsigned char* grid = (const unsigned char*)(tables + (lane & 7));
    const unsigned char* signs = (const unsigned char*)(tables + GRID) + 4 * (lane & 15);
    // Turned so that the index of lane t lies at 128 times itself, its signs at 64 times.
    const int turn_index = 25 + 8 * t & 31, turn_signs = 26 + 7 * t & 31;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 a[2][4];
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 index = j & 1 ? q[r][j / 2].z : q[r][j / 2].x, rest = j & 1 ? q[r][j / 2].w : q[r][j / 2].y;
        const uint4 v = *(const uint4*)(grid + (__funnelshift_r(index, index, turn_index) & 0x7f80));
        const u32 sign = *(const u32*)(signs + (__funnelshift_r(rest, rest, turn_signs) & 0x1fc0));
        a[r][0] = v.x ^ (sign & 0x80008000u);
        a[r][1] = v.y ^ (sign << 1 & 0x80008000u);
        a[r][2] = v.z ^ (sign << 2 & 0x80008000u);
        a[r][3] = v.w ^ (sign << 3 & 0x80008000u);
        // d / 8 (2 s + 1), exact, from 16 + s: the four highest bits moved to a float's highest fraction bits.
        const float d = half_bits(this->d[r]);
        scale[r] = fmaf(0.25f * d, __int_as_float((rest >> 9 & 0x00780000u) | 0x41800000u), -3.875f * d);
      }
      scaled_block(acc, a, x, 32 * j, scale[0], scale[1]);
    }
  }
};

// How the experts' gate and up are read by few rows: format, and how many steps of each are in flight.
template <int F>
struct Few : Weight<F> {
  static constexpr int AHEAD = (Weight<F>::SHALLOW + 1) / 2, TABLES = 1;
  static __device__ __forceinline__ void stage(uint4*) {}
};
template <>
struct Few<IQ2_XXS> : WideIq2 {
  static constexpr int AHEAD = 1;
};

// product() of two matrices of one format with the same row of x, one step of each after the other.
template <int F>
__device__ __forceinline__ void two_products(
    float (&one)[1][4], float (&two)[1][4], const Planes& w1, const Planes& w2, size_t base, int tile, int N, int K,
    const bf16* x, int first, int step, int end, const uint4* tables) {
  typedef Few<F> W;
  constexpr int D = W::AHEAD;
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  Planes at[2][2];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Planes row = row_of<F>(m ? w2 : w1, base + min(16 * tile + g + 8 * r, N - 1), K);
      at[m][r].codes = row.codes + first * W::CODES + t * W::LANE_CODES;
      at[m][r].scales = row.scales + first * W::SCALES + t * W::LANE_SCALES;
      at[m][r].supers = row.supers + first * W::SUPERS;
    }
  Rows<1> columns;
  columns.p[0] = x + first * W::UNIT + t * W::LANE_COLUMNS;
  W ahead[D][2];
  auto fetch = [&](int d, int unit) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      ahead[d][m].load(at[m], unit);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        at[m][r].codes += step * W::CODES;
        at[m][r].scales += step * W::SCALES;
        at[m][r].supers += step * W::SUPERS;
      }
    }
  };
#pragma unroll
  for (int d = 0; d < D; d++)
    if (first + d * step < end) fetch(d, first + d * step);
  for (int unit = first; unit < end; unit += D * step) {
#pragma unroll
    for (int d = 0; d < D; d++) {
      const int now = unit + d * step, later = now + D * step;
      if (now >= end) break;
      ahead[d][0].multiply(one, columns, t, tables);
      ahead[d][1].multiply(two, columns, t, tables);
      columns.p[0] += step * W::UNIT;
      if (later < end) fetch(d, later);
    }
  }
}

}  // namespace ds4
