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
#pragma unroll 1
      for (int i = 0; i < column; i++) mask &= mask - 1;
      return __ffsll(mask) - 1;
    };
"""

# Of an expert's riders AT_ONCE at a time: one with more of them is in the list again. Rows are at most 8.
_DISTINCT = """
    __shared__ int experts[64], first_riders[AT_ONCE < 8 ? 64 : 1], listed;
    if (warp == 0) {
      int before[2] = {0, 0};  // riders of the same expert before this lane's pairs
      for (int q = 0; q < P; q++) {
        const int e = expert_of(q);
        before[0] += e == choice && q < lane;
        before[1] += e == choice2 && q < lane + 32;
      }
      const unsigned long long firsts =
          (unsigned long long)__ballot_sync(~0u, lane + 32 < P && before[1] % AT_ONCE == 0) << 32 |
          __ballot_sync(~0u, lane < P && before[0] % AT_ONCE == 0);
      for (int q = lane; q < 64; q += 32) {
        if (!(firsts >> q & 1)) continue;
        const int k = __popcll(firsts & ((1ull << q) - 1));
        experts[k] = q < 32 ? choice : choice2;
        if (AT_ONCE < 8) first_riders[k] = q;
      }
      if (lane == 0) listed = __popcll(firsts);
    }
    __syncthreads();
    const int distinct = listed;
    auto riders_of = [&](int k) { return chosen_by(experts[k]) & (AT_ONCE < 8 ? ~0ull << first_riders[k] : ~0ull); };
"""

GATE_UP_FEW_SOURCE = (
    """
    // Teams of TEAM warps, TEAMS a block, go round the items (distinct expert, tile): 16 rows of gate and up, for pairs
    // with this expert, four at a time, in every other column: that saves half of the products with scales. A warp adds
    // up parts of the width, of the S that take its units in turn; its ring runs on through parts and items.
    constexpr int AT_ONCE = 4;
"""
    + _PAIRS
    + _DISTINCT
    + """
    typedef Few<F, true> W;
    const int team = warp / TEAM, member = warp % TEAM;
    // Tables at a multiple of their size, if there are any; rings before them and behind them.
    unsigned char *const start = (unsigned char*)dynamic_shared(), *tables = start;
    if (W::TABLES) tables += -shared_address(start) & (W::TABLES - 1);
    const int before = min((int)(tables - start) / BYTES, TEAMS * TEAM);
    unsigned char* const behind = tables + W::TABLES - before * BYTES;
    Stream<W, 2, S, BYTES> stream(opaque(shared_address(warp < before ? start : behind) + warp * BYTES));
    // Two sets of sums, used in turn, so that an item needs one barrier.
    float* const all_sums = (float*)(behind + TEAMS * TEAM * BYTES) + team * (2 * 2 * S * 64);
    const float LIMIT = __int_as_float(LIMIT_BITS);
    const Planes w[2] = {
        {(const unsigned char*)codes1, (const unsigned char*)scales1, (const unsigned char*)supers1},
        {(const unsigned char*)codes3, (const unsigned char*)scales3, (const unsigned char*)supers3}};
    const int K = width_of(x_shape, x_ndim), N = codes1_shape[1], tiles = (N + 15) / 16;
    struct Item {
      int which, tile;  // of the distinct experts
    };
    auto go_on = [&](Item& item, int by) {
#pragma unroll 1
      for (item.tile += by; item.tile >= tiles; item.tile -= tiles) item.which++;
    };
    auto run_of = [&](const Item& item, int part) {
      return Run{(size_t)experts[item.which] * N, item.tile, N, K, part, S, K / W::UNIT};
    };
    const int stride = TEAMS * gridDim.x;
    Item item = {0, 0};
    go_on(item, team * gridDim.x + blockIdx.x);
    Item sent = item;
    int sent_part = member;
    auto next = [&] {
      if (sent.which >= distinct) return false;
      stream.open(w, run_of(sent, sent_part));
      sent_part += TEAM;
      if (sent_part >= S) {
        sent_part = member;
        go_on(sent, stride);
      }
      return true;
    };
    stream.fill(next);
    W::stage((uint4*)tables);
    __syncthreads();
    const typename W::Reader reader((const uint4*)tables, t);
    for (int set = 0; item.which < distinct; go_on(item, stride), set ^= 1) {
      const unsigned long long riders = riders_of(item.which);
      // The pair of rider t, whose outputs are this lane's, and that of column g.
      const int pair = t < __popcll(riders) ? pair_of(riders, t) : -1, of_column = __shfl_sync(~0u, pair, g / 2);
      const bf16* const row = (const bf16*)x + (size_t)(max(of_column, 0) / SLOTS) * K;
      HeldRow<W> columns(opaque(row + t * W::LANE_COLUMNS), opaque((u32)(g % 2 == 0 && of_column >= 0)));
      float* const sums = all_sums + set * (2 * S * 64);
#pragma unroll 1
      for (int part = member; part < S; part += TEAM) {
        float gate[1][4], up[1][4];
        clear(gate);
        clear(up);
        auto read = [&](int unit) { columns.read(unit * W::UNIT); };
        stream.multiply_run(w, run_of(item, part), next, read, [&](W(&now)[2], bool) {
          W::multiply_both(now, gate, up, columns, reader);
        });
        for (int h = 0; h < 2; h++) {
          sums[part * 64 + 32 * h + lane] = gate[0][2 * h];
          sums[(S + part) * 64 + 32 * h + lane] = up[0][2 * h];
        }
      }
      sync_team(team, 32 * TEAM);
      for (int e = 32 * member + lane; e < 64; e += 32 * TEAM) {
        const int r = 16 * item.tile + g + 8 * (e / 32);
        if (pair < 0 || r >= N) continue;
        float a = 0.f, b = 0.f;
        for (int s = 0; s < S; s++) {
          a += sums[s * 64 + e];
          b += sums[(S + s) * 64 + e];
        }
        a = fminf(round_bf16(a), LIMIT);
        b = fminf(fmaxf(round_bf16(b), -LIMIT), LIMIT);
        y[(size_t)pair * N + r] = bf16(weights[pair] * (a / (1.f + expf(-a)) * b));
      }
    }
