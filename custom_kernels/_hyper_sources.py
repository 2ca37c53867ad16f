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

# One row, collapsed and normed by the SG simdgroups of a threadgroup.
_COLLAPSE_NORM = """
    float weights[M];
    for (uint j = 0; j < uint(M); j++) weights[j] = pre[row * uint(M) + j];
    float squares = 0.0f;
    float scale = 0.0f;
    for (int pass = 0; pass < 2; pass++) {
        for (uint c = t; c < uint(C); c += 32u * uint(SG)) {
            ulong at = ulong(row) * ulong(M * C) + ulong(c);
            float sum = weights[0] * float(h[at]);
            for (uint j = 1; j < uint(M); j++) sum = metal::fma(weights[j], float(h[at + ulong(j) * ulong(C)]), sum);
            float v = float(bfloat16_t(sum));
            if (pass == 0) squares += v * v;
            else x[ulong(row) * ulong(C) + ulong(c)] = bfloat16_t(float(weight[c]) * (v * scale));
        }
        if (pass == 0) {
            squares = simd_sum(squares);
            if (lane == 0) part[simdgroup] = squares;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            squares = simd_sum(lane < uint(SG) ? part[lane] : 0.0f);
            scale = metal::precise::rsqrt(squares / float(C) + eps[0]);
        }
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
    // A threadgroup of SG simdgroups owns one row; thread t owns the channels t, t + 32 SG, ... and works a channel
    // out twice, as reading M streams again from cache is cheaper than keeping them.
"""
    + _THREADS
    + _COLLAPSE_NORM
)

