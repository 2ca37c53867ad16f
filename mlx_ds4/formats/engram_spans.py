"""Engram tables that lie in other files: runs of fixed-width rows, found by path and offset.

A row is the join of one row of each span: a GGUF and a copied table have one span (whole records), the official
release two (codes, then scales). Before anything is read, the files are compared with what was noted of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_ds4.formats.engram_rows import EngramRows
from mlx_ds4.formats.gguf_bytes import ByteSource
from mlx_ds4.formats.gguf_header import FormatError
from mlx_ds4.formats.safetensors import MAX_HEADER_BYTES

_SAMPLED = 64  # rows whose bytes name a table


@dataclass(frozen=True)
class Span:
    """Rows of `width` bytes from `offset` of a file on; `size`, `header_bytes` and `header_sha256` name the file.

    A relative `path` counts from the folder that points to it.
    """

    path: str
    offset: int
    width: int
    size: int
    header_bytes: int
    header_sha256: str


def file_mark(path: str | os.PathLike, header_bytes: int) -> tuple[int, str]:
    """Size of a file (all raw pieces together) and SHA-256 of its first bytes; FormatError when it cannot be read."""
    source = ByteSource(os.fspath(path))
    try:
        return source.size, hashlib.sha256(source.read(0, header_bytes)).hexdigest()
    finally:
        source.close()


def file_span(path: str | os.PathLike, header_bytes: int, offset: int, width: int) -> Span:
    """A span of a file that is there, by its absolute path."""
    size, sha256 = file_mark(path, header_bytes)
    return Span(os.path.abspath(path), offset, width, size, header_bytes, sha256)


class SpanRows(EngramRows):
    """Rows of a table given by its spans, `count` of them.

    Raises FormatError when a file is not there, has another size or header than noted, or when the sampled rows
    hash to something else than `sample` (None: not compared).
    """

    def __init__(self, name: str, folder: Path, spans: Sequence[Span], count: int, sample: str | None):
        self.name, self.count = name, count
        self.row_bytes = sum(span.width for span in spans)
        self._files = [(span, self._open(folder / span.path, span)) for span in spans]
        if sample is not None and self.sample() != sample:
            raise self._changed(folder / spans[0].path, "rows of the table are others")

    def _open(self, path: Path, span: Span) -> ByteSource:
        try:
            size, header = file_mark(path, min(span.header_bytes, MAX_HEADER_BYTES))
        except FormatError as error:
            raise FormatError(
                f"{self.name}: the table is in {path}, which cannot be read ({error}): put the file back, or convert "
                "again with --engram copy"
            ) from None
        if size != span.size:
            raise self._changed(path, f"it has {size} bytes instead of {span.size}")
        if header != span.header_sha256:
            raise self._changed(path, "its header is another one")
        if span.offset < 0 or span.width <= 0 or span.offset + self.count * span.width > size:
            raise self._changed(path, f"{self.count} rows from byte {span.offset} on do not lie in it")
        return ByteSource(os.fspath(path))

    def _changed(self, path: Path, what: str) -> FormatError:
        return FormatError(
            f"{self.name}: {path} is not the file that the conversion saw ({what}): restore it or convert again"
        )

    def _read(self, ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), self.row_bytes), np.uint8)
        start = 0
        for span, file in self._files:
            rows = np.empty((len(ids), span.width), np.uint8)
            offsets = [span.offset + row * span.width for row in ids.tolist()]
            file.read_all(list(zip(offsets, rows, strict=True)))
            out[:, start : start + span.width] = rows
            start += span.width
        return out

    def sample(self) -> str:
        """SHA-256 of 64 rows spread over the table, the first and the last among them."""
        rows = np.unique(np.linspace(0, self.count - 1, _SAMPLED).astype(np.int64))
        return hashlib.sha256(self._read(rows).tobytes()).hexdigest()

    def stream(self, step: int):
        """All records in order, up to `step` rows at a time."""
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            parts = []
            for span, file in self._files:
                part = np.empty((stop - start) * span.width, np.uint8)
                file.read_into(span.offset + start * span.width, part)
                parts.append(part.reshape(stop - start, -1))
            yield parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def spans_to_json(spans: Sequence[Span]) -> list[dict[str, Any]]:
    return [asdict(span) for span in spans]


def spans_from_json(value: Any) -> list[Span]:
    """The inverse of `spans_to_json`; ValueError for anything else."""
    kinds = {"path": str, "offset": int, "width": int, "size": int, "header_bytes": int, "header_sha256": str}
    good = isinstance(value, list) and 1 <= len(value) <= 2
    good = good and all(
        isinstance(v, dict) and v.keys() == kinds.keys() and all(type(v[k]) is t for k, t in kinds.items())
        and all(0 <= v[k] < 2**60 for k in ("offset", "width", "size", "header_bytes")) and "\0" not in v["path"]
        for v in value
    )  # fmt: skip
    if not good:
        raise ValueError(f"found {json.dumps(value)[:80]}, expected one or two places of rows")
    return [Span(**v) for v in value]
