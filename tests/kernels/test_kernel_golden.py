"""The emulated kernels against the vendor's numbers, as tests/model/test_primitives.py does for the references."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import fake_quant, hyper_connection
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._switches import use_kernels
from mlx_ds4.custom_kernels.hyper_connection import (
    SiteSums,
    coefficients,
    collapse,
    collapse_norm,
    collapse_norm_ref,
    expand,
    site,
    unmix,
)
from mlx_ds4.custom_kernels.rope import rope, rope_ref, rope_table
from tests.golden_tools import assert_equal, assert_one_ulp, golden, row_error

pytestmark = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))


@pytest.fixture(autouse=True)
def emulate():
    with use_kernels("emulate"), count_launches() as launches:
        yield
    assert launches, "nothing was emulated"


@pytest.fixture(scope="module")
def units():
    return golden("nano", "units")


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint16))


@pytest.mark.parametrize(("name", "key"), [("fp8", "q8"), ("fp4", "q4u"), ("fp4_e4m3", "q4e")])
def test_fake_quant(units, name, key):
    got = getattr(fake_quant, f"fake_quant_{name}")(units["fq.x"])
    np.testing.assert_array_equal(bits(got), bits(units[f"fq.{key}.y"]))


@pytest.mark.parametrize("name", ["fp8", "fp4", "fp4_e4m3"])
def test_fake_quant_of_every_finite_value(name):
    """All 65,280 finite bfloat16 values: beside neighbours of their size, and at random."""
    values = np.array([u for u in range(1 << 16) if u & 0x7F80 != 0x7F80], np.uint16)
    by_size = values[np.argsort(values & 0x7FFF, kind="stable")]
    mixed = np.random.default_rng(0).permutation(values)
    x = mx.array(np.stack([by_size, mixed]).reshape(-1, 128)).view(mx.bfloat16)
    with use_kernels("emulate", checked=False):
        got = getattr(fake_quant, f"fake_quant_{name}")(x)
    np.testing.assert_array_equal(bits(got), bits(getattr(fake_quant, f"fake_quant_{name}_ref")(x)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_fake_quant_takes_other_dtypes_and_strides(dtype):
    x = mx.array(np.random.default_rng(1).standard_normal((64, 6)).astype(np.float32)).astype(dtype).T[::2]
    assert_equal(fake_quant.fake_quant_fp8(x.astype(mx.bfloat16)), fake_quant.fake_quant_fp8_ref(x))
    assert_equal(fake_quant.fake_quant_fp8(x), fake_quant.fake_quant_fp8_ref(x))


@pytest.mark.parametrize("name", ["plain", "compressed"])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope(units, name, inverse):
    data = {k.removeprefix(f"rope.{name}."): v for k, v in units.items() if k.startswith(f"rope.{name}.")}
    got = rope(data["x"][None], data["cos"], data["sin"], inverse=inverse)[0]
    want = data["y_inv" if inverse else "y"]
    assert_one_ulp(got, want)


def test_rope_of_three_axes_and_its_refusals():
    x = mx.array(np.random.default_rng(2).standard_normal((2, 5, 10)).astype(np.float32))
    cos, sin = rope_table(np.arange(5), np.array([1.0, 0.1, 0.01], np.float32))
    assert mx.allclose(rope(x, cos, sin), rope_ref(x, cos, sin), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="make the table from the positions"):
        rope(x[:, :4], cos, sin)
    with pytest.raises(ValueError, match="at most 2 pairs"):
        rope(x[..., :4], cos, sin)


def whole_site(units, rows: slice = slice(None)) -> list[mx.array]:
    """(x, expanded, pre, post, comb) of a site with a norm of ones, for some of the golden rows."""
    h, y, pre = (units[f"hc.{name}"][rows] for name in ("h", "y", "pre"))
    x, dots = site(h, pre, units["hc.fn"], mx.ones(h.shape[-1]), norm_eps=1e-20)
    options = {"width": h.shape[-2] * h.shape[-1], "iters": 20, "eps": 1e-6, "norm_eps": 1e-20}
    after, mix = coefficients(SiteSums(dots, units["hc.base"], units["hc.scale"], **options))
    return [x, expand(y, h, mix), after, *unmix(mix, h.shape[-2])]


def test_a_whole_site(units):
    x, expanded, *mixes = whole_site(units)
    for values, name in zip(mixes, ("pre", "post", "comb"), strict=True):
        assert row_error(values, units[f"hc.{name}"]) <= 2e-5, name
    assert_one_ulp(expanded, units["hc.expanded"])
    assert_equal(x, collapse_norm(units["hc.h"], units["hc.pre"], mx.ones(x.shape[-1]), 1e-20))


def test_a_site_does_not_depend_on_the_number_of_rows(units):
    together = whole_site(units)
    for i in range(2):
        for a, b in zip(together, whole_site(units, slice(i, i + 1)), strict=True):
            assert_equal(a[i : i + 1], b)


def test_channels_do_not_depend_on_how_many_groups_share_a_row():
    """300 channels: two groups a row for a few rows, one for many rows."""
    case = next(c for c in hyper_connection.cases() if c.name.endswith("expand_3x2x300"))
    arrays = case.inputs(np.random.default_rng(4))
    many = expand(*(mx.concatenate([a, a, a]) for a in arrays))
    assert_equal(expand(*arrays), many[3:6])


def test_collapse(units):
    h, pre = units["hc.h"], units["hc.pre"]
    assert_one_ulp(collapse(h, pre), units["hc.collapsed"])
    weight = mx.array(np.random.default_rng(3).standard_normal(h.shape[-1]).astype(np.float32))
    assert_one_ulp(collapse_norm(h, pre, weight, 1e-20), collapse_norm_ref(h, pre, weight, 1e-20))
