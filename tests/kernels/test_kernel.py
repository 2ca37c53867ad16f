"""`Kernel`, its switches and the list of kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_ds4.custom_kernels import _kernel, _switches
from mlx_ds4.custom_kernels._kernel import Kernel, all_kernels, load_all, watch_launches
from mlx_ds4.custom_kernels._switches import (
    KernelError,
    backend,
    disable,
    enabled,
    families,
    reset_settings,
    trace,
    use_kernels,
)


def add_one(**changes) -> Kernel:
    fields = {
        "name": "test_add_one",
        "input_names": ["x"],
        "output_names": ["y"],
        "source": "uint i = thread_position_in_grid.x; if (i < uint(N)) y[i] = x[i] + 1;",
        "exact": True,
        "family": "rms_norm",
    }
    return Kernel(**{**fields, **changes})


@pytest.fixture(autouse=True)
def no_test_kernels(monkeypatch):
    """Kernels that a test declares do not stay in the list, and settings are read anew."""
    monkeypatch.delenv("MLX_DS4_KERNELS", raising=False)
    monkeypatch.delenv("MLX_DS4_DISABLE", raising=False)
    load_all()
    monkeypatch.setattr(_kernel, "_registry", dict(_kernel._registry))
    reset_settings()
    yield
    reset_settings()


def call(kernel: Kernel, **changes) -> list[mx.array]:
    launch = {
        "inputs": [mx.arange(8)],
        "template": [("N", 8)],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(8,)],
        "output_dtypes": [mx.int32],
    }
    return kernel(**{**launch, **changes})


# --- switches


def test_nothing_happens_at_import():
    code = (
        "import mlx.core as mx\n"
        "def refuse(*a, **k): raise SystemExit('a device was asked at import')\n"
        "mx.metal.is_available = mx.cuda.is_available = mx.default_device = refuse\n"
        "mx.fast.metal_kernel = mx.fast.cuda_kernel = refuse\n"
        "from mlx_ds4.custom_kernels import _kernel, _switches\n"
        "_kernel.load_all(); assert _switches._settings is None\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"MLX_DS4_KERNELS": "nonsense"}
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("mode", "expected"), [("auto", None), ("reference", None), ("emulate", "emulate"), ("", None)]
)
def test_mode_from_the_environment(monkeypatch, mode, expected):
    monkeypatch.setattr(_switches, "_gpu", lambda: None)
    monkeypatch.setenv("MLX_DS4_KERNELS", mode)
    reset_settings()
    assert backend() == expected
    assert enabled("rms_norm") == (expected is not None)


def test_unknown_mode_is_one_sentence(monkeypatch):
    monkeypatch.setenv("MLX_DS4_KERNELS", "fast")
    reset_settings()
    with pytest.raises(KernelError, match=r"^MLX_DS4_KERNELS is 'fast', expected one of auto, reference, emulate"):
        enabled("rms_norm")


def test_disable_from_the_environment(monkeypatch):
    monkeypatch.setenv("MLX_DS4_KERNELS", "emulate")
    monkeypatch.setenv("MLX_DS4_DISABLE", " rms_norm ,")
    reset_settings()
    assert not enabled("rms_norm")
    assert enabled("rope")


def test_unknown_family_lists_the_known(monkeypatch):
    monkeypatch.setenv("MLX_DS4_DISABLE", "rms_norm,rmsnorm")
    reset_settings()
    with pytest.raises(KernelError, match=r"MLX_DS4_DISABLE names rmsnorm, .* rms_norm, rope"):
        enabled("rms_norm")


def test_the_compiled_step_is_disabled_like_a_family(monkeypatch):
    monkeypatch.setenv("MLX_DS4_KERNELS", "emulate")
    assert enabled("compiled_step")
    monkeypatch.setenv("MLX_DS4_DISABLE", "compiled_step")
    reset_settings()
    assert not enabled("compiled_step") and enabled("rope")


def test_the_environment_is_read_once(monkeypatch):
    assert not enabled("rms_norm") or backend() in ("metal", "cuda")
    before = backend()
    monkeypatch.setenv("MLX_DS4_KERNELS", "emulate")
    assert backend() == before
    reset_settings()
    assert backend() == "emulate"


def test_contexts_nest_and_restore():
    with use_kernels("emulate"):
        with disable("rms_norm"):
            assert not enabled("rms_norm")
            with use_kernels("reference"):
                assert not enabled("rope")
            with use_kernels("emulate"):
                assert not enabled("rms_norm")  # disabled families stay disabled
        assert enabled("rms_norm")
    with pytest.raises(RuntimeError, match="inside"), use_kernels("emulate"):
        raise RuntimeError("inside")
    assert backend() != "emulate"


def test_contexts_refuse_bad_names():
    with pytest.raises(KernelError, match="expected one of"):
        use_kernels("metal")
    with pytest.raises(KernelError, match="no kernel family"):
        disable("topkk")
    with pytest.raises(KernelError, match="only 'emulate' takes"):
        use_kernels("reference", order="random")


@pytest.mark.parametrize("available", ["metal", "cuda"])
def test_a_gpu_is_used_only_as_default_device(monkeypatch, available):
    monkeypatch.setattr(_switches, "_gpu", lambda: available)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert backend() == available
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert backend() is None


# --- the list


def test_every_kernel_belongs_to_a_family_and_names_a_thread():
    assert {"rms_norm", "rope", "fake_quant", "hyper_connection"} <= set(families())
    assert "rms_norm" in {k.name for k in all_kernels()}
    for kernel in all_kernels():
        if kernel.source is not None:  # MLX writes a malformed signature for a body that asks for nothing
            assert "_position_in_" in kernel.source or "_index_in_" in kernel.source, kernel.name


def test_the_documentation_says_which_are_exact():
    page = (Path(_kernel.__file__).parents[1] / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = [
        f"| `{k.family}` | `{k.name}` | {'exact' if k.exact else 'within tolerance'} |"
        for k in all_kernels()
        if k.source is not None
    ]
    assert sorted(line for line in page.splitlines() if line.endswith(("| exact |", "| within tolerance |"))) == sorted(
        rows
    )


def test_names_are_unique():
    kernel = add_one()
    assert add_one() == kernel
    with pytest.raises(KernelError, match="two different kernels are named test_add_one"):
        add_one(source="// another")


def test_a_kernel_is_immutable_data():
    kernel = add_one()
    with pytest.raises(AttributeError):
        kernel.source = ""
    assert kernel.input_names == ("x",)


def test_cuda_text():
    header, body = add_one(source="threadgroup float a[2]; y[0] = x[0];").cuda_text()
    assert "simd_sum" in header and body.startswith("__shared__ float a[2];")
    bound = add_one(name="test_bound", cuda_bounds=(64, 2)).cuda_text()[0]
    assert "__launch_bounds__(64, 2)" in bound and "__launch_bounds__" not in header
    own = add_one(name="test_own", cuda_source="y[0] = x[0];", cuda_header="// mine")
    assert own.cuda_text() == ("// mine", "y[0] = x[0];")
    for half in ({"cuda_header": "// mine"}, {"source": None}):
        with pytest.raises(KernelError, match="has no cuda_source to go with the rest"):
            add_one(name="test_half", **half)


def test_a_kernel_for_cuda_alone():
    kernel = add_one(name="test_cuda_only", source=None, cuda_source="y[0] = x[0];")
    assert kernel.cuda_text() == ("", "y[0] = x[0];")
    with use_kernels("emulate"), pytest.raises(KernelError, match="is for CUDA alone"):
        call(kernel)


# --- launching


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": []}, "got 0 inputs, expected x"),
        ({"inputs": [1.0]}, "scalar input"),
        ({"inputs": [mx.array(1.0)]}, "scalar input"),
        ({"output_dtypes": []}, "1 output shapes and 0 output dtypes"),
        ({"output_shapes": [(0, 3)]}, "empty output"),
        ({"threadgroup": (33, 1, 1)}, "33 threads in a group"),
        ({"threadgroup": (1024, 2, 1)}, "2048 threads in a group"),
        ({"threadgroup": (0, 1, 1)}, "0 threads in a group"),
        ({"grid": (40, 1, 1)}, "round it up"),
        ({"grid": (0, 1, 1)}, "round it up"),
        ({"grid": (2**31, 1, 1)}, r"less than 2\^31"),
    ],
)
def test_bad_launches_are_refused(changes, message):
    with use_kernels("emulate"), pytest.raises(KernelError, match=message):
        call(add_one(), **changes)


def test_a_launch_without_a_back_end_names_the_question():
    with use_kernels("reference"), pytest.raises(KernelError, match=r"ask enabled\('rms_norm'\) first"):
        call(add_one())


@pytest.mark.parametrize("where", ["metal", "cuda"])
def test_the_gpu_back_ends_get_the_text_and_the_call(monkeypatch, where):
    """The two MLX kernel makers, replaced by ones that record what they are given."""
    made = []

    def maker(**fields):
        def run(**launch):
            made.append((fields, launch))
            return [mx.zeros(s, dtype=d) for s, d in zip(launch["output_shapes"], launch["output_dtypes"], strict=True)]

        return run

    monkeypatch.setattr(mx.fast, f"{where}_kernel", maker)
    monkeypatch.setattr(_switches, "_gpu", lambda: where)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    kernel = add_one(header="inline int one(const device int* p) { return 1; }")
    call(kernel, init_value=2.0)
    call(kernel)
    (fields, launch), (again, plain) = made
    assert fields is again  # made once
    assert launch["init_value"] == 2.0 and "init_value" not in plain
    assert launch["grid"] == (32, 1, 1) and launch["template"] == [("N", 8)]
    if where == "metal":
        assert fields["header"] == kernel.header and fields["source"] == kernel.source
        assert fields["atomic_outputs"] is False
    else:
        path = re.fullmatch(r'#include "(.+)"\n', fields["header"])[1]
        assert "__device__ inline int one(const  int* p)" in Path(path).read_text(encoding="utf-8")
        path = re.fullmatch(r'#include "(.+)"\n// \n', fields["source"])[1]
        assert Path(path).read_text(encoding="utf-8") == kernel.cuda_text()[1]
        call(add_one(name="test_shaped", source="y[0] = x_shape[x_ndim - 1];"))
        assert made[-1][0]["source"].endswith('"\n// x_shape x_ndim\n')  # or MLX would not pass them
        assert made[-1][0]["name"].startswith("test_shaped_")


@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [((9, 0), 227), ((10, 0), 227), ((8, 9), 99), ((12, 1), 99), ((8, 0), 163), ((6, 1), 48)],
)
def test_a_block_has_room_for_what_a_kernel_asks(monkeypatch, capability, kilobytes):
    info = dict(zip(("compute_capability_major", "compute_capability_minor"), capability, strict=True))
    monkeypatch.setattr(mx, "device_info", lambda device: info)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    _kernel.block_bytes.cache_clear()
    assert _kernel.block_bytes() == kilobytes << 10
    for size, fits in ((0, True), ((kilobytes - 3) << 10, True), (((kilobytes - 3) << 10) + 1, False)):
        assert add_one(name=f"test_room_{size}", shared_memory=size).has_room == fits
    _kernel.block_bytes.cache_clear()


def test_an_array_that_is_given_twice_is_passed_once_on_cuda(monkeypatch):
    made = []

    def maker(**fields):
        return lambda **launch: made.append((fields, launch)) or [mx.zeros((8,))]

    monkeypatch.setattr(mx.fast, "cuda_kernel", maker)
    monkeypatch.setattr(_switches, "_gpu", lambda: "cuda")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    source = "y[0] = a[0] + b_shape[0] + c[c_ndim]; uint t = thread_index_in_simdgroup;"
    kernel = add_one(name="test_twice", input_names=["a", "b", "c"], source=source)
    x, other = mx.zeros((8,)), mx.zeros((8,))
    for inputs in ([x, x, other], [other, other, x], [x, other, x], [x, other, mx.zeros((8,))]):
        call(kernel, inputs=inputs, output_dtypes=[mx.float32])
    (first, launch), (again, _), (third, _), (distinct, _) = made
    assert launch["inputs"] == [x, other] and first is again and first["input_names"] == ["a", "c"]
    aliases, last = "const auto b = a;\nconst auto& b_shape = a_shape;\n", "// a_shape c_ndim\n"
    assert first["source"].startswith(aliases) and first["source"].endswith(last)
    assert third["input_names"] == ["a", "b"] and "const auto& c_ndim = a_ndim;" in third["source"]
    assert distinct["input_names"] == ["a", "b", "c"] and "const auto" not in distinct["source"]
    assert len({f["name"] for f in (first, third, distinct)}) == 3


def test_a_header_stays_in_the_text_where_no_file_can_be_written(monkeypatch):
    monkeypatch.setattr(_kernel, "_header_folder", lambda: None)
    assert _kernel.included.__wrapped__("// long") == "// long"
    monkeypatch.setattr(_kernel, "_header_folder", lambda: Path("/nowhere"))
    assert _kernel.included.__wrapped__("// long") == "// long"


def test_the_emulator_gets_the_kernel_and_the_options(monkeypatch):
    seen = []

    class Emulator:
        @staticmethod
        def launch(kernel, inputs, **options):
            seen.append((kernel, inputs, options))
            return [inputs[0] + 1]

    monkeypatch.setattr(_kernel, "emulator", lambda: Emulator)
    kernel = add_one()
    with use_kernels("emulate", order="random", checked=False):
        assert call(kernel)[0].tolist() == list(range(1, 9))
    assert seen[0][0] is kernel
    assert seen[0][2] == {
        "template": [("N", 8)],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(8,)],
        "output_dtypes": [mx.int32],
        "order": "random",
        "checked": False,
    }


def test_emulation_outside_a_checkout_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(_kernel, "emulator", _kernel.emulator.__wrapped__)
    monkeypatch.setattr(_kernel, "_FOLDER", tmp_path / "custom_kernels")
    with use_kernels("emulate"), pytest.raises(KernelError, match="only in a source checkout"):
        call(add_one())


def test_emulation_without_its_compiler_says_so(monkeypatch):
    package = pytest.importorskip("tests.emulator", reason="not a checkout")
    monkeypatch.setattr(_kernel, "emulator", _kernel.emulator.__wrapped__)
    monkeypatch.setattr(package, "unavailable_reason", lambda: "no clang: install it")
    assert _kernel.emulator_missing() == "no clang: install it, or unset MLX_DS4_KERNELS."
    with use_kernels("emulate"), pytest.raises(KernelError, match=r"no clang: install it"):
        call(add_one())


def test_emulation_from_another_folder(tmp_path):
    """The checkout need not be the working directory."""
    code = (
        "from mlx_ds4.custom_kernels._kernel import emulator, emulator_missing\n"
        "if not emulator_missing(): assert emulator().launch"
    )
    root = Path(_kernel.__file__).parents[1]
    environment = {"PYTHONPATH": str(root), "PATH": os.environ["PATH"]}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_watchers_and_the_metal_text():
    kernel = add_one()
    launches = []
    with watch_launches(launches.append):
        outputs = trace(lambda: call(kernel, inputs=[mx.arange(9)]))
    assert len(launches) == 1
    assert launches[0].kernel is kernel
    assert launches[0].outputs[0] is outputs[0]
    name, text = launches[0].metal_text()
    assert name.startswith("custom_kernel_test_add_one__8_")
    assert "const device int32_t* x [[buffer(0)]]" in text and kernel.source in text
    assert "template <int N>" in text and f"{name}<8>" in text


def test_trace_keeps_the_switches():
    with use_kernels("reference"):
        assert trace(lambda: enabled("rms_norm")) is False
    with disable("rms_norm"):
        assert trace(lambda: (enabled("rms_norm"), enabled("rope"))) == (False, True)
    assert backend() != "export"
