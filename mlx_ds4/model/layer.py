"""One block: Engram, attention site, feed-forward site, joined by hyper-connections."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from mlx_ds4.cache import LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.hyper_connection import SiteSums, collapse, collapse_norm, site, unmix

from .attention import Attention
from .engram import Engram
from .module import Module
from .moe import MoE
from .norm import RMSNorm
from .step import Step


class Layer(Module):
    """Streams h [B, L, M, C] and the carried coefficients `pre` [B, L, M] -> the same, one block later.

    A site's `pre` collapses the streams for the NEXT site; `post` and `comb` expand its own (architecture notes 4.4).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        c = config
        self._config = config
        self.tapped = layer in c.dspark_target_layer_ids
        streams = c.hc_mult
        for name in ("attn", "ffn"):
            self[f"hc_{name}_fn"] = mx.zeros((streams * (streams + 2), streams * c.hidden_size))
            self[f"hc_{name}_base"] = mx.zeros((streams * (streams + 2),))
            self[f"hc_{name}_scale"] = mx.zeros((3,))
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, layer)
        self.ffn = MoE(c)
        if layer in c.engram_layer_ids:
            self.engram = Engram(c)

    def __call__(
        self, h: mx.array, pre: mx.array, step: Step, cache: LayerCache, records: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        if records is not None:
            h = self.engram(h, records, step)
        if self.tapped:
            step.taps.append(collapse(h, _even(*h.shape[:-1])))
        step.note("h_in", h)
        x, sums = self._site("attn", h, pre, step)
        h, pre, mix = self.attn(x, step, cache, h, sums)
        self._note("attn", pre, mix, step)
        step.note("h_mid", h)
        x, sums = self._site("ffn", h, pre, step)
        h, pre, mix = self.ffn(x, step, h, sums)
        self._note("ffn", pre, mix, step)
        step.note("h_out", h)
        return h, pre

    def publish(
        self, h: mx.array, pre: mx.array, step: Step, cache: LayerCache, records: mx.array | None = None
    ) -> None:
        """Of a KV owner, only what other positions and layers read of it: compressed entries and index keys. They need
        the attention's input, and no mix (architecture notes 10.3)."""
        if records is not None:
            h = self.engram(h, records, step)
        self.attn.publish(collapse_norm(h, pre, self.attn_norm.weight, self._config.rms_norm_eps), step, cache)

    def _site(self, name: str, h: mx.array, pre: mx.array, step: Step) -> tuple[mx.array, SiteSums]:
        """The sublayer's input, and what it makes the site's coefficients of: those that collapse the streams behind
        it, and those that expand its result."""
        c = self._config
        x, dots = site(h, pre, self[f"hc_{name}_fn"], self[f"{name}_norm"].weight, norm_eps=c.rms_norm_eps)
        step.note(f"{name}.x", x)
        return x, SiteSums(
            dots,
            self[f"hc_{name}_base"],
            self[f"hc_{name}_scale"],
            width=c.hc_mult * c.hidden_size,
            iters=c.hc_sinkhorn_iters,
            eps=c.hc_eps,
            norm_eps=c.rms_norm_eps,
        )

    def _note(self, name: str, pre: mx.array, mix: mx.array, step: Step) -> None:
        if step.traces:
            for key, value in zip(("pre", "post", "comb"), (pre, *unmix(mix, self._config.hc_mult)), strict=True):
                step.note(f"{name}.{key}", value)


@functools.lru_cache(maxsize=16)
def _even(*shape: int) -> mx.array:
    """Weights [B, L, M] of the mean of M streams, made on the host, so that a step launches nothing for them."""
    return mx.array(np.full(shape, 1 / shape[-1], dtype=np.float32))
