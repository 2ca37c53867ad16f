"""The files of a source, marked when a conversion begins and compared before each step: a changed source is refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_ds4.converted import ConvertedSource
from mlx_ds4.sources import PieceSource, open_source


@dataclass(frozen=True)
class SourceFile:
    """A file of the source as it was when the conversion began."""

    path: Path
    size: int
    mtime_ns: int
    header_bytes: int
    header_sha256: str


def mark_files(source: PieceSource) -> list[SourceFile]:
    """Size, time and header of every file of a source; OSError when one cannot be read."""
    marks = []
    for path, header_bytes in source.files().items():
        path = path.absolute()
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            sha256 = hashlib.sha256(file.read(header_bytes)).hexdigest()
        marks.append(SourceFile(path, status.st_size, status.st_mtime_ns, header_bytes, sha256))
    return marks


def fingerprint(marks: Sequence[SourceFile]) -> str:
    """SHA-256 over names, sizes and headers of a source's files: the same for a copy of it elsewhere."""
    facts = sorted((mark.path.name, mark.size, mark.header_sha256) for mark in marks)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def check_unchanged(marks: Sequence[SourceFile]) -> None:
    """ValueError naming the first file that is not as it was when it was marked."""
    for mark in marks:
        try:
            status = mark.path.stat()
            same = (status.st_size, status.st_mtime_ns) == (mark.size, mark.mtime_ns)
        except OSError:
            same = False
        if not same:
            raise ValueError(f"{mark.path}: changed since the conversion began: start again with --overwrite")


def marks_to_json(marks: Sequence[SourceFile]) -> list[dict[str, Any]]:
    return [{**asdict(mark), "path": str(mark.path)} for mark in marks]


def model_fingerprint(path: str | os.PathLike) -> str:
    """Names a model file or folder without reading its weights: `fingerprint` of its files, or, for a converted
    folder, SHA-256 of its config.json, which holds the source's fingerprint and every format."""
    source = open_source(path, strict=False)
    if isinstance(source, ConvertedSource):
        return hashlib.sha256((source.path / "config.json").read_bytes()).hexdigest()
    return fingerprint(mark_files(source))
