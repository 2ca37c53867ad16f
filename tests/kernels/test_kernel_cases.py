"""Every declared case, emulated with checks in three thread orders; each op once more as C++14 without checks and
with fused multiply-add."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._case import all_cases, check, compare, outputs
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import all_kernels, emulator_missing, load_all
from mlx_ds4.custom_kernels._switches import trace, use_kernels

SMALL = [case for case in all_cases() if not case.large]
FUSED = list({getattr(case.fn, "func", case.fn): case for case in SMALL}.values())  # one case for each op
emulated = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))


@emulated
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_emulated(case):
    arrays = case.inputs(np.random.default_rng(0))
    want = outputs(case.reference(*arrays))
    first = None
    for order in ("forward", "backward", "random"):
        with use_kernels("emulate", order=order), count_launches() as launches:
            got = outputs(case.fn(*arrays))
        assert launches, "the case did not launch a kernel"
        first = first or got
        for a, b, w in zip(got, first, want, strict=True):
            assert compare(a, w, case.tolerance)[0] is None
            assert mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)), f"{order} gives other bits"


@emulated
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_emulated_with_fused_multiply_add(case):
    with use_kernels("emulate", std="c++14", checked=False, fast_fma=True):
        fault, _ = check(case, seed=1)
    assert fault is None


def test_every_kernel_with_metal_text_has_a_small_case():
    rng = np.random.default_rng(0)
    with count_launches() as launches:
        trace(lambda: [case.fn(*case.inputs(rng)) for case in SMALL])
    assert sorted(k.name for k in all_kernels() if k.source is not None and not launches[k.name]) == []


def test_names_are_unique_and_say_the_family():
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    assert {case.family for case in all_cases()} <= set(load_all())


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_wrong_result_fails_the_case(case):
    """A case must be able to fail: the result is wrong by a hundredth of its largest value in one element."""

    def wrong(*arrays):
        first, *rest = outputs(case.reference(*arrays))
        flat = first.reshape(-1)
        size = mx.abs(flat.astype(mx.float32))
        at = mx.arange(flat.size) == mx.argmax(mx.where(mx.isinf(size), 0, size))
        bad = mx.where(at, flat * 1.02 + 1, flat).astype(first.dtype).reshape(first.shape)
        return [bad, *rest]

    fault, _ = check(dataclasses.replace(case, fn=wrong))
    assert fault is not None


BF = mx.bfloat16


@pytest.mark.parametrize(
    ("got", "want", "tolerance", "fault"),
    [
        (mx.array([1.0]), mx.array([1.0]), None, None),
        (mx.array([0.0]), mx.array([-0.0]), None, "1 of 1 elements differ in bits"),
        (mx.array([0.0]), mx.array([-0.0]), 0.0, None),
        (mx.array([1.0, 2.0]), mx.array([1.0, 2.001]), 1e-3, None),
        (mx.array([1.0, 2.0]), mx.array([1.0, 2.01]), 1e-3, "1 of 2 elements beyond tolerance"),
        (mx.array([[1e-9], [1.0]]), mx.array([[2e-9], [1.0]]), 1e-3, "1 of 2 elements beyond tolerance"),
        (mx.array([1.0]), mx.array([[1.0]]), 1.0, "instead of"),
        (mx.array([1.0]), mx.array([1.0], BF), 1.0, "instead of"),
        (mx.array([float("nan")]), mx.array([1.0]), 1.0, "NaN or infinity"),
        (mx.array([float("inf")]), mx.array([1.0]), 1.0, "NaN or infinity"),
        (mx.array([float("inf")]), mx.array([float("inf")]), 0.0, None),
        (mx.array([1.0078125], BF), mx.array([1.0], BF), 0.0, None),
        (mx.array([1.015625], BF), mx.array([1.0], BF), 0.0, "beyond tolerance"),
        (mx.full((100,), 1.0078125, BF), mx.full((100,), 1.0, BF), 0.0, "only 0.00% of the elements equal"),
        (mx.zeros((0, 4)), mx.zeros((0, 4)), None, None),
        (mx.array([3], mx.uint32), mx.array([2], mx.uint32), None, "differ in bits"),
    ],
)
def test_compare(got, want, tolerance, fault):
    found, error = compare(got, want, tolerance)
    assert (found is None) if fault is None else (fault in found)
    assert error >= 0


def test_allowances():
    """Each rounding is worth a unit in the last place of the element, `moved` adds what it says where it says it."""
    one, two = mx.array([1.0, 1.0], BF), mx.array([1.015625, 1.0], BF)
    assert "beyond tolerance" in compare(two, one, 0.0)[0]
    assert compare(two, one, 0.0, roundings=2)[0] is None
    assert compare(two, one, 0.0, moved=mx.array([0.0079, 0.0]))[0] is None
    assert "beyond tolerance" in compare(two, one, 0.0, moved=mx.array([0.0, 0.0079]))[0]
    assert "beyond tolerance" in compare(mx.array([1.015625]), mx.array([1.0]), 0.0, roundings=2)[0]  # float32
