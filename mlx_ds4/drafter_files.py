"""Drafters on disk: the `mtp.` tensors of an official or a converted folder, or a DSpark GGUF of any dialect."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_ds4 import checkpoint
from mlx_ds4.checkpoint import CheckpointError, Weight
from mlx_ds4.config import ConfigError, ModelConfig
from mlx_ds4.converted import ConvertedArrays, need, refuse_unfinished, section_of
from mlx_ds4.formats.folder_layout import SECTION
from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.formats.metadata_reader import MetadataReader
from mlx_ds4.formats.safetensors import SafetensorsFolder
from mlx_ds4.formats.sidecar import check_drafter, drafter_value, is_drafter
from mlx_ds4.loader import NotEnoughMemoryError, Progress, bind, machine_memory
from mlx_ds4.model.dspark import Drafter, stage_config
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.model.model import Model
from mlx_ds4.sources import GGUFSource, OfficialSource, read_config_json

# Setting of the config -> its names in a GGUF, behind any of the dialects' prefixes.
_SETTINGS = {
    "dspark_block_size": ("block_size",),
    "dspark_markov_rank": ("markov_rank",),
    "dspark_noise_token_id": ("noise_token_id",),
    "dspark_target_layer_ids": ("target_layer_ids",),
    "num_nextn_predict_layers": ("stage_count", "n_layers"),
    "dspark_n_routed_experts": ("expert_count",),
    "dspark_num_experts_per_tok": ("expert_used_count",),
    "sliding_window": ("sliding_window", "window_size"),
}
# ds4's name behind the stage -> llama.cpp's, for what belongs to no single stage there.
_LLAMA_CPP = {
    "main_proj": "fc",
    "main_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


class DrafterSource(Protocol):
    """What loading needs of a drafter's file: its weights, and the model's config with the drafter's settings."""

    path: Path
    kind: str
    config: ModelConfig
    weights: list[Weight]

    def nbytes(self, weight: Weight) -> int: ...

    def read(self, weight: Weight) -> mx.array | BlockWeight: ...


class ReleasedDrafter(OfficialSource):
    """The drafter of a release's folder."""

    def __init__(self, path: Path, target: ModelConfig, raw: dict[str, Any]):
        self.path, self.folder = path, SafetensorsFolder(path)
        own = ModelConfig.from_dict(raw)
        self.config = _merged(target, drafter_settings(own), str(path))
        if any(name.startswith("mtp.") and "hc_head" in name for name in self.folder.tensors):
            raise CheckpointError(f"{path}: this is the drafter of DeepSeek V4, expected one of V4.1: use its release")
        if not any(name.startswith("mtp.") for name in self.folder.tensors):
            raise _none(path)
        self.weights = _weights(self.config)
        checkpoint.compare(
            checkpoint.official_parts(self.weights), self.folder.tensors, where=str(path), allow_extra=True
        )


class ConvertedDrafter(ConvertedArrays):
    """The drafter of a converted folder, in the planes of its source."""

    def __init__(self, path: Path, target: ModelConfig, raw: dict[str, Any]):
        drafter = section_of(path, raw)["drafter"]
        if drafter is None:
            raise _none(path)
        good = isinstance(drafter, dict) and {"settings", "formats"} <= drafter.keys()
        good = good and isinstance(drafter["settings"], dict) and drafter["settings"].keys() == _SETTINGS.keys()
        need(good, path, "does not describe its drafter")
        self.config = _merged(target, drafter["settings"], str(path))
        self.weights = _weights(self.config)
        super().__init__(path, self.weights, drafter["formats"])
        self.open_shards(allow_extra=True)


class GGUFDrafter(GGUFSource):
    """A DSpark GGUF."""

    def __init__(self, path: Path, target: ModelConfig):
        self.path, self.gguf = path, GGUFFile(path)
        check_drafter(self.gguf)
        json = MetadataReader(self.gguf).config()
        found = {name: json[name] for name in _SETTINGS if name in json}
        found |= {n: v for n, keys in _SETTINGS.items() if (v := drafter_value(self.gguf, *keys)) is not None}
        stacked = (t.shape[0] for t in self.gguf.tensors.values() if t.name.endswith("ffn_gate_exps.weight"))
        found.setdefault("dspark_n_routed_experts", next(stacked, 0))
        self.config = _merged(target, found, str(path))
        self.weights = [self._spelled(weight) for weight in _weights(self.config)]
        checkpoint.compare(checkpoint.gguf_parts(self.weights), self.gguf.tensors, where=str(path), allow_extra=True)

    def _spelled(self, weight: Weight) -> Weight:
        """The weight under its name in this file."""
        if "fc.weight" not in self.gguf.tensors:
            return weight
        _, stage, rest = weight.gguf.split(".", 2)
        name = _LLAMA_CPP.get(rest.removesuffix(".weight"))
        return dataclasses.replace(weight, gguf=f"{name}.weight" if name else f"blk.{stage}.{rest}")


