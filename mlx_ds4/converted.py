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


class ConvertedSource:
    """A folder written by the converter; see `docs/convert.md`."""

    kind = "mlx"

    def __init__(self, path: Path, raw: dict[str, Any]):
        self.path = path
        self.config = ModelConfig.from_dict({key: value for key, value in raw.items() if key != SECTION})
        self._weights = model_weights(self.config)
        section = raw[SECTION]
        self._check(section)
        self.formats: dict[str, str] = section["formats"]
        self.activation_rounding: bool | None = section["activation_rounding"]
        self._engram: dict[str, Any] | None = section["engram"]
        self.types = Counter(self.formats.values())
        self.arrays: dict[str, dict[str, Stored]] = {}
        for weight in self._weights:
            if weight.storage != "ROWS":
                try:
                    self.arrays[weight.name] = stored_arrays(weight.name, self.formats[weight.name], weight.shape)
                except ValueError as error:
                    raise ConfigError(f"{path}/config.json: {error}: convert again") from None
        self.packed: dict[str, PackedExperts] = {}
        if section["experts"] == "packed":
            for layer in range(self.config.num_hidden_layers):
                weights, record = packed_layer(self._weights, self.formats, layer)
                file = PackedExperts(path / experts_file(layer), record, self.config.n_routed_experts)
                self.packed.update(dict.fromkeys((weight.name for weight in weights), file))
        self.folder = SafetensorsFolder(path)
        expected = {
            array.name: Expected(array.shape, (array.dtype,))
            for name, arrays in self.arrays.items()
            if name not in self.packed
            for array in arrays.values()
        }
        checkpoint.compare(expected, self.folder.tensors, where=str(path))
        self._lazy: dict[Path, dict[str, mx.array]] = {}

    def _check(self, section: Any) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(f"{self.path}/config.json: its {SECTION} section {text}: convert the source again")

        need(isinstance(section, dict), "is no object")
        version = section.get("format_version")
        need(version == VERSION, f"has format version {version!r:.40}, this program reads {VERSION}")
        keys = {"formats", "activation_rounding", "experts", "engram"}
        need(keys <= section.keys(), f"lacks one of {', '.join(sorted(keys))}")
        need(section["experts"] in ("stacked", "packed"), f"names the layout {section['experts']!r:.40} of experts")
        rounding = section["activation_rounding"]
        need(rounding is None or type(rounding) is bool, f"has the activation rounding {rounding!r:.40}")
        names = [weight.name for weight in self._weights if weight.storage != "ROWS"]
        formats = section["formats"]
        need(isinstance(formats, dict) and formats.keys() == set(names), "lists formats of other tensors")
        need(all(isinstance(value, str) for value in formats.values()), "lists formats that are no text")
        need(
            bool(self.config.engram_layer_ids) == isinstance(section["engram"], dict), "does not fit the Engram layers"
        )

    def nbytes(self, weight: Weight) -> int:
        """Payload bytes of a weight."""
        if weight.storage == "ROWS":
            rows, columns = weight.shape
            return rows * (columns + columns // checkpoint.TILE)
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

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder; ConfigError when it has ids that the model has no row for."""
        tokenizer = Tokenizer.from_folder(self.path)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {self.config.vocab_size}: "
                "convert the source again"
            )
        return tokenizer

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
