"""Metal texts of the entries of a cache: alone, into a ring, and into a ring with the norm of the query, the
coefficients of a hyper-connection and tickets for attention."""

from __future__ import annotations

from ._hyper_sources import COEFFICIENTS_CALL

# An entry, value t on thread t of row `row` (over B, L and H). Everything that its end needs is read before the barrier
# of the sum, and by all threads: behind it each read would wait for the one before. Beyond the last value, or where
# nothing turns, a thread reads what its neighbours read.
_READ = """
        uint channel = metal::min(t, uint(D - 1));
        uint turned = metal::max(channel + 2u * uint(P), uint(D)) - uint(D);
        uint angle = ENTRY_ROW * uint(P) + turned / 2u;
        v = float(x[ulong(row) * ulong(D) + ulong(channel)]);
        gain = NORMED ? float(weight[channel]) : 1.0f;
        c = cosine[angle];
        s = sine[angle];
"""
_NORM = """
        float sum = 0.0f;
        for (uint i = 0; i < uint(D / 32); i++) sum += part[i];
        v = float(bfloat16_t(gain * (v * metal::precise::rsqrt(sum / float(D) + as_type<float>(EPS_BITS)))));
"""
_TURN_AND_ROUND = """
        float other = simd_shuffle_xor(v, ushort(1));
        if (t + 2u * uint(P) >= uint(D))
            v = float(bfloat16_t((t & 1u) == 0u ? v * c - other * s : other * s + v * c));
        uint bits = fq_round<KIND, BLOCK>(as_type<uint>(v) >> 16);
"""

ENTRY_SOURCE = (
    """
    // A threadgroup owns one row of D values, a thread one value: neighbours in a pair and in a block are lanes.
    threadgroup float part[32];
    uint t = thread_index_in_threadgroup;
    uint row = threadgroup_position_in_grid.x;
    float v, gain, c, s;
"""
    + _READ.replace("ENTRY_ROW", "(row / uint(H) % uint(x_shape[1]))")
    + """
    if (NORMED) {
        float square = simd_sum(v * v);
        if (t % 32u == 0) part[t / 32u] = square;
        threadgroup_barrier(mem_flags::mem_threadgroup);"""
    + _NORM
    + """
    }"""
    + _TURN_AND_ROUND
    + """
    y[ulong(row) * ulong(D) + ulong(t)] = as_type<bfloat16_t>(ushort(bits));
"""
)

_READ_QUERY = """
    else if (group < 2u * rows) {
        #pragma unroll
        for (uint i = 0; i < uint(VALUES); i++) {
            uint channel = metal::min(t + 32u * uint(SG) * i, uint(C - 1));
            values[i] = float(low_rank[ulong(row) * ulong(C) + ulong(channel)]);
            gains[i] = float(q_weight[channel]);
        }
        #pragma unroll
        for (uint i = 0; i < uint(VALUES); i++)
            if (t + 32u * uint(SG) * i < uint(C)) square += values[i] * values[i];
    }"""
_NORM_QUERY = """
    else if (group < 2u * rows) {
        float sum = simd_sum(t % 32u < uint(SG) ? part[t % 32u] : 0.0f);
        float scale = metal::precise::rsqrt(sum / float(C) + as_type<float>(EPS_BITS));
        #pragma unroll
        for (uint i = 0; i < uint(VALUES); i++) {
            uint channel = t + 32u * uint(SG) * i;
            if (t < 32u * uint(SG) && channel < uint(C))
                qr[ulong(row) * ulong(C) + ulong(channel)] = T(gains[i] * (values[i] * scale));
        }
    }"""


_TICKETS = """
    if (group == 0u)
        for (uint i = t; i < uint(TICKETS); i += uint(THREADS)) tickets[i] = 0;
"""
_COEFFICIENTS = """
    // Threadgroups behind all these have a row of hc_dots each.
    uint copies = (words + uint(THREADS) - 1u) / uint(THREADS);
    if (group >= 2u * rows + copies && t < 32u)
        """ + COEFFICIENTS_CALL.replace("HC_ROW", "group - 2u * rows - copies")


def ring_source(*, with_query: bool) -> str:
    """The text that writes entries into a ring; `with_query` adds the norm of the query's rows, coefficients and
    tickets."""
    return (
        (
            """
    // Threadgroups of THREADS threads, in this order: one for each of the B L entries, its value t on thread t < D;
    QUERY_OWNERS
    // as many as it takes to copy the ring's other rows, a word of 16 bytes a thread. All reads come before the
    // barrier, and none waits for `at`, which the host wrote.
    threadgroup float part[32];
    uint t = thread_index_in_threadgroup;
    uint group = threadgroup_position_in_grid.x;
    uint length = uint(x_shape[1]);
    uint rows = uint(x_shape[0]) * length;
    uint row = group % rows;
    uint size = uint(into_shape[1]);
    uint words = uint(into_shape[0]) * size * uint(D / 8);
    uint word = (group - GROUPS_BEFORE) * uint(THREADS) + t;
    int start = 0;
    float v, gain, c, s;
    uint4 old;
    float square = 0.0f;
    QUERY_VALUES
    if (group < rows) {  // here and below the same for the whole threadgroup
        start = at[0];"""
            + _READ.replace("ENTRY_ROW", "(row % length)")
            + """
        square = t < uint(D) ? v * v : 0.0f;
    }"""
            + (_READ_QUERY if with_query else "")
            + """
    else {
        start = at[0];
        old = ((const device uint4*)into)[metal::min(word, words - 1u)];
    }"""
            + (_COEFFICIENTS + _TICKETS if with_query else "")
            + """
    square = simd_sum(square);
    if (t % 32u == 0) part[t / 32u] = square;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (group < rows) {
        if (NORMED) {"""
            + _NORM
            + """
        }"""
            + _TURN_AND_ROUND
            + """
        FIRST_ROW
        uint slot = first + row % length;
        if (slot >= size) slot -= size;
        ulong at_entry = ulong(row / length * size + slot) * ulong(D) + ulong(t);
        if (t < uint(D)) ring[at_entry] = as_type<bfloat16_t>(ushort(bits));
    }"""
            + (_NORM_QUERY if with_query else "")
            + """
    else {
        FIRST_ROW
        uint slot = word / uint(D / 8) % size;
        uint place = slot >= first ? slot - first : slot + size - first;  // how far behind the first new row
        if (word < words && place >= length) ((device uint4*)ring)[word] = old;
    }
"""
        )
        .replace("FIRST_ROW", "uint first = uint((start % int(size) + int(size)) % int(size));")
        .replace("GROUPS_BEFORE", "2u * rows" if with_query else "rows")
        .replace(
            "QUERY_OWNERS",
            "// one for each row of low_rank, split as in rms_norm.py;" if with_query else "// then",
        )
        .replace(
            "QUERY_VALUES",
            """constexpr int VALUES = (C + 32 * SG - 1) / (32 * SG);
    float values[VALUES];
    float gains[VALUES];"""
            if with_query
            else "",
        )
    )
