"""MLX arrays as the memory that a kernel sees, and back."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx
import numpy as np

from ._runtime import CELL_BYTES, Buffer

# bfloat16 has no numpy type: its bits travel as uint16.
_NUMPY = {
    mx.bool_: np.bool_,
    mx.int8: np.int8,
    mx.uint8: np.uint8,
    mx.int16: np.int16,
    mx.uint16: np.uint16,
    mx.int32: np.int32,
    mx.uint32: np.uint32,
    mx.int64: np.int64,
    mx.uint64: np.uint64,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.float32: np.float32,
}
_GAP = 1 << 20  # bytes of nothing around a checked buffer: what runs off one does not reach the next
_PAGE = 4096
_ALIGNMENT = 16  # of the widest vectors of a kernel


def supported(dtype: mx.Dtype) -> bool:
    return dtype in _NUMPY


def to_numpy(x: mx.array | bool | int | float) -> np.ndarray:
    """A view (no copy) of the array's elements with its strides; bfloat16 as uint16. Numbers become 0-d arrays."""
    if not isinstance(x, mx.array):
        x = mx.array(x)  # int32, float32 or bool, as MLX does for its own kernels
    return np.asarray(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def to_mlx(a: np.ndarray, dtype: mx.Dtype) -> mx.array:
    x = mx.array(a)
    return x.view(mx.bfloat16) if dtype == mx.bfloat16 else x


def _fresh(size: int) -> np.ndarray:
    """`size` bytes at the start of a page, between gaps."""
    pages = -(-max(size, 1) // _PAGE) * _PAGE
    memory = np.frombuffer(mmap.mmap(-1, pages + 2 * _GAP), np.uint8)
    return memory[_GAP : _GAP + size]


@dataclass
class Memory:
    """The memory behind one argument. `pointer` is what the kernel gets; the bytes it may touch are `data`."""

    name: str
    data: np.ndarray  # uint8
    pointer: int
    writable: bool = False
    initialised: bool = True
    shadow: np.ndarray | None = None
    touched: np.ndarray | None = None
    keep: list[np.ndarray] = field(default_factory=list)  # owners of memory that must outlive the launch

    def describe(self) -> Buffer:
        def address(a: np.ndarray | None) -> int | None:
            return None if a is None or a.size == 0 else a.ctypes.data

        return Buffer(
            base=self.data.ctypes.data,
            size=self.data.nbytes,
            shadow=address(self.shadow),
            touched=address(self.touched),
            writable=self.writable,
            initialised=self.initialised,
        )


def input_memory(name: str, a: np.ndarray, *, checked: bool) -> Memory:
    """The bytes that `a` spans, whatever its strides; for checked launches a copy between gaps.

    Unchecked ones get a copy only where MLX's memory on the CPU is aligned less than a GPU's would be."""
    if not checked and a.ctypes.data % _ALIGNMENT == 0:
        return Memory(name, np.empty(0, np.uint8), a.ctypes.data, keep=[a])  # only the pointer matters
    steps = [(n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)] if a.size else []
    below = -sum(s for s in steps if s < 0)
    span = below + sum(s for s in steps if s > 0) + a.itemsize if a.size else 0
    data = _fresh(span)
    ctypes.memmove(data.ctypes.data, a.ctypes.data - below, span)
    if not checked:
        return Memory(name, np.empty(0, np.uint8), data.ctypes.data + below, keep=[data])
    return Memory(name, data, data.ctypes.data + below, touched=np.zeros(span, np.uint8))


def output_memory(
    name: str, shape: tuple[int, ...], dtype: mx.Dtype, init_value: float | None, *, checked: bool
) -> Memory:
    """Row-contiguous memory, all `init_value`, or without it all ones (not-a-number, or far out of range)."""
    size = prod(shape) * dtype.size
    data = _fresh(size) if checked else np.empty(size, np.uint8)
    data[:] = 0xFF
    if init_value is not None:
        data[:] = np.resize(to_numpy(mx.array([init_value]).astype(dtype)), size // dtype.size).view(np.uint8)
    return Memory(
        name,
        data,
        data.ctypes.data,
        writable=True,
        initialised=init_value is not None,
        shadow=np.zeros(size * CELL_BYTES, np.uint8) if checked else None,
        touched=np.zeros(size, np.uint8) if checked else None,
    )


def output_array(memory: Memory, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return to_mlx(memory.data.view(_NUMPY[dtype]).reshape(shape), dtype)
