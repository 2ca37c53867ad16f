"""A GGUF v3 file written as a stream: header first, then one tensor after the other.

Small and our own because the `gguf` package's writer wants each tensor whole (2.5 GB for stacked experts)
and cannot leave a payload out, which the full-size stand-in needs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_ds4.formats.atomic_file import atomic_file
from mlx_ds4.formats.quant_blocks import TYPE_INFO

from .recipe import tensor_bytes

# A metadata record: key, type ("u32", "string", "[u32]", ...), value.
Record = tuple[str, str, Any]

_TYPES = {"u32": (4, "<u4"), "i32": (5, "<i4"), "f32": (6, "<f4"), "bool": (7, "|b1"), "u64": (10, "<u8")}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor to write; `pieces` yields its bytes, or is None for a hole that reads as zeros."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    pieces: Callable[[], Iterable[np.ndarray]] | None


def gguf_header(records: Sequence[Record], tensors: Sequence[GGUFTensor], alignment: int) -> tuple[bytes, list[int]]:
    """The header, padded to the alignment, and each tensor's offset behind it."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(records))]
    for key, kind, value in records:
        out += [_string(key), _value(kind, value)]
    offsets, position = [], 0
    for tensor in tensors:
        out.append(_string(tensor.name))
        dims = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        out.append(struct.pack("<I", len(tensor.shape)) + dims)
        out.append(struct.pack("<IQ", TYPE_INFO[tensor.type_name][0], position))
        offsets.append(position)
        position += _padded(tensor_bytes(tensor.type_name, tensor.shape), alignment)
    header = b"".join(out)
    return header.ljust(_padded(len(header), alignment), b"\0"), offsets


def write_gguf(
    path: str | os.PathLike,
    records: Sequence[Record],
    tensors: Sequence[GGUFTensor],
    *,
    alignment: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Writes a GGUF whose tensors, the last one too, are padded to `alignment`.

    Memory holds one piece at a time. The file takes its name only when it is complete. `progress(done,
    total, name)` is called with payload bytes after each piece. ValueError for a tensor whose pieces are
    not as many bytes as its type and shape need.
    """
    header, offsets = gguf_header(records, tensors, alignment)
    sizes = [tensor_bytes(tensor.type_name, tensor.shape) for tensor in tensors]
    done, total = 0, sum(sizes)
    with atomic_file(path) as file:
        file.write(header)
        for tensor, offset, size in zip(tensors, offsets, sizes, strict=True):
            if tensor.pieces is not None:
                file.seek(len(header) + offset)
                written = 0
                for piece in tensor.pieces():
                    written += file.write(np.ascontiguousarray(piece).data)
                    if progress:
                        progress(done + written, total, tensor.name)
                if written != size:
                    raise ValueError(f"tensor {tensor.name} yielded {written} bytes, its shape needs {size}")
            done += size
        file.truncate(len(header) + sum(_padded(size, alignment) for size in sizes))


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(kind: str, value: Any) -> bytes:
    if kind == "string":
        return struct.pack("<I", _STRING) + _string(value)
    if kind == "[string]":
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    number, dtype = _TYPES[kind.strip("[]")]
    numbers = np.ravel(value).tolist() if isinstance(value, np.ndarray) else value
    numbers = list(numbers) if kind.startswith("[") else [numbers]
    if dtype[1] in "iu":
        limits = np.iinfo(dtype)
        if not all(type(n) is int and limits.min <= n <= limits.max for n in numbers):
            raise ValueError(f"metadata value {value!r:.80} is not {kind}: only whole numbers in its range fit")
    data = np.array(numbers, dtype).tobytes()
    if kind.startswith("["):
        return struct.pack("<IIQ", _ARRAY, number, len(numbers)) + data
    return struct.pack("<I", number) + data
