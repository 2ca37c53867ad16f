"""`EmulatorError`: why a kernel was refused, or what it did wrong."""

from __future__ import annotations

# What each kind means to the author of the kernel: the last clause of every message.
ADVICE = {
    "arguments": "call it as mx.fast.metal_kernel's kernels are called",
    "refused": "write it as Metal demands, or in the subset that the emulator models",
    "compile": "write it as Metal demands, or in the subset that the emulator models",
    "address-space": "keep the pointer in the address space of what it points to",
    "recursion": "Metal has no recursion and no calls through pointers: write a loop or a direct call",
    "limit": "stay below what every Apple GPU offers",
    "race": "put a barrier that covers the memory between the two, or use atomics",
    "uninitialised": "write it first, with a barrier between if another thread does so",
    "out-of-bounds": "guard the index",
    "misaligned": "load in units that the alignment of the data allows",
    "read-only": "write to outputs only",
    "divergence": "let all lanes of a simdgroup reach simd operations, and all threads reach barriers",
    "inactive-lane": "use values of lanes that exist and take part",
    "undefined": "its result differs from machine to machine: guard it",
    "stack": "make the local arrays smaller, Apple GPUs would spill them long before",
    "fault": "guard the index or the pointer",
    "timeout": "look for an endless loop, or give more time_limit",
    "unwritten": "write every element of the outputs, or give init_value",
    "toolchain": "check the installation of clang-19 and binutils",
}


class EmulatorError(ValueError):
    """A kernel that Metal would refuse, or that did something whose result on a GPU is not defined.

    Attributes: `kernel` (its name), `kind` (a key of ADVICE), `detail` (what was found), `place` ("source
    line 7", "header line 2", or "" where no line is to blame) and `line` (the text of that line, or "").
    Lines are counted from 1 within the `source` or `header` given to the kernel.
    """

    def __init__(self, kernel: str, kind: str, detail: str, place: str = "", line: str = "") -> None:
        self.kernel, self.kind, self.detail, self.place, self.line = kernel, kind, detail, place, line
        where = f", at {place} `{line}`" if place else ""
        super().__init__(f"kernel {kernel} ({kind}): {detail}{where}; {ADVICE[kind]}.")
