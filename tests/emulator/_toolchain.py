"""Compiling: the runtime, the precompiled shim and the kernels, each once, into a cache folder.

The folder is `~/.cache/mlx_ds4/emulator-<hash>` (or one in the system's temporary folder where that cannot be
made). The hash covers all sources that stay the same from kernel to kernel, the compiler, MLX and the processor, so
nothing in it ever has to be rebuilt. Files appear by atomic renames: parallel test workers may share it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx
import mlx.core as mx

from ._errors import EmulatorError
from ._overloads import overloads
from ._text import FILE, Prepared, arrays_to_pointers

_words = str.split
CLANG = "clang++-19"  # the one version whose instrumentation all checks were proven with
_TOOLS = (CLANG, "readelf", "addr2line", "c++filt")
_HERE = Path(__file__).parent
_MLX_HEADERS = Path(next(iter(mlx.__path__))) / "include"
_COMPILE_SECONDS = 120
_KEEP_DAYS = 14  # folders of earlier versions are deleted when unused for so long
_METAL_HEADERS = _words(
    "atomic common compute geometric integer limits math numeric relational simdgroup simdgroup_matrix stdlib types"
)

_LANGUAGE = _words(
    # Metal as C++: literals without suffix are float, half and bfloat round after every operation, vectors do not
    # convert into each other.
    "-fPIC -fno-exceptions -fno-rtti -fvisibility=hidden -gline-tables-only -gdwarf-4 -fno-strict-aliasing "
    "-fno-math-errno -fno-finite-loops -flax-vector-conversions=none -ftrivial-auto-var-init=pattern -march=native "
    "-Wno-invalid-feature-combination "  # of a processor newer than clang's tables: a warning about no text of ours
    "-Xclang -fconvergent-functions -Xclang -ffloat16-excess-precision=none "
    "-Xclang -fbfloat16-excess-precision=none -Xclang -cl-single-precision-constant "
    "-Wall -Werror -Wimplicit-float-conversion -Wno-unknown-attributes -Wno-duplicate-decl-specifier "
    "-Wno-c++17-extensions -Wno-user-defined-literals -Wno-unused -Wno-keyword-macro -Wno-missing-braces"
)
_CHECKED = _words(
    "-O1 -fno-vectorize -fno-slp-vectorize -fsanitize=thread -mllvm -tsan-instrument-func-entry-exit=0 "
    "-mllvm -bounds-checking-unique-traps "
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero,float-cast-overflow,bool,return,unreachable"
)
_UNCHECKED = ["-O2"]
# Address spaces as numbers in the intermediate code, nothing optimised: for `_vet`.
_VETTED = ["-O0", "-Xclang", "-ffake-address-space-map", "-Xclang", "-disable-llvm-passes"]


@functools.cache
def unavailable_reason() -> str:
    """Why kernels cannot be emulated on this machine, or ""."""
    if not sys.platform.startswith("linux"):
        return f"the kernel emulator runs on Linux, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the kernel emulator has no stack switch for {platform.machine()}"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the kernel emulator found no {', '.join(missing)}: install the packages clang-19 and binutils"
    return ""


@dataclass(frozen=True)
class Mode:
    """How a kernel is compiled. `std` is "c++14" or "c++17"; `fast_fma` lets a*b+c be fused, as Apple's does."""

    checked: bool = True
    std: str = "c++17"
    fast_fma: bool = False

    def flags(self) -> list[str]:
        fused = ["-ffp-contract=fast"] if self.fast_fma else ["-ffp-contract=off"]
        if self.fast_fma and platform.machine() == "x86_64":
            fused.append("-mfma")
        return [f"-std={self.std}", *_LANGUAGE, *fused, *(_CHECKED if self.checked else _UNCHECKED)]


@dataclass(frozen=True)
class Variable:
    """A threadgroup variable: where in the threadgroup section it lies."""

    name: str
    address: int  # within the shared object
    size: int


@dataclass(frozen=True)
class Built:
    """A compiled kernel. `variables` are sorted by address."""

    path: Path
    variables: tuple[Variable, ...]


def _run(command: list[str], *, cwd: Path | None = None, kernel: str = "emulator") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EmulatorError(kernel, "toolchain", f"{command[0]} did not run: {e}") from e


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@functools.cache
def cache_folder() -> Path:
    """The folder for this version of everything; made on first use."""
    key = hashlib.sha256()
    scripts = [_HERE / name for name in ("_overloads.py", "_text.py", "_toolchain.py")]
    for path in sorted([*_HERE.glob("shim/**/*.h"), *_HERE.glob("runtime/*"), *scripts]):
        key.update(f"{path.relative_to(_HERE)}\0".encode() + path.read_bytes())
    version = _run([CLANG, "--version"]).stdout
    key.update("\0".join([version, mx.__version__, str(_MLX_HEADERS), _processor()]).encode())
    name = f"emulator-{key.hexdigest()[:16]}"
    for parent in (Path("~/.cache/mlx_ds4"), Path(tempfile.gettempdir()) / f"mlx_ds4-{os.getuid()}"):
        try:
            parent = parent.expanduser()
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if parent.stat().st_uid != os.getuid():  # code is loaded from here
                continue
            new = not (parent / name).exists()
            (parent / name).mkdir(exist_ok=True)
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            continue
        if new:
            _forget_old_folders(parent)
        return parent / name
    raise EmulatorError("emulator", "toolchain", "no folder for compiled kernels can be made")


