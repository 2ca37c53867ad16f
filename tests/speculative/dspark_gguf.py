"""DSpark GGUF files of a drafter that is in memory, in every dialect of the metadata."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_ds4.checkpoint import drafter_weights
from mlx_ds4.convert.gguf_writer import GGUFTensor, write_gguf
from mlx_ds4.formats.quant_encode import encode
from mlx_ds4.model.linear import BlockWeight, dense

Values = dict[str, tuple[str, np.ndarray]]
SETTINGS = {
    "block_size": ("u32", 5),
    "markov_rank": ("u32", 32),
    "noise_token_id": ("u32", 498),
    "target_layer_ids": ("[i32]", [7, 8, 9]),
    "stage_count": ("u32", 3),
    "expert_count": ("u32", 8),
    "expert_used_count": ("u32", 2),
    "sliding_window": ("u32", 16),
}
LLAMA_CPP = {
    "mtp.0.main_proj.weight": "fc.weight",
    "mtp.0.main_norm.weight": "enc.output_norm.weight",
    "mtp.2.norm.weight": "output_norm.weight",
    "mtp.2.markov_head.markov_w1.weight": "markov_w1.weight",
    "mtp.2.markov_head.markov_w2.weight": "markov_w2.weight",
    "mtp.2.confidence_head.proj.weight": "conf_proj.weight",
}


DIALECTS = {
    "ds4": {},
    "ds4, older keys": {
        "architecture": "deepseek4-dspark",
        "prefix": "deepseek4.dspark_",
        "extra": [("dspark.checkpoint_variant", "string", "v4.1-flash")],
    },
    "llama.cpp": {
        "architecture": "dflash",
        "prefix": "dspark.",
        "spell": lambda name: LLAMA_CPP.get(name, name.replace("mtp.", "blk.")),
        "settings": {("n_layers" if k == "stage_count" else k): v for k, v in SETTINGS.items() if k != "expert_count"},
    },
}


def parameters(drafter) -> dict[str, mx.array | BlockWeight]:
    out = {}
    for name, module in drafter.named_modules():
        for key, value in module.items():
            if isinstance(value, BlockWeight) or (isinstance(value, mx.array) and not isinstance(module, BlockWeight)):
                out[f"{name}.{key}"] = value
    return out


def values_of(drafter) -> Values:
    """GGUF name -> our name and float32 values of every weight of a drafter."""
    held = parameters(drafter)
    weights = drafter_weights(drafter.config, len(drafter.target_layer_ids))
    assert set(held) == {w.name for w in weights}
    return {w.gguf: (w.name, np.array(dense(held[w.name]))) for w in weights}


def write(path: Path, values: Values, *, architecture="deepseek41-dspark", prefix="deepseek4.dspark.",
          settings=SETTINGS, extra=(), spell=lambda name: name, kinds=None, damaged=()) -> Path:  # fmt: skip
    """Writes a DSpark GGUF: vectors as F32, matrices as BF16 or as `kinds` says by name; in the `damaged` tensors the
    first block's scale is not a number."""
    records = [("general.architecture", "string", architecture), ("general.alignment", "u32", 32), *extra]
    records += [(prefix + name, *value) for name, value in settings.items()]
    tensors = []
    for name, (_, array) in values.items():
        kind = (kinds or {}).get(name) or ("F32" if array.ndim == 1 or "hc_" in name else "BF16")
        raw = encode(kind, array.reshape(-1, array.shape[-1]))
        if name in damaged:
            raw[0, :2] = (0, 0x7E)
        tensors.append(GGUFTensor(spell(name), array.shape, kind, lambda raw=raw: [raw]))
    write_gguf(path, records, tensors, alignment=32)
    return path


def blocks(values: Values) -> dict[str, str]:
    """Types of a quantized drafter by name: experts MXFP4, the other matrices of the stages Q8_0."""
    experts = {name: "MXFP4" for name in values if "_exps" in name}
    parts = ("attn_q_a.", "attn_q_b.", "attn_kv.", "attn_output", "_shexp", "main_proj", "markov_w1")
    return experts | {name: "Q8_0" for name in values if any(part in name for part in parts)}
