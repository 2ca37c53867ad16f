"""The table of launches per layer kind and token: every kind counted, kernels far below plain operations."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from benchmarks.launches import KINDS, table, tiny_model
from mlx_ds4.custom_kernels import index_topk
from mlx_ds4.custom_kernels._kernel import Kernel, tickets
from mlx_ds4.custom_kernels._switches import use_kernels
from mlx_ds4.model import step


@pytest.fixture(scope="module")
def tiny():
    return tiny_model()


def per_token(text: str) -> int:
    return int(text.splitlines()[-1].split()[-1])


def test_the_kinds_add_up_to_the_release():
    assert sum(times for _, _, times in KINDS.values()) == 40


@pytest.mark.parametrize("rows", [1, 6])
def test_table_of_a_decode_step(tiny, rows):
    with use_kernels("auto"):
        kernels = table(tiny, rows)
    for kind in KINDS:
        (line,) = re.findall(rf"^{kind}\s+\d+\s+[1-9].*", kernels, re.M)
        assert int(line.split()[-2]) <= (18 if kind in ("window", "reuse") else 22 if rows == 1 else 24), line
    assert per_token(kernels) <= 750  # the goals, but for an owner of several rows


@pytest.mark.parametrize("rows", [1, 6])
def test_index_layers_score_and_select_in_one_launch_on_cuda(tiny, monkeypatch, rows):
    """A launch less in each of the eight; the other launches that only CUDA has are left out here."""
    launch, counts = Kernel._launch, tickets()
    mx.eval(counts)  # which all launches of a step share

    def node(self, inputs, call):
        if self.source is not None:
            return launch(self, inputs, call)
        return mx.fast.metal_kernel(self.name, self.input_names, self.output_names, " ")(inputs=inputs, **call)

    with use_kernels("auto"):
        before = per_token(table(tiny, rows))
        monkeypatch.setattr(Kernel, "_launch", node)
        monkeypatch.setattr(step, "tickets", lambda: counts)
        monkeypatch.setattr(index_topk, "backend", lambda: "cuda")
        monkeypatch.setattr(index_topk, "enabled", lambda family: True)
        assert per_token(table(tiny, rows)) == before - 8


def test_references_are_counted_too(tiny):
    """Plain operations launch no kernel of ours, and many more of MLX's."""
    with use_kernels("reference"):
        reference = table(tiny, 1)
    for kind in KINDS:
        assert re.search(rf"^{kind}\s+\d+\s+0\s", reference, re.M), reference
    assert per_token(reference) > 10 * 1300
