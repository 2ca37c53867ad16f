// Many rows: a block of 8 warps multiplies 128 weight rows by 128 activation rows; behind `_quant_formats.h`.
//
// Each warp decodes 16 of the weight rows, a step (unit) ahead, to fragments in shared memory, where each serves two
// warps of 64 activation rows; these are copied there while the unit before is multiplied. A warp multiplies 32 by 64.
//
// Sums have the bits of `product`: there warp s of S takes units s, s + S, .. and the S sums are added in turn. Here
// every warp takes the units in that order, one s after another, and adds up at the end of each.

namespace ds4 {

// Where octet c of a row lies: a quarter of a warp, which reads c = b .. b + 3 (MXFP4: b, b + 4, b + 8, b + 12) of two
// neighbouring rows at once, finds them in different banks.
__device__ __forceinline__ int tile_place(int row, int c) { return c ^ ((c >> 3) & 1) ^ (6 * (row & 1)); }

// Activation rows in shared memory, OCTETS each.
template <int OCTETS>
struct SharedRows {
  const uint4* p;  // of row g
  int g, first;    // the lane's first octet
  __device__ __forceinline__ uint4 octet(int i, int column) const {
    return p[8 * i * OCTETS + tile_place(g, first + column / 8)];
  }
  __device__ __forceinline__ void done(int) const {}
};

// acc += scales * (A B) for block i of a unit, MS tiles of 16 weight rows and NT of 8 columns, each read once.
template <class W, int MS, int NT, class X>
__device__ __forceinline__ void block_products(
    float (&acc)[MS][NT][4], const u32 (&a)[MS][2][4], const float (&scale)[MS][2], const X& x, int i) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const uint4 v = x.octet(n, (W::LANE_COLUMNS == 8 ? 32 : 8) * i);
#pragma unroll
    for (int m = 0; m < MS; m++) {
      if (W::SCALED) {
        float p[4];
        block32(p, a[m], v);
        add_scaled(acc[m][n], p, scale[m][0], scale[m][1]);
      } else {
        add_block(acc[m][n], a[m], v);
      }
    }
  }
}

struct TileStage {  // one unit
  uint4 a[4][8][2][32];   // the registers of A: block, 16 weight rows, mma, lane
  float2 scale[4][8][8];  // of rows g and g + 8
  uint4 x[128][16];       // octets of the activation rows, as SharedRows finds them
};

// acc of warp w: weight rows 32 (w % 4) + 16 r + ..., activation rows 64 (w / 4) + 8 i + ..., as `mma` lays them out.
// `from`: the first weight row; x: column 0 of the first of 128 activation rows, which lie `pitch` apart.
template <int F, int S>
__device__ __forceinline__ void tile_product(
    float (&acc)[2][8][4], TileStage* stages, const Planes& w, int from, int K, const bf16* x, int pitch,
    const uint4* grid) {
  typedef Weight<F> W;
  static_assert(W::UNIT == 128, "");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int units = K / 128;
  Planes mine[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    mine[r] = row_of<F>(w, from + 16 * warp + 8 * r + g, K);
    mine[r].codes += t * W::LANE_CODES;
    mine[r].scales += t * W::LANE_SCALES;
  }
  W ahead;
  auto load = [&](int unit) {
    InMemory from;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      from.at[r].codes = mine[r].codes + unit * W::CODES;
      from.at[r].scales = mine[r].scales + unit * W::SCALES;
    }
    ahead.load(from, unit);
  };
  auto decode = [&](TileStage& stage, int i) {
    u32 a[2][4];
    float scale[2];
    ahead.decode(a, scale, i, t, grid);
#pragma unroll
    for (int h = 0; h < 2; h++)
      stage.a[i][warp][h][lane] = make_uint4(a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1]);
    if (W::SCALED && t == 0) stage.scale[i][warp][g] = make_float2(scale[0], scale[1]);
  };
  // A thread copies octet threadIdx.x % 16 of every 16th row.
  const int octet = threadIdx.x & 15, row = threadIdx.x >> 4;
  const bf16* const source = x + (size_t)row * pitch + 8 * octet;
  auto copy = [&](TileStage& stage, int unit) {
    const bf16* p = source + 128 * unit;
#pragma unroll
    for (int i = 0; i < 8; i++, p += 16 * pitch) copy16_async(&stage.x[row + 16 * i][tile_place(row, octet)], p);
  };

  float sum[S > 1 ? 2 : 1][8][4];
  clear(sum[0]);
  if (S > 1) clear(sum[S > 1]);
  clear(acc[0]);
  clear(acc[1]);
  load(0);
  copy(stages[0], 0);
#pragma unroll
  for (int i = 0; i < 4; i++) decode(stages[0], i);
  for (int step = 0, unit = 0, next; step < units; step++, unit = next) {
    TileStage &now = stages[step & 1], &other = stages[~step & 1];
    next = unit + S < units ? unit + S : unit % S + 1;
    wait_for_copies();
    __syncthreads();
    if (step + 1 < units) {
      copy(other, next);
      load(next);
    }
    const SharedRows<16> columns = {now.x[64 * (warp >> 2) + g], g, t * (W::LANE_COLUMNS / 8)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i >= 2) {  // the loads are there by now; behind the last unit, in vain: a branch would cost registers
        decode(other, 2 * i - 4);
        decode(other, 2 * i - 3);
      }
      u32 a[2][2][4];
      float scale[2][2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int tile = 2 * (warp & 3) + r;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4 v = now.a[i][tile][h][lane];
          a[r][0][2 * h] = v.x, a[r][1][2 * h] = v.y, a[r][0][2 * h + 1] = v.z, a[r][1][2 * h + 1] = v.w;
        }
        const float2 both = now.scale[i][tile][g];
        scale[r][0] = both.x, scale[r][1] = both.y;
      }
      block_products<W>(acc, a, scale, columns, i);
    }
    if (S > 1 && unit + S >= units) {  // the last unit of one of the S sums
#pragma unroll
      for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) sum[S > 1 ? r : 0][n][c] += acc[r][n][c];
        clear(acc[r]);
      }
    }
  }
  if (S > 1) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) acc[r][n][c] = sum[S > 1 ? r : 0][n][c];
  }
}

// Stores a tile, turned round in shared memory so that neighbouring threads store neighbouring values; y: the tile's
// first value, rows N apart.
template <typename T>
__device__ __forceinline__ void store_tile(
    const float (&acc)[2][8][4], T* turned, T* y, int N) {
  constexpr int PITCH = 128 + 8, PIECE = 16 / sizeof(T);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  __syncthreads();  // the last unit has been read
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int n = 64 * (warp >> 2) + 8 * i + 2 * t + (c & 1);
        turned[n * PITCH + 32 * (warp & 3) + 16 * r + g + 8 * (c >> 1)] = T(acc[r][i][c]);
      }
  __syncthreads();
  if (N % PIECE == 0) {  // then every tile starts at a whole piece of 16 bytes
    for (int e = threadIdx.x; e < 128 * 128 / PIECE; e += 256) {
      const int n = e / (128 / PIECE), r = e % (128 / PIECE) * PIECE;
      *(uint4*)(y + (size_t)n * N + r) = *(const uint4*)(turned + n * PITCH + r);
    }
  } else {
    for (int e = threadIdx.x; e < 128 * 128; e += 256) y[(size_t)(e / 128) * N + e % 128] = turned[e / 128 * PITCH + e % 128];
  }
}

}  // namespace ds4
