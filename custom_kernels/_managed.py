"""Arrays of the host on CUDA. MLX keeps them in managed memory, whose pages a launch fetches when it first reads them,
100 to 280 us; asked for beforehand, they move while other launches run. `benchmarks/mlx_limits/managed_memory.py`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ._switches import backend

_DEVICE, _STREAM = 0, 2  # the first device; the calling thread's own stream, which waits for no other


@functools.cache
def _prefetch() -> Callable[[int, int, int, int], int] | None:
    """cuMemPrefetchAsync of the driver, which MLX has loaded."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemPrefetchAsync
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return function


def send(x: mx.array) -> mx.array:
    """x, an array that the host has made; on CUDA its pages start on their way to the device. Where that fails, a
    launch fetches them."""
    if backend() == "cuda" and (prefetch := _prefetch()):
        there = np.asarray(x)
        prefetch(there.ctypes.data, there.nbytes, _DEVICE, _STREAM)
    return x
