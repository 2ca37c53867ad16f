"""Metal kernels on the CPU: the text that MLX generates, compiled as C++ and run with every access checked.

    from tests.emulator import EmulatorError, available, last_stats, launch, unavailable_reason

A GPU thread is a fiber; simdgroups and threadgroups wait for each other where the text says so. What a GPU would
never tell is an `EmulatorError` here: races, accesses out of bounds, uninitialised reads, misaligned loads, simd
operations and barriers that not all threads reach, unwritten outputs, and text that Apple's compiler refuses.

The parts, in the order in which a launch meets them: `_launch` (the driver), `_export` (the text, from MLX),
`_lint` (what clang would let pass), `_text` (small changes to the text), `_toolchain` (clang and its cache), `shim/`
(Metal's language and library for clang, `_overloads` writes a part of it), `_memory` (arrays), `_runtime` and
`runtime/` (fibers, barriers, shadow memory).

Not modelled: textures, function constants, methods qualified by address space, bool vectors (comparisons give
integer vectors), packed 3-vectors, `vec<T, N>` with several arguments, copies of whole structs from device memory (read
the fields). Memory is sequentially consistent and threadgroups run one after another, so waiting for another
threadgroup ends at the time limit. What stays unknown: whether Apple's compiler accepts the text, how many registers
it needs, and how fast it is.
"""

from __future__ import annotations

from ._errors import EmulatorError
from ._launch import Stats, Traffic, last_stats, launch
from ._toolchain import unavailable_reason

__all__ = ["EmulatorError", "Stats", "Traffic", "available", "last_stats", "launch", "unavailable_reason"]


def available() -> bool:
    """Whether kernels can be emulated on this machine; if not, `unavailable_reason` says why."""
    return not unavailable_reason()
