"""Lightning indexer: which compressed entries each row attends to."""

from __future__ import annotations

import mlx.core as mx

from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels._cuda_cache import settle
from mlx_ds4.custom_kernels._rows import Rows, SplitRows
from mlx_ds4.custom_kernels.cache_entry import cache_entry
from mlx_ds4.custom_kernels.index_topk import index_top_k
from mlx_ds4.custom_kernels.topk import top_k_groups
from mlx_ds4.memory import TILE_SCORES

from .linear import Linear
from .module import Module
from .norm import RMSNorm
from .step import Reach, Step


class Indexer(Module):
    """Index queries and head weights; KV owners also derive the index keys.

    Scores are float32. `bf16_scores = True` reproduces the roundings of the vendor's reference, for comparing
    with it (architecture notes 7.3).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self._config = config
        self._ratio = config.ratio(layer)
        self._publishes = config.publishes_candidates(layer)
        self._restricted = config.uses_candidates(layer)
        self.bf16_scores = False
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * width, trained=True)
        self.weights_proj = Linear(config.hidden_size, heads)
        if config.owns_kv(layer):
            self.wk = Linear(config.head_dim, width)
            self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def scores_entries(self, step: Step) -> bool:
        """Whether this step needs scores, and so queries: not where every entry is listed anyway."""
        return step.reach(self._ratio) > Reach.ALL

    def queries(self, q: mx.array, step: Step) -> mx.array:
        """Index queries bfloat16 [B, L, heads, width] from the product of `wq_b`: rotated and rounded."""
        q = q.reshape(*q.shape[:2], self._config.index_n_heads, self._config.index_head_dim)
        return cache_entry(q, *step.rotation(self._ratio), "fp4")

    def __call__(
        self, batch: int, keys: SplitRows, step: Step, q: mx.array | None = None, weights: mx.array | None = None
    ) -> None:
        """Publishes `step.selection` (and, in the candidate source, `step.candidates`), from the index keys and, where
        `scores_entries`, the products of `wq_b` and `weights_proj`."""
        c = self._config
        reach = step.reach(self._ratio)
        visible = step.visible(self._ratio)
        bounded = reach == Reach.BLOCKS
        if self._publishes and not bounded:
            step.candidates = None  # few enough blocks: every one is a candidate
        if reach <= Reach.ALL:
            most = min(c.index_topk, keys.shape[1])  # as top_k
            step.selection = None if reach == Reach.NONE else _listed(visible, most, batch)
            return
        q = self.queries(q, step)
        candidates = step.candidates if self._restricted else None
        size = c.candidate_block_size
        width = keys.shape[1] if candidates is None else candidates.shape[-1] * size
        tile = max(1, TILE_SCORES // (batch * width))
        selections, blocks = [], []
        for start in range(0, step.length, tile):
            rows = slice(start, start + tile)
            listed = None if candidates is None else candidates[:, rows]
            counts = step.tickets() if step.short else None
            scores, chosen = self.select(q[:, rows], weights[:, rows], keys, visible[rows], listed, counts)
            selections.append(chosen)
            if self._publishes and bounded:
                blocks.append(top_k_groups(scores, visible[rows], c.candidate_topk_blocks, size=size))
            if start + tile < step.length:
                settle()
                mx.eval(selections[-1], blocks[-1:])
        step.selection = _joined(selections)
        if blocks:
            step.candidates = _joined(blocks)

    def select(
        self, q: mx.array, weights: mx.array, keys: Rows, visible: mx.array, candidates: mx.array | None,
        counts: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:  # fmt: skip
        """From queries and raw head weights: scores float32 [B, L, S], -inf where hidden, or [B, L, n] of the entries
        of the candidate blocks only; and the chosen entries. `counts`: `step.tickets()`, of a short step."""
        c = self._config
        return index_top_k(
            q, weights, keys, visible, candidates, k=c.index_topk, block_size=c.candidate_block_size,
            factor=c.index_head_dim**-0.5 * c.index_n_heads**-0.5, bf16=self.bf16_scores, counts=counts,
        )  # fmt: skip


def _listed(visible: mx.array, k: int, batch: int) -> mx.array:
    """The list of every visible entry, of which there are at most k: int32 [B, L, k]."""
    index = mx.arange(k, dtype=mx.int32)
    rows = mx.where(index < visible[:, None], index, -1)
    return mx.broadcast_to(rows, (batch, *rows.shape))


def _joined(tiles: list[mx.array]) -> mx.array:
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=1)
