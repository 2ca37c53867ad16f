"""A small random model, its drafter, and the named weights that both hold."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from examples.small_model.shape import small_config, with_tokens
from mlx_ds4.formats import quant_encode as qe

VOCAB = 96


class MemoryRows:
    """A table in memory, in the records of a file."""

    def __init__(self, table: mx.array):
        self.records = np.concatenate(qe.encode_fp8_rows(np.array(table)), axis=1)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self.records[ids]


def tiny(**changes):
    sizes = {
        "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 64,
        "o_lora_rank": 32, "sliding_window": 8, "index_topk": 12, "candidate_topk_blocks": 4,
        "candidate_block_size": 4, "engram_vocab_size": 101, "dspark_markov_rank": 32,
    }  # fmt: skip
    token_map = np.minimum(np.arange(VOCAB), VOCAB - 7)
    return with_tokens(small_config(**{**sizes, **changes}), token_map, 5), token_map


def rows_of(system, ids: np.ndarray) -> dict[int, mx.array]:
    config, *_, token_map, hashes = system
    mapped = token_map[ids]
    return {
        i: mx.array(h.row_numbers(mapped, ids.shape[1])) for i, h in zip(config.engram_layer_ids, hashes, strict=True)
    }


def row_error(a: mx.array, b: mx.array) -> float:
    """Largest |a - b| / |b| of a row, Euclidean."""
    a, b = (np.array(v.astype(mx.float32)).reshape(-1, v.shape[-1]) for v in (a, b))
    return float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())


def ids_of(config, B, L):
    return np.random.default_rng(B * 1000 + L).integers(0, config.vocab_size, (B, L))
