"""CUDA body of the routed experts' gate and up for at most 8 rows and 64 pairs, which `_quant_cuda.py` launches, and
what the body of their last product (`_expert_down_cuda.py`) shares."""

from __future__ import annotations

# The pairs (row, slot) that chose an expert are the columns of one tile.
PAIRS = """
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

FIRSTS = """
    // How many earlier pairs chose this lane's experts.
    const unsigned earlier = (1u << lane) - 1;
    const unsigned alike = __match_any_sync(~0u, choice), alike2 = __match_any_sync(~0u, choice2);
    int before = __popc(alike & earlier), before2 = __popc(alike2 & earlier);
    for (int q = 32; q < P; q++) {
      const int among = __popc(__ballot_sync(~0u, choice == expert_of(q)));
      if (lane == q - 32) before2 += among;
    }
    // The first of every `size` pairs with one expert.
    auto first_of_every = [&](int size) {
      const bool first = lane < P && before % size == 0, first2 = lane + 32 < P && before2 % size == 0;
      return (unsigned long long)__ballot_sync(~0u, first2) << 32 | __ballot_sync(~0u, first);
    };
"""

GATE_UP_FEW_SOURCE = (
    """
    // Teams of TEAM warps, TEAMS a block, go round the items (distinct expert, tile): 16 rows of gate and up, for pairs
    // with this expert, four at a time, in every other column: that saves half of the products with scales. A warp adds
    // up parts of the width, of the S that take its units in turn; its ring runs on through parts and items.
    typedef ds4::GateUp<F, S, BYTES> Products;
    const typename Products::Words words{};
"""
    + PAIRS
    + FIRSTS
    + """
    const unsigned long long firsts = first_of_every(4);
    const int distinct = __popcll(firsts);
    __shared__ int experts[64], first_riders[64];
    for (int q = threadIdx.x; q < 64; q += blockDim.x) {
      if (!(firsts >> q & 1)) continue;
      const int k = __popcll(firsts & ((1ull << q) - 1));
      experts[k] = chosen[q];
      first_riders[k] = q;
    }
    __syncthreads();
    constexpr int PARTS = Products::PARTS;
    const int team = warp / TEAM, member = warp % TEAM;
    // Tables at a multiple of their size, if there are any; rings before them, from there down, and behind them.
    unsigned char *const start = (unsigned char*)dynamic_shared(), *tables = start;
    if (Products::TABLES) tables += -shared_address(start) & (Products::TABLES - 1);
    const int rings_before = min((int)(tables - start) / BYTES, TEAMS * TEAM);
    unsigned char* const behind = tables + Products::TABLES;
    const int place = warp - rings_before;  // of the warp's ring, among those behind if it is one
    unsigned char* const ring = place < 0 ? tables - (warp + 1) * BYTES : behind + place * BYTES;
    Products products(opaque(shared_address(ring)), tables);
    float* const sums = (float*)(behind + (TEAMS * TEAM - rings_before) * BYTES) + team * (2 * S * 64);
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
      const size_t base = (size_t)experts[item.which] * N;
      return Run{base, item.tile, N, K, part / PARTS, S / PARTS, K / Products::UNIT};
    };
    const int stride = TEAMS * gridDim.x;
    Item item = {0, 0};
    go_on(item, team * gridDim.x + blockIdx.x);
    Item sent = item;
    int sent_part = PARTS * member;
    auto next = [&] {
      if (sent.which >= distinct) return false;
      products.open(w, run_of(sent, sent_part));
      sent_part += PARTS * TEAM;
      if (sent_part >= S) {
        sent_part = PARTS * member;
        go_on(sent, stride);
      }
      return true;
    };
    products.fill(w, next);
    words.stage(tables);
    __syncthreads();
    products.begin();
    for (; item.which < distinct; go_on(item, stride)) {
      // And those of later groups.
      const unsigned long long riders = chosen_by(experts[item.which]) & (~0ull << first_riders[item.which]);
      // The pair of rider t, whose outputs are this lane's, and that of column g.
      const int pair = t < __popcll(riders) ? pair_of(riders, t) : -1, of_column = __shfl_sync(~0u, pair, g / 2);
      const bf16* row = (const bf16*)x + (size_t)(max(of_column, 0) / SLOTS) * K + t * Products::LANE_COLUMNS;
      const u32 real = opaque((u32)(g % 2 == 0 && of_column >= 0));
      row = opaque(row);
#pragma unroll 1
      for (int part = PARTS * member; part < S; part += PARTS * TEAM) {
        float sum[PARTS][2][2];
        products.multiply(sum, w, run_of(item, part), next, row, real);
        if (part == PARTS * member) sync_team(team, 32 * TEAM);  // the sums of the last item have been read
#pragma unroll
        for (int i = 0; i < PARTS; i++)
          for (int m = 0; m < 2; m++)
            for (int r = 0; r < 2; r++) sums[(m * S + part + i) * 64 + 32 * r + lane] = sum[i][m][r];
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
