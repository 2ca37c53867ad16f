// How a warp reads weights ahead: steps of 16 rows are copied into a ring in shared memory, which takes no registers,
// waits in turn, and goes on from one run of steps to the next; behind `_quant_mma.h`. (Reads into registers shared so
// few scoreboards that a warp waited for the newest of them, and left room for few warps: docs/log.md.)
//
// A step lies in a slot as 16 rows of codes, then of scales, then of supers. In the codes, the 32 bytes that lanes of
// four rows read at a time are moved so that they lie in different banks.

namespace ds4 {

constexpr int RING = DS4_RING;  // bytes of a warp
__device__ __forceinline__ unsigned char* ring_of(uint4* rings, int warp) {
  return (unsigned char*)rings + warp * RING;
}

template <class W>
struct Slot {
  static constexpr int ROW = W::PIECE ? W::SCALES : 4;  // bytes of a row's scales
  static constexpr int CODES = 16 * W::CODES, SCALES = W::FORMAT == FP8 ? 16 : 16 * ROW;
  static constexpr int BYTES = CODES + SCALES + 16 * W::SUPERS;
  static __device__ __forceinline__ int moved(int row) { return (row & W::SWIZZLE) * (W::CODES / 4); }
};

// Copies BYTES of each of ROWS rows a step, in pieces that the lanes take in turn.
template <int BYTES, int PIECE, int ROWS, class Place>
struct PlaneCopies {
  static constexpr int PIECES = BYTES / PIECE, ALL = ROWS * PIECES, EACH = (ALL + 31) / 32;
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
  __device__ __forceinline__ void copy(unsigned char* to, int unit) {
    const unsigned char* const first = from + unit * BYTES;
    // Pieces lie one behind another; rows 32 pieces apart are moved alike.
    unsigned char* const at = to + ((piece() * PIECE) ^ Place::moved(piece() / PIECES));
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (ALL < 32 || piece() + 32 * i < ALL) copy_async<PIECE>(at + 32 * PIECE * i, i == 0 ? first : first + after[i]);
  }
};
struct InOrder {
  static __device__ __forceinline__ int moved(int) { return 0; }
};
struct NoCopies {
  __device__ __forceinline__ void begin(const unsigned char*, int, int) {}
  __device__ __forceinline__ void copy(unsigned char*, int) {}
};
template <bool CONDITION, class A, class B>
struct Either { typedef A type; };
template <class A, class B>
struct Either<false, A, B> { typedef B type; };

// IQ2_XXS has two bytes of scales for two steps, less than a copy: four bytes are copied, of which they are one half,
// or they alone where the other half would lie behind the row.
struct HalfCopies {
  const unsigned char* from;
  int last;
  __device__ __forceinline__ void begin(const unsigned char* plane, int stride, int last_row) {
    from = plane + min((int)threadIdx.x & 15, last_row) * stride;
    last = stride / 2 - 1;
  }
  __device__ __forceinline__ void copy(unsigned char* to, int unit) {
    const unsigned char* const p = from + unit / 2 * 2;
    const int second = (size_t)p & 2;
    if ((threadIdx.x & 31) < 16)
      copy4_async(to + 4 * (threadIdx.x & 15), p - second, second || unit / 2 < last ? 4 : 2);
  }
};

// The bytes of a step in its slot; `odd`: which half of four bytes is the scale of IQ2_XXS, by its address.
template <class W>
struct InRing {
  const unsigned char *codes, *scales, *supers;
  int lane;
  __device__ __forceinline__ InRing(const unsigned char* slot, int odd) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    codes = slot;
    lane = g * W::CODES + ((t * W::LANE_CODES) ^ Slot<W>::moved(g));
    scales = slot + Slot<W>::CODES + (W::FORMAT == FP8 ? 0 : g * Slot<W>::ROW + t * W::LANE_SCALES);
    if (W::FORMAT == IQ2_XXS) scales += 2 * odd;
    supers = slot + Slot<W>::CODES + Slot<W>::SCALES + g * W::SUPERS;
  }
  __device__ __forceinline__ uint2 codes8(int r, int i) const {
    return *(const uint2*)(codes + 8 * r * W::CODES + (lane ^ i));
  }
  __device__ __forceinline__ uint4 codes16(int r, int i) const {
    return *(const uint4*)(codes + 8 * r * W::CODES + (lane ^ i));
  }
  __device__ __forceinline__ uint2 scales8(int r) const { return *(const uint2*)(scales + 8 * r * Slot<W>::ROW); }
  __device__ __forceinline__ uint4 scales16(int r) const { return *(const uint4*)(scales + 8 * r * Slot<W>::ROW); }
  __device__ __forceinline__ u32 scales4(int r, int i) const {
    return *(const u32*)(scales + 8 * r * Slot<W>::ROW + i);
  }
  __device__ __forceinline__ u32 scale1(int r) const { return scales[8 * r * Slot<W>::ROW]; }
  __device__ __forceinline__ u32 half(int r, int) const {
    return *(const unsigned short*)(scales + 8 * r * Slot<W>::ROW);
  }
  __device__ __forceinline__ u32 super(int r) const { return *(const u32*)(supers + 8 * r * W::SUPERS); }
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
  __device__ __forceinline__ void read(int columns) {
    following += columns;
#pragma unroll
    for (int i = 0; i < OCTETS; i++) read16_if(real, v[i], following + APART * i);
  }
  __device__ __forceinline__ uint4 octet(int, int column) const { return v[column / APART]; }
  __device__ __forceinline__ void done(int column) { read16_if(real, v[column / APART], following + column); }
};

