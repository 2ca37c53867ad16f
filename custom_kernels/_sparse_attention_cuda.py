"""CUDA body of sparse attention: both products on tensor cores, up to 16 heads of a query row in a block.

The rows of a block of 64 entries lie in registers for the scores, then go through shared memory in two halves for the
values, so that each is read once for 16 heads. A product's rows do not mix, so fewer heads give the same bits. A few
query rows have a body of their own, with the same sums in the same order (`_sparse_attention_few_cuda.py`).

Estimate, on an H200: 2,048 query rows of 64 heads and 640 entries read 5.4 GB from the second-level cache, about 1 ms.
"""

from __future__ import annotations

# What both bodies begin with.
SOURCES = """
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int length = q_shape[1], heads = sinks_shape[0];
    const int near_rows = near_shape[1], near_count = TWO ? near_list_shape[2] : 0;
    const int far_rows = far_shape[1], far_count = far_list_shape[2], recent_rows = SPLIT ? recent_shape[1] : 0;
    const int start = SPLIT ? max(min(base[0], far_rows), 0) : far_rows;  // of the recent rows
    const float SCALE = __int_as_float(SCALE_BITS), NO_SCORE = __int_as_float(0xff800000);
    // A pair of channels, turned and rounded.
    const auto turn = [](bf16& x, bf16& y, float c, float s) {
      const float a = __bfloat162float(x), b = __bfloat162float(y);
      x = __float2bfloat16(a * c - b * s);
      y = __float2bfloat16(a * s + b * c);
    };
"""

