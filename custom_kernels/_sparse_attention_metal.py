"""Metal text of sparse attention; what it computes stands in `sparse_attention.py`."""

from __future__ import annotations

SOURCE = """
    // A threadgroup of 8 simdgroups owns HG heads of one query row; simdgroup s owns the entries 8 s .. 8 s + 7 of each
    // block. Lane l holds PAIRS pairs of neighbouring channels of a row, in runs of RUN pairs (16 bytes) where it can.
    // The last source, also a single one, is `far`; with SPLIT its entries from base on are the rows of `recent`.
    const uint RUN = PAIRS < 4 ? uint(PAIRS) : 4u;
    threadgroup float2 queries[HG * PAIRS * 32];
    threadgroup float scores[2 * HG * 64];
    threadgroup float parts[8 * 64 * PAIRS];
    threadgroup float totals[8];
    uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint s = simdgroup_index_in_threadgroup;
    const uint D = 64u * uint(PAIRS);
    uint length = uint(q_shape[1]);
    uint heads = uint(sinks_shape[0]);
    uint groups = heads / uint(HG);
    uint row = threadgroup_position_in_grid.x / groups;  // over batch and length
    uint head0 = threadgroup_position_in_grid.x % groups * uint(HG);
    uint batch = row / length;
    uint near_rows = uint(near_shape[1]);
    uint far_rows = uint(far_shape[1]);
    uint recent_rows = SPLIT ? uint(recent_shape[1]) : 0u;
    uint start = SPLIT ? uint(metal::max(metal::min(base[0], int(far_rows)), 0)) : far_rows;  // of the recent rows
    uint near_count = TWO ? uint(near_list_shape[2]) : 0u;
    uint count = near_count + uint(far_list_shape[2]);
    ulong near_at = ulong(row) * ulong(near_count);
    ulong far_at = ulong(row) * ulong(count - near_count);
    ulong out = (ulong(row) * ulong(heads) + ulong(head0)) * ulong(D);

    for (uint i = t; i < uint(HG * PAIRS * 32); i += 256u) {
        uint pair = i / 32u % uint(PAIRS);
        uint channel = pair / RUN * (64u * RUN) + i % 32u * (2u * RUN) + pair % RUN * 2u;
        ulong at = out + ulong(i / uint(32 * PAIRS)) * ulong(D) + ulong(channel);
        float a = float(q[at]);
        float b = float(q[at + 1ul]);
        if (TURN_QUERIES && channel / 2u >= D / 2u - uint(TURN)) {
            uint of_table = row % length * uint(TURN) + channel / 2u - (D / 2u - uint(TURN));
            float c = cosine[of_table];
            float n = sine[of_table];
            float turned = float(bfloat16_t(a * c - b * n));
            b = float(bfloat16_t(a * n + b * c));
            a = turned;
        }
        queries[i] = float2(a, b);
    }
    float acc[HG * 2 * PAIRS];
    float peak[HG];
    float total[HG];
    #pragma unroll
    for (uint i = 0; i < uint(HG * 2 * PAIRS); i++) acc[i] = 0.0f;
    #pragma unroll
    for (uint h = 0; h < uint(HG); h++) {
        peak[h] = -1e30f;
        total[h] = 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint buffer = 0u;
    int upcoming[2];  // the list is read a block ahead of the rows
    upcoming[0] = -1;
    upcoming[1] = -1;
    for (uint ahead = 0; ahead < count + 64u; ahead += 64u) {
        uint first = ahead - 64u;  // of the block at hand; none in the first round, whose entries are all -1
        int entry[2];  // every simdgroup looks at the whole block, to leave together where it is empty
        #pragma unroll
        for (uint i = 0; i < 2u; i++) {
            entry[i] = upcoming[i];
            uint p = ahead + 32u * i + lane;
            int id = -1;
            if (p < near_count) id = near_list[near_at + ulong(p)];
            else if (p < count) id = far_list[far_at + ulong(p - near_count)];
            upcoming[i] = id >= 0 && uint(id) < (p < near_count ? near_rows : start + recent_rows) ? id : -1;
        }
        if (simd_any(entry[0] >= 0 || entry[1] >= 0)) {
            int listed = s < 4u ? entry[0] : entry[1];
            bool present = simd_shuffle(listed, ushort((8u * s + lane / 4u) & 31u)) >= 0;
            uint words[8 * PAIRS];
            #pragma unroll
            for (uint r = 0; r < 8u; r++) {
                int id = simd_shuffle(listed, ushort((8u * s + r) & 31u));
                bool is_near = first + 8u * s + r < near_count;
                bool is_recent = SPLIT && !is_near && id >= int(start);
                uint rows = is_near ? near_rows : is_recent ? recent_rows : far_rows;
                ulong at = ulong(batch) * ulong(rows) + ulong(is_recent ? id - int(start) : metal::max(id, 0));
                const device bfloat16_t* from = is_near ? near : is_recent ? recent : far;
                from += at * ulong(D) + ulong(2u * RUN * lane);
                if (RUN == 4u) {
                    #pragma unroll
                    for (uint c = 0; c < uint(PAIRS) / 4u; c++) {
                        uint4 four = uint4(0u);
                        if (id >= 0) four = *((const device uint4*)(from + 256u * c));
                        words[r * uint(PAIRS) + 4u * c] = four.x;
                        words[r * uint(PAIRS) + 4u * c + 1u] = four.y;
                        words[r * uint(PAIRS) + 4u * c + 2u] = four.z;
                        words[r * uint(PAIRS) + 4u * c + 3u] = four.w;
                    }
                } else {
                    #pragma unroll
                    for (uint i = 0; i < uint(PAIRS); i++)
                        words[r * uint(PAIRS) + i] = id >= 0 ? *((const device uint*)(from + 2u * i)) : 0u;
                }
            }

            float dots[HG * 8];
            #pragma unroll
            for (uint i = 0; i < uint(HG * 8); i++) dots[i] = 0.0f;
            #pragma unroll
            for (uint pair = 0; pair < uint(PAIRS); pair++) {
                float2 of_query[HG];
                #pragma unroll
                for (uint h = 0; h < uint(HG); h++) of_query[h] = queries[(h * uint(PAIRS) + pair) * 32u + lane];
                #pragma unroll
                for (uint r = 0; r < 8u; r++) {
                    float a = as_type<float>(words[r * uint(PAIRS) + pair] << 16);
                    float b = as_type<float>(words[r * uint(PAIRS) + pair] & 0xffff0000u);
                    #pragma unroll
                    for (uint h = 0; h < uint(HG); h++) {
                        dots[8u * h + r] = metal::fma(of_query[h].x, a, dots[8u * h + r]);
                        dots[8u * h + r] = metal::fma(of_query[h].y, b, dots[8u * h + r]);
                    }
                }
            }
            // Sums over the lanes: a lane passes on half of its rows at each of three steps, then holds row lane / 4.
            #pragma unroll
            for (uint h = 0; h < uint(HG); h++) {
                #pragma unroll
                for (uint half_rows = 4; half_rows > 0u; half_rows >>= 1) {
                    bool upper = (lane & (4u * half_rows)) != 0u;
                    #pragma unroll
                    for (uint r = 0; r < half_rows; r++) {
                        float low = dots[8u * h + r];
                        float high = dots[8u * h + r + half_rows];
                        float other = simd_shuffle_xor(upper ? low : high, ushort(4u * half_rows));
                        dots[8u * h + r] = (upper ? high : low) + other;
                    }
                }
                float dot = dots[8u * h];
                dot += simd_shuffle_xor(dot, ushort(2));
                dot += simd_shuffle_xor(dot, ushort(1));
                if ((lane & 3u) == 0u)
                    scores[(buffer * uint(HG) + h) * 64u + 8u * s + lane / 4u] =
                        present ? dot * as_type<float>(SCALE_BITS) : -INFINITY;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);

            float chances[HG * 8];
            #pragma unroll
            for (uint h = 0; h < uint(HG); h++) {
                uint at = (buffer * uint(HG) + h) * 64u;
                float top = simd_max(metal::max(scores[at + lane], scores[at + 32u + lane]));
                float raised = metal::max(peak[h], top);
                float fade = metal::precise::exp(peak[h] - raised);
                float mine = metal::precise::exp(scores[at + 8u * s + (lane & 7u)] - raised);
                float sum = 0.0f;
                #pragma unroll
                for (uint r = 0; r < 8u; r++) {
                    float p = simd_shuffle(mine, ushort(r));
                    sum += p;
                    chances[8u * h + r] = float(bfloat16_t(p));
                }
                total[h] = metal::fma(total[h], fade, sum);
                peak[h] = raised;
                #pragma unroll
                for (uint i = 0; i < uint(2 * PAIRS); i++) acc[h * uint(2 * PAIRS) + i] *= fade;
            }
            #pragma unroll
            for (uint r = 0; r < 8u; r++) {
                #pragma unroll
                for (uint pair = 0; pair < uint(PAIRS); pair++) {
                    float a = as_type<float>(words[r * uint(PAIRS) + pair] << 16);
                    float b = as_type<float>(words[r * uint(PAIRS) + pair] & 0xffff0000u);
                    #pragma unroll
                    for (uint h = 0; h < uint(HG); h++) {
                        uint i = (h * uint(PAIRS) + pair) * 2u;
                        acc[i] = metal::fma(chances[8u * h + r], a, acc[i]);
                        acc[i + 1u] = metal::fma(chances[8u * h + r], b, acc[i + 1u]);
                    }
                }
            }
            buffer ^= 1u;  // the next block's scores are written while slow simdgroups still read these
        }
    }

    // The simdgroups' shares of each head, added in their order; a thread finishes pairs of neighbouring channels.
    #pragma unroll
    for (uint h = 0; h < uint(HG); h++) {
        #pragma unroll
        for (uint pair = 0; pair < uint(PAIRS); pair++) {
            uint channel = pair / RUN * (64u * RUN) + lane * (2u * RUN) + pair % RUN * 2u;
            parts[s * D + channel] = acc[(h * uint(PAIRS) + pair) * 2u];
            parts[s * D + channel + 1u] = acc[(h * uint(PAIRS) + pair) * 2u + 1u];
        }
        if (lane == 0u) totals[s] = total[h];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float denominator = 0.0f;
        for (uint i = 0; i < 8u; i++) denominator += totals[i];
        denominator += metal::precise::exp(sinks[head0 + h] - peak[h]);
        for (uint pair = t; pair < D / 2u; pair += 256u) {
            float a = 0.0f;
            float b = 0.0f;
            for (uint i = 0; i < 8u; i++) {
                a += parts[i * D + 2u * pair];
                b += parts[i * D + 2u * pair + 1u];
            }
            bfloat16_t x = bfloat16_t(a / denominator);
            bfloat16_t y = bfloat16_t(b / denominator);
            if (TURN > 0 && pair >= D / 2u - uint(TURN)) {
                uint of_table = row % length * uint(TURN) + pair - (D / 2u - uint(TURN));
                float c = cosine[of_table];
                float n = -sine[of_table];
                a = float(x);
                b = float(y);
                x = bfloat16_t(a * c - b * n);
                y = bfloat16_t(a * n + b * c);
            }
            o[out + ulong(h * D + 2u * pair)] = x;
            o[out + ulong(h * D + 2u * pair + 1u)] = y;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
"""
