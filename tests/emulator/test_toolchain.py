"""Compiling and the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.emulator import EmulatorError, _launch, _toolchain, available, unavailable_reason
from tests.emulator._overloads import overloads
from tests.emulator.sample_kernels import sample

needs_clang = pytest.mark.skipif(not available(), reason=unavailable_reason())


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZZ11some_kernelPU8CLglobalfE4part", "part"),
        ("_ZZ54custom_kernel_rms__floatIfLi1500EEvPU8CLglobalKfS1_E4part", "part"),
        ("_ZZ1kIfEvvE1a_0", "a"),
        ("_ZZ1kIfEvvE5E2_xy", "E2_xy"),
        ("odd", "odd"),
    ],
)
def test_plain_name(mangled, name):
    assert _toolchain._plain_name(mangled) == name


def test_find_cycle():
    def graph(**calls: str) -> dict[str, dict[str, str]]:
        return {f: dict.fromkeys(c, "") for f, c in calls.items()}

    assert _toolchain._find_cycle(graph(a="bc", b="c", c="x", d="a")) is None
    assert _toolchain._find_cycle(graph(a="b", b="c", c="b")) == ("c", "b")
    assert _toolchain._find_cycle(graph(a="a")) == ("a", "a")
    deep = {str(i): {str(i + 1): ""} for i in range(5000)}
    assert _toolchain._find_cycle(deep) is None


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(_toolchain.shutil, "which", lambda tool: None if tool == "clang++-19" else "/bin/" + tool)
    reason = _toolchain.unavailable_reason.__wrapped__()
    assert "clang++-19" in reason and "readelf" not in reason and "clang-19" in reason
    monkeypatch.setattr(_toolchain.sys, "platform", "darwin")
    assert "darwin" in _toolchain.unavailable_reason.__wrapped__()


def test_a_launch_without_tools_says_so(monkeypatch):
    monkeypatch.setattr(_toolchain, "unavailable_reason", lambda: "no clang++-19")
    _launch._check_machine.cache_clear()
    with pytest.raises(EmulatorError, match="no clang"):
        sample("rms_norm").run()


def test_making_a_file_once(tmp_path):
    made = []

    def make(path):
        made.append(path)
        path.write_text(str(len(made)))

    for _ in range(2):
        assert _toolchain._once(tmp_path / "a", make).read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]

    def fail(path):
        path.write_text("half")
        raise EmulatorError("k", "compile", "no")

    with pytest.raises(EmulatorError):
        _toolchain._once(tmp_path / "b", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@needs_clang
def test_without_a_home_the_cache_is_temporary(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(_toolchain.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = _toolchain.cache_folder.__wrapped__()
    assert folder.is_dir() and folder.parent == tmp_path / f"mlx_ds4-{os.getuid()}"
    assert folder.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(_toolchain.os, "getuid", lambda: 12345)
    with pytest.raises(EmulatorError, match="no folder"):
        _toolchain.cache_folder.__wrapped__()


def test_old_folders_are_forgotten(tmp_path):
    old, new, other = tmp_path / "emulator-1", tmp_path / "emulator-2", tmp_path / "models"
    for folder in (old, new, other):
        folder.mkdir()
    os.utime(old, (time.time() - 15 * 86400,) * 2)
    os.utime(other, (time.time() - 15 * 86400,) * 2)
    _toolchain._forget_old_folders(tmp_path)
    assert not old.exists() and new.exists() and other.exists()


@pytest.mark.slow  # 5 s; the gate runs it
@needs_clang
def test_two_processes_share_an_empty_cache(tmp_path):
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); from tests.emulator.sample_kernels import sample; s = "
    code += "sample('add'); print(s.error(s.run()))"
    environment = {**os.environ, "HOME": str(tmp_path)}
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe, text=True)
        for _ in range(2)
    ]
    for process in both:
        out, messages = process.communicate(timeout=120)
        assert out == "0.0\n", messages
    (folder,) = (tmp_path / ".cache" / "mlx_ds4").iterdir()
    kinds = sorted(p.suffix or p.name for p in folder.iterdir())
    assert kinds == [".json", ".pch", ".pch", ".so", ".so", "include"]


@needs_clang
def test_a_broken_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr(_toolchain, "CLANG", "false")
    s = sample("add").edited(("uint in_a", "uint in_a_"), ("a[in_a]", "a[in_a_]"))
    with pytest.raises(EmulatorError):
        s.run()


def test_generated_overloads_are_many_and_distinct():
    lines = overloads().splitlines()
    signatures = [line.split("{")[0] for line in lines if line.startswith("inline")]
    assert len(signatures) == len(set(signatures)) > 1000