def _forget_old_folders(parent: Path) -> None:
    for folder in parent.glob("emulator-*"):
        if time.time() - folder.stat().st_mtime > _KEEP_DAYS * 86400:
            shutil.rmtree(folder, ignore_errors=True)


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by make(temporary path) unless it is there. Two makers at once do no harm: one result stays."""
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
        made = Path(folder) / target.name
        make(made)
        try:
            os.rename(made, target)
        except OSError:  # another process was faster, with a folder that is not empty
            if not target.exists():
                raise
    return target


def _include_folder() -> Path:
    """The shim, its generated part, and Metal's header names, copied so that checkouts do not touch them."""

    def make(folder: Path) -> None:
        shutil.copytree(_HERE / "shim", folder)
        (folder / "msl" / "generated_overloads.h").write_text(overloads())
        for name in _METAL_HEADERS:
            (folder / f"metal_{name}").write_text("#include <msl/metal.h>\n")
        utils = (_MLX_HEADERS / "mlx/backend/metal/kernels/utils.h").read_text()
        (folder / "prelude.h").write_text(arrays_to_pointers(utils))

    return _once(cache_folder() / "include", make)


def _precompiled(flags: list[str]) -> Path:
    """MLX's prelude over the shim, compiled with these flags."""
    include = _include_folder()

    def make(target: Path) -> None:
        search = [f"-isystem{include}", f"-isystem{_MLX_HEADERS}"]
        header = ["-x", "c++-header", "-Xclang", "-fno-pch-timestamp", str(include / "prelude.h")]
        done = _run([CLANG, *flags, "-Wno-error", "-w", *search, *header, "-o", str(target)])
        if done.returncode:
            raise EmulatorError("emulator", "toolchain", f"the shim does not compile: {done.stderr[:2000]}")

    key = hashlib.sha256("\0".join(flags).encode()).hexdigest()[:16]
    return _once(cache_folder() / f"prelude-{key}.pch", make)


def runtime_library() -> Path:
    """The shared object of `runtime/`."""
    include = _include_folder()

    def make(target: Path) -> None:
        flags = _words("-std=c++17 -O2 -fPIC -shared -fvisibility=hidden -fno-exceptions -fno-rtti -Wall -Werror")
        link = [f"-Wl,-soname,{target.name}", "-Wl,--no-as-needed", "-lm"]
        sources = [str(p) for p in sorted((_HERE / "runtime").glob("*.cpp"))]
        done = _run([CLANG, *flags, f"-I{include}", *sources, *link, "-o", str(target)])
        if done.returncode:
            raise EmulatorError("emulator", "toolchain", f"the runtime does not compile: {done.stderr[:2000]}")

    return _once(cache_folder() / "libemulator.so", make)


def build(kernel: str, prepared: Prepared, mode: Mode) -> Built:
    """Compile a kernel, or take it from the cache.

    Raises EmulatorError: "compile" for what clang refuses, and for checked modes "address-space" and "recursion".
    """
    key = hashlib.sha256("\0".join([prepared.cpp, *mode.flags()]).encode()).hexdigest()[:24]
    library, description = cache_folder() / f"{key}.so", cache_folder() / f"{key}.json"

    def make(target: Path) -> None:
        source, assembled = target.with_name(FILE), target.with_suffix(".o")
        source.write_text(prepared.cpp)
        flags = mode.flags()
        pch = ["-include-pch", str(_precompiled(flags)), "-x", "c++"]
        # From within the folder, so that no path of this run ends up in the result.
        compile_ = [CLANG, *flags, *pch, "-c", source.name, "-o", assembled.name]
        done = _run(compile_, cwd=target.parent, kernel=kernel)
        if done.returncode:
            raise _compile_error(kernel, prepared, done.stderr)
        if mode.checked:
            _vet(kernel, prepared, mode, source)
        runtime = runtime_library()
        link = [CLANG, "-shared", "-nostdlib", assembled.name, str(runtime), "-lgcc", f"-Wl,-rpath,{runtime.parent}"]
        done = _run([*link, "-o", target.name], cwd=target.parent, kernel=kernel)
        if done.returncode:
            raise EmulatorError(kernel, "toolchain", f"the kernel does not link: {done.stderr[:1000]}")
        variables = json.dumps(_threadgroup_variables(kernel, target))

        def describe(path: Path) -> None:
            path.write_text(variables)

        _once(description, describe)

    _once(library, make)
    return Built(library, tuple(Variable(*v) for v in json.loads(description.read_text())))


