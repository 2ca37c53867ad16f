"""Lightning-indexer scores: score[l, j] = sum over heads of w[l, h] * max(0, q[l, h] . k[j]), -inf where j is hidden.

Rectified before the signed head weight. float32 throughout (architecture notes 7.3). Row l sees the keys below
visible[l]; a row restricted to candidate blocks gets the scores of their entries only, in the order of its list.
`bf16=True` reproduces the roundings of the vendor's reference (dot, product with the weight and sum each stored as
bfloat16), which makes ties at the selection boundary common; that mode has no kernel.

Kernel: within tolerance (sums in another order); a row's result does not depend on the rows beside it. A threadgroup
holds 128 keys in registers, as left-hand 8x8 fragments, and passes the queries of its rows, all heads, over them:
dots never reach memory. Keys may lie in two parts (`SplitRows`), with the bits of one. Products of bfloat16 values are
exact in float32, so this needs no bfloat16 arithmetic. CUDA has a body of its own (`_index_score_cuda.py`).

One launch. Bytes: visible keys once for 32 rows, the queries once for 128 keys (from cache), 4 a score. Work: 2 H D
operations a score: on a chip with less than 32 float32 operations for a byte of bandwidth, bound by arithmetic.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from . import _index_score_cuda, _tiles_cuda
from ._case import Case
from ._kernel import Kernel, blank, float_bits
from ._rows import Rows, SplitRows, after, end, gather, part, rows_fault
from ._switches import enabled

# Elements of the [rows, heads, keys] block that the reference computes at a time: bounds memory at any length.
_TILE_ELEMENTS = 1 << 23
_COLUMNS = 128  # scores of a row in one threadgroup
_ROWS = 32  # rows that share one reading of keys

_INDEX_SCORE_SOURCE = """
    // A threadgroup of 8 simdgroups owns 128 columns of ROWS rows, a simdgroup 16 of the columns: two 8x8 tiles of keys
    // (rows) against heads (columns). In a fragment, lane l holds row `own`, columns 2 pair and 2 pair + 1. The
    // channels are dealt to fragments so that a lane reads 8 neighbouring ones: fragment f, column c stands for
    // channel 32 (f / 4) + 8 (c / 2) + 2 (f % 4) + c % 2. With BLOCK a column is an entry of a listed block; with SPLIT
    // the entries from base on are the rows of `recent`.
    threadgroup float queries[HEADS * D];  // as right-hand fragments in lane order, absent heads zero
    threadgroup float head_weights[HEADS];
    uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint own = ((lane >> 2) & 4u) + ((lane >> 1) & 3u);
    uint pair = ((lane >> 2) & 2u) + (lane & 1u);
    uint length = uint(q_shape[1]);
    uint heads = uint(q_shape[2]);
    uint old_rows = uint(keys_shape[1]);
    uint recent_rows = SPLIT ? uint(recent_shape[1]) : 0u;
    uint start = SPLIT ? uint(metal::max(metal::min(base[0], int(old_rows)), 0)) : old_rows;  // of the recent rows
    uint entries = start + recent_rows;
    uint width = BLOCK > 0 ? uint(blocks_shape[2]) * uint(BLOCK) : old_rows + recent_rows;
    uint groups = (width + 127u) / 128u;
    uint tiles = (length + uint(ROWS) - 1u) / uint(ROWS);
    uint group = threadgroup_position_in_grid.x;
    uint group0 = group % groups * 128u;
    uint column0 = group0 + simdgroup_index_in_threadgroup * 16u;
    uint row0 = group / groups % tiles * uint(ROWS);
    uint batch = group / groups / tiles;
    uint end = metal::min(row0 + uint(ROWS), length);

    int limit = 0;
    for (uint row = row0; row < end; row++) limit = metal::max(limit, visible[row]);
    limit = metal::min(limit, int(entries));
    int key[2];
    simdgroup_float8x8 left[2 * (D / 8)];
    #pragma unroll
    for (uint tile = 0; tile < 2u; tile++) {
        uint column = column0 + 8u * tile + own;
        key[tile] = column < width ? int(column) : -1;
        if (BLOCK > 0 && column < width) {
            uint size = uint(metal::max(BLOCK, 1));
            int block = blocks[ulong(batch * length + row0) * ulong(blocks_shape[2]) + ulong(column / size)];
            key[tile] = block < 0 ? -1 : block * BLOCK + int(column % size);
        }
        bool read = key[tile] >= 0 && key[tile] < limit;
        bool is_recent = SPLIT && read && key[tile] >= int(start);
        ulong at = ulong(batch) * ulong(is_recent ? recent_rows : old_rows)
            + ulong(read ? (is_recent ? key[tile] - int(start) : key[tile]) : 0);
        const device bfloat16_t* from = (is_recent ? recent : keys) + at * ulong(D) + ulong(8u * pair);
        #pragma unroll
        for (uint part = 0; part < uint(D / 32); part++) {
            uint4 words = uint4(0u);
            if (read) words = *((const device uint4*)(from + 32u * part));
            #pragma unroll
            for (uint i = 0; i < 4u; i++) {
                left[tile * uint(D / 8) + 4u * part + i].thread_elements()[0] = as_type<float>(words[i] << 16);
                left[tile * uint(D / 8) + 4u * part + i].thread_elements()[1] = as_type<float>(words[i] & 0xffff0000u);
            }
        }
    }

    for (uint row = row0; row < end; row++) {
        int bound = metal::min(visible[row], int(entries));
        float sums[2];
        sums[0] = 0.0f;
        sums[1] = 0.0f;
        if (BLOCK > 0 || int(group0) < bound) {  // the same for the whole threadgroup
            ulong query = (ulong(batch) * ulong(length) + ulong(row)) * ulong(heads);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = t; i < uint(HEADS * D); i += 256u) {
                uint fragment = i / 64u % uint(D / 8);
                uint of_lane = i / 2u % 32u;
                uint c = ((of_lane >> 2) & 4u) + ((of_lane >> 1) & 3u);
                uint head = i / uint(8 * D) * 8u + (((of_lane >> 2) & 2u) + (of_lane & 1u)) * 2u + i % 2u;
                uint channel = fragment / 4u * 32u + c / 2u * 8u + fragment % 4u * 2u + c % 2u;
                queries[i] = head < heads ? float(q[(query + ulong(head)) * ulong(D) + ulong(channel)]) : 0.0f;
            }
            if (t < uint(HEADS)) {
                float w = t < heads ? float(weights[query + ulong(t)]) : 0.0f;
                head_weights[t] = float(bfloat16_t(w * as_type<float>(FACTOR_BITS)));
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (BLOCK > 0 || int(column0) < bound) {  // the same for the whole simdgroup
            for (uint eight = 0; eight < uint(HEADS / 8); eight++) {
                simdgroup_float8x8 dots0 = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                simdgroup_float8x8 dots1 = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                #pragma unroll
                for (uint f = 0; f < uint(D / 8); f++) {
                    simdgroup_float8x8 right;
                    right.thread_elements()[0] = queries[(eight * uint(D / 8) + f) * 64u + 2u * lane];
                    right.thread_elements()[1] = queries[(eight * uint(D / 8) + f) * 64u + 2u * lane + 1u];
                    simdgroup_multiply_accumulate(dots0, left[f], right, dots0);
                    simdgroup_multiply_accumulate(dots1, left[uint(D / 8) + f], right, dots1);
                }
                #pragma unroll
                for (uint e = 0; e < 2u; e++) {
                    float w = head_weights[8u * eight + 2u * pair + e];
                    float dot0 = dots0.thread_elements()[e];
                    float dot1 = dots1.thread_elements()[e];
                    sums[0] = metal::fma(w, dot0 < 0.0f ? 0.0f : dot0, sums[0]);
                    sums[1] = metal::fma(w, dot1 < 0.0f ? 0.0f : dot1, sums[1]);
                }
            }
            #pragma unroll
            for (uint tile = 0; tile < 2u; tile++) {  // over the four lanes of one key
                sums[tile] += simd_shuffle_xor(sums[tile], ushort(1));
                sums[tile] += simd_shuffle_xor(sums[tile], ushort(8));
            }
        }
        uint column = column0 + 8u * pair + own;
        int mine = pair == 0u ? key[0] : key[1];
        if (pair < 2u && column < width)
            scores[(ulong(batch) * ulong(length) + ulong(row)) * ulong(width) + ulong(column)] =
                mine >= 0 && mine < bound ? (pair == 0u ? sums[0] : sums[1]) : -INFINITY;
    }
"""

_index_score_kernel = Kernel(
    "index_score",
    ["q", "weights", "keys", "recent", "base", "visible", "blocks"],
    ["scores"],
    _INDEX_SCORE_SOURCE,
    cuda_source=_index_score_cuda.SOURCE,
    cuda_header=_tiles_cuda.HEADER,
    exact=False,
    family="index_score",
)


def index_scores(
    q: mx.array,
    weights: mx.array,
    keys: Rows,
    visible: mx.array | None = None,
    blocks: mx.array | None = None,
    *,
    block_size: int = 0,
    factor: float = 1.0,
    bf16: bool = False,
) -> mx.array:
    """Masked scores of every key, or of the entries of each row's listed blocks.

    q [B, L, H, D], weights [B, L, H], keys [B, S, D] of which row l sees those below visible[l] (int32 [L], None:
    all S; keys beyond every row's bound are not read, so they may be the free end of a buffer). Returns float32
    [B, L, S], -inf where hidden. Keys may be SplitRows: S is then the length that they can have at most, and columns
    behind their last entry are hidden; the result equals that of one array with these entries bit for bit.

    With `blocks` int32 [B, L, nb] (-1: none) and `block_size`: float32 [B, L, nb * block_size], the scores of the
    entries blocks[..] * block_size + 0 .. block_size - 1, -inf in absent blocks and where hidden.

    The weights are bfloat16(weights * factor).

    Raises ValueError when the shapes do not fit each other.
    """
    check_scores(q, weights, keys, visible, blocks, block_size)
    if bf16 or not takes(q, keys, blocks, block_size) or not enabled("index_score"):
        return index_scores_ref(q, weights, keys, visible, blocks, block_size=block_size, factor=factor, bf16=bf16)
    rows = _ROWS if blocks is None else 1
    return _index_score_kernel(**score_call(q, weights, keys, visible, blocks, block_size, factor, rows))[0]


def check_scores(q, weights, keys: Rows, visible: mx.array | None, blocks: mx.array | None, block_size: int) -> None:
    """Raises what `index_scores` does."""
    if isinstance(keys, SplitRows) and (fault := rows_fault(keys)):
        raise ValueError(f"index_scores {fault}; pass the parts of one cache.")
    B, L, H, D = q.shape
    S = keys.shape[1]
    if weights.shape != (B, L, H) or keys.shape != (B, S, D) or (visible is not None and visible.shape != (L,)):
        raise ValueError(
            f"index_scores got q {q.shape}, weights {weights.shape}, keys {keys.shape} and visible"
            f" {None if visible is None else visible.shape}, expected [B, L, H, D], [B, L, H], [B, S, D] and [L];"
            " pass tensors of one step."
        )
    if blocks is not None and (blocks.ndim != 3 or blocks.shape[:2] != (B, L) or block_size < 1):
        raise ValueError(
            f"index_scores got blocks {blocks.shape} of {block_size} entries for q {q.shape}, expected one list for"
            " each row and a size of 1 or more; pass the candidates of this step."
        )


def takes(q: mx.array, keys: Rows, blocks: mx.array | None, block_size: int) -> bool:
    """Whether a row's queries fit into threadgroup memory and its keys into registers."""
    H, D = q.shape[2:]
    fits = D % 32 == 0 and D <= 128 and H * D <= 4096
    return q.size > 0 and _width(keys, blocks, block_size) > 0 and q.dtype == keys.dtype == mx.bfloat16 and fits


def _width(keys: Rows, blocks: mx.array | None, block_size: int) -> int:
    return keys.shape[1] if blocks is None else blocks.shape[-1] * block_size


def score_call(
    q: mx.array, weights: mx.array, keys: Rows, visible: mx.array | None, blocks: mx.array | None, block_size: int,
    factor: float, rows: int,
) -> dict[str, Any]:  # fmt: skip
    """What a launch gets whose threadgroups score 128 columns of so many rows: 1, where rows have lists."""
    B, L, H, D = q.shape
    width = _width(keys, blocks, block_size)
    if visible is None:
        visible = mx.full((L,), keys.shape[1], dtype=mx.int32)
    visible = visible.astype(mx.int32)
    split = isinstance(keys, SplitRows)
    old, recent, base = keys if split else (keys, keys, visible)
    return {
        "inputs": [q, weights, old, recent, base, visible, blank(1, 1, 8) if blocks is None else blocks],
        "template": [
            *[("HEADS", -(-H // 8) * 8), ("D", D), ("ROWS", rows), ("SPLIT", split)],
            *[("BLOCK", 0 if blocks is None else block_size), ("FACTOR_BITS", float_bits(factor))],
        ],
        "grid": (B * -(-L // rows) * -(-width // _COLUMNS) * 256, 1, 1),
        "threadgroup": (256, 1, 1),
        "output_shapes": [(B, L, width)],
        "output_dtypes": [mx.float32],
    }


def index_scores_ref(
    q: mx.array,
    weights: mx.array,
    keys: Rows,
    visible: mx.array | None = None,
    blocks: mx.array | None = None,
    *,
    block_size: int = 0,
    factor: float = 1.0,
    bf16: bool = False,
) -> mx.array:
    B, L, H, D = q.shape
    S = keys.shape[1]
    weights = (weights.astype(mx.float32) * factor).astype(mx.bfloat16)
    if visible is None:
        visible = mx.full((L,), S, dtype=mx.int32)
    visible = mx.minimum(visible, end(keys))
    if blocks is None:
        step = max(1, _TILE_ELEMENTS // max(1, B * L * H))
        tiles = []
        for i in range(0, S, step):
            if tiles:
                keys = after(keys, tiles[-1])  # else MLX may widen the keys of all tiles first
            tiles.append(_scores(q, weights, part(keys, i, i + step)[:, None], bf16))
        scores = mx.concatenate(tiles, axis=-1) if tiles else mx.zeros((B, L, 0), dtype=mx.float32)
        return mx.where(mx.arange(S) < visible[:, None], scores, -mx.inf)
    entry = (blocks[..., None] * block_size + mx.arange(block_size)).reshape(B, L, -1)
    seen = (entry >= 0) & (entry < visible[:, None])
    if not S or not entry.shape[-1]:
        return mx.full(entry.shape, -mx.inf, dtype=mx.float32)
    entry = mx.where(seen, entry, -1)
    step = max(1, _TILE_ELEMENTS // max(1, B * entry.shape[-1] * (H + D)))
    tiles = []
    for i in range(0, L, step):
        rows = slice(i, i + step)
        tiles.append(_scores(q[:, rows], weights[:, rows], gather(keys, entry[:, rows]), bf16))
    return mx.where(seen, mx.concatenate(tiles, axis=1), -mx.inf)


def _scores(q: mx.array, weights: mx.array, keys: mx.array, bf16: bool) -> mx.array:
    """Scores [B, L, n] of keys [B, L, n, D], or [B, 1, n, D] which all rows share."""
    q, keys, weights = q.astype(mx.float32), keys.astype(mx.float32), weights.astype(mx.float32)
    B, L, H, D = q.shape
    if keys.shape[1] == 1:
        dots = (q.reshape(B, L * H, D) @ keys[:, 0].swapaxes(1, 2)).reshape(B, L, H, keys.shape[2])
    else:
        dots = q @ keys.swapaxes(2, 3)
    if not bf16:
        return (weights[..., None] * mx.maximum(dots, 0)).sum(axis=2)
    dots = mx.maximum(dots.astype(mx.bfloat16), 0)
    products = (weights.astype(mx.bfloat16)[..., None] * dots).astype(mx.float32)
    return products.sum(axis=2).astype(mx.bfloat16).astype(mx.float32)


def cases() -> list[Case]:
    def call(q: mx.array, weights: mx.array, *rest: mx.array, op, split: bool, size: int) -> mx.array:
        keys, rest = (SplitRows(*rest[:3]), rest[3:]) if split else (rest[0], rest[1:])
        return op(q, weights, keys, *rest, block_size=size)

    def case(*sizes: int, nb: int = 0, size: int = 0, split: tuple[int, int] = (0, 0), large: bool = False) -> Case:
        """sizes: B, L, H, D and S keys; split: base and number of recent rows, together S."""
        B, L, H, D, S = sizes

        def inputs(rng: np.random.Generator) -> list[mx.array]:
            fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
            signed = np.concatenate([fp4, -fp4])
            scale = np.float32(2.0) ** rng.integers(-4, 1, (B, S, 1)).astype(np.float32)
            q = mx.array(signed[rng.integers(0, 16, (B, L, H, D))]).astype(mx.bfloat16)
            keys = mx.array(signed[rng.integers(0, 16, (B, S, D))] * scale).astype(mx.bfloat16)
            weights = mx.array(rng.standard_normal((B, L, H), dtype=np.float32) / 64).astype(mx.bfloat16)
            # The rows of one step: consecutive bounds that end somewhere in the last 128 keys.
            visible = np.maximum(S - int(rng.integers(0, min(S, 128))) - np.arange(L)[::-1], 0)
            arrays = [q, weights, keys]
            if split[1]:
                base = split[0]
                free = mx.full((B, 70, D), float("nan"), dtype=mx.bfloat16)  # behind the old rows
                old = mx.concatenate([keys[:, :base], free[:, : 1 if base == 0 else 70]], axis=1)
                arrays[2:] = [old, keys[:, base:], mx.array([base], dtype=mx.int32)]
                visible[-1] = 1 << 20  # more than there are
            arrays.append(mx.array(visible.astype(np.int32)))
            if nb:
                blocks = np.sort(rng.permuted(np.tile(np.arange(-(-S // size)), (B * L, 1)), axis=1)[:, :nb], axis=1)
                blocks[-1, nb // 2 :] = -1
                arrays.append(mx.array(blocks.reshape(B, L, nb).astype(np.int32)))
            return arrays

        columns = nb * size if nb else S
        moved = 2 * B * D * (L * columns if nb else S * -(-L // _ROWS)) + B * L * (4 * columns + 2 * H * (D + 1))
        name = f"index_score/{B}x{L}x{H}x{D}_{S}" + f"_blocks{nb}x{size}" * (nb > 0)
        return Case(
            name + f"_split{split[0]}+{split[1]}" * (split[1] > 0),
            functools.partial(call, op=index_scores, split=split[1] > 0, size=size),
            functools.partial(call, op=index_scores_ref, split=split[1] > 0, size=size),
            inputs,
            tolerance=2e-6,
            bytes=moved,
            large=large,
        )

    return [
        case(1, 1, 32, 128, 300),
        case(2, 3, 4, 64, 131),
        case(1, 34, 4, 32, 33),  # more rows than one threadgroup takes, and rows that see nothing
        case(1, 2, 32, 128, 203, nb=20, size=8),
        case(2, 3, 4, 64, 65, nb=5, size=4),
        case(2, 3, 4, 64, 131, split=(99, 32)),
        case(2, 3, 4, 64, 33, split=(0, 33)),  # all of them recent
        case(2, 3, 4, 64, 65, nb=5, size=4, split=(58, 7)),
        case(1, 1, 1, 32, 1),  # fewer than 8 values: Metal puts such inputs into another address space
        *[case(1, rows, 32, 128, S, large=True) for S in (8192, 300_000) for rows in (1, 6)],
        case(1, 1, 32, 128, 1 << 20, large=True),
        *[case(1, rows, 32, 128, 300_000, split=(299_488, 512), large=True) for rows in (1, 6)],
        case(1, 512, 32, 128, 8192, large=True),
        case(1, 2048, 32, 128, 8192, large=True),
        *[case(1, rows, 32, 128, 300_000, nb=2048, size=8, large=True) for rows in (1, 6, 64)],
    ]
