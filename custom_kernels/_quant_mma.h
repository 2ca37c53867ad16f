// Block-quantized weights times bfloat16 rows on NVIDIA tensor cores (mma m16n8k16, float32 sums).
//
// A warp owns 16 weight rows (the matrix A) and 8 NT activation rows (the columns of B). Lane (g = lane / 4,
// t = lane % 4) holds codes of weight rows g and g + 8 and the activation row 8 i + g. Sums may take columns in any
// order, as long as A and B agree: here lane t owns an "octet", the 8 consecutive columns 32 b + 8 t of block b, so that
// every format decodes from whole 4- or 8-byte words and two mma steps consume one block of 32.
//
// Codes become bfloat16 exactly (integers up to 8 bits, e2m1, e4m3, IQ2 magnitudes); scales multiply the float32 block
// sums.
// K-quants: integer products that fit bfloat16 are folded into A, minima ride in a second sum over the same B.

namespace ds4 {

using namespace ds4_ptx;
typedef __nv_bfloat16 bf16;

enum {
  Q8_0 = DS4_Q8_0, Q4_K = DS4_Q4_K, Q2_K = DS4_Q2_K, IQ2_XXS = DS4_IQ2_XXS, MXFP4 = DS4_MXFP4, FP8 = DS4_FP8
};

__device__ __forceinline__ float half_bits(u32 h) { return __half2float(__ushort_as_half((unsigned short)h)); }

const u32 BIAS = 0x43004300u;  // 128 in both halves: 0x4300 | u is 128 + u for u < 128

// Bytes (0, 1) and (2, 3) of w, each below 128, as bfloat16 pairs.
__device__ __forceinline__ u32 low_pair(u32 w) { return sub2(__byte_perm(w, 0x43, 0x4140), BIAS); }
__device__ __forceinline__ u32 high_pair(u32 w) { return sub2(__byte_perm(w, 0x43, 0x4342), BIAS); }
// Byte i of w in both halves.
__device__ __forceinline__ u32 spread(u32 w, int i) { return sub2(__byte_perm(w, 0x43, 0x4040 + 0x0101 * i), BIAS); }

// Of an array [.., width]: its rows and its width. A reshape before the launch would be one more node of
// MLX's graph, which costs host time.
template <typename Shape>
__device__ __forceinline__ int width_of(const Shape& shape, int ndim) { return shape[ndim - 1]; }
template <typename Shape>
__device__ __forceinline__ int rows_of(const Shape& shape, int ndim) {
  int rows = 1;
#pragma unroll 1  // two or three turns
  for (int i = 0; i < ndim - 1; i++) rows *= shape[i];
  return rows;
}

// The planes of one matrix and of one of its rows.
struct Planes {
  const unsigned char* codes;
  const unsigned char* scales;
  const unsigned char* supers;
};

// Activation rows of this lane's columns, in global memory; multiply() takes any type with such an octet(), and says when
// it is done() with one. Columns past
// the last row repeat a row; their results are not stored.
template <int NT>
struct Rows {
  const bf16* p[NT];
  bool real = true;  // with one row a column: whether this lane's column has one
  __device__ __forceinline__ uint4 octet(int i, int column) const { return __ldg((const uint4*)(p[i] + column)); }
  __device__ __forceinline__ void done(int) const {}
};

// p = A B for one block of 32 columns: two steps, the first on a zero sum.
__device__ __forceinline__ void block32(float (&p)[4], const u32 (&a)[2][4], const uint4& v) {
  mma_new(p, a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y);
  mma(p, a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w);
}
__device__ __forceinline__ void add_block(float (&p)[4], const u32 (&a)[2][4], const uint4& v) {
  mma(p, a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y);
  mma(p, a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w);
}
template <int NT>
__device__ __forceinline__ void clear(float (&p)[NT][4]) {
#pragma unroll
  for (int i = 0; i < NT; i++) p[i][0] = p[i][1] = p[i][2] = p[i][3] = 0.f;
}
__device__ __forceinline__ void add_scaled(float (&acc)[4], const float (&p)[4], float s0, float s1) {
  acc[0] = fmaf(s0, p[0], acc[0]);
  acc[1] = fmaf(s0, p[1], acc[1]);
  acc[2] = fmaf(s1, p[2], acc[2]);
  acc[3] = fmaf(s1, p[3], acc[3]);
}
// acc += scales * (A B) for one block and every column tile.
template <int NT, class X>
__device__ __forceinline__ void scaled_block(
    float (&acc)[NT][4], const u32 (&a)[2][4], X& x, int column, float s0, float s1) {
#pragma unroll
  for (int i = 0; i < NT; i++) {
    float p[4];
    block32(p, a, x.octet(i, column));
    add_scaled(acc[i], p, s0, s1);
  }
  x.done(column);
}
// The four blocks of a step, each decoded to fragments of A and the scales of rows g and g + 8.
template <class W, int NT, class X>
__device__ __forceinline__ void scaled_blocks(float (&acc)[NT][4], const W& w, X& x, int t, const uint4* grid) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 a[2][4];
    float scale[2];
    w.decode(a, scale, i, t, grid);
    scaled_block(acc, a, x, 32 * i, scale[0], scale[1]);
  }
}

