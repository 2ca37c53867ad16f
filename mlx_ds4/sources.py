"""A model's sources behind one face: a ds4 GGUF file, the official release's folder, a converted folder.

A source is opened by reading headers only; it has checked that every tensor of the config is there. `read`
then brings one weight at a time into the form in which the model holds it: block formats as `BlockWeight`
planes, float tensors in their own dtype. Scales that are NaN or infinite are refused by tensor name. Files and
releases also give a weight as `pieces` of its planes, for programs that pass it on without holding it.
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
from mlx_ds4.converted import ConvertedSource, folder_tokenizer, refuse_unfinished
from mlx_ds4.engram_map import engram_token_map
from mlx_ds4.formats.deepseek41 import check_metadata
from mlx_ds4.formats.engram_rows import EngramRows, GGUFEngramRows, OfficialEngramRows
from mlx_ds4.formats.engram_spans import Span, file_span
from mlx_ds4.formats.folder_layout import FLOATS, SECTION
from mlx_ds4.formats.gguf import FormatError, GGUFFile
from mlx_ds4.formats.host_planes import split_rows
from mlx_ds4.formats.quant_blocks import find_bad_engram_rows, find_bad_scales
from mlx_ds4.formats.safetensors import SafetensorsFolder
from mlx_ds4.model.engram import EngramHash, engram_constants
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.tokenizer import Tokenizer

_PIECE = 1 << 20  # bytes brought in at a time: what is read is still in the processor's cache when it is passed on
_MAX_CONFIG = 16 << 20
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# The small files of a release folder that a model needs besides its shards.
TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class Source(Protocol):
    """What loading, planning and inspecting need of either source."""

    path: Path
    kind: str
    config: ModelConfig
    types: Counter[str]
    activation_rounding: bool | None  # what the weights ask for; None: it follows from their formats

    def nbytes(self, weight: Weight) -> int: ...

    def read(self, weight: Weight) -> mx.array | BlockWeight: ...

    def tokenizer(self) -> Tokenizer: ...

    def engram(self, tokenizer: Tokenizer) -> tuple[np.ndarray, list[EngramHash], list[EngramRows]]: ...


class PieceSource(Protocol):
    """Weights in pieces, of a model or of a drafter, and the files that they come from."""

    kind: str

    def format_of(self, weight: Weight) -> str: ...

    def pieces(self, weight: Weight) -> Iterator[dict[str, np.ndarray]]: ...

    def files(self) -> dict[Path, int]: ...


class ConvertibleSource(Source, PieceSource, Protocol):
    """What the converter needs of a model's source."""

    def table_spans(self, weight: Weight) -> list[Span]: ...


def open_source(path: str | os.PathLike, *, strict: bool = True) -> Source:
    """Opens a GGUF file (or its first raw piece), an official or a converted folder and checks its tensor list.

    With `strict=False` tensors of unknown names are accepted, and a GGUF whose sizes are consistent but not
    those of the release. Raises FormatError for a damaged file,
    ConfigError for a config that is not implemented, CheckpointError for tensors that do not fit it.
    """
    path = Path(path)
    if not path.is_dir():
        return GGUFSource(path, strict)
    refuse_unfinished(path)
    raw = read_config_json(path)
    if SECTION in raw:
        return ConvertedSource(path, raw)
    return OfficialSource(path, strict)