"""
)

DOWN_FEW_SOURCE = (
    """
    // An item is 16 output rows of a distinct expert, the whole width in one warp; items go round the warps of the
    // grid, whose rings run on through them. y: each pair's outputs, rounded, then, SHARED == 2, the shared expert's of
    // each row. Sums are those of two halves of the width, and of the SS warps that would share the shared matrix.
    constexpr int AT_ONCE = 8;
"""
    + _PAIRS
    + _DISTINCT
    + """
    __shared__ uint4 grid_s[F == IQ2_XXS || FS == IQ2_XXS ? 256 : 1];
    if (F == IQ2_XXS || FS == IQ2_XXS) {
      stage_grid(grid_s);
      __syncthreads();
    }
    __shared__ uint4 rings[S * RING / 16];
    const u32 ring = ring_of(rings, warp);
    typedef Weight<F> W;
    const Planes w[1] = {{(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers}};
    const int K = width_of(x_shape, x_ndim), N = codes_shape[1], tiles = (N + 15) / 16, items = distinct * tiles;
    const int units = K / W::UNIT, half = (units + 1) / 2, stride = S * gridDim.x;
    int item = warp * gridDim.x + blockIdx.x, sent = item;  // neighbouring items on different multiprocessors
    auto run_of = [&](int item) {
      return Run{(size_t)experts[item / tiles] * N, item % tiles, N, K, 0, 1, units};
    };
    Stream<W, 1> stream(ring);
    auto next = [&] {
      if (sent >= items) return false;
      stream.open(w, run_of(sent));
      sent += stride;
      return true;
    };
    stream.fill(next);
    for (; item < items; item += stride) {
      const Run run = run_of(item);
      const unsigned long long riders = riders_of(item / tiles);
      const int count = __popcll(riders);
      HeldRow<W> columns(
          (const bf16*)x + (size_t)pair_of(riders, min(g, count - 1)) * K + t * W::LANE_COLUMNS, g < count);
      columns.read(0);
      float acc[1][4], before[4] = {0.f, 0.f, 0.f, 0.f};
      clear(acc);
      int unit = 0;
      stream.multiply_run(w, run, next, [](int) {}, [&](W(&now)[1], bool last) {
        if (unit++ == half) {
          for (int c = 0; c < 4; c++) before[c] = acc[0][c];
          clear(acc);
        }
        columns.real &= !last;
        columns.following += W::UNIT;
        now[0].multiply(acc, columns, t, grid_s);
      });
      for (int c = 0; c < 4; c++) {
        const int n = 2 * t + (c & 1), r = 16 * run.tile + g + 8 * (c >> 1);
        if (n < count && r < N) y[(size_t)pair_of(riders, n) * N + r] = bf16(before[c] + acc[0][c]);
      }
    }
    if (SHARED == 2) {
      typedef Weight<FS> Ws;
      typedef const unsigned char* Bytes;
      const Planes ws[1] = {{(Bytes)shared_codes, (Bytes)shared_scales, (Bytes)shared_supers}};
      const int width = width_of(shared_shape, shared_ndim), rows = P / SLOTS;
      for (; item < items + tiles; item += stride) {
        const int tile = item - items;
        auto share_of = [&](int s) { return Run{0, tile, N, width, s, SS, width / Ws::UNIT}; };
        Stream<Ws, 1> shares(ring);
        int opened = 0;
        auto next_share = [&] {
          if (opened == SS) return false;
          shares.open(ws, share_of(opened++));
          return true;
        };
        shares.fill(next_share);
        const bf16* const row = (const bf16*)shared + (size_t)min(g, rows - 1) * width + t * Ws::LANE_COLUMNS;
        HeldRow<Ws> columns(row, g < rows);
        columns.read(0);
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        for (int s = 0; s < SS; s++) {
          float acc[1][4];
          clear(acc);
          shares.multiply_run(ws, share_of(s), next_share, [](int) {}, [&](Ws(&now)[1], bool last) {
            columns.real &= !last || s + 1 < SS;
            columns.following = last ? row + (s + 1) * Ws::UNIT : columns.following + SS * Ws::UNIT;
            now[0].multiply(acc, columns, t, grid_s);
          });
          for (int c = 0; c < 4; c++) sum[c] = SS == 1 ? acc[0][c] : sum[c] + acc[0][c];
        }
        for (int c = 0; c < 4; c++) {
          const int n = 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1);
          if (n < rows && r < N) y[(size_t)(P + n) * N + r] = bf16(sum[c]);
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
