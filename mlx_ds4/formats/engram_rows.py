"""Rows of an Engram table, read from the disk by number; the tables never enter memory.

A row is D E4M3 codes followed by D/32 E8M0 scales. Both sources give the same bytes: a ds4 GGUF keeps a
row as one record, the official release keeps codes and scales in two tensors. `rows` is all that a caller
knows, so a variant that fetches ahead in the background can take the place of these two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.formats.gguf_header import FormatError
from mlx_ds4.formats.parallel_reads import read_all
from mlx_ds4.formats.quant_blocks import find_bad_engram_rows
from mlx_ds4.formats.safetensors import SafetensorsFolder


class EngramRows(ABC):
    """A table of `count` rows of `row_bytes` bytes. Keeps no state between calls: threads may share it."""

    name: str
    count: int
    row_bytes: int

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows by number: whole numbers of any shape -> uint8 [*ids.shape, row_bytes].

        A row that is asked for several times is read once, in the order of the file. IndexError for a
        number outside the table; FormatError for a row with a NaN code or a NaN scale.
        """
        ids = np.asarray(ids)
        if ids.size == 0:
            return np.empty((*ids.shape, self.row_bytes), np.uint8)
        wanted, back = np.unique(ids.reshape(-1), return_inverse=True)
        if wanted[0] < 0 or wanted[-1] >= self.count:
            raise IndexError(f"{self.name} has {self.count} rows, cannot read rows {wanted[0]} to {wanted[-1]}")
        found = self._read(wanted)
        bad = find_bad_engram_rows(found)
        if bad.size:
            raise FormatError(
                f"{self.name}: row {wanted[bad[0]]} holds a NaN code or scale: the file is damaged, download it again"
            )
        return found[back.reshape(-1)].reshape(*ids.shape, self.row_bytes)

    @abstractmethod
    def _read(self, ids: np.ndarray) -> np.ndarray:
        """Distinct ascending numbers [n] -> uint8 [n, row_bytes]."""


class GGUFEngramRows(EngramRows):
    """Rows of an I8 tensor [count, D + D/32] of a GGUF."""

    def __init__(self, gguf: GGUFFile, tensor_name: str):
        self.name, self._gguf = tensor_name, gguf
        self.count, self.row_bytes = gguf.tensors[tensor_name].shape

    def _read(self, ids: np.ndarray) -> np.ndarray:
        return self._gguf.read_rows(self.name, ids)


class OfficialEngramRows(EngramRows):
    """Rows of the release's codes [count, D] and scales [count, D/32]: two reads a row."""

    def __init__(self, folder: SafetensorsFolder, codes_name: str, scales_name: str):
        self.name, self._folder, self._scales = codes_name, folder, scales_name
        self.count, self._codes_bytes = folder.tensors[codes_name].shape
        self._scale_bytes = folder.tensors[scales_name].shape[1]
        self.row_bytes = self._codes_bytes + self._scale_bytes

    def _read(self, ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), self.row_bytes), np.uint8)

        def read(name: str, row: int, part: np.ndarray) -> None:
            part[:] = self._folder.read(name, row * len(part), (row + 1) * len(part))

        parts = ((self.name, slice(self._codes_bytes)), (self._scales, slice(self._codes_bytes, None)))
        rows = list(zip(ids.tolist(), out, strict=True))

        def hint(name: str, row: int, part: np.ndarray) -> None:
            self._folder.hint(name, row * len(part), (row + 1) * len(part))

        read_all(read, hint, [(name, row, record[part]) for name, part in parts for row, record in rows])
        return out
