// How a warp reads weights ahead: steps of 16 rows are copied into a ring in shared memory, which takes no registers,
// waits in turn, and goes on from one run of steps to the next; behind `_quant_formats.h`. (Reads into registers shared
// so few scoreboards that a warp waited for the newest of them, and left room for few warps: docs/log.md.)
//
// A step lies in a slot as 16 rows of codes of each matrix, then of scales, then of supers. In the codes, the 32 bytes
// that lanes of four rows read at a time are moved so that they lie in different banks. Of Q2_K it lies as 16 rows of
// all planes, 96 bytes apart: four rows are in different banks, and a lane's addresses differ by constants.

namespace ds4 {

constexpr int RING = DS4_RING;  // bytes of a warp
// The address of a warp's ring in shared memory.
__device__ __forceinline__ u32 ring_of(const void* rings, int warp) { return shared_address(rings) + warp * RING; }

template <class W>
struct Slot {
  static constexpr bool ROWS = W::FORMAT == Q2_K;  // a row's planes lie together, PITCH bytes a row
  static constexpr int PITCH = 96;
  static constexpr int ROW = W::PIECE ? W::SCALES : 4;  // bytes of a row's scales
  static constexpr int CODES = 16 * W::CODES, SCALES = W::FORMAT == FP8 ? 16 : 16 * ROW, SUPERS = 16 * W::SUPERS;
  static constexpr int BYTES = ROWS ? 16 * PITCH : CODES + SCALES + SUPERS;
  static_assert(!ROWS || W::CODES + W::SCALES + W::SUPERS <= PITCH, "");
  // How far rows lie apart in each plane, and where the planes of matrix m of MS begin.
  static constexpr int CODES_ROW = ROWS ? PITCH : W::CODES, SCALES_ROW = ROWS ? PITCH : ROW;
  static constexpr int SUPERS_ROW = ROWS ? PITCH : W::SUPERS;
  static __device__ __forceinline__ constexpr int codes_at(int m) { return m * (ROWS ? BYTES : CODES); }
  static __device__ __forceinline__ constexpr int scales_at(int m, int MS) {
    return ROWS ? m * BYTES + W::CODES : MS * CODES + m * SCALES;
  }
  static __device__ __forceinline__ constexpr int supers_at(int m, int MS) {
    return ROWS ? m * BYTES + W::CODES + W::SCALES : MS * (CODES + SCALES) + m * SUPERS;
  }
  static __device__ __forceinline__ int moved(int row) { return (row & W::SWIZZLE) * (W::CODES / 4); }
};

// Copies BYTES of each of ROWS rows a step, in pieces that the lanes take in turn, to rows PITCH apart.
template <int BYTES, int PIECE, int ROWS, int PITCH, class Place>
struct PlaneCopies {
  static constexpr int PIECES = BYTES / PIECE, ALL = ROWS * PIECES, EACH = (ALL + 31) / 32;
  static_assert(PITCH == BYTES || 32 % PIECES == 0, "");
  static constexpr int APART = PITCH == BYTES ? 32 * PIECE : 32 / PIECES * PITCH;  // a lane's pieces, in the ring
  const unsigned char* from;  // of this lane's first piece, in unit 0
  int after[EACH];            // how far the others lie behind it
  // The lane's first; where there are too few, lanes repeat them, which costs less than a branch.
  static __device__ __forceinline__ int piece() { return (threadIdx.x & 31) % (ALL < 32 ? ALL : 32); }
  // plane: of row 0, `stride` bytes a row, rows past `last` repeat it.
  __device__ __forceinline__ void begin(const unsigned char* plane, int stride, int last) {
    int at[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int q = piece() + 32 * i;
      at[i] = min(q / PIECES, last) * stride + q % PIECES * PIECE;
      after[i] = at[i] - at[0];
    }
    from = plane + at[0];
  }
  __device__ __forceinline__ void copy(u32 to, int unit) const {
    const unsigned char* const first = from + unit * BYTES;
    // Pieces lie one behind another, except between rows; rows 32 pieces apart are moved alike.
    const u32 at = to + piece() / PIECES * PITCH + ((piece() % PIECES * PIECE) ^ Place::moved(piece() / PIECES));
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (ALL < 32 || piece() + 32 * i < ALL) copy_async<PIECE>(at + APART * i, i == 0 ? first : first + after[i]);
  }
};
struct InOrder {
  static __device__ __forceinline__ int moved(int) { return 0; }
};
struct NoCopies {
  __device__ __forceinline__ void begin(const unsigned char*, int, int) {}
  __device__ __forceinline__ void begin(int, const unsigned char*, int, int, int) {}
  __device__ __forceinline__ void copy(u32, int) const {}
};
template <bool CONDITION, class A, class B>
struct Either { typedef A type; };
template <class A, class B>
struct Either<false, A, B> { typedef B type; };

// IQ2_XXS has two bytes of scales for two steps, less than a copy: four bytes at a multiple of four are copied, of
// which they are one half. (The other may lie outside of the plane, but not outside of its page.) Lanes are the rows of
// one matrix, then of another. STEP: as Stream has it.
template <class W, int MS, int STEP>
struct HalfCopies {
  // Whether all copies of a run hold the same half.
  static constexpr bool SAME_HALF = W::FORMAT == IQ2_XXS && STEP != 0 && STEP % 4 == 0;
  const unsigned char* from;  // of this lane's row; SAME_HALF: behind it are as many bytes as units
  __device__ __forceinline__ void begin(int m, const unsigned char* plane, int stride, int last, int first) {
    const int lane = threadIdx.x & 31;
    if (lane / 16 != m) return;
    from = plane + min(lane & 15, last) * stride;
    if (SAME_HALF) from = whole(first) - first;
  }
  __device__ __forceinline__ const unsigned char* whole(int unit) const {
    const unsigned char* const p = from + unit / 2 * 2;
    return p - ((size_t)p & 2);
  }
  __device__ __forceinline__ void copy(u32 to, int unit) const {
    const int lane = threadIdx.x & 31;
    if (lane < 16 * MS) copy_async<4>(to + 4 * lane, SAME_HALF ? from + unit : whole(unit));
  }
};

// The bytes of a step in its slot; `half`: which half of four bytes is the scale of IQ2_XXS, by its address.
template <class W>
struct InRing {
  u32 codes, lane, scales, supers;
  // Where the lane's scales lie.
  static __device__ __forceinline__ u32 scales_of_lane(int half) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    if (W::FORMAT == FP8) return 0;
    return g * Slot<W>::SCALES_ROW + (W::FORMAT == IQ2_XXS ? 2 * half : t * W::LANE_SCALES);
  }
  __device__ __forceinline__ InRing(u32 codes, u32 scales, u32 supers) : codes(codes), scales(scales) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    lane = g * Slot<W>::CODES_ROW + ((t * W::LANE_CODES) ^ Slot<W>::moved(g));
    this->supers = supers + g * Slot<W>::SUPERS_ROW;
  }
  __device__ __forceinline__ u32 place(int r, int i) const {
    return codes + 8 * r * Slot<W>::CODES_ROW + (W::SWIZZLE ? lane ^ i : lane + i);
  }
  __device__ __forceinline__ uint2 codes8(int r, int i) const { return read8_shared(place(r, i)); }
  __device__ __forceinline__ uint4 codes16(int r, int i) const { return read16_shared(place(r, i)); }
  __device__ __forceinline__ uint2 scales8(int r) const { return read8_shared(scales + 8 * r * Slot<W>::SCALES_ROW); }
  __device__ __forceinline__ uint4 scales16(int r) const { return read16_shared(scales + 8 * r * Slot<W>::SCALES_ROW); }
  __device__ __forceinline__ u32 scales4(int r, int i) const {
    return read4_shared(scales + 8 * r * Slot<W>::SCALES_ROW + i);
  }
  __device__ __forceinline__ u32 scale1(int r) const { return read1_shared(scales + 8 * r * Slot<W>::SCALES_ROW); }
  __device__ __forceinline__ u32 half(int r, int) const { return read2_shared(scales + 8 * r * Slot<W>::SCALES_ROW); }
  __device__ __forceinline__ u32 super(int r) const { return read4_shared(supers + 8 * r * Slot<W>::SUPERS_ROW); }
};

