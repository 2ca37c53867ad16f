"""Writing a file so that its final name never shows a half-written one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Opens a binary file beside `path` that takes the name `path` only when the block ends without an error.

    The bytes are forced to the disk before the rename, and the folder's entry after it. On any error, a
    keyboard interrupt included, the partial file is removed and what stood at `path` stays.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            _sync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        _sync(folder)
    finally:
        os.close(folder)


def _sync(descriptor: int) -> None:
    try:
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # macOS: fsync alone leaves data in the drive's cache
    except (AttributeError, ImportError, OSError):
        os.fsync(descriptor)