class GGUFSource:
    """A ds4 GGUF: weights by their GGUF types, Engram constants and tokenizer from the metadata."""

    kind = "gguf"
    activation_rounding = None

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

    def format_of(self, weight: Weight) -> str:
        """Block format or float dtype in which the file holds a weight; I8 for Engram tables."""
        return self.gguf.tensors[weight.gguf].type_name

    def read(self, weight: Weight) -> mx.array | BlockWeight:
        """One weight as the model holds it, evaluated; needs memory for the weight once more meanwhile."""
        return _assemble(self.format_of(weight), weight.shape, self.pieces(weight))

    def pieces(self, weight: Weight) -> Iterator[dict[str, np.ndarray]]:
        """Rows of a weight in order, plane -> [n, width], float and table rows as plane ""; scales are checked."""
        info = self.gguf.tensors[weight.gguf]
        kind, step = info.type_name, max(1, _PIECE // info.row_bytes) * info.row_bytes
        for start in range(0, info.nbytes, step):
            raw = self.gguf.read(info.name, start, min(start + step, info.nbytes)).reshape(-1, info.row_bytes)
            if (find_bad_engram_rows(raw) if kind == "I8" else find_bad_scales(kind, raw)).size:
                raise FormatError(
                    f"{self.path}: tensor {info.name} ({kind}) holds a scale or value that is NaN or infinite: "
                    "the file is damaged, download it again"
                )
            if kind == "I8":
                yield {"": raw}
            else:
                yield {"": raw.view(_NUMPY[kind])} if kind in FLOATS else split_rows(kind, raw)

    def files(self) -> dict[Path, int]:
        """The files that the source consists of, and how many of their first bytes name them."""
        pieces = self.gguf.pieces
        return {piece: self.gguf.data_start if piece == pieces[0] else 0 for piece in pieces}

    def table_spans(self, weight: Weight) -> list[Span]:
        """Where the rows of an Engram table lie."""
        info = self.gguf.tensors[weight.gguf]
        return [file_span(self.gguf.path, self.gguf.data_start, info.offset, info.row_bytes)]

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
    activation_rounding = None

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

    def format_of(self, weight: Weight) -> str:
        """Block format or float dtype of a weight in memory: FP4 is MXFP4 there; I8 for Engram tables."""
        return {"FP4": "MXFP4", "ROWS": "I8"}.get(weight.storage, weight.storage)

    def read(self, weight: Weight) -> mx.array | BlockWeight:
        """One weight as the model holds it, evaluated; needs memory for the weight once more meanwhile."""
        return _assemble(self.format_of(weight), weight.shape, self.pieces(weight))

    def pieces(self, weight: Weight) -> Iterator[dict[str, np.ndarray]]:
        """Rows of a weight in order, plane -> [n, width], float and table rows as plane ""; scales are checked.

        The scales of an FP8 matrix and of each FP4 expert come in one piece, behind its codes.
        """
        if weight.storage == "ROWS":
            yield from self._records(weight)
        elif weight.storage == "FP4":
            for name in checkpoint.official_names(weight):
                for raw in self._rows(name, weight.shape[-1] // 2):
                    yield {"codes": raw}
                yield {"scales": self._scales(name, weight)}
        elif weight.storage == "FP8":
            for raw in self._rows(weight.name, weight.shape[-1]):
                if ((raw & 127) == 127).any():
                    raise self._damaged(weight.name)
                yield {"codes": raw}
            yield {"scales": self._scales(weight.name, weight)}
        else:
            for raw in self._rows(weight.name, weight.shape[-1] * (4 if weight.storage == "F32" else 2)):
                if find_bad_scales(weight.storage, raw).size:
                    raise self._damaged(weight.name)
                yield {"": raw.view(_NUMPY[weight.storage])}

    def _rows(self, name: str, row_bytes: int) -> Iterator[np.ndarray]:
        info = self.folder.tensors[name]
        step = max(1, _PIECE // row_bytes) * row_bytes
        for start in range(0, info.nbytes, step):
            yield self.folder.read(name, start, min(start + step, info.nbytes)).reshape(-1, row_bytes)

    def _records(self, weight: Weight) -> Iterator[dict[str, np.ndarray]]:
        names = weight.name, checkpoint.scale_name(weight.name)
        widths = [self.folder.tensors[name].shape[1] for name in names]
        step = max(1, _PIECE // sum(widths))
        for start in range(0, weight.shape[0], step):
            stop = min(start + step, weight.shape[0])
            records = np.concatenate(
                [
                    self.folder.read(name, start * width, stop * width).reshape(-1, width)
                    for name, width in zip(names, widths, strict=True)
                ],
                axis=1,
            )
            if find_bad_engram_rows(records).size:
                raise self._damaged(weight.name)
            yield {"": records}

    def files(self) -> dict[Path, int]:
        """The files that the source consists of, and how many of their first bytes name them."""
        infos = self.folder.tensors.values()
        shards = dict.fromkeys(sorted({info.file for info in infos}), 0)
        for info in infos:  # the data begins where the header ends
            shards[info.file] = min(shards[info.file] or info.offset, info.offset)
        texts = [self.path / name for name in (*TEXT_FILES, "model.safetensors.index.json")]
        return {**shards, **{text: text.stat().st_size for text in texts if text.is_file()}}

    def table_spans(self, weight: Weight) -> list[Span]:
        """Where the rows of an Engram table lie."""
        infos = [self.folder.tensors[name] for name in (weight.name, checkpoint.scale_name(weight.name))]
        headers = self.files()
        return [file_span(info.file, headers[info.file], info.offset, info.shape[1]) for info in infos]

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
        return folder_tokenizer(self.path, self.config, "use the release's own tokenizer")

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


def _assemble(kind: str, shape: tuple[int, ...], pieces: Iterable[dict[str, np.ndarray]]) -> mx.array | BlockWeight:
    """Joins pieces along the first axis, evaluating as it goes so that nothing waits in a graph."""
    parts: dict[str, list[mx.array]] = {}
    for piece in pieces:
        for name, rows in piece.items():
            parts.setdefault(name, []).append(mx.array(rows))
        mx.eval(*(arrays[-1] for arrays in parts.values()))
    planes = {}
    for name in list(parts):
        arrays = parts.pop(name)
        planes[name] = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
        mx.eval(planes[name])
    if kind in FLOATS:
        values = planes[""].view(mx.bfloat16) if kind == "BF16" else planes[""]
        return values.reshape(shape)
    if kind == "FP8":
        return BlockWeight(kind, planes)
    return BlockWeight(kind, {name: plane.reshape(*shape[:-1], -1) for name, plane in planes.items()})
