"""Metal texts of the hyper-connections; hyper_connection.py says what they compute and launches them."""

from __future__ import annotations

COLLAPSE_SOURCE = """
    // A thread owns one channel of one row.
    uint i = thread_position_in_grid.x;
    uint row = i / uint(C);
    if (row < uint(h_shape[0])) {
        ulong at = ulong(row) * ulong(M * C) + ulong(i % uint(C));
        float sum = pre[row * uint(M)] * float(h[at]);
        for (uint j = 1; j < uint(M); j++)
            sum = metal::fma(pre[row * uint(M) + j], float(h[at + ulong(j) * ulong(C)]), sum);
        x[i] = bfloat16_t(sum);
    }
"""

# One row, collapsed and normed by the SG simdgroups of a threadgroup. All loads come before the first value is needed,
# and none is conditional: behind one another they would cost a row alone more than everything else.
_COLLAPSE_NORM = """
    constexpr int VALUES = (C + 32 * SG - 1) / (32 * SG);
    float weights[M];
    for (uint j = 0; j < uint(M); j++) weights[j] = pre[row * uint(M) + j];
    float streams[VALUES * M];
    float gains[VALUES];
    #pragma unroll
    for (uint i = 0; i < uint(VALUES); i++) {
        uint c = t + 32u * uint(SG) * i;
        if (C % (32 * SG) != 0) c = metal::min(c, uint(C - 1));
        gains[i] = float(weight[c]);
        for (uint j = 0; j < uint(M); j++)
            streams[i * uint(M) + j] = float(h[ulong(row) * ulong(M * C) + ulong(c) + ulong(j * uint(C))]);
    }
    float collapsed[VALUES];
    float squares = 0.0f;
    #pragma unroll
    for (uint i = 0; i < uint(VALUES); i++) {
        float sum = weights[0] * streams[i * uint(M)];
        for (uint j = 1; j < uint(M); j++) sum = metal::fma(weights[j], streams[i * uint(M) + j], sum);
        bool inside = C % (32 * SG) == 0 || t + 32u * uint(SG) * i < uint(C);
        collapsed[i] = inside ? float(bfloat16_t(sum)) : 0.0f;
        squares += collapsed[i] * collapsed[i];
    }
    squares = simd_sum(squares);
    if (lane == 0) part[simdgroup] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    squares = simd_sum(lane < uint(SG) ? part[lane] : 0.0f);
    float scale = metal::precise::rsqrt(squares / float(C) + as_type<float>(EPS_BITS));
    #pragma unroll
    for (uint i = 0; i < uint(VALUES); i++) {
        uint c = t + 32u * uint(SG) * i;
        if (C % (32 * SG) == 0 || c < uint(C))
            x[ulong(row) * ulong(C) + ulong(c)] = bfloat16_t(gains[i] * (collapsed[i] * scale));
    }
"""

_THREADS = """
    threadgroup float part[SG];
    uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint simdgroup = simdgroup_index_in_threadgroup;
    uint row = threadgroup_position_in_grid.x;
"""

COLLAPSE_NORM_SOURCE = (
    """
    // A threadgroup of SG simdgroups owns one row; thread t owns the channels t, t + 32 SG, ...
"""
    + _THREADS
    + _COLLAPSE_NORM
)

