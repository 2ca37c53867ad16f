"""Entries of a cache: the ring form and the form with the query's norm and coefficients give the bits of separate
calls."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator, emulator_missing
from mlx_ds4.custom_kernels._switches import disable, use_kernels
from mlx_ds4.custom_kernels.cache_entry import cache_entry, norm_and_entry
from mlx_ds4.custom_kernels.hyper_connection import SUMS, SiteSums, coefficients, random_sums
from mlx_ds4.custom_kernels.rms_norm import rms_norm
from mlx_ds4.custom_kernels.rope import rope_table

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]
EPS = 1e-20


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)


def one(at: int) -> mx.array:
    return mx.array([at], dtype=mx.int32)


def table(length: int) -> tuple[mx.array, mx.array]:
    return rope_table(np.arange(length) * 3 + 5, 1.0 / 1.3 ** np.arange(8, dtype=np.float32))


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint16))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("R", "L", "at"), [(9, 3, 0), (9, 3, 8), (9, 9, 4), (9, 1, 1_048_575), (9, 2, -1), (1, 1, 3), (136, 6, 133)]
)
@pytest.mark.parametrize("kind", ["fp8", "fp4_e4m3"])
def test_a_ring_holds_the_entries_and_keeps_the_rest(R, L, at, kind, mode):
    x, into, weight = normal(2, L, 96), normal(2, R, 96, seed=1), normal(96, seed=2)
    into[:, R // 2, 5] = float("nan")
    before = bits(into)
    for normed in (weight, None):
        with use_kernels(mode), count_launches() as launches:
            entries = cache_entry(x, *table(L), kind, weight=normed, eps=EPS)
            ring = cache_entry(x, *table(L), kind, weight=normed, eps=EPS, into=into, at=one(at))
        want = before.copy()
        want[:, (at + np.arange(L)) % R] = bits(entries)
        np.testing.assert_array_equal(bits(ring), want)
        assert launches["cache_entry_ring"] == (mode == "emulate")
    np.testing.assert_array_equal(bits(into), before)


def site_sums(*leading: int, streams: int = 4) -> SiteSums:
    return SiteSums(*random_sums(np.random.default_rng(5), *leading, streams=streams), **SUMS | {"iters": 4})


@needs_emulator
@pytest.mark.parametrize("order", ["forward", "backward", "random"])
@pytest.mark.parametrize(("C", "D"), [(160, 96), (96, 256), (1290, 32), (31, 32)])
def test_with_the_query_and_coefficients_the_same_bits_in_one_launch(C, D, order):
    sums = site_sums(2, 3, streams=2 if C == 31 else 4)
    low_rank, q_weight, kv, weight = normal(2, 3, C), normal(C, seed=1), normal(2, 3, D, seed=2), normal(D, seed=3)
    into = normal(2, 7, D, seed=4)
    with use_kernels("emulate", order=order), count_launches() as launches:
        qr, ring, *mixes, tickets = norm_and_entry(
            low_rank, q_weight, kv, *table(3), "fp8", weight, EPS, sums, into=into, at=one(6), tickets=300
        )
        assert tickets.dtype == mx.int32 and tickets.shape == (300,) and not mx.any(tickets)
        assert dict(launches) == {"cache_entry_norm_ring": 1}
        assert all(mx.array_equal(a, b) for a, b in zip(mixes, coefficients(sums), strict=True))
        want = cache_entry(kv, *table(3), "fp8", weight=weight, eps=EPS, into=into, at=one(6))
        assert mx.array_equal(qr, rms_norm(low_rank, q_weight, EPS))
    assert mx.array_equal(ring, want)


@needs_emulator
def test_what_cannot_ride_is_launched_alone():
    low_rank, q_weight, kv, weight, into = (normal(*s) for s in ((1, 2, 64), (64,), (1, 2, 96), (96,), (1, 7, 96)))
    call = [low_rank, q_weight, kv, *table(2), "fp8", weight, EPS]
    options = {"into": into, "at": one(6), "tickets": 5}
    with use_kernels("emulate"):
        together = norm_and_entry(*call, site_sums(1, 2), **options)
        for family in ("cache_entry", "rms_norm", "hyper_connection"):
            with disable(family), count_launches() as launches:
                apart = norm_and_entry(*call, site_sums(1, 2), **options)
            assert len(launches) == 2 and "cache_entry_norm_ring" not in launches
            for a, b in zip(apart, together, strict=True):
                assert mx.allclose(a, b, rtol=2e-2, atol=1e-4)
        three = site_sums(1, 2, streams=3)  # which no kernel takes
        for a, b in zip(norm_and_entry(*call, three, **options)[2:4], coefficients(three), strict=True):
            assert mx.array_equal(a, b)


@needs_emulator
def test_rows_alone_and_together_are_equal_bits():
    x, into, weight = normal(1, 6, 96), normal(1, 16, 96, seed=1), normal(96, seed=2)
    cos, sin = table(6)
    with use_kernels("emulate", checked=False):
        together = cache_entry(x, cos, sin, "fp8", weight=weight, eps=EPS, into=into, at=one(13))
        ring = into
        for i in range(6):
            row = slice(i, i + 1)
            ring = cache_entry(x[:, row], cos[row], sin[row], "fp8", weight=weight, eps=EPS, into=ring, at=one(13 + i))
    assert mx.array_equal(ring, together)


@needs_emulator
def test_ring_rows_are_read_once():
    """The replaced ones too: which they are is known late, and no read waits for that."""
    x, into = normal(1, 3, 96), normal(1, 16, 96, seed=1)
    with use_kernels("emulate"):
        cache_entry(x, *table(3), "fp8", into=into, at=one(15))
    traffic = emulator().last_stats().buffers["into"]
    assert traffic.read == traffic.distinct_read == 16 * 96 * 2


@pytest.mark.parametrize("mode", MODES)
def test_without_a_kernel(mode):
    """Other dtypes and widths take the reference; so does a step of no rows, which changes nothing."""
    into = normal(1, 5, 96)
    with use_kernels(mode), count_launches() as launches:
        wide = cache_entry(
            normal(1, 2, 96).astype(mx.float32), *table(2), "fp8", into=into.astype(mx.float32), at=one(0)
        )
        assert wide.dtype == mx.float32
        same = cache_entry(normal(1, 2, 96)[:, :0], *table(0), "fp8", into=into, at=one(3))
    assert mx.array_equal(same, into)
    assert not launches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"into": mx.zeros((1, 1, 96), dtype=mx.bfloat16)}, "a short step"),
        ({"into": mx.zeros((1, 4, 64), dtype=mx.bfloat16)}, "a short step"),
        ({"into": mx.zeros((2, 4, 96), dtype=mx.bfloat16)}, "a short step"),
        ({"at": None}, "a short step"),
        ({"at": mx.array([1.0])}, "a short step"),
        ({"at": mx.array([1, 2], dtype=mx.int32)}, "a short step"),
        ({"kind": "fp6"}, "expected one of"),
        ({"low_rank": mx.zeros((1, 3, 64))}, "pass the tensors of one step"),
        ({"q_weight": mx.zeros((65,))}, "pass the tensors of one step"),
    ],
)
def test_wrong_calls(change, message):
    cos, sin = table(2)
    call = {"low_rank": normal(1, 2, 64), "q_weight": normal(64), "kv": normal(1, 2, 96), "cos": cos, "sin": sin}
    call |= {
        "kind": "fp8",
        "kv_weight": normal(96),
        "eps": EPS,
        "sums": site_sums(1, 2),
        "into": normal(1, 4, 96),
        "at": one(1),
        "tickets": 4,
    } | change
    with pytest.raises(ValueError, match=message):
        norm_and_entry(**call)
    if not {"low_rank", "q_weight"} & set(change):
        ring = {name: call[name] for name in ("cos", "sin", "kind", "into", "at")}
        with pytest.raises(ValueError, match=message):
            cache_entry(call["kv"], **ring)