// The bytes of a step, for rows g and g + 8 (r = 0, 1), read from global memory: pointers are at the step and the lane.
struct InMemory {
  Planes at[2];
  __device__ __forceinline__ uint2 codes8(int r, int i) const { return read8(at[r].codes + i); }
  __device__ __forceinline__ uint4 codes16(int r, int i) const { return read16(at[r].codes + i); }
  __device__ __forceinline__ uint2 scales8(int r) const { return read8(at[r].scales); }
  __device__ __forceinline__ uint4 scales16(int r) const { return read16(at[r].scales); }
  __device__ __forceinline__ u32 scales4(int r, int i) const { return read4(at[r].scales + i); }
  __device__ __forceinline__ u32 scale1(int r) const { return at[r].scales[0]; }
  __device__ __forceinline__ u32 half(int r, int unit) const { return ((const unsigned short*)at[r].scales)[unit / 2]; }
  __device__ __forceinline__ u32 super(int r) const { return read4(at[r].supers); }
};

// Bytes of a row of K columns in each plane; FP8 scales have one row for 32 weight rows.
struct RowBytes {
  int codes, scales, supers;
};
template <int F>
__device__ __forceinline__ RowBytes row_bytes(int K) {
  if (F == Q8_0) return {K, K / 32 * 2, 0};
  if (F == FP8) return {K, K / 32, 0};
  if (F == MXFP4) return {K / 2, K / 32, 0};
  if (F == IQ2_XXS) return {K / 4, K / 256 * 2, 0};
  if (F == Q2_K) return {K / 4, K / 16, K / 64};
  return {K / 2, K / 256 * 12, K / 64};
}
template <int F>
__device__ __forceinline__ Planes row_of(const Planes& w, size_t row, int K) {
  const RowBytes bytes = row_bytes<F>(K);
  const size_t of_scales = F == FP8 ? row / 32 : row;
  return {w.codes + row * bytes.codes, w.scales + of_scales * bytes.scales, w.supers + row * bytes.supers};
}

// The IQ2 grid (bytes, IQ2_WORDS) as bfloat16 in shared memory, by all threads; needs a barrier before use.
__device__ __forceinline__ void stage_grid(uint4* grid) {
#pragma unroll 4
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    const u32 low = IQ2_WORDS[2 * i], high = IQ2_WORDS[2 * i + 1];
    grid[i] = make_uint4(low_pair(low), high_pair(low), low_pair(high), high_pair(high));
  }
}

__device__ __forceinline__ float round_bf16(float v) { return __bfloat162float(__float2bfloat16(v)); }

}  // namespace ds4
