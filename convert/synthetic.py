"""Models of random numbers in both source formats, for tests, for trying things out and for planning.

    python -m mlx_ds4.convert.synthetic --tiny --format gguf --recipe q2 --out tiny.gguf
    python -m mlx_ds4.convert.synthetic --sparse-full --tokenizer FOLDER --out full.gguf

The same config and seed give the same bytes. The structure is that of the release: every kind of tensor,
its name, type and layout; only the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlx_ds4.checkpoint import (
    Weight,
    gguf_shape,
    model_weights,
    official_bytes,
    official_names,
    scale_name,
    scale_shape,
)
from mlx_ds4.config import ModelConfig
from mlx_ds4.engram_map import engram_token_map
from mlx_ds4.formats.quant_encode import encode, encode_fp4_rows, encode_fp8_tiles
from mlx_ds4.model.engram import engram_constants
from mlx_ds4.tokenizer import Tokenizer

from .gguf_metadata import metadata_records
from .gguf_writer import GGUFTensor, write_gguf
from .official_config import RELEASED_ROPE, official_config, released_config
from .official_writer import StoredTensor, write_official
from .recipe import RECIPES
from .synthetic_tokenizer import synthetic_tokenizer
from .to_gguf import ALIGNMENT, official_to_gguf


def tiny_config() -> ModelConfig:
    """Six layers that show every kind: window only, ratio 2 and 1, owners of keys, of an index, of candidates,
    a layer that reuses them, Engram with and without compression. All K-quant rows are whole blocks."""
    return ModelConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=6,
        moe_intermediate_size=256,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        sliding_window=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        compress_ratios=(0, 0, 2, 2, 1, 1),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 5),
        index_n_heads=4,
        index_head_dim=32,
        index_topk=8,
        candidate_source_layer_id=4,
        candidate_topk_blocks=4,
        candidate_block_size=2,
        **RELEASED_ROPE,
        engram_layer_ids=(1, 2),
        engram_vocab_size=97,
        engram_n_heads=2,
        engram_head_dim=64,
        # engram_num_embeddings and engram_compressed_vocab_size follow from these and the tokenizer
    )


def synthetic_official(folder: str | os.PathLike, config: ModelConfig, seed: int = 0) -> None:
    """Writes an official folder of random weights, in about three shards.

    Table lengths and the number of distinct tokens are set to what hash and tokenizer give. ValueError for
    a vocabulary too small for the tokenizer.
    """
    tokenizer = synthetic_tokenizer(config.vocab_size)
    config = _with_engram(config, tokenizer)
    weights = model_weights(config)
    raw = {**official_config(config), "image_token_id": config.vocab_size - 1}
    tensors = [tensor for weight in weights for tensor in _stored(weight, seed)]
    tokenizer.save(folder)
    write_official(folder, raw, tensors, shard_bytes=sum(map(official_bytes, weights)) // 3 + 1)


def synthetic_gguf(
    path: str | os.PathLike, config: ModelConfig, recipe: str, seed: int = 0, *, alignment: int = ALIGNMENT
) -> None:
    """Writes the same model as a ds4 GGUF; ValueError for widths that the recipe's blocks do not divide."""
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        synthetic_official(folder, config, seed)
        official_to_gguf(folder, path, recipe, alignment=alignment)


def sparse_full(path: str | os.PathLike, tokenizer: Tokenizer, recipe: str = "q2") -> None:
    """Writes a GGUF of the released sizes whose weights are a hole: hundreds of GiB apparent, a few MB on disk.

    Header and offsets are those of a real file, as long as `tokenizer` is the released one. ValueError when
    it has another vocabulary.
    """
    raw = released_config()
    config = ModelConfig.from_dict(raw)
    token_map = engram_token_map(tokenizer)
    if (len(token_map), int(token_map.max()) + 1) != (config.vocab_size, config.engram_compressed_vocab_size):
        raise ValueError(
            f"the tokenizer has {len(token_map)} tokens with {int(token_map.max()) + 1} distinct texts, expected "
            f"{config.vocab_size} and {config.engram_compressed_vocab_size}: give the released tokenizer"
        )
    chosen = RECIPES[recipe]
    records = metadata_records(
        raw, tokenizer.gguf_metadata(), token_map, engram_constants(config),
        recipe=chosen, alignment=ALIGNMENT, calibration="none",
    )  # fmt: skip
    records.append(("quantize.imatrix.file", "string", "none"))  # published files have this optional record
    tensors = [GGUFTensor(w.gguf, gguf_shape(w), chosen.type_of(w), None) for w in model_weights(config)]
    write_gguf(path, records, tensors, alignment=ALIGNMENT)


