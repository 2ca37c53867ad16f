"""Importance of columns from an imatrix file: mean squares of a matrix's inputs, in the binary layout that ds4 uses.

    i32 entries | entries times: i32 length, name, i32 calls, i32 values, f32 value[values] | anything

Names are those of the GGUF. Stacked experts have one run of columns an expert. Only ratios inside a row of columns
matter to an encoder, so sums and means serve alike.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mlx_ds4.checkpoint import Weight
from mlx_ds4.formats.atomic_file import atomic_file

_MAX_BYTES = 4 << 30
_MAX_ENTRIES, _MAX_NAME = 65_536, 127


def read_imatrix(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Tensor name -> float32 values, as many as the file has for it.

    ValueError when the file cannot be read, is cut short, names a tensor twice, or holds a value that is negative or
    not finite. The values stay on the disk until they are used.
    """
    path = Path(path)

    def fault(text: str) -> ValueError:
        return ValueError(f"{path}: {text}: name an imatrix file (.dat)")

    try:
        size = path.stat().st_size
        if not 4 <= size <= _MAX_BYTES:
            raise fault(f"has {size} bytes, expected 4 to {_MAX_BYTES}")
        data = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}): check the path") from None
    position, out = 4, {}

    def take(count: int) -> np.ndarray:
        nonlocal position
        if not 0 <= count <= size - position:
            raise fault(f"wants {count} bytes at byte {position} of {size}")
        position += count
        return data[position - count : position]

    def number() -> int:
        return struct.unpack("<i", take(4).tobytes())[0]

    count = struct.unpack("<i", data[:4].tobytes())[0]
    if not 1 <= count <= _MAX_ENTRIES:
        raise fault(f"claims {count} entries")
    for _ in range(count):
        length = number()
        if not 1 <= length <= _MAX_NAME:
            raise fault(f"has a name of {length} bytes")
        name = take(length).tobytes().decode("utf-8", "replace")
        number()  # how often the matrix was used
        values = np.frombuffer(take(4 * max(0, number())), "<f4")
        if name in out:
            raise fault(f"names {name!r} twice")
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise fault(f"holds values of {name!r} that are negative or not finite")
        out[name] = values
    return out


def write_imatrix(path: str | os.PathLike, importance: Mapping[str, np.ndarray], *, calls: int = 1) -> None:
    """Writes what `read_imatrix` reads: tensor name -> values float32 >= 0, experts one behind the other."""
    with atomic_file(path) as file:
        file.write(struct.pack("<i", len(importance)))
        for name, values in importance.items():
            data, text = np.asarray(values, "<f4").reshape(-1), name.encode()
            file.write(struct.pack("<i", len(text)) + text + struct.pack("<ii", calls, data.size) + data.tobytes())


def check_imatrix(importance: dict[str, np.ndarray], weights: Sequence[Weight], path: str | os.PathLike | None) -> None:
    """Gives each entry the shape [experts or 1, columns] of its weight; ValueError when one does not fit, or none does.

    Entries of tensors that the model does not have are dropped.
    """
    if path is None:
        return
    known: Mapping[str, Weight] = {weight.gguf: weight for weight in weights}
    for name in [name for name in importance if name not in known]:
        del importance[name]
    if not importance:
        raise ValueError(f"{path}: names no tensor of this model: use an imatrix that was made for it")
    for name, values in importance.items():
        shape = known[name].shape
        rows = shape[0] if len(shape) == 3 else 1
        if values.size != rows * shape[-1]:
            raise ValueError(
                f"{path}: has {values.size} values for {name}, expected {rows * shape[-1]}: use another one"
            )
        importance[name] = values.reshape(rows, shape[-1])
