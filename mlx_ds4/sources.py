"""A model's two sources behind one face: a ds4 GGUF file and the official release's folder.

A source is opened by reading headers only; it has checked that every tensor of the config is there. `read`
then brings one weight at a time into the form in which the model holds it: block formats as `BlockWeight`
planes, float tensors in their own dtype. Scales that are NaN or infinite are refused by tensor name.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_ds4 import checkpoint
from mlx_ds4.checkpoint import CheckpointError, Weight
from mlx_ds4.config import ConfigError, ModelConfig
from mlx_ds4.engram_map import engram_token_map
from mlx_ds4.formats import planes as block_planes
from mlx_ds4.formats.deepseek41 import check_metadata
from mlx_ds4.formats.engram_rows import EngramRows, GGUFEngramRows, OfficialEngramRows
from mlx_ds4.formats.gguf import FormatError, GGUFFile
from mlx_ds4.formats.quant_blocks import find_bad_scales
from mlx_ds4.formats.safetensors import SafetensorsFolder
from mlx_ds4.model.engram import EngramHash, engram_constants
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.tokenizer import Tokenizer

_PIECE = 64 << 20  # bytes brought in at a time
_MAX_CONFIG = 16 << 20
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Source(Protocol):
    """What loading, planning and inspecting need of either source."""

    path: Path
    kind: str
    config: ModelConfig
    types: Counter[str]

    def nbytes(self, weight: Weight) -> int: ...

    def read(self, weight: Weight) -> mx.array | BlockWeight: ...

    def tokenizer(self) -> Tokenizer: ...

    def engram(self, tokenizer: Tokenizer) -> tuple[np.ndarray, list[EngramHash], list[EngramRows]]: ...


def open_source(path: str | os.PathLike, *, strict: bool = True) -> Source:
    """Opens a GGUF file (or its first raw piece) or an official folder and checks its tensor list.

    With `strict=False` tensors of unknown names are accepted, and a GGUF whose sizes are consistent but not
    those of the release. Raises FormatError for a damaged file,
    ConfigError for a config that is not implemented, CheckpointError for tensors that do not fit it.
    """
    path = Path(path)
    return OfficialSource(path, strict) if path.is_dir() else GGUFSource(path, strict)


class GGUFSource:
    """A ds4 GGUF: weights by their GGUF types, Engram constants and tokenizer from the metadata."""

    kind = "gguf"

    def __init__(self, path: Path, strict: bool):
        self.path = path
        self.gguf = GGUFFile(path)
        # Files of our own generator say so and are checked for consistency; any other must be the release.
        exact = strict and self.gguf.metadata.get("general.name") != checkpoint.SYNTHETIC_NAME
        for warning in check_metadata(self.gguf, strict=exact):
            warnings.warn(f"{path}: {warning}", stacklevel=2)
        self.config = ModelConfig.from_gguf(self.gguf.metadata)
        expected = checkpoint.gguf_tensors(self.config)
        checkpoint.compare(expected, self.gguf.tensors, where=str(path), allow_extra=not strict)
        self.types = Counter(info.type_name for info in self.gguf.tensors.values())

    def nbytes(self, weight: Weight) -> int:
        """Payload bytes of a weight."""
        return self.gguf.tensors[weight.gguf].nbytes

    def read(self, weight: Weight) -> mx.array | BlockWeight:
        """One weight as the model holds it, evaluated; needs memory for the weight once more meanwhile."""
        kind = self.gguf.tensors[weight.gguf].type_name
        if kind in _NUMPY:
            return _join({"": _floats(kind, raw)} for raw in self._rows(weight, kind))[""].reshape(weight.shape)
        planes = _join(block_planes.to_planes(kind, mx.array(raw)) for raw in self._rows(weight, kind))
        return BlockWeight(kind, {n: p.reshape(*weight.shape[:-1], -1) for n, p in planes.items()})

    def _rows(self, weight: Weight, kind: str) -> Iterator[np.ndarray]:
        """Raw rows uint8 [n, row bytes] in pieces, their scales checked."""
        info = self.gguf.tensors[weight.gguf]
        step = max(1, _PIECE // info.row_bytes) * info.row_bytes
        for start in range(0, info.nbytes, step):
            raw = self.gguf.read(info.name, start, min(start + step, info.nbytes)).reshape(-1, info.row_bytes)
            if find_bad_scales(kind, raw).size:
                raise FormatError(
                    f"{self.path}: tensor {info.name} ({kind}) holds a scale or value that is NaN or infinite: "
                    "the file is damaged, download it again"
                )
            yield raw

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the metadata holds."""
        return Tokenizer.from_gguf_metadata(self.gguf.metadata)

    def engram(self, tokenizer: Tokenizer) -> tuple[np.ndarray, list[EngramHash], list[EngramRows]]:
        """Token map, hashes and table readers of the Engram layers, all as the file states them."""
        layers = self.config.engram_layer_ids
        if not layers:
            return np.zeros(0, np.int32), [], []
        meta = {k.removeprefix("deepseek41.engram."): v for k, v in self.gguf.metadata.items()}
        primes = np.asarray(meta["primes"], np.int64).reshape(len(layers), -1)
        multipliers = np.asarray(meta["multipliers"]).astype(np.int64).reshape(len(layers), -1)
        hashes = [EngramHash(m, p, int(meta["pad_id"])) for m, p in zip(multipliers, primes, strict=True)]
        tables = [GGUFEngramRows(self.gguf, w.gguf) for w in _tables(self.config)]
        return np.asarray(meta["token_map"]).astype(np.int32), hashes, tables


