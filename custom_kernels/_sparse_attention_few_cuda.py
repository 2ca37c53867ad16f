"""CUDA bodies of sparse attention for a few query rows: the scores by entries, then the values by channels.

With one row, blocks that own heads are too few, and each waits for all the listed rows in turn. Here a block of the
first launch owns 32 entries, one of the second 32 channels, both for 16 heads: everything they read is on its way at
once. A probability is rounded against the running maximum of its block of 64 entries, so the first launch also leaves
the maxima, and the second takes the entries in their order: a row gets the bits of the body for many rows
(`_sparse_attention_cuda.py`), with no partial values to combine.

Estimate, 64 heads of 512, 640 entries, one row: 80 blocks of 48 KB, 64 blocks of 82 KB, nearly all from the
second-level cache; 172 KB of scores between them. A chain of 16 and one of 40 tensor-core products bound them, 0.3 and
0.8 us, behind two reads that depend on each other.
"""

from __future__ import annotations

import mlx.core as mx

from ._kernel import Kernel
from ._octet import ceil_div
from ._sparse_attention_cuda import HEADER

_CHUNK = 640  # entries whose values lie in shared memory at a time
_SLICE = 32  # channels of a block of the second launch
_HEADS = 16  # heads of a block of either
# Bytes of the second launch's values and probabilities, padded as its text says.
_SHARED = 2 * (_SLICE // 8 * (8 * _CHUNK + 16) + _HEADS * (_CHUNK + 8))

_HALVE = """
namespace ds4_tiles {
// A step of warp_sum for 2 N numbers at once: a lane passes on half of them. After 8, 4, 2 and 1, lanes 2 n and 2 n + 1
// hold halves of sum n.
template <int N>
__device__ __forceinline__ void halve(float (&x)[16], int lane) {
  const bool upper = lane & (2 * N);
#pragma unroll
  for (int j = 0; j < N; j++) {
    const float low = x[j], high = x[j + N];
    x[j] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2 * N);
  }
}
}  // namespace ds4_tiles
"""

_SOURCES = """
    const int near_rows = near_shape[1], near_count = TWO ? near_list_shape[2] : 0;
    const int far_rows = far_shape[1], far_count = far_list_shape[2], recent_rows = SPLIT ? recent_shape[1] : 0;
    const int length = far_list_shape[1];
    constexpr int D = 64 * PAIRS, TILES = (HEADS + 15) / 16;
    const int count = near_count + far_count, blocks = (count + 63) / 64;  // of 64 entries
    // Entry p of a query row's list, or -1. Nothing branches here, so that many reads are on their way together.
    const auto listed = [&](int row, int p) {
      const bool is_near = p < near_count;
      const int* const list = is_near ? near_list + (size_t)row * near_count : far_list + (size_t)row * far_count;
      const int id = list[min(p, count - 1) - (is_near ? 0 : near_count)];
      return p < count ? id : -1;
    };
    // Where the recent rows begin. To be read behind the lists: it is the same for all threads, and the compiler lets
    // all of them wait for such a number where it is read.
    const auto begin_recent = [&] { return SPLIT ? max(min((int)read4(base), far_rows), 0) : far_rows; };
    // The row that entry p names, or null.
    const auto named = [&](int row, int p, int id, int start) {
      const bool is_near = p < near_count, is_recent = SPLIT & !is_near & (id >= start);
      const int rows = is_near ? near_rows : is_recent ? recent_rows : far_rows;
      const size_t at = (size_t)(row / length) * rows + (is_recent ? id - start : id);
      const bool exists = (id >= 0) & (id < (is_near ? near_rows : start + recent_rows));
      return exists ? (const bf16*)(is_near ? near : is_recent ? recent : far) + at * D : (const bf16*)nullptr;
    };
"""

SCORES_SOURCE = (
    """
    // A block of 4 warps owns 32 entries and 16 heads of one query row, warp w the entries 8 w .. 8 w + 7. A head's
    // scores [64 * blocks + 2 * blocks]: those of all entries, then the largest of each 32.
    using namespace ds4_tiles;
"""
    + _SOURCES
    + """
    constexpr int STRIDE = D + 32;  // 8 lanes that read 16 bytes of two rows meet different banks
    __shared__ __align__(16) bf16 queries[16 * STRIDE];
    __shared__ float peaks[4][16];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int head0 = blockIdx.x % TILES * 16, part = blockIdx.x / TILES % (2 * blocks);
    const int row = blockIdx.x / TILES / (2 * blocks), width = 66 * blocks;
    constexpr int AT_ONCE = 1024 / D;  // heads that the block copies in a step
    const unsigned of_head = threadIdx.x / (D / 8u), of_octet = threadIdx.x % (D / 8u);
    const bf16* const query = q + ((size_t)row * HEADS + head0 + of_head) * D + 8 * of_octet;
    #pragma unroll
    for (int n = 0; n < 16 / AT_ONCE; n++) {
      uint4* const to = (uint4*)&queries[(of_head + n * AT_ONCE) * STRIDE + 8 * of_octet];
      if (HEADS % 16 == 0 || head0 + of_head + n * AT_ONCE < HEADS) copy16_async(to, query + n * AT_ONCE * D);
      else *to = make_uint4(0, 0, 0, 0);
    }
    const int start = begin_recent(), p = 32 * part + 8 * warp + g;
    const bf16* const from = named(row, p, listed(row, p), start);
    const int present = from != nullptr;
    uint4 k[2 * PAIRS];
    #pragma unroll
    for (int c = 0; c < 2 * PAIRS; c++) k[c] = octet(from + 32 * c + 8 * t, present);
    wait_for_copies();
    __syncthreads();
    if (TURN_QUERIES) {
      for (int i = threadIdx.x; i < 16 * TURN; i += 128) {
        constexpr int pairs = TURN > 0 ? TURN : 1;
        const int at = i / pairs * STRIDE + D - 2 * TURN + 2 * (i % pairs), of_table = row % length * TURN + i % pairs;
        turn_pair(queries[at], queries[at + 1], cosine[of_table], sine[of_table]);
      }
      __syncthreads();
    }
    float dots[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
    #pragma unroll
    for (int c = 0; c < 2 * PAIRS; c++) {
      const bf16* const of_query = &queries[g * STRIDE + 32 * c + 8 * t];
      product(dots[c % 2], *(const uint4*)of_query, *(const uint4*)(of_query + 8 * STRIDE), k[c]);
    }
    const int even = __shfl_sync(0xffffffffu, present, 8 * t), odd = __shfl_sync(0xffffffffu, present, 8 * t + 4);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int head = g + 8 * r;
      const float none = __int_as_float(0xff800000);
      const float x = even ? (dots[0][2 * r] + dots[1][2 * r]) * scale[0] : none;
      const float y = odd ? (dots[0][2 * r + 1] + dots[1][2 * r + 1]) * scale[0] : none;
      if (head0 + head < HEADS)
        *(float2*)&scores[((size_t)row * HEADS + head0 + head) * width + 32 * part + 8 * warp + 2 * t] =
            make_float2(x, y);
      float top = fmaxf(x, y);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      if (t == 0) peaks[warp][head] = top;
    }
    __syncthreads();
    if (threadIdx.x < 16 && head0 + threadIdx.x < HEADS) {
      const float low = fmaxf(peaks[0][threadIdx.x], peaks[1][threadIdx.x]);
      const float high = fmaxf(peaks[2][threadIdx.x], peaks[3][threadIdx.x]);
      scores[((size_t)row * HEADS + head0 + threadIdx.x) * width + 64 * blocks + part] = fmaxf(low, high);
    }
"""
)

VALUES_SOURCE = (
    """
    // A block of 16 warps owns 32 channels of 16 heads of one query row. Warp w owns head w for the softmax; then warps
    // 0 .. 3 own eight channels each for the products, while the last one adds up the denominators.
    using namespace ds4_tiles;
"""
    + _SOURCES
    + f"""
    constexpr int CHUNK = {_CHUNK}, SLICE = {_SLICE}, SHARED = {_SHARED};
"""
    + """
    constexpr int BLOCKS = CHUNK / 64, PIECES = SLICE / 8, SLICES = D / SLICE;
    constexpr int TILE = 8 * CHUNK + 16, STRIDE = CHUNK + 8;  // moved against each other by whole pieces of a bank line
    static_assert(SHARED == 2 * (PIECES * TILE + 16 * STRIDE), "what the launch gives");
    bf16* const values = (bf16*)dynamic_shared();  // [PIECES][TILE]: 8 channels of each entry lie together
    bf16* const chances = values + PIECES * TILE;  // [16][STRIDE]
    __shared__ float fades[16][BLOCKS], sums[16][BLOCKS], peaks[16], denominators[16];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int channel0 = blockIdx.x % SLICES * SLICE, head0 = blockIdx.x / SLICES % TILES * 16;
    const int row = blockIdx.x / SLICES / TILES, width = 66 * blocks;
    const float* const of_head = scores + ((size_t)row * HEADS + min(head0 + warp, HEADS - 1)) * width;
    float acc[4] = {0.f, 0.f, 0.f, 0.f}, peak = -1e30f, total = 0.f;

    for (int first = 0; first < blocks; first += BLOCKS) {
      const int here = min(BLOCKS, blocks - first);
      constexpr int AT_ONCE = 512 / PIECES, EACH = CHUNK / AT_ONCE;  // entries that the block copies in a step
      const unsigned entry = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
      int ids[EACH];
      #pragma unroll
      for (int n = 0; n < EACH; n++) {
        ids[n] = listed(row, 64 * first + entry + n * AT_ONCE);
      }
      float a[BLOCKS], b[BLOCKS];
      float top = __int_as_float(0xff800000);  // of 32 entries in each lane, then of 64 in each two
      if (lane < 2 * here) top = of_head[64 * blocks + 2 * first + lane];
      #pragma unroll
      for (int n = 0; n < BLOCKS; n++) {
        a[n] = b[n] = __int_as_float(0xff800000);
        if (n < here) {
          a[n] = of_head[64 * (first + n) + lane];
          b[n] = of_head[64 * (first + n) + 32 + lane];
        }
      }
      const int start = begin_recent();
      #pragma unroll
      for (int n = 0; n < EACH; n++) {
        uint4* const to = (uint4*)&values[piece * TILE + 8 * (entry + n * AT_ONCE)];
        const bf16* const from = named(row, 64 * first + entry + n * AT_ONCE, ids[n], start);
        if (from != nullptr) copy16_async(to, from + channel0 + 8 * piece);
        else *to = make_uint4(0, 0, 0, 0);
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      float added[16];
      #pragma unroll
      for (int n = 0; n < 16; n++) added[n] = 0.f;
      #pragma unroll
      for (int n = 0; n < BLOCKS; n++) {  // a block without entries adds nothing
        const float raised = fmaxf(peak, __shfl_sync(0xffffffffu, top, 2 * n));
        const float of_a = expf(a[n] - raised), of_b = expf(b[n] - raised);
        const float fade = expf(peak - raised);
        if (lane == 0) fades[warp][n] = fade;
        added[n] = of_a + of_b;
        peak = raised;
        chances[warp * STRIDE + 64 * n + lane] = __float2bfloat16(of_a);
        chances[warp * STRIDE + 64 * n + 32 + lane] = __float2bfloat16(of_b);
      }
      halve<8>(added, lane);
      halve<4>(added, lane);
      halve<2>(added, lane);
      halve<1>(added, lane);
      added[0] += __shfl_xor_sync(0xffffffffu, added[0], 1);
      if (lane % 2 == 0 && lane / 2 < BLOCKS) sums[warp][lane / 2] = added[0];
      if (lane == 0) peaks[warp] = peak;
      wait_for_copies();
      __syncthreads();
      if (warp < PIECES) {
        #pragma unroll 5
        for (int n = 0; n < here; n++) {
          acc[0] *= fades[g][n];
          acc[1] *= fades[g][n];
          acc[2] *= fades[g + 8][n];
          acc[3] *= fades[g + 8][n];
          #pragma unroll
          for (int step = 0; step < 4; step++) {
            const bf16* const low = &chances[g * STRIDE + 64 * n + 16 * step + 2 * t];
            const bf16* const high = low + 8 * STRIDE;
            unsigned b0, b1;
            transposed(b0, b1, &values[warp * TILE + 8 * (64 * n + 16 * step + (lane & 15))]);
            mma(acc, *(const unsigned*)low, *(const unsigned*)high, *(const unsigned*)(low + 8),
                *(const unsigned*)(high + 8), b0, b1);
          }
        }
      } else if (warp == 15 && lane < 16) {
        for (int n = 0; n < here; n++) total = fmaf(total, fades[lane][n], sums[lane][n]);
      }
      if (first + BLOCKS < blocks) __syncthreads();  // before the next chunk takes their place
    }

    if (warp == 15 && lane < 16 && head0 + lane < HEADS)
      denominators[lane] = total + expf(sinks[head0 + lane] - peaks[lane]);
    __syncthreads();
    if (warp >= PIECES) return;
    const int channel = channel0 + 8 * warp + 2 * t, pair = channel / 2 - (D / 2 - TURN);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int head = g + 8 * r;
      if (head0 + head >= HEADS) continue;
      bf16 x = __float2bfloat16(acc[2 * r] / denominators[head]);
      bf16 y = __float2bfloat16(acc[2 * r + 1] / denominators[head]);
      if (TURN > 0 && pair >= 0)
        turn_pair(x, y, cosine[row % length * TURN + pair], -sine[row % length * TURN + pair]);
      bf16* const to = o + ((size_t)row * HEADS + head0 + head) * D + channel;
      to[0] = x;
      to[1] = y;
    }
"""
)

_LISTS = ["near", "near_list", "far", "far_list", "recent", "base"]
_scores = Kernel(
    "sparse_attention_scores",
    ["q", *_LISTS, "scale", "cosine", "sine"],
    ["scores"],
    None,
    cuda_source=SCORES_SOURCE,
    cuda_header=HEADER,
    cuda_bounds=(128, 4),
    exact=False,
    family="sparse_attention",
)
_values = Kernel(
    "sparse_attention_values",
    ["scores", *_LISTS, "sinks", "cosine", "sine"],
    ["o"],
    None,
    cuda_source=VALUES_SOURCE,
    cuda_header=HEADER + _HALVE,
    shared_memory=_SHARED,
    cuda_bounds=(512, 2),
    exact=False,
    family="sparse_attention",
)


def attend(
    q: mx.array,
    lists: list[mx.array],
    sinks: mx.array,
    scale: mx.array,
    cos: mx.array,
    sin: mx.array,
    *,
    template: list[tuple[str, int]],
) -> mx.array:
    """As the kernel for many rows, from its inputs; lists: near to base. `template`: all of its values but HG."""
    _, near_list, far, far_list, *_ = lists
    (B, L, count), heads = far_list.shape, sinks.size
    if dict(template)["TWO"]:
        count += near_list.shape[2]
    blocks, tiles, slices = ceil_div(count, 64), ceil_div(heads, _HEADS), far.shape[2] // _SLICE
    scores = _scores(
        inputs=[q, *lists, scale, cos, sin],
        template=[*template, ("HEADS", heads)],
        grid=(B * L * 2 * blocks * tiles * 128, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(B * L, heads, 66 * blocks)],
        output_dtypes=[mx.float32],
    )[0]
    return _values(
        inputs=[scores, *lists, sinks, cos, sin],
        template=[*template, ("HEADS", heads)],
        grid=(B * L * tiles * slices * 512, 1, 1),
        threadgroup=(512, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[mx.bfloat16],
    )[0]
