"""The metadata records of a ds4 GGUF, in the order and with the types of the published files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlx_ds4.checkpoint import SYNTHETIC_NAME
from mlx_ds4.config import ModelConfig
from mlx_ds4.model.engram import EngramHash

from .gguf_writer import Record
from .official_config import official_config, released_config
from .recipe import Recipe

RELEASED_NAME = "DeepSeek V4.1 Flash"
_URL = "https://huggingface.co/deepseek-ai/DeepSeek-V4.1-Flash"
_UNKNOWN_REVISION = "0" * 40

# A tokenizer that splits text otherwise than the released one needs its JSON besides.
_OTHER_SPLITS = "tokenizer.huggingface.json"
_IDS = {"bos_token_id": "u32", "eos_token_id": "u32", "add_bos_token": "bool", "add_eos_token": "bool"}
_TOKENIZERS = {
    "gpt2": {
        "model": "string", "pre": "string", "tokens": "[string]", "token_type": "[i32]", "merges": "[string]", **_IDS,
    },
    # SentencePiece, as llama.cpp stores it; no released model has one.
    "llama": {
        "model": "string", "tokens": "[string]", "scores": "[f32]", "token_type": "[i32]",
        "add_space_prefix": "bool", "remove_extra_whitespaces": "bool", **_IDS,
    },
}  # fmt: skip
_MODEL = {
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups",
            "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "max_position_embeddings",
            "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "candidate_source_layer_id",
            "candidate_topk_blocks", "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "rope_theta",
            "compress_rope_theta",
        ),
        "u32",
    ),
    **dict.fromkeys(("rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor"), "f32"),
    **dict.fromkeys(("scoring_func", "hidden_act", "topk_method"), "string"),
    "norm_topk_prob": "bool",
    **dict.fromkeys(("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"), "[u32]"),
}  # fmt: skip
_ROPE = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")


def metadata_records(
    raw_config: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    token_map: np.ndarray,
    hashes: Sequence[EngramHash],
    *,
    recipe: Recipe,
    alignment: int,
    calibration: str,
) -> list[Record]:
    """All records of a file made from `raw_config` (a config.json) and a tokenizer's GGUF metadata.

    The name is the released model's only when the config is. Without Engram layers there are no Engram
    records. ValueError when a value has no place in the dialect (a rotary base that is not whole).
    """
    config = ModelConfig.from_dict(raw_config)
    released = config == ModelConfig.from_dict(released_config())
    out: list[Record] = [
        ("general.architecture", "string", "deepseek41"),
        ("general.name", "string", RELEASED_NAME if released else SYNTHETIC_NAME),
        ("general.source.url", "string", _URL if released else SYNTHETIC_NAME),
        ("general.source.revision", "string", _UNKNOWN_REVISION),
        ("general.alignment", "u32", alignment),
        ("deepseek41.config", "string", json.dumps(raw_config, sort_keys=True, separators=(",", ":"))),
    ]
    if config.engram_layer_ids:
        row = config.engram_head_dim // 32 * 33
        for key, kind, value in (
            ("encoding", "string", f"e4m3_e8m0_32_row{row}"),
            ("layer_ids", "[u32]", config.engram_layer_ids),
            ("rows", "[u32]", config.engram_num_embeddings),
            ("compressed_vocab_size", "u32", config.engram_compressed_vocab_size),
            ("pad_id", "u32", hashes[0].pad_id),
            ("token_map", "[u32]", token_map),
            ("primes", "[u32]", np.concatenate([h.primes for h in hashes])),
            ("multipliers", "[u64]", np.concatenate([h.multipliers for h in hashes])),
        ):
            out.append((f"deepseek41.engram.{key}", kind, value))
    fields = _TOKENIZERS[tokenizer["tokenizer.ggml.model"]]
    if "tokenizer.ggml.precompiled_charsmap" in tokenizer:
        raise ValueError("the tokenizer rewrites characters by a table, which a ds4 GGUF has no place for")
    out += [(f"tokenizer.ggml.{key}", kind, tokenizer[f"tokenizer.ggml.{key}"]) for key, kind in fields.items()]
    if "tokenizer.ggml.padding_token_id" in tokenizer and fields is _TOKENIZERS["llama"]:
        out.append(("tokenizer.ggml.padding_token_id", "u32", tokenizer["tokenizer.ggml.padding_token_id"]))
    if _OTHER_SPLITS in tokenizer:
        out.append((_OTHER_SPLITS, "string", tokenizer[_OTHER_SPLITS]))
    text = official_config(config)["text_config"]
    text["compress_ratios"] = config.compress_ratios[: config.num_hidden_layers]
    out += [(f"deepseek41.{key}", kind, text[key]) for key, kind in _MODEL.items()]
    out += [(f"deepseek41.rope_scaling.{key}", "f32", text["rope_scaling"][key]) for key in _ROPE]
    out += [
        ("deepseek41.quantization", "string", recipe.text),
        ("deepseek41.calibration", "string", calibration),
    ]
    return out
