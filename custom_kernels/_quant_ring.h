// How a warp reads weights ahead: steps of its 16 rows are copied into a ring in shared memory, which takes no registers
// and waits in turn; behind `_quant_mma.h`. (Reads into registers shared so few scoreboards that a warp waited for the
// newest of them, and left room for so few warps that nothing else covered that: docs/log.md.)
//
// A step lies in a slot of STAGE bytes as 16 rows of codes, then of scales, then of supers. In the codes, the 32 bytes
// that lanes of four rows read at a time are moved so that they lie in different banks.

namespace ds4 {

constexpr int RING = 4608;  // bytes of a warp
__device__ __forceinline__ unsigned char* ring_of(uint4* rings, int warp) { return (unsigned char*)rings + warp * RING; }

template <class W>
struct Slot {
  static constexpr int CODES = 16 * W::CODES, SCALES = W::FORMAT == FP8 ? 16 : 16 * W::SCALES;
  static constexpr int BYTES = CODES + SCALES + 16 * W::SUPERS;
  static __device__ __forceinline__ int moved(int row) { return (row & W::SWIZZLE) * (W::CODES / 4); }
};

// Copies BYTES of each of ROWS rows a step, in pieces that the lanes take in turn.
template <int BYTES, int PIECE, int ROWS, class Place>
struct PlaneCopies {
  static constexpr int PIECES = BYTES / PIECE, ALL = ROWS * PIECES, EACH = (ALL + 31) / 32;
  const unsigned char* from;
  int at[EACH];
  // plane: of row 0, `stride` bytes a row; rows past `last` repeat it.
  __device__ __forceinline__ void begin(const unsigned char* plane, int stride, int last) {
    from = plane;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int q = (threadIdx.x & 31) + 32 * i;
      at[i] = min(q / PIECES, last) * stride + q % PIECES * PIECE;
    }
  }
  __device__ __forceinline__ void copy(unsigned char* to, int advance) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int q = (threadIdx.x & 31) + 32 * i, row = q / PIECES;
      if (ALL % 32 == 0 || q < ALL)
        copy_async<PIECE>(to + row * BYTES + ((q % PIECES * PIECE) ^ Place::moved(row)), from + at[i]);
    }
    from += advance * BYTES;
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

// The steps first, first + step, .. of 16 rows of a matrix, from row base + 16 tile on; rows past the last (N) repeat it.
template <class W>
struct Steps {
  static constexpr int F = W::FORMAT;
  static constexpr int PIECE = W::PIECE ? W::PIECE : 4;
  PlaneCopies<W::CODES, 16, 16, Slot<W>> codes;
  typename Either<W::PIECE != 0, PlaneCopies<W::PIECE ? W::SCALES : 4, PIECE, F == FP8 ? 1 : 16, InOrder>, NoCopies>::type
      scales;
  typename Either<W::SUPERS != 0, PlaneCopies<4, 4, 16, InOrder>, NoCopies>::type supers;
  const unsigned char* half;  // IQ2_XXS: scales of rows g and g + 8, two bytes for two steps, too small to copy
  int apart;
  u32 soon[2];

  // `p`: the planes at the first row and step.
  __device__ __forceinline__ void begin(const Planes& p, int last, int K) {
    const RowBytes stride = row_bytes<F>(K);
    codes.begin(p.codes, stride.codes, last);
    scales.begin(p.scales, stride.scales, last);
    supers.begin(p.supers, stride.supers, last);
    if (W::PIECE == 0) {
      const int g = (threadIdx.x & 31) >> 2;
      half = p.scales + min(g, last) * stride.scales;
      apart = (min(g + 8, last) - min(g, last)) * stride.scales;
    }
  }
  __device__ __forceinline__ void copy(unsigned char* slot, int step) {
    codes.copy(slot, step);
    scales.copy(slot + Slot<W>::CODES, step);
    supers.copy(slot + Slot<W>::CODES + Slot<W>::SCALES, step);
  }
  __device__ __forceinline__ void look(int unit) {
    if (W::PIECE != 0) return;
#pragma unroll
    for (int r = 0; r < 2; r++) soon[r] = *(const unsigned short*)(half + r * apart + unit / 2 * 2);
  }
};

// The bytes of a step in its slot.
template <class W>
struct InRing {
  const unsigned char *codes, *scales, *supers;
  int lane;
  const u32* soon;
  __device__ __forceinline__ InRing(const unsigned char* slot, const u32* soon) : soon(soon) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    codes = slot;
    lane = g * W::CODES + ((t * W::LANE_CODES) ^ Slot<W>::moved(g));
    scales = slot + Slot<W>::CODES + (W::FORMAT == FP8 ? 0 : g * W::SCALES + t * W::LANE_SCALES);
    supers = slot + Slot<W>::CODES + Slot<W>::SCALES + g * W::SUPERS;
  }
  __device__ __forceinline__ uint2 codes8(int r, int i) const {
    return *(const uint2*)(codes + 8 * r * W::CODES + (lane ^ i));
  }
  __device__ __forceinline__ uint4 codes16(int r, int i) const {
    return *(const uint4*)(codes + 8 * r * W::CODES + (lane ^ i));
  }
  __device__ __forceinline__ uint2 scales8(int r) const { return *(const uint2*)(scales + 8 * r * W::SCALES); }
  __device__ __forceinline__ u32 scales4(int r, int i) const { return *(const u32*)(scales + 8 * r * W::SCALES + i); }
  __device__ __forceinline__ u32 scale1(int r) const { return scales[8 * r * W::SCALES]; }
  __device__ __forceinline__ u32 half(int r, int) const { return soon[r]; }
  __device__ __forceinline__ u32 super(int r) const { return *(const u32*)(supers + 8 * r * W::SUPERS); }
};

