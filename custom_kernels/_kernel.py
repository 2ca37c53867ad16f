"""`Kernel`: one Metal text, run by Metal, by CUDA through a translation, by an emulator, or not at all.

A family is a module of this folder; it holds `Kernel` objects at module level and public functions that ask
`enabled("<family>")` before they launch one and otherwise return their reference. Nothing here touches a device
at import: MLX's kernel objects are made at the first launch. What steers it stands in `_switches.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import _cuda_cache, _portable
from ._switches import KernelError, backend, current, families

_FOLDER = Path(__file__).resolve().parent

# Metal's definition of the one spelling of a lookup table that CUDA can share; the CUDA prelude has its own.
_TABLE_MACRO = """#ifndef MSL_TABLE
#define MSL_TABLE(T, name, n) constexpr constant static T name[n]
#endif
"""


# --- the list of kernels ------------------------------------------------------------------------------------

_registry: dict[str, Kernel] = {}
_watchers: list[Callable[[Launch], None]] = []


def load_all() -> dict[str, Any]:
    """Import every family; returns its modules by name."""
    return {name: importlib.import_module(f"{__package__}.{name}") for name in families()}


def all_kernels() -> list[Kernel]:
    """Every kernel of every family, sorted by name."""
    load_all()
    return sorted((k for k in _registry.values() if k.family in families()), key=lambda k: k.name)


@contextlib.contextmanager
def watch_launches(callback: Callable[[Launch], None]) -> Iterator[None]:
    """Within the context, call `callback` after each launch (also an emulated or traced one)."""
    _watchers.append(callback)
    try:
        yield
    finally:
        _watchers.remove(callback)


# Constants of an op as inputs: the same array for the same values, so that it is made once. They are made from values
# of the host, which costs no launch and gives an array without history. One that an operation makes while mx.compile
# traces (mx.zeros too) is part of that function and made again with each call; made from the function's inputs, it is
# lost to everyone else.


@functools.lru_cache(maxsize=64)
def floats(*values: float) -> mx.array:
    """These numbers as float32."""
    return mx.array(values, dtype=mx.float32)


@functools.lru_cache(maxsize=64)
def blank(*shape: int) -> mx.array:
    """int32 zeros of this shape: what a kernel gets for an input that it will not read."""
    return mx.array(np.zeros(shape, dtype=np.int32))


# A launch in which the last threadgroup to arrive does the rest counts arrivals in an array of zeros, and leaves zeros.
# Launches that may run at the same time need arrays of their own, so this is no constant: a step has one.
TICKETS = 256


def tickets() -> mx.array:
    """Zeros int32 [TICKETS] for launches of which each needs the result of the one before."""
    return mx.zeros(TICKETS, dtype=mx.int32)  # on the device: counting in the host's memory takes a microsecond a block


def float_bits(value: float) -> int:
    """A constant of the model for a template: the text says `as_type<float>(..)`. An input of up to 8 bytes would lie
    in the host's memory on CUDA, and each launch that reads it waits for the bus."""
    return int(np.float32(value).view(np.int32))


@functools.cache
def _header_folder() -> Path | None:
    """A folder for header files: beside MLX's compiled kernels, or one that ends with the process; None where none can
    be made or named in an #include."""
    folder = _cuda_cache.header_folder()
    if folder is None:
        try:
            folder = Path(tempfile.mkdtemp(prefix="mlx_ds4-"))
        except OSError:
            return None
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return None if set(str(folder)) & set('"\\\n') else folder


@functools.cache
def included(header: str) -> str:
    """A line that includes `header`, or a body, from a file. MLX's CUDA back end hashes the whole text of a kernel at
    each launch, 5 us for 35 KB; where no file can be written, the text itself."""
    folder = _header_folder()
    if folder is None:
        return header
    path = folder / f"{hashlib.sha256(header.encode()).hexdigest()[:16]}.h"
    data = header.encode()
    try:
        if not path.is_file() or path.read_bytes() != data:
            _cuda_cache.write(path, data, folder)
    except OSError:
        return header
    return f'#include "{path}"\n'


