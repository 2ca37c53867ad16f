"""From trained weights to the release's folder and to GGUF files of several recipes, with an imatrix.

The weights are stored as they were trained: FP8, FP4 and Engram rows are encoded from values that these formats hold
exactly, which `official_folder` checks. The imatrix has the mean squares of every matrix's inputs over
windows of the training text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_ds4.checkpoint import Weight, drafter_weights, model_weights, official_bytes, official_names, scale_name
from mlx_ds4.config import ModelConfig
from mlx_ds4.convert.drafter_to_gguf import drafter_to_gguf
from mlx_ds4.convert.imatrix import write_imatrix
from mlx_ds4.convert.official_config import official_config
from mlx_ds4.convert.official_writer import StoredTensor, write_official
from mlx_ds4.convert.to_gguf import official_to_gguf
from mlx_ds4.formats import quant_encode as qe
from mlx_ds4.formats.quant_blocks import E4M3, E8M0
from mlx_ds4.model.dspark import stage_config
from mlx_ds4.tokenizer import Tokenizer

from .batches import Data
from .forward import Named, Pass, forward
from .train import read_weights

RECIPES = ("q2", "q4", "mxfp4", "f16")
_BATCH = 4


def export(data: Path, run: Path, out: Path, recipes: Sequence[str] | None, windows: int) -> None:
    """Writes `out/official`, `out/small.imatrix`, `out/small-RECIPE.gguf` and `out/small-dspark.gguf`."""
    prepared = Data(data)
    named = {**read_weights(run, "model"), **read_weights(run, "drafter")}
    folder, imatrix = out / "official", out / "small.imatrix"
    official_folder(folder, prepared.config, {k: np.array(v) for k, v in named.items()}, Tokenizer.from_folder(data))
    write_imatrix(imatrix, importance(prepared, named, windows))
    for recipe in recipes or RECIPES:
        path = out / f"small-{recipe}.gguf"
        official_to_gguf(folder, path, recipe, imatrix=None if recipe in ("f16", "f32") else imatrix, alignment=32)
        print(f"{path}: {path.stat().st_size} bytes")
    path = out / "small-dspark.gguf"
    drafter_to_gguf(folder, path, alignment=32)
    print(f"{path}: {path.stat().st_size} bytes")


def official_folder(folder: Path, config: ModelConfig, values: dict[str, np.ndarray], tokenizer: Tokenizer) -> None:
    """Writes the release's folder; `values` float32 by name, experts stacked. ValueError when a value does not fit its
    storage exactly."""
    weights = model_weights(config) + drafter_weights(stage_config(config), len(config.dspark_target_layer_ids))
    tokenizer.save(folder)
    tensors = [tensor for weight in weights for tensor in _stored(weight, values)]
    write_official(folder, official_config(config), tensors, shard_bytes=sum(map(official_bytes, weights)) // 3 + 1)


def _stored(weight: Weight, values: dict[str, np.ndarray]) -> Iterator[StoredTensor]:
    if weight.name.endswith(".bias_vl"):  # of image tokens, which this model does not know
        array = np.zeros(weight.shape, np.float32)
    elif weight.name not in values:
        raise ValueError(f"the trained weights lack {weight.name}: name the folder of a finished run")
    else:
        array = values[weight.name]
    if array.shape != weight.shape:
        raise ValueError(f"{weight.name} is {list(array.shape)}, expected {list(weight.shape)}: other data was trained")
    for number, name in enumerate(official_names(weight)):
        part = array[number] if weight.storage == "FP4" else array
        if weight.storage in ("F32", "BF16"):
            raw = qe.encode(weight.storage, part.reshape(-1, part.shape[-1]))
            back = raw.view(np.float32) if weight.storage == "F32" else _from_bf16(raw)
            _check(weight, part, back.reshape(part.shape))
            yield name, weight.storage, weight.shape, lambda raw=raw: [raw]
            continue
        if weight.storage == "FP8":
            codes, scales = qe.encode_fp8_tiles(part)
            back = qe.decode_fp8_tiles(codes, scales)
        elif weight.storage == "FP4":
            codes, scales = qe.encode_fp4_rows(part)
            back = qe.decode_fp4_rows(codes, scales)
        else:
            codes, scales = qe.encode_fp8_rows(part)
            back = E4M3[codes] * E8M0[scales].repeat(32, axis=1)
        _check(weight, part, back)
        yield name, "I8" if weight.storage == "FP4" else "F8_E4M3", codes.shape, lambda raw=codes: [raw]
        yield scale_name(name), "F8_E8M0", scales.shape, lambda raw=scales: [raw]


def _from_bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _check(weight: Weight, wanted: np.ndarray, back: np.ndarray) -> None:
    if not np.array_equal(wanted, back):
        raise ValueError(f"{weight.name}: {weight.storage} does not hold the trained values exactly: train it rounded")


def importance(data: Data, named: Named, windows: int) -> dict[str, np.ndarray]:
    """GGUF name -> mean squares of the matrix's inputs [experts or 1, columns] over windows of the training text."""
    names = {w.name: w for w in model_weights(data.config)}
    totals: dict[str, np.ndarray] = {}
    for step in tqdm(range(max(1, windows // _BATCH)), desc="imatrix", unit="batch", leave=False):
        ids, _ = data.batch(99, step, _BATCH, 512)
        state = Pass(data.config, ids.shape[1], energies={})
        mx.eval(forward(named, named, data.config, mx.array(ids), data.rows(ids), state), state.energies)
        for name, energy in state.energies.items():
            found = np.array(energy).reshape(-1, energy.shape[-1])
            totals[name] = totals.get(name, 0) + found
    return {names[name].gguf: total for name, total in totals.items()}


def describe_run(run: Path) -> dict:
    """Steps, seconds and last losses of a run, from its log."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    out: dict = {"start": next(r for r in records if r.get("event") == "start")}
    for part in ("model", "draft"):
        out[part] = [r for r in records if r.get("part") == part and "loss" in r][-1]
    out["held"] = [r["held"] for r in records if "held" in r][-1]
    return out


__all__ = ["describe_run", "export", "importance", "official_folder"]
