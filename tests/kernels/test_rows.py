"""Rows in two parts and rings, as the references read and write them: against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._rows import SplitRows, end, gather, part, ring_ref, rows_fault, valid

S, R, D = 6, 4, 3


def parts(base: int) -> tuple[SplitRows, np.ndarray]:
    """Two sequences of base + R entries in two parts, NaN where none lies, and the array that they stand for."""
    one = np.random.default_rng(base).standard_normal((2, base + R, D), dtype=np.float32)
    old = np.concatenate([one[:, :base], np.full((2, S - base, D), np.nan, np.float32)], axis=1)
    return SplitRows(mx.array(old), mx.array(one[:, base:]), mx.array([base], dtype=mx.int32)), one


@pytest.mark.parametrize("base", [0, 1, 5, 6])
def test_two_parts_stand_for_one_array(base):
    rows, one = parts(base)
    assert rows.shape == (2, S + R, D) and rows.size == 2 * (S + R) * D and rows.dtype == mx.float32
    assert end(rows).tolist() == [base + R] and end(mx.array(one)) == base + R and rows_fault(rows) == ""
    want = np.pad(one, [(0, 0), (0, S - base), (0, 0)])
    np.testing.assert_array_equal(np.array(part(rows, 0, rows.shape[1])), want)
    index = np.random.default_rng(1).integers(-3, base + R + 3, (2, 5, 7)).astype(np.int32)
    index[0, 0, :3] = [-(2**31), 2**31 - 1, base]
    named = (index >= 0) & (index < base + R)
    np.testing.assert_array_equal(np.array(valid(rows, mx.array(index))), named)
    for source in (rows, mx.array(one)):
        picked = np.array(gather(source, mx.array(index)))
        for b in range(2):
            want = np.where(named[b, ..., None], one[b][np.where(named[b], index[b], 0)], 0)
            np.testing.assert_array_equal(picked[b], want)


def test_rows_of_no_length():
    assert gather(mx.zeros((2, 0, D)), mx.zeros((2, 5), dtype=mx.int32)).shape == (2, 5, D)


@pytest.mark.parametrize("at", [0, 3, 4, 103, -1])
def test_a_ring(at):
    ring = np.random.default_rng(0).standard_normal((2, 5, D), dtype=np.float32)
    new = np.random.default_rng(1).standard_normal((2, 3, D), dtype=np.float32)
    want = ring.copy()
    want[:, (at + np.arange(3)) % 5] = new
    got = ring_ref(mx.array(ring), mx.array(new), mx.array([at], dtype=mx.int32), axis=1)
    np.testing.assert_array_equal(np.array(got), want)
