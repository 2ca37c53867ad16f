"""DSpark, the drafter of V4.1: three small blocks that guess the next tokens from what the model has just computed.

The taps, the mean of the residual streams on entry to the model's last layers, become one row per position and stage
in private rings. A proposal runs a block of `dspark_block_size` rows, the last token followed by mask tokens, in which
every row sees all ring rows and all rows of the block: the block is not causal and never narrower, as training
knew only this form. Embedding and head are the model's own. A low-rank Markov head then adds to each row's
logits what the row's input token says about its successor, and a confidence head estimates whether the draft
will be accepted (architecture notes 11).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_ds4.cache import Cache, DraftRings
from mlx_ds4.config import ConfigError, ModelConfig
from mlx_ds4.custom_kernels.fake_quant import fake_quant_fp8
from mlx_ds4.custom_kernels.hyper_connection import collapse
from mlx_ds4.custom_kernels.rope import rope

from .layer import Layer
from .linear import Linear
from .model import Embedding, Model
from .module import Module
from .norm import RMSNorm
from .step import Step


class DraftError(ValueError):
    """A proposal that holds no usable numbers."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafts for the positions behind the anchor, in order, and the logit of each one's acceptance, given that
    those before it are accepted."""

    tokens: list[int]
    confidence: list[float]


def stage_config(config: ModelConfig) -> ModelConfig:
    """The stages as a model of window-only layers, with the drafter's own experts.

    Raises ConfigError unless `config` describes a drafter that fits its own layers.
    """
    c = config
    for name in ("num_nextn_predict_layers", "dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts"):
        if not 0 < getattr(c, name) <= 4096:
            raise ConfigError(f"{name} is {getattr(c, name)}, expected 1 to 4096: this model has no drafter")
    taps = c.dspark_target_layer_ids
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= c.num_hidden_layers:
        raise ConfigError(
            f"dspark_target_layer_ids is {list(taps)!r:.60}, expected increasing layers below {c.num_hidden_layers}: "
            "this drafter belongs to another model (V4's taps are 40, 41, 42)"
        )
    if not 0 < c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts:
        raise ConfigError(
            f"dspark_num_experts_per_tok is {c.dspark_num_experts_per_tok}, expected 1 to {c.dspark_n_routed_experts}"
        )
    if c.dspark_noise_token_id >= c.vocab_size:
        raise ConfigError(
            f"dspark_noise_token_id is {c.dspark_noise_token_id}, expected an id below {c.vocab_size}: "
            "this drafter belongs to another model"
        )
    stages = c.num_nextn_predict_layers
    return dataclasses.replace(
        c,
        num_hidden_layers=stages,
        num_nextn_predict_layers=0,
        compress_ratios=(0,) * stages,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        engram_layer_ids=(),
        engram_num_embeddings=(),
        n_routed_experts=c.dspark_n_routed_experts,
        num_experts_per_tok=c.dspark_num_experts_per_tok,
        dspark_target_layer_ids=(),
    )


class BlockStep(Step):
    """The pass over a block: every row sees all ring rows and the whole block."""

    short = False  # the ring is read and not written

    def __init__(self, config: ModelConfig, start: int, length: int, ring_rows: int, trace=None):
        super().__init__(config, start, length, trace)
        self._ring_rows = ring_rows

    def _window_list(self) -> np.ndarray:
        """[L, window + L], padded in front with -1 to a width that does not change."""
        rows = np.arange(self.config.sliding_window + self.length) - (self.config.sliding_window - self._ring_rows)
        return np.tile(np.maximum(rows, -1), (self.length, 1))


class Ring:
    """What a stage's attention takes for a layer's cache: it reads the ring and keeps nothing of the block."""

    def __init__(self, rows: mx.array):
        self._rows = rows

    def extend(self, rows: mx.array, start: int) -> mx.array:
        return mx.concatenate([self._rows, rows], axis=1)


class MarkovHead(Module):
    """What a token says about its successor: logits float32 [.., vocab] and the token's embedding [.., rank]."""

    def __init__(self, vocab: int, rank: int):
        super().__init__()
        self.embed = Embedding(vocab, rank)
        self.head = Linear(rank, vocab, out_dtype=mx.float32)

    def __call__(self, token: mx.array) -> tuple[mx.array, mx.array]:
        e = self.embed(token)
        return self.head(e), e


class ConfidenceHead(Module):
    """One float32 logit per row from the row's hidden state, before the norm, and its input token's Markov row."""

    def __init__(self, dims: int):
        super().__init__()
        self.proj = Linear(dims, 1, out_dtype=mx.float32)

    def __call__(self, hidden: mx.array, e: mx.array) -> mx.array:
        return self.proj(mx.concatenate([hidden, e], axis=-1))[..., 0]


