"""CUDA body of the index scores: dots on tensor cores (mma m16n8k16, float32 sums), where Metal's text uses 8x8 tiles.

Heads are the 16 rows of A, keys the 8 columns of B; both lie in memory as the instruction wants them once channels are
dealt out so that a lane owns 8 neighbouring ones of each 32. Rectified, weighted and summed over heads in registers.
A key stays in registers for all rows of a block, and is held twice, by one warp for each half of the heads' tiles.

Estimate, on an H200: 300,000 keys are 77 MB, 18 us at the copy rate; six rows are 15 GFLOP, about as long at half of
the tensor cores' rate.
"""

from __future__ import annotations

SOURCE = """
    // A block of 8 warps owns 128 columns of ROWS rows. Warp w owns 32 of them and every other tile of 16 heads, from
    // tile w / 4 on. Lane (g = lane / 4, t = lane % 4) holds key g of each 8, heads g and g + 8 of each 16.
    using namespace ds4_tiles;
    __shared__ float partial[2][ROWS][128];
    __shared__ int column_key[128];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, half = warp >> 2;
    const int length = q_shape[1], heads = q_shape[2];
    const int old_rows = keys_shape[1], recent_rows = SPLIT ? recent_shape[1] : 0;
    const int start = SPLIT ? max(min(base[0], old_rows), 0) : old_rows;  // of the recent rows
    const int entries = start + recent_rows;
    const int width = BLOCK > 0 ? blocks_shape[2] * BLOCK : old_rows + recent_rows;
    const int groups = (width + 127) / 128, tiles = (length + ROWS - 1) / ROWS;
    const int group0 = blockIdx.x % groups * 128, local0 = 32 * (warp & 3);
    const int row0 = blockIdx.x / groups % tiles * ROWS, batch = blockIdx.x / groups / tiles;
    const int end = min(row0 + ROWS, length);
    const float factor = __int_as_float(FACTOR_BITS);

    int limit = 0;
    for (int row = row0; row < end; row++) limit = max(limit, visible[row]);
    limit = min(limit, entries);
    if (threadIdx.x < 128) {
      const int column = group0 + threadIdx.x;
      int key = column < width ? column : -1;
      if (BLOCK > 0 && column < width) {
        constexpr int size = BLOCK > 0 ? BLOCK : 1;
        const int block = blocks[(size_t)(batch * length + row0) * blocks_shape[2] + column / size];
        key = block < 0 ? -1 : block * size + column % size;
      }
      column_key[threadIdx.x] = key;
    }
    __syncthreads();
    uint4 k[4][D / 32];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = column_key[local0 + 8 * i + g];
      const bool read = key >= 0 && key < limit;
      const bool is_recent = SPLIT && read && key >= start;
      const __nv_bfloat16* from = (is_recent ? recent : keys) + 8 * t
          + ((size_t)batch * (is_recent ? recent_rows : old_rows) + (read ? is_recent ? key - start : key : 0)) * D;
      #pragma unroll
      for (int c = 0; c < D / 32; c++) k[i][c] = octet(from + 32 * c, read);
    }

    for (int row = row0; row < end; row++) {
      if (BLOCK == 0 && group0 + local0 >= visible[row]) continue;  // the whole warp; these columns are hidden
      const size_t query = ((size_t)batch * length + row) * heads;
      float sums[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
      for (int tile = half; tile < (HEADS + 15) / 16; tile += 2) {
        const int low = 16 * tile + g, high = low + 8;
        const __nv_bfloat16* from = q + query * D + 8 * t;
        // Read before the products, not behind them.
        const float of_low = low < heads ? (float)__float2bfloat16((float)weights[query + low] * factor) : 0.f;
        const float of_high = high < heads ? (float)__float2bfloat16((float)weights[query + high] * factor) : 0.f;
        float dots[4][4];
        #pragma unroll
        for (int i = 0; i < 4; i++) dots[i][0] = dots[i][1] = dots[i][2] = dots[i][3] = 0.f;
        #pragma unroll
        for (int c = 0; c < D / 32; c++) {
          const uint4 a = octet(from + (size_t)low * D + 32 * c, low < heads);
          const uint4 b = octet(from + (size_t)high * D + 32 * c, high < heads);
          #pragma unroll
          for (int i = 0; i < 4; i++) product(dots[i], a, b, k[i][c]);
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          #pragma unroll
          for (int e = 0; e < 2; e++) {
            sums[2 * i + e] = fmaf(of_low, (dots[i][e] < 0.f ? 0.f : dots[i][e]), sums[2 * i + e]);
            sums[2 * i + e] = fmaf(of_high, (dots[i][2 + e] < 0.f ? 0.f : dots[i][2 + e]), sums[2 * i + e]);
          }
        }
      }
      // Over the eight g: a lane passes on half of its sums at each step, until it holds sum number g.
      #pragma unroll
      for (int n = 4; n > 0; n >>= 1) {
        const bool upper = lane & (4 * n);
        #pragma unroll
        for (int j = 0; j < n; j++) {
          const float other = __shfl_xor_sync(0xffffffffu, upper ? sums[j] : sums[j + n], 4 * n);
          sums[j] = (upper ? sums[j + n] : sums[j]) + other;
        }
      }
      partial[half][row - row0][local0 + 8 * (g >> 1) + 2 * t + (g & 1)] = sums[0];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < (end - row0) * 128; i += 256) {
      const int row = row0 + i / 128, column = i % 128, key = column_key[column];
      if (group0 + column < width)
        scores[((size_t)batch * length + row) * width + group0 + column] =
            key >= 0 && key < min(visible[row], entries)
                ? partial[0][row - row0][column] + partial[1][row - row0][column]
                : __int_as_float(0xff800000);
    }
"""
