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
staged. How many heads share a gather follows from the number of rows and changes no bit. CUDA has bodies of its own
(`_sparse_attention_cuda.py`, and for a few rows `_sparse_attention_few_cuda.py`).

The last source's rows may lie in two parts (`SplitRows`), and the rotation of the queries be done where they are read:
both give the bits of one array and of `rope` before the call (in emulation; a GPU may fuse products and sums).

One launch. Bytes: H / (heads of a threadgroup) times 2 D a listed row, mostly from cache; the queries and the result
once. Work: 4 D operations for a listed row and head.
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from . import _sparse_attention_cuda, _sparse_attention_few_cuda, _sparse_attention_metal, _tiles_cuda
from ._case import Case
from ._kernel import Kernel, float_bits, tickets
from ._rows import Rows, SplitRows, gather, rows_fault, valid
from ._switches import backend, enabled
from .rope import rope, rope_frequencies, rope_ref, rope_table

_BLOCK = 64
_FLOOR = -1e30
# Query rows that the reference handles at a time: bounds the gathered rows, whatever the length of the prompt.
_ROWS = 64
# Heads of a threadgroup, and the threadgroups that fill a GPU: below these a group takes fewer heads, though more
# groups then read the same rows. CUDA's products take 16 heads whether they are there or not.
_HEADS, _GROUPS = (4, 2, 1), 192
_CUDA_HEADS, _CUDA_GROUPS = (16, 8, 4, 2, 1), 32
_TURNED = 64  # pairs of a query that the kernel rotates at most: CUDA's body keeps them in shared memory
_WIDTHS = (64, 128, 256, 512)  # what a simdgroup holds in whole words of each lane

