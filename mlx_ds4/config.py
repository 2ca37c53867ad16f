"""The model's shape: one frozen dataclass that refuses what is not implemented.

Field names are those of the release's `text_config`. `ModelConfig.from_dict` reads the official
`config.json` (nested), the flat twin of the vendor's reference code, and what `to_dict` wrote;
`ModelConfig.from_gguf` reads the metadata of a ds4 GGUF. Per-layer facts are methods, so that no module
ever compares layer numbers itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A configuration that is inconsistent or not implemented."""


# Names of the vendor's flat inference config -> names of text_config.
_FLAT_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
}

# What this implementation computes; anything else is refused by name.
_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a DeepSeek V4.1 text model (architecture: `docs/architecture.md`)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    moe_intermediate_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_length: int
    max_position_embeddings: int = 1_048_576
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2

    # ---- construction ----------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Reads an official `config.json`, the flat reference config, or the result of `to_dict`.

        Raises ConfigError when the model type is another one, a key is missing or has the wrong type,
        or a value asks for something that is not implemented.
        """
        model_type = raw.get("model_type", "deepseek_v41")
        if model_type not in ("deepseek_v41", "deepseek_v41_text"):
            raise ConfigError(f"model_type is {model_type!r}, expected 'deepseek_v41': not a V4.1 checkpoint")
        text = dict(raw.get("text_config") or raw)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if key in raw:
                text.setdefault(key, raw[key])
        for old, new in _FLAT_NAMES.items():
            if old in text:
                text.setdefault(new, text[old])
        for key, wanted in _FIXED.items():
            if text.get(key, wanted) != wanted:
                raise ConfigError(f"{key} is {text[key]!r}, only {wanted!r} is implemented")
        scaling = text.get("rope_scaling") or {}
        kind = scaling.get("type", scaling.get("rope_type", "yarn"))
        if kind != "yarn":
            raise ConfigError(f"rope_scaling type is {kind!r}, only 'yarn' is implemented")
        for ours, theirs, flat in (
            ("rope_factor", "factor", "rope_factor"),
            ("rope_beta_fast", "beta_fast", "beta_fast"),
            ("rope_beta_slow", "beta_slow", "beta_slow"),
            ("rope_original_length", "original_max_position_embeddings", "original_seq_len"),
        ):
            if theirs in scaling:
                text[ours] = scaling[theirs]
            elif flat in text:
                text[ours] = text[flat]
        return cls._build(text)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ModelConfig:
        """Reads the metadata of a `deepseek41` GGUF (values as numbers, strings or sequences).

        The JSON of `deepseek41.config` supplies what has no scalar key (engram heads, dspark sizes); a
        scalar key that contradicts it raises ConfigError, since such a file was edited by hand.
        """
        prefix = "deepseek41."
        try:
            whole = json.loads(metadata.get(prefix + "config", "{}"))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{prefix}config is not JSON ({error}): the file is damaged") from None
        if not isinstance(whole, dict):
            raise ConfigError(f"{prefix}config is not a JSON object: the file is damaged")
        text = dict(whole.get("text_config") or whole)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if key in whole:
                text.setdefault(key, whole[key])
        scaling = dict(text.get("rope_scaling") or {})
        names = {field.name for field in dataclasses.fields(cls)} | set(_FIXED)
        for full, value in metadata.items():
            if not full.startswith(prefix):
                continue
            key = full[len(prefix) :]
            if key.startswith("rope_scaling."):
                _agree(full, value, scaling.get(key[13:]))
                scaling.setdefault(key[13:], value)  # the JSON has all digits, the scalar is single precision
            elif key in names:
                known = text.get(key)
                if key == "compress_ratios" and known is not None:
                    known = list(known)[: len(value)]  # the GGUF trims the drafter's entries
                _agree(full, value, known)
                text.setdefault(key, value)
        engram = {
            "engram_layer_ids": "engram.layer_ids",
            "engram_num_embeddings": "engram.rows",
            "engram_compressed_vocab_size": "engram.compressed_vocab_size",
            "engram_pad_token_id": "engram.pad_id",
        }
        for ours, theirs in engram.items():
            if prefix + theirs in metadata:
                _agree(prefix + theirs, metadata[prefix + theirs], text.get(ours))
                text[ours] = metadata[prefix + theirs]
        for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
            key = f"tokenizer.ggml.{theirs}_token_id"
            if key in metadata:
                text[ours] = metadata[key]
        return cls.from_dict({"model_type": "deepseek_v41", "text_config": {**text, "rope_scaling": scaling}})

    @classmethod
    def _build(cls, values: Mapping[str, Any]) -> ModelConfig:
        kwargs, missing = {}, []
        for field in dataclasses.fields(cls):
            if field.name not in values:
                if field.default is dataclasses.MISSING:
                    missing.append(field.name)
                continue
            kwargs[field.name] = _typed(field.name, str(field.type), values[field.name])
        if missing:
            raise ConfigError(f"config lacks {', '.join(missing)}: is this a V4.1 checkpoint?")
        config = cls(**kwargs)
        config._check()
        return config

    def to_dict(self) -> dict[str, Any]:
        """Plain values, readable again by `from_dict`."""
        out = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        return {"model_type": "deepseek_v41", **out}

    def _check(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(text)

        layers = self.num_hidden_layers
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if str(field.type) == "int" and not 0 <= value < 2**40:
                raise ConfigError(f"{field.name} is {value}, expected a number from 0 to 2^40")
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "moe_intermediate_size", "num_attention_heads",
            "head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window", "n_routed_experts",
            "num_experts_per_tok", "hc_mult", "index_n_heads", "index_head_dim", "index_topk",
        ):  # fmt: skip
            need(getattr(self, name) > 0, f"{name} is 0, expected a positive number")
        need(layers <= 1024, f"num_hidden_layers is {layers}, at most 1024 are supported")
        need(
            len(self.compress_ratios) in (layers, layers + self.num_nextn_predict_layers),
            f"compress_ratios has {len(self.compress_ratios)} entries for {layers} layers "
            f"and {self.num_nextn_predict_layers} drafter stages",
        )
        need(set(self.compress_ratios) <= {0, 1, 2}, "compress_ratios may hold only 0, 1 and 2 in V4.1")
        need(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even")
        need(self.qk_rope_head_dim <= min(self.head_dim, self.index_head_dim), "qk_rope_head_dim is too wide")
        need(self.num_attention_heads % self.o_groups == 0, "o_groups must divide num_attention_heads")
        need(self.num_experts_per_tok <= self.n_routed_experts, "num_experts_per_tok exceeds n_routed_experts")
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            ids = getattr(self, name)
            need(list(ids) == sorted(set(ids)), f"{name} {list(ids)} must increase strictly")
            need(all(0 <= i < layers for i in ids), f"{name} {list(ids)} names a layer outside 0..{layers - 1}")
        for layer in range(layers):
            if self.ratio(layer):
                need(
                    self.kv_source(layer) is not None and self.index_source(layer) is not None,
                    f"layer {layer} reads compressed rows but no earlier layer is a KV and an index source",
                )
                owner = self.kv_source(layer)
                need(
                    self.ratio(owner) == self.ratio(layer),
                    f"layer {layer} has ratio {self.ratio(layer)} but reads the rows of layer {owner}, whose ratio is "
                    f"{self.ratio(owner)}",
                )
        for layer in self.kv_source_layer_ids:
            need(layer in self.index_source_layer_ids, f"KV source {layer} must also be an index source")
            need(self.ratio(layer) > 0, f"KV source {layer} has compression ratio 0")
        if self.engram_layer_ids:
            need(
                len(self.engram_num_embeddings) == len(self.engram_layer_ids),
                "engram_num_embeddings needs one entry per Engram layer",
            )
            for name in (
                "engram_vocab_size",
                "engram_n_heads",
                "engram_head_dim",
                "engram_compressed_vocab_size",
            ):
                need(getattr(self, name) > 0, f"{name} is 0 although there are Engram layers")
            need(self.engram_max_ngram_size >= 2, "engram_max_ngram_size must be at least 2")

    # ---- per-layer facts -------------------------------------------------------------------------

    def ratio(self, layer: int) -> int:
        """Compression ratio of a backbone layer: 0 (window only), 1 or 2."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV `layer` reads, or None for a window-only layer."""
        return _last_at_or_before(self.kv_source_layer_ids, layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k list `layer` uses, or None for a window-only layer."""
        return _last_at_or_before(self.index_source_layer_ids, layer) if self.ratio(layer) else None

    def owns_kv(self, layer: int) -> bool:
        """Whether `layer` has a compressor and index keys of its own."""
        return layer in self.kv_source_layer_ids

    def owns_index(self, layer: int) -> bool:
        """Whether `layer` has index queries and publishes a top-k list."""
        return layer in self.index_source_layer_ids

    def publishes_candidates(self, layer: int) -> bool:
        """Whether `layer` publishes the candidate blocks."""
        return layer == self.candidate_source_layer_id and self.owns_index(layer)

    def uses_candidates(self, layer: int) -> bool:
        """Whether `layer` scores only inside the published candidate blocks."""
        return self.owns_index(layer) and layer > self.candidate_source_layer_id

    @property
    def first_decoder_layer(self) -> int | None:
        """The last KV owner. It and the layers behind it write nothing that another position reads except the owner's
        compressed rows and their own windows. None in a model without owners."""
        return max(self.kv_source_layer_ids, default=None)

    @property
    def replay_rows(self) -> int:
        """Last positions of a prompt that decoder layers run over in prefill mode "replay": a window."""
        return self.sliding_window

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


def _last_at_or_before(ids: tuple[int, ...], layer: int) -> int | None:
    return max((i for i in ids if i <= layer), default=None)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else value


def _agree(key: str, value: Any, known: Any) -> None:
    if known is None:
        return
    value, known = _plain(value), _plain(known)
    if isinstance(value, float) and isinstance(known, (int, float)):
        same = abs(value - known) <= 1e-5 * abs(known)  # GGUF floats are single precision
    else:
        same = value == known
    if not same:
        raise ConfigError(f"{key} is {value} but deepseek41.config says {known}: the file was edited by hand")


def _typed(name: str, kind: str, value: Any) -> Any:
    value = _plain(value)
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(_is_int(v) for v in value):
            raise ConfigError(f"{name} is {value!r:.80}, expected a list of whole numbers")
        return tuple(int(v) for v in value)
    if kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} is {value!r:.80}, expected a number")
        return float(value)
    if not _is_int(value):
        raise ConfigError(f"{name} is {value!r:.80}, expected a whole number")
    return int(value)


def _is_int(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value == int(value)
