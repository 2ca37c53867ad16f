"""Engram tables of a converted folder: left where they are, cloned, or copied."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mlx_ds4.checkpoint import Weight, model_weights
from mlx_ds4.formats.engram_spans import Span, file_span
from mlx_ds4.sources import ConvertibleSource

from .mlx_plan import OutFile, plan_table

STORAGES = ("reference", "copy", "clone")
_FICLONE = 0x40049409  # Linux: make one file share the blocks of another
_NO_CLONE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM)


def table_weights(source: ConvertibleSource) -> list[Weight]:
    return [weight for weight in model_weights(source.config) if weight.storage == "ROWS"]


def table_files(source: ConvertibleSource) -> list[OutFile]:
    """The files to write for copied tables."""
    weights = table_weights(source)
    return [plan_table(source, weight, f"engram-{number:05d}.bin") for number, weight in enumerate(weights, 1)]


def table_spans(source: ConvertibleSource, storage: str, folder: Path) -> list[list[Span]]:
    """Where the rows of each table lie, once copies or clones are in the folder."""
    if storage == "copy":
        widths = {file.name: next(iter(file.items[0].arrays.values())).shape[1] for file in table_files(source)}
        return [[replace(file_span(folder / name, 0, 0, width), path=name)] for name, width in widths.items()]
    spans = [source.table_spans(weight) for weight in table_weights(source)]
    if storage == "clone":
        spans = [[replace(span, path=_clone_name(Path(span.path))) for span in table] for table in spans]
    return spans


def files_to_clone(source: ConvertibleSource) -> list[Path]:
    """The source's files that hold rows of a table, raw pieces one by one."""
    spans = [span for weight in table_weights(source) for span in source.table_spans(weight)]
    named = {Path(span.path) for span in spans}
    return [file for file in source.files() if source.kind == "gguf" or file.absolute() in named] if spans else []


def clone_files(files: Iterable[Path], folder: Path) -> None:
    """Clones files into the folder under `engram-` names; those that are there already stay.

    ValueError, naming --engram copy, where the file system cannot share blocks between them.
    """
    for file in files:
        target = folder / _clone_name(file)
        if target.exists():
            continue
        partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
        try:
            clone_file(file, partial)
            os.replace(partial, target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if error.errno not in _NO_CLONE:
                raise
            raise ValueError(
                f"{folder}: this file system cannot clone {file} ({error.strerror}): use --engram copy or reference"
            ) from None


def _clone_name(file: Path) -> str:
    return f"engram-{file.name}"


def clone_file(source: Path, target: Path) -> None:
    """Makes `target` a copy of `source` that shares its blocks; OSError where that is not possible."""
    if sys.platform == "darwin":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.clonefile(os.fsencode(source), os.fsencode(target), 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(target))
        return
    import fcntl

    with open(source, "rb") as old, open(target, "xb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        os.fsync(new.fileno())
