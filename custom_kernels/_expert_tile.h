// Many rows of an expert: 8 warps of 16 weight rows each share its activation rows, which lie in shared memory a unit at
// a time; behind `_quant_tile.h`. Each warp decodes its weights once for 8 NT rows, by multiply() as for few rows.

namespace ds4 {

// Sums of 16 weight rows of each of MS matrices, rows base + 16 tile .., with the activation rows that `row_of_column`
// names. They have the bits of the few rows' kernels: units s, s + S, .. for each s below S and the sums added to zero in
// turn; S = 0: units below the middle, then the rest, both sums added.
template <int F, int NT, int MS, int S, class Names>
__device__ __forceinline__ void expert_product(
    float (&sum)[MS][NT][4], uint4* stages, const Planes (&w)[MS], size_t base, int tile, int N, int K, const bf16* x,
    Names row_of_column, const uint4* grid) {
  typedef Weight<F> W;
  constexpr bool HALVES = S == 0;
  constexpr int OCTETS = W::UNIT / 8, COPIES = 8 * NT * OCTETS / 256;
  constexpr int D = MS == 1 ? 2 : 1;  // units in flight; the other matrix covers the wait of one
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int units = K / W::UNIT, half = (units + 1) / 2;
  Planes rows[MS][2];
#pragma unroll
  for (int m = 0; m < MS; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) rows[m][r] = row_of<F>(w[m], base + min(16 * tile + 8 * r + g, N - 1), K);
  auto load = [&](W& to, int m, int unit) {
    InMemory from;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      from.at[r].codes = rows[m][r].codes + unit * W::CODES + t * W::LANE_CODES;
      from.at[r].scales = rows[m][r].scales + unit * W::SCALES + t * W::LANE_SCALES;
      from.at[r].supers = rows[m][r].supers + unit * W::SUPERS;
    }
    to.load(from, unit);
  };
  const int octet = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
  const bf16* sources[COPIES];
#pragma unroll
  for (int i = 0; i < COPIES; i++) sources[i] = x + row_of_column(row + 256 / OCTETS * i) * K + 8 * octet;
  auto copy = [&](int step, int unit) {
    uint4* const stage = stages + (step & 1) * 8 * NT * OCTETS;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      const int n = row + 256 / OCTETS * i;
      copy16_async(stage + n * OCTETS + tile_place(n, octet), sources[i] + unit * W::UNIT);
    }
  };
  auto after = [&](int unit) { return HALVES ? unit + 1 : unit + S < units ? unit + S : unit % max(S, 1) + 1; };

  float acc[MS][NT][4];
#pragma unroll
  for (int m = 0; m < MS; m++) {
    clear(acc[m]);
#pragma unroll
    for (int i = 0; i < NT; i++)  // -0 + v is v, whatever zero
      sum[m][i][0] = sum[m][i][1] = sum[m][i][2] = sum[m][i][3] = HALVES ? -0.f : 0.f;
  }
  W ahead[D][MS];
  int unit = 0, later = 0;
  copy(0, 0);
#pragma unroll
  for (int d = 0; d < D; d++, later = after(later))
#pragma unroll
    for (int m = 0; m < MS; m++)
      if (d < units) load(ahead[d][m], m, later);
  for (int begin = 0; begin < units; begin += D) {
#pragma unroll
    for (int d = 0; d < D; d++) {
      const int step = begin + d, next = after(unit);
      if (step >= units) break;
      wait_for_copies();
      __syncthreads();
      if (step + 1 < units) copy(step + 1, next);
      const SharedRows<OCTETS> columns = {
          stages + ((step & 1) * 8 * NT + g) * OCTETS, g, t * (W::LANE_COLUMNS / 8)};
      if constexpr (W::UNIT == 128) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 a[MS][2][4];
          float scale[MS][2];
#pragma unroll
          for (int m = 0; m < MS; m++) {
            ahead[d][m].decode(a[m], scale[m], i, t, grid);
            if (i == 3 && step + D < units) load(ahead[d][m], m, later);
          }
          block_products<W>(acc, a, scale, columns, i);
        }
      } else {
#pragma unroll
        for (int m = 0; m < MS; m++) {
          ahead[d][m].multiply(acc[m], columns, t, grid);
          if (step + D < units) load(ahead[d][m], m, later);
          __syncwarp();  // columns are read again for the next matrix, not kept in registers
        }
      }
      if (HALVES ? next == half || next == units : unit + S >= units) {
#pragma unroll
        for (int m = 0; m < MS; m++) {
#pragma unroll
          for (int i = 0; i < NT; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) sum[m][i][c] += acc[m][i][c];
          clear(acc[m]);
        }
      }
      unit = next;
      later = after(later);
    }
  }
  __syncthreads();  // the stages may be filled anew
}

}  // namespace ds4
