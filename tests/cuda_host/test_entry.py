"""The launch whose last block norms the query and makes the window's entry, as C++ on the CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import _quant_group_cuda, cache_entry, entry_matmul, hyper_connection
from mlx_ds4.custom_kernels._case import compare, outputs
from mlx_ds4.custom_kernels._kernel import tickets, watch_launches
from mlx_ds4.custom_kernels._random_planes import weights_of
from mlx_ds4.custom_kernels._switches import use_kernels
from mlx_ds4.custom_kernels.hyper_connection import SUMS, SiteSums
from tests.cuda_host import COMPILER, run_all

pytestmark = pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the bodies: install it to run them")

CASES = [case for case in entry_matmul.cases() if not case.large]


@pytest.fixture
def cuda(on_cpu, monkeypatch):
    """The op takes the launch that only CUDA has."""
    for module in (entry_matmul, hyper_connection):
        monkeypatch.setattr(module, "enabled", lambda family: True)
    monkeypatch.setattr(entry_matmul, "backend", lambda: "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_launch(case, cuda):
    arrays = case.inputs(np.random.default_rng(0))
    launches = []
    with watch_launches(launches.append):
        got = case.fn(*arrays)
    assert [item.kernel.family for item in launches] == ["entry_matmul"]
    want = outputs(case.reference(*arrays))
    for g, w in zip(got, want, strict=True):
        assert compare(g, w, case.tolerance, roundings=case.roundings)[0] is None


def test_bits_of_two_launches(cuda, monkeypatch):
    """The products, and what the emulated launch of the entry makes of them; a row alone has the bits it has beside
    others."""
    case = CASES[1]
    x, q_weight, cos, sin, kv_weight, dots, base, scale, into, at, *planes = case.inputs(np.random.default_rng(1))
    weights = list(weights_of(["Q4_K", "MXFP4", "F16", "F32"], planes))
    dtypes = [mx.bfloat16] * 2 + [mx.float32] * 2

    def together(rows: slice, ring: mx.array, at: mx.array):
        sums = SiteSums(dots[:, rows], base, scale, **SUMS)
        entry = (q_weight, cos[rows], sin[rows], "fp8", kv_weight, 1e-20, sums)
        products, *entered = entry_matmul.products_and_entry(
            x[:, rows], weights, dtypes, *entry, into=ring, at=at, counts=tickets()
        )
        return products, entered, entry

    products, entered, entry = together(slice(0, 3), into, at)
    low_rank, kv, *others = run_all(lambda: _quant_group_cuda.together(x, weights, dtypes))
    for one, other in zip(products, others, strict=True):
        assert mx.array_equal(one, other)
    with use_kernels("emulate"):
        alone = cache_entry.norm_and_entry(low_rank, entry[0], kv, *entry[1:], into=into, at=at)
    for one, other in zip(entered[:2], alone[:2], strict=True):
        assert mx.array_equal(one, other)
    for one, other in zip(entered[2:], alone[2:], strict=True):
        assert compare(one, other, 1e-6)[0] is None  # exp of two libraries
    ring = into
    for row in range(3):
        some, (qr, ring, *_), _ = together(slice(row, row + 1), ring, at + row)
        for one, other in zip([qr, *some], [entered[0], *products], strict=True):
            assert mx.array_equal(one, other[:, row : row + 1])
    assert mx.array_equal(ring, entered[1])


def test_where_two_launches_stay(monkeypatch):
    """Other types, a row too wide for a warp, sums of other rows, or one matrix: the op launches as elsewhere."""
    case = CASES[0]
    x, _, cos, _, _, dots, base, scale, into, at, *planes = case.inputs(np.random.default_rng(2))
    weights = list(weights_of(["Q8_0", "Q8_0"], planes))
    sums = SiteSums(dots, base, scale, **SUMS)
    bfloat16, float32 = [mx.bfloat16] * 2, [mx.float32] * 2
    monkeypatch.setattr(entry_matmul, "backend", lambda: "cuda")
    wide = ("Q8_0", {name: mx.repeat(plane, 140, axis=0) for name, plane in weights[0][1].items()})

    def launches(x=x, weights=weights, dtypes=bfloat16, cos=cos, sums=sums, into=into, at=at) -> bool:
        return entry_matmul._launches(x, weights, dtypes, cos, sums, into, at)

    assert not launches()  # no kernels here
    with use_kernels("emulate"):
        assert launches()
        assert not launches(x=x.astype(mx.float32))
        assert not launches(dtypes=float32)
        assert not launches(weights=weights[:1], dtypes=bfloat16[:1])
        assert not launches(weights=[wide, weights[1]])
        assert not launches(sums=sums._replace(dots=mx.repeat(dots, 2, axis=1)))
        assert not launches(into=into.astype(mx.float32))
        assert not launches(at=at.astype(mx.int64))
        assert not launches(cos=mx.concatenate([cos, cos]))
