"""Metal text of top-k; what it computes stands in `topk.py`."""

from __future__ import annotations

HEADER = """
// Sorts as unsigned integers like the scores; 0 stands for what is never chosen, and 0.0 and -0.0 are one key.
inline uint topk_key(uint bits) {
    uint size = bits & 0x7fffffffu;
    uint key = bits ^ (uint(int(bits) >> 31) | 0x80000000u);  // all bits of a negative one, the sign of others
    key = size == 0u ? 0x80000000u : key;
    return size > 0x7f800000u || bits == 0xff800000u ? 0u : key;
}
"""

SOURCE = """
    // A threadgroup of SG simdgroups owns one chunk of a row. Simdgroup s owns the 32 V elements from 32 V s on, lane l
    // every 32nd of them, so (simdgroup, key number, lane) is the order of indices. An element is a score, or the best
    // of GROUP scores; with LISTED the row is a list of elements that an earlier launch chose.
    threadgroup atomic_uint counts[2048];
    threadgroup uint sums[SG];
    threadgroup uint equals[SG];
    threadgroup uint found[3];
    const uint bins_of_thread = 2048u / (32u * uint(SG));
    uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint simdgroup = simdgroup_index_in_threadgroup;
    uint n = uint(scores_shape[1]);
    uint elements = LISTED ? uint(listed_shape[1]) : (n + uint(GROUP) - 1u) / uint(GROUP);
    const uint size = 32u * uint(SG * V);
    uint chunks = (elements + size - 1u) / size;
    uint row = threadgroup_position_in_grid.x / chunks;
    uint chunk = threadgroup_position_in_grid.x % chunks;
    uint first = chunk * size + simdgroup * (32u * uint(V)) + lane;
    ulong scores_at = ulong(row) * ulong(n);
    ulong listed_at = ulong(row) * ulong(elements);
    int pinned = GROUP > 1 ? (visible[row % uint(visible_shape[0])] - 1) / GROUP : -1;
    if (GROUP > 1 && visible[row % uint(visible_shape[0])] <= 0) pinned = -1;

    // All reads come before the first value is needed, and none is conditional: behind one another they would take
    // longer than all the rest. Beyond the end the last one is read again.
    uint keys[V];
    #pragma unroll
    for (uint i = 0; i < uint(V); i++) {
        uint at = first + 32u * i;
        keys[i] = LISTED ? uint(listed[listed_at + ulong(metal::min(at, elements - 1u))]) : at;
    }
    uint all_keys = 0u;
    #pragma unroll
    for (uint i = 0; i < uint(V); i++) {
        uint id = keys[i];
        uint from = id * uint(GROUP);
        uint key = 0u;
        for (uint g = 0; g < uint(GROUP); g++)
            key = metal::max(key, topk_key(scores[scores_at + ulong(metal::min(from + g, n - 1u))]));
        if (int(id) == pinned) key = 0xffffffffu;
        if (first + 32u * i >= elements || int(id) < 0) key = 0u;
        keys[i] = key;
        all_keys |= key;
    }
    // A simdgroup on the free end of a row has nothing to count or write. Not with groups: CUDA has no register left.
    bool live = GROUP > 1 || simd_any(all_keys != 0u);

    // `prefix` becomes the key of the K-th element, digit by digit; `need` how many of the keys that begin with it
    // are wanted. Fewer than K keys: all of them are above the prefix 0.
    uint prefix = 0u;
    uint need = uint(K);
    bool all = false;
    for (uint digit = 0; digit < 3u; digit++) {
        if (!all) {  // the same for every thread
            uint shift = digit == 0u ? 21u : digit == 1u ? 10u : 0u;
            uint mask = digit == 2u ? 1023u : 2047u;
            for (uint b = t; b < 2048u; b += 32u * uint(SG))
                atomic_store_explicit(&counts[b], 0u, memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (live) {
                #pragma unroll
                for (uint i = 0; i < uint(V); i++) {
                    bool counted = keys[i] != 0u;
                    if (digit == 1u) counted = counted && (keys[i] >> 21) == prefix;
                    if (digit == 2u) counted = counted && (keys[i] >> 10) == prefix;
                    if (digit == 0u || simd_any(counted)) {
                        uint bin = counted ? (keys[i] >> shift) & mask : 4096u;
                        // On a plateau all lanes meet in one bin: one of them adds for all.
                        uint common = simd_broadcast_first(bin);
                        bool together = simd_all(bin == common);
                        if (counted && (!together || lane == 0u))
                            atomic_fetch_add_explicit(&counts[bin], together ? 32u : 1u, memory_order_relaxed);
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            // Thread t owns the t-th group of bins from above.
            uint top = 2048u - t * bins_of_thread;
            uint here = 0u;
            for (uint b = 1; b <= bins_of_thread; b++)
                here += atomic_load_explicit(&counts[top - b], memory_order_relaxed);
            uint above = simd_prefix_inclusive_sum(here);
            if (lane == 31u) sums[simdgroup] = above;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            uint total = 0u;
            for (uint s = 0; s < uint(SG); s++) {
                if (s < simdgroup) above += sums[s];
                total += sums[s];
            }
            if (digit == 0u && total <= uint(K)) all = true;
            above -= here;
            if (!all && above < need && above + here >= need) {
                uint bin = top;
                uint inside = 0u;
                while (above + inside < need) {
                    bin--;
                    above += inside;
                    inside = atomic_load_explicit(&counts[bin], memory_order_relaxed);
                }
                found[0] = bin;
                found[1] = need - above;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (!all) {
                prefix = digit == 0u ? found[0] : (prefix << (digit == 1u ? 11u : 10u)) | found[0];
                need = found[1];
            }
        }
    }
    if (all) need = 0u;

    uint larger = 0u;
    uint equal = 0u;
    #pragma unroll
    for (uint i = 0; i < uint(V); i++) {
        larger += keys[i] > prefix ? 1u : 0u;
        equal += keys[i] == prefix ? 1u : 0u;
    }
    larger = simd_sum(larger);
    equal = simd_sum(equal);
    if (lane == 0u) {
        sums[simdgroup] = larger;
        equals[simdgroup] = equal;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    larger = 0u;  // from here on: how many came before
    equal = 0u;
    uint chosen = need;
    for (uint s = 0; s < uint(SG); s++) {
        if (s < simdgroup) {
            larger += sums[s];
            equal += equals[s];
        }
        chosen += sums[s];
    }
    ulong out = ulong(threadgroup_position_in_grid.x) * ulong(K);
    uint before = (1u << lane) - 1u;
    if (live) {
        #pragma unroll
        for (uint i = 0; i < uint(V); i++) {
            bool is_larger = keys[i] > prefix;
            bool is_equal = keys[i] == prefix;
            uint larger_lanes = uint((simd_vote::vote_t)simd_ballot(is_larger));
            uint equal_lanes = uint((simd_vote::vote_t)simd_ballot(is_equal));
            uint rank = equal + metal::popcount(equal_lanes & before);
            if (is_larger || (is_equal && rank < need)) {
                uint at = first + 32u * i;
                uint id = LISTED ? uint(listed[listed_at + ulong(at)]) : at;
                if (BLOCK > 0) {
                    ulong list = ulong(row) * ulong(blocks_shape[1]) + ulong(id / uint(metal::max(BLOCK, 1)));
                    id = uint(blocks[list]) * uint(BLOCK) + id % uint(metal::max(BLOCK, 1));
                }
                uint place = larger + metal::popcount(larger_lanes & before) + metal::min(rank, need);
                index[out + ulong(place)] = int(id);
            }
            larger += metal::popcount(larger_lanes);
            equal += metal::popcount(equal_lanes);
        }
    }
    for (uint i = chosen + t; i < uint(K); i += 32u * uint(SG)) index[out + ulong(i)] = -1;
"""
