"""Attention: low-rank queries, one shared key = value vector, window plus selected compressed rows."""

from __future__ import annotations

import mlx.core as mx

from mlx_ds4.cache import GrowingRows, LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.cache_entry import cache_entry
from mlx_ds4.custom_kernels.hyper_connection import SiteSums, coefficients, expand
from mlx_ds4.custom_kernels.rope import rope
from mlx_ds4.custom_kernels.sparse_attention import sparse_attention

from .compressor import Compressor
from .indexer import Indexer
from .linear import GroupedLinear, Linear, apply_and_enter, apply_and_expand, apply_together
from .module import Module
from .norm import RMSNorm
from .step import Rotation, Step


class Attention(Module):
    """One attention sublayer (architecture notes 5): x [B, L, C] normed and collapsed, the streams h [B, L, M, C] and
    the sums of its site -> the streams as the result expands them, and the site's `coefficients`."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        c = config
        self._config = config
        self._ratio = c.ratio(layer)
        width = c.num_attention_heads * c.head_dim
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, trained=True)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(c.q_lora_rank, width, trained=True)
        self.wkv = Linear(c.hidden_size, c.head_dim, trained=True)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.wo_a = GroupedLinear(width, c.o_lora_rank, c.o_groups)
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.hidden_size, trained=True)
        self.attn_sink = mx.zeros((c.num_attention_heads,))
        if c.owns_kv(layer):
            self.compressor = Compressor(c, layer)
        if c.owns_index(layer):
            self.indexer = Indexer(c, layer)

    def __call__(
        self, x: mx.array, step: Step, cache: LayerCache, h: mx.array, sums: SiteSums
    ) -> tuple[mx.array, mx.array, mx.array]:
        c = self._config
        B, L, _ = x.shape
        turn = step.rotation(self._ratio)
        compresses = self.compressor.projections if "compressor" in self and not step.published else []
        scores = "indexer" in self and self.indexer.scores_entries(step)
        qr, near, pre, mix, rest = self._enter(
            x, [*([self.indexer.weights_proj] if scores else []), *compresses], turn, step, cache, sums
        )
        weights = rest.pop(0) if scores else None
        q, *index_q = apply_together(qr, self.wq_b, *([self.indexer.wq_b] if scores else []))
        window = step.window_list()
        sources = [(near, mx.broadcast_to(window, (B, *window.shape[1:])))]
        if self._ratio:
            if compresses:
                self._compress(rest, step, cache)
            if "indexer" in self:
                self.indexer(B, step.source.index_keys.split, step, *index_q, weights=weights)
                if step.selection is not None:
                    step.note("topk", step.selection)
            if step.selection is not None:
                sources.append((step.source.compressed.split, step.selection))
        o = sparse_attention(
            q,
            sources,
            self.attn_sink,
            scale=c.head_dim**-0.5,
            turn=turn,
            turn_queries=True,
            tickets=step.tickets() if step.short else None,
        )
        if step.traces:
            slots = mx.array(step.positions % near.shape[1])
            newest = mx.take(near, slots, axis=1) if step.short else near[:, -L:]
            heads = [value.reshape(B, L, -1, c.head_dim) for value in (q, o)]
            for name, value in (("qr", qr), ("q", rope(heads[0], *turn)), ("kv", newest), ("o", heads[1])):
                step.note(f"attn.{name}", value)
            y = self.wo_b(self.wo_a(o))
            step.note("attn.y", y)
            return expand(y, h, mix), pre, mix
        return apply_and_expand(self.wo_a(o), self.wo_b, h, mix), pre, mix

    def publish(self, x: mx.array, step: Step, cache: LayerCache) -> None:
        """Of an owner, only what it adds to the cache: compressed entries and index keys."""
        self._compress(apply_together(x, *self.compressor.projections), step, cache)

    def _enter(
        self, x: mx.array, others: list[Linear], turn: Rotation, step: Step, cache: LayerCache, sums: SiteSums
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, list[mx.array]]:
        """The normed low-rank query, the rows of the window with this step's (the ring, or all that is seen), the
        site's coefficients, and the products of x that others ask for."""
        eps = self._config.rms_norm_eps
        if step.short:
            qr, cache.window, pre, mix, rest = apply_and_enter(
                x, self.wq_a, self.wkv, others, self.q_norm.weight, *turn, "fp8", self.kv_norm.weight, eps, sums,
                into=cache.window, at=step.at(), counts=step.tickets(),
            )  # fmt: skip
            return qr, cache.window, pre, mix, rest
        low_rank, kv, *rest = apply_together(x, self.wq_a, self.wkv, *others)
        rows = cache_entry(kv, *turn, "fp8", weight=self.kv_norm.weight, eps=eps)
        return self.q_norm(low_rank), cache.extend(rows, step.start), *coefficients(sums), rest

    def _compress(self, products: list[mx.array], step: Step, cache: LayerCache) -> None:
        """New entries and index keys of an owner."""
        latent = self.compressor(step, cache, *products)
        step.source = cache
        step.note("latent", latent)
        if latent.shape[1]:
            turn = step.group_rotation(self._ratio)
            keep(cache.index_keys, self.indexer.wk(latent), turn, "fp4", step, self.indexer.k_norm)
            keep(cache.compressed, latent, turn, "fp4_e4m3", step)


def keep(rows: GrowingRows, x: mx.array, turn: Rotation, kind: str, step: Step, norm: RMSNorm | None = None) -> None:
    """Adds the entries of x [B, n, D] to a cache: perhaps normed, rotated, rounded as the cache stores them."""
    options = {} if norm is None else {"weight": norm.weight, "eps": norm.eps}
    if step.short:
        rows.put(cache_entry(x, *turn, kind, into=rows.recent, at=rows.marks[1], **options), x.shape[1])
    else:
        rows.append(cache_entry(x, *turn, kind, **options))
