"""The benchmark scripts run at toy size on a CPU and print the figures that they promise."""

from __future__ import annotations

import json

import pytest

from benchmarks import dspark, long_context, profile_step, vs_peers
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._switches import use_kernels
from tests.golden_tools import GOLDEN

pytestmark = pytest.mark.slow


def lines(module, capsys, *argv):
    assert module.main(list(argv)) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all({"device", "os", "mlx", "commit"} <= line.keys() for line in found)
    return found


def test_both_systems_give_the_same_figures(capsys, tmp_path):
    found = lines(vs_peers, capsys, "--toy")
    systems: dict[str, list] = {}
    for line in found:
        systems.setdefault(line["system"], []).append((line["figure"], line["context"], line["rows"]))
    theirs, ours, ratios = systems.values()
    assert list(systems) == [f"mlx-lm {vs_peers.peer_version()}", "mlx_ds4", "ratio"]
    assert ours == theirs == ratios and len(ours) == 9  # prefill and decode of 1 and 6 rows at 64, 256, 9000
    assert [line["system"] for line in found[9:]] == ["mlx_ds4", "ratio"] * 9
    for side, text in (("peer", found[:9]), ("ours", found[9:])):  # as two runs leave them, the second with a ratio
        (tmp_path / side).write_text("".join(json.dumps(line) + "\n" for line in text))
    again = lines(vs_peers, capsys, "--read", str(tmp_path / "ours"), str(tmp_path / "peer"))
    assert [line["times_faster"] for line in again] == [
        line["times_faster"] for line in found if line["system"] == "ratio"
    ]


def test_the_bundle_is_what_the_peer_needs(tmp_path):
    vs_peers.bundle(tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    assert {"mlx_lm/_version.py", "mlx_lm/models/__init__.py", "mlx_lm/models/deepseek_v41.py"} <= files
    assert len(files) == 8 and "mlx_lm/__init__.py" not in files


def test_costs_of_drafting(capsys):
    found = lines(dspark, capsys, "--toy")
    assert [line["figure"] for line in found] == ["step"] * 4 + ["proposal", "cycle"]
    assert [line["rows"] for line in found[:4]] == [1, 2, 3, 4] and found[0]["over_one_row"] == 1
    cycle = found[3]["ms"] + found[4]["ms"]
    assert found[5]["ms"] == pytest.approx(cycle, abs=0.01)
    assert found[5]["accepted_to_break_even"] == pytest.approx(cycle / found[0]["ms"] - 1, abs=0.01)


def test_texts_with_and_without_drafts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(dspark, "REPEATS", 1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n---\ndef f(x):\n")
    model = str(GOLDEN / "nano" / "model")
    found = lines(dspark, capsys, "--model", model, "--prompt-file", str(prompts), "--max-tokens", "16")
    assert [line["prompt"] for line in found] == [0, 1]
    for line in found:
        assert line["equal_on"] and line["equal_always"] and line["failure"] is None and line["tokens"] <= 16
        assert line["verified_always"][0] >= 2 and line["tps_off"] > 0
    with pytest.raises(SystemExit):
        dspark.main(["--model", model])


def test_long_contexts(capsys):
    found = lines(long_context, capsys, "--toy")
    figures = [line["figure"] for line in found]
    assert figures.count("score and select") == figures.count("score and select in candidates") == 2
    assert next(line["speed_over_first"] for line in found if line["figure"] == "decode") == 1
    kinds = {(line["kind"], line["context"]) for line in found if line["figure"] == "layer"}
    assert kinds == {(k, c) for k in ("window", "owner", "reindex", "candidate source") for c in (64, 300)}
    stretches = [line for line in found if line["figure"] == "prefill"]
    assert [(line["from"], line["to"]) for line in stretches] == [(0, 32), (32, 64), (64, 96), (96, 128)]
    assert stretches[-1]["peak_beyond_weights"] >= stretches[-1]["cache_bytes"] > 0


@pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
def test_a_step_kernel_by_kernel(capsys):
    with use_kernels("emulate", checked=False):
        found = lines(profile_step, capsys, "--toy", "--rows", "1")
    *kernels, total = found
    assert {line["kernel"] for line in kernels} > {"sparse_attention", "hyper_connection_site", "router_beside"}
    assert total["us_a_step"] == pytest.approx(sum(line["us_a_step"] for line in kernels), abs=1)
    assert [line["us_a_step"] for line in kernels] == sorted((line["us_a_step"] for line in kernels), reverse=True)


def test_without_kernels_there_is_nothing_to_time(capsys):
    assert profile_step.main(["--toy"]) == 2
    assert "nothing to time" in capsys.readouterr().err