def open_drafter(path: str | os.PathLike, target: ModelConfig) -> DrafterSource:
    """Opens the drafter in a folder or a DSpark GGUF and checks that it fits the model `target`; see `load_drafter`."""
    path = Path(path)
    if not path.is_dir():
        return GGUFDrafter(path, target)
    refuse_unfinished(path)
    raw = read_config_json(path)
    return (ConvertedDrafter if SECTION in raw else ReleasedDrafter)(path, target, raw)


def drafter_settings(config: ModelConfig) -> dict[str, Any]:
    """What a config says of the drafter alone, as plain values."""
    values = config.to_dict()
    return {name: values[name] for name in _SETTINGS}


def load_drafter(
    model: Model,
    path: str | os.PathLike,
    *,
    progress: Progress | None = None,
    memory_limit: int | None = None,
) -> Drafter:
    """Loads the drafter of `model` from a folder or a DSpark GGUF, and makes the model give its taps.

    The same checks as in loading a model come first: every tensor in the right shape and type, and the drafter's
    settings those of this model; the names that a file adds are ignored. `progress` as in `load_model`;
    `memory_limit` counts the weights of both (default: this machine's memory).

    Raises FormatError for damaged files (scales that are NaN or infinite, by tensor name), ConfigError and
    CheckpointError for the drafter of another model, such as V4's, and NotEnoughMemoryError.
    """
    source = open_drafter(path, model.config)
    total = sum(map(source.nbytes, source.weights))
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    limit = machine_memory() if memory_limit is None else memory_limit
    if held + total > limit:
        raise NotEnoughMemoryError(
            f"{path}: model and drafter take {held + total} bytes but {limit} are available: leave the drafter out"
        )
    drafter = Drafter(source.config)
    done = 0
    for weight in source.weights:
        bind(drafter, weight, source.read(weight))
        done += source.nbytes(weight)
        if progress:
            progress(done, total, weight.name)
        mx.clear_cache()
    model.tap(drafter.target_layer_ids)
    return drafter


def find_drafter(path: str | os.PathLike) -> Path:
    """The drafter that lies beside a model: in the same folder, or the one DSpark GGUF in the folder.

    Of GGUF files only those with 'dspark' in their name are opened. Raises ValueError when there is none or several.
    """
    path = Path(path)
    shards = path.is_dir() and any(path.glob("model*.safetensors*"))
    if shards and any(name.startswith("mtp.") for name in SafetensorsFolder(path).tensors):
        return path
    folder = path if path.is_dir() else path.parent
    found = []
    for file in sorted(folder.glob("*.gguf")):
        if "dspark" in file.name.lower() and file != path:
            with GGUFFile(file) as gguf:
                if is_drafter(gguf):
                    found.append(file)
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise CheckpointError(f"{folder}: expected one drafter beside the model, found {names}: name its file")
    return found[0]


def _none(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: holds no drafter (no mtp. tensors): name a DSpark GGUF file")


def _weights(config: ModelConfig) -> list[Weight]:
    return checkpoint.drafter_weights(stage_config(config), len(config.dspark_target_layer_ids))


def _merged(target: ModelConfig, found: Mapping[str, Any], where: str) -> ModelConfig:
    """The target's config with the drafter's own settings; ConfigError where the two contradict each other."""
    known = target.to_dict()
    known["compress_ratios"] = known["compress_ratios"][: target.num_hidden_layers]
    try:
        config = ModelConfig.from_dict({**known, **found})
        stage_config(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for name in ("sliding_window", "dspark_n_routed_experts"):
        ours, theirs = getattr(target, name), getattr(config, name)
        if ours and ours != theirs:
            raise ConfigError(
                f"{where}: {name} is {theirs}, the model's is {ours}: this drafter belongs to another model"
            )
    return config
