"""The reproducers of MLX's limits: short, on their own, and run where they can."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "mlx_limits"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def run(name: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, FOLDER / name, *flags], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_is_short_and_in_the_table(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 50 and text.startswith('"""Limit: ')
    assert set(re.findall(r"^(?:import|from) (\S+)", text, re.M)) <= {"mlx.core", "subprocess", "sys", "time"}
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if path.name in line]
    assert rows and all(row.count(" | ") == 3 for row in rows)


def test_writes_into_a_small_cache():
    done = run("cache_row.py", "--toy")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d+) rows, (\w+): ([\d.]+) us a write, peak ([\d.]+) caches", done.stdout)
    assert [(rows, how) for rows, how, _, _ in found] == [
        (rows, how) for rows in ("1024", "4096") for how in ("update", "assign", "index")
    ]
    assert all(float(us) > 0 and float(peak) >= 1 for _, _, us, peak in found)


def test_products_with_slices():
    done = run("slice_product.py")
    assert done.returncode == 0, done.stderr
    starts = re.findall(r"start at (\d+) bytes: (.*)", done.stdout)
    assert [start for start, _ in starts] == ["0", "128", "16", "8", "2"]
    assert all("WRONG" not in what for _, what in starts)
    if not mx.cuda.is_available():
        assert {what for _, what in starts} == {"right"}


@pytest.mark.parametrize("name", ["launch_cost", "kernel_start", "host_arrays", "managed_memory"])
def test_kernels_need_cuda(name):
    done = run(f"{name}.py")
    if mx.cuda.is_available():
        assert done.returncode == 0 and re.search(r"_us|\d s a kernel", done.stdout), done.stderr
    else:
        assert done.returncode == 1 and done.stderr.startswith(f"{name} needs a CUDA device") and not done.stdout


def test_the_cost_of_arrays_from_the_host():
    done = run("host_arrays.py", "--toy")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["variant"] for line in lines] == ["none", "one", "eight", "eight slices of one"]
    assert all(line["wall_us"] > 0 and line["cpu_us"] > 0 for line in lines)


def test_the_cost_of_launches():
    done = run("launch_cost.py", "--toy")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({line["variant"] for line in lines}) == 8
    assert all(line["call_us"] > 0 and line["eval_us"] > 0 for line in lines)
