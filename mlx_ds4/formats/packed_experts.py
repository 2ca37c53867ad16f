"""Packed experts: gate, up and down of one expert in one aligned record, read by number."""

from __future__ import annotations

import os

import numpy as np

from mlx_ds4.formats.folder_layout import Record
from mlx_ds4.formats.gguf_bytes import ByteSource
from mlx_ds4.formats.gguf_header import FormatError

_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "|i1", "U8": "|u1", "U32": "<u4"}


class PackedExperts:
    """A file of `count` records; keeps no state between calls, so threads may share it.

    BF16 arrays come as their bits (uint16). FormatError when the file has another size than the layout asks for.
    """

    def __init__(self, path: str | os.PathLike, record: Record, count: int):
        self.path, self.record, self.count = os.fspath(path), record, count
        try:
            self._bytes = ByteSource(self.path)
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from None
        if self._bytes.size != count * record.stride:
            raise FormatError(
                f"{self.path}: has {self._bytes.size} bytes, expected {count * record.stride} for {count} experts of "
                f"{record.stride}: convert it again"
            )

    def expert(self, number: int) -> dict[str, np.ndarray]:
        """All arrays of one expert by name, out of one read of its whole record; IndexError outside the file."""
        if not 0 <= number < self.count:
            raise IndexError(f"{self.path} has {self.count} experts, there is no number {number}")
        raw = np.empty(self.record.stride, np.uint8)
        self._bytes.read_into(number * self.record.stride, raw)
        return {
            name: raw[part.offset : part.offset + part.nbytes].view(_NUMPY[part.dtype]).reshape(part.shape)
            for name, part in self.record.parts.items()
        }

    def stacked(self, name: str) -> np.ndarray:
        """One array of all experts, [E, ..]."""
        part = self.record.parts[name]
        out = np.empty((self.count, part.nbytes), np.uint8)
        for number, row in enumerate(out):
            self._bytes.read_into(number * self.record.stride + part.offset, row)
        return out.view(_NUMPY[part.dtype]).reshape(self.count, *part.shape)

    def close(self) -> None:
        """Closes the file; reading is an error afterwards."""
        self._bytes.close()
