"""Attention: low-rank queries, one shared key = value vector, window plus selected compressed rows."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_ds4.cache import LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.cache_entry import cache_entry
from mlx_ds4.custom_kernels.rope import rope
from mlx_ds4.custom_kernels.sparse_attention import sparse_attention

from .compressor import Compressor
from .indexer import Indexer
from .linear import GroupedLinear, Linear, apply_together
from .norm import RMSNorm
from .step import Step


class Attention(nn.Module):
    """One attention sublayer; x [B, L, C] normed and collapsed -> bfloat16 [B, L, C] (architecture notes 5)."""

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

    def __call__(self, x: mx.array, step: Step, cache: LayerCache) -> mx.array:
        c = self._config
        B, L, _ = x.shape
        turn = step.rotation(self._ratio)
        low_rank, kv = apply_together(x, self.wq_a, self.wkv)
        qr = self.q_norm(low_rank)
        q = rope(self.wq_b(qr).reshape(B, L, c.num_attention_heads, c.head_dim), *turn)
        kv = cache_entry(kv, *turn, "fp8", weight=self.kv_norm.weight, eps=c.rms_norm_eps)
        near = kv if cache.window is None else mx.concatenate([cache.window, kv], axis=1)
        window = step.window_list(near.shape[1] - L)
        sources = [(near, mx.broadcast_to(window, (B, *window.shape)))]
        cache.store_window(near)
        if self._ratio:
            self._update_compressed(x, qr, step, cache)
            if step.selection.shape[-1]:
                sources.append((step.source.compressed.data, step.selection))
        o = sparse_attention(q, sources, self.attn_sink, scale=c.head_dim**-0.5, turn=turn)
        y = self.wo_b(self.wo_a(o.reshape(B, L, -1)))
        for name, value in (("attn.qr", qr), ("attn.q", q), ("attn.kv", kv), ("attn.o", o), ("attn.y", y)):
            step.note(name, value)
        return y

    def _update_compressed(self, x: mx.array, qr: mx.array, step: Step, cache: LayerCache) -> None:
        """New entries and index keys of an owner, then the selection of an index source."""
        if "compressor" in self:
            latent = self.compressor(x, step, cache)
            step.source = cache
            step.note("latent", latent)
            if latent.shape[1]:
                cache.index_keys.append(self.indexer.keys(latent, step))
                cache.compressed.append(cache_entry(latent, *step.group_rotation(self._ratio), "fp4_e4m3"))
        if "indexer" in self:
            if step.end // self._ratio == 0:  # nothing is complete yet
                step.selection = mx.zeros((x.shape[0], step.length, 0), dtype=mx.int32)
                step.candidates = None
                return
            self.indexer(x, qr, step.source.index_keys, step)
            step.note("topk", step.selection)
