"""RMSNorm: the vendor's numbers, the rounding contract, and the kernel's own edges."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._switches import use_kernels
from mlx_ds4.custom_kernels.rms_norm import rms_norm, rms_norm_ref

GOLDEN = Path(__file__).parents[1] / "golden" / "nano" / "golden" / "units.safetensors"
needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefix", ["rms128", "rms5120"])
def test_golden(prefix, mode):
    golden = mx.load(str(GOLDEN))
    with use_kernels(mode):
        got = rms_norm(golden[f"{prefix}.x"], golden[f"{prefix}.w"], 1e-20)
    want = golden[f"{prefix}.y"]
    assert got.dtype == want.dtype == mx.bfloat16
    apart = np.abs(np.array(got.view(mx.int16)).astype(int) - np.array(want.view(mx.int16)).astype(int))
    assert apart.max() <= 1
    assert np.mean(apart == 0) >= 0.99


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_against_float64(dtype, mode):
    rng = np.random.default_rng(1)
    x = mx.array(rng.standard_normal((3, 2, 77)).astype(np.float32)).astype(dtype)
    w = mx.array(rng.standard_normal(77).astype(np.float32))
    with use_kernels(mode):
        got = rms_norm(x, w, 1e-6)
    v = np.array(x.astype(mx.float32)).astype(np.float64)
    want = v / np.sqrt(np.mean(v * v, -1, keepdims=True) + 1e-6) * np.array(w)
    assert got.shape == x.shape and got.dtype == dtype
    ulp = {mx.float32: 2.0**-21, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]  # half an ulp; float32: four
    assert np.all(np.abs(np.array(got.astype(mx.float32)) - want) <= 1.01 * ulp * np.abs(want) + 1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_does_not_depend_on_its_neighbours(mode):
    x = mx.array(np.random.default_rng(2).standard_normal((4, 300)).astype(np.float32))
    w = mx.ones(300)
    with use_kernels(mode):
        together = rms_norm(x, w, 1e-20)
        alone = mx.concatenate([rms_norm(x[i : i + 1], w, 1e-20) for i in range(4)])
    assert mx.array_equal(together, alone)


@pytest.mark.parametrize("mode", MODES)
def test_strided_input_and_zero_rows(mode):
    base = mx.array(np.random.default_rng(3).standard_normal((40, 6)).astype(np.float32))
    x = base.T[::2]  # [3, 40], not contiguous
    with use_kernels(mode):
        got = rms_norm(x, mx.ones(40), 1e-20)
        zero = rms_norm(mx.zeros((2, 40), dtype=mx.bfloat16), mx.ones(40), 1e-20)
    assert mx.allclose(got, rms_norm_ref(mx.contiguous(x), mx.ones(40), 1e-20), rtol=1e-6, atol=0)
    assert mx.array_equal(zero, mx.zeros((2, 40), dtype=mx.bfloat16))


@pytest.mark.parametrize("mode", MODES)
def test_empty(mode):
    with use_kernels(mode):
        assert rms_norm(mx.zeros((0, 3, 8), mx.float16), mx.ones(8), 1e-6).shape == (0, 3, 8)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (mx.zeros((2, 8)), mx.ones(7), "one weight per entry"),
        (mx.zeros((2, 8)), mx.ones((1, 8)), "one weight per entry"),
        (mx.array(1.0), mx.ones(1), "one weight per entry"),
        (mx.zeros((2, 8), mx.int32), mx.ones(8), "expected a float dtype"),
    ],
)
def test_wrong_inputs(x, weight, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, 1e-6)
