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
M, C, F, E, K = 4, 70, 64, 7, 3


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def streams(*leading: int) -> tuple[mx.array, mx.array]:
    """h, and the coefficients that expand a result into it."""
    return normal(1, *leading, M, C), normal(2, *leading, M + M * M, dtype=mx.float32)


def weight(*shape: int, format: str = "Q8_0"):
    return format, random_planes(np.random.default_rng(5), format, *shape)


def routed(N: int):
    """a, down, chosen and the shared expert's part."""
    chosen = np.sort(np.argsort(np.random.default_rng(6).random((N, E)), axis=1)[:, :K], axis=1).astype(np.int32)
    return normal(7, N, K, F), weight(E, C, F), mx.array(chosen), (normal(8, N, F), weight(C, F, format="F16"))


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item()


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
            first, second = project_expand(x, w, *some), experts_expand(a, down, chosen, shared, *some)
        assert launches == {"expand_project": 1, "expand_experts": 1}
        assert same_bits(first, expand(quant_matmul(x, *w), *some))
        y = expert_down(a, down, chosen, shared).reshape(*leading, C)
        assert same_bits(second, expand(y, *some))


@needs_emulator
def test_a_row_does_not_depend_on_its_neighbours():
    (h, mix), x, w = streams(6), normal(9, 6, 96), weight(C, 96)
    a, down, chosen, (s, last) = routed(6)
    with use_kernels("emulate", checked=False):
        first, second = project_expand(x, w, h, mix), experts_expand(a, down, chosen, (s, last), h, mix)
        for i in range(6):
            row = slice(i, i + 1)
            assert same_bits(project_expand(x[row], w, h[row], mix[row]), first[row])
            alone = experts_expand(a[row], down, chosen[row], (s[row], last), h[row], mix[row])
            assert same_bits(alone, second[row])


@needs_emulator
def test_switched_off_and_more_rows():
    """Two launches instead of one, without the family and beyond eight rows."""
    for N, names in ((2, {"quant_rows": 1, "expert_down": 1}), (9, {"quant_tile": 2, "expert_down_tile": 1})):
        some, x, w = streams(N), normal(9, N, 96), weight(C, 96)
        a, down, chosen, shared = routed(N)
        shared = shared[0], weight(C, F)
        off = ["expand_matmul"] if N == 2 else []
        with use_kernels("emulate", checked=False), disable(*off), count_launches() as launches:
            project_expand(x, w, *some)
            experts_expand(a, down, chosen, shared, *some)
        assert launches == names | {"hyper_connection_expand": 2}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("N", [0, 1])
def test_edges(mode, N):
    """No rows; five streams, which no kernel takes."""
    some, x, w = streams(N), normal(9, N, 96), weight(C, 96)
    a, down, chosen, shared = routed(N)
    with use_kernels(mode):
        got = project_expand(x, w, *some), experts_expand(a, down, chosen, shared, *some)
    want = project_expand_ref(x, w, *some), experts_expand_ref(a, down, chosen, shared, *some)
    five = normal(2, 1, 96), weight(8, 96), normal(1, 1, 5, 8), mx.ones((1, 30))
    with use_kernels(mode), count_launches() as launches:
        got += (project_expand(*five),)
    assert launches == ({} if mode == "reference" else {"quant_rows": 1})
    for g, r in zip(got, (*want, project_expand_ref(*five)), strict=True):
        assert g.shape == r.shape and g.dtype == r.dtype and mx.allclose(g, r, rtol=2.0**-6, atol=1e-2)


def test_wrong_inputs():
    a, down, chosen, shared = routed(2)
    with pytest.raises(ValueError, match="width 64, expected the weight's 96"):
        project_expand(normal(9, 2, 64), weight(C, 96), *streams(2))
    with pytest.raises(ValueError, match="width 64, expected the weight's 96"):
        experts_expand(a, down, chosen, (shared[0], weight(C, 96)), *streams(2))


MUTATIONS = [
    # (kernel, text, what replaces it, what is found)
    ("project", "metal::min(first + r, uint(C - 1))", "first + r", "out-of-bounds"),
    ("project", "&& c < uint(C)", "", "race"),
    ("project", "lane < uint(R * ROWS) &&", "", "race"),
    ("project", "mix + row * uint(M + M * M)", "mix", "wrong result"),
    ("experts", "if (c >= outputs) break;", "", "race"),
    ("experts", "if (lane < rows)", "if (true)", "out-of-bounds"),
    ("experts", "mix + row * uint(M + M * M)", "mix", "wrong result"),
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
