"""Metal texts of the expert kernels; expert_matmul.py says what they compute and launches them."""

from __future__ import annotations

from ._octet import OCTET_HEADER, ROWS_HEADER, TILE_HEADER

SWIGLU_HEADER = """
// The clamped SwiGLU of two products that are rounded to bfloat16 first.
inline float expert_swiglu(float gate, float up, float limit, float weight) {
    float g = metal::min(float(bfloat16_t(gate)), limit);
    float u = metal::clamp(float(bfloat16_t(up)), -limit, limit);
    return weight * (g * (1.0f / (1.0f + metal::precise::exp(-g))) * u);
}
"""

FEW_HEADER = (
    OCTET_HEADER
    + SWIGLU_HEADER
    + """
// Lane i knows the experts of pairs i and i + 32 (-1 behind the last pair): which pairs chose e, one bit for each.
inline ulong expert_pairs(int e, int one, int two) {
    simd_vote::vote_t low = (simd_vote::vote_t)simd_ballot(one == e), high = (simd_vote::vote_t)simd_ballot(two == e);
    return ulong(low) | (ulong(high) << 32);
}

// The M first pairs of a mask; the last again where there are fewer.
template <int M>
inline void expert_list(ulong mask, thread uint* pairs) {
    for (uint m = 0; m < uint(M); m++) {
        pairs[m] = uint(metal::ctz(mask));
        ulong rest = mask & (mask - 1ul);
        mask = rest != 0ul ? rest : mask;
    }
}

// Outputs first .. first + R - 1 of expert e for the `count` <= M pairs of the mask. Behind the last weight row the
// last is taken once more.
template <int FG, int FU, bool WIDE, int R, int M, typename SG, typename DG, typename SU, typename DU, typename L,
          typename W>
inline void expert_gate_up(const device uint* x, const device uint* gate_codes, SG gate_scales, DG gate_supers,
                           const device uint* up_codes, SU up_scales, DU up_supers, W weights, L limit,
                           device bfloat16_t* a, uint octets, uint outputs, uint K, uint e, ulong mask, uint count,
                           uint first, uint lane) {
    ulong rows[R], at[M];
    uint pairs[M];
    float gate[R * M], up[R * M];
    expert_list<M>(mask, pairs);
    for (uint r = 0; r < uint(R); r++)
        rows[r] = ulong(e) * ulong(outputs) + ulong(metal::min(first + r, outputs - 1u));
    for (uint m = 0; m < uint(M); m++) at[m] = ulong(pairs[m] / K) * ulong(octets);
    octet_sums<FG, WIDE, R, M>(x, at, gate_codes, gate_scales, gate_supers, rows, octets, lane, gate);
    octet_sums<FU, WIDE, R, M>(x, at, up_codes, up_scales, up_supers, rows, octets, lane, up);
    float g = 0.0f, u = 0.0f;  // every lane holds all sums: lane r * M + m finishes sum r * M + m
    uint pair = 0u;
    for (uint i = 0; i < uint(R * M); i++)
        if (lane == i) { g = gate[i]; u = up[i]; pair = pairs[i % uint(M)]; }
    uint f = first + lane / uint(M);
    if (lane < uint(R * M) && lane % uint(M) < count && f < outputs)
        a[ulong(pair) * ulong(outputs) + ulong(f)] = bfloat16_t(expert_swiglu(g, u, limit[0], weights[pair]));
}

// Adds expert e to the rows that chose it: lane n keeps the sums of row n.
template <int FORMAT, bool WIDE, int R, int M, typename S, typename D>
inline void expert_add(const device uint* x, const device uint* codes, S scales, D supers, uint octets, uint outputs,
                       uint K, uint e, ulong mask, uint count, uint first, uint lane, thread float* total) {
    ulong rows[R], at[M];
    uint pairs[M];
    float sum[R * M];
    expert_list<M>(mask, pairs);
    for (uint r = 0; r < uint(R); r++)
        rows[r] = ulong(e) * ulong(outputs) + ulong(metal::min(first + r, outputs - 1u));
    for (uint m = 0; m < uint(M); m++) at[m] = ulong(pairs[m]) * ulong(octets);
    octet_sums<FORMAT, WIDE, R, M>(x, at, codes, scales, supers, rows, octets, lane, sum);
    for (uint m = 0; m < uint(M); m++)
        for (uint r = 0; r < uint(R); r++)
            if (m < count && lane == pairs[m] / K) total[r] += float(bfloat16_t(sum[r * uint(M) + m]));
}
"""
)


def _by_count(call: str) -> str:
    """The call with M as the next of 1, 2, 4, 8 that holds all `count` rows of an expert. MOST, the same of all rows
    of x, keeps what cannot happen from being compiled."""

    def with_rows(m: int) -> str:
        return call.replace("ROWS", f"(MOST < {m} ? MOST : {m})")

    return f"""
        if (MOST == 1 || count == 1u) {with_rows(1)}
        else if (MOST == 2 || count == 2u) {with_rows(2)}
        else if (MOST == 4 || count <= 4u) {with_rows(4)}
        else {with_rows(8)}
"""


