"""The launch whose last block of logits chooses experts, as C++ on the CPU: the bits of launches of their own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import (
    _kernel,
    _quant_group_cuda,
    _shared_routed_cuda,
    hyper_connection,
    router,
    shared_expert,
)
from mlx_ds4.custom_kernels._case import compare, outputs
from mlx_ds4.custom_kernels._kernel import watch_launches
from mlx_ds4.custom_kernels._random_planes import weights_of
from mlx_ds4.custom_kernels._switches import use_kernels
from mlx_ds4.custom_kernels.hyper_connection import SUMS, SiteSums, random_sums
from tests.cuda_host import COMPILER, run_all

pytestmark = pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the bodies: install it to run them")

CASES = [case for case in shared_expert.cases() if "/routed_" in case.name and not case.large]


@pytest.fixture
def cuda(on_cpu, monkeypatch):
    """The ops take the launch that only CUDA has."""
    for module in (shared_expert, router, hyper_connection):
        monkeypatch.setattr(module, "enabled", lambda family: True)
    monkeypatch.setattr(shared_expert, "backend", lambda: "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_choice_in_the_launch_of_the_logits(case, cuda):
    """One launch; a choice differs only where two biased scores do, so ids are equal, the rest within the tolerance."""
    arrays = case.inputs(np.random.default_rng(0))
    launches = []
    with watch_launches(launches.append):
        got = case.fn(*arrays)
    assert [item.kernel.name for item in launches] == ["shared_expert_routed_mma"]
    for g, w in zip(got, outputs(case.reference(*arrays)), strict=True):
        assert compare(g, w, case.tolerance)[0] is None


def test_bits_of_launches_of_their_own(cuda):
    """The logits and the shared expert's half, and the choice and the coefficients as the emulator has them."""
    case = CASES[-1]
    arrays = case.inputs(np.random.default_rng(1))
    together = run_all(lambda: case.fn(*arrays))
    gate, up, by_router = weights_of(["Q4_K", "MXFP4", "Q8_0"], arrays[5:])
    x = arrays[4]
    parts = run_all(lambda: _quant_group_cuda.shared_swiglu(x, gate, up, x, by_router, limit=1.0))
    for one, other in zip(together, parts, strict=False):
        assert mx.array_equal(one, other)
    bias, sums = arrays[0], SiteSums(*arrays[1:4], **SUMS)
    with use_kernels("emulate"):
        alone = router.route_beside(together[0], bias, sums, k=3, factor=1.5)
    assert mx.array_equal(together[2], alone[0])
    for one, other in zip(together[3:], alone[1:], strict=True):
        assert compare(one, other, 1e-6)[0] is None  # exp of two libraries


def test_hostile_logits(cuda, monkeypatch):
    """NaN is never chosen; where too few numbers are left, the list ends in -1 with weight 0."""
    rng = np.random.default_rng(2)
    case = CASES[0]
    bias, *rest = case.inputs(rng)
    bias = np.full(bias.shape, np.nan, dtype=np.float32)
    bias[[3, 17]] = 0
    *_, chosen, weights, pre, mix = run_all(lambda: case.fn(mx.array(bias), *rest))
    assert chosen.tolist() == [[3, 17, -1, -1, -1, -1]] and weights[0, 2:].tolist() == [0, 0, 0, 0]
    assert mx.isfinite(pre).all() and mx.isfinite(mix).all()


def test_where_the_launch_does_not_fit():
    def takes(rows: int, experts: int, k: int = 6, of: int = 2, width: int = 128) -> bool:
        sums = SiteSums(*random_sums(np.random.default_rng(0), of), **SUMS)
        gate, router = (("Q8_0", {"codes": mx.zeros((n, width), dtype=mx.int8)}) for n in (64, experts))
        return _shared_routed_cuda.takes(mx.zeros((rows, width), dtype=mx.bfloat16), gate, router, k, sums)

    with use_kernels("emulate"):
        assert takes(2, 384)
        assert not takes(1, 384)  # sums of other rows
        assert not takes(2, 384, k=33)
        assert takes(2, 896) and not takes(2, 928)  # four warps' rings hold 18 KB
        assert takes(8, 384, of=8, width=5120) and not takes(8, 384, of=8)  # eight have twice that
    assert not takes(2, 384)  # no kernels
    assert _kernel.tickets().shape == (_kernel.TICKETS,) and not _kernel.tickets().any()