SITE_SOURCE = (
    """
    // Threadgroups of SG simdgroups. Each of the first rows of h [B, L, M, C] has one: thread t owns the channels t,
    // t + 32 SG, ... and works a channel out twice, as reading M streams again from cache is cheaper than keeping them.
    // Then come (tile, part): one part of M C products for R rows of h and all O rows of fn [O, M C]. A simdgroup sums
    // SLOTS outputs at a time; output O is the sum of squares. Lane l takes every 32nd product, from l on.
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
    uint chunk = (row - rows) % uint(PARTS);
    uint row0 = (row - rows) / uint(PARTS) * uint(R);
    uint end = metal::min(uint(M * C), (chunk + 1u) * uint(CHUNK));
    for (uint output0 = simdgroup * uint(SLOTS); output0 <= uint(O); output0 += uint(SG * SLOTS)) {
        float sums[R * SLOTS];
        for (int i = 0; i < R * SLOTS; i++) sums[i] = 0.0f;
        for (uint k = chunk * uint(CHUNK) + lane; k < end; k += 32u) {
            float w[SLOTS];
            for (uint o = 0; o < uint(SLOTS); o++)
                w[o] = output0 + o < uint(O) ? float(fn[(output0 + o) * uint(M * C) + k]) : 0.0f;
            for (uint r = 0; r < uint(R); r++) {
                float v = row0 + r < rows ? float(h[ulong(row0 + r) * ulong(M * C) + ulong(k)]) : 0.0f;
                for (uint o = 0; o < uint(SLOTS); o++) {
                    float other = output0 + o == uint(O) ? v : w[o];
                    sums[r * uint(SLOTS) + o] = metal::fma(v, other, sums[r * uint(SLOTS) + o]);
                }
            }
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

EXPAND_HEADER = """
// A simdgroup makes the coefficients of one row from its partial sums, to[..] = pre, post, comb. Lanes below M M own
// comb[j, k] at j M + k; the next M own pre, the next M post.
template <int M, int PARTS, int ITERS, typename D, typename B, typename S, typename E>
inline void hyper_coefficients(D dots, B base, S scale, E eps, float width, uint row, uint lane,
                               threadgroup float* to) {
    uint outputs = uint(M * (M + 2));
    ulong first = ulong(row) * ulong(PARTS) * ulong(outputs + 1u);
    uint o = lane < uint(M * M) ? lane + uint(2 * M) : lane - uint(M * M);
    float m = 0.0f;
    float squares = 0.0f;
    for (uint part = 0; part < uint(PARTS); part++) {
        if (lane < outputs) m += dots[first + part * (outputs + 1u) + o];
        squares += dots[first + part * (outputs + 1u) + outputs];
    }
    m *= metal::precise::rsqrt(squares / width + eps[1]);
    if (lane < outputs) m = m * scale[lane < uint(M * M) ? 2u : o / uint(M)] + base[o];

    // xor with 1 .. M/2 walks over k of one j, with M .. M M/2 over j of one k; lanes above M M keep to themselves.
    float top = m;
    for (uint step = 1; step < uint(M); step <<= 1) top = metal::max(top, simd_shuffle_xor(top, ushort(step)));
    float g = metal::precise::exp(m - top);
    float sum = g;
    for (uint step = 1; step < uint(M); step <<= 1) sum += simd_shuffle_xor(sum, ushort(step));
    g = g / sum + eps[0];
    for (int i = 0; i < ITERS; i++) {
        if (i > 0) {
            sum = g;
            for (uint step = 1; step < uint(M); step <<= 1) sum += simd_shuffle_xor(sum, ushort(step));
            g = g / (sum + eps[0]);
        }
        sum = g;
        for (uint step = M; step < uint(M * M); step <<= 1) sum += simd_shuffle_xor(sum, ushort(step));
        g = g / (sum + eps[0]);
    }
    float gate = 1.0f / (1.0f + metal::precise::exp(-m));
    if (lane < outputs) to[o] = o >= uint(2 * M) ? g : o < uint(M) ? gate + eps[0] : 2.0f * gate;
}

// One channel of a row in all M streams: `at` is its place in the first of them, C the distance to the next.
template <int M, int C, typename H>
inline void hyper_expand(H h, const threadgroup float* coefficients, float added, ulong at,
                         device bfloat16_t* expanded) {
    float streams[M];
    for (uint j = 0; j < uint(M); j++) streams[j] = float(h[at + ulong(j) * ulong(C)]);
    for (uint k = 0; k < uint(M); k++) {
        float sum = coefficients[uint(2 * M) + k] * streams[0];
        for (uint j = 1; j < uint(M); j++)
            sum = metal::fma(coefficients[uint(2 * M) + j * uint(M) + k], streams[j], sum);
        expanded[at + ulong(k) * ulong(C)] = bfloat16_t(metal::fma(coefficients[uint(M) + k], added, sum));
    }
}

// Value i of a row's coefficients, to where it is kept for the next site and for looking at.
template <int M>
inline void hyper_keep(float value, uint row, uint i, device float* pre, device float* post, device float* comb) {
    if (i < uint(M)) pre[row * uint(M) + i] = value;
    else if (i < uint(2 * M)) post[row * uint(M) + i - uint(M)] = value;
    else comb[row * uint(M * M) + i - uint(2 * M)] = value;
}
"""

EXPAND_SOURCE = """
    // A threadgroup owns every GROUPSth run of 256 channels of one row (grid y); its first simdgroup makes the row's
    // coefficients. A thread owns its channels in all M streams.
    threadgroup float coefficients[2 * M + M * M];
    uint t = thread_index_in_threadgroup;
    uint row = threadgroup_position_in_grid.y;
    uint group = threadgroup_position_in_grid.x;
    if (simdgroup_index_in_threadgroup == 0)
        hyper_coefficients<M, PARTS, ITERS>(dots, base, scale, eps, float(M * C), row, thread_index_in_simdgroup,
                                            coefficients);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (group == 0 && t < uint(2 * M + M * M)) hyper_keep<M>(coefficients[t], row, t, pre, post, comb);
    for (uint c = group * 256u + t; c < uint(C); c += 256u * uint(GROUPS))
        hyper_expand<M, C>(h, coefficients, float(y[ulong(row) * ulong(C) + ulong(c)]),
                           ulong(row) * ulong(M * C) + ulong(c), expanded);
"""
