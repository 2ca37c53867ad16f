"""CUDA body of a quantized product of up to 8 rows on a card whose blocks may have most of a multiprocessor's shared
memory; `_quant_cuda.py` launches it, and where it has no room or does not pay the body for many rows.

There a block lives for one tile, so that its latencies lie one behind another: parameters, addresses, first weights,
sums. And L1 answers in order: a read of x that a warp issues behind its copies of weights waits for all of them. Here a
multiprocessor has one block, which holds x in shared memory, and whose rings run on from tile to tile.

Estimate for 32768 x 1280, Q8_0, 132 multiprocessors: 44.6 MB, 10.9 us at 4.1 TB/s. 16 warps with four steps each have
139 KB on their way, of which 25 KB would cover the latency. A multiprocessor has 155 steps of 194 instructions, and 250
to begin and 100 a tile for each warp: 9,000 cycles of a scheduler, less than half of that time.
"""

from __future__ import annotations

# Bytes in a ring of a step of 16 rows, as `Slot` in `_quant_ring.h` counts them.
STEP_BYTES = {"Q8_0": 2176, "MXFP4": 1088, "FP8": 2064, "Q4_K": 2304, "Q2_K": 1536, "IQ2_XXS": 576}
SUMS_BYTES = 1024  # of a warp: of a tile, twice
GRID_BYTES = 4096  # of IQ2_XXS
PADDING = 64  # bytes behind a row of x: neighbours lie in different banks

HEADER = """
namespace ds4 {

// A lane's octets of a step for one row of x a column, in shared memory. They are read before the wait for weights; or,
// eight of them, as they are used, since registers would not last. A column without a row of its own holds any values.
template <class W>
struct SharedRow {
  static constexpr int APART = W::LANE_COLUMNS == 8 ? 32 : 8, OCTETS = W::UNIT / 32;
  static constexpr bool HELD = OCTETS <= 4;
  uint4 v[HELD ? OCTETS : 1];
  u32 row, at;  // the addresses of the lane's first octet, and of that of a step
  bool real;
  __device__ __forceinline__ SharedRow(u32 row, bool real) : row(row), at(row), real(real) {
#pragma unroll
    for (uint4& octet : v) octet = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void read(int unit) {
    at = row + 2 * W::UNIT * unit;
    if (HELD) {
#pragma unroll
      for (int i = 0; i < OCTETS; i++) read16_shared_if(real, v[HELD ? i : 0], at, 2 * APART * i);
    }
  }
  __device__ __forceinline__ uint4 octet(int, int column) {
    if (!HELD) read16_shared_if(real, v[0], at, 2 * column);
    return v[HELD ? column / APART : 0];
  }
  __device__ __forceinline__ void done(int) const {}
};

}  // namespace ds4
"""


def steps(format: str, rows: int, width: int, warps: int, room: int) -> int:
    """How many steps, four at most, each ring of so many warps may have in `room` bytes of shared memory, beside x."""
    room -= rows * (2 * width + PADDING) + GRID_BYTES * (format == "IQ2_XXS")
    return min((room // warps - SUMS_BYTES) // STEP_BYTES[format], 4)


SOURCE = """
    // TEAMS teams of S warps, one block a multiprocessor; blockIdx.y: which of the G groups of weight rows, for columns
    // i K .. of x [.., G K], up to 8 rows M. The teams of the group's blocks go round its tiles of 16 weight rows; a
    // team's warps take units of the width in turn. Shared memory: rings of STEPS steps, sums, the grid, x.
    using namespace ds4;
    typedef Weight<F> W;
    constexpr int WARPS = S * TEAMS, BYTES = STEPS * STEP_BYTES;
    static_assert(STEP_BYTES == Slot<W>::BYTES, "");
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int team = warp / S, member = warp % S;
    unsigned char* const rings = (unsigned char*)dynamic_shared();
    uint4* const grid = (uint4*)(rings + WARPS * (BYTES + SUMS_BYTES));
    const int units = codes_shape[1] * (int)sizeof(*codes) / W::CODES, K = units * W::UNIT;
    const int N = codes_shape[0], R = N / G, tiles = (R + 15) / 16, base = G > 1 ? blockIdx.y * R : 0;
    const int first = blockIdx.x + gridDim.x * team, stride = gridDim.x * TEAMS;
    const Planes w[1] = {{(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers}};
    auto run_of = [&](int tile) { return Run{(size_t)base, tile, R, K, member, S, units}; };
    Stream<W, 1, S, BYTES> stream(opaque(shared_address(rings) + warp * BYTES));
    int sent = first - stride;
    auto next = [&] {
      if (tiles - sent <= stride) return false;
      sent += stride;
      stream.open(w, run_of(sent));
      return true;
    };
    int M = 0;
    const int pitch = 2 * K + PADDING;
    const u32 rows = shared_address(grid) + (F == IQ2_XXS ? GRID_BYTES : 0);
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
      stream.send(next);
      if (step > 0) continue;
      // x behind the first weights: no multiplication begins without both.
      const bf16* row = (const bf16*)x + (G > 1 ? (size_t)blockIdx.y * K : 0);
      M = rows_of(x_shape, x_ndim);
#pragma unroll 1
      for (int n = 0; n < M; n++, row += (size_t)G * K)
#pragma unroll 1
        for (int o = threadIdx.x; o < K / 8; o += 32 * WARPS) copy_async<16>(rows + n * pitch + 16 * o, row + 8 * o);
      commit_copies();
    }
    if (F == IQ2_XXS) stage_grid(grid);
    wait_for_copies_but<STEPS - 1>();
    __syncthreads();
    const u32 row = opaque(rows + min(g, M - 1) * pitch + 2 * W::LANE_COLUMNS * t), real = opaque((u32)(g < M));
    // Two sets of sums, used in turn, so that a tile needs one barrier.
    float* part = (float*)(rings + WARPS * BYTES) + team * (2 * S * 128);
    int other = S * 128;
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += stride) {
      SharedRow<W> columns(row, real);  // anew, so that its registers are free behind the last step
      float acc[1][4];
      clear(acc);
      stream.multiply_run(w, run_of(tile), next, [&](int unit) { columns.read(unit); }, [&](W(&now)[1], bool) {
        now[0].multiply(acc, columns, t, grid);
      });
      for (int c = 0; c < 4 && S > 1; c++) part[128 * member + 32 * c + lane] = acc[0][c];
      if (S > 4 && member >= 4) {  // without an output
        sync_team(team, 32 * S);
      } else {
        if (S > 1) sync_team(team, 32 * S);
#pragma unroll
        for (int c = member; c < 4; c += S) {
          const int n = 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1), column = base + r;
          if (n >= M || r >= R) continue;
          float sum = S > 1 ? 0.f : acc[0][c & 3];
          for (int s = 0; s < S && S > 1; s++) sum += part[128 * s + 32 * c + lane];
          y[(size_t)n * N + column] = T(sum);
        }
      }
      part += other;
      other = -other;
    }
"""
for _name, _value in (("SUMS_BYTES", SUMS_BYTES), ("GRID_BYTES", GRID_BYTES), ("PADDING", PADDING)):
    SOURCE = SOURCE.replace(_name, str(_value))