// One row of x a column, read as it is used where it lies, in shared memory. A column without a row has zeros, as lanes
// that read nothing cost no bandwidth.
struct PlainRow {
  const bf16* p;
  bool real;
  __device__ __forceinline__ uint4 octet(int, int column) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (real) v = *(const uint4*)(p + column);
    return v;
  }
  __device__ __forceinline__ void done(int) const {}
};

// Steps of MS matrices of one shape on their way through a ring of BYTES. A run that the ring goes on to is opened by
// `next`, a function that calls open() and returns true, or false when there is none.
template <class W, int MS, int BYTES = RING>
struct Stream {
  static constexpr int F = W::FORMAT, SIZE = MS * Slot<W>::BYTES, D = BYTES / SIZE < 4 ? BYTES / SIZE : 4;
  static_assert(D > 0 && SIZE % 16 == 0, "");
  struct Matrix {
    PlaneCopies<W::CODES, 16, 16, Slot<W>> codes;
    typedef PlaneCopies<W::SCALES, W::PIECE ? W::PIECE : 4, F == FP8 ? 1 : 16, InOrder> Scales;
    typename Either<F == IQ2_XXS, HalfCopies, Scales>::type scales;
    typename Either<W::SUPERS != 0, PlaneCopies<4, 4, 16, InOrder>, NoCopies>::type supers;
  };
  Matrix from[MS];
  unsigned char* ring;
  int unit, end, step, in, out;  // the next unit; in, out: the slots' places

  // step: of all runs, where it is known now, which saves its register.
  __device__ __forceinline__ explicit Stream(unsigned char* ring, int step = 0)
      : ring(ring), unit(0), end(0), step(step), in(0), out(0) {}
  __device__ __forceinline__ void open(const Planes (&w)[MS], const Run& run) {
    const RowBytes stride = row_bytes<F>(run.K);
    const int last = run.N - 1 - 16 * run.tile;
    unit = run.first;
    end = run.end;
    step = run.step;
#pragma unroll
    for (int m = 0; m < MS; m++) {
      const Planes p = row_of<F>(w[m], run.base + 16 * run.tile, run.K);
      from[m].codes.begin(p.codes, stride.codes, last);
      from[m].scales.begin(p.scales, stride.scales, last);
      from[m].supers.begin(p.supers, stride.supers, last);
    }
  }
  // Sends the copies of one step on their way, if there is one.
  template <class Next>
  __device__ __forceinline__ void send(Next next) {
    while (unit >= end)
      if (!next()) break;
    if (unit < end) {
#pragma unroll
      for (int m = 0; m < MS; m++) {
        unsigned char* const slot = ring + in + m * Slot<W>::BYTES;
        from[m].codes.copy(slot, unit);
        from[m].scales.copy(slot + Slot<W>::CODES, unit);
        from[m].supers.copy(slot + Slot<W>::CODES + Slot<W>::SCALES, unit);
      }
      unit += step;
      in = in == (D - 1) * SIZE ? 0 : in + SIZE;
    }
    commit_copies();
  }
  template <class Next>
  __device__ __forceinline__ void fill(Next next) {
#pragma unroll 1
    for (int d = 0; d < D; d++) send(next);
  }
  // The steps of the run that is next in the ring: read() before the wait, multiply(weights, whether it is the last).
  template <class Next, class Read, class Multiply>
  __device__ __forceinline__ void multiply_run(
      const Planes (&w)[MS], const Run& run, Next next, Read read, Multiply multiply) {
    constexpr bool EARLY = D < 3;  // a short ring: the slot is filled anew before its weights, in registers, are used
    const int phase = run.K / 256 & 1 ? (int)run.base + ((threadIdx.x & 31) >> 2) : 0;
    W now[MS];
#pragma unroll 1
    for (int unit = run.first; unit < run.end; unit += run.step) {
      read();
      wait_for_copies_but<D - 1>();
      __syncwarp();
#pragma unroll
      for (int m = 0; m < MS; m++) {
        const int odd = (phase + unit / 2 + ((size_t)w[m].scales >> 1)) & 1;
        now[m].load(InRing<W>(ring + out + m * Slot<W>::BYTES, odd), unit);
      }
      out = out == (D - 1) * SIZE ? 0 : out + SIZE;
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
    float (&acc)[NT][4], const Planes& w, const Run& run, const Rows<NT>& x, const uint4* grid, unsigned char* ring) {
  typedef Weight<F> W;
  const Planes matrix[1] = {w};
  const int t = threadIdx.x & 3;
  Stream<W, 1> stream(ring);
  stream.open(matrix, run);
  stream.fill(NoneNext());
  if constexpr (NT == 1) {
    HeldRow<W> columns(x.p[0] + run.first * W::UNIT + t * W::LANE_COLUMNS, x.real && run.first < run.end);
    columns.read(0);
    stream.multiply_run(matrix, run, NoneNext(), [] {}, [&](W(&now)[1], bool last) {
      columns.real &= !last;
      columns.following += run.step * W::UNIT;
      now[0].multiply(acc, columns, t, grid);
    });
  } else {
    Rows<NT> columns;
#pragma unroll
    for (int i = 0; i < NT; i++) columns.p[i] = x.p[i] + run.first * W::UNIT + t * W::LANE_COLUMNS;
    stream.multiply_run(matrix, run, NoneNext(), [] {}, [&](W(&now)[1], bool) {
      now[0].multiply(acc, columns, t, grid);
#pragma unroll
      for (int i = 0; i < NT; i++) columns.p[i] += run.step * W::UNIT;
    });
  }
}

}  // namespace ds4
