"""GGUF v3 files: a bounded parser and lazy, positioned reads of the payload.

Opening reads the header only. Files above 4 GiB, raw `.partN` pieces and gaps between tensors are
ordinary cases. What the metadata means is checked by `deepseek41.check_metadata`, which tensors there
must be by the checkpoint's list.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from mlx_ds4.formats.gguf_bytes import ByteSource
from mlx_ds4.formats.gguf_header import FormatError, TensorInfo, TruncatedError, parse_header, show
from mlx_ds4.formats.quant_blocks import TYPE_INFO, dequantize, find_bad_scales

__all__ = ["TYPE_INFO", "FormatError", "GGUFFile", "TensorInfo"]

_DEQUANTIZE_STEP = 8 << 20  # payload bytes at a time: temporaries are several times as large


class GGUFFile:
    """An open GGUF file.

    `path` names the file, the first of its raw pieces (`X.gguf.part1`), or `X.gguf` when only pieces
    exist. Attributes: `path`, `version`, `alignment`, `data_start`, `size` (of all pieces),
    `architecture` ("" when the file names none), `metadata` (numbers and bools as Python values, strings
    as str, numeric arrays as read-only NumPy arrays, string arrays as list[str]), `value_types` (the stored
    type of each metadata value: "u32", "string", "[f32]", ...), `tensors` in the file's order.

    Every fault of the file, the path or the request raises FormatError. Reads may run in several threads;
    they fail once the file on disk is another one than that which was opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fsdecode(path))  # payload reads must survive a change of directory
        self._source: ByteSource | None = None
        try:
            self._source = ByteSource(self.path)
            header = parse_header(self._source.read, self._source.size)
            _refuse_shard(header.metadata)
        except FormatError as error:
            text = str(error)
            if isinstance(error, TruncatedError) and self._source.split:
                count = len(self._source.pieces)
                text += f" and put .part{count + 1} beside the {count} raw piece(s) found"
            self.close()
            raise self._error(text) from None
        except BaseException:
            self.close()
            raise
        self.size = self._source.size
        self.version, self.alignment = header.version, header.alignment
        self.metadata, self.value_types = header.metadata, header.types
        self.tensors, self.data_start = header.tensors, header.data_start

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; reads fail afterwards, metadata and tensor table stay. Harmless when repeated."""
        if self._source:
            self._source.close()

    @property
    def architecture(self) -> str:
        """`general.architecture`, or "" when it is missing or not a string."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""

    @property
    def pieces(self) -> list[Path]:
        """The files on the disk whose bytes together are this one: itself, or its raw pieces in order."""
        return [Path(piece.path) for piece in self._source.pieces] if self._source else []

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Bytes [start, stop) of a tensor's payload as a fresh uint8 array; all of it by default.

        Raises FormatError when there is no such tensor, the range is not inside it, or reading fails.
        """
        info = self._info(name)
        stop = info.nbytes if stop is None else stop
        if not 0 <= start <= stop <= info.nbytes:
            raise self._error(f"bytes {start} to {stop} of {show(name)} were asked for, it has {info.nbytes}")
        out = np.empty(stop - start, np.uint8)
        self._fill([(info.offset + start, out)])
        return out

    def read_rows(self, name: str, row_ids: np.ndarray) -> np.ndarray:
        """Rows of a tensor by number: integers [n], in any order and repeated -> uint8 [n, row_bytes].

        A row is the last axis; the others are flattened. Every row is read once, neighbours together, in
        the order of the file. Raises FormatError for row numbers outside the tensor or not integers.
        """
        info = self._info(name)
        ids = np.asarray(row_ids)
        rows = info.nbytes // info.row_bytes
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise self._error(f"rows of {show(name)} are {ids.dtype} {list(ids.shape)}, expected integers [n]")
        unique, inverse = np.unique(ids.astype(np.int64), return_inverse=True)
        if unique.size and not 0 <= unique[0] <= unique[-1] < rows:
            wrong = unique[0] if unique[0] < 0 else unique[-1]
            raise self._error(f"row {wrong} of {show(name)} was asked for, it has {rows}")
        out = np.empty((len(unique), info.row_bytes), np.uint8)
        first = np.flatnonzero(np.diff(unique, prepend=-2) != 1)  # where a run of neighbours begins
        runs = zip(first.tolist(), [*first[1:].tolist(), len(unique)], strict=True) if unique.size else ()
        self._fill(
            [(info.offset + int(unique[a]) * info.row_bytes, out[a:b].reshape(-1)) for a, b in runs],
        )
        return out[inverse]

    def dequantize(self, name: str) -> np.ndarray:
        """The values of a tensor of weights: float32 of its shape.

        Raises FormatError for I8 and I32 tensors and for damaged blocks (NaN or infinite scales or values).
        """
        info = self._info(name)
        if info.type_name in ("I8", "I32"):
            raise self._error(f"{show(name)} has type {info.type_name}, which holds no weights: use read or read_rows")
        rows = info.nbytes // info.row_bytes
        out = np.empty((rows, info.shape[-1]), np.float32)
        step = max(1, _DEQUANTIZE_STEP // info.row_bytes)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            raw = self.read(name, start * info.row_bytes, stop * info.row_bytes).reshape(stop - start, -1)
            if (bad := find_bad_scales(info.type_name, raw)).size:
                per_row = info.row_bytes // TYPE_INFO[info.type_name][2]
                raise self._error(
                    f"block {start * per_row + int(bad[0])} of {show(name)} ({info.type_name}) has a scale or value "
                    "that is NaN or infinite: the file is damaged, download it again"
                )
            out[start:stop] = dequantize(info.type_name, raw)
        return out.reshape(info.shape)

    def fingerprint(self) -> str:
        """SHA-256 of the header's bytes and the file's size, in hex: names a file without reading its payload."""
        header = np.empty(self.data_start, np.uint8)
        self._fill([(0, header)])
        return hashlib.sha256(header.tobytes() + self.size.to_bytes(8, "little")).hexdigest()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise self._error(f"there is no tensor {show(name)}")
        return self.tensors[name]

    def _fill(self, wanted: list[tuple[int, np.ndarray]]) -> None:
        try:
            self._source.check_unchanged()
            self._source.read_all(wanted)
        except FormatError as error:
            raise self._error(str(error)) from None

    def _error(self, text: str) -> FormatError:
        return FormatError(f"{os.path.basename(self.path)}: {text}")


def _refuse_shard(metadata: dict[str, Any]) -> None:
    count = metadata.get("split.count")
    if isinstance(count, int) and count > 1:
        number = metadata.get("split.no")
        which = f"shard {number + 1}" if isinstance(number, int) else "a shard"
        raise FormatError(
            f"this is {which} of {count} of a llama.cpp split, which is not supported: merge the shards with "
            "`llama-gguf-split --merge` first"
        )
