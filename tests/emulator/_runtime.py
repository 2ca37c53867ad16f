"""The runtime's structures (runtime/launch.h), for ctypes."""

from __future__ import annotations

import ctypes
import functools

from ._toolchain import runtime_library

# ErrorKind, in its order.
KINDS = (
    "",
    "race",
    "uninitialised",
    "out-of-bounds",
    "misaligned",
    "read-only",
    "divergence",
    "inactive-lane",
    "undefined",
    "stack",
    "fault",
    "timeout",
)
ORDERS = ("forward", "backward", "random")
CELL_BYTES = 20  # sizeof(Cell)

_pointer, _u32, _u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64


class Buffer(ctypes.Structure):
    _fields_ = (
        ("base", _pointer),
        ("size", _u64),
        ("shadow", _pointer),
        ("touched", _pointer),
        ("bytes_read", _u64),
        ("bytes_written", _u64),
        ("writable", _u32),
        ("initialised", _u32),
    )


class GroupVariable(ctypes.Structure):
    _fields_ = (("offset", _u32), ("size", _u32))


class Launch(ctypes.Structure):
    _fields_ = (
        ("entry", _pointer),
        ("arguments", _pointer),
        ("buffers", _pointer),
        ("group_variables", _pointer),
        ("group_memory", _pointer),
        ("group_memory_size", _u64),
        ("time_limit", ctypes.c_double),
        ("buffer_count", _u32),
        ("group_variable_count", _u32),
        ("grid", _u32 * 3),
        ("group", _u32 * 3),
        ("checked", _u32),
        ("order", _u32),
        ("seed", _u32),
        ("flush_denormals", _u32),
        ("switches", _u64),
        ("accesses", _u64),
        ("simd_operations", _u64),
        ("barriers", _u64),
        ("error_pc", _pointer),
        ("image_base", _pointer),
        ("error_kind", _u32),
        ("error", ctypes.c_char * 1020),
    )


@functools.cache
def runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(runtime_library()))
    library.emulator_run.argtypes = [ctypes.POINTER(Launch)]
    library.emulator_run.restype = ctypes.c_int
    return library
