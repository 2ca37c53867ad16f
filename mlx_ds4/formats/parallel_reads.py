"""Many small reads of files, all of which the disk works on at the same time.

An SSD answers a read in 50 to 100 us and dozens of them in little more. So from the first read on that had to wait,
Linux is told of the others in advance; other systems have no such call for Python, and threads read side by side there
(readers side by side are ds4's idea). Both cost more than a read from memory, so they are not taken before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

TAKES_HINTS = hasattr(os, "posix_fadvise")
_AHEAD = 256  # reads that the disk may have at a time
_READERS = 16
_WAITED = 30e-6  # seconds that no read from memory takes


def read_all(read: Callable[..., None], hint: Callable[..., None], wanted: Sequence[tuple[Any, ...]]) -> None:
    """Calls read(*item) for every item, perhaps from several threads and in another order: it must not mind.
    `hint(*item)` tells the system that this will be read.

    Raises what a call raises, one of them where several do, when no other is at work any more; then some items have not
    been read.
    """
    for done, item in enumerate(wanted, 1):
        start = time.perf_counter()
        read(*item)
        if time.perf_counter() - start > _WAITED and done < len(wanted) - 1:
            rest = wanted[done:]
            return _announced(read, hint, rest) if TAKES_HINTS else _side_by_side(read, rest)


def will_read(handle: int, offset: int, count: int) -> None:
    """The hint for bytes of an open file, which a file system may refuse."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(handle, offset, count, os.POSIX_FADV_WILLNEED)


def _announced(read: Callable[..., None], hint: Callable[..., None], wanted: Sequence[tuple[Any, ...]]) -> None:
    for item in wanted[:_AHEAD]:
        hint(*item)
    for place, item in enumerate(wanted):
        read(*item)
        if place + _AHEAD < len(wanted):
            hint(*wanted[place + _AHEAD])


def _side_by_side(read: Callable[..., None], wanted: Sequence[tuple[Any, ...]]) -> None:
    def share(first: int) -> None:
        for item in wanted[first::_READERS]:
            read(*item)

    futures = [_pool().submit(share, first) for first in range(min(_READERS, len(wanted)))]
    wait(futures)
    for future in futures:
        future.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
