"""Compressor: tokens to compressed KV entries, one per token (ratio 1) or per pair (ratio 2)."""

from __future__ import annotations

import mlx.core as mx

from mlx_ds4.cache import LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels._rows import ring_ref
from mlx_ds4.custom_kernels.compress import PENDING, compress, pool_pairs

from .linear import Linear
from .module import Module
from .norm import RMSNorm
from .step import Step


class Compressor(Module):
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

    @property
    def projections(self) -> list[Linear]:
        """The layers whose products `__call__` takes."""
        return [self.wkv] if self._ratio == 1 else [self.wkv, self.wgate]

    def __call__(self, step: Step, cache: LayerCache, values: mx.array, gates: mx.array | None = None) -> mx.array:
        """The products [B, L, D] of this step -> bfloat16 [B, completed entries, D]."""
        if self._ratio == 1:
            return self.norm(values)
        entries = step.entries(2)
        if step.short:
            weight, eps = self.norm.weight, self.norm.eps
            latent, cache.pending = compress(values, gates, cache.pending, step.at(), weight, entries=entries, eps=eps)
            return latent
        new = mx.stack([values, gates], axis=1)
        if step.start % 2:
            waiting = cache.pending[:, :, (step.start - 1) % PENDING]
            new = mx.concatenate([waiting[:, :, None], new], axis=2)
        newest = new[:, :, -PENDING:]
        at = mx.array([step.start + step.length - newest.shape[2]], dtype=mx.int32)
        cache.pending = ring_ref(cache.pending, newest, at, axis=2)
        pairs = new[:, :, : 2 * entries]
        return self.norm(pool_pairs(pairs[:, 0], pairs[:, 1]))
