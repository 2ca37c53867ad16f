"""Sparse attention: one softmax over listed rows, keys equal values, a sink in the denominator.

Every query row has a list of cache rows (-1 = nothing) shared by all heads; a row is gathered once and used
as key and value. Blocks of 64 list entries are taken in order with a running maximum (architecture notes 5.4):

    s = scale q.k;  m' = max(m, max s);  f = exp(m - m');  p = exp(s - m')
    den = den f + sum p;  acc = acc f + sum bf16(p) k;      at the end den += exp(sink - m), o = acc / den

float32 inside, probabilities rounded to bfloat16 for the value product as in the reference, one rounding of the
result, and one more where it is turned back by the inverse rotation. The running maximum starts at -1e30, so a row
with an empty list gives zeros. Blocks are always whole: a -1 entry changes no bit, and a row's result depends on
neither the other rows nor the padding.

Kernel: within tolerance (sums in another order). A simdgroup holds 8 of a block's 64 rows in registers, where they
serve as keys and, after the block's maximum is known, as values: one gather for all heads of the threadgroup, nothing
staged. How many heads share a gather follows from the number of rows and changes no bit. CUDA has a body of its own
(`_sparse_attention_cuda.py`).

One launch. Bytes: H / (heads of a threadgroup) times 2 D a listed row, mostly from cache; the queries and the result
once. Work: 4 D operations for a listed row and head.
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from . import _sparse_attention_cuda, _tiles_cuda
from ._case import Case
from ._kernel import Kernel, backend, enabled, floats
from ._rows import Rows, SplitRows, gather, rows_fault, valid
from .rope import rope, rope_frequencies, rope_ref, rope_table

_BLOCK = 64
_FLOOR = -1e30
# Query rows that the reference handles at a time: bounds the gathered rows, whatever the length of the prompt.
_ROWS = 64
# Heads of a threadgroup, and the threadgroups that fill a GPU: below these a group takes fewer heads, though more
# groups then read the same rows. CUDA's products take 16 heads whether they are there or not.
_HEADS, _GROUPS = (4, 2, 1), 192
_CUDA_HEADS, _CUDA_GROUPS = (16, 8, 4, 2, 1), 32
_WIDTHS = (64, 128, 256, 512)  # what a simdgroup holds in whole words of each lane

_SPARSE_ATTENTION_SOURCE = """
    // A threadgroup of 8 simdgroups owns HG heads of one query row; simdgroup s owns the entries 8 s .. 8 s + 7 of each
    // block. Lane l holds PAIRS pairs of neighbouring channels of a row, in runs of RUN pairs (16 bytes) where it can.
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
    uint heads = uint(q_shape[2]);
    uint groups = heads / uint(HG);
    uint row = threadgroup_position_in_grid.x / groups;  // over batch and length
    uint head0 = threadgroup_position_in_grid.x % groups * uint(HG);
    uint batch = row / length;
    uint near_rows = uint(near_shape[1]);
    uint far_rows = TWO ? uint(far_shape[1]) : 0u;
    uint near_count = uint(near_list_shape[2]);
    uint count = near_count + (TWO ? uint(far_list_shape[2]) : 0u);
    ulong near_at = ulong(row) * ulong(near_count);
    ulong far_at = ulong(row) * ulong(count - near_count);
    ulong out = (ulong(row) * ulong(heads) + ulong(head0)) * ulong(D);

    for (uint i = t; i < uint(HG * PAIRS * 32); i += 256u) {
        uint pair = i / 32u % uint(PAIRS);
        uint channel = pair / RUN * (64u * RUN) + i % 32u * (2u * RUN) + pair % RUN * 2u;
        ulong at = out + ulong(i / uint(32 * PAIRS)) * ulong(D) + ulong(channel);
        queries[i] = float2(float(q[at]), float(q[at + 1ul]));
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
            else if (TWO && p < count) id = far_list[far_at + ulong(p - near_count)];
            upcoming[i] = id >= 0 && uint(id) < (p < near_count ? near_rows : far_rows) ? id : -1;
        }
        if (simd_any(entry[0] >= 0 || entry[1] >= 0)) {
            int listed = s < 4u ? entry[0] : entry[1];
            bool present = simd_shuffle(listed, ushort((8u * s + lane / 4u) & 31u)) >= 0;
            uint words[8 * PAIRS];
            #pragma unroll
            for (uint r = 0; r < 8u; r++) {
                int id = simd_shuffle(listed, ushort((8u * s + r) & 31u));
                bool is_near = first + 8u * s + r < near_count;
                ulong at = (ulong(batch) * ulong(is_near ? near_rows : far_rows) + ulong(metal::max(id, 0))) * ulong(D)
                    + ulong(2u * RUN * lane);
                const device bfloat16_t* from = is_near ? near + at : far + at;
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
                    scores[(buffer * uint(HG) + h) * 64u + 8u * s + lane / 4u] = present ? dot * scale[0] : -INFINITY;
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

_sparse_attention_kernel = Kernel(
    "sparse_attention",
    ["q", "near", "near_list", "far", "far_list", "sinks", "scale", "cosine", "sine"],
    ["o"],
    _SPARSE_ATTENTION_SOURCE,
    cuda_source=_sparse_attention_cuda.SOURCE,
    cuda_header=_tiles_cuda.HEADER,
    exact=False,
    family="sparse_attention",
)

Sources = list[tuple[Rows, mx.array]]
Turn = tuple[mx.array, mx.array]


def sparse_attention(
    q: mx.array,
    sources: Sources,
    sinks: mx.array,
    *,
    scale: float,
    turn: Turn | None = None,
    turn_queries: bool = False,
) -> mx.array:
    """q [B, L, H, D]; sources: one or two pairs of rows [B, S, D] and list int32 [B, L, P], taken one after the other
    in one softmax (window first, then compressed rows); sinks float32 [H]. Returns bfloat16 [B, L, H, D]. The rows of
    the last source may be SplitRows, with the bits of one array that holds the same entries.

    With `turn`, cos and sin float32 [L, pairs], the last 2 * pairs channels of the result are rotated back, after
    its rounding; with `turn_queries` too, those of q are rotated forward first, as `rope(q, *turn)` does. List entries
    that name no row count as nothing. Raises ValueError when the shapes do not fit each other.
    """
    _check(q, sources, sinks, turn)
    if turn_queries and turn is None:
        raise ValueError("sparse_attention got turn_queries without turn, expected its tables; pass them.")
    B, L, H, D = q.shape
    if turn_queries:
        q = rope(q, *turn)
    rows = [x for x, _ in sources]
    fits = D in _WIDTHS and all(x.dtype == mx.bfloat16 and x.size for x in [q, *rows])
    fits = fits and not any(isinstance(x, SplitRows) for x in rows)
    if not fits or not all(index.size for _, index in sources) or not enabled("sparse_attention"):
        return sparse_attention_ref(q, sources, sinks, scale=scale, turn=turn)
    heads = _heads_of_group(B * L, H)
    sinks = sinks.astype(mx.float32)
    cos, sin = turn or (sinks, sinks)
    return _sparse_attention_kernel(
        inputs=[q, *sources[0], *sources[-1], sinks, floats(scale), cos, sin],
        template=[
            *[("HG", heads), ("PAIRS", D // 64), ("TWO", len(sources) == 2)],
            ("TURN", cos.shape[-1] if turn else 0),
        ],
        grid=(B * L * (H // heads) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def _check(q: mx.array, sources: Sources, sinks: mx.array, turn: Turn | None) -> None:
    for rows, _ in sources:
        if isinstance(rows, SplitRows) and (fault := rows_fault(rows)):
            raise ValueError(f"sparse_attention {fault}; pass the parts of one cache.")
    if any(isinstance(rows, SplitRows) for rows, _ in sources[:-1]):
        raise ValueError("sparse_attention got SplitRows in its first source, expected them in the last; swap the two.")
    B, L, H, D = q.shape
    shapes = [(x.shape, index.shape) for x, index in sources]
    fit = all(len(x) == len(index) == 3 and (x[0], x[2]) == (B, D) and index[:2] == (B, L) for x, index in shapes)
    if len(sources) not in (1, 2) or not fit or sinks.shape != (H,):
        raise ValueError(
            f"sparse_attention got q {q.shape}, sources {shapes} and sinks {sinks.shape}, expected [B, L, H, D], one or"
            " two pairs of rows [B, S, D] and list [B, L, P], and [H]; pass the tensors of one layer."
        )
    pairs = turn[0].shape[-1] if turn else 0
    if turn and not (turn[0].shape == turn[1].shape == (L, pairs) and 2 * pairs <= D):
        raise ValueError(
            f"sparse_attention got cos {turn[0].shape} and sin {turn[1].shape}, expected [{L}, pairs] with at most"
            f" {D // 2} pairs; make the table from the positions of this step."
        )


def _heads_of_group(rows: int, heads: int) -> int:
    """How many heads a threadgroup takes: as many as leave enough groups."""
    sizes, groups = (_CUDA_HEADS, _CUDA_GROUPS) if backend() == "cuda" else (_HEADS, _GROUPS)
    return next(n for n in sizes if heads % n == 0 and (n == 1 or rows * heads // n >= groups))


def sparse_attention_ref(
    q: mx.array,
    sources: Sources,
    sinks: mx.array,
    *,
    scale: float,
    turn: Turn | None = None,
    turn_queries: bool = False,
) -> mx.array:
    L = q.shape[1]
    if q.size == 0:
        return mx.zeros(q.shape, dtype=mx.bfloat16)
    if turn_queries:
        q = rope_ref(q, *turn)
    parts = []
    for start in range(0, L, _ROWS):
        rows = slice(start, start + _ROWS)
        part = _attend(q[:, rows], [(x, index[:, rows]) for x, index in sources], sinks, scale)
        if L > _ROWS:
            mx.eval(part)  # keeps one tile of gathered rows alive at a time
        parts.append(part)
    o = mx.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    return o if turn is None else rope_ref(o, *turn, inverse=True)


def _attend(q: mx.array, sources: Sources, sinks: mx.array, scale: float) -> mx.array:
    B, L, H, D = q.shape
    keys = mx.concatenate([gather(rows, index) for rows, index in sources], axis=2)  # [B, L, P, D]
    listed = mx.concatenate([valid(rows, index) for rows, index in sources], axis=2)[:, :, None]  # [B, L, 1, P]
    short = -keys.shape[2] % _BLOCK
    if short:
        keys = mx.pad(keys, [(0, 0), (0, 0), (0, short), (0, 0)])
        listed = mx.pad(listed, [(0, 0), (0, 0), (0, 0), (0, short)])
    q = q.astype(mx.float32)
    peak = mx.full((B, L, H, 1), _FLOOR, dtype=mx.float32)
    total = mx.zeros((B, L, H, 1), dtype=mx.float32)
    acc = mx.zeros((B, L, H, D), dtype=mx.float32)
    for start in range(0, keys.shape[2], _BLOCK):
        k = keys[:, :, start : start + _BLOCK].astype(mx.float32)
        scores = mx.where(listed[..., start : start + _BLOCK], (q @ k.swapaxes(2, 3)) * scale, -mx.inf)
        new_peak = mx.maximum(peak, scores.max(axis=-1, keepdims=True))
        fade = mx.exp(peak - new_peak)
        p = mx.exp(scores - new_peak)
        total = total * fade + p.sum(axis=-1, keepdims=True)
        acc = acc * fade + p.astype(mx.bfloat16).astype(mx.float32) @ k
        peak = new_peak
    total = total + mx.exp(sinks[:, None] - peak)
    return (acc / total).astype(mx.bfloat16)


def cases() -> list[Case]:
    from ._needle import needle  # which needs this module

    def call(q: mx.array, sinks: mx.array, *rest: mx.array, op, scale: float, turned: bool) -> mx.array:
        turn, rest = (rest[:2], rest[2:]) if turned else (None, rest)
        return op(q, list(zip(rest[::2], rest[1::2], strict=True)), sinks, scale=scale, turn=turn)

    def case(
        B: int, L: int, H: int, D: int, sizes: list[tuple[int, int]], pairs: int = 0, *, large: bool = False
    ) -> Case:
        """sizes: rows and list entries of each source."""

        def inputs(rng: np.random.Generator) -> list[mx.array]:
            arrays = [mx.array(rng.standard_normal((B, L, H, D), dtype=np.float32)).astype(mx.bfloat16)]
            arrays.append(mx.array(rng.standard_normal(H, dtype=np.float32) * 2))
            if pairs:
                arrays += rope_table(rng.integers(0, 1_048_576, L), rope_frequencies(2 * pairs, 10000.0))
            for S, P in sizes:
                index = np.sort(rng.integers(0, S, (B, L, P)), axis=-1)
                index[:, :, P - P // 5 :] = -1  # the tail of a list that is not full
                if B * L > 1:
                    index[0, 0] = -1
                rows = mx.array(rng.standard_normal((B, S, D), dtype=np.float32)).astype(mx.bfloat16)
                arrays += [rows, mx.array(index.astype(np.int32))]
            return arrays

        listed = sum(P for _, P in sizes)
        return Case(
            f"sparse_attention/{B}x{L}x{H}x{D}_{'_'.join(f'{P}of{S}' for S, P in sizes)}" + ("_turn" if pairs else ""),
            functools.partial(call, op=sparse_attention, scale=D**-0.5, turned=pairs > 0),
            functools.partial(call, op=sparse_attention_ref, scale=D**-0.5, turned=pairs > 0),
            inputs,
            tolerance=1e-5,
            bytes=2 * B * L * D * (2 * H + listed),
            large=large,
        )

    real = [(135, 128), (150_000, 512)]
    return [
        case(1, 2, 8, 64, [(40, 16), (70, 130)], 8),
        case(2, 3, 3, 128, [(20, 65)]),
        case(1, 1, 4, 512, [(30, 20), (90, 60)], 32),
        case(1, 50, 4, 256, [(9, 5), (9, 3)]),
        case(1, 1, 1, 64, [(1, 1)]),  # fewer than 8 values: Metal puts such inputs into another address space
        *[case(1, rows, 64, 512, real, 32, large=True) for rows in (1, 2, 6, 8, 64, 2048)],
        case(1, 1, 64, 512, [(135, 128)], 32, large=True),
        *[needle(L, S) for L in (1, 64) for S in (1000, 20_000, 200_000)],
    ]
