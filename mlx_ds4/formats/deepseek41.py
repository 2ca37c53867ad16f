"""What the metadata of a DeepSeek V4.1 GGUF (architecture `deepseek41`, the dialect of ds4) must say.

Two strengths: structural checks take every dimension from the file and ask for consistency; strict ones
ask for the numbers of the released model as well. Files of other kinds are recognised and named. Not
here: the tensor inventory (the checkpoint's list) and contradictions with the JSON in
`deepseek41.config` (`ModelConfig.from_gguf`).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.formats.gguf_header import show
from mlx_ds4.formats.metadata_reader import MetadataReader
from mlx_ds4.formats.sidecar import VISION_ARCHITECTURES, is_drafter
from mlx_ds4.formats.vocabulary import check_tokenizer

_PREFIX = "deepseek41."
_INT64_MAX = (1 << 63) - 1
_ENCODING = re.compile(r"e4m3_e8m0_32_row(\d{1,6})")

# key after "deepseek41." -> stored type and value in the release
_RELEASE: dict[str, tuple[str, Any]] = {
    "vocab_size": ("u32", 129280),
    "hidden_size": ("u32", 5120),
    "moe_intermediate_size": ("u32", 2304),
    "num_hidden_layers": ("u32", 40),
    "num_attention_heads": ("u32", 64),
    "num_key_value_heads": ("u32", 1),
    "head_dim": ("u32", 512),
    "qk_rope_head_dim": ("u32", 64),
    "q_lora_rank": ("u32", 1280),
    "o_lora_rank": ("u32", 1024),
    "o_groups": ("u32", 8),
    "n_routed_experts": ("u32", 384),
    "n_shared_experts": ("u32", 1),
    "num_experts_per_tok": ("u32", 6),
    "max_position_embeddings": ("u32", 1048576),
    "sliding_window": ("u32", 128),
    "index_n_heads": ("u32", 32),
    "index_head_dim": ("u32", 128),
    "index_topk": ("u32", 512),
    "candidate_source_layer_id": ("u32", 20),
    "candidate_topk_blocks": ("u32", 2048),
    "candidate_block_size": ("u32", 8),
    "hc_mult": ("u32", 4),
    "hc_sinkhorn_iters": ("u32", 20),
    "rope_theta": ("u32", 10000),
    "compress_rope_theta": ("u32", 160000),
    "rms_norm_eps": ("f32", 1e-20),
    "hc_eps": ("f32", 1e-6),
    "swiglu_limit": ("f32", 10.0),
    "routed_scaling_factor": ("f32", 1.5),
    "scoring_func": ("string", "sqrtsoftplus"),
    "hidden_act": ("string", "silu"),
    "topk_method": ("string", "noaux_tc"),
    "norm_topk_prob": ("bool", True),
    "compress_ratios": ("[u32]", [0] * 2 + [2] * 18 + [1] * 20),
    "kv_source_layer_ids": ("[u32]", [2, 8, 14, 20]),
    "index_source_layer_ids": ("[u32]", [2, 8, 14, 20, 24, 28, 32, 36]),
    "rope_scaling.factor": ("f32", 16.0),
    "rope_scaling.beta_fast": ("f32", 32.0),
    "rope_scaling.beta_slow": ("f32", 1.0),
    "rope_scaling.original_max_position_embeddings": ("f32", 65536.0),
}
_RELEASE_ENGRAM: dict[str, tuple[str, Any]] = {
    "engram.encoding": ("string", "e4m3_e8m0_32_row264"),
    "engram.layer_ids": ("[u32]", [1, 14]),
    "engram.rows": ("[u32]", [384006168, 384016682]),
    "engram.compressed_vocab_size": ("u32", 99092),
    "engram.pad_id": ("u32", 2),
    "engram.token_map": ("[u32]", None),
    "engram.primes": ("[u32]", None),
    "engram.multipliers": ("[u64]", None),
}
_RELEASE_OTHER: dict[str, tuple[str, Any]] = {
    "general.alignment": ("u32", 16384),
    _PREFIX + "config": ("string", None),
    "tokenizer.ggml.model": ("string", "gpt2"),
    "tokenizer.ggml.tokens": ("[string]", None),
    "tokenizer.ggml.token_type": ("[i32]", None),
    "tokenizer.ggml.merges": ("[string]", None),
    "tokenizer.ggml.bos_token_id": ("u32", 0),
    "tokenizer.ggml.eos_token_id": ("u32", 1),
}
_ZERO_ALLOWED = {"candidate_source_layer_id", "hc_sinkhorn_iters", "engram.pad_id", "tokenizer.ggml.bos_token_id"}


def check_metadata(gguf: GGUFFile, strict: bool = False) -> list[str]:
    """Checks the metadata of a `deepseek41` file, its Engram tables' geometry and its tokenizer's arrays.

    Structural by default: integers of any width are accepted where u32 is usual, a file may do without
    Engram (then without any `engram.*` key), and one without tokenizer draws a warning. With `strict`,
    types and values must be those of the release. Returns warnings, one sentence each. Raises FormatError
    for the first fault, naming key, found and expected, and for files of another kind or dialect.
    """
    reader = MetadataReader(gguf, strict=strict)
    _check_kind(reader)
    _check_released(reader, _RELEASE, _PREFIX)
    if strict:
        _check_released(reader, _RELEASE_OTHER, "")
    _check_layers(reader)
    if strict or any(key.startswith(_PREFIX + "engram.") for key in gguf.metadata):
        _check_engram(reader)
    if strict or "tokenizer.ggml.model" in gguf.metadata:
        check_tokenizer(reader)
    else:
        reader.warnings.append("the file holds no tokenizer, only token ids can be used with it")
    rest = gguf.size - max(tensor.offset + tensor.nbytes for tensor in gguf.tensors.values())
    if rest > gguf.alignment:
        reader.warnings.append(f"{rest} bytes follow the last tensor, expected at most {gguf.alignment}")
    return reader.warnings


def _check_released(reader: MetadataReader, table: dict[str, tuple[str, Any]], prefix: str) -> None:
    """Checks the types of a table's keys, their values when strict, and names of algorithms always."""
    for key, (stored, wanted) in table.items():
        value = reader.value(prefix + key, stored)
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        if stored in ("u32", "f32") and plain == 0 and key not in _ZERO_ALLOWED:
            reader.fail(f"{prefix}{key} is 0, expected a positive number: the file is damaged")
        if wanted is None or not (reader.strict or stored in ("string", "bool")):
            continue
        same = abs(plain - wanted) <= 1e-5 * abs(wanted) if stored == "f32" else plain == wanted
        if not same:
            reader.fail(f"{prefix}{key} is {plain!r:.100}, expected {wanted!r:.100}: use a file of the released model")