# Shared memory that a block may have by compute capability, KB (CUDA C++ programming guide, technical specifications).
_BLOCK_KB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (12, 0): 99, (12, 1): 99}
# Bodies that ask for more have up to 3 KB of their own beside it, and 7 where they leave that much of 227.
_OWN_BYTES = 3072


@functools.cache
def block_bytes() -> int:
    """Shared memory that a block may have on this CUDA device; where there is none, so that paths are only traced, that
    of an H200. Unknown devices are taken for the least that all have."""
    if not mx.cuda.is_available():
        return 227 << 10
    info = mx.device_info(mx.gpu)
    found = info.get("compute_capability_major", 0), info.get("compute_capability_minor", 0)
    return (227 if found[0] in (10, 11) else _BLOCK_KB.get(found, 48)) << 10


# MLX writes the line that begins a kernel, and has no other way to bound its registers.
_BOUNDS = """
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__({}, {})
"""


# --- one kernel ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel as data. `source` is the body and `header` its helpers, in the portable subset of Metal that
    docs/kernels.md describes; `cuda_source` and `cuda_header` replace the translation where it cannot be fast
    (they are plain CUDA, without Metal's names). A kernel whose `source` is None is for CUDA alone: the op launches it
    only where `backend()` is "cuda". `shared_memory`: bytes that such a body gets besides its own arrays.
    `cuda_bounds`: most threads a block of any body on CUDA and how many blocks a multiprocessor shall hold, which
    bounds its registers; without it the compiler may keep to 32, and so to few loads on their way. `exact` says that
    results equal the reference bit for bit.

    Raises KernelError when the name is taken by another kernel or there is no body to go with a header.
    """

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str | None
    header: str = ""
    cuda_source: str | None = field(default=None, kw_only=True)
    cuda_header: str | None = field(default=None, kw_only=True)
    ensure_row_contiguous: bool = field(default=True, kw_only=True)
    atomic_outputs: bool = field(default=False, kw_only=True)
    shared_memory: int = field(default=0, kw_only=True)
    cuda_bounds: tuple[int, int] | None = field(default=None, kw_only=True)
    exact: bool = field(kw_only=True)
    family: str = field(kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_names", tuple(self.input_names))
        object.__setattr__(self, "output_names", tuple(self.output_names))
        if "MSL_TABLE" in self.header and not self.header.startswith(_TABLE_MACRO):
            object.__setattr__(self, "header", _TABLE_MACRO + self.header)
        if self.cuda_source is None and (self.source is None or self.cuda_header is not None):
            raise KernelError(f"kernel {self.name} has no cuda_source to go with the rest; give it.")
        if _registry.setdefault(self.name, self) != self:
            raise KernelError(f"two different kernels are named {self.name}; rename one of them.")

    def cuda_text(self) -> tuple[str, str]:
        """(header, body) for mx.fast.cuda_kernel."""
        bounds = _BOUNDS.format(*self.cuda_bounds) if self.cuda_bounds else ""
        if self.cuda_source is not None:
            return (self.cuda_header or "") + bounds, self.cuda_source
        return _portable.translate_header(self.header) + bounds, _portable.translate_body(self.source)

    @property
    def has_room(self) -> bool:
        """Whether a block may have this kernel's `shared_memory` on the CUDA device; the op asks before it launches."""
        return self.shared_memory + _OWN_BYTES <= block_bytes()

    @functools.cached_property
    def _metal(self) -> Callable[..., list[mx.array]]:
        return mx.fast.metal_kernel(
            name=self.name,
            input_names=self.input_names,
            output_names=self.output_names,
            source=self.source,
            header=self.header,
            ensure_row_contiguous=self.ensure_row_contiguous,
            atomic_outputs=self.atomic_outputs,
        )

    @functools.cached_property
    def _cuda_kernels(self) -> dict[tuple, Callable[..., list[mx.array]]]:
        return {}

    def _cuda(self, *, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], **call: Any) -> list[mx.array]:
        """Each combination of dtypes has a kernel of its own, with a name that says which. An array that stands for
        several inputs is passed once, because each costs host time at each launch."""
        dtypes = (*(x.dtype for x in inputs), *output_dtypes)
        places: dict[int, int] = {}
        same = tuple(places.setdefault(id(x), i) for i, x in enumerate(inputs))
        if (dtypes, same) not in self._cuda_kernels:
            again = "".join(f"_{i}is{first}" for i, first in enumerate(same) if i != first)
            fields = self._cuda_fields("".join(map(_short, dtypes)) + again, same)
            given = [dtypes[i] for i in places.values()]
            self._cuda_kernels[dtypes, same] = _cuda_cache.CudaKernel(fields, given, output_dtypes)
        distinct = [inputs[i] for i in places.values()]
        return self._cuda_kernels[dtypes, same](inputs=distinct, output_dtypes=output_dtypes, **call)

    def _cuda_fields(self, suffix: str, same: Sequence[int]) -> dict[str, Any]:
        """What mx.fast.cuda_kernel is given. `same`: for each input, the first one that is the same array."""
        header, source = self.cuda_text()
        first = dict(zip(self.input_names, (self.input_names[i] for i in same), strict=True))
        words = [(name, what) for name in first for what in ("shape", "strides", "ndim") if f"{name}_{what}" in source]
        aliases = [f"const auto {name} = {first[name]};\n" for name in first if first[name] != name]
        aliases += [f"const auto& {name}_{w} = {first[name]}_{w};\n" for name, w in words if first[name] != name]
        # MLX passes the shape, strides and ndim of an input where the text names them, so the line has to.
        named = " ".join(dict.fromkeys(f"{first[name]}_{what}" for name, what in words))
        return {
            "name": f"{self.name}_{suffix}",
            "input_names": list(dict.fromkeys(first.values())),
            "output_names": self.output_names,
            "source": f"{''.join(aliases)}{included(source)}// {named}\n",
            "header": included(header),
            "ensure_row_contiguous": self.ensure_row_contiguous,
            "shared_memory": self.shared_memory,
        }

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, int | bool | mx.Dtype]] = (),
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
    ) -> list[mx.array]:
        """Launch, with the meaning of MLX's own kernel objects (`grid` counts threads).

        Metal and CUDA must see the same threads, so the group divides the grid and holds whole simdgroups.
        Raises KernelError for a launch outside those rules, for a scalar input, for an empty output and
        where no kernel can run; evaluation raises what the back end raises.
        """
        self._check(inputs, grid, threadgroup, output_shapes, output_dtypes)
        call: dict[str, Any] = {
            "template": template if isinstance(template, list) else list(template),
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
        }
        if init_value is not None:
            call["init_value"] = init_value
        outputs = self._launch(inputs, call)
        for callback in _watchers:
            callback(Launch(self, list(inputs), call, outputs))
        return outputs

    def _launch(self, inputs: Sequence[mx.array], call: dict[str, Any]) -> list[mx.array]:
        where = backend()
        if self.source is None and where not in ("cuda", None):
            raise KernelError(f"kernel {self.name} is for CUDA alone; launch it only where backend() is 'cuda'.")
        if where == "cuda":
            return self._cuda(inputs=inputs, **call)
        if where in ("metal", "export"):
            return self._metal(inputs=inputs, **call)
        if where == "emulate":
            mx.eval(inputs)  # the emulator reads memory: under tracing (mx.compile, mx.grad) this raises
            return emulator().launch(self, inputs, **call, **current().launch_options)
        raise KernelError(
            f"kernel {self.name} was launched where no kernel can run; ask enabled({self.family!r}) first and use"
            " the reference."
        )

    def _check(self, inputs, grid, threadgroup, output_shapes, output_dtypes) -> None:
        fault = _geometry_fault(tuple(grid), tuple(threadgroup), tuple(map(tuple, output_shapes)))
        if len(inputs) != len(self.input_names):
            fault = f"got {len(inputs)} inputs, expected {', '.join(self.input_names)}"
        elif not len(output_shapes) == len(output_dtypes) == len(self.output_names):
            fault = (
                f"got {len(output_shapes)} output shapes and {len(output_dtypes)} output dtypes, expected one of"
                f" each for {', '.join(self.output_names)}"
            )
        for x in inputs:
            if not isinstance(x, mx.array) or x.ndim == 0:
                fault = fault or "got a scalar input, which CUDA passes differently; give an array of one element"
        if fault:
            raise KernelError(f"kernel {self.name} {fault}.")


