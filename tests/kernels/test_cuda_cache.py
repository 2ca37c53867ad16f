"""Modules of CUDA kernels that are compiled ahead of MLX. NVRTC is a small library that answers in its place."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_ds4.custom_kernels import _cuda_cache, _switches
from mlx_ds4.custom_kernels._cuda_cache import Compiler, CudaKernel, compiling, settle, together
from mlx_ds4.custom_kernels._cuda_text import function_name, kernel_text, module_name, module_path
from mlx_ds4.custom_kernels._kernel import Kernel
from mlx_ds4.custom_kernels._switches import disable
from tests.kernels.test_portable_nvcc import ALL_NAMES_BODY, ALL_NAMES_HEADER
from tools import cuda_cache as tool

GXX = shutil.which("g++")
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++ here: the stand-in of NVRTC is C++")

FIELDS = {
    "name": "foo_f32",
    "input_names": ["x", "w"],
    "output_names": ["y", "z"],
    "source": "y[0] = x_shape[x_ndim - 1] + w_strides[0];\n// x_shape\n",
    "header": '// stamp\n#include "a.h"\n',
}
DTYPES = [mx.float32, mx.uint32], [mx.bfloat16, mx.float16]
TEMPLATE = (("N", -8), ("T", mx.bfloat16), ("F", True), ("G", False))
# The text and the names that functions cut out of MLX's own source have given for these.
TEXT = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

// stamp
#include "a.h"
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_foo_f32_-8_bfloat16_t_t_f(
    const float* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ int x_ndim,
    const uint32_t* w,
    const __grid_constant__ Strides w_strides,
    __nv_bfloat16* y,
    __half* z) {
  constexpr int N = -8;
  using T = __nv_bfloat16;
  constexpr bool F = true;
  constexpr bool G = false;

y[0] = x_shape[x_ndim - 1] + w_strides[0];
// x_shape

}

} // namespace mlx::core::cu
"""
MODULE = "custom_kernel_foo_f32_-8_bfloat16_t_t_f_ff1235453a20cfbc"
MODULE_WITHOUT_TEMPLATE = "custom_kernel_foo_f32_808443f7ca07ae34"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("nvrtc") / "libnvrtc.so.13"
    source = Path(__file__).parent / "nvrtc_stand_in.cpp"
    subprocess.run([GXX, "-std=c++17", "-shared", "-fPIC", "-pthread", "-o", made, source], check=True)
    return made


@pytest.fixture
def nvrtc(library) -> ctypes.CDLL:
    """The loaded stand-in, with its counters at zero."""
    loaded = ctypes.CDLL(str(library))
    for name in ("compiled", "most"):
        ctypes.c_int.in_dll(loaded, name).value = 0
    return loaded


@pytest.fixture
def compiler(library, nvrtc, tmp_path) -> Compiler:
    return make(library, tmp_path)


def make(library: Path, tmp_path: Path, architecture: str = "sm_90a", headers: str = "") -> Compiler:
    """In a folder laid out like the one where wheels are installed."""
    include, folder = tmp_path / "nvidia" / "cu13" / "include", tmp_path / "ptx"
    for path in (include, folder, tmp_path / "mlx" / "include" / "cccl"):
        path.mkdir(parents=True, exist_ok=True)
    for name in _cuda_cache._CUDA_HEADERS:
        (include / name).write_text(name + headers)
    return Compiler(str(library), architecture, tmp_path / "mlx", folder)


def count(nvrtc: ctypes.CDLL, what: str) -> int:
    return ctypes.c_int.in_dll(nvrtc, what).value


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def launches(monkeypatch, compiler: Compiler | None, **changes) -> CudaKernel:
    """A kernel where MLX's launches do nothing."""
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **fields: lambda **call: [fields, call])
    monkeypatch.setattr(_cuda_cache, "_compiler", lambda: compiler)
    monkeypatch.setattr(_cuda_cache, "enabled", lambda name: name not in _switches.current().disabled)
    return CudaKernel({**FIELDS, **changes}, *DTYPES)


