"""The bounds of cases of real size: what roundings to the other side can do passes, and what mistakes do does not.

The stand-in for a kernel is NumPy in float64 with the roundings of the kernel's contract; it differs from the reference
as a GPU does, by values at the boundary of two numbers of bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import hyper_connection, sparse_attention
from mlx_ds4.custom_kernels._case import Case, check
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._switches import use_kernels

BF = ml_dtypes.bfloat16


def named(module, part: str) -> Case:
    """The case of this name, whose inputs are made once."""
    (case,) = [c for c in module.cases() if c.name.endswith(part)]
    assert case.large
    arrays = case.inputs(np.random.default_rng(0))
    return dataclasses.replace(case, inputs=lambda rng: arrays)


def fault(case: Case, fn: Callable, **changes) -> str | None:
    return check(dataclasses.replace(case, fn=lambda *arrays: mx.array(fn(*map(numbers, arrays))), **changes))[0]


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64) if x.dtype == mx.bfloat16 else np.array(x)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(BF).astype(np.float64)


def units(x: np.ndarray, n: int) -> np.ndarray:
    """Values of bfloat16 moved n units in the last place towards zero."""
    return (x.astype(BF).view(np.uint16) - np.uint16(n)).view(BF).astype(np.float64)


# ---- attention of one query row: 64 heads of 512, 128 rows of the window and 512 compressed ones ------------


@pytest.fixture(scope="module")
def attention() -> Case:
    return named(sparse_attention, "1x1x64x512_128of135_512of150000_turn")


def attend(
    q,
    sinks,
    cos,
    sin,
    near,
    near_list,
    far,
    far_list,
    *,
    scale=512**-0.5,
    probabilities=rounded,
    shift=0,
    result=rounded,
) -> np.ndarray:
    """[1, 1, H, D] as bfloat16. `shift` moves the window."""
    near_list = np.where(near_list < 0, -1, (near_list + shift) % near.shape[1])
    listed = np.concatenate([near_list, far_list], axis=-1)[0, 0]
    keys = np.concatenate([near[0, near_list[0, 0]], far[0, far_list[0, 0]]])
    peak = np.full((q.shape[2], 1), -1e30)
    total, acc = np.zeros_like(peak), np.zeros(q.shape[2:])
    for first in range(0, len(keys), 64):
        k = keys[first : first + 64]
        scores = np.where(listed[first : first + 64] >= 0, np.float64(np.float32(scale)) * (q[0, 0] @ k.T), -np.inf)
        raised = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        fade, p = np.exp(peak - raised), np.exp(scores - raised)
        total = total * fade + p.sum(axis=-1, keepdims=True)
        acc = acc * fade + probabilities(p) @ k
        peak = raised
    o = result(acc / (total + np.exp(sinks[:, None] - peak)))
    first = o.shape[-1] - 2 * cos.shape[-1]
    a, b = o[:, first::2].copy(), o[:, first + 1 :: 2].copy()
    o[:, first::2], o[:, first + 1 :: 2] = a * cos + b * sin, b * cos - a * sin
    return o[None, None].astype(np.float32).astype(BF)


def of_one_head(n: int) -> Callable:
    """Roundings by which the likeliest entry of head 5 in each block, not counting the peak, is n units off."""

    def probabilities(p: np.ndarray) -> np.ndarray:
        out = rounded(p)
        at = np.argmax(np.where(p[5] < 1, p[5], 0))
        if out[5, at]:  # the last block is empty
            out[5, at] = units(out[5, at : at + 1], n)[0]
        return out

    return probabilities


def test_attention_with_its_roundings_passes(attention):
    assert fault(attention, attend) is None


def test_a_probability_may_be_one_unit_off_and_not_three(attention):
    def off(n, **changes):
        return fault(attention, lambda *arrays: attend(*arrays, probabilities=of_one_head(n)), **changes)

    assert off(1) is None
    assert "beyond tolerance" in off(1, moved=None)
    assert "beyond tolerance" in off(3)


@pytest.mark.parametrize(
    "mistake",
    [
        {"probabilities": lambda p: p},
        {"scale": 1.01 * 512**-0.5},
        {"scale": 1.001 * 512**-0.5},
        {"shift": 1},
        {"result": lambda o: o},
    ],
    ids=["probabilities not rounded", "scale 1 %", "scale 0.1 %", "window shifted", "not rounded before the rotation"],
)
def test_mistakes_of_attention_fail(attention, mistake):
    assert fault(attention, lambda *arrays: attend(*arrays, **mistake)) is not None


@pytest.mark.parametrize("which", ["all", "one head"])
def test_a_lost_sink_fails(attention, which):
    def without(q, sinks, *rest):
        lost = np.full_like(sinks, -100) if which == "all" else np.where(sinks == sinks.max(), -100, sinks)
        return attend(q, lost, *rest)

    assert fault(attention, without) is not None


@pytest.mark.parametrize("place", [0, 60, 128, 500])
def test_a_lost_entry_fails(attention, place):
    """One of 640, with 1/640 of the attention."""

    def without(q, sinks, cos, sin, near, near_list, far, far_list):
        near_list, far_list = near_list.copy(), far_list.copy()
        if place < near_list.shape[-1]:
            near_list[..., place] = -1
        else:
            far_list[..., place - near_list.shape[-1]] = -1
        return attend(q, sinks, cos, sin, near, near_list, far, far_list)

    assert "beyond tolerance" in fault(attention, without)


@pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
def test_the_kernel_passes_emulated(attention):
    with use_kernels("emulate", checked=False):
        assert check(attention)[0] is None


# ---- collapse and norm of 512 rows: two roundings to bfloat16 on the way of each value -----------------------


@pytest.fixture(scope="module")
def collapse_norm() -> Case:
    return named(hyper_connection, "/collapse_norm_512x4x5120")


def normed(h, pre, weight, *, between=rounded) -> np.ndarray:
    x = between(np.einsum("nmc,nm->nc", h, pre))
    return (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) * weight).astype(np.float32).astype(BF)


def some_moved(n: int) -> Callable:
    """Roundings by which one value in 400 is n units off."""

    def between(x: np.ndarray) -> np.ndarray:
        x = rounded(x)
        x[:, ::400] = units(x[:, ::400], n)
        return x

    return between


def test_a_value_may_be_off_before_the_norm_and_after_it(collapse_norm):
    def off(n, **changes):
        return fault(collapse_norm, lambda *arrays: normed(*arrays, between=some_moved(n)), **changes)

    assert fault(collapse_norm, normed) is None
    assert off(1) is None
    assert "beyond tolerance" in off(1, roundings=1)
    assert "beyond tolerance" in off(3)


@pytest.mark.parametrize("mistake", ["not rounded between", "a stream 1 %", "truncated"])
def test_mistakes_of_collapse_and_norm_fail(collapse_norm, mistake):
    def wrong(h, pre, weight):
        if mistake == "a stream 1 %":
            return normed(h, pre * np.array([1.01, 1, 1, 1]), weight)
        cut = lambda x: (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # noqa: E731
        return normed(h, pre, weight, between=cut if mistake == "truncated" else lambda x: x)

    assert fault(collapse_norm, wrong) is not None
