"""From a file to a model: checks first, then one weight after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_ds4.checkpoint import Weight, model_weights
from mlx_ds4.config import ConfigError, ModelConfig
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.model.model import Model
from mlx_ds4.sources import Source, open_source
from mlx_ds4.tokenizer import Tokenizer

Progress = Callable[[int, int, str], None]


class NotEnoughMemoryError(ValueError):
    """Weights that are larger than the memory they may take."""


@dataclass(frozen=True)
class Description:
    """What a model file holds, from its header: `groups` are payload bytes by part of the model."""

    path: Path
    kind: str
    config: ModelConfig
    types: dict[str, int]
    groups: dict[str, int]

    @property
    def weight_bytes(self) -> int:
        """Bytes that stay in memory: everything but the Engram tables."""
        return sum(self.groups.values()) - self.table_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the Engram tables, which stay on the disk."""
        return self.groups.get("Engram tables", 0)


def describe(path: str | os.PathLike, *, strict: bool = True) -> Description:
    """Reads and checks the headers of a GGUF file or a folder; errors as `load_model`'s."""
    return _describe(open_source(path, strict=strict))


def _describe(source: Source) -> Description:
    groups: dict[str, int] = {}
    for weight in model_weights(source.config):
        groups[weight.group] = groups.get(weight.group, 0) + source.nbytes(weight)
    return Description(source.path, source.kind, source.config, dict(source.types), groups)


def load_model(
    path: str | os.PathLike,
    *,
    strict: bool = True,
    progress: Progress | None = None,
    activation_rounding: bool | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    memory_limit: int | None = None,
) -> tuple[Model, Tokenizer]:
    """Loads a ds4 GGUF file (or its first raw piece), an official or a converted folder: (model, tokenizer).

    Every tensor of the config must be there in the right shape and type; `strict=False` accepts tensors of
    unknown names beside them, and a GGUF of another size than the release. Weights are brought in one at a
    time, each evaluated before the next, so that loading needs memory for the largest one beyond the model
    itself; `progress(done, total, name)` is called with bytes after each. The Engram tables stay on the disk.
    `activation_rounding` makes the layers that training quantized round their inputs (True) or not (False);
    by default that follows from the formats. `config_overrides` replaces fields of the config that change no
    tensor.

    Raises NotEnoughMemoryError before anything is read if the weights exceed `memory_limit` bytes (default:
    this machine's memory), FormatError for damaged files, ConfigError and CheckpointError for models that
    are not DeepSeek V4.1 as this implementation knows it; all are ValueErrors.
    """
    source = open_source(path, strict=strict)
    total = _describe(source).weight_bytes
    limit = machine_memory() if memory_limit is None else memory_limit
    if total > limit:
        raise NotEnoughMemoryError(
            f"{path}: the weights take {total} bytes ({total / 2**30:.1f} GiB) but {limit} ({limit / 2**30:.1f} GiB) "
            "are available: use a machine with more memory or a smaller recipe, or pass a larger memory_limit"
        )
    config = source.config
    if config_overrides:
        config = ModelConfig.from_dict({**config.to_dict(), **config_overrides})
        if model_weights(config) != model_weights(source.config):
            raise ConfigError(f"{path}: overriding {', '.join(config_overrides)} changes tensors: leave them out")
    tokenizer = source.tokenizer()
    model = Model(config)
    if config.engram_layer_ids:
        model.set_engram(*source.engram(tokenizer))
    done = 0
    for weight in bound_weights(model, source.config):
        value = source.read(weight)
        bind(model, weight, value)
        done += source.nbytes(weight)
        if progress:
            progress(done, total, weight.name)
        mx.clear_cache()  # the pieces of this weight fit no other one
    rounding = source.activation_rounding if activation_rounding is None else activation_rounding
    for module in model.modules():
        if isinstance(getattr(type(module), "rounds_input", None), property):
            module.rounds_input = rounding
    return model, tokenizer


def bound_weights(model: Model, config: ModelConfig) -> list[Weight]:
    """The weights that the model has a place for: not the tables, not the image tokens' router bias."""
    weights = [w for w in model_weights(config) if w.storage != "ROWS" and not w.name.endswith(".bias_vl")]
    places = {name for name, _ in tree_flatten(model.parameters())}
    assert places == {w.name for w in weights}, places.symmetric_difference(w.name for w in weights)
    return weights


def bind(model: nn.Module, weight: Weight, value: mx.array | BlockWeight) -> None:
    """Puts a weight in the place that its name says."""
    *path, last = weight.name.split(".")
    module: Any = model
    for part in path:
        module = module[int(part)] if isinstance(module, list) else module[part]
    assert isinstance(module, nn.Module) and module[last].shape == weight.shape == tuple(value.shape), weight
    setattr(module, last, value)


def machine_memory() -> int:
    """Bytes of memory the weights can live in: the device's as MLX reports it, else the machine's."""
    info = mx.device_info()
    reported = info.get("memory_size") or info.get("total_memory")  # as Metal and CUDA call it
    return int(reported) if reported else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
