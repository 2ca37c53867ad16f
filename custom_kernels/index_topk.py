"""Index scores, and the k best of each row: what an index layer attends to.

    scores = index_scores(..), and of each row top_k(..) (`index_score.py`, `topk.py`)

On CUDA up to 8 rows take one launch, with the scores' bits of `index_scores` and so the indices of `top_k`; rows beyond
16,384 scores one launch more than that, which chooses from the winners of chunks. Elsewhere, and for several rows that
long, there are two or more, one after the other. A row's result does not depend on the rows beside it.

Several rows read a key once each in one launch, from the second-level cache, and once together in two: 6 rows of 16,384
keys are 25 MB for 4, 3 us more at 5 TB/s for a launch and its gap, a slower choice, and 14 us of host time less. At
150,000 keys it would be 40 us more. Bytes: visible keys once, 4 a score, 4 k a row.
"""

from __future__ import annotations

import functools
from math import prod

import mlx.core as mx
import numpy as np

from . import _index_topk_cuda
from ._case import Case
from ._kernel import Kernel, tickets
from ._rows import Rows, SplitRows
from ._switches import backend, enabled
from .index_score import check_scores, index_scores, index_scores_ref, score_call, takes
from .topk import CHUNK, MOST, select, top_k, top_k_ref

MOST_ROWS = 8

_kernel = Kernel(
    "index_topk",
    ["q", "weights", "keys", "recent", "base", "visible", "blocks", "tickets"],
    ["scores", "index"],
    None,
    cuda_source=_index_topk_cuda.SOURCE,
    cuda_header=_index_topk_cuda.HEADER,
    shared_memory=_index_topk_cuda.BYTES,
    cuda_bounds=(256, 2),
    exact=False,
    family="index_topk",
)


