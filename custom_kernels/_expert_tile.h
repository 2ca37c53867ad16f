// Many rows of an expert: 8 warps of 16 weight rows each share its activation rows, which lie in shared memory a unit at
// a time; behind `_quant_tile.h` and `_quant_ring.h`. Each warp decodes its weights once for 8 NT rows, by multiply() as
// for few rows; they come through a ring of its own. (Reads ahead in registers were moved to others as soon as they were
// asked for, so each step waited for its weights: docs/log.md.)

namespace ds4 {

// What a block has in shared memory: two stages of activations, the sums of one, and a ring for each warp; or, with
// tables of IQ2_XXS, no sums, rings of two steps, and at a multiple of their size behind them the tables.
template <int F, int NT, int MS, bool TABLES>
struct ExpertMemory {
  static constexpr int RING_BYTES = TABLES ? 2 * MS * Slot<Weight<IQ2_XXS>>::BYTES : MS * RING;
  static_assert(!TABLES || 2 * 8 * NT * 256 + 8 * RING_BYTES <= Iq2Tables::BYTES - 4096, "in front of the tables");
  uint4* stages;
  bf16* sums;
  u32 ring;
  unsigned char* tables;
  __device__ __forceinline__ explicit ExpertMemory(void* start)
      : stages((uint4*)start), sums((bf16*)(stages + 2 * 8 * NT * (Weight<F>::UNIT / 8))) {
    const u32 rings = shared_address(sums + (TABLES ? 0 : 8 * NT * ColumnSums::STEP));
    ring = rings + threadIdx.x / 32 * RING_BYTES;
    tables = (unsigned char*)start + (-shared_address(start) & (Iq2Tables::BYTES - 1));
  }
};

// Fragments of A and scales of block i of a step, as decode() makes them, but by way of the tables.
__device__ __forceinline__ void decode_by_tables(
    const Weight<IQ2_XXS>& w, u32 (&a)[2][4], float (&scale)[2], int i, const Iq2Tables& tables) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const uint4 q = w.q[r][i / 2];
    const u32 rest = i & 1 ? q.w : q.y;
    tables.values(a[r], tables.look_up(i & 1 ? q.z : q.x, rest));
    scale[r] = Iq2Tables::scale(half_bits(w.d[r]), rest);
  }
}

// Octets of the columns in shared memory, without their sums and with them.
template <int OCTETS>
struct PlainRows : SharedRows<OCTETS> {
  __device__ __forceinline__ PlainRows(const SharedRows<OCTETS>& rows, const bf16*) : SharedRows<OCTETS>(rows) {}
};
template <int OCTETS>
struct SummedRows : SharedRows<OCTETS>, WithSums {
  const bf16* of_row;
  __device__ __forceinline__ SummedRows(const SharedRows<OCTETS>& rows, const bf16* sums)
      : SharedRows<OCTETS>(rows), of_row(sums) {}
  __device__ __forceinline__ uint2 sums(int i, int part) const {
    return *(const uint2*)(of_row + 8 * i * ColumnSums::STEP + 16 * part);
  }
};

// Sums of 16 weight rows of each of MS matrices, rows base + 16 tile .., with the activation rows that `row_of_column`
// names. They have the bits of the few rows' kernels: units s, s + S, .. for each s below S and the sums added to zero in
// turn; S = 0: units below the middle, then the rest, both sums added.
template <int F, int NT, int MS, int S, bool TABLES, class Names>
__device__ __forceinline__ void expert_product(
    float (&sum)[MS][NT][4], const ExpertMemory<F, NT, MS, TABLES>& memory, const Planes (&w)[MS], size_t base, int tile,
    int N, int K, const bf16* x, Names row_of_column, const uint4* grid, const Iq2Tables& tables) {
  typedef Weight<F> W;
  constexpr bool HALVES = S == 0, SUMMED = F == Q2_K && HALVES;  // as in the few rows' kernels
  constexpr int OCTETS = W::UNIT / 8, COPIES = 8 * NT * OCTETS / 256, RUNS = HALVES ? 2 : S;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int units = K / W::UNIT, half = (units + 1) / 2;
  auto run_of = [&](int i) {
    return HALVES ? Run{base, tile, N, K, i ? half : 0, 1, i ? units : half} : Run{base, tile, N, K, i, S, units};
  };
  int opened = 0;
  Stream<W, MS, HALVES ? 1 : S, ExpertMemory<F, NT, MS, TABLES>::RING_BYTES> stream(memory.ring);
  auto open = [&] {
    if (opened == RUNS) return false;
    stream.open(w, run_of(opened++));
    return true;
  };
  const int octet = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
  const bf16* sources[COPIES];
#pragma unroll
  for (int i = 0; i < COPIES; i++) sources[i] = x + row_of_column(row + 256 / OCTETS * i) * K + 8 * octet;
  auto copy = [&](int step, int unit) {
    uint4* const stage = memory.stages + (step & 1) * 8 * NT * OCTETS;
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
  copy(0, 0);
  stream.fill(open);
#pragma unroll 1
  for (int step = 0, unit = 0; step < units; step++) {
    const int next = after(unit);
    wait_for_copies();  // sent a step ago at the latest
    __syncthreads();
    W now[MS];
#pragma unroll
    for (int m = 0; m < MS; m++) stream.load(now[m], m, stream.scales_of_lane(w, run_of(0), m, unit), unit);
    if (step + 1 < units) copy(step + 1, next);
    __syncwarp();
    stream.send(open);
    const uint4* const stage = memory.stages + (step & 1) * 8 * NT * OCTETS;
    const SharedRows<OCTETS> columns = {stage + g * OCTETS, g, t * (W::LANE_COLUMNS / 8)};
    if constexpr (W::UNIT == 128) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 a[MS][2][4];
        float scale[MS][2];
#pragma unroll
        for (int m = 0; m < MS; m++) {
          if constexpr (TABLES)
            decode_by_tables(now[m], a[m], scale[m], i, tables);
          else
            now[m].decode(a[m], scale[m], i, t, grid);
        }
        block_products<W>(acc, a, scale, columns, i);
      }
    } else {
      const typename Either<SUMMED, SummedRows<OCTETS>, PlainRows<OCTETS>>::type rows(
          columns, memory.sums + g * ColumnSums::STEP + 4 * t);
      if (SUMMED) {
        for (int e = threadIdx.x; e < 8 * NT * 16; e += 256) {
          const int n = e / 16, sub = e % 16;
          const uint4* const from = stage + n * OCTETS;
          ColumnSums::put(
              memory.sums + n * ColumnSums::STEP, sub, from[tile_place(n, 2 * sub)], from[tile_place(n, 2 * sub + 1)]);
        }
        __syncthreads();
      }
#pragma unroll
      for (int m = 0; m < MS; m++) {
        now[m].multiply(acc[m], rows, t, grid);
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
  }
  __syncthreads();  // the stages may be filled anew
}

}  // namespace ds4
