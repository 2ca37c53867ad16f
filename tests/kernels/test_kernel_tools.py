"""The dump, the check on a device and the benchmark, as far as they run without a GPU."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import pytest

from benchmarks import kernels as bench
from mlx_ds4.custom_kernels._case import all_cases
from mlx_ds4.custom_kernels._kernel import all_kernels, emulator_missing
from mlx_ds4.custom_kernels._switches import disable, use_kernels
from tools import dump_metal, mac_check

CASE = next(case for case in all_cases() if case.name == "rms_norm/bfloat16_5x33")
emulated = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))


def wrong(x, weight):
    return x


def test_dump_writes_the_kernels_of_the_cases_with_the_prelude(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dump_metal, "all_cases", lambda: [case for case in all_cases() if not case.large])
    assert dump_metal.main([str(tmp_path / "new")]) == 0
    files = list((tmp_path / "new").iterdir())
    assert sorted(capsys.readouterr().out.split()) == sorted(str(f) for f in files)
    by_kernel = {k: [f for f in files if f.name.rpartition("-")[0] == k.name] for k in all_kernels()}
    assert sum(map(len, by_kernel.values())) == len(files) > 20
    assert all(found for k, found in by_kernel.items() if k.source and k.family in ("rms_norm", "hyper_connection"))
    for kernel, found in by_kernel.items():
        for text in (f.read_text() for f in found):
            assert kernel.source in text and kernel.header in text
            assert text.count("typedef bfloat bfloat16_t;") == 1  # the prelude, each part once
            assert '#include "mlx' not in text
            assert "[[host_name(" in text  # the instantiation
    assert len({f.read_text() for f in files}) == len(files)


def test_dump_compiles_only_with_xcrun(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dump_metal.shutil, "which", lambda name: None)
    assert dump_metal.main([str(tmp_path), "--compile"]) == 2
    assert "no xcrun" in capsys.readouterr().err


def test_dump_reports_refused_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dump_metal.shutil, "which", lambda name: "/usr/bin/xcrun")
    monkeypatch.setattr(dump_metal, "instances", lambda: {"good": "a", "bad": "b"})
    monkeypatch.setattr(dump_metal, "compile_file", lambda path, language: "no such type" * (path.stem == "bad"))
    assert dump_metal.main([str(tmp_path), "--compile"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("ok") for line in lines) == sum(line.endswith("REFUSED") for line in lines) == 2


def test_check_and_benchmark_without_a_gpu(capsys):
    with use_kernels("reference"):
        assert mac_check.main() == 2
        assert bench.main([]) == 2
    assert capsys.readouterr().err.count("No GPU is the default device") == 2


@emulated
def test_check_prints_a_table(monkeypatch, capsys):
    bad = dataclasses.replace(CASE, name="rms_norm/wrong", fn=lambda *a: CASE.fn(*a) + 1)
    silent = dataclasses.replace(CASE, name="rms_norm/silent", fn=CASE.reference)
    large = dataclasses.replace(CASE, name="rms_norm/large", large=True)
    monkeypatch.setattr(mac_check, "all_cases", lambda: [CASE, bad, silent, large])
    with use_kernels("emulate"):
        assert mac_check.main() == 1
    head, good, wrong, none, total = capsys.readouterr().out.splitlines()
    assert f"mlx {mx.__version__}" in head and "backend emulate" in head and "commit" in head
    assert good.startswith(CASE.name) and good.endswith(" ok")
    assert "WRONG: output 0" in wrong and "WRONG: no kernel was launched" in none
    assert total == "3 cases, 2 bad"


@emulated
def test_check_survives_a_kernel_that_fails_and_names_what_is_off():
    def fail(*arrays):
        raise RuntimeError("the compiler says no\nin many lines")

    with use_kernels("emulate"):
        assert mac_check.run(dataclasses.replace(CASE, fn=fail))[1] == "FAILED: the compiler says no"
        with disable("rms_norm"):
            assert mac_check.run(CASE)[1] == "off: family disabled"


@emulated
def test_benchmark_lines(monkeypatch):
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "CHAIN", 2)
    with use_kernels("emulate", checked=False):
        line = bench.record(CASE, True)
        bad = bench.record(dataclasses.replace(CASE, fn=wrong), True)
    assert line["ok"] and line["launches"] == 1 and line["kernel_us"] > 0 and line["reference_us"] > 0
    assert line["bytes"] == 5 * 33 * 2 * 2
    assert not bad["ok"] and "beyond tolerance" in bad["fault"] and "kernel_us" not in bad  # no time for wrong results
    json.dumps([line, bad])


def test_benchmark_prints_json(monkeypatch, capsys):
    monkeypatch.setattr(bench, "backend", lambda: "cuda")
    monkeypatch.setattr(bench, "record", lambda case, timed: {"case": case.name, "ok": case.name.startswith("rope/f")})
    assert bench.main(["rope", "--commit", "abc"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["case"].split("/")[0] for line in lines} == {"rope"}
    assert all(line["commit"] == "abc" and line["mlx"] == mx.__version__ for line in lines)