PAIRS = """
    uint lane = thread_index_in_simdgroup;
    uint octets = sizes[0], outputs = sizes[1], K = sizes[2], pairs = sizes[3];
    uint first = (threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup) * R;
    int one = chosen[metal::min(lane, pairs - 1u)], two = chosen[metal::min(lane + 32u, pairs - 1u)];
    one = lane < pairs ? one : -1;
    two = lane + 32u < pairs ? two : -1;
"""

GATE_UP_SOURCE = (
    """
    // A simdgroup owns R outputs of the expert of pair p (grid y), for all rows that chose this expert; where an
    // earlier pair has the same expert, that one's groups do the work. sizes: octets of x, outputs, K, pairs.
"""
    + PAIRS
    + """
    uint p = threadgroup_position_in_grid.y;
    int e = chosen[p];
    ulong mask = expert_pairs(e, one, two);
    if (uint(metal::ctz(mask)) < p || first >= outputs) return;  // whole simdgroups
    uint count = uint(metal::popcount(mask));
"""
    + _by_count(
        "expert_gate_up<FG, FU, WIDE, R, ROWS>(x, gate_codes, gate_scales, gate_supers, up_codes, up_scales,"
        " up_supers, weights, limit, a, octets, outputs, K, uint(e), mask, count, first, lane);"
    )
)

# total[r] of lane n: row n's sum over its experts at output first + r, then the shared expert's.
DOWN_SUMS = (
    """
    const int none = 2147483647;
    float total[R];
    for (uint r = 0; r < uint(R); r++) total[r] = 0.0f;
    int e = -1;
    for (uint i = 0; i < pairs; i++) {
        e = simd_min(metal::min(one > e ? one : none, two > e ? two : none));
        if (e == none) break;
        ulong mask = expert_pairs(e, one, two);
        uint count = uint(metal::popcount(mask));
"""
    + _by_count(
        "expert_add<FORMAT, WIDE, R, ROWS>(x, codes, scales, supers, octets, outputs, K, uint(e), mask, count,"
        " first, lane, total);"
    )
    + """
    }
    if (SHARED)
        expert_add<FS, WIDE_SHARED, R, MOST>(shared_x, shared_codes, shared_scales, shared_supers, sizes[4], outputs,
                                             1u, 0u, (1ul << (pairs / K)) - 1ul, pairs / K, first, lane, total);
"""
)

DOWN_SOURCE = (
    """
    // A simdgroup owns R outputs of every row and goes through the distinct experts in ascending order, which is the
    // order of every row's own sum; the expert that all rows share comes last. sizes: octets of a, outputs, K, pairs,
    // octets of the shared expert's a.
"""
    + PAIRS
    + "    if (first >= outputs) return;  // a whole simdgroup"
    + DOWN_SUMS
    + """
    if (lane < pairs / K) {
        for (uint r = 0; r < uint(R); r++)
            if (first + r < outputs) y[ulong(lane) * ulong(outputs) + ulong(first + r)] = bfloat16_t(total[r]);
    }
"""
)

# Which expert a tile of 32 pairs belongs to, and its pairs; the launch has as many tiles as there could be.
_TILE = """
    threadgroup float xs[32 * 36];
    threadgroup float ws[64 * 36];
    uint t = thread_index_in_threadgroup, line = t / 4u;
    uint octets = sizes[0], outputs = sizes[1], K = sizes[2], experts = sizes[3];
    int tile = int(threadgroup_position_in_grid.y);
    if (tile >= tile_starts[experts]) return;  // a whole threadgroup
    uint e = 0u;  // the last expert that starts at or before the tile: those without rows come before it
    for (uint step = 32768u; step > 0u; step /= 2u)
        if (e + step < experts && tile_starts[e + step] <= tile) e += step;
    uint begin = uint(starts[e]) + uint(tile - tile_starts[e]) * 32u;
    uint count = metal::min(uint(starts[e + 1u]) - begin, 32u);
    uint pair = uint(order[begin + metal::min(line, count - 1u)]);
    ulong base = ulong(e) * ulong(outputs);
"""

MANY_HEADER = TILE_HEADER + SWIGLU_HEADER

