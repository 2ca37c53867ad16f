"""Exact top-k with one tie rule: higher score first, then the lower index.

Chooses compressed entries, candidate blocks and experts, so that every selection is the same on every device and in
every order of threads (architecture notes 7.4, 7.5, 8.1). NaN and -inf are never chosen, +inf is, 0.0 equals -0.0.

Kernel: exact. A threadgroup keeps up to 16,384 scores in registers as unsigned keys that sort like the scores, finds
the key of the k-th one by three counting passes over its digits (11, 11 and 10 bits), and writes the indices above it,
and as many equal to it as there is room for, in ascending order: positions come from ballots and prefix sums, never
from the order in which threads arrive. A longer row is cut into chunks of that size; the chunks' winners, chunk after
chunk, are again an ascending list, from which the same kernel chooses.

Where a row ends in -inf (its width is a capacity, its live part shorter) those simdgroups stop after reading it.

Launches: 1 up to 16,384 scores; 2 up to 32 chunks of winners of k = 512 (524,288 scores) or 8 of k = 2,048 (131,072);
3 up to 2^20. Bytes: the scores once, 4 k a chunk between launches.
"""

from __future__ import annotations

import functools
from math import prod

import mlx.core as mx
import numpy as np

from . import _topk_metal
from ._case import Case
from ._kernel import Kernel, blank
from ._switches import enabled

MOST = 2048  # the largest k of the kernel: what a chunk keeps must be far below its size
CHUNK = 1 << 14  # scores of a threadgroup
# Simdgroups of a threadgroup and keys of a thread, by the scores that they hold; three instances cover all rows.
_SHAPES = ((1024, 4, 8), (4096, 16, 8), (CHUNK, 16, 32))

_topk_kernel = Kernel(
    "topk",
    ["scores", "listed", "blocks", "visible"],
    ["index"],
    _topk_metal.SOURCE,
    _topk_metal.HEADER,
    cuda_bounds=(512, 1),  # registers for all scores of a thread on their way at once
    exact=True,
    family="topk",
)


def top_k(scores: mx.array, k: int, blocks: mx.array | None = None, *, block_size: int = 0) -> mx.array:
    """Indices of the k best scores, int32 [.., min(k, n)], ascending, padded with -1 at the end.

    scores float32 [.., n]. Entries of -inf or NaN are never chosen; equal scores go to the lower index
    (0.0 and -0.0 are equal). n = 0 gives an empty last axis. With `blocks` int32 [.., nb] (ascending, -1 at the end)
    the scores are those of the entries of these blocks, n = nb * block_size, and the indices are entry numbers:
    blocks[i // block_size] * block_size + i % block_size. Scores in blocks of -1 must be -inf or NaN.

    Raises ValueError for k < 1, or when the blocks do not fit the scores.
    """
    _check(scores, k)
    n = scores.shape[-1]
    if blocks is not None and (block_size < 1 or (*blocks.shape[:-1], blocks.shape[-1] * block_size) != scores.shape):
        raise ValueError(
            f"top_k got blocks {blocks.shape} of {block_size} entries for scores {scores.shape}, expected one score"
            " for each entry of the listed blocks; pass the list that the scores were made with."
        )
    width = min(k, n)
    if scores.size == 0 or width > MOST or scores.dtype != mx.float32 or not enabled("topk"):
        return top_k_ref(scores, k, blocks, block_size=block_size)
    return select(scores, width, n, blocks=blocks, block_size=block_size)


