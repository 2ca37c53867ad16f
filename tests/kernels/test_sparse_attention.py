"""Sparse attention: the vendor's numbers, float64, lists with holes and without entries, rows on their own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator, emulator_missing
from mlx_ds4.custom_kernels._rows import SplitRows, part
from mlx_ds4.custom_kernels._switches import disable, families, use_kernels
from mlx_ds4.custom_kernels.rope import rope, rope_frequencies, rope_ref, rope_table
from mlx_ds4.custom_kernels.sparse_attention import _heads_of_group, sparse_attention, sparse_attention_ref
from tests.golden_tools import assert_equal, golden, row_error

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
ORDERS = ("forward", "backward", "random")
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]


def random(B: int, L: int, H: int, D: int, sizes: list[tuple[int, int]], seed: int = 0):
    """q, sources with lists of `P` of `S` rows with holes, sinks."""
    rng = np.random.default_rng(seed)

    def bf16(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)

    sources = []
    for S, P in sizes:
        index = np.sort(rng.integers(0, S, (B, L, P)), axis=-1)
        index[rng.random((B, L, P)) < 0.2] = -1
        sources.append((bf16(B, S, D), mx.array(index.astype(np.int32))))
    return bf16(B, L, H, D), sources, mx.array(rng.standard_normal(H, dtype=np.float32))


def float64(q: mx.array, sources, sinks: mx.array, scale: float) -> np.ndarray:
    """The plain formula, without blocks and without rounded probabilities."""
    q, sinks = np.array(q.astype(mx.float32)).astype(np.float64), np.array(sinks).astype(np.float64)
    out = np.zeros(q.shape)
    for b, i in np.ndindex(q.shape[:2]):
        rows = []
        for x, index in sources:
            listed = [j for j in index[b, i].tolist() if 0 <= j < x.shape[1]]
            rows.append(np.array(x[b].astype(mx.float32)).astype(np.float64)[listed])
        rows = np.concatenate(rows)
        p = np.exp(scale * q[b, i] @ rows.T)
        out[b, i] = p @ rows / (p.sum(axis=-1) + np.exp(sinks))[:, None]
    return out


@pytest.mark.parametrize("mode", MODES)
def test_golden(mode):
    units = golden("nano", "units")
    q, rows, lists = units["attn.q"][None], units["attn.kv"][None], units["attn.idx"][None]
    with use_kernels(mode), count_launches() as launches:
        got = sparse_attention(q, [(rows, lists)], units["attn.sink"], scale=1 / 8)[0]
    assert launches["sparse_attention"] == (mode == "emulate")
    filled = mx.array([0, 1, 2, 3])
    # The order of 5.4 gives the vendor's bits; one final maximum would be off by 0.0025.
    assert row_error(got[filled], units["attn.o"][filled]) <= 0.0005
    assert not got[4].any()  # an empty list gives zeros


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("B", "L", "H", "D", "sizes"),
    [
        (2, 3, 4, 64, [(20, 9), (50, 70)]),
        (1, 2, 3, 128, [(9, 64)]),
        (1, 60, 4, 64, [(20, 65), (30, 1)]),  # four heads a threadgroup
        (1, 1, 2, 512, [(30, 20), (90, 150)]),
        (1, 2, 2, 256, [(5, 1)]),
    ],
)
def test_against_float64(B, L, H, D, sizes, mode):
    q, sources, sinks = random(B, L, H, D, sizes, seed=D + L)
    with use_kernels(mode):
        got = sparse_attention(q, sources, sinks, scale=D**-0.5)
    want = float64(q, sources, sinks, D**-0.5)
    assert got.dtype == mx.bfloat16
    size = np.linalg.norm(want, axis=-1)
    error = np.linalg.norm(np.array(got.astype(mx.float32)) - want, axis=-1)
    assert np.max(error / np.where(size == 0, 1, size)) <= 0.004


@needs_emulator
@pytest.mark.parametrize("order", ORDERS)
def test_rows_and_heads_alone_and_together_are_equal_bits(order):
    """Also across the numbers of heads that share a threadgroup, which follow from the number of rows."""
    q, sources, sinks = random(1, 100, 4, 64, [(20, 16), (50, 70)])
    assert [_heads_of_group(rows, 4) for rows in (1, 100, 200)] == [1, 2, 4]
    many = mx.concatenate([q, q], axis=1), [(x, mx.concatenate([i, i], axis=1)) for x, i in sources]
    with use_kernels("emulate", order=order, checked=False):
        four = sparse_attention(*many, sinks, scale=0.125)
        two = sparse_attention(q, sources, sinks, scale=0.125)
        assert mx.array_equal(four, mx.concatenate([two, two], axis=1))
        for i in (0, 41, 99):
            row = slice(i, i + 1)
            one = sparse_attention(q[:, row], [(x, index[:, row]) for x, index in sources], sinks, scale=0.125)
            assert mx.array_equal(one, two[:, row])


@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_no_bit(mode):
    q, [(rows, index)], sinks = random(1, 3, 2, 64, [(40, 70)])
    padded = mx.pad(index, [(0, 0), (0, 0), (0, 130)], constant_values=-1)
    beyond = mx.concatenate([index, mx.full((1, 3, 5), 40, dtype=mx.int32), mx.full((1, 3, 5), -7, dtype=mx.int32)], -1)
    more_rows = mx.pad(rows, [(0, 0), (0, 9), (0, 0)], constant_values=float("nan"))  # the free end of a buffer
    with use_kernels(mode):
        want = sparse_attention(q, [(rows, index)], sinks, scale=0.125)
        for sources in ([(rows, padded)], [(rows, beyond)], [(more_rows, index)]):
            assert mx.array_equal(sparse_attention(q, sources, sinks, scale=0.125), want)


@pytest.mark.parametrize("mode", MODES)
def test_empty_lists_and_extreme_sinks(mode):
    q, sources, _ = random(1, 3, 2, 64, [(20, 16), (50, 70)])
    for i, (rows, index) in enumerate(sources):
        sources[i] = (rows, mx.where(mx.array([True, False, True])[None, :, None], index, -1))
    sinks = mx.array([1e4, -1e4])
    with use_kernels(mode):
        got = np.array(sparse_attention(q, sources, sinks, scale=0.125).astype(mx.float32))
    assert np.isfinite(got).all() and not got[0, 1].any()  # no visible key
    assert not got[:, :, 0].any() and got[0, [0, 2], 1].any(axis=-1).all()


@pytest.mark.parametrize("mode", MODES)
def test_large_scores_do_not_overflow(mode):
    q, sources, sinks = random(1, 2, 2, 64, [(20, 70)])
    with use_kernels(mode):
        got = np.array(sparse_attention(q * 1000, sources, sinks, scale=1.0).astype(mx.float32))
    rows, index = sources[0]
    dots = np.array((q * 1000)[0, 0].astype(mx.float32)) @ np.array(rows[0].astype(mx.float32)).T
    listed = [i for i in index[0, 0].tolist() if i >= 0]
    best = listed[int(np.argmax(dots[0, listed]))]
    np.testing.assert_allclose(got[0, 0, 0], np.array(rows[0, best].astype(mx.float32)), rtol=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_turned_back(mode):
    q, sources, sinks = random(2, 3, 2, 64, [(20, 16), (50, 70)])
    turn = rope_table(np.array([5, 70_000, 1_048_575]), rope_frequencies(16, 10000.0))
    with use_kernels(mode):
        straight = sparse_attention(q, sources, sinks, scale=0.125)
        got = sparse_attention(q, sources, sinks, scale=0.125, turn=turn)
    want = rope_ref(straight, *turn, inverse=True)
    assert mx.array_equal(got[..., :48], straight[..., :48])
    apart = np.abs(np.array((got - want).astype(mx.float32)))
    assert np.all(apart <= 2.0**-7 * np.abs(np.array(want.astype(mx.float32))) + 1e-6)
    assert np.mean(apart == 0) >= 0.99 and not mx.array_equal(got, straight)


def split(rows: mx.array, base: int, recent: int) -> SplitRows:
    """The rows in two parts, with NaN where no entry lies."""
    B, S, D = rows.shape

    def poison(n: int) -> mx.array:
        return mx.full((B, n, D), float("nan"), dtype=rows.dtype)

    new = mx.concatenate([rows[:, base : base + recent], poison(max(0, base + recent - S))], axis=1)
    old = mx.concatenate([rows[:, :base], poison(3 if base else 1)], axis=1)
    return SplitRows(old, new, mx.array([base], dtype=mx.int32))


@pytest.mark.parametrize("order", ["reference", *(pytest.param(o, marks=needs_emulator) for o in ORDERS)])
@pytest.mark.parametrize(("base", "recent"), [(0, 50), (38, 12), (49, 1), (50, 4)])
def test_rows_in_two_parts_are_equal_bits(base, recent, order):
    """Also where the list names rows that are not there."""
    q, [near, (rows, index)], sinks = random(2, 3, 2, 64, [(20, 16), (50, 70)])
    index[:, :, 60:] = mx.array([-9, 60, 1 << 30, -1, 54, 53, 52, 51, 50, 49], dtype=mx.int32)
    parts = split(rows, base, recent)
    if recent > 50 - base:  # the free end of the recent rows is named: attention sees what whole() holds there
        parts = parts._replace(recent=mx.nan_to_num(parts.recent))
    one = part(parts, 0, parts.shape[1])[:, : base + recent]
    mode = {"mode": "reference"} if order == "reference" else {"mode": "emulate", "order": order}
    with use_kernels(**mode), count_launches() as launches:
        for before in ([], [near]):
            want = sparse_attention(q, [*before, (one, index)], sinks, scale=0.125)
            got = sparse_attention(q, [*before, (parts, index)], sinks, scale=0.125)
            assert mx.array_equal(got, want)
    assert launches["sparse_attention"] == (0 if order == "reference" else 4)


@pytest.mark.parametrize("order", ["reference", *(pytest.param(o, marks=needs_emulator) for o in ORDERS)])
@pytest.mark.parametrize("pairs", [1, 8, 32, 65])
def test_queries_turned_in_the_kernel_are_equal_bits(pairs, order):
    """Beyond 64 pairs they are turned by a launch of their own."""
    q, sources, sinks = random(2, 3, 2, 256 if pairs > 32 else 64, [(20, 16), (50, 70)])
    turn = rope_table(np.array([5, 70_000, 1_048_575]), rope_frequencies(2 * pairs, 10000.0))
    mode = {"mode": "reference"} if order == "reference" else {"mode": "emulate", "order": order}
    with use_kernels(**mode):
        want = sparse_attention(rope(q, *turn), sources, sinks, scale=0.125, turn=turn)
        with count_launches() as launches:
            got = sparse_attention(q, sources, sinks, scale=0.125, turn=turn, turn_queries=True)
    assert mx.array_equal(got, want)
    assert order == "reference" or launches["rope"] == (pairs > 64)


@needs_emulator
def test_old_rows_are_gathered_once_and_recent_ones_from_their_part():
    q, [(rows, index)], sinks = random(1, 1, 1, 64, [(40, 70)])
    with use_kernels("emulate"):
        sparse_attention(q, [(split(rows, 25, 20), index)], sinks, scale=0.125)
    traffic = emulator().last_stats().buffers
    assert traffic["far"].read == int(((index >= 0) & (index < 25)).sum()) * 64 * 2
    assert traffic["recent"].read == int((index >= 25).sum()) * 64 * 2


@needs_emulator
def test_a_row_is_gathered_once_for_the_heads_of_a_threadgroup():
    q, [(rows, index)], sinks = random(1, 200, 4, 64, [(40, 70)])
    with use_kernels("emulate"):
        sparse_attention(q, [(rows, index)], sinks, scale=0.125)
    assert emulator().last_stats().buffers["far"].read == int((index >= 0).sum()) * 64 * 2


@pytest.mark.parametrize("mode", MODES)
def test_without_a_kernel(mode):
    """Other dtypes and widths take the reference; so do lists and steps of no length."""
    with use_kernels(mode), count_launches() as launches:
        for width, dtype in ((96, mx.bfloat16), (64, mx.float32)):
            q, [(rows, index)], sinks = random(1, 2, 2, width, [(20, 16)])
            sources = [(rows.astype(dtype), index)]
            got = sparse_attention(q, sources, sinks, scale=0.1)
            assert_equal(got, sparse_attention_ref(q, sources, sinks, scale=0.1))
        assert not sparse_attention(q, [(rows, index[..., :0])], sinks, scale=0.1).any()
        assert sparse_attention(q[:, :0], [(rows, index[:, :0])], sinks, scale=0.1).shape == (1, 0, 2, 64)
    assert not launches


LIST = mx.zeros((1, 2, 4), dtype=mx.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sinks": mx.zeros((3,))}, "pass the tensors of one layer"),
        ({"sources": []}, "pass the tensors of one layer"),
        ({"sources": [(mx.zeros((1, 9, 32)), mx.zeros((1, 2, 4), dtype=mx.int32))]}, "pass the tensors of one layer"),
        ({"sources": [(mx.zeros((1, 9, 64)), mx.zeros((1, 3, 4), dtype=mx.int32))]}, "pass the tensors of one layer"),
        ({"turn": (mx.zeros((3, 4)), mx.zeros((3, 4)))}, "make the table from the positions"),
        ({"turn": (mx.zeros((2, 33)), mx.zeros((2, 33)))}, "make the table from the positions"),
        ({"turn_queries": True}, "expected its tables"),
        ({"tickets": mx.zeros((3,), dtype=mx.int32)}, "as many zeros as ticket_count says"),
        ({"tickets": mx.zeros((8,))}, "as many zeros as ticket_count says"),
        ({"sources": [(split(mx.zeros((1, 9, 64)), 5, 4), LIST), (mx.zeros((1, 9, 64)), LIST)]}, "swap the two"),
        ({"sources": [(SplitRows(*[mx.zeros((1, 9, 64))] * 2, mx.array([1.0])), LIST)]}, "parts of one cache"),
        ({"sources": [(SplitRows(*[mx.zeros((1, 0, 64))] * 2, mx.array([0])), LIST)]}, "parts of one cache"),
        ({"sources": [(split(mx.zeros((1, 9, 32)), 5, 4), LIST)]}, "pass the tensors of one layer"),
    ],
)
def test_wrong_calls(change, message):
    q, sources, sinks = random(1, 2, 2, 64, [(20, 16)])
    call = {"q": q, "sources": sources, "sinks": sinks, "scale": 0.125} | change
    with pytest.raises(ValueError, match=message):
        sparse_attention(**call)


@needs_emulator
def test_the_small_model_selects_and_attends_with_kernels(nano):
    """Greedy tokens with only these families emulated, where selection and candidate blocks are at work."""
    data = golden("nano", "e2e")
    ids, tokens = data["A17.ids"], data["A17.decode_tokens"].tolist()
    others = set(families()) - {"index_score", "topk", "sparse_attention"}
    cache = nano.make_cache()
    with use_kernels("emulate", checked=False), disable(*others), count_launches() as launches:
        rows = nano(ids[None], cache)[0]
        step = nano(mx.array([tokens[:1]]), cache)[0]
    assert mx.argmax(rows, axis=-1).tolist() == mx.argmax(data["A17.logits"], axis=-1).tolist()
    assert [mx.argmax(rows[-1]).item(), mx.argmax(step[0]).item()] == tokens[:2]
    # With 17 tokens the two index sources of ratio 1 have something to reject, with 18 all four; one publishes blocks.
    assert launches == {"sparse_attention": 2 * nano.config.num_hidden_layers, "index_score": 2 + 4, "topk": 3 + 5}