def index_top_k(
    q: mx.array,
    weights: mx.array,
    keys: Rows,
    visible: mx.array | None = None,
    blocks: mx.array | None = None,
    *,
    k: int,
    block_size: int = 0,
    factor: float = 1.0,
    bf16: bool = False,
    counts: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The scores as `index_scores` returns them, and `top_k` of them: int32 [B, L, min(k, scores of a row)].

    `counts`: int32 zeros, `_kernel.tickets()`, that no launch uses which may run at the same time; zeros again behind
    this one; without them there are two launches or more. Raises ValueError where those functions do.
    """
    check_scores(q, weights, keys, visible, blocks, block_size)
    rows = prod(q.shape[:2])
    width = keys.shape[1] if blocks is None else blocks.shape[-1] * block_size
    chunks = -(-width // CHUNK)
    launches = counts is not None and 0 < k <= MOST and rows <= MOST_ROWS and min(rows, chunks) <= 1
    launches = launches and not bf16 and takes(q, keys, blocks, block_size) and chunks <= counts.size
    if not launches or not _kernel.has_room or not _is_enabled():
        scores = index_scores(q, weights, keys, visible, blocks, block_size=block_size, factor=factor, bf16=bf16)
        return scores, top_k(scores, k, blocks, block_size=block_size)
    call = score_call(q, weights, keys, visible, blocks, block_size, factor, 1)
    k = min(k, width)
    call["inputs"] += [counts]
    call["template"] += [("CHUNK", CHUNK), ("K", k)]
    call["output_shapes"] += [(*q.shape[:2], k) if chunks == 1 else (rows, chunks * k)]
    call["output_dtypes"] += [mx.int32]
    scores, chosen = _kernel(**call)
    if chunks > 1:
        chosen = select(scores, k, chunks * k, blocks=blocks, block_size=block_size, listed=chosen)
    return scores, chosen


def _is_enabled() -> bool:
    return backend() == "cuda" and all(map(enabled, ("index_topk", "index_score", "topk")))


def index_top_k_ref(
    q, weights, keys: Rows, visible=None, blocks=None, *, k: int, block_size: int = 0, factor: float = 1.0, bf16=False
) -> tuple[mx.array, mx.array]:
    scores = index_scores_ref(q, weights, keys, visible, blocks, block_size=block_size, factor=factor, bf16=bf16)
    return scores, top_k_ref(scores, k, blocks, block_size=block_size)


def cases() -> list[Case]:
    def run(op, q: mx.array, weights: mx.array, *rest: mx.array, k: int, split: bool, size: int) -> list[mx.array]:
        keys, rest = (SplitRows(*rest[:3]), rest[3:]) if split else (rest[0], rest[1:])
        options = {"counts": tickets()} if op is index_top_k else {}
        scores, index = op(q, weights, keys, *rest, k=k, block_size=size, factor=0.125, **options)
        return [index, scores]

    def case(
        *sizes: int, k: int, nb: int = 0, size: int = 0, base: int = 0, kind: str = "normal", large: bool = False
    ) -> Case:
        """sizes: B, L, H, D and S keys, those from base on apart where it is given. All values are small multiples of
        powers of two, so that scores are the same in every order of sums and selections must be equal."""
        B, L, H, D, S = sizes

        def inputs(rng: np.random.Generator) -> list[mx.array]:
            fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
            signed = np.concatenate([fp4, -fp4])
            scale = np.float32(2.0) ** rng.integers(-3, 1, (B, S, 1)).astype(np.float32)
            keys = signed[rng.integers(0, 16, (B, S, D))] * scale
            if kind == "plateaus":  # few different keys, and many of the best one
                keys = keys[:, np.sort(rng.integers(0, min(S, 9), S))]
            elif kind == "equal":
                keys[:] = keys[:, :1]
            elif kind == "hostile":  # scores of NaN and of both infinities
                keys[:, rng.random(S) < 0.1, 0] = np.nan
                keys[:, rng.random(S) < 0.1, 1] = np.inf
            q = signed[rng.integers(0, 16, (B, L, H, D))]
            weights = rng.integers(-8, 9, (B, L, H)).astype(np.float32)
            visible = np.maximum(S - int(rng.integers(0, min(S, 128))) - np.arange(L)[::-1], 0)
            if kind == "capacity":  # the first row sees nothing, the others a third at most
                visible = S // 3 * np.arange(L) // max(L - 1, 1)
            arrays = [mx.array(x).astype(mx.bfloat16) for x in (q, weights, keys)]
            if base:
                old, recent = arrays[2][:, :base], arrays[2][:, base:]
                free = mx.full((B, 70, D), float("nan"), dtype=mx.bfloat16)
                arrays[2:] = [mx.concatenate([old, free], axis=1), recent, mx.array([base], dtype=mx.int32)]
                visible[-1] = 1 << 20
            arrays.append(mx.array(visible.astype(np.int32)))
            if nb:
                order = rng.permuted(np.tile(np.arange(-(-S // size)), (B * L, 1)), axis=1)
                blocks = np.sort(order[:, :nb], axis=1)
                blocks[-1, nb // 2 :] = -1
                arrays.append(mx.array(blocks.reshape(B, L, nb).astype(np.int32)))
            return arrays

        columns = nb * size if nb else S
        options = {"k": k, "split": base > 0, "size": size}
        name = f"index_topk/{B}x{L}x{H}x{D}_{S}_k{k}_{kind}" + f"_blocks{nb}x{size}" * (nb > 0)
        return Case(
            name + f"_split{base}" * (base > 0),
            functools.partial(run, index_top_k, **options),
            functools.partial(run, index_top_k_ref, **options),
            inputs,
            tolerance=0.0,
            bytes=2 * B * D * (L * columns if nb else S) + B * L * (4 * columns + 2 * H * (D + 1) + 4 * k),
            large=large,
        )

    real = (32, 128)
    return [
        case(1, 1, *real, 300, k=20),
        case(2, 3, 4, 64, 131, k=20, kind="plateaus"),
        case(1, 2, *real, 203, k=20, nb=20, size=8),
        case(2, 3, 4, 64, 131, k=20, base=99),
        case(1, 4, 4, 32, 520, k=300, kind="capacity"),
        case(1, 2, 4, 32, 300, k=20, kind="hostile"),
        case(1, 1, 1, 32, 1, k=1),  # fewer than 8 values
        *[case(1, rows, *real, S, k=512, large=True) for S in (4096, 16_384, 75_000, 300_000) for rows in (1, 6)],
        case(1, 1, *real, 1 << 20, k=512, large=True),
        *[case(1, 1, *real, 16_384, k=512, kind=kind, large=True) for kind in ("plateaus", "equal", "hostile")],
        *[case(1, rows, *real, 16_384, k=512, kind="capacity", large=True) for rows in (1, 6)],
        *[case(1, rows, *real, S, k=512, base=S - 512, large=True) for S in (16_314, 300_000) for rows in (1, 6)],
        *[case(1, rows, *real, 300_000, k=512, nb=2048, size=8, base=299_488, large=True) for rows in (1, 6, 8)],
    ]