SITE_SOURCE = (
    """
    // Threadgroups of SG simdgroups. Each of the first rows of h [B, L, M, C] has one: thread t owns the channels t,
    // t + 32 SG, ... Then come (tile, part, share): one part of M C products for R rows of h and every SPREADth run of
    // SLOTS outputs; the runs are dealt out to simdgroups. Output o < O is row o of fn [O, M C], output O is the sum of
    // squares. Lane l takes every 32nd product, from l on, and reads DEPTH of them ahead.
"""
    + _THREADS
    + """
    uint rows = uint(h_shape[0]) * uint(h_shape[1]);
    if (row < rows) {  // the same for the whole group, and no barrier below
"""
    + _COLLAPSE_NORM
    + """
        return;
    }
    constexpr int STEPS = CHUNK / 32;
    constexpr bool WHOLE = M * C == PARTS * CHUNK && STEPS % DEPTH == 0;  // no part is short
    uint share = (row - rows) % uint(SPREAD);
    uint chunk = (row - rows) / uint(SPREAD) % uint(PARTS);
    uint row0 = (row - rows) / uint(SPREAD * PARTS) * uint(R);
    ulong from[R];
    for (uint r = 0; r < uint(R); r++) from[r] = ulong(metal::min(row0 + r, rows - 1u)) * ulong(M * C);
    uint end = metal::min(uint(M * C), (chunk + 1u) * uint(CHUNK));
    for (uint run = simdgroup * uint(SPREAD) + share; run * uint(SLOTS) <= uint(O); run += uint(SG * SPREAD)) {
        uint output0 = run * uint(SLOTS);
        float sums[R * SLOTS];
        for (int i = 0; i < R * SLOTS; i++) sums[i] = 0.0f;
        uint k = chunk * uint(CHUNK) + lane;
        for (int step = 0; step < STEPS; step += DEPTH) {
            float v[DEPTH * R];
            float w[DEPTH * SLOTS];
            #pragma unroll
            for (uint d = 0; d < uint(DEPTH); d++) {  // beyond the last row, output or product: read it again
                ulong at = ulong(k) + ulong(32u * d);
                if (!WHOLE) at = metal::min(at, ulong(M * C - 1));
                for (uint r = 0; r < uint(R); r++) v[d * uint(R) + r] = float(h[from[r] + at]);
                for (uint o = 0; o < uint(SLOTS); o++)
                    w[d * uint(SLOTS) + o] = float(fn[ulong(metal::min(output0 + o, uint(O - 1)) * uint(M * C)) + at]);
            }
            #pragma unroll
            for (uint d = 0; d < uint(DEPTH); d++) {
                if (WHOLE || k + 32u * d < end) {
                    for (uint r = 0; r < uint(R); r++) {
                        for (uint o = 0; o < uint(SLOTS); o++) {
                            float one = v[d * uint(R) + r];
                            float other = output0 + o == uint(O) ? one : w[d * uint(SLOTS) + o];
                            sums[r * uint(SLOTS) + o] = metal::fma(one, other, sums[r * uint(SLOTS) + o]);
                        }
                    }
                }
            }
            k += 32u * uint(DEPTH);
        }
        for (uint r = 0; r < uint(R); r++) {
            for (uint o = 0; o < uint(SLOTS); o++) {
                float total = simd_sum(sums[r * uint(SLOTS) + o]);
                if (lane == 0 && row0 + r < rows && output0 + o <= uint(O))
                    dots[(ulong(row0 + r) * ulong(PARTS) + ulong(chunk)) * ulong(O + 1) + ulong(output0 + o)] = total;
            }
        }
    }
"""
)

COEFFICIENTS_HEADER = """
// A whole simdgroup: the coefficients of one row of dots [.., PARTS, M (M + 2) + 1]. Lanes below M M own comb[j, k] at
// j M + k; the next M own pre, the next M post, the rest the squares.
template <int M, int PARTS, int ITERS, int WIDTH, typename D, typename B, typename S>
inline void hyper_coefficients(
    D dots, B base, S scale, uint row, uint lane, float small, float eps, device float* pre, device float* mix) {
    constexpr int OUTPUTS = M * (M + 2);
    uint o = lane < uint(M * M) ? lane + uint(2 * M) : lane - uint(M * M);
    if (lane >= uint(OUTPUTS)) o = uint(OUTPUTS);
    ulong at = ulong(row) * ulong(PARTS * (OUTPUTS + 1)) + ulong(o);
    float m = 0.0f;
    #pragma unroll
    for (uint part = 0; part < uint(PARTS); part++) m += dots[at + ulong(part * uint(OUTPUTS + 1))];
    m *= metal::precise::rsqrt(simd_shuffle(m, ushort(OUTPUTS)) / float(WIDTH) + eps);
    if (lane < uint(OUTPUTS)) m = m * scale[lane < uint(M * M) ? 2u : o / uint(M)] + base[o];

    // xor with 1 .. M/2 walks over k of one j, with M .. M M/2 over j of one k; lanes above M M keep to themselves.
    float top = m;
    for (uint step = 1; step < uint(M); step <<= 1) top = metal::max(top, simd_shuffle_xor(top, ushort(step)));
    float g = metal::precise::exp(m - top);
    float sum = g;
    for (uint step = 1; step < uint(M); step <<= 1) sum += simd_shuffle_xor(sum, ushort(step));
    g = g / sum + small;
    for (int i = 0; i < ITERS; i++) {
        if (i > 0) {
            sum = g;
            for (uint step = 1; step < uint(M); step <<= 1) sum += simd_shuffle_xor(sum, ushort(step));
            g = g / (sum + small);
        }
        sum = g;
        for (uint step = M; step < uint(M * M); step <<= 1) sum += simd_shuffle_xor(sum, ushort(step));
        g = g / (sum + small);
    }
    float gate = 1.0f / (1.0f + metal::precise::exp(-m));
    if (o < uint(M)) pre[row * uint(M) + o] = gate + small;
    else if (lane < uint(OUTPUTS)) mix[row * uint(M + M * M) + o - uint(M)] = lane < uint(M * M) ? g : 2.0f * gate;
}
"""

