"""The drafter of an official folder as a DSpark GGUF beside a model's."""

from __future__ import annotations

import os
from pathlib import Path

from mlx_ds4.checkpoint import CheckpointError, compare, drafter_weights, gguf_shape, official_parts
from mlx_ds4.formats.safetensors import SafetensorsFolder
from mlx_ds4.model.dspark import stage_config
from mlx_ds4.sources import read_config

from .gguf_writer import GGUFTensor, Record, write_gguf
from .recipe import RECIPES
from .to_gguf import ALIGNMENT, pieces


def drafter_to_gguf(
    folder: str | os.PathLike, path: str | os.PathLike, recipe: str = "mxfp4", *, alignment: int = ALIGNMENT
) -> None:
    """Writes the `mtp.` tensors of an official folder as the GGUF `path`, which `load_drafter` opens.

    FP4 experts keep their bits with the recipe mxfp4; the other matrices become Q8_0. ValueError for a folder without a
    complete drafter, or widths that the recipe cannot hold; nothing is left under `path` then.
    """
    source, chosen = Path(folder), RECIPES[recipe]
    tensors, config = SafetensorsFolder(source), read_config(source)
    if not any(name.startswith("mtp.") for name in tensors.tensors):
        raise CheckpointError(f"{source}: holds no drafter (no mtp. tensors): name a folder of a release that has one")
    weights = drafter_weights(stage_config(config), len(config.dspark_target_layer_ids))
    compare(official_parts(weights), tensors.tensors, where=str(source), allow_extra=True)
    settings: tuple[Record, ...] = (
        ("block_size", "u32", config.dspark_block_size),
        ("markov_rank", "u32", config.dspark_markov_rank),
        ("noise_token_id", "u32", config.dspark_noise_token_id),
        ("target_layer_ids", "[i32]", config.dspark_target_layer_ids),
        ("stage_count", "u32", config.num_nextn_predict_layers),
        ("expert_count", "u32", config.dspark_n_routed_experts),
        ("expert_used_count", "u32", config.dspark_num_experts_per_tok),
        ("sliding_window", "u32", config.sliding_window),
    )
    records = [
        ("general.architecture", "string", "deepseek41-dspark"),
        ("general.alignment", "u32", alignment),
        *((f"deepseek4.dspark.{name}", kind, value) for name, kind, value in settings),
    ]
    out = [GGUFTensor(w.gguf, gguf_shape(w), chosen.type_of(w), pieces(tensors, w, chosen, None)) for w in weights]
    write_gguf(path, records, out, alignment=alignment)