SOURCE = (
    """
    // A block of 8 warps owns HG heads of one query row. Warp w owns entries 8 w .. 8 w + 7 of each 64 for the scores,
    // heads 2 w and 2 w + 1 for the softmax, and an eighth of the channels for the values.
    using namespace ds4_tiles;
    constexpr int D = 64 * PAIRS, STRIDE = D + 8;  // eight rows begin in different banks
    constexpr int TAIL = TURN_QUERIES ? (2 * TURN + 31) / 32 * 32 : 0;  // the last channels, which hold what turns
    __shared__ __align__(16) bf16 turned[16 * (TAIL + 8)];
    __shared__ __align__(16) bf16 values[32 * STRIDE];
    __shared__ float scores[16][66];
    __shared__ __align__(4) bf16 chances[16][72];
    __shared__ float fades[16], denominators[16];
"""
    + SOURCES
    + """
    const int row = blockIdx.x / (heads / HG), head0 = blockIdx.x % (heads / HG) * HG, batch = row / length;
    const size_t out = ((size_t)row * heads + head0) * D;
    const size_t at_turn = (size_t)(row % length) * TURN;
    const bf16* query = q + out + 8 * t;
    for (int i = threadIdx.x; i < HG * TAIL / 2; i += 256) {
      constexpr int half = TAIL > 0 ? TAIL / 2 : 1;
      const int head = i / half, channel = D - TAIL + 2 * (i % half), pair = channel / 2 - (D / 2 - TURN);
      bf16 x = q[out + (size_t)head * D + channel], y = q[out + (size_t)head * D + channel + 1];
      if (pair >= 0) turn(x, y, cosine[at_turn + pair], sine[at_turn + pair]);
      turned[head * (TAIL + 8) + 2 * (i % half)] = x;
      turned[head * (TAIL + 8) + 2 * (i % half) + 1] = y;
    }
    if (TAIL > 0) __syncthreads();
    // 16 bytes of head h from channel 32 c + 8 t on
    const auto of_query = [&](int h, int c) {
      if (h >= HG) return make_uint4(0, 0, 0, 0);
      if (32 * c >= D - TAIL) return *(const uint4*)&turned[h * (TAIL + 8) + 32 * c - (D - TAIL) + 8 * t];
      return octet(query + (size_t)h * D + 32 * c, true);
    };
    float acc[PAIRS][4];
    #pragma unroll
    for (int n = 0; n < PAIRS; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
    float peak[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f};

    int upcoming[2] = {-1, -1};  // the list is read a block ahead of the rows
    for (int first = -64; first < near_count + far_count; first += 64) {
      const int entry[2] = {upcoming[0], upcoming[1]};
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const int p = first + 64 + 32 * i + lane;
        int id = -1;
        if (p < near_count) id = near_list[(size_t)row * near_count + p];
        else if (p < near_count + far_count) id = far_list[(size_t)row * far_count + p - near_count];
        upcoming[i] = id >= 0 && id < (p < near_count ? near_rows : start + recent_rows) ? id : -1;
      }
      if (!__any_sync(0xffffffffu, entry[0] >= 0 || entry[1] >= 0)) continue;  // all warps alike
      const int listed = warp < 4 ? entry[0] : entry[1];
      const int id = __shfl_sync(0xffffffffu, listed, (8 * warp + g) & 31);
      const bool is_near = first + 8 * warp + g < near_count;
      const bool is_recent = SPLIT && !is_near && id >= start;
      const bf16* from = (is_near ? near : is_recent ? recent : far) + 8 * t
          + ((size_t)batch * (is_near ? near_rows : is_recent ? recent_rows : far_rows)
             + (id < 0 ? 0 : is_recent ? id - start : id)) * D;
      uint4 k[2 * PAIRS];
      #pragma unroll
      for (int c = 0; c < 2 * PAIRS; c++) k[c] = octet(from + 32 * c, id >= 0);
      float dots[2][4] = {};  // of even and odd 32 channels, so that one need not wait for the other
      #pragma unroll
      for (int c = 0; c < 2 * PAIRS; c++) {
        product(dots[c & 1], of_query(g, c), of_query(g + 8, c), k[c]);
      }
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int p = 8 * warp + 2 * t + (i & 1);
        const bool present = __shfl_sync(0xffffffffu, listed, p & 31) >= 0;
        scores[g + 8 * (i >> 1)][p] = present ? (dots[0][i] + dots[1][i]) * SCALE : NO_SCORE;
      }
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const int head = 2 * warp + i;
        const float a = scores[head][lane], b = scores[head][lane + 32];
        const float raised = fmaxf(peak[i], warp_max(fmaxf(a, b)));
        const float fade = expf(peak[i] - raised), of_a = expf(a - raised), of_b = expf(b - raised);
        total[i] = fmaf(total[i], fade, warp_sum(of_a + of_b));
        peak[i] = raised;
        chances[head][lane] = __float2bfloat16(of_a);
        chances[head][lane + 32] = __float2bfloat16(of_b);
        if (lane == 0) fades[head] = fade;
      }
      #pragma unroll
      for (int part = 0; part < 2; part++) {  // 32 entries at a time
        if (part) __syncthreads();
        if (warp >> 2 == part) {
          #pragma unroll
          for (int c = 0; c < 2 * PAIRS; c++)
            *(uint4*)&values[(8 * (warp & 3) + g) * STRIDE + 32 * c + 8 * t] = k[c];
        }
        __syncthreads();
        if (part == 0) {
          const float low = fades[g], high = fades[g + 8];
          #pragma unroll
          for (int n = 0; n < PAIRS; n++) {
            acc[n][0] *= low;
            acc[n][1] *= low;
            acc[n][2] *= high;
            acc[n][3] *= high;
          }
        }
        #pragma unroll
        for (int step = 0; step < 2; step++) {
          const int p = 32 * part + 16 * step + 2 * t;
          const unsigned a0 = *(const unsigned*)&chances[g][p], a1 = *(const unsigned*)&chances[g + 8][p];
          const unsigned a2 = *(const unsigned*)&chances[g][p + 8], a3 = *(const unsigned*)&chances[g + 8][p + 8];
          #pragma unroll
          for (int n = 0; n < PAIRS; n++) {
            unsigned b0, b1;
            transposed(b0, b1, &values[(16 * step + (lane & 15)) * STRIDE + 8 * (PAIRS * warp + n)]);
            mma(acc[n], a0, a1, a2, a3, b0, b1);
          }
        }
      }
    }

    if (lane < 2 && 2 * warp + lane < HG) {
      const int head = 2 * warp + lane;
      denominators[head] = (lane ? total[1] : total[0]) + expf(sinks[head0 + head] - (lane ? peak[1] : peak[0]));
    }
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < PAIRS; n++) {
      const int channel = 8 * (PAIRS * warp + n) + 2 * t, pair = channel / 2 - (D / 2 - TURN);
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int head = g + 8 * r;
        if (head >= HG) continue;
        bf16 x = __float2bfloat16(acc[n][2 * r] / denominators[head]);
        bf16 y = __float2bfloat16(acc[n][2 * r + 1] / denominators[head]);
        if (TURN > 0 && pair >= 0) turn(x, y, cosine[at_turn + pair], -sine[at_turn + pair]);
        o[out + (size_t)head * D + channel] = x;
        o[out + (size_t)head * D + channel + 1] = y;
      }
    }
"""
)
