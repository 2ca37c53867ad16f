"""The router kernel, emulated, against its reference and the vendor's numbers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._switches import disable, use_kernels
from mlx_ds4.custom_kernels.hyper_connection import SUMS, SiteSums, coefficients, random_sums
from mlx_ds4.custom_kernels.router import route, route_beside, route_ref
from tests.golden_tools import assert_close_to_largest, assert_equal, golden

pytestmark = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
def test_golden_rows(order):
    units = golden("nano", "units")
    with use_kernels("emulate", order=order):
        chosen, weights = route(units["router.logits"], units["router.bias"], k=3, factor=1.5)
    by_id = mx.argsort(units["router.experts"], axis=-1)
    assert_equal(chosen, mx.take_along_axis(units["router.experts"], by_id, axis=-1))
    assert_close_to_largest(weights, mx.take_along_axis(units["router.weights"], by_id, axis=-1))


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
@pytest.mark.parametrize(("shape", "streams"), [((1, 3), 4), ((1,), 1), ((8,), 2)])
def test_coefficients_beside_have_the_bits_of_their_own_launch(shape, streams, order):
    """So have the choices; more than eight rows, or what no kernel takes, go apart."""
    logits, bias = mx.random.normal((*shape, 40), key=mx.random.key(0)), mx.random.normal((40,), key=mx.random.key(1))
    sums = SiteSums(*random_sums(np.random.default_rng(2), *shape, streams=streams), **SUMS | {"iters": 4})
    options = {"k": 6, "factor": 1.5}
    with use_kernels("emulate", order=order), count_launches() as launches:
        got = route_beside(logits, bias, sums, **options)
        assert dict(launches) == {"router_beside": 1}
        want = [*route(logits, bias, **options), *coefficients(sums)]
        assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))
        with disable("hyper_connection"), count_launches() as launches:
            apart = route_beside(logits, bias, sums, **options)
        assert dict(launches) == {"router": 1} and mx.array_equal(apart[0], got[0])
        few = (logits.reshape(-1, 40), sums.dots.reshape(-1, *sums.dots.shape[-2:]))
        many = [mx.concatenate([x] * 9, axis=0) for x in few]
        with count_launches() as launches:
            rows = route_beside(many[0], bias, sums._replace(dots=many[1]), **options)
        assert dict(launches) == {"router": 1, "hyper_connection_coefficients": 1}
        assert mx.array_equal(rows[3][: many[1].shape[0] // 9], got[3].reshape(-1, got[3].shape[-1]))


def test_scores_of_very_negative_logits_are_relative():
    """Weights of a row whose scores are all below 1e-9 still add up to the factor, each to a few ulp."""
    z = mx.array(np.linspace(-90, -40, 64, dtype=np.float32))[None]
    bias = mx.zeros(64)
    want = route_ref(z, bias, k=4, factor=1.5)
    with use_kernels("emulate"):
        got = route(z, bias, k=4, factor=1.5)
    assert got[0].tolist() == want[0].tolist() == [[60, 61, 62, 63]]
    np.testing.assert_allclose(np.array(got[1]), np.array(want[1]), rtol=2e-6)


def test_ties_go_to_the_lower_expert():
    z = mx.array(np.array([[1, 2, 2, 2, 1, 2, 0, 0] * 8], dtype=np.float32))
    with use_kernels("emulate"):
        assert route(z, mx.zeros(64), k=6, factor=1.0)[0].tolist() == [[1, 2, 3, 5, 9, 10]]


def test_nan_is_never_chosen_and_gaps_are_marked():
    z = np.full((1, 40), np.nan, dtype=np.float32)
    z[0, [7, 33]] = 1.0
    for mode in ("emulate", "reference"):
        with use_kernels(mode):
            chosen, weights = route(mx.array(z), mx.zeros(40), k=3, factor=1.5)
        assert chosen.tolist() == [[7, 33, -1]]
        assert weights.tolist() == [[0.75, 0.75, 0.0]]