class OfficialSource:
    """The release's folder: config.json, tokenizer files, safetensors shards."""

    kind = "official"

    def __init__(self, path: Path, strict: bool):
        self.path = path
        self.config = read_config(path)
        self.folder = SafetensorsFolder(path)
        foreign = checkpoint.recognise_foreign(self.folder.tensors)
        if foreign:
            raise CheckpointError(f"{path}: this is {foreign}: name a folder of the DeepSeek V4.1 release")
        expected = checkpoint.official_tensors(self.config)
        checkpoint.compare(expected, self.folder.tensors, where=str(path), allow_extra=not strict)
        self.types = Counter(self.folder.tensors[name].dtype for name in expected)

    def nbytes(self, weight: Weight) -> int:
        """Payload bytes of a weight, scales included."""
        return checkpoint.official_bytes(weight)

    def read(self, weight: Weight) -> mx.array | BlockWeight:
        """One weight as the model holds it, evaluated; needs memory for the weight once more meanwhile."""
        if weight.storage in _NUMPY:
            kind = weight.storage
            return _join({"": _floats(kind, raw)} for raw in self._floats(weight))[""].reshape(weight.shape)
        if weight.storage == "FP8":
            codes = _join({"codes": mx.array(raw)} for raw in self._fp8_codes(weight))
            return BlockWeight("FP8", {**codes, "scales": mx.array(self._scales(weight.name, weight))})
        return BlockWeight("MXFP4", _join(self._fp4(weight)))

    def _pieces(self, name: str, row_bytes: int) -> Iterator[np.ndarray]:
        info = self.folder.tensors[name]
        step = max(1, _PIECE // row_bytes) * row_bytes
        for start in range(0, info.nbytes, step):
            yield self.folder.read(name, start, min(start + step, info.nbytes)).reshape(-1, row_bytes)

    def _floats(self, weight: Weight) -> Iterator[np.ndarray]:
        for raw in self._pieces(weight.name, weight.shape[-1] * (4 if weight.storage == "F32" else 2)):
            if find_bad_scales(weight.storage, raw).size:
                raise self._damaged(weight.name)
            yield raw

    def _fp8_codes(self, weight: Weight) -> Iterator[np.ndarray]:
        for raw in self._pieces(weight.name, weight.shape[-1]):
            if ((raw & 127) == 127).any():
                raise self._damaged(weight.name)
            yield raw

    def _fp4(self, weight: Weight) -> Iterator[dict[str, mx.array]]:
        _, rows, columns = weight.shape
        for name in checkpoint.official_names(weight):
            codes = self.folder.read(name).reshape(1, rows, columns // 2)
            yield {"codes": mx.array(codes), "scales": mx.array(self._scales(name, weight)[None])}

    def _scales(self, name: str, weight: Weight) -> np.ndarray:
        name = checkpoint.scale_name(name)
        raw = self.folder.read(name)
        if (raw == 255).any():
            raise self._damaged(name)
        return raw.reshape(checkpoint.scale_shape(weight))

    def _damaged(self, name: str) -> FormatError:
        return FormatError(
            f"{self.path}: tensor {name} holds a value or scale that is NaN or infinite: "
            "the file is damaged, download it again"
        )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder's own files; ConfigError when it has ids that the model has no row for."""
        tokenizer = Tokenizer.from_folder(self.path)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {self.config.vocab_size}: "
                "use the release's own tokenizer"
            )
        return tokenizer

    def engram(self, tokenizer: Tokenizer) -> tuple[np.ndarray, list[EngramHash], list[EngramRows]]:
        """Token map and hashes derived from tokenizer and config, and the table readers.

        Raises ConfigError when they are not the ones the tables were trained with: another number of
        distinct tokens, or tables that are not as long as the sum of their primes.
        """
        config = self.config
        if not config.engram_layer_ids:
            return np.zeros(0, np.int32), [], []
        token_map = engram_token_map(tokenizer)
        distinct = int(token_map.max()) + 1
        if (len(token_map), distinct) != (config.vocab_size, config.engram_compressed_vocab_size):
            raise ConfigError(
                f"{self.path}: the tokenizer has {len(token_map)} tokens with {distinct} distinct texts, the config "
                f"says {config.vocab_size} and {config.engram_compressed_vocab_size}: use the release's own tokenizer"
            )
        hashes = engram_constants(config)
        tables: list[EngramRows] = []
        for weight, hashing in zip(_tables(config), hashes, strict=True):
            if weight.shape[0] != int(hashing.primes.sum()):
                raise ConfigError(
                    f"{self.path}: {weight.name} has {weight.shape[0]} rows, its primes need "
                    f"{int(hashing.primes.sum())}: config.json is not this release's"
                )
            tables.append(OfficialEngramRows(self.folder, weight.name, checkpoint.scale_name(weight.name)))
        return token_map, hashes, tables


def read_config_json(folder: Path) -> dict[str, Any]:
    """The folder's config.json; ConfigError when it is missing, not JSON, or another model's."""
    path = folder / "config.json"
    if not path.is_file():
        hint = "name the .gguf file itself" if any(folder.glob("*.gguf*")) else "name a folder of the release"
        raise ConfigError(f"{folder}: has no config.json: {hint}")
    if path.stat().st_size > _MAX_CONFIG:
        raise ConfigError(f"{path}: is larger than {_MAX_CONFIG} bytes: this is not a model's config")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON ({error}): download it again") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: is a JSON {type(raw).__name__}, expected an object: download it again")
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind.startswith("deepseek_v4") and not kind.startswith("deepseek_v41"):
        raise ConfigError(
            f"{path}: model_type is {kind!r}, a DeepSeek V4 model of another architecture: use a V4.1 release"
        )
    return raw


def read_config(folder: Path) -> ModelConfig:
    """The model config of an official folder; ConfigError as `read_config_json` and `ModelConfig`."""
    return ModelConfig.from_dict(read_config_json(folder))


def _tables(config: ModelConfig) -> list[Weight]:
    return [w for w in checkpoint.model_weights(config) if w.storage == "ROWS"]


def _floats(kind: str, raw: np.ndarray) -> mx.array:
    """Raw little-endian bytes as an array of their own dtype (BF16 travels as its bits)."""
    values = mx.array(raw.view(_NUMPY[kind]))
    return values.view(mx.bfloat16) if kind == "BF16" else values


def _join(pieces: Iterable[dict[str, mx.array]]) -> dict[str, mx.array]:
    """Joins pieces along the first axis, evaluating as it goes so that nothing waits in a graph."""
    parts: dict[str, list[mx.array]] = {}
    for piece in pieces:
        mx.eval(piece)
        for name, array in piece.items():
            parts.setdefault(name, []).append(array)
    out = {}
    for name in list(parts):
        arrays = parts.pop(name)
        out[name] = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
        mx.eval(out[name])
    return out
