"""The end of a sublayer: bits of the two launches it stands for, independence of rows, switches, edges, guards."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import expand_matmul
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._random_planes import random_planes
from mlx_ds4.custom_kernels._switches import disable, use_kernels
from mlx_ds4.custom_kernels.expand_matmul import experts_expand, experts_expand_ref, project_expand, project_expand_ref
from mlx_ds4.custom_kernels.expert_matmul import expert_down
from mlx_ds4.custom_kernels.hyper_connection import expand
from mlx_ds4.custom_kernels.quant_matmul import quant_matmul
from tests.kernels import mutants

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]
STEPS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-20}
M, C, F, E, K = 4, 70, 64, 7, 3


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def streams(*leading: int):
    """h, partial sums, base and scale of a site."""
    O, single = M * (M + 2), {"dtype": mx.float32}
    dots = normal(2, *leading, 32, O + 1, **single)
    dots[..., O] = mx.abs(dots[..., O]) + M * C / 32
    return normal(1, *leading, M, C), dots, normal(3, O, **single), normal(4, 3, **single)


def weight(*shape: int, format: str = "Q8_0"):
    return format, random_planes(np.random.default_rng(5), format, *shape)


def routed(N: int):
    """a, down, chosen and the shared expert's part."""
    chosen = np.sort(np.argsort(np.random.default_rng(6).random((N, E)), axis=1)[:, :K], axis=1).astype(np.int32)
    return normal(7, N, K, F), weight(E, C, F), mx.array(chosen), (normal(8, N, F), weight(C, F, format="F16"))


def of_row(i: int, some):
    h, dots, base, scale = some
    return h[i : i + 1], dots[i : i + 1], base, scale


def same_bits(first, second) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(
        a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item()
        for a, b in pairs
    )


