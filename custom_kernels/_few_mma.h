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

// Columns that stay until all matrices are done.
template <class X>
struct Kept {
  const X& x;
  __device__ __forceinline__ uint4 octet(int i, int column) const { return x.octet(i, column); }
  __device__ __forceinline__ void done(int) const {}
};

// How few rows multiply a step of gate and of up.
template <int F>
struct Few : Weight<F> {
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

// product() of two matrices of one format with the same row of x, one step of each after the other.
template <int F>
__device__ __forceinline__ void two_products(
    float (&one)[1][4], float (&two)[1][4], const Planes& w1, const Planes& w2, const Run& run, const Rows<1>& x,
    const uint4* tables, u32 ring) {
  typedef Few<F> W;
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

// Gate and up of routed experts: a warp's steps through the parts of the width that it adds up, PARTS at a time, of the
// S that take its units in turn. Only even columns of B have a row. (IQ2_XXS: _few_iq2.h.)
template <int F, int S, int BYTES>
struct GateUp : Stream<Few<F>, 2, S, BYTES> {
  typedef Few<F> W;
  typedef Stream<W, 2, S, BYTES> Ring;
  static constexpr int PARTS = 1, UNIT = W::UNIT, LANE_COLUMNS = W::LANE_COLUMNS;
  static constexpr int TABLES = 0;  // bytes, at a multiple of them
  struct Words {
    __device__ __forceinline__ void stage(unsigned char*) const {}
  };
  __device__ __forceinline__ GateUp(u32 ring, const unsigned char*) : Ring(ring) {}
  template <class Next>
  __device__ __forceinline__ void fill(const Planes (&)[2], Next next) { Ring::fill(next); }
  __device__ __forceinline__ void begin() {}
  // Sums of each part, of gate and up, for rows g and g + 8, with the lane's columns of row x.
  template <class Next>
  __device__ __forceinline__ void multiply(
      float (&sums)[PARTS][2][2], const Planes (&w)[2], const Run& run, Next next, const bf16* x, u32 real) {
    const typename W::Reader reader(nullptr, threadIdx.x & 3);
    HeldRow<W> columns(x, real);
    float acc[2][1][4];
    clear(acc[0]);
    clear(acc[1]);
    auto read = [&](int unit) { columns.read(unit * W::UNIT); };
    this->multiply_run(w, run, next, read, [&](W(&now)[2], bool) {
      W::multiply_both(now, acc[0], acc[1], columns, reader);
    });
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) sums[0][m][r] = acc[m][0][2 * r];
  }
};

}  // namespace ds4
