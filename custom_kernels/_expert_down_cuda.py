"""CUDA bodies of the routed experts' last product for at most 8 rows and 64 pairs, with the shared expert's;
`_quant_cuda.py` and `_expand_cuda.py` launch them."""

from __future__ import annotations

from ._expert_few_cuda import FIRSTS, PAIRS

DOWN_FEW_SOURCE = (
    """
    // A block has a part of an expert, for as many of its pairs as shared memory holds, HELD_ROWS: up to `rounds`
    // tiles of 16 output rows for each of its S warps, the whole width in one warp, whose ring runs on through them.
    // Or, SHARED == 2, a part of the shared expert's matrix, where the warps take the width in turn. y: each pair's
    // outputs, rounded, then the shared expert's of each row. Sums are those of two halves of the width, and of the SS
    // warps that would share the shared matrix. Minima of Q2_K multiply sums of columns, which a block makes first.
"""
    + PAIRS
    + FIRSTS
    + """
    __shared__ uint4 grid_s[F == IQ2_XXS || FS == IQ2_XXS ? 256 : 1];
    if (F == IQ2_XXS || FS == IQ2_XXS) {
      stage_grid(grid_s);
      __syncthreads();
    }
    __shared__ uint4 rings[S * RING / 16];
    __shared__ uint4 held[HELD / 16];
    const u32 ring = ring_of(rings, __shfl_sync(~0u, warp, 0));  // in a uniform register
    const int K = width_of(x_shape, x_ndim), N = codes_shape[1], tiles = (N + 15) / 16;
    const int pitch = K + 32;  // of the pairs' activations: neighbours in different banks
    constexpr bool SUMMED = F == Q2_K;
    const int summed = SUMMED ? K / 256 * ColumnSums::STEP : 0;  // numbers of a row, behind the activations
    constexpr int group = HELD_ROWS > 0 ? HELD_ROWS : 1;  // pairs at most; not held, one is read where it lies
    const unsigned long long firsts = first_of_every(group);
    const int groups = __popcll(firsts);
    // A group has as few parts as take no more rounds than its share of the blocks would; the shared matrix, which is
    // about the work of a group, has the blocks left.
    const int blocks = gridDim.x, wanted = S * max(blocks / (groups + (SHARED == 2)), 1);
    const int rounds = (tiles + wanted - 1) / wanted, each = (tiles + S * rounds - 1) / (S * rounds);
    const int apart = SHARED == 2 ? min(max(blocks - each * groups, 1), tiles) : 0;
    const int part = blockIdx.x;
    if (part >= apart + each * groups) return;
    if (part >= apart) {
      typedef Weight<F> W;
      const int k = (part - apart) / each, from = (part - apart - k * each) * S * rounds;
      const int until = min(from + S * rounds, tiles);
      const Planes w[1] = {{(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers}};
      const int first = pair_of(firsts, k), expert = expert_of(first);
      const unsigned long long riders = chosen_by(expert) >> first << first;  // and those of later groups
      const int count = min(__popcll(riders), group), units = K / W::UNIT, half = (units + 1) / 2;
      const int pair = pair_of(riders, min(g, count - 1));  // of the lane's column of x
      for (int n = 0; HELD_ROWS > 0 && n < count; n++) {
        const bf16* const row = (const bf16*)x + (size_t)__shfl_sync(~0u, pair, 4 * n) * K;
        for (int i = threadIdx.x; i < K / 8; i += 32 * S) copy16_async(held + n * pitch / 8 + i, row + 8 * i);
      }
      commit_copies();
      auto run_of = [&](int tile) { return Run{(size_t)expert * N, tile, N, K, 0, 1, units}; };
      Stream<W, 1> stream(ring, 1);
      int sent = from + warp;
      auto next = [&] {
        if (sent >= until) return false;
        stream.open(w, run_of(sent));
        sent += S;
        return true;
      };
      stream.fill(next);
      wait_for_copies_but<Stream<W, 1>::D>();
      __syncthreads();
      bf16* const sums = (bf16*)held + HELD_ROWS * pitch;
      for (int i = threadIdx.x; SUMMED && i < count * (K / 16); i += 32 * S) {
        const int n = i / (K / 16), sub = i - n * (K / 16);
        const bf16* const row = HELD_ROWS > 0 ? (const bf16*)held + n * pitch : (const bf16*)x + (size_t)pair * K;
        const uint4* const from = (const uint4*)(row + 16 * sub);
        ColumnSums::put(sums + n * summed + sub / 16 * ColumnSums::STEP, sub % 16, from[0], from[1]);
      }
      if (SUMMED) __syncthreads();
      typedef typename Either<(HELD_ROWS > 0), RowInShared<W>, RowInMemory<W>>::type Row;
      typename Either<SUMMED, Summed<Row>, Row>::type columns(
          (HELD_ROWS > 0 ? (const bf16*)held + min(g, count - 1) * pitch : (const bf16*)x + (size_t)pair * K) +
          t * W::LANE_COLUMNS, K, sums + min(g, count - 1) * summed + 4 * t);
      for (int tile = from + warp; tile < until; tile += S) {
        float sum[4] = {-0.f, -0.f, -0.f, -0.f};
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
          Run run = run_of(tile);
          run.first = h ? half : 0;
          run.end = h ? units : half;
          float acc[1][4];
          clear(acc);
          stream.multiply_run(w, run, next, [](int) {}, [&](W(&now)[1], bool) {
            columns.go_on();
            now[0].multiply(acc, columns, t, grid_s);
          });
          for (int c = 0; c < 4; c++) sum[c] += acc[0][c];
        }
        // The pairs of its columns of results, which would take registers before.
        const int pair0 = __shfl_sync(~0u, pair, 8 * t), pair1 = __shfl_sync(~0u, pair, 8 * t + 4);
        for (int c = 0; c < 4; c++) {
          const int n = 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1);
          if (n < count && r < N) y[(size_t)(c & 1 ? pair1 : pair0) * N + r] = bf16(sum[c]);
        }
      }
    } else if (SHARED == 2) {
      typedef Weight<FS> W;
      typedef const unsigned char* Bytes;
      constexpr int TEAM = SS < S ? SS : S, TEAMS = S / TEAM;  // warps of a tile, tiles at a time
      static_assert(SHARED != 2 || 2 * TEAMS * SS * 512 <= HELD, "");
      const Planes w[1] = {{(Bytes)shared_codes, (Bytes)shared_scales, (Bytes)shared_supers}};
      const int width = width_of(shared_shape, shared_ndim), rows = P / SLOTS;
      const int from = part * tiles / apart, until = (part + 1) * tiles / apart, member = warp % TEAM;
      auto share_of = [&](int tile, int s) { return Run{0, tile, N, width, s, SS, width / W::UNIT}; };
      Stream<W, 1> shares(ring, SS);
      int sent = from + warp / TEAM, opened = member;
      auto next = [&] {
        if (sent >= until) return false;
        shares.open(w, share_of(sent, opened));
        opened += TEAM;
        if (opened >= SS) {
          opened = member;
          sent += TEAMS;
        }
        return true;
      };
      shares.fill(next);
      const u32 row = min(g, rows - 1) * width + t * W::LANE_COLUMNS;
      u32 following = row + member * W::UNIT;
      HeldRow<W> columns((const bf16*)shared + following, g < rows);
      columns.read(0);
      for (int begin = from, set = 0; begin < until; begin += TEAMS, set ^= 1) {
        // Two sets of sums, used in turn, so that a tile needs one barrier.
        float* const sums = (float*)held + set * (TEAMS * SS * 128);
        const int tile = begin + warp / TEAM;
        for (int s = member; s < SS && tile < until; s += TEAM) {
          const bool ends = s + TEAM >= SS;
          float acc[1][4];
          clear(acc);
          shares.multiply_run(w, share_of(tile, s), next, [](int) {}, [&](W(&now)[1], bool last) {
            columns.real &= !last || !ends || tile + TEAMS < until;
            following = last ? row + (ends ? member : s + TEAM) * W::UNIT : following + SS * W::UNIT;
            columns.following = (const bf16*)shared + following;
            now[0].multiply(acc, columns, t, grid_s);
          });
          for (int c = 0; c < 4; c++) sums[(warp / TEAM * SS + s) * 128 + 32 * c + lane] = acc[0][c];
        }
        __syncthreads();
        for (int e = threadIdx.x; e < TEAMS * 128; e += 32 * S) {
          const int c = e / 32 % 4, n = 2 * t + (c & 1), at = begin + e / 128, r = 16 * at + g + 8 * (c >> 1);
          if (n >= rows || r >= N || at >= until) continue;
          const float* const first = sums + e / 128 * SS * 128 + e % 128;
          float sum = SS == 1 ? first[0] : 0.f;
          for (int s = 0; s < SS && SS > 1; s++) sum += first[s * 128];
          y[(size_t)(P + n) * N + r] = bf16(sum);
        }
      }
    }
"""
)

# A thread: one output, the sum of its row's pairs [rows SLOTS, C] in the order of the slots and, SHARED, what is added:
# 1 shared [rows, C], 2 the rows behind the pairs. STORE takes it from there.
SUM_SOURCE = """
    const int rows = pairs_shape[0] / (SHARED == 2 ? SLOTS + 1 : SLOTS), N = pairs_shape[1];
    const int at = blockIdx.x * blockDim.x + threadIdx.x, n = at / N, r = at % N;
    if (n >= rows) return;
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) sum += __bfloat162float(pairs[(size_t)(n * SLOTS + s) * N + r]);
    if (SHARED == 1) sum += __bfloat162float(shared[(size_t)n * N + r]);
    if (SHARED == 2) sum += __bfloat162float(pairs[(size_t)(rows * SLOTS + n) * N + r]);
    STORE
"""
