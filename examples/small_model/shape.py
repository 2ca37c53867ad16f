"""The small model's sizes: every part of V4.1, each small enough that its selection matters at 512 tokens."""

from __future__ import annotations

import dataclasses

import numpy as np

from mlx_ds4.config import ModelConfig
from mlx_ds4.model.engram import engram_constants

NOISE_TOKEN = "<｜System｜>"  # the drafter's mask, as in the release


def small_config(**changes) -> ModelConfig:
    """Window 32, 64 selected entries of at most 512, 16 candidate blocks of 8; rows are whole K-quant blocks.

    What follows from the tokenizer is filled in by `with_tokens`.
    """
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "moe_intermediate_size": 256,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 2,
        "sliding_window": 32,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "compress_ratios": (0, 0, 2, 2, 1, 1, 0, 0, 0),
        "kv_source_layer_ids": (2, 4),
        "index_source_layer_ids": (2, 4, 5),
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 16,
        "candidate_block_size": 8,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_factor": 16.0,
        "rope_beta_fast": 32.0,
        "rope_beta_slow": 1.0,
        "rope_original_length": 65536,
        "hc_sinkhorn_iters": 8,
        "engram_layer_ids": (1, 3),
        "engram_vocab_size": 4096,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": (3, 4, 5),
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 1,
    }
    return ModelConfig(**{**sizes, **changes})


def with_tokens(config: ModelConfig, token_map: np.ndarray, noise_token: int) -> ModelConfig:
    """The config with what follows from the tokenizer: vocabulary, Engram's ids and table lengths, the mask token."""
    config = dataclasses.replace(
        config,
        vocab_size=len(token_map),
        dspark_noise_token_id=noise_token,
        engram_compressed_vocab_size=int(token_map.max()) + 1,
        engram_pad_token_id=int(token_map[config.pad_token_id]),
    )
    rows = tuple(int(hashing.primes.sum()) for hashing in engram_constants(config))
    return ModelConfig.from_dict(dataclasses.replace(config, engram_num_embeddings=rows).to_dict())
