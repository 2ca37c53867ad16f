"""Working kernels: no false alarm, numpy's results, the same bits in whatever order the threads run."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import available, last_stats, unavailable_reason
from tests.emulator.sample_kernels import SAMPLES, q8_vector, rms_norm, sample

pytestmark = pytest.mark.skipif(not available(), reason=unavailable_reason())


@pytest.mark.parametrize("name", SAMPLES)
def test_three_orders_give_equal_bits(name):
    s = sample(name)
    forward = s.run()
    assert s.error(forward) <= s.tolerance
    for order in ("backward", "random"):
        assert np.array_equal(forward, s.run(order=order))


@pytest.mark.parametrize("name", SAMPLES)
def test_unchecked_gives_the_checked_bits(name):
    s = sample(name)
    assert np.array_equal(s.run(), s.run(checked=False))


@pytest.mark.parametrize("name", ["rms_norm", "top_k", "q8_matrix"])
def test_cxx14(name):
    s = sample(name)
    assert np.array_equal(s.run(), s.run(std="c++14"))


@pytest.mark.parametrize("name", ["rms_norm", "q8_vector"])
def test_fused_multiply_add_stays_in_tolerance(name):
    s = sample(name)
    assert s.error(s.run(fast_fma=True)) <= s.tolerance


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types(dtype):
    s = rms_norm(np.random.default_rng(1), dtype)
    assert s.error(s.run()) <= s.tolerance


def test_traffic_of_a_matrix_vector_product_is_the_weights_once():
    s = q8_vector(np.random.default_rng(2), rows=64, blocks=8)
    s.run()
    traffic = last_stats().buffers
    size = 64 * 8 * 34
    # The 2-byte scale of a block is read by each of the four lanes that share it.
    assert traffic["w"].size == traffic["w"].distinct_read == size
    assert traffic["w"].read == size + 3 * 2 * 64 * 8
    assert traffic["y"].written == traffic["y"].distinct_written == 64 * 4
    assert traffic["w"].written == traffic["y"].read == 0
