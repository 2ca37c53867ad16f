"""What the device makes of a step's position is what the host makes of it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import step_values
from mlx_ds4.custom_kernels._case import compare, outputs
from mlx_ds4.custom_kernels.step_values import in_pairs
from mlx_ds4.model.step import Step, on_device, unpack
from mlx_ds4.random_model import cut_config
from tests.cuda_host import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the body: install it to run it")


@pytest.fixture
def cuda(on_cpu, monkeypatch):
    """The op launches, as on CUDA."""
    monkeypatch.setattr(step_values, "launches", lambda: True)


@pytest.mark.parametrize("case", step_values.cases(), ids=lambda case: case.name)
def test_cases(case, cuda):
    arrays = case.inputs(np.random.default_rng(0))
    for got, want in zip(case.fn(*arrays), outputs(case.reference(*arrays)), strict=True):
        assert compare(got, want, case.tolerance)[0] is None


@pytest.mark.parametrize("size", ["full", "tiny"])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (3, 6), (8191, 6), (300_001, 1), (1_000_000, 5)])
def test_a_steps_values(cuda, size, start, length):
    """Word by word; cosines and sines may be neighbours."""
    config = cut_config(size=size)
    places = {1: (start // 256 * 256, start % 256), 2: (start // 512 * 128, start // 2 - start // 512 * 128)}
    step = Step(config, start, length, places=places)
    layout = step.layout()
    here = unpack(step.packed(layout), layout)
    there = unpack(on_device(in_pairs(step.numbers), config, layout), layout)
    assert here.keys() == there.keys() and here["window"].shape == (1, length, config.sliding_window)
    for name, want in here.items():
        assert there[name].dtype == want.dtype and there[name].shape == want.shape
        if want.dtype == mx.int32:
            assert mx.array_equal(there[name], want)
        else:
            assert mx.abs(there[name] - want).max() <= 2.0**-24
    tokens = np.arange(70, 70 + length)
    layout = step.layout(with_tokens=True)
    sent = unpack(on_device(in_pairs(step.numbers + tokens.tolist()), config, layout), layout)["tokens"]
    assert sent.tolist() == [tokens.tolist()]
    for ratio, both in places.items():
        assert [here[f"{name} {ratio}"].item() for name in ("base", "slot")] == list(both)
    assert mx.array_equal(here["window"], step.window_list()) and mx.array_equal(here["at"], step.at())
    for ratio in {r for r in config.compress_ratios if r}:
        assert mx.array_equal(here[f"visible {ratio}"], step.visible(ratio))
