"""The model's forward pass for training: the same numbers as `mlx_ds4.model`, dense and differentiable.

A training sequence starts at position 0 and is seen whole, so nothing needs a cache, attention is one product over
all positions under a mask, and every expert runs on every row with the routing weight zero where it was not
chosen. Roundings stand where the model has them; only the order of some sums differs, and the maximum against which
probabilities of more than 64 listed rows are rounded. `tests/examples/test_small_model.py` bounds the difference.

Weights are a dict of float32 arrays under the checkpoint's names.
"""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np

from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.compress import pool_pairs_ref
from mlx_ds4.custom_kernels.engram import engram_dot
from mlx_ds4.custom_kernels.hyper_connection import collapse_ref, spread_ref
from mlx_ds4.custom_kernels.rms_norm import rms_norm_ref
from mlx_ds4.custom_kernels.rope import rope_table
from mlx_ds4.custom_kernels.router import router_scores
from mlx_ds4.custom_kernels.shared_expert import clamped_swiglu_ref
from mlx_ds4.custom_kernels.topk import top_k_mask
from mlx_ds4.model.step import layer_frequencies

from . import rounding
from .rotation import rotate

Named = dict[str, mx.array]
_LEARNED_SWEEPS = 2  # Sinkhorn sweeps that the gradient sees; those before only set scales


