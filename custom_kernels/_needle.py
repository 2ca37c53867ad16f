"""A needle: one key among many answers the query, and only right scores, candidates, top-k and attention find it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ._case import Case
from .index_score import index_scores
from .sparse_attention import sparse_attention, sparse_attention_ref
from .topk import top_k, top_k_groups

_HEADS, _WIDTH, _ROW = 4, 64, 512
_BLOCK, _CANDIDATES = 8, 512
_SCALE = 16.0  # makes the attention of a row on itself outweigh hundreds of others


def needle(L: int, S: int, chosen: int = 512, *, large: bool = True) -> Case:
    """L rows at the end of S entries. The case's results: whether each row's needle is among its `chosen` entries,
    and the attention on these of the query that the needle's own row answers."""

    def inputs(rng: np.random.Generator) -> list[mx.array]:
        query, keys = rng.standard_normal((L, _HEADS, _WIDTH)), rng.standard_normal((S, _WIDTH)) / 8
        places = rng.choice(S - L, L, replace=False)
        keys[places] = query.sum(axis=1) / 4
        rows = rng.standard_normal((S, _ROW)) / 16
        bf16 = [mx.array(x.astype(np.float32)[None]).astype(mx.bfloat16) for x in (query, keys, rows)]
        visible = S - L + 1 + np.arange(L)
        return [*bf16, mx.array(visible.astype(np.int32)), mx.array(places.astype(np.int32))]

    def find(query: mx.array, keys: mx.array, rows: mx.array, visible: mx.array, places: mx.array) -> list[mx.array]:
        weights = mx.ones(query.shape[:3], dtype=mx.bfloat16)
        scores = index_scores(query, weights, keys, visible)
        blocks = top_k_groups(scores, visible, _CANDIDATES, size=_BLOCK)
        compact = index_scores(query, weights, keys, visible, blocks, block_size=_BLOCK)
        found = top_k(compact, chosen, blocks, block_size=_BLOCK)
        o = sparse_attention(_asks_for(rows, places), [(rows, found)], _no_sink(), scale=1.0)
        return [(found == places[:, None]).any(axis=-1), o]

    def answer(query: mx.array, keys: mx.array, rows: mx.array, visible: mx.array, places: mx.array) -> list[mx.array]:
        o = sparse_attention_ref(_asks_for(rows, places), [(rows, places[None, :, None])], _no_sink(), scale=1.0)
        return [mx.ones((1, L), dtype=mx.bool_), o]

    return Case(f"sparse_attention/needle_{L}x{S}", find, answer, inputs, tolerance=1e-3, large=large)


def _asks_for(rows: mx.array, places: mx.array) -> mx.array:
    own = rows[:, places][:, :, None]
    return mx.broadcast_to(_SCALE * own, (1, places.size, _HEADS, _ROW))


def _no_sink() -> mx.array:
    return mx.full((_HEADS,), -100.0)