# --- MLX's rules


def test_the_text_is_that_of_mlx():
    function = function_name("foo_f32", TEMPLATE)
    assert kernel_text(FIELDS, *DTYPES, TEMPLATE) == TEXT
    assert module_name(function, TEXT) == MODULE
    bare = kernel_text(FIELDS, *DTYPES, ())
    assert module_name(function_name("foo_f32", ()), bare) == MODULE_WITHOUT_TEMPLATE
    assert function_name("k", [("A", mx.float32), ("B", mx.uint8), ("C", 0)]) == "custom_kernel_k_float_uint8_t_0"


@needs_gxx
def test_the_hash_is_that_of_a_string(nvrtc):
    nvrtc.std_hash.restype, nvrtc.std_hash.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t]
    for text in [*("abcdefghijklmnopqrs"[:n] for n in range(20)), TEXT, "ü" * 5000]:
        data = text.encode()
        assert module_name("k", text) == f"k_{nvrtc.std_hash(data, len(data)):x}"


@pytest.mark.parametrize(("length", "parts"), [(245, [245]), (246, [245, 1]), (490, [245, 245]), (491, [245, 245, 1])])
def test_a_long_name_goes_over_folders(tmp_path, length, parts):
    path = module_path(tmp_path, "k" * length).relative_to(tmp_path)
    assert [len(part) for part in path.with_suffix("").parts] == parts and path.suffix == ".ptx"


def test_the_cache_folder_is_that_of_mlx(monkeypatch):
    for name in ("MLX_PTX_CACHE_DIR", "TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    ending = f"mlx/{mx.__version__}/ptx"
    assert _cuda_cache.cache_folder() == Path("/tmp") / ending
    for name in ("TEMPDIR", "TEMP", "TMP", "TMPDIR"):  # the later ones go first
        monkeypatch.setenv(name, f"/{name}")
        assert _cuda_cache.cache_folder() == Path(f"/{name}") / ending
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/own")
    assert _cuda_cache.cache_folder() == Path("/own")


# --- one module


@needs_gxx
@pytest.mark.parametrize("name", ["foo_f32", "long_" * 60])
def test_a_module_is_compiled_once_and_kept(compiler, nvrtc, name):
    fields = {**FIELDS, "name": name}
    function, text = function_name(name, TEMPLATE), kernel_text(fields, *DTYPES, TEMPLATE)
    path = module_path(compiler.folder, module_name(function, text))
    for _ in range(2):
        compiler.provide(fields, *DTYPES, TEMPLATE)
        assert count(nvrtc, "compiled") == 1 and count(nvrtc, "alive") == 0
    function = f"mlx::core::cu::{function}"
    assert path.with_suffix(".txt").read_text() == f"{function}\t_Z{function}\n"
    assert path.read_text().endswith(text) and len(files(compiler.folder)) == 2
    mine = "mlx/backend/cuda/device/utils.cuh;cooperative_groups.h;--device-as-default-execution-space;"
    assert path.read_text().startswith(f"{mine}--gpu-architecture=sm_90a;--include-path=")
    for fault in (lambda: path.write_bytes(b""), path.unlink, path.with_suffix(".txt").unlink):
        fault()
        compiler.provide(fields, *DTYPES, TEMPLATE)
        assert path.read_text().endswith(text) and path.with_suffix(".txt").exists()
    path.with_suffix(".txt").write_text("mlx::core::cu::other\t_Zother\n")
    compiler.provide(fields, *DTYPES, TEMPLATE)
    assert path.with_suffix(".txt").read_text().startswith(function) and count(nvrtc, "compiled") == 5


@needs_gxx
def test_names_come_first_and_files_are_whole(compiler, monkeypatch):
    seen, replace = [], os.replace

    def watched(partial, path):
        seen.append((path.suffix, Path(partial).stat().st_size > 0, path.exists()))
        replace(partial, path)

    monkeypatch.setattr(os, "replace", watched)
    compiler.provide(FIELDS, *DTYPES, TEMPLATE)
    assert seen == [(".txt", True, False), (".ptx", True, False)]


@needs_gxx
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_disk_that_fails_leaves_nothing(compiler, monkeypatch, call):
    def fail(*_):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, call, fail)
    compiler.provide(FIELDS, *DTYPES, TEMPLATE)
    assert files(compiler.folder) == []


