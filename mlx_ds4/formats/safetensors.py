"""Safetensors files and folders: bounded headers, payload read by offset, a streaming writer.

Sizes that a header claims are checked against the file before anything is allocated. The layout is the
official release's: one `model.safetensors`, or shards named by `model.safetensors.index.json`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_ds4.formats.atomic_file import atomic_file
from mlx_ds4.formats.gguf_header import FormatError
from mlx_ds4.formats.parallel_reads import will_read

# dtype of a header -> bytes of an element
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
_READ_BYTES = 1 << 30  # the system calls stop a little below 2 GiB
_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class SafetensorsInfo:
    """Where one tensor lies: `offset` counts from the start of `file`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int


def read_header(path: str | os.PathLike) -> dict[str, SafetensorsInfo]:
    """The tensors of one safetensors file by name, in the order of their bytes.

    FormatError when the file is no safetensors file, is cut short, or when its header names an unknown
    dtype, a shape that does not fit its bytes, bytes outside the file, or overlapping tensors.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            limit = min(MAX_HEADER_BYTES, size - 8)
            if not 2 <= length <= limit:
                raise FormatError(
                    f"{path}: the first 8 bytes claim a header of {length} bytes, expected 2 to {limit}: "
                    "this is not a safetensors file, or it is cut short"
                )
            header = _parse_json(file.read(length), path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}): check the path") from None
    header.pop("__metadata__", None)
    tensors = [_info(path, name, entry, 8 + length, size) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    for before, after in itertools.pairwise(tensors):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(f"{path}: tensors {before.name} and {after.name} overlap: the header is damaged")
    return {tensor.name: tensor for tensor in tensors}


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a name occurs twice")
        return out

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not valid JSON where it should be ({error}): the file is damaged") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds a JSON {type(value).__name__}, expected an object: the file is damaged")
    return value


def _info(path: Path, name: str, entry: Any, data_start: int, size: int) -> SafetensorsInfo:
    def counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**60 for v in value)

    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise FormatError(f"{path}: tensor {name!r:.80} has dtype {dtype!r:.40}, which no safetensors file holds")
    if not counts(shape) or len(shape) > 8 or not counts(span) or len(span) != 2:
        raise FormatError(f"{path}: tensor {name!r:.80} lacks a valid shape or data_offsets: the header is damaged")
    begin, end = span
    wanted = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != wanted:
        raise FormatError(
            f"{path}: tensor {name!r:.80} has {end - begin} bytes, expected {wanted} for {dtype} {shape}: "
            "the header is damaged"
        )
    if data_start + end > size:
        raise FormatError(
            f"{path}: tensor {name!r:.80} ends at byte {data_start + end} but the file has {size}: "
            f"{data_start + end - size} bytes are missing, download it again"
        )
    return SafetensorsInfo(name, tuple(shape), dtype, path, data_start + begin, wanted)


class SafetensorsFolder:
    """The tensors of a checkpoint folder, read lazily by offset; threads may share one object.

    `path` is a folder with `model.safetensors.index.json` or `model.safetensors`. All missing shards are
    named in one FormatError, and so are an index and shards that disagree on a tensor.
    """

    def __init__(self, path: str | os.PathLike):
        self._descriptors: dict[Path, int] = {}
        self.path = Path(path)
        index = self.path / _INDEX_NAME
        if index.is_file():
            self.tensors = self._indexed(index)
        elif (self.path / "model.safetensors").is_file():
            self.tensors = read_header(self.path / "model.safetensors")
        else:
            raise FormatError(
                f"{self.path}: holds neither {_INDEX_NAME} nor model.safetensors: name a checkpoint folder"
            )
        for file in {tensor.file for tensor in self.tensors.values()}:
            self._descriptors[file] = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def _indexed(self, index: Path) -> dict[str, SafetensorsInfo]:
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise FormatError(f"{index}: is larger than {MAX_HEADER_BYTES} bytes: this is not an index")
        places = _parse_json(index.read_bytes(), index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise FormatError(f"{index}: has no weight_map: download the index again")
        for name, shard in places.items():
            if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
                raise FormatError(f"{index}: puts tensor {name!r:.80} into {shard!r:.80}, expected a plain file name")
        shards = sorted(set(places.values()))
        missing = [shard for shard in shards if not (self.path / shard).is_file()]
        if missing:
            raise FormatError(
                f"{self.path}: {len(missing)} of {len(shards)} shards are missing ({', '.join(missing)}): "
                "download them into this folder"
            )
        tensors: dict[str, SafetensorsInfo] = {}
        for shard in shards:
            for name, info in read_header(self.path / shard).items():
                if places.get(name) != shard:
                    raise FormatError(
                        f"{self.path / shard}: holds tensor {name!r:.80}, which the index puts into "
                        f"{places.get(name)!r}: shards and index are of different releases"
                    )
                tensors[name] = info
        lost = sorted(set(places) - set(tensors))
        if lost:
            raise FormatError(f"{self.path}: the index lists {len(lost)} tensors no shard holds ({lost[0]}, ...)")
        return tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Bytes `start` to `stop` of a tensor as a new uint8 array; FormatError when the file has shrunk."""
        info = self.tensors[name]
        stop = info.nbytes if stop is None else stop
        if not 0 <= start <= stop <= info.nbytes:
            raise ValueError(f"{name} has {info.nbytes} bytes, cannot read {start} to {stop}")
        out = np.empty(stop - start, np.uint8)
        view, descriptor, done = memoryview(out), self._descriptors[info.file], 0
        while done < len(out):
            part = view[done : done + _READ_BYTES]
            count = os.preadv(descriptor, [part], info.offset + start + done)
            if count == 0:
                raise FormatError(f"{info.file}: ends inside tensor {name}: the file changed while it was read")
            done += count
        return out

    def hint(self, name: str, start: int, stop: int) -> None:
        """Tells the system that these bytes of a tensor will be read; where `TAKES_HINTS`."""
        info = self.tensors[name]
        will_read(self._descriptors[info.file], info.offset + start, stop - start)

    def close(self) -> None:
        """Closes the files; reading is an error afterwards."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


Producer = Callable[[], Iterable[bytes | np.ndarray]]


def write_safetensors(path: str | os.PathLike, tensors: Iterable[tuple[str, str, Sequence[int], Producer]]) -> None:
    """Writes (name, dtype, shape, producer) as one file; a producer yields the tensor's bytes in pieces.

    The header is written first, then each producer is drained in turn, so memory holds one piece at a
    time. The file takes its name only when it is complete. ValueError for an unknown dtype, a name given
    twice, or a producer that yields another number of bytes than its shape says.
    """
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape, _ in tensors:
        if dtype not in DTYPE_BYTES or name in header:
            raise ValueError(f"tensor {name} is given twice or has the unknown dtype {dtype}")
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned for readers that map it
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, _, _, producer in tensors:
            begin, end = header[name]["data_offsets"]
            written = 0
            for piece in producer():
                written += file.write(np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else piece)
            if written != end - begin:
                raise ValueError(f"tensor {name} yielded {written} bytes, its shape needs {end - begin}")
