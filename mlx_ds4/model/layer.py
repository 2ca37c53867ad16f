"""One block: Engram, attention site, feed-forward site, joined by hyper-connections."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_ds4.cache import LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.hyper_connection import expand, site

from .attention import Attention
from .engram import Engram
from .moe import MoE
from .norm import RMSNorm
from .step import Step


class Layer(nn.Module):
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
            step.taps.append(h.astype(mx.float32).mean(axis=2).astype(mx.bfloat16))
        step.note("h_in", h)
        x, dots = self._site("attn", h, pre)
        step.note("attn.x", x)
        h, pre = self._expand("attn", self.attn(x, step, cache), h, dots, step)
        step.note("h_mid", h)
        x, dots = self._site("ffn", h, pre)
        step.note("ffn.x", x)
        h, pre = self._expand("ffn", self.ffn(x, step), h, dots, step)
        step.note("h_out", h)
        return h, pre

    def _site(self, name: str, h: mx.array, pre: mx.array) -> tuple[mx.array, mx.array]:
        """The sublayer's input, and what `_expand` needs of the streams before it."""
        weight = self[f"{name}_norm"].weight
        return site(h, pre, self[f"hc_{name}_fn"], weight, norm_eps=self._config.rms_norm_eps)

    def _expand(self, name: str, y: mx.array, h: mx.array, dots: mx.array, step: Step) -> tuple[mx.array, mx.array]:
        """The streams behind a sublayer, and the coefficients that collapse them for the next."""
        c = self._config
        h, *coefficients = expand(
            y, h, dots, self[f"hc_{name}_base"], self[f"hc_{name}_scale"],
            iters=c.hc_sinkhorn_iters, eps=c.hc_eps, norm_eps=c.rms_norm_eps,
        )  # fmt: skip
        for coefficient, value in zip(("pre", "post", "comb"), coefficients, strict=True):
            step.note(f"{name}.{coefficient}", value)
        return h, coefficients[0]