@needs_emulator
@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("N", [1, 3, 8])
def test_bits_of_the_two_launches(N, most, monkeypatch):
    """However many weight rows a simdgroup takes; a batch of two where the rows are even."""
    R = min(most, 4 if N <= 4 else 2)
    monkeypatch.setattr(expand_matmul, "rows_per_simdgroup", lambda outputs, most: min(R, most))
    some = streams(2, N // 2) if N % 2 == 0 else streams(1, N)
    leading = some[0].shape[:-2]
    x, w = normal(9, *leading, 96), weight(C, 96, format="MXFP4")
    a, down, chosen, shared = routed(N)
    with use_kernels("emulate", checked=False):
        with count_launches() as launches:
            first, second = project_expand(x, w, some, **STEPS), experts_expand(a, down, chosen, shared, some, **STEPS)
        assert launches == {"expand_project": 1, "expand_experts": 1}
        y = quant_matmul(x, *w)
        assert same_bits(first, [y, *expand(y, *some, **STEPS)])
        y = expert_down(a, down, chosen, shared).reshape(*leading, C)
        assert same_bits(second, [y, *expand(y, *some, **STEPS)])


@needs_emulator
def test_a_row_does_not_depend_on_its_neighbours():
    some, x, w = streams(6), normal(9, 6, 96), weight(C, 96)
    a, down, chosen, (s, last) = routed(6)
    with use_kernels("emulate", checked=False):
        first, second = (
            project_expand(x, w, some, **STEPS),
            experts_expand(a, down, chosen, (s, last), some, **STEPS),
        )
        for i in range(6):
            row = slice(i, i + 1)
            alone = project_expand(x[row], w, of_row(i, some), **STEPS)
            assert same_bits(alone, [y[row] for y in first])
            alone = experts_expand(a[row], down, chosen[row], (s[row], last), of_row(i, some), **STEPS)
            assert same_bits(alone, [y[row] for y in second])


@needs_emulator
def test_switched_off_and_more_rows():
    """Two launches instead of one, without the family and beyond eight rows."""
    for N, names in ((2, {"quant_rows": 1, "expert_down": 1}), (9, {"quant_tile": 2, "expert_down_tile": 1})):
        some, x, w = streams(N), normal(9, N, 96), weight(C, 96)
        a, down, chosen, shared = routed(N)
        shared = shared[0], weight(C, F)
        off = ["expand_matmul"] if N == 2 else []
        with use_kernels("emulate", checked=False), disable(*off), count_launches() as launches:
            project_expand(x, w, some, **STEPS)
            experts_expand(a, down, chosen, shared, some, **STEPS)
        assert launches == names | {"hyper_connection_expand": 2}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("N", [0, 1])
def test_edges(mode, N):
    """No rows; five streams, which no kernel takes."""
    some, x, w = streams(N), normal(9, N, 96), weight(C, 96)
    a, down, chosen, shared = routed(N)
    with use_kernels(mode):
        got = project_expand(x, w, some, **STEPS), experts_expand(a, down, chosen, shared, some, **STEPS)
    want = project_expand_ref(x, w, some, **STEPS), experts_expand_ref(a, down, chosen, shared, some, **STEPS)
    for one, other in zip(got, want, strict=True):
        for g, r in zip(one, other, strict=True):
            assert g.shape == r.shape and g.dtype == r.dtype and mx.allclose(g, r, rtol=2.0**-6, atol=1e-2)
    h = normal(1, 1, 5, 8)
    five = (h, mx.ones((1, 1, 36)), mx.zeros(35), mx.ones(3))
    with use_kernels(mode), count_launches() as launches:
        y, expanded, pre, _, comb = project_expand(normal(2, 1, 96), weight(8, 96), five, **STEPS)
    assert (y.shape, expanded.shape, pre.shape, comb.shape) == ((1, 8), h.shape, (1, 5), (1, 5, 5))
    assert "expand_project" not in launches


def test_wrong_inputs():
    a, down, chosen, shared = routed(2)
    with pytest.raises(ValueError, match="width 64, expected the weight's 96"):
        project_expand(normal(9, 2, 64), weight(C, 96), streams(2), **STEPS)
    with pytest.raises(ValueError, match="width 64, expected the weight's 96"):
        experts_expand(a, down, chosen, (shared[0], weight(C, 96)), streams(2), **STEPS)


MUTATIONS = [
    # (kernel, text, what replaces it, what is found)
    ("project", "threadgroup_barrier(mem_flags::mem_threadgroup);", ";", "race"),
    ("project", "if (own < rows)", "if (own == 0u)", "uninitialised"),
    ("project", "metal::min(first + r, uint(C - 1))", "first + r", "out-of-bounds"),
    ("project", "&& c < uint(C)", "", "race"),
    ("project", "lane < uint(R * ROWS) &&", "", "race"),
    ("project", "if (threadgroup_position_in_grid.x == 0)", "", "race"),
    ("experts", "threadgroup_barrier(mem_flags::mem_threadgroup);", ";", "race"),
    ("experts", "if (c >= outputs) break;", "", "race"),
    ("experts", "if (own < rows)", "if (true)", "out-of-bounds"),
    ("experts", "if (lane < rows)", "if (true)", "out-of-bounds"),
]


@needs_emulator
@pytest.mark.parametrize(("which", "old", "new", "found"), MUTATIONS)
def test_a_lost_guard_is_noticed(which, old, new, found, monkeypatch):
    """Three rows of 67 channels, five of the experts; two weight rows a simdgroup."""
    kernel = getattr(expand_matmul, f"_{which}_kernel")
    assert kernel.source.count(old) == 1, "the kernel changed: write the mutation anew"
    mutants.plant(monkeypatch, kernel, old, new)
    monkeypatch.setattr(expand_matmul, "rows_per_simdgroup", lambda *_: 2)
    name = "3x256_to_2x67" if which == "project" else "5x3_of_8"
    case = next(c for c in expand_matmul.cases() if name in c.name)
    assert mutants.found(case) == found