def top_k_groups(scores: mx.array, visible: mx.array, k: int, *, size: int) -> mx.array:
    """Numbers of the k best groups of `size` consecutive scores, int32 [B, L, min(k, groups)], ascending, -1 padded.

    scores float32 [B, L, n]; a group counts by its best score, and the group of entry visible[l] - 1 (int32 [L], at
    most n; below 1: no such group) is always chosen. Groups of only -inf and NaN are not chosen otherwise; ties go to
    the lower group (architecture notes 7.5). Raises ValueError for k or size below 1 or a wrong `visible`.
    """
    _check(scores, k)
    n = scores.shape[-1]
    if size < 1 or scores.ndim != 3 or visible.shape != scores.shape[1:2]:
        raise ValueError(
            f"top_k_groups got scores {scores.shape}, visible {visible.shape} and groups of {size}, expected"
            " [batch, rows, entries], one bound for each row and a size of 1 or more; correct the call."
        )
    width = min(k, -(-n // size))
    if scores.size == 0 or width > MOST or size == 1 or scores.dtype != mx.float32 or not enabled("topk"):
        return top_k_groups_ref(scores, visible, k, size=size)
    return select(scores, width, -(-n // size), visible=visible.astype(mx.int32), group=size)


def _check(scores: mx.array, k: int) -> None:
    if k < 1 or scores.ndim == 0:
        raise ValueError(f"top-k got k = {k} and scores {scores.shape}, expected k >= 1 and rows; correct the call.")


def select(
    scores: mx.array,
    k: int,
    elements: int,
    *,
    blocks: mx.array | None = None,
    block_size: int = 0,
    visible: mx.array | None = None,
    group: int = 1,
    listed: mx.array | None = None,
) -> mx.array:
    """The launches: chunks of the row until one threadgroup holds what is left. `listed`: int32 [rows, elements], the
    elements to choose from, where another launch has chosen them."""
    *leading, n = scores.shape
    rows = prod(leading)
    bits = scores.reshape(rows, n).view(mx.uint32)
    none, no_bounds = blank(1, 8), blank(8)  # where the kernel reads no list or no bounds
    while True:
        chunks = -(-elements // CHUNK)
        simdgroups, per_thread = next(s[1:] for s in _SHAPES if min(elements, CHUNK) <= s[0])
        mapped = blocks is not None and chunks == 1
        listed = _topk_kernel(
            inputs=[
                bits,
                none if listed is None else listed,
                blocks.reshape(rows, -1) if mapped else none,
                no_bounds if visible is None else visible,
            ],
            template=[
                *[("SG", simdgroups), ("V", per_thread), ("K", k), ("GROUP", group)],
                *[("LISTED", listed is not None), ("BLOCK", block_size if mapped else 0)],
            ],
            grid=(rows * chunks * 32 * simdgroups, 1, 1),
            threadgroup=(32 * simdgroups, 1, 1),
            output_shapes=[(*leading, k) if chunks == 1 else (rows, chunks * k)],
            output_dtypes=[mx.int32],
        )[0]
        if chunks == 1:
            return listed
        elements = chunks * k


def top_k_ref(scores: mx.array, k: int, blocks: mx.array | None = None, *, block_size: int = 0) -> mx.array:
    n = scores.shape[-1]
    if n == 0:
        return mx.zeros(scores.shape, dtype=mx.int32)
    chosen = top_k_mask(scores, k)
    index = mx.arange(n, dtype=mx.int32)
    order = mx.sort(mx.where(chosen, index, n), axis=-1)[..., : min(k, n)]
    if blocks is None:
        return mx.where(order == n, -1, order)
    block = mx.take_along_axis(blocks, mx.minimum(order, n - 1) // block_size, axis=-1)
    return mx.where(order == n, -1, block * block_size + order % block_size)


def top_k_mask(scores: mx.array, k: int) -> mx.array:
    """The same selection as a bool mask [.., n]."""
    n = scores.shape[-1]
    scores = mx.where(mx.isnan(scores), -mx.inf, scores)
    if k >= n:
        return scores > -mx.inf
    least = mx.sort(scores, axis=-1)[..., n - k, None]
    above, equal = scores > least, scores == least
    room = k - above.astype(mx.int32).sum(axis=-1, keepdims=True)
    rank = mx.cumsum(equal.astype(mx.int32), axis=-1)
    return (above | (equal & (rank <= room))) & (scores > -mx.inf)


def top_k_groups_ref(scores: mx.array, visible: mx.array, k: int, *, size: int) -> mx.array:
    B, L, n = scores.shape
    scores = mx.where(mx.isnan(scores), -mx.inf, scores)
    scores = mx.pad(scores, [(0, 0), (0, 0), (0, -n % size)], constant_values=-mx.inf)
    best = scores.reshape(B, L, -(-n // size), size).max(axis=-1)
    newest = mx.where(visible > 0, (visible - 1) // size, -1)
    best = mx.where(mx.arange(best.shape[-1]) == newest[:, None], mx.inf, best)
    return top_k_ref(best, k)


def cases() -> list[Case]:
    def scores(rng: np.random.Generator, rows: int, n: int, kind: str) -> mx.array:
        x = rng.standard_normal((rows, n), dtype=np.float32) * 8
        if kind == "plateaus":
            x = np.round(x)
        elif kind == "equal":
            x[:] = 0.0
        elif kind == "capacity":  # live to its middle, then to one good score of a simdgroup's share
            last = n // 3 // 256 * 256
            x[0, n // 2 :], x[1:, last + 1 :], x[1:, last] = -np.inf, -np.inf, 100
        elif kind == "hostile":
            for value, share in ((-np.inf, 0.3), (np.nan, 0.1), (np.inf, 0.01), (0.0, 0.1), (-0.0, 0.1), (1e-44, 0.05)):
                x[rng.random((rows, n)) < share] = value
            x[0] = np.nan if rows > 2 else x[0]
            x[1:2, : n - 3] = -np.inf
        return mx.array(x)

    def case(rows: int, n: int, k: int, kind: str = "normal", large: bool = False) -> Case:
        return Case(
            f"topk/{rows}x{n}_k{k}_{kind}",
            functools.partial(top_k, k=k),
            functools.partial(top_k_ref, k=k),
            lambda rng: [scores(rng, rows, n, kind)],
            bytes=4 * rows * (n + k),
            large=large,
        )

    def mapped(rows: int, nb: int, size: int, k: int, large: bool = False) -> Case:
        def inputs(rng: np.random.Generator) -> list[mx.array]:
            x = rng.standard_normal((1, rows, nb * size), dtype=np.float32)
            blocks = np.sort(rng.permuted(np.tile(np.arange(2 * nb), (rows, 1)), axis=1)[:, :nb], axis=1)
            blocks[-1, nb // 2 :], x[0, -1, nb // 2 * size :] = -1, -np.inf
            return [mx.array(x), mx.array(blocks[None].astype(np.int32))]

        return Case(
            f"topk/blocks_{rows}x{nb}x{size}_k{k}",
            lambda x, blocks: top_k(x, k, blocks, block_size=size),
            lambda x, blocks: top_k_ref(x, k, blocks, block_size=size),
            inputs,
            bytes=4 * rows * (nb * size + nb + k),
            large=large,
        )

    def groups(rows: int, n: int, size: int, k: int, large: bool = False) -> Case:
        def inputs(rng: np.random.Generator) -> list[mx.array]:
            visible = rng.integers(n - n // 4, n + 1, rows).astype(np.int32)
            visible[1:2] = 0
            x = np.array(scores(rng, rows, n, "normal"))
            x[np.arange(n) >= visible[:, None]] = -np.inf
            return [mx.array(x[None]), mx.array(visible)]

        return Case(
            f"topk/groups_{rows}x{n}x{size}_k{k}",
            functools.partial(top_k_groups, k=k, size=size),
            functools.partial(top_k_groups_ref, k=k, size=size),
            inputs,
            bytes=4 * rows * (n + k),
            large=large,
        )

    return [
        *[case(2, n, 20, "plateaus") for n in (31, 32, 33, 511, 512, 513)],
        case(1, 4096, 20, "equal"),
        case(3, 1300, 20, "hostile"),
        case(2, 17000, 20, "plateaus"),  # two chunks
        case(3, 2500, 20, "capacity"),
        case(1, 1, 1),  # fewer than 8 values: Metal puts such inputs into another address space
        mapped(3, 40, 8, 20),
        groups(3, 301, 4, 20),
        *[case(1, n, 512, large=True) for n in (8192, 65536, 300_000, 1 << 20)],
        case(1, 1 << 20, 2048, "plateaus", large=True),
        case(1, 16_384, 512, "capacity", large=True),
        case(1, 16_896, 512, "capacity", large=True),
        case(1, 300_000, 512, "equal", large=True),
        case(6, 300_000, 512, large=True),
        case(512, 65536, 512, large=True),
        mapped(1, 2048, 8, 512, large=True),
        groups(1, 300_000, 8, 2048, large=True),
        groups(6, 1 << 20, 8, 2048, large=True),
    ]