// Activations of a step, where eight rows are few enough to be read before the warp waits for weights.
template <class W>
struct HeldRow {
  static constexpr int APART = W::LANE_COLUMNS == 8 ? 32 : 8;
  uint4 v[4];
  __device__ __forceinline__ HeldRow(const Rows<1>& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = x.octet(0, APART * i);
  }
  __device__ __forceinline__ uint4 octet(int, int column) const { return v[column / APART]; }
};

// Adds the products of a warp's 16 rows of each of MS matrices of one shape, from row base + 16 tile on, with the
// columns of x: units first, first + step, .. below `end`. multiply(w, x) adds one step of all MS. AT_ONCE bytes of
// the ring are used, for up to four steps.
template <class W, int NT, int MS, int AT_ONCE = RING, class Multiply>
__device__ __forceinline__ void stream(
    const Planes (&w)[MS], size_t base, int tile, int N, int K, const Rows<NT>& x, int first, int step, int end,
    unsigned char* ring, Multiply multiply) {
  constexpr int SIZE = MS * Slot<W>::BYTES, D = AT_ONCE / SIZE < 4 ? AT_ONCE / SIZE : 4;
  static_assert(D > 0 && SIZE % 16 == 0, "");
  if (first >= end) return;
  Steps<W> from[MS];
#pragma unroll
  for (int m = 0; m < MS; m++) {
    const Planes p = row_of<W::FORMAT>(w[m], base + 16 * tile, K);
    from[m].begin(
        {p.codes + first * W::CODES, p.scales + first * W::SCALES, p.supers + first * W::SUPERS}, N - 1 - 16 * tile, K);
  }
  auto copy = [&](int slot) {
#pragma unroll
    for (int m = 0; m < MS; m++) from[m].copy(ring + slot * SIZE + m * Slot<W>::BYTES, step);
  };
#pragma unroll
  for (int d = 0; d < D; d++) {
    if (first + d * step < end) copy(d);
    commit_copies();
  }
#pragma unroll
  for (int m = 0; m < MS; m++) from[m].look(first);
  Rows<NT> columns;
#pragma unroll
  for (int i = 0; i < NT; i++) columns.p[i] = x.p[i] + first * W::UNIT + (threadIdx.x & 3) * W::LANE_COLUMNS;
  W now[MS];
  auto take = [&](int slot, int unit) {
    wait_for_copies_but<D - 1>();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MS; m++) now[m].load(InRing<W>(ring + slot * SIZE + m * Slot<W>::BYTES, from[m].soon), unit);
    if (unit + step < end) {
#pragma unroll
      for (int m = 0; m < MS; m++) from[m].look(unit + step);
    }
  };
  // A slot is free once all lanes have its weights in registers: before they multiply where the ring is short, else
  // after, so that they need not hold them all.
  auto refill = [&](int slot, int unit) {
    __syncwarp();
    if (unit + D * step < end) copy(slot);
    commit_copies();
  };
  constexpr bool EARLY = D < 3;
  for (int unit = first, slot = 0; unit < end; unit += step, slot = slot + 1 == D ? 0 : slot + 1) {
    if constexpr (NT == 1 && MS == 1 && W::UNIT == 128) {
      const HeldRow<W> held(columns);
      take(slot, unit);
      if (EARLY) refill(slot, unit);
      multiply(now, held);
    } else {
      take(slot, unit);
      if (EARLY) refill(slot, unit);
      multiply(now, columns);
    }
    if (!EARLY) refill(slot, unit);
#pragma unroll
    for (int i = 0; i < NT; i++) columns.p[i] += step * W::UNIT;
  }
}

// The same for one matrix.
template <int F, int NT>
__device__ __forceinline__ void product(
    float (&acc)[NT][4], const Planes& w, size_t base, int tile, int N, int K, const Rows<NT>& x, int first, int step,
    int end, const uint4* grid, unsigned char* ring) {
  typedef Weight<F> W;
  const Planes matrix[1] = {w};
  stream<W, NT, 1>(matrix, base, tile, N, K, x, first, step, end, ring, [&](W(&now)[1], const auto& columns) {
    now[0].multiply(acc, columns, threadIdx.x & 3, grid);
  });
}

}  // namespace ds4
