"""CUDA kernels compiled ahead of MLX, side by side, and kept on disk.

MLX compiles a custom kernel where it is first evaluated: one after the other, in every process anew, each with headers
that take ten times as long as our text. But first it looks into its cache folder; for custom kernels it only never
writes there. So a `CudaKernel` puts the module there when it is launched, before anything evaluates it: `<module>.ptx`,
the binary, and `<module>.txt`, its functions' names. NVRTC, its options and the machine code are those of MLX.

Where anything is missing or fails, nothing is written, and MLX compiles as it always does. A module's name holds a hash
of the text, which names all that the binary depends on: header files by their contents, and MLX, NVRTC, the GPU and
CUDA's headers in a comment (`Compiler.stamp`). `MLX_DS4_DISABLE=cuda_cache` leaves the comment out: nothing is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

from ._cuda_text import Template, function_name, kernel_text, module_name, module_path
from ._switches import enabled

# Versions of MLX whose text, files and layout of kernel arguments were compared with ours.
KNOWN = ("0.32.4",)

_STAND_IN = Path(__file__).resolve().parent / "_cuda_mlx.h"
# Both headers of MLX's text are the stand-in; its guard makes the second one empty.
_REPLACED = ("mlx/backend/cuda/device/utils.cuh", "cooperative_groups.h")
_NAMESPACE = "mlx::core::cu::"
_CUDA_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")


class CudaKernel:
    """`mx.fast.cuda_kernel(**fields)` for arrays of these dtypes, whose modules are there before they are needed."""

    def __init__(self, fields: dict[str, Any], inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]):
        compiler = _compiler() if enabled("cuda_cache") else None
        if compiler:
            fields = {**fields, "header": compiler.stamp + fields["header"]}
        self._compiler, self._fields, self._dtypes = compiler, fields, (inputs, outputs)
        self._launch = mx.fast.cuda_kernel(**fields)
        self._asked: set[tuple] = set()

    def __call__(self, *, template: Template, **call: Any) -> list[mx.array]:
        if self._compiler and (values := tuple(template)) not in self._asked:
            self._asked.add(values)
            _start(self._compiler, self._fields, *self._dtypes, values)
        return self._launch(template=template, **call)


# --- compiling side by side --------------------------------------------------------------------------------------


class _Turn(threading.local):
    """What this thread waits for."""

    def __init__(self) -> None:
        self.depth = 0
        self.started: list[Future] = []


_turn = _Turn()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Within the context, launches start compilers and do not wait for them; at its end all modules are there. Before
    something is evaluated inside, `settle()`: MLX compiles itself what is not there yet."""
    _turn.depth += 1
    try:
        yield
    finally:
        _turn.depth -= 1
        if _turn.depth == 0:
            settle()


def settle() -> None:
    """Waits for the compilers that this thread has started."""
    while _turn.started:
        _turn.started.pop().result()


def compiling() -> bool:
    """Whether one of them is still at work."""
    return not all(future.done() for future in _turn.started)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="nvrtc")


def _start(compiler: Compiler, *what: Any) -> None:
    if _turn.depth:
        with contextlib.suppress(RuntimeError):  # no more threads, or the process ends: MLX compiles
            _turn.started.append(_pool().submit(compiler.provide, *what))
    else:
        compiler.provide(*what)


# --- one module --------------------------------------------------------------------------------------------------


