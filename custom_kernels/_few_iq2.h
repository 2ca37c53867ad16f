// Gate and up of routed experts in IQ2_XXS for few rows, in steps of a whole block of 256 columns; behind `_few_mma.h`
// and `_iq2_tables.h`.

namespace ds4 {

// A step has two units of 128 columns, each of another part of the width. A slot of the ring has 64 bytes of codes of
// each of 16 rows of gate, then of up, those of every other two rows with their halves exchanged, so that four rows are
// in different banks; then four bytes a row, of which two are its scale (as HalfCopies has them). What a step begins
// with is read in the one before: codes, what the tables have of them, columns of x.
template <int S, int BYTES>
struct GateUp<IQ2_XXS, S, BYTES> {
  static constexpr int PARTS = 2, UNIT = 256, LANE_COLUMNS = 8, TABLES = Iq2Tables::BYTES;
  static constexpr int STEP = S / PARTS, SCALES = 2 * 16 * 64, SIZE = SCALES + 2 * 16 * 4;
  static constexpr int HELD = 2;  // octets of x, each read two blocks ahead
  static_assert(BYTES == 2 * SIZE && SIZE % 64 == 0 && STEP % 2 == 0, "two slots; scales of a run in one half");
  typedef Iq2Tables::Words Words;

  // Of two blocks of 32 columns: index and rest of each, of gate and up, for rows g and g + 8.
  struct Codes {
    uint4 q[2][2];
    __device__ __forceinline__ u32 index(int m, int r, int j) const { return j & 1 ? q[m][r].z : q[m][r].x; }
    __device__ __forceinline__ u32 rest(int m, int r, int j) const { return j & 1 ? q[m][r].w : q[m][r].y; }
  };
  // Of one block.
  struct Found {
    Iq2Tables::Found of[2][2];
  };
  Iq2Tables tables;
  // The block that is sent next, of `left` in its run: this lane's first piece of gate, how far its second lies behind
  // it, and the four bytes with the lane's scale.
  const unsigned char *piece, *scale;
  int second, left;
  u32 ring, at;                        // at: of the slot that is read next, and then filled anew
  u32 to_piece, to_scale, from_codes;  // where in a slot the lane writes, and where its rows' codes lie
  Codes codes;                         // of the next two blocks
  Found found;                         // of the next one

  __device__ __forceinline__ GateUp(u32 ring, const unsigned char* tables)
      : tables(tables), piece(nullptr), scale(nullptr), second(0), left(0), ring(ring), at(0) {
    const u32 lane = threadIdx.x & 31, moved = lane * 4 & 32;
    to_piece = opaque(ring + ((lane * 16) ^ moved));
    to_scale = opaque(ring + SCALES + 4 * lane);
    from_codes = opaque(ring + lane / 4 * 64 + moved);
  }
  __device__ __forceinline__ void open(const Planes (&w)[2], const Run& run) {
    const int lane = threadIdx.x & 31, last = run.N - 1 - 16 * run.tile, row = min(lane / 4, last);
    const RowBytes bytes = row_bytes<IQ2_XXS>(run.K);
    const size_t base = run.base + 16 * run.tile;
    piece = w[0].codes + (base + row) * bytes.codes + run.first * 64 + lane % 4 * 16;
    second = (min(lane / 4 + 8, last) - row) * bytes.codes;
    scale = (lane < 16 ? w[0] : w[1]).scales + (base + min(lane & 15, last)) * bytes.scales + 2 * run.first;
    scale -= (size_t)scale & 2;
    left = (run.end - run.first + STEP - 1) / STEP;
  }
  // Sends the copies of one step on their way, if there is one, and goes on to the other slot.
  template <class Next>
  __device__ __forceinline__ void send(const Planes (&w)[2], Next next) {
    while (left <= 0)
      if (!next()) break;
    if (left > 0) {
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const unsigned char* const from = piece + (m ? w[1].codes - w[0].codes : 0);
        copy_async<16>(to_piece + at + 1024 * m, from);
        copy_async<16>(to_piece + at + 1024 * m + 512, from + second);
      }
      copy_async<4>(to_scale + at, scale);
      piece += 64 * STEP;
      scale += 2 * STEP;
      left--;
    }
    commit_copies();
    at = SIZE - at;
  }
  template <class Next>
  __device__ __forceinline__ void fill(const Planes (&w)[2], Next next) {
#pragma unroll 1
    for (int i = 0; i < 2; i++) send(w, next);
  }
  // Once the tables are there and the ring is filled.
  __device__ __forceinline__ void begin() {
    tables.begin();
    await();
    codes = read(0);
    found = look_up(codes, 0);
  }
  // For the step in the slot at `at`.
  __device__ __forceinline__ void await() const {
    wait_for_copies_but<1>();
    __syncwarp();
  }
  // Blocks 2 quarter and 2 quarter + 1 of that step. After the last step this reads what lies there.
  __device__ __forceinline__ Codes read(int quarter) const {
    const u32 from = ((from_codes + at) ^ (quarter & 2 ? 32 : 0)) + 16 * (quarter & 1);
    Codes c;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) c.q[m][r] = read16_shared(from + 1024 * m + 512 * r);
    return c;
  }
  __device__ __forceinline__ Found look_up(const Codes& c, int j) const {
    Found f;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) f.of[m][r] = tables.look_up(c.index(m, r, j), c.rest(m, r, j));
    return f;
  }
  // sums += scales * (A B) for block j, of gate and up, for rows g and g + 8.
  __device__ __forceinline__ void add_block(
      float (&sums)[2][2], const Found& f, const Codes& c, int j, const float (&d)[2][2], const uint4& v) const {
    float p[2][4];
    u32 a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      tables.values(a[m][0], f.of[m][0]);
      tables.values(a[m][1], f.of[m][1]);
      mma_new(p[m], a[m][0][0], a[m][1][0], a[m][0][1], a[m][1][1], v.x, v.y);
    }
