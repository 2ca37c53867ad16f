"""The feed-forward part's first half: bits of the launches it stands for, independence of rows, launches, edges."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import shared_expert
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._random_planes import random_planes
from mlx_ds4.custom_kernels._switches import disable, use_kernels
from mlx_ds4.custom_kernels.quant_matmul import quant_matmul, quant_matmul_group
from mlx_ds4.custom_kernels.shared_expert import clamped_swiglu, shared_swiglu, shared_swiglu_ref
from tests.kernels import mutants

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]
C, E, F, LIMIT = 256, 24, 40, 0.5


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def weights(*formats: str, rows: tuple[int, ...] = (F, F, E)):
    rng = np.random.default_rng(7)
    return [(f, random_planes(rng, f, n, C)) for f, n in zip(formats, rows, strict=True)]


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item()


@needs_emulator
@pytest.mark.parametrize("formats", [("Q8_0", "Q8_0", "F32"), ("Q4_K", "IQ2_XXS", "BF16"), ("FP8", "FP8", "F16")])
@pytest.mark.parametrize(("N", "dtype"), [(1, mx.bfloat16), (5, mx.bfloat16), (8, mx.float32)])
def test_bits_of_the_launches_one_by_one(formats, N, dtype):
    """Against the two products' and the SwiGLU's own kernels, as more rows launch them; one launch instead of three."""
    gate, up, router = weights(*formats)
    x, r = normal(1, N, C, dtype=dtype), normal(2, N, C, dtype=dtype)
    with use_kernels("emulate", checked=False), count_launches() as launches:
        logits, a = shared_swiglu(x, gate, up, r, router, limit=LIMIT)
        assert launches == {"shared_expert": 1}
        assert same_bits(logits, quant_matmul(r, *router, out_dtype=mx.float32))
        assert same_bits(a, clamped_swiglu(*quant_matmul_group(x, [gate, up]), LIMIT))


@needs_emulator
def test_switched_off():
    gate, up, router = weights("Q8_0", "Q8_0", "F32")
    x = normal(3, 2, C)
    with use_kernels("emulate"), disable("shared_expert"), count_launches() as launches:
        logits, a = shared_swiglu(x, gate, up, x, router, limit=LIMIT)
    assert launches == {"quant_rows": 1, "quant_rows_2": 1}
    with use_kernels("emulate"):
        together = shared_swiglu(x, gate, up, x, router, limit=LIMIT)
    assert same_bits(logits, together[0]) and mx.allclose(a, together[1], rtol=2.0**-7)


@needs_emulator
def test_a_row_does_not_depend_on_its_neighbours():
    gate, up, router = weights("Q8_0", "MXFP4", "F32")
    x, r = normal(4, 8, C), normal(5, 8, C)
    x[2], r[2] = 0, 0
    with use_kernels("emulate", checked=False):
        together = shared_swiglu(x, gate, up, r, router, limit=LIMIT)
        for i in range(8):
            alone = shared_swiglu(x[i : i + 1], gate, up, r[i : i + 1], router, limit=LIMIT)
            assert all(same_bits(a, b[i : i + 1]) for a, b in zip(alone, together, strict=True))
    assert all(mx.all(y[2] == 0) and not mx.all(y[3] == 0) for y in together)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("N", [0, 2, 9])
def test_values_and_edges(N, mode):
    """No rows, few rows, more than a launch takes; a router too small for a kernel."""
    gate, up, router = weights("Q8_0", "Q8_0", "F32")
    x, r = normal(6, N, C), normal(7, N, C)
    with use_kernels(mode):
        logits, a = shared_swiglu(x, gate, up, r, router, limit=LIMIT)
    want = shared_swiglu_ref(x, gate, up, r, router, limit=LIMIT)
    assert (logits.shape, logits.dtype, a.shape, a.dtype) == ((N, E), mx.float32, (N, F), mx.bfloat16)
    if N:
        assert mx.abs(logits - want[0]).max() <= 1e-5 * mx.abs(want[0]).max()
        assert mx.allclose(a, want[1], rtol=2.0**-6, atol=2e-3)
        assert mx.abs(a).max() <= 0.5  # silu(0.5) * 0.5 is the most


def test_wrong_inputs():
    gate, up, router = weights("Q8_0", "Q8_0", "F32")
    with pytest.raises(ValueError, match="width 64, expected the weight's 256"):
        shared_swiglu(mx.zeros((1, 64)), gate, up, mx.zeros((1, 64)), router, limit=LIMIT)
    with pytest.raises(ValueError, match="format 'Q9', expected one of"):
        shared_swiglu(mx.zeros((1, C)), ("Q9", gate[1]), up, mx.zeros((1, C)), router, limit=LIMIT)


MUTATIONS = [
    # (its part, text, what replaces it, what is found)
    ("source", "block * part + here, lane);\n        return", "block * part, lane);\n        return", "race"),
    ("source", "(block - before) * part + here", "block * part + here", "unwritten"),
    ("header", "rows[r] = ulong(metal::min(first + r, outputs - 1u))", "rows[r] = ulong(first + r)", "out-of-bounds"),
    ("header", "lane < uint(R * M) && f < outputs", "lane < uint(R * M)", "race"),
    ("header", "lane < uint(R * M) && f < outputs", "f < outputs", "race"),
]


@needs_emulator
@pytest.mark.parametrize(("part", "old", "new", "found"), MUTATIONS)
def test_a_lost_guard_is_noticed(part, old, new, found, monkeypatch):
    """Two weight rows a simdgroup, 33 outputs, three rows of x."""
    kernel = shared_expert._shared_kernel
    assert getattr(kernel, part).count(old) == 1, "the kernel changed: write the mutation anew"
    mutants.plant(monkeypatch, kernel, old, new, part=part)
    monkeypatch.setattr(shared_expert, "rows_per_simdgroup", lambda *_: 2)
    case = next(c for c in shared_expert.cases() if "3x256_8+33" in c.name)
    assert mutants.found(case) == found
