"""Attention of a few rows on CUDA: two launches with the bits of the one for many rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import sparse_attention
from mlx_ds4.custom_kernels._case import compare, outputs
from mlx_ds4.custom_kernels._kernel import watch_launches
from mlx_ds4.custom_kernels._rows import SplitRows
from mlx_ds4.custom_kernels.rope import rope_frequencies, rope_table
from tests.cuda_host import COMPILER, launch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the bodies: install it to run them")
FEW_ROWS = [c for c in sparse_attention.cases() if not c.large and "x96x" not in c.name and "x50x" not in c.name]


@pytest.fixture
def on_cuda(monkeypatch):
    """Calls a function as on CUDA, bodies on the CPU: its results, and the kernels that it launched."""
    monkeypatch.setattr(sparse_attention, "backend", lambda: "cuda")
    monkeypatch.setattr(sparse_attention, "enabled", lambda family: True)
    monkeypatch.setattr("mlx_ds4.custom_kernels._kernel.Kernel._launch", lambda self, *call: launch(self, *call))

    def call(fn, few: int = sparse_attention._CUDA_FEW):
        launches = []
        monkeypatch.setattr(sparse_attention, "_CUDA_FEW", few)
        with watch_launches(launches.append):
            return fn(), [item.kernel.name for item in launches]

    return call


def bf16(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)


def both(on_cuda, attend) -> mx.array:
    """The result of the two launches, which is also that of the one."""
    got, names = on_cuda(attend)
    assert names == ["sparse_attention_scores", "sparse_attention_values"]
    want, names = on_cuda(attend, few=0)
    assert names == ["sparse_attention"]
    assert not mx.any(mx.isnan(got)) and mx.array_equal(got, want)
    return got


@pytest.mark.parametrize("case", FEW_ROWS, ids=lambda case: case.name)
def test_cases(on_cuda, case):
    arrays = case.inputs(np.random.default_rng(0))
    got = both(on_cuda, lambda: case.fn(*arrays))
    assert compare(got, outputs(case.reference(*arrays))[0], case.tolerance)[0] is None


def layer(B: int, L: int, H: int, D: int, counts: tuple[int, ...], seed: int = 1):
    """Queries, and sources with `counts` list entries, some of which name nothing; the last in two parts."""
    rng = np.random.default_rng(seed)
    parts = SplitRows(bf16(rng, B, 60, D), bf16(rng, B, 12, D), mx.array([50], dtype=mx.int32))
    lists = [mx.array(rng.integers(-5, 70, (B, L, n)).astype(np.int32)) for n in counts]
    sources = list(zip([bf16(rng, B, 40, D), parts][-len(counts) :], lists, strict=True))
    turn = rope_table(rng.integers(0, 1_048_576, L), rope_frequencies(16, 10000.0))
    options = {"sinks": mx.array(rng.standard_normal(H, dtype=np.float32)), "turn": turn, "turn_queries": True}
    return bf16(rng, B, L, H, D), sources, options


@pytest.mark.parametrize("counts", [(128, 512), (70,), (3, 700), (640, 640)], ids=str)
@pytest.mark.parametrize(("B", "H", "D"), [(2, 20, 64), (1, 3, 256)])
def test_lists_of_any_length(on_cuda, B, H, D, counts):
    """One chunk of entries, a few blocks of it, and more than one; heads beyond a tile of 16."""
    q, sources, options = layer(B, 1, H, D, counts)
    got = both(on_cuda, lambda: sparse_attention.sparse_attention(q, sources, scale=0.1, **options))
    want = sparse_attention.sparse_attention_ref(q, sources, scale=0.1, **options)
    assert compare(got, want, 1e-5)[0] is None


def test_empty_blocks_and_rows(on_cuda):
    """Blocks without an entry between others change nothing; a row without any is zeros."""
    q, [(rows, index)], options = layer(1, 3, 4, 64, (700,))
    index[:, 0, 64:640] = -1
    index[:, 1] = -1
    got = both(on_cuda, lambda: sparse_attention.sparse_attention(q, [(rows, index)], scale=0.1, **options))
    assert not got[:, 1].any() and got[:, 0].any()
    short = mx.concatenate([index[:, :, :64], index[:, :, 640:]], axis=-1)
    want, _ = on_cuda(lambda: sparse_attention.sparse_attention(q, [(rows, short)], scale=0.1, **options))
    assert mx.array_equal(got[:, 0], want[:, 0])


def test_rows_alone_and_together(on_cuda):
    q, sources, options = layer(1, 9, 4, 64, (20, 130))

    def attend(rows: slice) -> mx.array:
        some = options | {"turn": tuple(table[rows] for table in options["turn"])}
        lists = [(x, index[:, rows]) for x, index in sources]
        return on_cuda(lambda: sparse_attention.sparse_attention(q[:, rows], lists, scale=0.1, **some))

    nine, names = attend(slice(0, 9))
    assert names == ["sparse_attention"]
    for rows in (slice(0, 8), slice(8, 9), slice(3, 5)):
        got, names = attend(rows)
        assert len(names) == 2 and mx.array_equal(got, nine[:, rows])


def test_scores_add_up_in_the_same_order(on_cuda):
    """Most of a product cancels, so that another order of its sums shows in bfloat16."""
    q, [(rows, index)], options = layer(1, 1, 4, 256, (70,))
    options |= {"turn": None, "turn_queries": False}
    q = mx.concatenate([4096 * q[..., :64], q[..., 64:192], -4096 * q[..., :64]], axis=-1)
    rows = rows._replace(old=mx.concatenate([rows.old[..., :192], rows.old[..., :64]], axis=-1))
    both(on_cuda, lambda: sparse_attention.sparse_attention(q, [(rows, mx.minimum(index, 49))], scale=1.0, **options))