@dataclasses.dataclass
class Pass:
    """What layers of one pass share and what the pass leaves behind.

    `dense` lets every row attend to every visible entry, as before the indexer is of use. `index_losses` are the
    indexers' own losses, `loads` the rows that chose each expert (float32 [E], by layer), `taps` the streams' mean on
    entry to the layers that the drafter reads. With `energies` a dict, mean squares of every matrix's inputs are
    left there under the weight's name.
    """

    config: ModelConfig
    length: int
    dense: bool = False
    energies: dict[str, mx.array] | None = None
    index_losses: list[mx.array] = dataclasses.field(default_factory=list)
    loads: list[mx.array] = dataclasses.field(default_factory=list)
    taps: list[mx.array] = dataclasses.field(default_factory=list)
    entries: mx.array | None = None  # compressed rows [B, S, D]
    keys: mx.array | None = None  # index keys [B, S, D]
    selection: mx.array | None = None  # bool [B, L, S]
    candidates: mx.array | None = None  # bool [B, L, S]

    def __post_init__(self) -> None:
        self._turns: dict[tuple[bool, int], tuple[mx.array, mx.array]] = {}
        self.window = mx.array(_window_mask(self.length, self.config.sliding_window))

    def turn(self, compressed: bool, stride: int = 1) -> tuple[mx.array, mx.array]:
        """cos and sin of positions 0, stride, 2 stride, .."""
        key = (compressed, stride)
        if key not in self._turns:
            positions = np.arange(self.length // stride) * stride
            self._turns[key] = rope_table(positions, layer_frequencies(self.config, compressed))
        return self._turns[key]

    def visible(self, ratio: int) -> mx.array:
        """bool [L, S]: entries that are complete at each row's position."""
        return mx.array(np.arange(self.length // ratio) < (np.arange(self.length)[:, None] + 1) // ratio)

    def see(self, name: str, x: mx.array, weight: mx.array | None = None) -> None:
        """Notes the energy of a matrix's inputs; `weight` [.., E] separates experts."""
        if self.energies is None:
            return
        square = mx.square(x.astype(mx.float32)).reshape(-1, x.shape[-1])
        if weight is not None:
            chosen = (weight.reshape(-1, weight.shape[-1]) > 0).astype(mx.float32)
            square = (chosen.T @ square) / mx.maximum(chosen.sum(axis=0)[:, None], 1)
        else:
            square = square.mean(axis=0)
        self.energies[name] = square


def forward(
    named: Named, biases: Named, config: ModelConfig, tokens: mx.array, rows: dict[int, mx.array], state: Pass
) -> mx.array:
    """Logits float32 [B, L, vocab] of tokens [B, L] that start at position 0.

    rows: Engram layer -> table rows int [B, L, columns]. `state` is a fresh Pass of this length.
    """
    h = named["embed.weight"][tokens].astype(mx.bfloat16)[:, :, None]
    h = mx.broadcast_to(h, (*h.shape[:2], config.hc_mult, h.shape[3]))
    pre = mx.broadcast_to(mx.array([1.0] + [0.0] * (config.hc_mult - 1)), h.shape[:3])
    for index in range(config.num_hidden_layers):
        h, pre = layer(named, biases, config, index, h, pre, rows.get(index), state)
    x = rms_norm_ref(collapse_ref(h, pre), named["norm.weight"], config.rms_norm_eps)
    state.see("head.weight", x)
    return x.astype(mx.float32) @ named["head.weight"].T


def layer(
    named: Named,
    biases: Named,
    config: ModelConfig,
    index: int,
    h: mx.array,
    pre: mx.array,
    rows: mx.array | None,
    state: Pass,
) -> tuple[mx.array, mx.array]:
    """`mlx_ds4.model.layer.Layer` over a whole sequence."""
    name, eps = f"layers.{index}.", config.rms_norm_eps
    if rows is not None:
        h = engram(named, config, name + "engram.", h, rows, state)
    if index in config.dspark_target_layer_ids:
        state.taps.append(h.astype(mx.float32).mean(axis=2).astype(mx.bfloat16))
    attn_pre, post, comb = mix(named, config, name + "hc_attn_", h)
    x = rms_norm_ref(collapse_ref(h, pre), named[name + "attn_norm.weight"], eps)
    h = spread_ref(attention(named, config, index, x, state), h, post, comb)
    ffn_pre, post, comb = mix(named, config, name + "hc_ffn_", h)
    x = rms_norm_ref(collapse_ref(h, attn_pre), named[name + "ffn_norm.weight"], eps)
    y = experts(named, biases, name + "ffn.", x, config.num_experts_per_tok, config, state)
    return spread_ref(y, h, post, comb), ffn_pre


def linear(x: mx.array, weight: mx.array, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return (x.astype(mx.float32) @ weight.T).astype(dtype)


# ---- hyper-connections ----------------------------------------------------------------------------------


def mix(named: Named, config: ModelConfig, name: str, h: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """pre, post and comb of a site; the gradient of the Sinkhorn sweeps comes from the last ones."""
    M, eps = config.hc_mult, config.hc_eps
    fn, base, scale = (named[name + part] for part in ("fn", "base", "scale"))
    x = h.astype(mx.float32)
    squares = (x * x).sum(axis=-1).sum(axis=-1, keepdims=True)  # in the order of `site_ref`
    x = x.reshape(*h.shape[:-2], -1)
    m = (x @ fn.T) * mx.rsqrt(squares / x.shape[-1] + config.rms_norm_eps)
    part = mx.array([0] * M + [1] * M + [2] * M * M)
    pre, post, g = mx.split(m * scale[part] + base, [M, 2 * M], axis=-1)
    pre, post = mx.sigmoid(pre) + eps, 2 * mx.sigmoid(post)
    g = g.reshape(*m.shape[:-1], M, M)
    g = mx.exp(g - mx.stop_gradient(g.max(axis=-1, keepdims=True)))  # in the steps of `split_ref`
    g = g / g.sum(axis=-1, keepdims=True) + eps
    g = g / (g.sum(axis=-2, keepdims=True) + eps)
    sweeps = config.hc_sinkhorn_iters - 1
    settled = mx.stop_gradient(g)
    for _ in range(sweeps - _LEARNED_SWEEPS):
        settled = _sweep(settled, eps)
    scaled = g * mx.stop_gradient(settled / g)  # the gradient's path; its value may be one unit off
    g = settled + (scaled - mx.stop_gradient(scaled))
    for _ in range(min(sweeps, _LEARNED_SWEEPS)):
        g = _sweep(g, eps)
    return pre, post, g


def _sweep(g: mx.array, eps: float) -> mx.array:
    g = g / (g.sum(axis=-1, keepdims=True) + eps)
    return g / (g.sum(axis=-2, keepdims=True) + eps)


# ---- attention ------------------------------------------------------------------------------------------


def attention(named: Named, config: ModelConfig, index: int, x: mx.array, state: Pass) -> mx.array:
    """`mlx_ds4.model.attention.Attention`: x [B, L, C] -> bfloat16 [B, L, C]."""
    c, name, ratio = config, f"layers.{index}.attn.", config.ratio(index)
    B, L, _ = x.shape
    turn = state.turn(ratio > 0)
    rounded = rounding.fp8(x)
    for part in ("wq_a", "wkv"):
        state.see(f"{name}{part}.weight", x)
    qr = rms_norm_ref(linear(rounded, named[name + "wq_a.weight"]), named[name + "q_norm.weight"], c.rms_norm_eps)
    state.see(name + "wq_b.weight", qr)
    q = linear(rounding.fp8(qr), named[name + "wq_b.weight"]).reshape(B, L, c.num_attention_heads, c.head_dim)
    q = rotate(q, *turn)
    kv = rms_norm_ref(linear(rounded, named[name + "wkv.weight"]), named[name + "kv_norm.weight"], c.rms_norm_eps)
    kv = rounding.fp8(rotate(kv, *turn))
    near = _scores(q, kv, c)  # [B, L, H, L]
    mask = state.window[None, :, None]
    rows = kv
    if ratio:
        if c.owns_kv(index):
            latent = compress(named, c, index, x, state)
            state.keys = index_keys(named, c, index, latent, state)
            state.entries = rounding.fp4_e4m3(rotate(latent, *state.turn(True, ratio)))
        far = _scores(q, state.entries, c)
        if c.owns_index(index):
            select(named, c, index, x, qr, far, state)
        rows = mx.concatenate([kv, state.entries], axis=1)
        seen = mx.broadcast_to(mask, (B, L, 1, L))
        mask = mx.concatenate([seen, state.selection[:, :, None]], axis=-1)
        near = mx.concatenate([near, far], axis=-1)
    o = sink_attention(near, mask, rows, named[name + "attn_sink"])
    o = rotate(o, *turn, inverse=True).reshape(B, L, -1)
    return output(named, c, name, o, state)


def _scores(q: mx.array, rows: mx.array, config: ModelConfig) -> mx.array:
    """q [B, L, H, D] against rows [B, T, D], scaled: float32 [B, L, H, T]."""
    B, L, H, D = q.shape
    dots = q.reshape(B, L * H, D).astype(mx.float32) @ rows.astype(mx.float32).swapaxes(1, 2)
    return dots.reshape(B, L, H, rows.shape[1]) * config.head_dim**-0.5


def sink_attention(scores: mx.array, mask: mx.array, rows: mx.array, sink: mx.array) -> mx.array:
    """Softmax over what the mask shows, with the sink [H] in its denominator, times rows [B, T, D].

    scores float32 [B, L, H, T], mask [.., L, 1, T] -> bfloat16 [B, L, H, D].
    """
    B, L, H, T = scores.shape
    scores = mx.where(mask, scores, -mx.inf)
    peak = mx.stop_gradient(mx.maximum(scores.max(axis=-1, keepdims=True), -1e30))
    p = mx.exp(scores - peak)
    total = p.sum(axis=-1, keepdims=True) + mx.exp(sink[:, None] - peak)
    p = p.astype(mx.bfloat16).astype(mx.float32).reshape(B, L * H, T)
    o = (p @ rows.astype(mx.float32)).reshape(B, L, H, -1)
    return (o / total).astype(mx.bfloat16)


def output(named: Named, config: ModelConfig, name: str, o: mx.array, state: Pass) -> mx.array:
    """The grouped and the dense output projection; o bfloat16 [.., H * D]."""
    wo_a = named[name + "wo_a.weight"]
    G, width = config.o_groups, wo_a.shape[-1]
    state.see(name + "wo_a.weight", o.reshape(-1, width))
    slices = o.astype(mx.float32).reshape(-1, G, width).swapaxes(0, 1)
    low = (slices @ wo_a.reshape(G, -1, width).swapaxes(1, 2)).astype(mx.bfloat16)  # [G, N, rank]
    low = low.swapaxes(0, 1).reshape(*o.shape[:-1], -1)
    state.see(name + "wo_b.weight", low)
    return linear(rounding.fp8(low), named[name + "wo_b.weight"])


def compress(named: Named, config: ModelConfig, index: int, x: mx.array, state: Pass) -> mx.array:
    """Latents bfloat16 [B, S, D] of the entries that a whole sequence completes."""
    name = f"layers.{index}.attn.compressor."
    state.see(name + "wkv.weight", x)
    if config.ratio(index) == 1:
        latent = linear(x, named[name + "wkv.weight"])
    else:
        even = x[:, : x.shape[1] // 2 * 2]
        state.see(name + "wgate.weight", x)
        values, gates = (linear(even, named[f"{name}{part}.weight"], mx.float32) for part in ("wkv", "wgate"))
        latent = pool_pairs_ref(values, gates)
    return rms_norm_ref(latent, named[name + "norm.weight"], config.rms_norm_eps)


def index_keys(named: Named, config: ModelConfig, index: int, latent: mx.array, state: Pass) -> mx.array:
    """Index keys [B, S, width]; the indexer learns from its own loss only, so its inputs are cut off."""
    name = f"layers.{index}.attn.indexer."
    keys = linear(mx.stop_gradient(latent), named[name + "wk.weight"])
    keys = rms_norm_ref(keys, named[name + "k_norm.weight"], config.rms_norm_eps)
    return rounding.fp4(rotate(keys, *state.turn(True, config.ratio(index))))


def select(
    named: Named, config: ModelConfig, index: int, x: mx.array, qr: mx.array, far: mx.array, state: Pass
) -> None:
    """Publishes the selection and the candidates, and adds the indexer's loss: the divergence of its softmax from what
    this layer's heads, on average, attend to among the entries that it may choose from."""
    c, name, ratio = config, f"layers.{index}.attn.indexer.", config.ratio(index)
    B, L, _ = x.shape
    S = state.entries.shape[1]
    visible = state.visible(ratio)
    x, qr = mx.stop_gradient(x), mx.stop_gradient(qr)
    state.see(name + "wq_b.weight", qr)
    q = linear(rounding.fp8(qr), named[name + "wq_b.weight"]).reshape(B, L, c.index_n_heads, c.index_head_dim)
    q = rounding.fp4(rotate(q, *state.turn(True))).astype(mx.float32)
    scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
    weights = linear(x, named[name + "weights_proj.weight"]).astype(mx.float32) * scale
    weights = weights.astype(mx.bfloat16).astype(mx.float32)
    dots = q.reshape(B, -1, c.index_head_dim) @ state.keys.astype(mx.float32).swapaxes(1, 2)
    dots = mx.maximum(dots.reshape(B, L, c.index_n_heads, S), 0)
    scores = (weights[..., None] * dots).sum(axis=2)
    allowed = mx.broadcast_to(visible, (B, L, S))
    if c.uses_candidates(index) and state.candidates is not None and not state.dense:
        allowed = allowed & state.candidates
    state.index_losses.append(_index_loss(scores, allowed, far))
    masked = mx.where(allowed, mx.stop_gradient(scores), -mx.inf)
    if c.publishes_candidates(index):
        state.candidates = candidate_mask(masked, visible, c)
    state.selection = allowed if state.dense or c.index_topk >= S else top_k_mask(masked, c.index_topk)


def _index_loss(scores: mx.array, allowed: mx.array, far: mx.array) -> mx.array:
    shown = mx.where(allowed[:, :, None], mx.stop_gradient(far), -1e30)
    target = mx.softmax(shown, axis=-1).mean(axis=2)
    counts = allowed.any(axis=-1)
    guess = mx.where(allowed, scores, -1e30)
    guess = guess - mx.logsumexp(guess, axis=-1, keepdims=True)
    divergence = mx.where(allowed, target * (mx.log(mx.maximum(target, 1e-20)) - guess), 0).sum(axis=-1)
    return mx.where(counts, divergence, 0).sum() / mx.maximum(counts.sum(), 1)


def candidate_mask(scores: mx.array, visible: mx.array, config: ModelConfig) -> mx.array | None:
    """bool [B, L, S] of the entries in each row's candidate blocks, or None while every block is one."""
    B, L, S = scores.shape
    size, most = config.candidate_block_size, config.candidate_topk_blocks
    blocks = -(-S // size)
    if blocks <= most:
        return None
    best = mx.pad(scores, [(0, 0), (0, 0), (0, -S % size)], constant_values=-mx.inf)
    best = best.reshape(B, L, blocks, size).max(axis=-1)
    count = visible.astype(mx.int32).sum(axis=-1)
    newest = mx.where(count > 0, (count - 1) // size, -1)
    best = mx.where(mx.arange(blocks) == newest[:, None], mx.inf, best)
    return mx.repeat(top_k_mask(best, most), size, axis=-1)[..., :S]


# ---- experts and Engram ---------------------------------------------------------------------------------


def experts(named: Named, biases: Named, name: str, x: mx.array, k: int, config: ModelConfig, state: Pass) -> mx.array:
    """`mlx_ds4.model.moe.MoE` with every expert on every row; notes the load of the experts."""
    scores = router_scores(x.astype(mx.float32) @ named[name + "gate.weight"].T)
    E = scores.shape[-1]
    chosen = top_k_mask(mx.stop_gradient(scores) + biases[name + "gate.bias"], k)
    state.loads.append(mx.stop_gradient(chosen.astype(mx.float32).reshape(-1, E).sum(axis=0)))
    weights = mx.where(chosen, scores, 0)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * config.routed_scaling_factor
    rounded = rounding.fp8(x)
    limit = config.swiglu_limit

    w1, w3, w2 = (named[f"{name}experts.{part}.weight"] for part in ("w1", "w3", "w2"))  # [E, F, C], [E, C, F]
    F, C = w1.shape[1:]
    gate, up = (linear(rounded, w.reshape(E * F, C)).reshape(*x.shape[:-1], E, F) for w in (w1, w3))
    a = clamped_swiglu_ref(gate, up, limit, weights[..., None])
    if state.energies is not None:
        for part in ("w1", "w3"):
            state.see(f"{name}experts.{part}.weight", x, weights)
        state.energies[name + "experts.w2.weight"] = mx.square(a.astype(mx.float32)).reshape(-1, E, F).mean(axis=0)
    a = rounding.fp8(a).astype(mx.float32).reshape(-1, E, F).swapaxes(0, 1)
    routed = (a @ w2.swapaxes(1, 2)).astype(mx.bfloat16).astype(mx.float32)  # [E, N, C]

    shared = f"{name}shared_experts."
    gate, up = (linear(rounded, named[f"{shared}{part}.weight"]) for part in ("w1", "w3"))
    a = clamped_swiglu_ref(gate, up, limit)
    for part, seen in (("w1", x), ("w3", x), ("w2", a)):
        state.see(f"{shared}{part}.weight", seen)
    y = linear(rounding.fp8(a), named[shared + "w2.weight"]).astype(mx.float32).reshape(-1, C)
    total = routed[0]
    for e in range(1, E):
        total = total + routed[e]
    return (total + y).reshape(x.shape).astype(mx.bfloat16)


def engram(named: Named, config: ModelConfig, name: str, h: mx.array, rows: mx.array, state: Pass) -> mx.array:
    """`mlx_ds4.model.engram.Engram` with the table in memory: h [B, L, M, C], rows int [B, L, columns]."""
    B, L, M, C = h.shape
    e = named[name + "embed.weight"][rows].reshape(B, L, -1).astype(mx.bfloat16)
    state.see(name + "wkv.weight", e)
    kv = linear(rounding.fp8(e), named[name + "wkv.weight"])
    keys, value = kv[..., : M * C].reshape(B, L, M, C), kv[..., M * C :]
    qk = named[name + "q_weight"] * named[name + "k_weight"]
    dot = engram_dot(h, keys, qk, eps=config.rms_norm_eps)
    root = mx.sqrt(mx.maximum(mx.abs(dot), 1e-6))
    gate = mx.sigmoid(mx.where(mx.stop_gradient(dot) < 0, -root, root))
    update = gate[..., None] * value.astype(mx.float32)[..., None, :]
    return (h.astype(mx.float32) + update).astype(mx.bfloat16)


def _window_mask(length: int, window: int) -> np.ndarray:
    behind = np.arange(length)[:, None] - np.arange(length)
    return (behind >= 0) & (behind < window)