# What a simdgroup of a kernel with the inputs and outputs of `SiteSums.behind` says, with its row of dots.
COEFFICIENTS_CALL = """hyper_coefficients<HC_M, HC_PARTS, HC_ITERS, HC_WIDTH>(
            hc_dots, hc_base, hc_scale, HC_ROW, thread_index_in_simdgroup, as_type<float>(HC_SMALL_BITS),
            as_type<float>(HC_EPS_BITS), hc_pre, hc_mix);"""

COEFFICIENTS_SOURCE = (
    """
    // A simdgroup owns one row of dots.
    uint row = thread_position_in_grid.x / 32u;
    if (row < uint(hc_dots_shape[0]) * uint(hc_dots_shape[1]))  // the same for a simdgroup
        """
    + COEFFICIENTS_CALL.replace("HC_ROW", "row")
    + "\n"
)

EXPAND_HEADER = """
// One channel in all M streams, of a row that was read: `at` is its place in the first of them, C the distance to the
// next; mix: the row's post [M], then comb [M source, M destination].
template <int M, int C, typename X>
inline void hyper_spread(const thread float* streams, X mix, float added, ulong at, device bfloat16_t* expanded) {
    for (uint k = 0; k < uint(M); k++) {
        float sum = mix[uint(M) + k] * streams[0];
        for (uint j = 1; j < uint(M); j++) sum = metal::fma(mix[uint(M) + j * uint(M) + k], streams[j], sum);
        expanded[at + ulong(k) * ulong(C)] = bfloat16_t(metal::fma(mix[k], added, sum));
    }
}

// The same, of a row that is yet to be read; inputs of fewer than 8 values are in another address space.
template <int M, int C, typename H, typename X>
inline void hyper_expand(H h, X mix, float added, ulong at, device bfloat16_t* expanded) {
    float streams[M];
    float own[M + M * M];
    for (uint j = 0; j < uint(M); j++) streams[j] = float(h[at + ulong(j) * ulong(C)]);
    for (uint i = 0; i < uint(M + M * M); i++) own[i] = mix[i];
    hyper_spread<M, C>(streams, own, added, at, expanded);
}
"""

EXPAND_SOURCE = """
    // A threadgroup owns every GROUPSth run of 256 channels of a row (grid y). A thread owns its channels in all M
    // streams, and reads all of them before it writes any.
    constexpr int VALUES = (C + 256 * GROUPS - 1) / (256 * GROUPS);
    uint t = thread_index_in_threadgroup;
    uint row = threadgroup_position_in_grid.y;
    uint group = threadgroup_position_in_grid.x;
    float own[M + M * M];
    for (uint i = 0; i < uint(M + M * M); i++) own[i] = mix[row * uint(M + M * M) + i];
    float streams[VALUES * M];
    float added[VALUES];
    #pragma unroll
    for (uint i = 0; i < uint(VALUES); i++) {
        uint c = metal::min((group + uint(GROUPS) * i) * 256u + t, uint(C - 1));
        added[i] = float(y[ulong(row) * ulong(C) + ulong(c)]);
        for (uint j = 0; j < uint(M); j++)
            streams[i * uint(M) + j] = float(h[ulong(row) * ulong(M * C) + ulong(c + j * uint(C))]);
    }
    #pragma unroll
    for (uint i = 0; i < uint(VALUES); i++) {
        uint c = (group + uint(GROUPS) * i) * 256u + t;
        if (c < uint(C))
            hyper_spread<M, C>(streams + i * uint(M), own, added[i], ulong(row) * ulong(M * C) + ulong(c), expanded);
    }
"""
