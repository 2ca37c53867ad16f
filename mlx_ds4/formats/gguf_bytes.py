"""Bytes of a file that may lie in raw pieces (`X.gguf.part1`, `X.gguf.part2`, ...), read by position.

There is no shared file position and no memory map: any number of threads may read at once, pages of a
huge table never count as the process's memory, and a file that shrinks gives an error, not a signal.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_ds4.formats.gguf_header import FormatError
from mlx_ds4.formats.parallel_reads import read_all, will_read

_CHUNK = 1 << 30  # macOS and Linux cap one read below 2 GiB
_PIECE = re.compile(r"(.*)\.part([1-9]\d{0,3})", re.DOTALL)


@dataclass(frozen=True)
class _Piece:
    path: str
    handle: int
    start: int
    stop: int
    identity: tuple[int, ...]


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class ByteSource:
    """One file, or all raw pieces of one, as a run of `size` bytes.

    `path` may name the file, its first piece, or the joined file of which only pieces exist. Raises
    FormatError, without the file's name, for anything that is not a readable regular file.
    """

    def __init__(self, path: str) -> None:
        self.pieces: list[_Piece] = []
        self.size = 0
        try:
            for piece in _piece_paths(path):
                self._add(piece)
        except BaseException:
            self.close()
            raise

    def _add(self, path: str) -> None:
        name = os.path.basename(path)
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for its writer.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if os.path.islink(path):
                raise FormatError(f"{name} is a symbolic link to nothing: restore its target") from None
            raise FormatError(f"there is no file {path}: check the path") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise FormatError(f"{name!r} cannot be opened ({error}): check path and permissions") from None
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            os.close(handle)
            raise FormatError(f"{name} is a {_kind(found.st_mode)}, expected a file: pass the GGUF file itself")
        self.pieces.append(_Piece(path, handle, self.size, self.size + found.st_size, _identity(found)))
        self.size += found.st_size

    @property
    def split(self) -> bool:
        """Whether the bytes lie in raw pieces."""
        return bool(self.pieces and _PIECE.fullmatch(self.pieces[0].path))

    def close(self) -> None:
        """Closes the files; closing twice is harmless."""
        for piece in self.pieces:
            os.close(piece.handle)
        self.pieces = []

    def __del__(self) -> None:
        self.close()

    def check_unchanged(self) -> None:
        """Raises FormatError when a file is no longer the one that was opened (size, time or inode)."""
        for piece in self.pieces:
            try:
                same = _identity(os.stat(piece.path)) == piece.identity
            except OSError:
                same = False
            if not same:
                raise FormatError(f"{os.path.basename(piece.path)} changed since it was opened: load it again")

    def read_into(self, offset: int, out: np.ndarray) -> None:
        """Fills uint8 `out` (one axis, contiguous) with the bytes from `offset` on.

        Raises FormatError when the files are closed, end too early or cannot be read.
        """
        if not self.pieces:
            raise FormatError("the file is closed: open it again")
        view = memoryview(out)
        done = 0
        for piece in self.pieces:
            # A request may begin in one piece and end in the next.
            while offset + done < piece.stop and done < len(view):
                start = offset + done - piece.start
                most = min(len(view) - done, piece.stop - offset - done, _CHUNK)
                try:
                    got = os.preadv(piece.handle, [view[done : done + most]], start)
                except OSError as error:
                    name = os.path.basename(piece.path)
                    raise FormatError(f"{name} cannot be read at byte {start} ({error}): check the disk") from None
                if got == 0:
                    raise FormatError(f"{os.path.basename(piece.path)} ends at byte {start}: it was cut while open")
                done += got
        if done < len(view):
            raise FormatError(f"byte {offset + done} was asked for, the file has {self.size}: ask for less")

    def read_all(self, wanted: Sequence[tuple[int, np.ndarray]]) -> None:
        """`read_into` of every (offset, out), which the disk may work on together."""
        read_all(self.read_into, self._hint, wanted)

    def _hint(self, offset: int, out: np.ndarray) -> None:
        for piece in self.pieces:
            begin, end = max(offset, piece.start), min(offset + len(out), piece.stop)
            if begin < end:
                will_read(piece.handle, begin - piece.start, end - begin)

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; errors as in `read_into`."""
        out = np.empty(count, np.uint8)
        self.read_into(offset, out)
        return out.tobytes()


def _piece_paths(path: str) -> list[str]:
    named = _PIECE.fullmatch(path)
    if named and named[2] != "1":
        raise FormatError(f"this is piece {named[2]} of a raw split: open {os.path.basename(named[1])}.part1 instead")
    stem = named[1] if named else path
    if not named and (os.path.lexists(path) or not os.path.lexists(path + ".part1")):
        return [path]
    count = 1
    while os.path.lexists(f"{stem}.part{count + 1}"):
        count += 1
    return [f"{stem}.part{number + 1}" for number in range(count)]


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "folder"
    return "pipe" if stat.S_ISFIFO(mode) else "device or socket"
