"""Compressor: tokens to compressed KV entries, one per token (ratio 1) or per pair (ratio 2)."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_ds4.cache import LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.compress import pool_pairs

from .linear import Linear
from .norm import RMSNorm
from .step import Step


class Compressor(nn.Module):
    """Latents of the entries that this step completes, before rotation and rounding.

    Pairs are aligned to absolute positions; an open pair waits in the layer's cache (architecture notes 6).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self._ratio = config.ratio(layer)
        out_dtype = mx.bfloat16 if self._ratio == 1 else mx.float32
        self.wkv = Linear(config.hidden_size, config.head_dim, out_dtype=out_dtype)
        if self._ratio == 2:
            self.wgate = Linear(config.hidden_size, config.head_dim, out_dtype=mx.float32)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def __call__(self, x: mx.array, step: Step, cache: LayerCache) -> mx.array:
        """x [B, L, C] -> bfloat16 [B, completed entries, D]."""
        values = self.wkv(x)
        if self._ratio == 1:
            return self.norm(values)
        gates = self.wgate(x)
        if cache.recent is not None:
            values = mx.concatenate([cache.recent[0], values], axis=1)
            gates = mx.concatenate([cache.recent[1], gates], axis=1)
        cache.store_recent(values, gates)
        rows = 2 * (step.end // 2 - step.start // 2)
        first = values.shape[1] - step.length - step.start % 2
        used = slice(first, first + rows)
        return self.norm(pool_pairs(values[:, used], gates[:, used]))
