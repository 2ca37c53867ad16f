"""The table of launches per layer kind and token: every kind counted, kernels far below plain operations."""

from __future__ import annotations

import re

import pytest

from benchmarks.launches import KINDS, table, tiny_model
from mlx_ds4.custom_kernels._switches import use_kernels


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


def test_references_are_counted_too(tiny):
    """Plain operations launch no kernel of ours, and many more of MLX's."""
    with use_kernels("reference"):
        reference = table(tiny, 1)
    for kind in KINDS:
        assert re.search(rf"^{kind}\s+\d+\s+0\s", reference, re.M), reference
    assert per_token(reference) > 10 * 1300
