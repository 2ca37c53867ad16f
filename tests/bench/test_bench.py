"""The benchmark command: what it measures, writes, refuses and keeps. Speeds themselves are nobody's to test."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree

import pytest

from mlx_ds4 import bench
from mlx_ds4.bench_report import COLUMNS, to_svg
from mlx_ds4.machine import machine
from mlx_ds4.random_model import cut_config, random_model
from tests.golden_tools import GOLDEN

MODEL = str(GOLDEN / "nano_k" / "model")


@pytest.fixture
def command(capsys):
    def run(*argv):
        code = bench.main(list(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_frontiers_are_cumulative_and_every_form_says_the_same(command, tmp_path):
    name = tmp_path / "speed"
    code, out, err = command(
        "--frontiers", "12,40", "--rows", "1,6", "--steps", "1", "--prefill-step-size", "16", "--output", str(name)
    )  # fmt: skip
    assert code == 0 and err.count("wrote") == 3
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(r["context"], r["rows"]) for r in lines] == [(c, n) for c in (12, 40) for n in (1, 6)]
    # Each prefill feeds only what the one before has not; decoding in between leaves the cache alone.
    assert [r["prefill_tokens"] for r in lines[::2]] == [12, 28]
    for r in lines:
        assert r["decode_ms"] > 0 and r["host_ms"] > 0 and r["peak_bytes"] >= r["cache_bytes"] > 0
        assert r["decode_tps"] == pytest.approx(1e3 / r["decode_ms"], rel=0.01)
        assert r["decode_ms_per_layer"] == pytest.approx(r["decode_ms"] / r["layers"], rel=0.01)
        assert r["prefill_tps_x_layers"] == pytest.approx(r["prefill_chunk_tps"] * r["layers"], rel=0.01)
        assert machine().items() <= r.items() and len(r["fingerprint"]) == 64
    whole = json.loads(name.with_suffix(".json").read_text())
    assert [whole["figures"][i] | {k: v for k, v in whole.items() if k != "figures"} for i in range(4)] == lines
    with open(name.with_suffix(".csv")) as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COLUMNS
    assert [{k: str(r[k]) for k in COLUMNS} for r in lines] == table


def test_plot_is_well_formed_and_inside_its_frame():
    def record(context, rows, **figures):
        return {"context": context, "rows": rows, **figures}

    records = [record(2048 << i, n, prefill_tps=900.0 - i, decode_tps=40 / n - i) for i in range(7) for n in (1, 6)]
    root = ElementTree.fromstring(to_svg({"model": "a<b&c", "device": "M"}, records))
    lines = root.findall("{*}polyline")
    assert [len(line.get("points").split()) for line in lines] == [7, 7, 7]
    assert len(root.findall("{*}circle")) == 21
    assert all(56 <= float(c.get("cy")) <= 270 and 60 <= float(c.get("cx")) <= 670 for c in root.findall("{*}circle"))
    texts = [text.text for text in root.findall("{*}text")]
    assert {"a<b&c, M", "2k", "128k", "1 row", "6 rows"} <= set(texts)
    # A single frontier, and nothing measured at all, are plots too.
    for few in (records[:1], [record(64, 1, decode_tps=3.0)], []):
        assert "not measured" in to_svg({}, few) or few == records[:1]


def test_prefill_mode(command, monkeypatch):
    caches = []
    prefill = bench.prefill_seconds
    monkeypatch.setattr(
        bench, "prefill_seconds", lambda m, cache, *a, **k: caches.append(cache) or prefill(m, cache, *a, **k)
    )
    for mode in ("exact", "replay"):
        code, out, _ = command("--frontiers", "20,60", "--steps", "1", "--prefill-mode", mode)
        assert code == 0 and [json.loads(line)["prefill_mode"] for line in out.splitlines()] == [mode] * 2
    # The window of the package's model is 32.
    assert [(c.prefill_mode, c.decoder_start) for c in caches[1::2]] == [("exact", 0), ("replay", 28)]


def test_random_state_and_engram(command):
    code, out, _ = command(
        "--synthetic", "tiny", "--engram", "--fill", "random", "--frontiers", "100,9000", "--steps", "1",
        "--commit", "abc123",
    )  # fmt: skip
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [r["context"] for r in lines] == [100, 9000]
    assert all(r["commit"] == "abc123" and "prefill_tps" not in r and "Engram in memory" in r["model"] for r in lines)
    assert lines[1]["cache_bytes"] > 4 * lines[0]["cache_bytes"]


def test_ctrl_c_keeps_what_was_measured(command, tmp_path, monkeypatch):
    calls = []

    def decode(*args, **kwargs):
        calls.append(kwargs["rows"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr(bench, "decode_seconds", decode)
    code, out, err = command(
        "--model", MODEL, "--frontiers", "20,40", "--rows", "1,2", "--output", str(tmp_path / "cut")
    )  # fmt: skip
    assert code == 130 and "interrupted after 2 figures" in err
    assert len(out.splitlines()) == len(json.loads((tmp_path / "cut.json").read_text())["figures"]) == 2


def test_a_failure_keeps_what_was_measured(command, tmp_path, monkeypatch):
    def decode(model, cache, **kwargs):
        if cache.offset > 20:
            raise RuntimeError("out of memory")
        return 0.5

    monkeypatch.setattr(bench, "decode_seconds", decode)
    code, out, err = command("--model", MODEL, "--frontiers", "20,40", "--output", str(tmp_path / "cut"))
    assert code == 1 and "out of memory (after 1 figures)" in err
    assert len(out.splitlines()) == 1 and (tmp_path / "cut.csv").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--frontiers", "64,64"], "growing"),
        (["--frontiers", "0"], "growing"),
        (["--frontiers", "8k"], "whole numbers"),
        (["--frontiers", "1048576"], "can be measured up to"),
        (["--rows", "9"], "from 1 to 8"),
        (["--rows", "0"], "from 1 to 8"),
        (["--steps", "0"], "--steps"),
        (["--prefill-step-size", "0"], "--prefill-step-size"),
        (["--prefill-mode", "fast"], "--prefill-mode"),
        (["--prefill-mode", "replay", "--fill", "random"], "leave one out"),
        (["--layers", "3"], "needs --synthetic"),
        (["--engram"], "needs --synthetic"),
        (["--synthetic", "tiny", "--model", "x"], "choose one"),
        (["--synthetic", "huge"], "invalid choice"),
        (["--synthetic", "tiny", "--layers", "7"], "1 to 6"),
        (["--synthetic", "full", "--recipe", "q4"], "available"),
        (["--model", "no/such.gguf"], "no/such.gguf"),
        (["--output", "no/such/name"], "no folder"),
        (["--fast"], "--fast"),
    ],
)
def test_wrong_requests_are_one_line_and_code_2(command, argv, word):
    code, out, err = command(*argv)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and word in err


def test_memory_is_asked_before_anything_is_drawn(monkeypatch):
    from mlx_ds4 import random_model as module

    monkeypatch.setattr(module, "machine_memory", lambda: 1000)
    monkeypatch.setattr(module, "_draw", lambda *args: pytest.fail("drawn"))
    with pytest.raises(ValueError, match="1000 are available"):
        random_model(cut_config(size="tiny"))
