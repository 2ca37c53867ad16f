"""A converted folder as a source: shards under the model's own names, opened lazily by `mx.load`.

The folder was checked when it was written: scales and values are finite, and `manifest.json` has a checksum of
every array. Opening compares headers and sizes only; arrays come from the disk when they are first used.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_ds4 import checkpoint
from mlx_ds4.checkpoint import CheckpointError, Expected, Weight, model_weights
from mlx_ds4.config import ConfigError, ModelConfig
from mlx_ds4.formats.engram_rows import EngramRows
from mlx_ds4.formats.engram_spans import SpanRows, spans_from_json
from mlx_ds4.formats.folder_layout import (
    ENGRAM,
    JOURNAL,
    SECTION,
    VERSION,
    Record,
    Stored,
    expert_record,
    experts_file,
    stored_arrays,
)
from mlx_ds4.formats.gguf_header import FormatError
from mlx_ds4.formats.packed_experts import PackedExperts
from mlx_ds4.formats.safetensors import SafetensorsFolder, read_header
from mlx_ds4.model.engram import EngramHash
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.tokenizer import Tokenizer


def refuse_unfinished(folder: Path) -> None:
    """Raises CheckpointError for a folder whose conversion was cut short."""
    if (folder / JOURNAL).exists():
        raise CheckpointError(
            f"{folder}: its conversion is not finished: run the same command again with --resume, or with --overwrite"
        )


def packed_layer(weights: list[Weight], formats: dict[str, str], layer: int) -> tuple[list[Weight], Record]:
    """Gate, up and down of a layer, in the order of a record, and the record's layout."""
    names = [f"layers.{layer}.ffn.experts.{part}.weight" for part in ("w1", "w3", "w2")]
    found = {weight.name: weight for weight in weights if weight.name in names}
    arrays: list[Stored] = []
    for name in names:
        arrays += stored_arrays(name, formats[name], found[name].shape).values()
    return [found[name] for name in names], expert_record(arrays)


def folder_tokenizer(path: Path, config: ModelConfig, remedy: str) -> Tokenizer:
    """The tokenizer of a folder; ConfigError, with the remedy, when it has ids that the model has no row for."""
    tokenizer = Tokenizer.from_folder(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}: {remedy}"
        )
    return tokenizer


def need(ok: bool, folder: Path, text: str) -> None:
    """ConfigError about the converter's section of a folder's config.json unless `ok`."""
    if not ok:
        raise ConfigError(f"{folder}/config.json: its {SECTION} section {text}: convert the source again")


