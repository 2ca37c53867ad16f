"""One block: Engram, attention site, feed-forward site, joined by hyper-connections."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_ds4.cache import LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.hyper_connection import collapse_norm, expand, mix

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
        for site in ("attn", "ffn"):
            self[f"hc_{site}_fn"] = mx.zeros((streams * (streams + 2), streams * c.hidden_size))
            self[f"hc_{site}_base"] = mx.zeros((streams * (streams + 2),))
            self[f"hc_{site}_scale"] = mx.zeros((3,))
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
        attn_pre, post, comb = self._mix("attn", h, step)
        x = collapse_norm(h, pre, self.attn_norm.weight, self._config.rms_norm_eps)
        step.note("attn.x", x)
        h = expand(self.attn(x, step, cache), h, post, comb)
        step.note("h_mid", h)
        ffn_pre, post, comb = self._mix("ffn", h, step)
        x = collapse_norm(h, attn_pre, self.ffn_norm.weight, self._config.rms_norm_eps)
        step.note("ffn.x", x)
        h = expand(self.ffn(x, step), h, post, comb)
        step.note("h_out", h)
        return h, ffn_pre

    def _mix(self, site: str, h: mx.array, step: Step) -> tuple[mx.array, mx.array, mx.array]:
        c = self._config
        out = mix(
            h, self[f"hc_{site}_fn"], self[f"hc_{site}_base"], self[f"hc_{site}_scale"],
            iters=c.hc_sinkhorn_iters, eps=c.hc_eps, norm_eps=c.rms_norm_eps,
        )  # fmt: skip
        for name, value in zip(("pre", "post", "comb"), out, strict=True):
            step.note(f"{site}.{name}", value)
        return out
