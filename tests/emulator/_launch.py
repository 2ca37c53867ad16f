"""`launch`: run a kernel on the CPU, with checks."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from . import _memory, _toolchain
from ._errors import EmulatorError
from ._export import KernelSpec, Scalar, generated_text, identity
from ._memory import Memory
from ._runtime import KINDS, ORDERS, Buffer, GroupVariable, Launch, runtime
from ._text import Prepared, prepare
from ._toolchain import Built, Mode

MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32768
MAX_CHECKED_OUTPUT = 64 << 20  # bytes; the checks need 21 bytes more for each
_SEED = 1  # of order="random", fixed: a failure can be run again

Template = Sequence[tuple[str, int | bool | mx.Dtype]]


@dataclass(frozen=True)
class Traffic:
    """What a checked launch did to one input or output: bytes read and written (each access counts), and how many
    different bytes of its `size` they were. An atomic update counts as both."""

    size: int
    read: int
    written: int
    distinct_read: int
    distinct_written: int


@dataclass(frozen=True)
class Stats:
    """Figures of one launch. `buffers` and `accesses` are empty and 0 for unchecked ones.

    Accesses are those of the code that clang made: of repeated reads of one place it may keep only the first.
    """

    build_seconds: float
    run_seconds: float
    accesses: int
    simd_operations: int
    barriers: int
    threadgroup_bytes: int
    buffers: dict[str, Traffic]


@dataclass(frozen=True)
class _Loaded:
    """A compiled kernel in this process."""

    prepared: Prepared
    built: Built
    entry: int
    group_memory: int
    group_memory_size: int
    variables: ctypes.Array  # of GroupVariable
    threadgroup_bytes: int


_lock = threading.Lock()  # the runtime runs one launch at a time
_loaded: dict[Any, _Loaded] = {}
_stats: Stats | None = None


def last_stats() -> Stats:
    """Figures of the last launch of this process that ended without an error. Raises LookupError before the first."""
    if _stats is None:
        raise LookupError("nothing was launched so far; call launch first")
    return _stats


@functools.cache
def _check_machine() -> None:
    reason = _toolchain.unavailable_reason()
    if reason:
        raise EmulatorError("emulator", "toolchain", reason)


def _load(
    spec: KernelSpec, inputs: Sequence[Any], template: Template, dtypes: Sequence[mx.Dtype], mode: Mode
) -> _Loaded:
    # All that MLX's text depends on: of an input its type, whether it is a scalar, and whether it is small.
    kinds = tuple((x.dtype, x.ndim == 0, x.size < 8) if isinstance(x, mx.array) else type(x) for x in inputs)
    key = (identity(spec), kinds, tuple(template), tuple(dtypes), mode)
    if key not in _loaded:
        function, text = generated_text(spec, inputs, template=template, output_dtypes=dtypes)
        prepared = prepare(spec, function, text)
        built = _toolchain.build(spec.name, prepared, mode)
        used = sum(-(-v.size // 16) * 16 for v in built.variables)
        if used > MAX_THREADGROUP_BYTES:
            raise EmulatorError(
                spec.name,
                "limit",
                f"{used} bytes of threadgroup memory, Metal has {MAX_THREADGROUP_BYTES}",
                *prepared.find(r"\bthreadgroup\b[^*&]*[;\[]"),
            )
        runtime()  # first: the kernel's library needs the runtime's
        library = ctypes.CDLL(str(built.path))
        library.emulator_group_start.restype = library.emulator_group_stop.restype = ctypes.c_void_p
        start, stop = library.emulator_group_start() or 0, library.emulator_group_stop() or 0
        base = built.variables[0].address if built.variables else 0
        _loaded[key] = _Loaded(
            prepared=prepared,
            built=built,
            entry=ctypes.cast(library.emulator_entry, ctypes.c_void_p).value or 0,
            group_memory=start,
            group_memory_size=stop - start,
            variables=(GroupVariable * max(1, len(built.variables)))(
                *((v.address - base, v.size) for v in built.variables)
            ),
            threadgroup_bytes=used,
        )
    return _loaded[key]


def _three(spec: KernelSpec, what: str, value: Sequence[int]) -> tuple[int, int, int]:
    if len(value) != 3 or any(not isinstance(n, int) or n < 1 or n >= 2**32 for n in value):
        raise EmulatorError(spec.name, "arguments", f"{what} is {tuple(value)}, expected three numbers of 1 or more")
    return tuple(value)


def _check_call(
    spec: KernelSpec,
    inputs: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[mx.Dtype],
    order: str,
    mode: Mode,
) -> None:
    fault = None
    if len(inputs) != len(spec.input_names):
        fault = f"{len(inputs)} inputs, expected {len(spec.input_names)}"
    elif not len(shapes) == len(dtypes) == len(spec.output_names):
        fault = f"{len(shapes)} output shapes and {len(dtypes)} dtypes, expected {len(spec.output_names)} of each"
    elif any(not isinstance(x, (mx.array, *Scalar)) for x in inputs):
        fault = "an input that is neither an mx.array nor a number"
    elif any(not _memory.supported(d) for d in [*dtypes, *(x.dtype for x in inputs if isinstance(x, mx.array))]):
        fault = "a dtype that kernels are not emulated with (complex64 or float64)"
    elif any(n < 0 for shape in shapes for n in shape):
        fault = f"the output shapes {shapes}, expected no negative sizes"
    elif order not in ORDERS:
        fault = f"the order {order!r}, expected one of {', '.join(ORDERS)}"
    elif mode.std not in ("c++14", "c++17"):
        fault = f"std={mode.std!r}, expected c++14 or c++17"
    if fault:
        raise EmulatorError(spec.name, "arguments", f"the call has {fault}")
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if mode.checked and prod(shape) * dtype.size > MAX_CHECKED_OUTPUT:
            raise EmulatorError(
                spec.name, "limit", f"an output of shape {shape}, checked launches take {MAX_CHECKED_OUTPUT >> 20} MiB"
            )


def launch(
    kernel_spec: KernelSpec,
    inputs: Sequence[mx.array | bool | int | float],
    *,
    template: Template = (),
    grid: Sequence[int],
    threadgroup: Sequence[int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    init_value: float | None = None,
    checked: bool = True,
    order: str = "forward",
    std: str = "c++17",
    flush_denormals: bool = True,
    fast_fma: bool = False,
    time_limit: float = 120.0,
) -> list[mx.array]:
    """Run a kernel as mx.fast.metal_kernel's kernel objects would on a Mac, and return its outputs.

    `kernel_spec` has the arguments of mx.fast.metal_kernel as attributes (see KernelSpec); the other arguments up to
    `init_value` mean what they mean there (`grid` counts threads). Inputs are evaluated.

    `checked` compiles the kernel so that every access to memory is checked, and vets its text; without it, kernels
    run ten times faster or more, and only compile errors, limits and faults are reported. `order` is the one in which
    lanes, simdgroups and threadgroups take turns: "forward", "backward" or "random" (the same at every call); a
    correct kernel gives equal bits in all of them. `std` is the language version: macOS 14 and 15 compile as C++14,
    later ones as C++17. `flush_denormals` treats float32 denormals as zero, as Apple's GPUs do. `fast_fma` lets the
    compiler fuse a*b+c, as Apple's does. `time_limit` is in seconds of processor time.

    Raises EmulatorError; its `kind` says why.
    """
    global _stats
    _check_machine()
    mode = Mode(checked=checked, std=std, fast_fma=fast_fma)
    shapes = [tuple(shape) for shape in output_shapes]
    grid, threadgroup = _three(kernel_spec, "grid", grid), _three(kernel_spec, "threadgroup", threadgroup)
    _check_call(kernel_spec, inputs, shapes, output_dtypes, order, mode)
    threads = prod(min(a, b) for a, b in zip(grid, threadgroup, strict=True))
    if threads > MAX_THREADS:
        raise EmulatorError(
            kernel_spec.name, "limit", f"{threads} threads in a threadgroup, Metal has at most {MAX_THREADS}"
        )
    started = time.perf_counter()
    with _lock:
        kernel = _load(kernel_spec, inputs, template, output_dtypes, mode)
    built = time.perf_counter()

    views = [_memory.to_numpy(x) for x in inputs]
    if kernel_spec.ensure_row_contiguous:
        views = [np.ascontiguousarray(v).reshape(v.shape) for v in views]
    outputs = [
        _memory.output_memory(name, shape, dtype, init_value, checked=checked)
        for name, shape, dtype in zip(kernel_spec.output_names, shapes, output_dtypes, strict=True)
    ]
    memories = [_argument_memory(a, views, outputs, checked=checked) for a in kernel.prepared.arguments]
    with _lock:
        answer, buffers = _run(
            kernel_spec.name,
            kernel,
            memories,
            grid=grid,
            group=threadgroup,
            checked=checked,
            order=ORDERS.index(order),
            flush_denormals=flush_denormals,
            time_limit=time_limit,
        )
    ended = time.perf_counter()
    if checked and init_value is None:
        for memory, dtype in zip(outputs, output_dtypes, strict=True):
            _check_written(kernel_spec.name, memory, dtype)
    roles = [a.role for a in kernel.prepared.arguments]
    _stats = Stats(
        build_seconds=built - started,
        run_seconds=ended - built,
        accesses=answer.accesses,
        simd_operations=answer.simd_operations,
        barriers=answer.barriers,
        threadgroup_bytes=kernel.threadgroup_bytes,
        buffers={
            m.name: _traffic(m, b)
            for m, b, role in zip(memories, buffers, roles, strict=True)
            if checked and role in ("input", "output")
        },
    )
    return [_memory.output_array(m, s, d) for m, s, d in zip(outputs, shapes, output_dtypes, strict=True)]


def _argument_memory(argument: Any, views: list[np.ndarray], outputs: list[Memory], *, checked: bool) -> Memory:
    if argument.role == "output":
        return outputs[argument.of]
    view = views[argument.of]
    if argument.role == "shape":
        view = np.array(view.shape, np.int32)
    elif argument.role == "strides":
        view = np.array([s // view.itemsize for s in view.strides], np.int64)
    elif argument.role == "ndim":
        view = np.array(view.ndim, np.int32)
    return _memory.input_memory(argument.name, view, checked=checked)


def _run(
    name: str,
    kernel: _Loaded,
    memories: list[Memory],
    *,
    grid: tuple[int, int, int],
    group: tuple[int, int, int],
    **how: Any,
) -> tuple[Launch, ctypes.Array]:
    """One call of the runtime. Raises EmulatorError for what it reports."""
    count = len(memories)
    pointers = (ctypes.c_void_p * max(1, count))(*(m.pointer for m in memories))
    buffers = (Buffer * count)(*(m.describe() for m in memories))
    answer = Launch(
        entry=kernel.entry,
        arguments=ctypes.addressof(pointers),
        buffers=ctypes.addressof(buffers),
        buffer_count=count,
        group_variables=ctypes.addressof(kernel.variables),
        group_variable_count=len(kernel.built.variables),
        group_memory=kernel.group_memory,
        group_memory_size=kernel.group_memory_size,
        grid=grid,
        group=group,
        seed=_SEED,
        **how,
    )
    if runtime().emulator_run(ctypes.byref(answer)):
        detail = answer.error.decode(errors="replace")
        # From the last to the first, since @buffer1 is also the start of @buffer10.
        for kind, names in (
            ("buffer", [m.name for m in memories]),
            ("variable", [v.name for v in kernel.built.variables]),
        ):
            for i in reversed(range(len(names))):
                detail = detail.replace(f"@{kind}{i}", f"'{names[i]}'")
        where = ("", "")
        if answer.error_pc and answer.image_base:
            # The address is behind the instruction.
            offset = answer.error_pc - answer.image_base - 1
            where = _toolchain.source_line(kernel.built.path, offset, kernel.prepared)
        raise EmulatorError(name, KINDS[answer.error_kind], detail, *where)
    return answer, buffers


def _check_written(name: str, memory: Memory, dtype: mx.Dtype) -> None:
    missing = (memory.touched & 2) == 0
    if missing.any():
        first, total = int(np.argmax(missing)) // dtype.size, missing.size // dtype.size
        count = -(-int(missing.sum()) // dtype.size)
        raise EmulatorError(
            name,
            "unwritten",
            f"element {first} of output '{memory.name}' was never written ({count} of {total} such)",
        )


def _traffic(memory: Memory, buffer: Buffer) -> Traffic:
    return Traffic(
        size=memory.data.nbytes,
        read=buffer.bytes_read,
        written=buffer.bytes_written,
        distinct_read=int(np.count_nonzero(memory.touched & 1)),
        distinct_written=int(np.count_nonzero(memory.touched & 2)),
    )