_INPUTS = ["q", "near", "near_list", "far", "far_list", "recent", "base", "sinks", "cosine", "sine"]
_sparse_attention_kernel = Kernel(
    "sparse_attention",
    _INPUTS,
    ["o"],
    _sparse_attention_metal.SOURCE,
    cuda_source=_sparse_attention_cuda.SOURCE,
    cuda_header=_tiles_cuda.HEADER,
    exact=False,
    family="sparse_attention",
)
_few_kernel = Kernel(
    "sparse_attention_few",
    [*_INPUTS, "tickets"],
    ["o", "scores"],
    None,
    cuda_source=_sparse_attention_few_cuda.SOURCE,
    cuda_header=_tiles_cuda.HEADER,
    cuda_bounds=(256, 2),
    shared_memory=_sparse_attention_few_cuda.BYTES,
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
    tickets: mx.array | None = None,
) -> mx.array:
    """q [B, L, H, D] or [B, L, H * D]; sources: one or two pairs of rows [B, S, D] and list int32 [B, L, P], taken one
    after the other in one softmax (window first, then compressed rows); sinks float32 [H]. Returns bfloat16 of q's
    shape. The rows of the last source may be SplitRows, with the bits of one array that holds the same entries.

    With `turn`, cos and sin float32 [L, pairs], the last 2 * pairs channels of the result are rotated back, after
    its rounding; with `turn_queries` too, those of q are rotated forward first, as `rope(q, *turn)` does. List entries
    that name no row count as nothing.

    `tickets`: int32 zeros, `ticket_count(B * L, H)` of them or more, which no call has that may run at the same time;
    they are zeros again afterwards. Without them CUDA takes the body for many rows, with the same bits.

    Raises ValueError when the shapes do not fit each other.
    """
    B, L, H, D = _check(q, sources, sinks, turn)
    if tickets is not None and (tickets.dtype != mx.int32 or tickets.size < ticket_count(B * L, H)):
        raise ValueError(
            f"sparse_attention got tickets {tickets.dtype} {tickets.shape}, expected int32 and"
            f" {ticket_count(B * L, H)} or more; make as many zeros as ticket_count says."
        )
    if turn_queries and turn is None:
        raise ValueError("sparse_attention got turn_queries without turn, expected its tables; pass them.")
    rows = [x for x, _ in sources]
    fits = D in _WIDTHS and all(x.dtype == mx.bfloat16 and x.size for x in [q, *rows])
    if not fits or not all(index.size for _, index in sources) or not enabled("sparse_attention"):
        return sparse_attention_ref(q, sources, sinks, scale=scale, turn=turn, turn_queries=turn_queries)
    if turn_queries and turn[0].shape[-1] > _TURNED:
        q, turn_queries = rope(q.reshape(B, L, H, D), *turn).reshape(q.shape), False
    sinks = sinks.astype(mx.float32)
    cos, sin = turn or (sinks, sinks)
    last, index = sources[-1]
    split = isinstance(last, SplitRows)
    far, recent, base = last if split else (last, last, index)
    near = sources[0] if len(sources) == 2 else (far, index)
    arrays = [q, *near, far, index, recent, base, sinks, cos, sin]
    template = [
        *[("PAIRS", D // 64), ("TWO", len(sources) == 2), ("SPLIT", split)],
        *[("TURN", cos.shape[-1] if turn else 0), ("TURN_QUERIES", turn_queries)],
        ("SCALE_BITS", float_bits(scale)),
    ]
    few = backend() == "cuda" and tickets is not None and B * L <= _sparse_attention_few_cuda.MOST
    if few and _few_kernel.has_room:
        return _attend_few(arrays, template, sum(index.shape[2] for _, index in sources), tickets)
    heads = _heads_of_group(B * L, H)
    return _sparse_attention_kernel(
        inputs=arrays,
        template=[("HG", heads), *template],
        grid=(B * L * (H // heads) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def ticket_count(rows: int, heads: int) -> int:
    """How many tickets a call of `rows` = B L query rows takes at most, where they are few."""
    return _sparse_attention_few_cuda.ticket_count(rows, heads)


def _attend_few(arrays: list[mx.array], template: list[tuple], entries: int, tickets: mx.array) -> mx.array:
    """A few query rows, whose lists have `entries` entries."""
    q, sinks = arrays[0], arrays[_INPUTS.index("sinks")]
    rows, heads = q.shape[0] * q.shape[1], sinks.shape[0]
    tiles, slices = _sparse_attention_few_cuda.split(rows, heads, dict(template)["PAIRS"] * 64)
    tile = _sparse_attention_few_cuda.HEADS * tiles
    blocks, shares = -(-entries // _BLOCK), -(-heads // tile) * slices
    return _few_kernel(
        inputs=[*arrays, tickets],
        template=[("MT", tiles), ("SLICES", slices), *template],
        grid=(blocks * 256, shares, rows),
        threadgroup=(256, 1, 1),
        output_shapes=[q.shape, (rows * shares * blocks, tile * (_BLOCK + 1))],  # scores and the maximum of each head,
        output_dtypes=[mx.bfloat16, mx.float32],
    )[0]


def _check(q: mx.array, sources: Sources, sinks: mx.array, turn: Turn | None) -> tuple[int, int, int, int]:
    """B, L, H, D of a call whose shapes fit."""
    for rows, _ in sources:
        if isinstance(rows, SplitRows) and (fault := rows_fault(rows)):
            raise ValueError(f"sparse_attention {fault}; pass the parts of one cache.")
    if any(isinstance(rows, SplitRows) for rows, _ in sources[:-1]):
        raise ValueError("sparse_attention got SplitRows in its first source, expected them in the last; swap the two.")
    B, L, *heads = q.shape
    H = sinks.shape[0] if sinks.ndim == 1 else 0
    D = sources[0][0].shape[-1] if sources else 0
    shapes = [(x.shape, index.shape) for x, index in sources]
    fit = all(len(x) == len(index) == 3 and (x[0], x[2]) == (B, D) and index[:2] == (B, L) for x, index in shapes)
    if len(sources) not in (1, 2) or not fit or heads not in ([H, D], [H * D]) or H == 0:
        raise ValueError(
            f"sparse_attention got q {q.shape}, sources {shapes} and sinks {sinks.shape}, expected [B, L, H, D] or"
            " [B, L, H * D], one or two pairs of rows [B, S, D] and list [B, L, P], and [H]; pass the tensors of one"
            " layer."
        )
    pairs = turn[0].shape[-1] if turn else 0
    if turn and not (turn[0].shape == turn[1].shape == (L, pairs) and 2 * pairs <= D):
        raise ValueError(
            f"sparse_attention got cos {turn[0].shape} and sin {turn[1].shape}, expected [{L}, pairs] with at most"
            f" {D // 2} pairs; make the table from the positions of this step."
        )
    return B, L, H, D


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
    if q.ndim == 3:
        apart = q.reshape(*q.shape[:2], sinks.shape[0], -1)
        options = {"scale": scale, "turn": turn, "turn_queries": turn_queries}
        return sparse_attention_ref(apart, sources, sinks, **options).reshape(q.shape)
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


def _gathered(sources: Sources) -> tuple[mx.array, mx.array]:
    """The listed rows [B, L, P, D], and which entries name one [B, L, 1, P]."""
    keys = mx.concatenate([gather(rows, index) for rows, index in sources], axis=2)
    return keys, mx.concatenate([valid(rows, index) for rows, index in sources], axis=2)[:, :, None]


def _attend(q: mx.array, sources: Sources, sinks: mx.array, scale: float) -> mx.array:
    B, L, H, D = q.shape
    keys, listed = _gathered(sources)
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


def _moved(
    q: mx.array,
    sources: Sources,
    sinks: mx.array,
    *,
    scale: float,
    turn: Turn | None,
    turn_queries: bool,
    want: mx.array,
) -> mx.array:
    """How far roundings before the last can move the result `want`, float32 [B, L, H, D].

    A probability that rounds the other way moves by one unit of bfloat16, at most 2^-7 of itself, and channel c of the
    result by at most 2^-7 share_i |k_ic|, where share = probability / denominator. Of 640 about one in some thousand
    does, so the bound is two units of the entry that counts most:

        2 * 2^-7 max_i share_i |k_ic| <= 2^-6 (sum_i (share_i |k_ic|)^8)^(1/8),

    the right side being a product of matrices and little more than the left. A rotation mixes the channels of a pair:
    its bound is the length of the bounds of both, and of a unit of each for the rounding before it.
    """
    if turn_queries:
        q = rope_ref(q, *turn)
    parts = []
    for start in range(0, q.shape[1], _ROWS):
        rows = slice(start, start + _ROWS)
        keys, listed = _gathered([(x, index[:, rows]) for x, index in sources])
        keys = keys.astype(mx.float32)
        scores = mx.where(listed, (q[:, rows].astype(mx.float32) @ keys.swapaxes(2, 3)) * scale, -mx.inf)
        peak = mx.maximum(scores.max(axis=-1, keepdims=True), _FLOOR)
        p = mx.exp(scores - peak)  # the largest is 1
        total = p.sum(axis=-1, keepdims=True) + mx.exp(sinks[:, None] - peak)
        parts.append(2.0**-6 * (_power8(p) @ _power8(keys)) ** 0.125 / total)
        mx.eval(parts)
    moved = mx.concatenate(parts, axis=1)
    if turn is None:
        return moved
    first = q.shape[-1] - 2 * turn[0].shape[-1]
    pairs = [_lengths(x[..., first:].astype(mx.float32)) for x in (moved, want)]
    return mx.concatenate([moved[..., :first], pairs[0] + 2.0**-7 * pairs[1]], axis=-1)


def _power8(x: mx.array) -> mx.array:
    x = x * x
    x = x * x
    return x * x


def _lengths(x: mx.array) -> mx.array:
    """The length of each pair of neighbouring channels, in both of them."""
    squares = (x * x).reshape(*x.shape[:-1], -1, 2)
    return mx.repeat(mx.sqrt(squares.sum(axis=-1)), 2, axis=-1)


def cases() -> list[Case]:
    from ._needle import needle  # which needs this module

    def bf16(rng: np.random.Generator, *shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)

    def call(
        q: mx.array, sinks: mx.array, *rest: mx.array, op, scale: float, turned: bool, split: bool, queries: bool
    ) -> mx.array:
        turn, rest = (rest[:2], rest[2:]) if turned else (None, rest)
        if split:
            rest = [*rest[:-4], SplitRows(*rest[-3:]), rest[-4]]
        sources = list(zip(rest[::2], rest[1::2], strict=True))
        counts = {"tickets": tickets()} if op is sparse_attention else {}
        return op(q, sources, sinks, scale=scale, turn=turn, turn_queries=queries, **counts)

    def case(
        B: int,
        L: int,
        H: int,
        D: int,
        sizes: list[tuple[int, int]],
        pairs: int = 0,
        *,
        split: tuple[int, int] = (0, 0),
        queries: bool = False,
        large: bool = False,
    ) -> Case:
        """sizes: rows and list entries of each source; split: base and number of recent rows of the last."""

        def inputs(rng: np.random.Generator) -> list[mx.array]:
            arrays = [bf16(rng, B, L, H, D)]
            arrays.append(mx.array(rng.standard_normal(H, dtype=np.float32) * 2))
            if pairs:
                arrays += rope_table(rng.integers(0, 1_048_576, L), rope_frequencies(2 * pairs, 10000.0))
            for i, (S, P) in enumerate(sizes):
                split_here = split[1] > 0 and i == len(sizes) - 1
                index = np.sort(rng.integers(0, sum(split) if split_here else S, (B, L, P)), axis=-1)
                index[:, :, P - P // 5 :] = -1  # the tail of a list that is not full
                if B * L > 1:
                    index[0, 0] = -1
                arrays += [bf16(rng, B, S, D), mx.array(index.astype(np.int32))]
                if split_here:
                    rows = arrays.pop(-2)
                    rows[:, split[0] :] = float("nan")  # the free end of the old rows
                    arrays += [rows, bf16(rng, B, split[1], D), mx.array([split[0]], dtype=mx.int32)]
            return arrays

        def moved(want: list[mx.array], *arrays: mx.array) -> list[mx.array]:
            return [call(*arrays, op=functools.partial(_moved, want=want[0]), **options)]

        listed = sum(P for _, P in sizes)
        options = {"scale": D**-0.5, "turned": pairs > 0, "split": split[1] > 0, "queries": queries}
        name = f"{B}x{L}x{H}x{D}_{'_'.join(f'{P}of{S}' for S, P in sizes)}"
        name += "_turn" * (pairs > 0) + "_queries" * queries + f"_split{split[0]}+{split[1]}" * (split[1] > 0)
        return Case(
            f"sparse_attention/{name}",
            functools.partial(call, op=sparse_attention, **options),
            functools.partial(call, op=sparse_attention_ref, **options),
            inputs,
            tolerance=1e-5,
            bytes=2 * B * L * D * (2 * H + listed),
            large=large,
            moved=moved if large else None,  # in small ones no value stands at a boundary
        )

    real = [(135, 128), (150_000, 512)]
    return [
        case(1, 2, 8, 64, [(40, 16), (70, 130)], 8),
        case(2, 3, 3, 128, [(20, 65)]),
        case(1, 1, 4, 512, [(30, 20), (90, 60)], 32),
        case(1, 96, 4, 64, [(9, 5), (30, 70)], 9, split=(23, 17), queries=True),  # two heads a threadgroup
        case(2, 3, 3, 128, [(20, 65)], split=(0, 12)),  # one source, all of it recent
        case(1, 1, 2, 64, [(5, 9), (1, 70)], 32, split=(1, 3), queries=True),  # old rows in use to their end
        case(1, 1, 4, 512, [(30, 20), (90, 60)], 32, split=(70, 40), queries=True),
        case(1, 50, 4, 256, [(9, 5), (9, 3)]),
        case(1, 1, 1, 64, [(1, 1)]),  # fewer than 8 values: Metal puts such inputs into another address space
        *[case(1, rows, 64, 512, real, 32, large=True) for rows in (1, 2, 6, 8, 64, 2048)],
        case(1, 1, 64, 512, [(135, 128)], 32, large=True),
        *[case(1, n, 64, 512, real, 32, split=(149_800, 512), queries=True, large=True) for n in (1, 6)],
        *[needle(L, S) for L in (1, 64) for S in (1000, 20_000, 200_000)],
    ]