def _short(dtype: mx.Dtype) -> str:
    """b16 of bfloat16: names are built and hashed at each launch."""
    name = str(dtype).rpartition(".")[2]
    return name[0] + name.lstrip("abcdefghijklmnopqrstuvwxyz_")


@functools.lru_cache(maxsize=4096)  # a model launches hundreds of kernels a token, always the same ones
def _geometry_fault(grid: tuple[int, ...], threadgroup: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> str:
    """What is wrong with these sizes, or ""."""
    if any(prod(shape) == 0 for shape in shapes):
        return "got an empty output; return early"
    if prod(threadgroup) > 1024 or prod(threadgroup) % 32 or prod(threadgroup) == 0:
        return f"got {prod(threadgroup)} threads in a group, expected a multiple of 32 up to 1024"
    if any(g <= 0 or g % t for g, t in zip(grid, threadgroup, strict=True)):
        return f"got the grid {grid} for groups of {threadgroup}; round it up and guard the tail"
    if max(grid) >= 2**31:
        return f"got the grid {grid}, expected less than 2^31 threads a dimension; split the call"
    return ""


@dataclass(frozen=True)
class Launch:
    """One launch, as `watch_launches` reports it; `call` holds template, grid, threadgroup and outputs' kinds."""

    kernel: Kernel
    inputs: list[mx.array]
    call: dict[str, Any]
    outputs: list[mx.array]

    def metal_text(self) -> tuple[str, str]:
        """(name, text) of the function that MLX generates for Metal: all but MLX's own prelude."""
        found = []

        def note(item: dict[str, Any]) -> None:
            if item.get("name") == "CustomKernel":
                found.append(tuple(item["arguments"][:2]))

        zeros = [mx.zeros(x.shape, dtype=x.dtype) for x in self.inputs]
        mx.export_function(note, lambda *xs: self.kernel._metal(inputs=list(xs), **self.call), *zeros)
        return found[0]


# --- the emulator of a checkout ------------------------------------------------------------------------------


@functools.cache
def emulator() -> Any:
    """The package tests.emulator of this checkout. Raises KernelError where it or its compiler is missing."""
    root = _FOLDER.parent
    if not (root / "tests" / "emulator" / "__init__.py").is_file():
        raise KernelError(
            "kernels are emulated only in a source checkout (tests/emulator); use one or unset MLX_DS4_KERNELS."
        )
    sys.path.insert(0, str(root))  # under the name that tests use, so that there is one copy in the process
    try:
        module = importlib.import_module("tests.emulator")
    finally:
        sys.path.remove(str(root))
    if Path(module.__file__).parent != root / "tests" / "emulator":
        raise KernelError(f"another package named tests ({module.__file__}) hides the emulator; uninstall it.")
    if reason := module.unavailable_reason():
        raise KernelError(f"{reason}, or unset MLX_DS4_KERNELS.")
    return module


def emulator_missing() -> str | None:
    """Why kernels cannot be emulated here, or None."""
    try:
        emulator()
    except KernelError as error:
        return str(error)
    return None