class Stage(Layer):
    """One block of the drafter; the first one also has the projection of the taps, the last one the heads."""

    def __init__(self, config: ModelConfig, stage: int, taps: int):
        super().__init__(config, stage)
        c = config
        if stage == 0:
            self.main_proj = Linear(taps * c.hidden_size, c.hidden_size, trained=True)
            self.main_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if stage == c.num_hidden_layers - 1:
            self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.markov_head = MarkovHead(c.vocab_size, c.dspark_markov_rank)
            self.confidence_head = ConfidenceHead(c.hidden_size + c.dspark_markov_rank)


class Drafter(Module):
    """The three stages; parameter names are the official checkpoint's (`mtp.0.attn.wq_a.weight`), experts stacked.

    `observe` takes the taps of every pass of the model, `propose` gives the next drafts. `failure` says why
    speculative decoding has stopped using this drafter, or is None.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = stage_config(config)
        self.target_layer_ids = config.dspark_target_layer_ids
        self.block_size = config.dspark_block_size
        self.failure: str | None = None
        stages, taps = self.config.num_hidden_layers, len(self.target_layer_ids)
        self.mtp = [Stage(self.config, stage, taps) for stage in range(stages)]

    def observe(self, cache: Cache, taps: Sequence[mx.array]) -> None:
        """Hands over the taps [1, L, C] of the last L positions that `cache` holds."""
        if cache.rings is None:
            cache.rings = DraftRings(self.config.sliding_window)
        most = cache.rings.keep
        # Of a prompt a copy: a slice would hold all of the array.
        kept = [tap[0] if tap.shape[1] <= most else tap[0, -most:] * 1 for tap in taps]
        cache.rings.append(kept, cache.offset)
        mx.async_eval(kept)

    def propose(
        self, model: Model, cache: Cache, anchor: int, sample: Callable[[mx.array], mx.array] | None = None
    ) -> Proposal:
        """Drafts of `block_size` tokens behind `anchor`, the token chosen for position `cache.offset`.

        `sample` takes logits [1, V] and returns a token; by default the best one, lowest index among equals.
        Raises DraftError for logits or confidences that are not finite.
        """
        hidden = self.hidden(model, self.ring(cache), anchor, cache.offset)
        tokens, logits, confidence = self.heads(model, hidden, anchor, sample)
        usable = mx.isfinite(logits).all() & mx.isfinite(confidence).all()
        mx.eval(tokens, confidence, usable)
        if not usable.item():
            raise DraftError("its logits or confidences are not finite")
        return Proposal(tokens.tolist(), confidence.tolist())

    def ring(self, cache: Cache) -> mx.array:
        """Ring rows bfloat16 [stages, n, D] of the last n <= window positions, oldest first."""
        rings = cache.rings
        if rings is not None and (taps := rings.taps) is not None:
            rings.finish(self.ring_rows(taps, rings.offset - len(taps)))
        if rings is None or rings.rows is None:
            return mx.zeros((len(self.mtp), 0, self.config.head_dim), dtype=mx.bfloat16)
        return rings.rows[:, -self.config.sliding_window :]

    def ring_rows(self, taps: mx.array, start: int) -> mx.array:
        """Rows bfloat16 [stages, n, D] of n positions from `start` on, from their taps [n, taps * C]."""
        first = self.mtp[0]
        main = first.main_norm(first.main_proj(taps[None]))
        turn = Step(self.config, start, len(taps)).rotation(0)
        rows = [rope(stage.attn.kv_norm(stage.attn.wkv(main)), *turn)[0] for stage in self.mtp]
        return fake_quant_fp8(mx.stack(rows))

    def hidden(
        self, model: Model, ring: mx.array, anchor: int, start: int, trace: dict[str, mx.array] | None = None
    ) -> mx.array:
        """The block's hidden state bfloat16 [block, C]; its rows stand at `start`, `start` + 1, .."""
        c = self.config
        ids = mx.array([[anchor] + [c.dspark_noise_token_id] * (self.block_size - 1)])
        step = BlockStep(c, start, self.block_size, ring.shape[1], trace)
        h, pre = model.start(ids)
        for index, stage in enumerate(self.mtp):
            step.layer = index
            h, pre = stage(h, pre, step, Ring(ring[index][None]))
        return collapse(h, pre)[0]

    def heads(
        self, model: Model, hidden: mx.array, anchor: int, sample: Callable[[mx.array], mx.array] | None = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Drafts [block], their logits float32 [block, V] with the Markov term, confidences float32 [block]."""
        last = self.mtp[-1]
        base = model.head(last.norm(hidden))
        token, tokens, logits, embeddings = mx.array([anchor]), [], [], []
        for row in range(self.block_size):
            bias, e = last.markov_head(token)
            scores = base[row : row + 1] + bias
            token = (mx.argmax(scores, axis=-1) if sample is None else sample(scores)).reshape(1)
            for list_, value in ((tokens, token), (logits, scores), (embeddings, e)):
                list_.append(value)
        confidence = last.confidence_head(hidden, mx.concatenate(embeddings))
        return mx.concatenate(tokens), mx.concatenate(logits), confidence