GATE_UP_TILE_SOURCE = (
    """
    // A threadgroup of 4 simdgroups owns up to 32 pairs of one expert times 32 outputs of gate and of up. sizes: octets
    // of x, outputs, K, experts.
"""
    + _TILE
    + """
    uint first = threadgroup_position_in_grid.x * 32u;
    ulong row = base + ulong(metal::min(first + line, outputs - 1u));
    tile_product<FG, FU, WIDE>(x, ulong(pair / K) * ulong(octets), count, gate_codes, gate_scales, gate_supers, row,
                               up_codes, up_scales, up_supers, row, octets, t, simdgroup_index_in_threadgroup, xs, ws);
    for (uint i = t; i < 32u * 32u; i += 128u) {
        uint n = i / 32u, j = i % 32u;
        if (n < count && first + j < outputs) {
            uint to = uint(order[begin + n]);
            float gate = ws[n * tile_result_pitch + j], up = ws[n * tile_result_pitch + 32u + j];
            a[ulong(to) * ulong(outputs) + ulong(first + j)]
                = bfloat16_t(expert_swiglu(gate, up, limit[0], weights[to]));
        }
    }
"""
)

DOWN_TILE_SOURCE = (
    """
    // A threadgroup of 4 simdgroups owns up to 32 pairs of one expert times 64 outputs. sizes: octets of a, outputs, K,
    // experts.
"""
    + _TILE
    + """
    uint first = threadgroup_position_in_grid.x * 64u;
    ulong a_row = base + ulong(metal::min(first + line, outputs - 1u));
    ulong b_row = base + ulong(metal::min(first + line + 32u, outputs - 1u));
    tile_product<FORMAT, FORMAT, WIDE>(x, ulong(pair) * ulong(octets), count, codes, scales, supers, a_row,
                                       codes, scales, supers, b_row, octets, t, simdgroup_index_in_threadgroup, xs, ws);
    for (uint i = t; i < 32u * 64u; i += 128u) {
        uint n = i / 64u, j = i % 64u;
        if (n < count && first + j < outputs) {
            uint to = uint(order[begin + n]);
            y[ulong(to) * ulong(outputs) + ulong(first + j)] = bfloat16_t(ws[n * tile_result_pitch + j]);
        }
    }
"""
)

SWIGLU_SOURCE = """
    // A thread owns one value. width: of a row; the routing weight is one a row, where WEIGHTED.
    uint i = thread_position_in_grid.x;
    uint width = sizes[0], size = sizes[1];
    if (i < size) {
        float w = 1.0f;
        if (WEIGHTED) w = weight[i / width];
        a[i] = bfloat16_t(expert_swiglu(float(gate[i]), float(up[i]), limit[0], w));
    }
"""

SHARED_HEADER = (
    ROWS_HEADER
    + SWIGLU_HEADER
    + """
// Outputs first .. first + R - 1 of gate and up for all M rows of x, and their SwiGLU.
template <int FG, int FU, bool WIDE, int R, int M, typename SG, typename DG, typename SU, typename DU, typename L>
inline void shared_gate_up(const device uint* x, const device uint* gate_codes, SG gate_scales, DG gate_supers,
                           const device uint* up_codes, SU up_scales, DU up_supers, L limit, device bfloat16_t* a,
                           uint octets, uint outputs, uint first, uint lane) {
    if (first >= outputs) return;  // a whole simdgroup
    ulong rows[R], at[M];
    float gate[R * M], up[R * M];
    for (uint r = 0; r < uint(R); r++) rows[r] = ulong(metal::min(first + r, outputs - 1u));
    for (uint m = 0; m < uint(M); m++) at[m] = ulong(m) * ulong(octets);
    octet_sums<FG, WIDE, R, M>(x, at, gate_codes, gate_scales, gate_supers, rows, octets, lane, gate);
    octet_sums<FU, WIDE, R, M>(x, at, up_codes, up_scales, up_supers, rows, octets, lane, up);
    float g = 0.0f, u = 0.0f;  // every lane holds all sums: lane r * M + m finishes sum r * M + m
    for (uint i = 0; i < uint(R * M); i++)
        if (lane == i) { g = gate[i]; u = up[i]; }
    uint f = first + lane / uint(M);
    if (lane < uint(R * M) && f < outputs)
        a[ulong(lane % uint(M)) * ulong(outputs) + ulong(f)] = bfloat16_t(expert_swiglu(g, u, limit[0], 1.0f));
}
"""
)

SHARED_SOURCE = """
    // A simdgroup owns R weight rows for all M rows: first come the router's, which read r, then those of gate and up,
    // which read x. sizes: octets of a row, router outputs, outputs of gate.
    uint lane = thread_index_in_simdgroup;
    uint part = R * simdgroups_per_threadgroup, here = R * simdgroup_index_in_threadgroup;
    uint block = threadgroup_position_in_grid.x, before = (sizes[1] + part - 1u) / part;
    if (block < before) {
        quant_rows<FR, WIDE, R, M>(r, router_codes, router_scales, router_supers, logits, sizes[0], 0u, 1u, sizes[1],
                                   block * part + here, lane);
        return;
    }
    shared_gate_up<FG, FU, WIDE, R, M>(x, gate_codes, gate_scales, gate_supers, up_codes, up_scales, up_supers, limit,
                                       a, sizes[0], sizes[2], (block - before) * part + here, lane);
"""