class Compiler:
    """NVRTC for GPUs of one architecture ("sm_90a"), and the folder where MLX looks for modules. `package` is the
    folder of MLX's wheel. Raises OSError, ValueError or AttributeError where it cannot do what MLX does."""

    def __init__(self, library: str, architecture: str, package: Path, folder: Path):
        self._nvrtc, self.folder = ctypes.CDLL(library), folder
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._do("Version", ctypes.byref(major), ctypes.byref(minor))
        include = _cuda_include(package, major.value)
        paths = (package / "include", package / "include" / "cccl", include)
        self._options = [
            "--device-as-default-execution-space",
            f"--gpu-architecture={architecture}",
            *(f"--include-path={path}" for path in paths if path.exists()),
        ]
        self._stand_in = _STAND_IN.read_bytes()
        contents = [self._stand_in, *((include / name).read_bytes() for name in _CUDA_HEADERS)]
        digest = hashlib.sha256(b"".join(hashlib.sha256(c).digest() for c in contents)).hexdigest()[:16]
        size = os.stat(library).st_size  # tells apart builds of one version
        nvrtc = f"NVRTC {major.value}.{minor.value} of {size} bytes"
        self.stamp = f"// MLX {mx.__version__}, {nvrtc}, {architecture}, headers {digest}\n"

    def provide(self, fields: dict[str, Any], *rest: Any) -> None:
        """The module of these `fields`, dtypes and template values in its place, if that can be done."""
        # Whatever goes wrong, MLX still compiles by itself, and says what is wrong with the text.
        with contextlib.suppress(Exception):
            function, text = function_name(fields["name"], rest[-1]), kernel_text(fields, *rest)
            if not _is_there(module_path(self.folder, module_name(function, text)), function):
                self.keep(function, text, *self.compile(function, text))

    def keep(self, function: str, text: str, mangled: str, binary: bytes) -> Path:
        """The text's module becomes this binary. MLX asks for the binary first, and from then on needs the name."""
        path = module_path(self.folder, module_name(function, text))
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path.with_suffix(".txt"), f"{_NAMESPACE}{function}\t{mangled}\n".encode(), self.folder)
        write(path, binary, self.folder)
        return path

    def compile(self, function: str, text: str) -> tuple[str, bytes]:
        """(mangled name, binary) of a text's kernel. Raises ValueError for a text that does not compile."""
        program, name = ctypes.c_void_p(), ctypes.c_char_p(f"{_NAMESPACE}{function}".encode())
        headers = _strings([self._stand_in] * len(_REPLACED))
        source, file = ctypes.c_char_p(text.encode()), ctypes.c_char_p(b"kernel.cu")
        names = _strings([n.encode() for n in _REPLACED])
        self._do("CreateProgram", ctypes.byref(program), source, file, len(headers), headers, names)
        try:
            self._do("AddNameExpression", program, name)
            options = _strings([option.encode() for option in self._options])
            mangled, size = ctypes.c_char_p(), ctypes.c_size_t()
            if self._nvrtc.nvrtcCompileProgram(program, len(options), options):
                self._do("GetProgramLogSize", program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value)
                self._do("GetProgramLog", program, log)
                raise ValueError(f"NVRTC does not compile {function}: {log.value.decode(errors='replace')}")
            self._do("GetLoweredName", program, name, ctypes.byref(mangled))
            self._do("GetCUBINSize", program, ctypes.byref(size))
            binary = ctypes.create_string_buffer(size.value)
            self._do("GetCUBIN", program, binary)
            return mangled.value.decode(), binary.raw
        finally:
            self._do("DestroyProgram", ctypes.byref(program))

    def _do(self, function: str, *arguments: Any) -> None:
        if error := self._nvrtc[f"nvrtc{function}"](*arguments):
            raise ValueError(f"nvrtc{function} returned {error}")


def _strings(values: Sequence[bytes]) -> ctypes.Array:
    return (ctypes.c_char_p * len(values))(*values)


def _is_there(path: Path, function: str) -> bool:
    try:
        names = path.with_suffix(".txt").read_text()
        return names.startswith(f"{_NAMESPACE}{function}\t") and path.stat().st_size > 0
    except OSError:
        return False


def write(path: Path, data: bytes, folder: Path) -> None:
    """A file that is whole as soon as it has its name. `folder` is on the same disk: beside the file, where
    `formats.atomic_file` writes, a name of 245 letters leaves no room for another, and threads would share it."""
    handle, partial = tempfile.mkstemp(prefix=".mlx_ds4-", dir=folder)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


# --- what this process has ---------------------------------------------------------------------------------------


@functools.cache
def _compiler() -> Compiler | None:
    """The compiler of this process; None where MLX shall compile."""
    try:
        return make_compiler()
    except Exception:  # as in `provide`
        return None


def make_compiler() -> Compiler:
    """A compiler that does what MLX does here. Raises where there is none, saying what is missing."""
    if mx.__version__ not in KNOWN:
        raise ValueError(f"MLX {mx.__version__} was not compared with what this file says of MLX {', '.join(KNOWN)}")
    if not mx.cuda.is_available():
        raise ValueError("MLX has no CUDA device here")
    found = {name: _loaded(name) for name in ("libmlx.so", "libnvrtc.so")}
    if set(map(len, found.values())) != {1}:  # of several, MLX's is not known
        raise ValueError(f"expected one library each, found {found}")
    (mlx,), (nvrtc,) = found.values()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return Compiler(nvrtc, _architecture(), Path(mlx).parent.parent, folder)


def cache_folder() -> Path:
    """Where MLX keeps compiled modules."""
    if folder := os.environ.get("MLX_PTX_CACHE_DIR"):
        return Path(folder).absolute()
    # As std::filesystem::temp_directory_path; Python's tempfile asks in another order.
    places = filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR")))
    return Path(next(places, "/tmp")).absolute() / "mlx" / mx.__version__ / "ptx"


def header_folder() -> Path | None:
    """A folder for header files that every process names alike, so that texts that include them are alike; None where
    there is none that is ours alone to write."""
    folder = cache_folder() / "mlx_ds4"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        return folder if folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK) else None
    except (AttributeError, OSError):  # Windows knows no geteuid, and has no CUDA for us
        return None


def _architecture() -> str:
    """What MLX compiles for; all GPUs have to agree, for a module is named without it."""
    devices = [mx.device_info(mx.Device(mx.gpu, i)) for i in range(mx.device_count(mx.gpu))]
    ((major, minor),) = {(d["compute_capability_major"], d["compute_capability_minor"]) for d in devices}
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _loaded(name: str) -> set[str]:
    """Files of the shared library `name` that this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    return set(re.findall(rf"(/.*/{re.escape(name)}[.\d]*)$", maps, re.M))


def _cuda_include(package: Path, major: int) -> Path:
    """CUDA's headers, where MLX looks for them."""
    wheel = package.parent / "nvidia" / {12: "cuda_runtime", 13: "cu13"}[major] / "include"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return wheel if wheel.exists() else Path(home) / "include"
