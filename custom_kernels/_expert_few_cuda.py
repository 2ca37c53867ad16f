"""CUDA bodies of the routed experts for at most 8 rows and 64 pairs; _quant_cuda.py and _expand_cuda.py launch them."""

from __future__ import annotations

# The pairs (row, slot) that chose an expert are the columns of one tile.
_PAIRS = """
    // At most 64 pairs: every warp holds all choices, two a lane, and knows the pairs of an expert as a bit mask.
    using namespace ds4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int P = rows_of(chosen_shape, chosen_ndim) * width_of(chosen_shape, chosen_ndim);
    const int choice = lane < P ? chosen[lane] : -1, choice2 = lane + 32 < P ? chosen[lane + 32] : -1;
    auto expert_of = [&](int q) { return __shfl_sync(~0u, q < 32 ? choice : choice2, q & 31); };
    auto chosen_by = [&](int e) {
      return (unsigned long long)__ballot_sync(~0u, choice2 == e) << 32 | __ballot_sync(~0u, choice == e);
    };
    auto pair_of = [](unsigned long long mask, int column) {
      for (int i = 0; i < column; i++) mask &= mask - 1;
      return __ffsll(mask) - 1;
    };
"""

GATE_UP_FEW_SOURCE = (
    """
    // Blocks go round the items (distinct expert, tile): 16 rows of gate and up, for all pairs with this expert. The S
    // warps of a block take units of the width in turn.
"""
    + _PAIRS
    + """
    // Wide tables leave a warp four steps of IQ2_XXS instead of a whole ring; its sums go where its ring begins.
    constexpr int TABLES = Few<F, true>::TABLES, AT_ONCE = TABLES > 1 ? 4096 : RING;
    uint4* const tables = (uint4*)dynamic_shared();
    uint4* const rings = tables + (TABLES > 1 ? TABLES : 0);
    float* const part = (float*)rings;
    Few<F, true>::stage(tables);
    const float LIMIT = __int_as_float(LIMIT_BITS);
    const Planes w1 = {(const unsigned char*)codes1, (const unsigned char*)scales1, (const unsigned char*)supers1};
    const Planes w3 = {(const unsigned char*)codes3, (const unsigned char*)scales3, (const unsigned char*)supers3};
    const int K = width_of(x_shape, x_ndim), N = codes1_shape[1], tiles = (N + 15) / 16;
    unsigned long long firsts = 0;  // the first pair of each distinct expert
    for (int q = 0; q < P; q++) {
      const unsigned long long mask = chosen_by(expert_of(q));
      if (__ffsll(mask) - 1 == q) firsts |= 1ull << q;
    }
    const int items = __popcll(firsts) * tiles;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int expert = expert_of(pair_of(firsts, item / tiles)), tile = item % tiles;
      const unsigned long long riders = chosen_by(expert);
      const bf16* const row = (const bf16*)x + (size_t)(pair_of(riders, min(g, __popcll(riders) - 1)) / SLOTS) * K;
      float gate[1][4], up[1][4];
      clear(gate);
      clear(up);
      __syncthreads();  // tables are there, and the sums of the item before are read
      two_products<F, true, AT_ONCE>(
          gate, up, w1, w3, (size_t)expert * N, tile, N, K, row, warp, S, K / Few<F, true>::UNIT, tables,
          (unsigned char*)rings + warp * AT_ONCE);
      for (int c = 0; c < 4; c++) {
        part[warp * (AT_ONCE / 4) + 32 * c + lane] = gate[0][c];
        part[warp * (AT_ONCE / 4) + 128 + 32 * c + lane] = up[0][c];
      }
      const unsigned long long mask = chosen_by(expert);  // once more, which takes fewer registers than keeping it
      const int count = __popcll(mask);
      __syncthreads();
      for (int e = threadIdx.x; e < 128; e += 32 * S) {
        const int c = e / 32, n = 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1);
        if (n >= count || r >= N) continue;
        float a = 0.f, b = 0.f;
        for (int s = 0; s < S; s++) {
          a += part[s * (AT_ONCE / 4) + e];
          b += part[s * (AT_ONCE / 4) + 128 + e];
        }
        a = fminf(round_bf16(a), LIMIT);
        b = fminf(fmaxf(round_bf16(b), -LIMIT), LIMIT);
        const int pair = pair_of(mask, n);
        y[(size_t)pair * N + r] = bf16(weights[pair] * (a / (1.f + expf(-a)) * b));
      }
    }
"""
)

