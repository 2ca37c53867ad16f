"""The drafter's forward pass for training: many blocks of one sequence at a time, and its loss.

A block at position s has the token of s and mask tokens, and sees the ring rows of the positions before s. Row k
guesses the token of s + k + 1, taught by the frozen model's own distribution there. Its Markov term gets the
true token of s + k: while drafting it gets the draft, which is the true token where it counts. The confidence of a row
learns whether its best token is the model's.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.hyper_connection import collapse_ref, spread_ref
from mlx_ds4.custom_kernels.rms_norm import rms_norm_ref
from mlx_ds4.custom_kernels.rope import rope_table
from mlx_ds4.model.dspark import stage_config
from mlx_ds4.model.step import layer_frequencies

from . import rounding
from .forward import Named, Pass, _scores, experts, linear, mix, output, sink_attention
from .rotation import rotate


def ring_rows(named: Named, config: ModelConfig, taps: mx.array) -> list[mx.array]:
    """Ring rows bfloat16 [B, L, D] of every stage from taps [B, L, taps * C] of positions 0, 1, .."""
    turn = rope_table(np.arange(taps.shape[1]), layer_frequencies(config, False))
    eps = config.rms_norm_eps
    main = linear(rounding.fp8(taps), named["mtp.0.main_proj.weight"])
    main = rounding.fp8(rms_norm_ref(main, named["mtp.0.main_norm.weight"], eps))
    rows = []
    for stage in range(config.num_nextn_predict_layers):
        name = f"mtp.{stage}.attn."
        kv = rms_norm_ref(linear(main, named[name + "wkv.weight"]), named[name + "kv_norm.weight"], eps)
        rows.append(rounding.fp8(rotate(kv, *turn)))
    return rows


def hidden(
    named: Named, biases: Named, config: ModelConfig, embed: mx.array, taps: mx.array, tokens: mx.array,
    starts: np.ndarray, state: Pass,
) -> mx.array:  # fmt: skip
    """Hidden states bfloat16 [B, A, K, C] of the blocks at positions `starts` [A], the same in every sequence.

    embed: the frozen model's token rows; state: a Pass that collects loads.
    """
    c, eps, K, W = stage_config(config), config.rms_norm_eps, config.dspark_block_size, config.sliding_window
    B, A = tokens.shape[0], len(starts)
    ids = mx.full((B, A, K), config.dspark_noise_token_id, dtype=tokens.dtype)
    ids[:, :, 0] = tokens[:, mx.array(starts)]
    h = embed[ids].astype(mx.bfloat16)[..., None, :]
    h = mx.broadcast_to(h, (*h.shape[:3], c.hc_mult, h.shape[-1]))
    pre = mx.broadcast_to(mx.array([1.0] + [0.0] * (c.hc_mult - 1)), h.shape[:4])
    before = starts[:, None] - W + np.arange(W)  # [A, W] positions of the ring rows, negative before the start
    mask = np.concatenate([before >= 0, np.ones((A, K), bool)], axis=1)
    mask = mx.array(np.tile(mask[None, :, None, None], (B, 1, 1, 1, 1)).reshape(B * A, 1, 1, W + K))
    before = mx.array(np.maximum(before, 0))
    turn = _block_turn(config, starts)
    for stage, ring in enumerate(ring_rows(named, config, taps)):
        name = f"mtp.{stage}."
        attn_pre, post, comb = mix(named, c, name + "hc_attn_", h)
        x = rms_norm_ref(collapse_ref(h, pre), named[name + "attn_norm.weight"], eps)
        y = _attention(named, c, name + "attn.", x, ring[:, before], mask, turn, state)
        h = spread_ref(y, h, post, comb)
        ffn_pre, post, comb = mix(named, c, name + "hc_ffn_", h)
        x = rms_norm_ref(collapse_ref(h, attn_pre), named[name + "ffn_norm.weight"], eps)
        h = spread_ref(experts(named, biases, name + "ffn.", x, c.num_experts_per_tok, c, state), h, post, comb)
        pre = ffn_pre
    return collapse_ref(h, pre)


def heads(
    named: Named, config: ModelConfig, head: mx.array, norm_input: mx.array, inputs: mx.array
) -> tuple[mx.array, mx.array]:
    """Logits float32 [.., V] with the Markov term, and confidence logits [..]; inputs: the token of each row."""
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    e = named[last + "markov_head.embed.weight"][inputs].astype(mx.bfloat16)
    x = rms_norm_ref(norm_input, named[last + "norm.weight"], config.rms_norm_eps)
    logits = x.astype(mx.float32) @ head.T + linear(e, named[last + "markov_head.head.weight"], mx.float32)
    both = mx.stop_gradient(mx.concatenate([norm_input, e], axis=-1))
    return logits, linear(both, named[last + "confidence_head.proj.weight"], mx.float32)[..., 0]


def loss(
    named: Named, biases: Named, config: ModelConfig, frozen: Named, taps: mx.array, target: mx.array,
    tokens: mx.array, starts: np.ndarray, state: Pass,
) -> tuple[mx.array, dict[str, mx.array]]:  # fmt: skip
    """Loss and its parts; target: the frozen model's logits [B, L, V], each start at most L - block - 1."""
    K = config.dspark_block_size
    x = hidden(named, biases, config, frozen["embed.weight"], taps, tokens, starts, state)
    at = mx.array(starts[:, None] + np.arange(K))  # [A, K] the input token's position of each row
    logits, confidence = heads(named, config, frozen["head.weight"], x, tokens[:, at])
    wanted = target[:, at]  # [B, A, K, V]
    p = mx.softmax(wanted, axis=-1)
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    distance = -(p * logp).sum(axis=-1).mean()
    agrees = mx.argmax(logits, axis=-1) == mx.argmax(wanted, axis=-1)
    label = mx.stop_gradient(agrees.astype(mx.float32))
    doubt = (mx.logaddexp(0, confidence) - label * confidence).mean()
    accepted = mx.cumprod(label, axis=-1).sum(axis=-1).mean()
    return distance + doubt, {"draft": distance, "confidence": doubt, "accepted": accepted}


