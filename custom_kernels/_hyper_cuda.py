"""CUDA body of a site's partial sums for many rows: the sums of `SITE_SOURCE`, in the same order, from registers.

A warp keeps 8 rows by 8 outputs, so that 64 multiply-adds share 16 loads, most of them from the first cache: the warps
of a block read the same part of fn (64 KB) and of h. Nothing is conditional and the next step's loads come before the
multiply-adds. The lanes' sums are added in the order of `simd_sum`, by passing on half of them at each step.

Estimate, on an H200: 2,048 rows of 4 x 5,120 are 1.05e9 multiply-adds, 36 us at the card's rate, and 1.4 times as many
instructions; h once, 84 MB, 20 us; fn once for 64 rows, 64 MB from the second cache.
"""

from __future__ import annotations

HEADER = """
#include <cuda_bf16.h>

// Sums over lanes of 2 N numbers each, in simd_sum's order: a lane passes on half of its numbers at each step, from
// lanes STEP away on; what it keeps in the end is chosen by its own number's bits, the highest first.
template <int N, int STEP>
__device__ __forceinline__ void halve(float* sums, int lane) {
  const bool upper = lane & STEP;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[i + N], STEP);
    sums[i] = (upper ? sums[i + N] : sums[i]) + other;
  }
  if constexpr (N > 1 && STEP > 1) halve<N / 2, STEP / 2>(sums, lane);
}
"""
TILE = 16  # rows that a block has in work at a time
THREADS = 64  # times the runs of outputs

SOURCE = """
    // Block (x, y) owns part y of the products and run x of the rows, 16 at a time. Warp w owns 8 of them
    // and outputs 8 (w % RUNS) to 8 (w % RUNS) + 7; the last of each RUNS warps owns the squares. The rows of a short
    // tile are the last ones, summed again to the same bits.
    constexpr int RUNS = O / 8 + 1, STEPS = CHUNK / 32;
    constexpr bool WHOLE = M * C == PARTS * CHUNK;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, run = warp % RUNS;
    const int rows = h_shape[0], part = blockIdx.y, first = part * CHUNK + lane;
    const int end = min(M * C, (part + 1) * CHUNK);
    const int share = (rows + 16 * gridDim.x - 1) / (16 * gridDim.x) * 16;
    const int last = min(rows, ((int)blockIdx.x + 1) * share);
    for (int tile = blockIdx.x * share + 8 * (warp / RUNS); tile < last; tile += 16) {
      const int row = min(tile, rows - 8);
      const auto* from = h + (size_t)row * (M * C);
      float* to = dots + ((size_t)(row + lane / 4) * PARTS + part) * (O + 1);
      if (run == RUNS - 1) {
        float sums[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        #pragma unroll 4
        for (int step = 0; step < STEPS; step++) {
          const int k = first + 32 * step;
          #pragma unroll
          for (int r = 0; r < 8; r++) {
            const float v = WHOLE || k < end ? (float)from[(size_t)r * (M * C) + k] : 0.f;
            sums[r] = fmaf(v, v, sums[r]);
          }
        }
        halve<4, 16>(sums, lane);  // the squares of row lane / 4
        sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 2);
        sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 1);
        if (lane % 4 == 0) to[O] = sums[0];
      } else {
        const auto* weights = fn + (size_t)(8 * run) * (M * C);
        float sums[64], v[2][8], w[2][8];
        #pragma unroll
        for (int i = 0; i < 64; i++) sums[i] = 0.f;
        #pragma unroll 2
        for (int step = -1; step < STEPS; step++) {
          const int next = (step + 1) & 1, now = step & 1;
          if (step + 1 < STEPS) {
            const int k = first + 32 * (step + 1), at = WHOLE ? k : min(k, M * C - 1);
            #pragma unroll
            for (int i = 0; i < 8; i++) {
              v[next][i] = (float)from[(size_t)i * (M * C) + at];
              w[next][i] = (float)weights[(size_t)i * (M * C) + at];
            }
          }
          if (step >= 0 && (WHOLE || first + 32 * step < end)) {
            #pragma unroll
            for (int i = 0; i < 64; i++) sums[i] = fmaf(v[now][i / 8], w[now][i % 8], sums[i]);
          }
        }
        halve<32, 16>(sums, lane);  // numbers 2 lane and 2 lane + 1
        #pragma unroll
        for (int i = 0; i < 2; i++) to[8 * run + lane % 4 * 2 + i] = sums[i];
      }
    }
"""