@needs_gxx
def test_a_text_that_does_not_compile_is_left_to_mlx(compiler, nvrtc):
    broken = {**FIELDS, "source": "#error"}
    compiler.provide(broken, *DTYPES, TEMPLATE)
    assert files(compiler.folder) == [] and count(nvrtc, "alive") == 0
    with pytest.raises(ValueError, match="NVRTC does not compile custom_kernel_k: a fault"):
        compiler.compile("custom_kernel_k", "#error")
    compiler.provide(FIELDS, [mx.complex64, mx.uint32], DTYPES[1], TEMPLATE)  # a dtype that no kernel here has
    assert files(compiler.folder) == []


@needs_gxx
def test_several_at_once_leave_whole_files(compiler, nvrtc):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: compiler.provide(FIELDS, *DTYPES, TEMPLATE), range(4)))
    path = compiler.folder / f"{MODULE}.ptx"
    assert path.read_text().endswith(TEXT) and files(compiler.folder) == [f"{MODULE}.ptx", f"{MODULE}.txt"]


@needs_gxx
def test_the_stamp_names_what_a_binary_depends_on(library, tmp_path):
    other = tmp_path / "libnvrtc.so.13"
    other.write_bytes(library.read_bytes() + b"\0")
    stamps = [make(library, tmp_path).stamp, make(library, tmp_path, "sm_100a").stamp]
    stamps += [make(library, tmp_path, headers="changed").stamp, make(other, tmp_path).stamp]
    assert len(set(stamps)) == 4 and make(library, tmp_path).stamp == stamps[0]
    start = f"// MLX {mx.__version__}, NVRTC 13.5 of {library.stat().st_size} bytes, sm_90a, headers "
    assert stamps[0].startswith(start) and stamps[0].endswith("\n")


# --- launches


@needs_gxx
def test_a_launch_has_its_module_unless_disabled(compiler, nvrtc, monkeypatch):
    kernel = launches(monkeypatch, compiler)
    fields, call = kernel(template=list(TEMPLATE), grid=(1, 1, 1))
    assert fields["header"] == compiler.stamp + FIELDS["header"]
    assert call == {"template": list(TEMPLATE), "grid": (1, 1, 1)}
    kernel(template=list(TEMPLATE))
    kernel(template=[])
    assert count(nvrtc, "compiled") == 2 and len(files(compiler.folder)) == 4
    with disable("cuda_cache"):
        kernel = launches(monkeypatch, compiler, name="other")
    assert kernel(template=[])[0]["header"] == FIELDS["header"]  # a text that no module of ours is for
    assert count(nvrtc, "compiled") == 2


def test_the_switch_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("MLX_DS4_KERNELS", "emulate")
    for disabled in ("", "cuda_cache"):
        monkeypatch.setenv("MLX_DS4_DISABLE", disabled)
        _switches.reset_settings()
        assert _switches.enabled("cuda_cache") == (not disabled) and _switches.enabled("rope")
    monkeypatch.undo()
    _switches.reset_settings()


@needs_gxx
def test_modules_compile_side_by_side(compiler, nvrtc, monkeypatch):
    kernel = launches(monkeypatch, compiler)
    with together():
        for n in range(4):
            with together():  # the inner end does not wait
                kernel(template=[("N", n)])
        assert compiling()
        settle()
        assert not compiling() and count(nvrtc, "compiled") == 4
        kernel(template=[("N", 4)])
    assert count(nvrtc, "compiled") == 5 and len(files(compiler.folder)) == 10
    if (os.cpu_count() or 1) > 1:
        assert count(nvrtc, "most") > 1
    ctypes.c_int.in_dll(nvrtc, "most").value = 0
    kernel(template=[("N", 5)])  # outside, a launch waits
    assert count(nvrtc, "compiled") == 6 and not compiling()