DOWN_FEW_SOURCE = (
    """
    // Block: 16 output rows of all distinct experts; a task is one half of the width for one of them, tasks go round
    // the warps, then the shares of the SS warps that would multiply the shared expert's matrix alone. Then the halves
    // are added, rounded, and summed over each row's slots. SHARED: 0 nothing, 1 values to add, 2 a product.
"""
    + _PAIRS
    + """
    __shared__ uint4 grid_s[F == IQ2_XXS || FS == IQ2_XXS ? 256 : 1];
    if (F == IQ2_XXS || FS == IQ2_XXS) {
      stage_grid(grid_s);
      __syncthreads();
    }
    __shared__ uint4 rings[S * RING / 16];
    unsigned char* const ring = ring_of(rings, warp);
    __shared__ float part[2][64][16];
    __shared__ float share[SHARED == 2 ? SS * 128 : 1];
    const Planes w = {(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers};
    const int tile = blockIdx.x, K = width_of(x_shape, x_ndim), N = codes_shape[1];
    const int units = K / Weight<F>::UNIT, half = (units + 1) / 2;
    int task = 0;
    for (int q = 0; q < P; q++) {
      const int expert = expert_of(q);
      const unsigned long long mask = chosen_by(expert);
      if (mask & ((1ull << q) - 1)) continue;  // an earlier pair chose the same
      const int count = __popcll(mask);
      for (int side = 0; side < 2; side++) {
        if (task++ % S != warp) continue;
        Rows<1> rows;
        rows.p[0] = (const bf16*)x + (size_t)pair_of(mask, min(g, count - 1)) * K;
        float acc[1][4];
        clear(acc);
        product<F, 1>(
            acc, w, (size_t)expert * N, tile, N, K, rows, side ? half : 0, 1, side ? units : half, grid_s, ring);
        for (int c = 0; c < 4; c++) {
          const int n = 2 * t + (c & 1);
          if (n < count) part[side][pair_of(mask, n)][g + 8 * (c >> 1)] = acc[0][c];
        }
      }
    }
    if (SHARED == 2) {
      const Planes ws = {
          (const unsigned char*)shared_codes, (const unsigned char*)shared_scales, (const unsigned char*)shared_supers};
      const int width = width_of(shared_shape, shared_ndim);
      Rows<1> rows;
      rows.p[0] = (const bf16*)shared + (size_t)min(g, P / SLOTS - 1) * width;
      for (int s = 0; s < SS; s++) {
        if (task++ % S != warp) continue;
        float acc[1][4];
        clear(acc);
        product<FS, 1>(acc, ws, 0, tile, N, width, rows, s, SS, width / Weight<FS>::UNIT, grid_s, ring);
        for (int c = 0; c < 4; c++) share[s * 128 + 32 * c + lane] = acc[0][c];
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < P / SLOTS * 16; e += 32 * S) {
      const int n = e / 16, r = 16 * tile + e % 16;
      if (r >= N) continue;
      float sum = 0.f;
      for (int s = 0; s < SLOTS; s++) {
        const int pair = n * SLOTS + s;
        sum += round_bf16(part[0][pair][e % 16] + part[1][pair][e % 16]);
      }
      if (SHARED == 1) sum += __bfloat162float(((const bf16*)shared)[(size_t)n * N + r]);
      if (SHARED == 2) {  // the lane and the register that hold row e % 16, column n
        const int at = 32 * ((n & 1) + 2 * (e % 16 / 8)) + 4 * (e % 8) + n / 2;
        float added = SS == 1 ? share[at] : 0.f;
        for (int s = 0; SS > 1 && s < SS; s++) added += share[s * 128 + at];
        sum += round_bf16(added);
      }
      y[(size_t)n * N + r] = bf16(sum);
    }
"""
)