def _block_turn(config: ModelConfig, starts: np.ndarray) -> tuple[mx.array, mx.array]:
    """cos and sin [A, K, pairs] of the blocks' positions."""
    K = config.dspark_block_size
    positions = (starts[:, None] + np.arange(K)).reshape(-1)
    return tuple(t.reshape(len(starts), K, -1) for t in rope_table(positions, layer_frequencies(config, False)))


def _attention(
    named: Named, config: ModelConfig, name: str, x: mx.array, ring: mx.array, mask: mx.array, turn, state: Pass
) -> mx.array:
    """x [B, A, K, C], ring [B, A, W, D]: every row of a block sees the ring rows and the whole block."""
    c, eps = config, config.rms_norm_eps
    B, A, K, _ = x.shape
    H, D = c.num_attention_heads, c.head_dim
    rounded = rounding.fp8(x)
    qr = rms_norm_ref(linear(rounded, named[name + "wq_a.weight"]), named[name + "q_norm.weight"], eps)
    q = linear(rounding.fp8(qr), named[name + "wq_b.weight"]).reshape(B, A * K, H, D)
    flat = tuple(t.reshape(A * K, -1) for t in turn)
    q = rotate(q, *flat)
    kv = rms_norm_ref(linear(rounded, named[name + "wkv.weight"]), named[name + "kv_norm.weight"], eps)
    kv = rounding.fp8(rotate(kv.reshape(B, A * K, D), *flat)).reshape(B, A, K, D)
    rows = mx.concatenate([ring, kv], axis=2).reshape(B * A, -1, D)
    scores = _scores(q.reshape(B * A, K, H, D), rows, c)
    o = sink_attention(scores, mask, rows, named[name + "attn_sink"])
    o = rotate(o.reshape(B, A * K, H, D), *flat, inverse=True)
    return output(named, c, name, o.reshape(B, A, K, H * D), state)
