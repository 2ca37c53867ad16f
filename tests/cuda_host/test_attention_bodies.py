"""CUDA bodies of selection and attention, as C++ on the CPU: the references' results, and equal bits of all forms."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import _kernel, _sparse_attention_few_cuda, index_score, sparse_attention
from mlx_ds4.custom_kernels._case import compare, outputs
from mlx_ds4.custom_kernels._kernel import watch_launches
from mlx_ds4.custom_kernels._rows import SplitRows, part
from mlx_ds4.custom_kernels._switches import trace
from mlx_ds4.custom_kernels.rope import rope_frequencies, rope_ref, rope_table
from tests.cuda_host import COMPILER, launch, run, run_op

pytestmark = pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the bodies: install it to run them")

SMALL = [case for module in (index_score, sparse_attention) for case in module.cases() if not case.large]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_selection_and_attention(case, monkeypatch):
    arrays = case.inputs(np.random.default_rng(0))
    launches = []
    with watch_launches(launches.append):
        trace(lambda: case.fn(*arrays))
    calls = [item for item in launches if item.kernel.cuda_source]
    assert calls, "this case launches no kernel with a CUDA body"
    if int(np.prod(calls[0].call["grid"])) > 40 * 256:
        pytest.skip("more than 40 blocks of fibers take too long here")
    got = [launch(item.kernel, item.inputs, item.call)[0] for item in calls]
    want = outputs(case.reference(*arrays))
    for g, w in zip(got, want, strict=True):
        assert compare(g, w, case.tolerance)[0] is None


@pytest.fixture
def few_rows(on_cpu, monkeypatch):
    """Attention takes the body of few rows, which only CUDA has."""
    monkeypatch.setattr(sparse_attention, "enabled", lambda family: True)
    monkeypatch.setattr(sparse_attention, "backend", lambda: "cuda")


FEW = [c for c in sparse_attention.cases() if not c.large and c.inputs(np.random.default_rng(0))[0].shape[1] <= 3]


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_attention_of_few_rows(case, few_rows):
    arrays = case.inputs(np.random.default_rng(0))
    (want,) = outputs(case.reference(*arrays))
    assert compare(run(lambda: case.fn(*arrays)), want, case.tolerance)[0] is None


@pytest.mark.parametrize("width", [70, 512])
def test_attention_of_few_rows_has_the_bits_of_many(few_rows, monkeypatch, width):
    """A row alone has the bits that it has beside others; an empty list gives zeros."""
    rng = np.random.default_rng(8)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)

    def listed(n: int, width: int) -> mx.array:
        index = rng.integers(-n // 4, n + 9, (1, 3, width))
        index[0, 1] = -1
        return mx.array(np.maximum(index, -1).astype(np.int32))

    q, sinks = normal(1, 3, 8, 512), mx.array(rng.standard_normal(8).astype(np.float32))
    sources = [(normal(1, 136, 512), listed(136, 128)), (normal(1, 900, 512), listed(900, width))]
    turn = rope_table(np.array([7, 70_000, 1_048_575]), rope_frequencies(64, 10000.0))

    def attend(rows: slice) -> mx.array:
        options = {"scale": 512**-0.5, "turn": tuple(x[rows] for x in turn), "turn_queries": True}
        some = [(x, index[:, rows]) for x, index in sources]
        options |= {"tickets": _kernel.tickets()}
        return run(lambda: sparse_attention.sparse_attention(q[:, rows], some, sinks, **options))

    got = attend(slice(0, 3))
    assert mx.all(got[:, 1] == 0) and not mx.any(got[:, 0] == 0)
    assert mx.array_equal(attend(slice(2, 3)), got[:, 2:])
    monkeypatch.setattr(_kernel, "block_bytes", lambda: 99 << 10)  # as on a workstation's card
    assert mx.array_equal(attend(slice(0, 3)), got)


@pytest.mark.parametrize(
    ("rows", "heads", "D", "entries"),
    [
        (1, 64, 64, 65),
        (2, 3, 64, 1290),  # more than one softmax takes: three of them
        (1, 20, 128, 64),  # four heads of the second tile
        (2, 20, 256, 90),
        (1, 37, 512, 70),  # five of the second pair of tiles
        (1, 5, 512, 640),
    ],
)
def test_attention_of_few_rows_however_it_is_split(few_rows, monkeypatch, rows, heads, D, entries):
    """By tiles of heads and slices of channels, and whichever block is the last: the bits of the body for many rows."""
    rng = np.random.default_rng(9)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)

    q, sinks = normal(rows, 1, heads, D), mx.array(rng.standard_normal(heads).astype(np.float32))
    index = mx.array(rng.integers(-30, 150, (rows, 1, entries)).astype(np.int32))
    index[:, :, 5:24] = -1
    turn = rope_table(np.array([70_000]), rope_frequencies(32, 10000.0))
    tickets = mx.zeros((sparse_attention.ticket_count(rows, heads),), dtype=mx.int32)
    attend = functools.partial(
        sparse_attention.sparse_attention, q, [(normal(rows, 140, D), index)], sinks, scale=D**-0.5, turn=turn
    )
    few = functools.partial(attend, turn_queries=True, tickets=tickets)
    got = []
    for split in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 4)):
        monkeypatch.setattr(_sparse_attention_few_cuda, "split", lambda *_, split=split: split)
        launches = []
        with watch_launches(launches.append):
            trace(few)
        (item,) = launches
        assert item.kernel.name == "sparse_attention_few" and item.inputs[-1] is tickets
        # Which leaves the tickets as they were: launch() looks.
        got += [launch(item.kernel, item.inputs, item.call, step=step)[0] for step in (1, -1)]
    monkeypatch.setattr(_kernel, "block_bytes", lambda: 99 << 10)
    want = run(functools.partial(attend, turn_queries=True))
    for one in got:
        assert mx.array_equal(one, want)


def test_attention_of_few_rows_without_entries(few_rows):
    """Zeros; and without tickets the body for many rows."""
    q, rows = mx.ones((1, 2, 4, 64), dtype=mx.bfloat16), mx.full((1, 3, 64), float("nan"), dtype=mx.bfloat16)
    index = mx.array([[[-1, 3, 1 << 30] * 30, [-7, 5, -1] * 30]], dtype=mx.int32)
    names = []
    for tickets in (_kernel.tickets(), None):
        attend = functools.partial(sparse_attention.sparse_attention, q, [(rows, index)], mx.zeros((4,)), scale=0.1)
        with watch_launches(lambda item: names.append(item.kernel.name)):
            assert not mx.any(attend(tickets=tickets))
    assert names == ["sparse_attention_few", "sparse_attention"]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(("D", "pairs", "base"), [(64, 9, 23), (128, 64, 0), (512, 32, 30)])
def test_attention_on_rows_in_two_parts_with_turned_queries(D, pairs, base, few, request):
    """The bits of one array and of queries that were turned before."""
    if few:
        request.getfixturevalue("few_rows")
    one_launch = run if few else run_op
    rng = np.random.default_rng(6)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)

    def listed(n: int) -> mx.array:
        return mx.array(rng.integers(-5, n + 5, (2, 2, 70)).astype(np.int32))

    q, near, sinks = normal(2, 2, 3, D), (normal(2, 9, D), listed(9)), mx.zeros((3,))
    parts = SplitRows(normal(2, 30, D), normal(2, 12, D), mx.array([base], dtype=mx.int32))
    one, index = part(parts, 0, parts.shape[1])[:, : base + 12], listed(base + 12)
    turn = rope_table(np.array([70_000, 1_048_575]), rope_frequencies(2 * pairs, 10000.0))
    attend = functools.partial(sparse_attention.sparse_attention, sinks=sinks, scale=0.1, turn=turn)
    for before in ([], [near]):
        want = one_launch(lambda before=before: attend(rope_ref(q, *turn), [*before, (one, index)]))
        got = one_launch(lambda before=before: attend(q, [*before, (parts, index)], turn_queries=True))
        assert mx.array_equal(got, want)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("base", [0, 99, 120])
def test_scores_of_keys_in_two_parts(base, blocks):
    """The bits of one array."""
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)

    q, weights = normal(2, 3, 4, 64), normal(2, 3, 4)
    parts = SplitRows(normal(2, 120, 64), normal(2, 20, 64), mx.array([base], dtype=mx.int32))
    one, visible = part(parts, 0, parts.shape[1])[:, : base + 20], mx.array([base + 20, 1000, 3], dtype=mx.int32)
    lists = mx.array(rng.integers(-1, 20, (2, 3, 6)).astype(np.int32)) if blocks else None
    score = functools.partial(index_score.index_scores, q, weights, visible=visible, blocks=lists, block_size=8)
    want, got = run_op(lambda: score(keys=one)), run_op(lambda: score(keys=parts))
    assert mx.array_equal(got[..., : want.shape[-1]], want)
    assert blocks or mx.all(got[..., base + 20 :] == -mx.inf)