@needs_gxx
def test_an_error_inside_ends_the_turn(compiler, nvrtc, monkeypatch):
    kernel = launches(monkeypatch, compiler)
    with pytest.raises(KeyError), together():
        kernel(template=[])
        raise KeyError
    assert count(nvrtc, "compiled") == 1
    kernel(template=[("N", 1)])
    assert count(nvrtc, "compiled") == 2


@needs_gxx
def test_a_thread_waits_for_its_own(compiler, nvrtc, monkeypatch):
    kernel = launches(monkeypatch, compiler)
    with together():
        other = threading.Thread(target=lambda: kernel(template=[("N", 1)]))
        other.start()
        other.join()
        assert count(nvrtc, "compiled") == 1 and not compiling()


@needs_gxx
def test_without_threads_mlx_compiles(compiler, nvrtc, monkeypatch):
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr(_cuda_cache, "_pool", lambda: pool)
    kernel = launches(monkeypatch, compiler)
    with together():
        assert kernel(template=[])[1] == {"template": []}
    assert count(nvrtc, "compiled") == 0


# --- what this process has


@pytest.fixture
def claimed_gpu(monkeypatch, tmp_path):
    """MLX with CUDA, by its word; the libraries and the devices are for the test to say."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_cuda_cache, "KNOWN", (mx.__version__,))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "ptx"))
    loaded = {"libmlx.so": {str(tmp_path / "mlx" / "lib" / "libmlx.so")}}
    capabilities = [(9, 0)]
    names = ("compute_capability_major", "compute_capability_minor")
    monkeypatch.setattr(_cuda_cache, "_loaded", lambda name: loaded[name])
    monkeypatch.setattr(mx, "device_count", lambda kind: len(capabilities))
    monkeypatch.setattr(mx, "Device", lambda kind, i: i)
    monkeypatch.setattr(mx, "device_info", lambda i: dict(zip(names, capabilities[i], strict=True)))
    return loaded, capabilities


@needs_gxx
def test_the_compiler_of_a_process(claimed_gpu, library, tmp_path, monkeypatch):
    loaded, capabilities = claimed_gpu
    loaded["libnvrtc.so"] = {str(library)}
    make(library, tmp_path)
    assert ", sm_90a, " in _cuda_cache._compiler.__wrapped__().stamp
    capabilities[0] = (8, 6)
    assert ", sm_86, " in _cuda_cache._compiler.__wrapped__().stamp
    capabilities.append((8, 6))
    assert ", sm_86, " in _cuda_cache._compiler.__wrapped__().stamp
    capabilities[1] = (9, 0)  # one folder cannot serve two architectures
    assert _cuda_cache._compiler.__wrapped__() is None
    capabilities.pop()
    for what, message in (
        ({"/no/such/libnvrtc.so.13"}, "cannot open"),
        ({str(library), "/other/libnvrtc.so.12"}, "expected one library each"),
        (set(), "expected one library each"),
        ({"libm.so.6"}, "nvrtcVersion"),
    ):
        loaded["libnvrtc.so"] = what
        with pytest.raises((AttributeError, OSError, ValueError), match=message):
            _cuda_cache.make_compiler()
        assert _cuda_cache._compiler.__wrapped__() is None
    loaded["libnvrtc.so"] = {str(library)}
    (tmp_path / "nvidia" / "cu13" / "include" / "cuda_fp16.h").unlink()
    assert _cuda_cache._compiler.__wrapped__() is None
    monkeypatch.setattr(_cuda_cache, "KNOWN", ("0.0.1",))
    with pytest.raises(ValueError, match=r"was not compared with what this file says of MLX 0\.0\.1"):
        _cuda_cache.make_compiler()


def test_no_compiler_without_a_gpu(monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    assert _cuda_cache._compiler.__wrapped__() is None


@needs_gxx
def test_loaded_libraries(nvrtc, library):
    assert str(library) in _cuda_cache._loaded("libnvrtc.so")
    assert len(_cuda_cache._loaded("libmlx.so")) == 1 and not _cuda_cache._loaded("libnvrtc-builtins.so")


def test_cuda_headers_are_looked_for_as_mlx_does(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    package = tmp_path / "mlx"
    assert _cuda_cache._cuda_include(package, 13) == Path("/usr/local/cuda/include")
    monkeypatch.setenv("CUDA_PATH", "/path")
    assert _cuda_cache._cuda_include(package, 13) == Path("/path/include")
    monkeypatch.setenv("CUDA_HOME", "/home")
    assert _cuda_cache._cuda_include(package, 13) == Path("/home/include")
    for major, name in ((12, "cuda_runtime"), (13, "cu13")):
        wheel = tmp_path / "nvidia" / name / "include"
        wheel.mkdir(parents=True)
        assert _cuda_cache._cuda_include(package, major) == wheel


# --- the tool


@needs_gxx
@pytest.mark.parametrize(("same", "taken", "code"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_the_tool_compares_with_mlx(compiler, monkeypatch, capfd, same, taken, code):
    """An MLX that prints its text, or another one, and takes the module, or compiles by itself."""

    class Late:
        def __init__(self, text: str, value: float):
            self.text, self.value = text, value

        def item(self) -> float:
            function = function_name("cuda_cache_check", tool.TEMPLATE)
            module = module_path(compiler.folder, module_name(function, self.text)).read_text()
            return self.value if taken and "? 2.0f : -1.0f" in module else 1.0

    def maker(**fields):
        text = kernel_text(fields, [mx.uint32], [mx.float32, mx.float16], tool.TEMPLATE)

        def run(**call):
            os.write(1, (text if same else text.replace("y[0]", "y[1]")).encode())
            return Late(text, 2.0), Late(text, 5.0)

        return run

    monkeypatch.setattr(mx.fast, "cuda_kernel", maker)
    monkeypatch.setattr(_cuda_cache, "make_compiler", lambda: compiler)
    assert tool.main() == code
    out = capfd.readouterr().out
    assert f"text as MLX's: {same}; module taken: {taken}," in out and compiler.stamp in out
    assert ("--- MLX's" in out) != same and files(compiler.folder) == []


def test_the_tool_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    assert tool.main() == 2 and "MLX compiles by itself here: MLX" in capsys.readouterr().out


# --- NVRTC itself


def test_nvrtc_compiles_our_texts(tmp_path):
    """With the stand-in of MLX's headers: every name of the prelude, and a body for CUDA alone."""
    found = importlib.util.find_spec("nvidia")
    roots = [Path(place) / "cu13" for place in found.submodule_search_locations] if found else []
    root = next((r for r in roots if (r / "lib" / "libnvrtc.so.13").exists()), None)
    if root is None or not (root / "include" / "cccl").exists():
        pytest.skip(
            "no NVRTC: pip install 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-cccl==13.*'"
        )
    (tmp_path / "mlx" / "include").mkdir(parents=True)
    (tmp_path / "mlx" / "include" / "cccl").symlink_to(root / "include" / "cccl")
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "cu13").symlink_to(root)
    compiler = Compiler(str(root / "lib" / "libnvrtc.so.13"), "sm_90a", tmp_path / "mlx", tmp_path)
    all_names = Kernel("test_names", ["x", "q"], ["y"], ALL_NAMES_BODY, ALL_NAMES_HEADER, exact=True, family="test")
    names = [("T", mx.bfloat16), ("N", 3), ("FLAG", True)]
    fields = all_names._cuda_fields("b16", range(2))
    text = kernel_text(fields, [mx.bfloat16, mx.uint8], [mx.bfloat16], names)
    mangled, binary = compiler.compile(function_name(fields["name"], names), text)
    assert binary.startswith(b"\x7fELF") and mangled.encode() in binary
    text = text.replace("__nv_bfloat16* y", "other_type* y")
    with pytest.raises(ValueError, match='identifier "other_type" is undefined'):
        compiler.compile(function_name(fields["name"], names), text)