# ---- kinds of files ----------------------------------------------------------------------------------


def _check_kind(reader: MetadataReader) -> None:
    gguf, kind = reader.gguf, reader.gguf.architecture
    if not kind:
        reader.fail("general.architecture is missing or no string, expected 'deepseek41': the file is no model")
    if is_drafter(gguf):
        reader.fail(f"this is a DSpark drafter ({show(kind)}), expected a model: pass it as the draft model")
    if kind in VISION_ARCHITECTURES:
        reader.fail(f"this is a vision encoder ({show(kind)}), expected the text model's file")
    if kind == "deepseek4":
        reader.fail("this is a DeepSeek V4 model ('deepseek4'), expected V4.1 ('deepseek41'): V4 is not supported")
    if kind != "deepseek41":
        reader.fail(f"general.architecture is {show(kind)}, expected 'deepseek41' (DeepSeek V4.1)")
    dialect = _foreign_dialect(gguf)
    if dialect:
        reader.fail(f"{dialect}, expected ds4's dialect: use a ds4 GGUF or convert the official release")


def _foreign_dialect(gguf: GGUFFile) -> str | None:
    if "deepseek41.block_count" in gguf.metadata:
        return "the file uses llama.cpp's V4.1 names (deepseek41.block_count)"
    for name in gguf.tensors:
        if name.endswith((".engram_embed.weight", ".engram_wkv.weight", ".engram_q.weight")):
            return f"the file uses the tensor names of mxxm-t's V4.1 dialect ({show(name)})"
    return None


# ---- parts of the model ------------------------------------------------------------------------------


def _check_layers(reader: MetadataReader) -> None:
    layers = reader.value(_PREFIX + "num_hidden_layers", "u32")
    ratios = reader.value(_PREFIX + "compress_ratios", "[u32]")
    if len(ratios) != layers:
        reader.fail(f"deepseek41.compress_ratios has {len(ratios)} entries, expected {layers}, one per layer")
    if np.setdiff1d(ratios, (0, 1, 2)).size:
        reader.fail(f"deepseek41.compress_ratios holds {int(ratios.max())}, expected only 0, 1 and 2")
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_ids(reader, _PREFIX + key, layers)
    source = reader.value(_PREFIX + "candidate_source_layer_id", "u32")
    if source >= layers:
        reader.fail(f"deepseek41.candidate_source_layer_id is {source}, expected a layer below {layers}")


def _check_ids(reader: MetadataReader, key: str, layers: int) -> list[int]:
    ids = reader.value(key, "[u32]").tolist()
    if ids != sorted(set(ids)) or (ids and ids[-1] >= layers):
        reader.fail(f"{key} is {ids!r:.100}, expected increasing layer numbers below {layers}")
    return ids


