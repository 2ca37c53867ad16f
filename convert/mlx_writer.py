"""Writing one planned file: several weights at a time, each read, rearranged, placed and hashed piece by piece."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mlx_ds4.formats.atomic_file import atomic_file
from mlx_ds4.formats.gguf_bytes import ByteSource

from .mlx_plan import Item, OutFile, Slot

_WORKERS = min(4, os.cpu_count() or 1)
_WRITE_BYTES = 1 << 30  # the system calls stop a little below 2 GiB
_READ_BYTES = 1 << 20


class ArrayWriter:
    """Places the rows of one array into an open file and hashes them in order.

    Writers of one file share the lock `turn`: the system lets one write at a time anyway, and who waits here leaves
    the processor to others.
    """

    def __init__(self, descriptor: int, slot: Slot, nbytes: int, turn: threading.Lock):
        self._descriptor, self._slot, self._nbytes, self._turn = descriptor, slot, nbytes, turn
        self.position, self._digest = 0, hashlib.sha256()

    def add(self, rows: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
        for offset, start, stop in self._slot.places(self.position, len(data)):
            while start < stop:
                with self._turn:
                    written = os.pwrite(self._descriptor, data[start : min(stop, start + _WRITE_BYTES)], offset)
                start, offset = start + written, offset + written
        self._digest.update(data)
        self.position += len(data)

    def checksum(self, name: str) -> str:
        """SHA-256 of the whole array; ValueError when it is not complete."""
        if self.position != self._nbytes:
            raise ValueError(f"{name}: the source yielded {self.position} bytes, its shape needs {self._nbytes}")
        return self._digest.hexdigest()


def write_file(folder: Path, out: OutFile, progress: Callable[[int, str], None]) -> dict[str, str]:
    """Writes one file of the plan and returns the SHA-256 of each of its arrays by name.

    Up to four weights are under way at a time, each with one piece in memory. The file takes its name only when it is
    complete and on the disk. `progress(bytes, name)` is called after each piece, one call at a time. Errors are
    the source's, and OSError (a full disk).
    """
    lock, turn, stop = threading.Lock(), threading.Lock(), threading.Event()

    def write(item: Item, descriptor: int) -> dict[str, str]:
        arrays = {
            plane: ArrayWriter(descriptor, out.slots[array.name], array.nbytes, turn)
            for plane, array in item.arrays.items()
        }
        for piece in item.pieces():
            if stop.is_set():
                break
            for plane, rows in piece.items():
                arrays[plane].add(rows)
            with lock:
                progress(sum(rows.nbytes for rows in piece.values()), item.weight.name)
        return {array.name: arrays[plane].checksum(array.name) for plane, array in item.arrays.items()}

    sums: dict[str, str] = {}
    # The pool ends before the file is closed, so no write can come too late.
    with atomic_file(folder / out.name) as file, ThreadPoolExecutor(_WORKERS) as pool:
        file.write(out.header)
        file.flush()
        file.truncate(out.size)
        try:
            for written in [pool.submit(write, item, file.fileno()) for item in out.items]:
                sums.update(written.result())
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        progress(len(out.header), out.name)
    return sums


def file_checksums(path: Path, out: OutFile, report: Callable[[int], None] | None = None) -> dict[str, str]:
    """SHA-256 of every array of a written file, its bytes in the order of its rows.

    FormatError when the file is not there or too short. `report(bytes)` is called after each piece.
    """
    arrays = {array.name: array for item in out.items for array in item.arrays.values()}
    file = ByteSource(os.fspath(path))
    try:
        return {name: _checksum(file, slot, arrays[name].nbytes, report) for name, slot in out.slots.items()}
    finally:
        file.close()


def _checksum(file: ByteSource, slot: Slot, nbytes: int, report: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    for start in range(0, nbytes, _READ_BYTES):
        piece = np.empty(min(_READ_BYTES, nbytes - start), np.uint8)
        for offset, first, last in slot.places(start, len(piece)):
            file.read_into(offset, piece[first:last])
        digest.update(piece)
        if report:
            report(len(piece))
    return digest.hexdigest()
