"""Metal texts of the entries of a cache: alone, into a ring, and into a ring with the norm of the query."""

from __future__ import annotations

# Of thread t with the value v of row `row` (over B, L and H): what is left to do after the sum of squares.
_NORM = """
        float sum = 0.0f;
        for (uint i = 0; i < uint(D / 32); i++) sum += part[i];
        v = float(bfloat16_t(float(weight[t]) * (v * metal::precise::rsqrt(sum / float(D) + eps[0]))));
"""
_TURN = """
        float c = cosine[entry];
        float s = sine[entry];
        v = float(bfloat16_t((t & 1u) == 0u ? v * c - other * s : other * s + v * c));
"""

ENTRY_SOURCE = (
    """
    // A threadgroup owns one row of D values, a thread one value: neighbours in a pair and in a block are lanes.
    threadgroup float part[32];
    uint t = thread_index_in_threadgroup;
    uint row = threadgroup_position_in_grid.x;
    ulong at = ulong(row) * ulong(D) + ulong(t);
    float v = float(x[at]);
    if (NORMED) {
        float square = simd_sum(v * v);
        if (t % 32u == 0) part[t / 32u] = square;
        threadgroup_barrier(mem_flags::mem_threadgroup);"""
    + _NORM
    + """
    }
    float other = simd_shuffle_xor(v, ushort(1));
    if (t + 2u * uint(P) >= uint(D)) {
        uint entry = row / uint(H) % uint(x_shape[1]) * uint(P) + (t + 2u * uint(P) - uint(D)) / 2u;"""
    + _TURN
    + """
    }
    uint bits = fq_round<KIND, BLOCK>(as_type<uint>(v) >> 16);
    y[at] = as_type<bfloat16_t>(ushort(bits));
"""
)


def ring_source(*, with_query: bool) -> str:
    """The text that writes entries into a ring; `with_query` adds the norm of the query's rows."""
    squares = """
    else if (group < 2u * rows && t < 32u * uint(SG)) {
        for (uint i = t; i < uint(C); i += 32u * uint(SG)) {
            float value = float(low_rank[ulong(row) * ulong(C) + ulong(i)]);
            square += value * value;
        }
    }"""
    query = """
    else if (group < 2u * rows) {
        float sum = simd_sum(t % 32u < uint(SG) ? part[t % 32u] : 0.0f);
        float scale = metal::precise::rsqrt(sum / float(C) + eps[0]);
        if (t < 32u * uint(SG))
            for (uint i = t; i < uint(C); i += 32u * uint(SG)) {
                ulong of_query = ulong(row) * ulong(C) + ulong(i);
                qr[of_query] = T(float(q_weight[i]) * (float(low_rank[of_query]) * scale));
            }
    }"""
    return (
        (
            """
    // Threadgroups of THREADS threads, in this order: one for each of the B L entries, its value t on thread t < D;
    QUERY_OWNERS
    // as many as it takes to copy the ring's other rows, a word of 16 bytes a thread.
    threadgroup float part[32];
    uint t = thread_index_in_threadgroup;
    uint group = threadgroup_position_in_grid.x;
    uint length = uint(x_shape[1]);
    uint rows = uint(x_shape[0]) * length;
    uint row = group % rows;
    uint size = uint(into_shape[1]);
    uint first = uint((at[0] % int(size) + int(size)) % int(size));

    float v = 0.0f;
    float square = 0.0f;
    if (group < rows) {
        if (t < uint(D)) v = float(x[ulong(row) * ulong(D) + ulong(t)]);
        square = v * v;
    }"""
            + (squares if with_query else "")
            + """
    square = simd_sum(square);
    if (t % 32u == 0) part[t / 32u] = square;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (group < rows) {  // the same for the whole threadgroup
        if (NORMED && t < uint(D)) {"""
            + _NORM
            + """
        }
        float other = simd_shuffle_xor(v, ushort(1));
        if (t + 2u * uint(P) >= uint(D) && t < uint(D)) {
            uint entry = row % length * uint(P) + (t + 2u * uint(P) - uint(D)) / 2u;"""
            + _TURN
            + """
        }
        uint bits = fq_round<KIND, BLOCK>(as_type<uint>(v) >> 16);
        ulong slot = ulong(row / length * size + (first + row % length) % size);
        if (t < uint(D)) ring[slot * ulong(D) + ulong(t)] = as_type<bfloat16_t>(ushort(bits));
    }"""
            + (query if with_query else "")
            + """
    else {
        uint word = (group - GROUPS_BEFORE) * uint(THREADS) + t;
        uint slot = word / uint(D / 8);
        if (slot < uint(into_shape[0]) * size && (slot % size + size - first) % size >= length)
            ((device uint4*)ring)[word] = ((const device uint4*)into)[word];
    }
"""
        )
        .replace("GROUPS_BEFORE", "2u * rows" if with_query else "rows")
        .replace(
            "QUERY_OWNERS",
            "// one for each row of low_rank, split as in rms_norm.py;" if with_query else "// then",
        )
    )
