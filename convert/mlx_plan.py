"""What a converted folder will consist of: files, arrays and where each byte goes, before anything is written."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_ds4.checkpoint import TILE, Weight
from mlx_ds4.converted import packed_layer
from mlx_ds4.formats.folder_layout import Stored, experts_file, stored_arrays
from mlx_ds4.sources import PieceSource

SHARD_BYTES = 5_000_000_000
Pieces = Callable[[], Iterator[dict[str, np.ndarray]]]


@dataclass(frozen=True)
class Slot:
    """Where the bytes of an array go: the first `run` at `offset`, each next run `stride` further on."""

    offset: int
    run: int
    stride: int

    def places(self, position: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(file offset, start, stop) of the parts of `count` bytes that begin at byte `position` of the array."""
        done = 0
        while done < count:
            number, inside = divmod(position + done, self.run)
            most = min(count - done, self.run - inside)
            yield self.offset + number * self.stride + inside, done, done + most
            done += most


@dataclass(frozen=True)
class Item:
    """One weight as it will be stored; `pieces` yields its rows, plane -> [n, width], in order."""

    weight: Weight
    format: str
    arrays: dict[str, Stored]
    pieces: Pieces


@dataclass
class OutFile:
    """One file to write: bytes in front, then the arrays of `items` at their `slots`."""

    name: str
    size: int = 0
    header: bytes = b""
    items: list[Item] = field(default_factory=list)
    slots: dict[str, Slot] = field(default_factory=dict)


def plan_items(source: PieceSource, weights: Iterable[Weight]) -> list[Item]:
    """Every weight but the Engram tables in its source's own format."""
    items = []
    for weight in weights:
        if weight.storage != "ROWS":
            format = source.format_of(weight)
            items.append(
                Item(weight, format, stored_arrays(weight.name, format, weight.shape), _pieces(source, weight))
            )
    return items


def item_bytes(items: Iterable[Item]) -> int:
    return sum(array.nbytes for item in items for array in item.arrays.values())


def plan_files(items: Sequence[Item], drafter: Sequence[Item] = (), *, packed: bool, shard_bytes: int) -> list[OutFile]:
    """Shards of up to `shard_bytes` of arrays in the order of the weights, then one file of packed experts a layer.

    A weight larger than `shard_bytes` gets a shard of its own. The arrays of a weight are neighbours. The drafter has
    its own shards, which loading the model alone never opens.
    """
    apart = {item.weight.name for item in items if packed and ".experts." in item.weight.name}
    shards = _fill([item for item in items if item.weight.name not in apart], shard_bytes) + _fill(drafter, shard_bytes)
    files = [
        _shard(f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard) for number, shard in enumerate(shards, 1)
    ]
    return files + _packed_files([item for item in items if item.weight.name in apart])


def _fill(items: Sequence[Item], shard_bytes: int) -> list[list[Item]]:
    shards: list[list[Item]] = []
    room = 0
    for item in items:
        size = item_bytes([item])
        if size > room or not shards:
            shards.append([])
            room = shard_bytes
        shards[-1].append(item)
        room -= size
    return shards


def _shard(name: str, items: list[Item]) -> OutFile:
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    position, out = 0, OutFile(name, items=items)
    for array in (array for item in items for array in item.arrays.values()):
        end = position + array.nbytes
        header[array.name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [position, end]}
        out.slots[array.name] = Slot(position, array.nbytes, 0)
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.header = struct.pack("<Q", len(text)) + text
    out.slots = {name: Slot(slot.offset + len(out.header), slot.run, 0) for name, slot in out.slots.items()}
    out.size = len(out.header) + position
    return out


def _packed_files(items: list[Item]) -> list[OutFile]:
    weights = [item.weight for item in items]
    formats = {item.weight.name: item.format for item in items}
    found = {item.weight.name: item for item in items}
    files = []
    for layer in sorted({int(weight.name.split(".")[1]) for weight in weights}):
        ordered, record = packed_layer(weights, formats, layer)
        out = OutFile(experts_file(layer), ordered[0].shape[0] * record.stride)
        out.items = [found[weight.name] for weight in ordered]
        out.slots = {name: Slot(part.offset, part.nbytes, record.stride) for name, part in record.parts.items()}
        files.append(out)
    return files


def plan_table(source: PieceSource, weight: Weight, name: str) -> OutFile:
    """The file of a copied Engram table: its records, one behind the other."""
    rows, columns = weight.shape
    array = Stored(weight.name, "U8", (rows, columns + columns // TILE))
    item = Item(weight, "I8", {"": array}, _pieces(source, weight))
    return OutFile(name, array.nbytes, b"", [item], {array.name: Slot(0, array.nbytes, 0)})


def _pieces(source: PieceSource, weight: Weight) -> Pieces:
    return lambda: source.pieces(weight)


def plan_digest(files: Sequence[OutFile]) -> str:
    """SHA-256 over names, sizes, headers and places: two plans of one digest write the same bytes from one source."""
    digest = hashlib.sha256()
    for file in files:
        slots = [(name, slot.offset, slot.run, slot.stride) for name, slot in file.slots.items()]
        digest.update(json.dumps([file.name, file.size, file.header.hex(), slots]).encode())
    return digest.hexdigest()