#pragma unroll
    for (int m = 0; m < 2; m++) mma(p[m], a[m][0][2], a[m][1][2], a[m][0][3], a[m][1][3], v.z, v.w);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float factor = Iq2Tables::scale(d[m][r], c.rest(m, r, j));
        sums[m][r] = fmaf(factor, p[m][2 * r], sums[m][r]);
      }
  }
  template <class Next>
  __device__ __forceinline__ void multiply(
      float (&sums)[PARTS][2][2], const Planes (&w)[2], const Run& run, Next next, const bf16* x, u32 real) {
    u32 from_scale[2];  // rows g and g + 8 have theirs in the same half
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const u32 g = (threadIdx.x & 31) >> 2;
      const u32 number = (u32)((size_t)w[m].scales >> 1) + ((u32)run.base + g) * (run.K / 256) + run.first;
      from_scale[m] = opaque(ring + SCALES + 64 * m + 4 * g + 2 * (number & 1));
#pragma unroll
      for (int i = 0; i < PARTS; i++) sums[i][m][0] = sums[i][m][1] = 0.f;
    }
    uint4 v[HELD];
    x += run.first * UNIT;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      v[i] = make_uint4(0, 0, 0, 0);
      read16_if(run.first < run.end && real, v[i], x + 32 * i);
    }
#pragma unroll 1
    for (int unit = run.first; unit < run.end; unit += STEP, x += STEP * UNIT) {
      const u32 ahead = unit + STEP < run.end ? real : 0;
      float d[2][2];
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) d[m][r] = half_bits(read2_shared(from_scale[m] + at + 32 * r));
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        // A loop of one turn, which the compiler does not know: it puts off additions to the end of what it sees, and
        // has no registers for so many products.
        do {
#pragma unroll
          for (int quarter = 2 * part; quarter < 2 * part + 2; quarter++) {
            if (quarter == 3) {
              __syncwarp();
              send(w, next);
              await();
            }
            const Codes following = read((quarter + 1) & 3);
#pragma unroll
            for (int j = 2 * quarter; j < 2 * quarter + 2; j++) {
              const Found ready = found;
              found = look_up(j & 1 ? following : codes, j + 1);
              add_block(sums[part], ready, codes, j, d, v[j % HELD]);
              const int far = j + HELD < 8 ? 32 * (j + HELD) : 32 * (j + HELD - 8) + STEP * UNIT;
              read16_if(j + HELD < 8 ? real : ahead, v[j % HELD], x + far);
            }
            codes = following;
          }
        } while (tables.signs == 0);
      }
    }
  }
};

}  // namespace ds4