// A run of a warp's steps: units first, first + step, .. below `end` of the 16 rows from base + 16 tile on, of N.
struct Run {
  size_t base;
  int tile, N, K, first, step, end;
};

// A lane's octets of a step for one row of x a column, in registers. They are read before the wait for weights; or, as
// soon as one is used, that of the following step is read in its place (done), so that a whole step covers the wait,
// where registers last for that. A column without a row of its own holds any values.
template <class W>
struct HeldRow {
  static constexpr int APART = W::LANE_COLUMNS == 8 ? 32 : 8, OCTETS = W::UNIT / 32;
  uint4 v[OCTETS];
  const bf16* following;
  bool real;
  __device__ __forceinline__ HeldRow(const bf16* row, bool real) : following(row), real(real) {
#pragma unroll
    for (int i = 0; i < OCTETS; i++) v[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void read(u32 column) {
#pragma unroll
    for (int i = 0; i < OCTETS; i++) read16_if(real, v[i], following + (size_t)column + APART * i);
  }
  __device__ __forceinline__ uint4 octet(int, int column) const { return v[column / APART]; }
  __device__ __forceinline__ void done(int column) { read16_if(real, v[column / APART], following + column); }
};

// One row of x a column, again for each tile; go_on() comes before a step. A column without a row of its own has that
// of another, which costs no bandwidth. Here the row is in shared memory, where an octet is read as soon as the one
// before is used; that needs few registers.
template <class W>
struct RowInShared {
  static constexpr int APART = HeldRow<W>::APART, OCTETS = HeldRow<W>::OCTETS;
  uint4 v;
  u32 row, at, next;  // where it begins, and its octets of this step and of the next lie
  int K;
  __device__ __forceinline__ RowInShared(const bf16* p, int K, const bf16* = nullptr)
      : v(read16_shared(shared_address(p))), row(shared_address(p)), at(row), next(row), K(K) {}
  __device__ __forceinline__ void go_on() {
    at = next;
    next = at + 2 * W::UNIT - row == 2 * K ? row : at + 2 * W::UNIT;
  }
  __device__ __forceinline__ u32 passed() const { return (at - row) / 2; }  // columns before this step
  __device__ __forceinline__ uint4 octet(int, int) const { return v; }
  __device__ __forceinline__ void done(int column) {
    const int i = column / APART + 1;
    v = read16_shared(i < OCTETS ? at + 2 * APART * i : next);
  }
};
// And here in global memory.
template <class W>
struct RowInMemory {
  const bf16 *row, *at, *next;
  int K;
  __device__ __forceinline__ RowInMemory(const bf16* p, int K, const bf16* = nullptr) : row(p), at(p), next(p), K(K) {}
  __device__ __forceinline__ u32 passed() const { return at - row; }
  __device__ __forceinline__ void go_on() {
    at = next;
    next = at + W::UNIT - row == K ? row : at + W::UNIT;
  }
  __device__ __forceinline__ uint4 octet(int, int column) const { return __ldg((const uint4*)(at + column)); }
  __device__ __forceinline__ void done(int) const {}
};

// A row with the sums of its columns, in shared memory.
template <class Row>
struct Summed : Row, WithSums {
  u32 of_row;  // those of the lane
  template <class Pointer>
  __device__ __forceinline__ Summed(Pointer p, int K, const bf16* sums) : Row(p, K), of_row(shared_address(sums)) {}
  __device__ __forceinline__ uint2 sums(int, int part) const {
    return read8_shared(of_row + this->passed() / 256 * (2 * ColumnSums::STEP) + 32 * part);
  }
};

// Steps of MS matrices of one shape on their way through a ring of BYTES. A run that the ring goes on to is opened by
// `next`, a function that calls open() and returns true, or false when there is none. STEP: that of all runs, 0 if they
// differ.
template <class W, int MS, int STEP = 0, int BYTES = RING>
struct Stream {
  static constexpr int F = W::FORMAT, SIZE = MS * Slot<W>::BYTES, D = BYTES / SIZE < 4 ? BYTES / SIZE : 4;
  static_assert(D > 0 && SIZE % 16 == 0, "");
  typedef HalfCopies<W, MS, STEP> Halves;
  struct Matrix {
    typedef Slot<W> At;
    PlaneCopies<W::CODES, 16, 16, At::CODES_ROW, At> codes;
    typedef PlaneCopies<W::SCALES, W::PIECE ? W::PIECE : 4, F == FP8 ? 1 : 16, At::SCALES_ROW, InOrder> Scales;
    typename Either<F == IQ2_XXS, NoCopies, Scales>::type scales;
    typename Either<W::SUPERS != 0, PlaneCopies<4, 4, 16, At::SUPERS_ROW, InOrder>, NoCopies>::type supers;
  };
  Matrix from[MS];
  typename Either<F == IQ2_XXS, Halves, NoCopies>::type halves;
  u32 ring, at;  // at: of the slot that is read next, and then filled anew
  int unit, end, step;  // the next unit to send

  // step: of all runs, where it is known now, which saves its register.
  __device__ __forceinline__ explicit Stream(u32 ring, int step = STEP)
      : ring(ring), at(0), unit(0), end(0), step(step) {}
  __device__ __forceinline__ void open(const Planes (&w)[MS], const Run& run) {
    const RowBytes stride = row_bytes<F>(run.K);
    const int last = run.N - 1 - 16 * run.tile;
    unit = run.first;
    end = run.end;
    step = STEP ? STEP : run.step;
#pragma unroll
    for (int m = 0; m < MS; m++) {
      const Planes p = row_of<F>(w[m], run.base + 16 * run.tile, run.K);
      from[m].codes.begin(p.codes, stride.codes, last);
      from[m].scales.begin(p.scales, stride.scales, last);
      from[m].supers.begin(p.supers, stride.supers, last);
      halves.begin(m, p.scales, stride.scales, last, run.first);
    }
  }
  // Sends the copies of one step on their way, if there is one, and goes on to the next slot.
  template <class Next>
  __device__ __forceinline__ void send(Next next) {
    while (unit >= end)
      if (!next()) break;
    if (unit < end) {
#pragma unroll
      for (int m = 0; m < MS; m++) {
        from[m].codes.copy(ring + at + Slot<W>::codes_at(m), unit);
        from[m].scales.copy(ring + at + Slot<W>::scales_at(m, MS), unit);
        from[m].supers.copy(ring + at + Slot<W>::supers_at(m, MS), unit);
      }
      halves.copy(ring + at + Slot<W>::scales_at(0, MS), unit);
      unit += step;
    }
    commit_copies();
    at = at == (D - 1) * SIZE ? 0 : at + SIZE;
  }
  template <class Next>
  __device__ __forceinline__ void fill(Next next) {
#pragma unroll 1
    for (int d = 0; d < D; d++) send(next);
  }
  // Where the lane's scales of matrix m lie among those of a unit.
  static __device__ __forceinline__ u32 scales_of_lane(const Planes (&w)[MS], const Run& run, int m, int unit) {
    const int phase = run.K / 256 & 1 ? (int)run.base + ((threadIdx.x & 31) >> 2) : 0;
    return InRing<W>::scales_of_lane((phase + unit / 2 + ((size_t)w[m].scales >> 1)) & 1);
  }
  // The weights of matrix m of that unit, in the slot that is filled next.
  __device__ __forceinline__ void load(W& to, int m, u32 of_scales, int unit) const {
    const u32 slot = ring + at;
    const InRing<W> from(
        slot + Slot<W>::codes_at(m), slot + Slot<W>::scales_at(m, MS) + of_scales, slot + Slot<W>::supers_at(m, MS));
    to.load(from, unit);
  }
  // The steps of the run that is next in the ring: read(unit) before the wait, multiply(weights, is it the last).
  template <class Next, class Read, class Multiply>
  __device__ __forceinline__ void multiply_run(
      const Planes (&w)[MS], const Run& run, Next next, Read read, Multiply multiply) {
    constexpr bool EARLY = D < 3;  // a short ring: the slot is filled anew before its weights, in registers, are used
    u32 of_scales[MS];
#pragma unroll
    for (int m = 0; m < MS; m++)
      if (Halves::SAME_HALF) of_scales[m] = opaque(scales_of_lane(w, run, m, run.first));
    W now[MS];
#pragma unroll 1
    for (int unit = run.first; unit < run.end; unit += run.step) {
      read(unit);
      wait_for_copies_but<D - 1>();
      __syncwarp();
#pragma unroll
      for (int m = 0; m < MS; m++) {
        if (!Halves::SAME_HALF) of_scales[m] = scales_of_lane(w, run, m, unit);
        load(now[m], m, of_scales[m], unit);
      }
      if (EARLY) {
        __syncwarp();
        send(next);
      }
      multiply(now, unit + run.step >= run.end);
      if (!EARLY) {
        __syncwarp();
        send(next);
      }
    }
  }
};

struct NoneNext {
  __device__ __forceinline__ bool operator()() const { return false; }
};

// Adds the products of one run, with the columns of x.
template <int F, int NT>
__device__ __forceinline__ void product(
    float (&acc)[NT][4], const Planes& w, const Run& run, const Rows<NT>& x, const uint4* grid, u32 ring) {
  typedef Weight<F> W;
  const Planes matrix[1] = {w};
  const int t = threadIdx.x & 3;
  Stream<W, 1> stream(ring);
  stream.open(matrix, run);
  stream.fill(NoneNext());
  if constexpr (NT == 1) {
    HeldRow<W> columns(x.p[0] + run.first * W::UNIT + t * W::LANE_COLUMNS, x.real && run.first < run.end);
    columns.read(0);
    stream.multiply_run(matrix, run, NoneNext(), [](int) {}, [&](W(&now)[1], bool last) {
      columns.real &= !last;
      columns.following += run.step * W::UNIT;
      now[0].multiply(acc, columns, t, grid);
    });
  } else {
    Rows<NT> columns;
#pragma unroll
    for (int i = 0; i < NT; i++) columns.p[i] = x.p[i] + run.first * W::UNIT + t * W::LANE_COLUMNS;
    stream.multiply_run(matrix, run, NoneNext(), [](int) {}, [&](W(&now)[1], bool) {
      now[0].multiply(acc, columns, t, grid);
#pragma unroll
      for (int i = 0; i < NT; i++) columns.p[i] += run.step * W::UNIT;
    });
  }
}

}  // namespace ds4