def section_of(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The converter's section of a folder's config.json; ConfigError for another version or a section without all."""
    section = raw[SECTION]
    need(isinstance(section, dict), folder, "is no object")
    version = section.get("format_version")
    need(version == VERSION, folder, f"has format version {version!r:.40}, this program reads {VERSION}")
    keys = {"formats", "activation_rounding", "experts", "engram", "drafter"}
    need(keys <= section.keys(), folder, f"lacks one of {', '.join(sorted(keys))}")
    return section


class ConvertedArrays:
    """Weights that lie in a converted folder in the formats that its config.json names."""

    kind = "mlx"

    def __init__(self, path: Path, weights: list[Weight], formats: Any):
        """ConfigError for formats of other weights, or that cannot hold them; nothing is opened yet."""
        names = {weight.name for weight in weights}
        need(isinstance(formats, dict) and formats.keys() == names, path, "lists formats of other tensors")
        need(all(isinstance(value, str) for value in formats.values()), path, "lists formats that are no text")
        self.path = path
        self.formats: dict[str, str] = formats
        self.arrays: dict[str, dict[str, Stored]] = {}
        for weight in weights:
            try:
                self.arrays[weight.name] = stored_arrays(weight.name, formats[weight.name], weight.shape)
            except ValueError as error:
                raise ConfigError(f"{path}/config.json: {error}: convert again") from None
        self.packed: dict[str, PackedExperts] = {}

    def open_shards(self, *, allow_extra: bool) -> None:
        """Opens the shards; CheckpointError unless they hold every weight that is not packed."""
        self.folder = SafetensorsFolder(self.path)
        expected = {
            array.name: Expected(array.shape, (array.dtype,))
            for name, arrays in self.arrays.items()
            if name not in self.packed
            for array in arrays.values()
        }
        checkpoint.compare(expected, self.folder.tensors, where=str(self.path), allow_extra=allow_extra)
        self._lazy: dict[Path, dict[str, mx.array]] = {}

    def nbytes(self, weight: Weight) -> int:
        """Payload bytes of a weight."""
        return sum(array.nbytes for array in self.arrays[weight.name].values())

    def read(self, weight: Weight) -> mx.array | BlockWeight:
        """One weight as the model holds it; arrays of shards are not read before they are used."""
        planes = {plane: self._array(weight, array) for plane, array in self.arrays[weight.name].items()}
        return planes[""] if "" in planes else BlockWeight(self.formats[weight.name], planes)

    def _array(self, weight: Weight, array: Stored) -> mx.array:
        if weight.name in self.packed:
            values = mx.array(self.packed[weight.name].stacked(array.name))
            return values.view(mx.bfloat16) if array.dtype == "BF16" else values
        file = self.folder.tensors[array.name].file
        if file not in self._lazy:
            self._lazy[file] = mx.load(str(file))
        return self._lazy[file][array.name]


class ConvertedSource(ConvertedArrays):
    """The model of a folder written by the converter; see `docs/convert.md`."""

    def __init__(self, path: Path, raw: dict[str, Any]):
        self.config = ModelConfig.from_dict({key: value for key, value in raw.items() if key != SECTION})
        self._weights = model_weights(self.config)
        section = section_of(path, raw)
        need(
            section["experts"] in ("stacked", "packed"), path, f"names the layout {section['experts']!r:.40} of experts"
        )
        rounding = section["activation_rounding"]
        need(rounding is None or type(rounding) is bool, path, f"has the activation rounding {rounding!r:.40}")
        tables = isinstance(section["engram"], dict)
        need(bool(self.config.engram_layer_ids) == tables, path, "does not fit the Engram layers")
        super().__init__(path, [w for w in self._weights if w.storage != "ROWS"], section["formats"])
        self.activation_rounding: bool | None = section["activation_rounding"]
        self._engram: dict[str, Any] | None = section["engram"]
        self.types = Counter(self.formats.values())
        if section["experts"] == "packed":
            for layer in range(self.config.num_hidden_layers):
                weights, record = packed_layer(self._weights, self.formats, layer)
                file = PackedExperts(path / experts_file(layer), record, self.config.n_routed_experts)
                self.packed.update(dict.fromkeys((weight.name for weight in weights), file))
        self.open_shards(allow_extra=False)

    def nbytes(self, weight: Weight) -> int:
        """Payload bytes of a weight."""
        if weight.storage == "ROWS":
            rows, columns = weight.shape
            return rows * (columns + columns // checkpoint.TILE)
        return super().nbytes(weight)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder; ConfigError when it has ids that the model has no row for."""
        return folder_tokenizer(self.path, self.config, "convert the source again")

    def engram(self, tokenizer: Tokenizer) -> tuple[np.ndarray, list[EngramHash], list[EngramRows]]:
        """Token map and hashes as the source had them, and the table readers.

        FormatError when a table lies in a file that was moved, replaced or changed.
        """
        layers = self.config.engram_layer_ids
        if not layers:
            return np.zeros(0, np.int32), [], []
        heads = (self.config.engram_columns,)
        grams = (self.config.engram_max_ngram_size,)
        expected = {"token_map": Expected((self.config.vocab_size,), ("I32",))}
        for layer in layers:
            expected[f"layers.{layer}.primes"] = Expected(heads, ("I64",))
            expected[f"layers.{layer}.multipliers"] = Expected(grams, ("I64",))
        checkpoint.compare(expected, read_header(self.path / ENGRAM), where=str(self.path / ENGRAM))
        stored = {name: np.array(array) for name, array in mx.load(str(self.path / ENGRAM)).items()}
        token_map, pad_id = stored["token_map"], self.config.engram_pad_token_id
        if not 0 <= token_map.min() <= token_map.max() < self.config.engram_compressed_vocab_size:
            raise ConfigError(f"{self.path / ENGRAM}: the token map leaves the compressed vocabulary: convert again")
        hashes, tables = [], []
        for (weight, spans, sample), layer in zip(self.tables(), layers, strict=True):
            primes, multipliers = (stored[f"layers.{layer}.{name}"] for name in ("primes", "multipliers"))
            if primes.min() < 2 or int(primes.astype(object).sum()) != weight.shape[0]:
                raise ConfigError(f"{self.path / ENGRAM}: primes of layer {layer} do not fit its table: convert again")
            hashes.append(EngramHash(multipliers, primes, pad_id))
            table = SpanRows(weight.name, self.path, spans, weight.shape[0], sample)
            if table.row_bytes != self.nbytes(weight) // weight.shape[0]:
                raise FormatError(
                    f"{weight.name}: rows have {table.row_bytes} bytes, which no record has: convert again"
                )
            tables.append(table)
        return token_map, hashes, tables

    def tables(self):
        """(weight, spans, sample) of each Engram table; ConfigError when config.json does not say where it lies."""
        weights = [weight for weight in self._weights if weight.storage == "ROWS"]
        places = self._engram.get("tables") if self._engram else []
        out = []
        try:
            for weight, place in zip(weights, places, strict=True):
                sample = place["sample_sha256"]
                if not isinstance(sample, str):
                    raise ValueError(f"found {json.dumps(sample)[:40]} as a checksum")
                out.append((weight, spans_from_json(place["spans"]), sample))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self.path}/config.json: does not say where the Engram tables lie ({error}): convert again"
            ) from None
        return out