def _check_engram(reader: MetadataReader) -> None:
    if "conversion_underway" in str(reader.gguf.metadata.get(_PREFIX + "engram.encoding")):
        reader.fail("engram.encoding is conversion_underway: an in-place conversion was interrupted, download again")
    get = {key: reader.value(_PREFIX + key, stored) for key, (stored, _) in _RELEASE_ENGRAM.items()}
    encoding = get["engram.encoding"]
    named = _ENCODING.fullmatch(encoding)
    width = int(named[1]) if named else 0
    if not width or width % 33:
        reader.fail(
            f"deepseek41.engram.encoding is {show(encoding)}, expected e4m3_e8m0_32_row<N> with N = D + D/32: "
            "use a file with FP8 Engram tables"
        )
    if reader.strict:
        _check_released(reader, _RELEASE_ENGRAM, _PREFIX)
    layers = reader.value(_PREFIX + "num_hidden_layers", "u32")
    ids = _check_ids(reader, _PREFIX + "engram.layer_ids", layers)
    rows = get["engram.rows"].tolist()
    if len(rows) != len(ids):
        reader.fail(f"deepseek41.engram.rows has {len(rows)} entries, expected {len(ids)}, one per Engram layer")
    _check_hashing(reader, get, ids, rows, width // 33 * 32)
    _check_tables(reader, ids, rows, width)


def _check_hashing(reader: MetadataReader, get: dict[str, Any], ids: list[int], rows: list[int], dim: int) -> None:
    compressed = get["engram.compressed_vocab_size"]
    if get["engram.pad_id"] >= compressed:
        reader.fail(f"deepseek41.engram.pad_id is {get['engram.pad_id']}, expected less than {compressed}")
    vocab = reader.value(_PREFIX + "vocab_size", "u32")
    token_map = get["engram.token_map"]
    if len(token_map) != vocab:
        reader.fail(f"deepseek41.engram.token_map has {len(token_map)} entries, expected {vocab}, one per token")
    largest = int(token_map.max(initial=0))
    if largest >= compressed or (reader.strict and largest != compressed - 1):
        reader.fail(f"deepseek41.engram.token_map reaches {largest}, expected {compressed - 1} at most")
    if not ids:
        return

    primes, multipliers = get["engram.primes"], get["engram.multipliers"]
    text = reader.config()
    orders, heads = (_whole(text.get(key)) for key in ("engram_max_ngram_size", "engram_n_heads"))
    if text.get("engram_head_dim", dim) != dim:
        reader.fail(f"deepseek41.engram.encoding has rows of {dim} values, expected {text['engram_head_dim']}")
    for key, values, per_layer in (
        ("multipliers", multipliers, orders),
        ("primes", primes, orders and heads and (orders - 1) * heads),
    ):
        wanted = len(values) // len(ids) * len(ids) if per_layer is None else per_layer * len(ids)
        if len(values) != wanted or not wanted:
            reader.fail(f"deepseek41.engram.{key} has {len(values)} entries, expected {wanted or len(ids)}")
    if int(primes.min()) < 2 or len(np.unique(primes)) != len(primes):
        reader.fail("deepseek41.engram.primes holds a number below 2 or a repeated one, expected distinct primes")
    sums = [sum(part) for part in primes.reshape(len(ids), -1).tolist()]
    if sums != rows:
        reader.fail(f"deepseek41.engram.rows is {rows!r:.60}, expected the sums of the primes {sums!r:.60}")
    if not (multipliers & multipliers.dtype.type(1)).all() or int(multipliers.max()) > _INT64_MAX // compressed:
        reader.fail(
            f"deepseek41.engram.multipliers holds an even number or one above {_INT64_MAX // compressed}, "
            "expected odd numbers whose products fit 63 bits"
        )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _check_tables(reader: MetadataReader, ids: list[int], rows: list[int], width: int) -> None:
    tensors = reader.gguf.tensors
    tables = {f"blk.{layer}.engram_embd.weight": count for layer, count in zip(ids, rows, strict=True)}
    for name, count in tables.items():
        if name not in tensors:
            reader.fail(
                f"the Engram table {name} is missing: files that keep Engram in a second file are not supported, "
                "use one that holds everything"
            )
        info = tensors[name]
        if info.type_name != "I8" or info.shape != (count, width):
            reader.fail(f"{name} is {info.type_name} {list(info.shape)}, expected I8 [{count}, {width}]")
    first = min((tensors[name].offset for name in tables), default=0)
    for name, info in tensors.items():
        if tables and name not in tables and info.offset > first:
            reader.fail(f"{show(name)} lies behind an Engram table, expected the tables last: the file was rearranged")