def _with_engram(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    if not config.engram_layer_ids:
        return config
    token_map = engram_token_map(tokenizer)
    config = dataclasses.replace(
        config,
        engram_compressed_vocab_size=int(token_map.max()) + 1,
        engram_pad_token_id=int(token_map[config.pad_token_id]),
    )
    rows = tuple(int(hashing.primes.sum()) for hashing in engram_constants(config))
    return dataclasses.replace(config, engram_num_embeddings=rows)


def _stored(weight: Weight, seed: int) -> Iterator[StoredTensor]:
    """The release's tensors of one weight with their bytes; each weight draws from a stream of its own."""
    for name in official_names(weight):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        shape = weight.shape[-2:]
        if weight.storage in ("F32", "BF16"):
            values = encode(weight.storage, _values(weight, rng).reshape(-1, weight.shape[-1]))
            yield name, weight.storage, weight.shape, _once(values)
            continue
        if weight.storage == "ROWS":
            codes = rng.integers(0, 255, shape, np.uint8)
            codes[(codes & 127) == 127] = 0  # not a number
            scales = rng.integers(116, 122, scale_shape(weight), np.uint8)
        elif weight.storage == "FP8":
            codes, scales = encode_fp8_tiles(_values(weight, rng))
        else:
            codes, scales = encode_fp4_rows(_values(weight, rng))
        yield name, "I8" if weight.storage == "FP4" else "F8_E4M3", codes.shape, _once(codes)
        yield scale_name(name), "F8_E8M0", scales.shape, _once(scales)


def _once(array: np.ndarray):
    return lambda: [array]


def _values(weight: Weight, rng: np.random.Generator) -> np.ndarray:
    """Random float32 values of the size that a trained weight of this role has."""
    shape = weight.shape[-2:]
    noise = rng.standard_normal(shape, np.float32)
    if weight.name.endswith(("bias", "bias_vl", "_base", "attn_sink")):
        return np.float32(0.05) * noise
    if weight.name.endswith(("norm.weight", "_scale", "q_weight", "k_weight")):
        return 1 + np.float32(0.05) * noise
    # Logits should prefer some tokens, and the router some experts, clearly.
    gain = {"embedding": math.sqrt(shape[-1]), "head": 3.0, "router": 2.0}.get(weight.role, 1.0)
    return noise * np.float32(gain / math.sqrt(shape[-1]))


# ---- command -----------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command line; returns 2 after a one-line error for arguments that do not work."""
    parser = argparse.ArgumentParser(prog="python -m mlx_ds4.convert.synthetic", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tiny", action="store_true", help="the small config that the package ships")
    what.add_argument("--config", type=Path, metavar="FILE", help="a config.json with other sizes")
    what.add_argument("--sparse-full", action="store_true", help="the released sizes as a GGUF without weights")
    parser.add_argument("--out", type=Path, required=True, help="file (gguf) or folder (official) to write")
    parser.add_argument("--format", choices=("official", "gguf"), default="gguf")
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="q2", help="types of a GGUF (default: q2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alignment", type=int, default=32, help="of a GGUF; published files have 16384")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="the released tokenizer, for --sparse-full")
    args = parser.parse_args(argv)
    try:
        if args.sparse_full:
            if args.tokenizer is None:
                raise ValueError("--sparse-full needs --tokenizer, the folder with the released tokenizer.json")
            sparse_full(args.out, Tokenizer.from_folder(args.tokenizer), args.recipe)
            return 0
        config = tiny_config() if args.tiny else ModelConfig.from_dict(json.loads(args.config.read_text()))
        if args.format == "official":
            synthetic_official(args.out, config, args.seed)
        else:
            synthetic_gguf(args.out, config, args.recipe, args.seed, alignment=args.alignment)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