def _compile_error(kernel: str, prepared: Prepared, messages: str) -> EmulatorError:
    """clang's first error, at the author's line: of an error in the shim, the line from which it was reached."""
    error = re.search(r"(?:^|\n)(\S+?):(\d+):\d+: (?:fatal )?error: ([^\n]*)", messages)
    if error is None:
        return EmulatorError(kernel, "compile", f"clang fails: {messages.strip()[:500]}")
    number = int(error.group(2))
    if error.group(1) != FILE:
        note = re.search(rf"(?:^|\n){re.escape(FILE)}:(\d+):", messages[error.start() :])
        number = int(note.group(1)) if note else 0
    return EmulatorError(kernel, "compile", error.group(3), *prepared.place(number))


def _vet(kernel: str, prepared: Prepared, mode: Mode, source: Path) -> None:
    """Refuse casts between address spaces, recursion and calls through pointers, by unoptimised LLVM code."""
    flags = [f"-std={mode.std}", *_LANGUAGE, *_VETTED]
    pch = ["-include-pch", str(_precompiled(flags)), "-x", "c++"]
    done = _run([CLANG, *flags, *pch, "-S", "-emit-llvm", source.name, "-o", "-"], cwd=source.parent, kernel=kernel)
    if done.returncode:
        raise EmulatorError(kernel, "toolchain", f"clang compiles the kernel only once: {done.stderr[:500]}")
    lines = dict(re.findall(r"^(!\d+) = (?:distinct )?!DILocation\(line: (\d+)", done.stdout, re.M))

    def place(instruction: str) -> tuple[str, str]:
        location = re.search(r"!dbg (!\d+)", instruction)
        return prepared.place(int(lines.get(location.group(1), 0)) if location else 0)

    calls: dict[str, dict[str, str]] = {}  # caller -> callee -> one instruction that calls it
    caller = ""
    for line in done.stdout.splitlines():
        if line.startswith("define"):
            caller = re.search(r"@\"?([\w$.]+)\"?\(", line).group(1)
            calls[caller] = {}
        elif line.startswith("}"):
            caller = ""
        elif caller and "addrspacecast" in line:
            raise EmulatorError(kernel, "address-space", "a cast changes a pointer's address space", *place(line))
        elif caller and re.search(r"\bcall\b", line):
            callee = re.search(r"@\"?([\w$.]+)\"?\(", line)
            if callee is None:
                raise EmulatorError(kernel, "recursion", "call through a pointer", *place(line))
            calls[caller].setdefault(callee.group(1), line)
    cycle = _find_cycle(calls)
    if cycle:
        name = _run(["c++filt", cycle[1]]).stdout.strip() or cycle[1]
        raise EmulatorError(kernel, "recursion", f"{name} calls itself", *place(calls[cycle[0]][cycle[1]]))


def _find_cycle(calls: dict[str, dict[str, str]]) -> tuple[str, str] | None:
    """A call (caller, callee) that leads back to a function still running, or None."""
    done: set[str] = set()
    for start in calls:
        if start in done:
            continue
        path, todo = [start], [iter(calls[start])]
        while todo:
            callee = next(todo[-1], None)
            if callee is None:
                done.add(path.pop())
                todo.pop()
            elif callee in path:
                return path[-1], callee
            elif callee in calls and callee not in done:
                path.append(callee)
                todo.append(iter(calls[callee]))
    return None


def _threadgroup_variables(kernel: str, library: Path) -> list[tuple[str, int, int]]:
    table = _run(["readelf", "-sW", str(library)], kernel=kernel).stdout
    # Number, address, size, type, binding, visibility, section, name.
    symbols = [f for f in map(str.split, table.splitlines()) if len(f) == 8 and f[0].rstrip(":").isdigit()]
    limits = {f[7]: int(f[1], 16) for f in symbols if f[7].endswith("_msl_threadgroup")}
    start, stop = limits.get("__start_msl_threadgroup", 0), limits.get("__stop_msl_threadgroup", 0)
    found = {(_plain_name(f[7]), int(f[1], 16), int(f[2], 0)) for f in symbols if f[3] == "OBJECT"}
    return sorted((v for v in found if start <= v[1] < stop), key=lambda v: v[1])


def _plain_name(mangled: str) -> str:
    """`part` of _ZZ11kernel_namevE4part (a local variable's mangled name ends with its length and itself)."""
    for match in re.finditer(r"E(\d+)(?=([A-Za-z_]\w*))", mangled):
        name = match.group(2)[: int(match.group(1))]
        if re.fullmatch(r"(_\d+|__\d+_)?", match.group(2)[len(name) :]):
            return name
    return mangled


def source_line(library: Path, offset: int, prepared: Prepared) -> tuple[str, str]:
    """The author's line that an address within the shared object belongs to: through inlined functions, the innermost
    line of the kernel's own text."""
    frames = _run(["addr2line", "-i", "-e", str(library), hex(offset)]).stdout.splitlines()
    for frame in frames:
        match = re.search(r"([^/:]+):(\d+)", frame)
        if match and match.group(1) == FILE and prepared.place(int(match.group(2)))[0]:
            return prepared.place(int(match.group(2)))
    return "", ""
