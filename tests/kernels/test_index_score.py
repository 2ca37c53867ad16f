"""Index scores: the vendor's numbers, float64, what is hidden and never read, block lists, rows on their own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._case import check
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator, emulator_missing
from mlx_ds4.custom_kernels._needle import needle
from mlx_ds4.custom_kernels._rows import SplitRows
from mlx_ds4.custom_kernels._switches import use_kernels
from mlx_ds4.custom_kernels.index_score import index_scores
from tests.golden_tools import assert_close_to_largest, assert_equal, golden

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
ORDERS = ("forward", "backward", "random")
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]


def random(B: int, L: int, S: int, H: int = 4, D: int = 64, seed: int = 0) -> list[mx.array]:
    """q, weights and keys, bfloat16 with all their bits in use."""
    rng = np.random.default_rng(seed)
    shapes = ((B, L, H, D), (B, L, H), (B, S, D))
    return [mx.array(rng.standard_normal(s, dtype=np.float32)).astype(mx.bfloat16) for s in shapes]


def float64(q: mx.array, weights: mx.array, keys: mx.array) -> np.ndarray:
    q, weights, keys = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (q, weights, keys))
    return np.einsum("blh,blhs->bls", weights, np.maximum(np.einsum("blhd,bsd->blhs", q, keys), 0))


def assert_close(got: mx.array, want: np.ndarray) -> None:
    """Hidden entries in the same places, the others within float32's rounding of their row."""
    got = np.array(got)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    assert np.max(np.abs(got[seen] - want[seen])) <= 2e-6 * np.max(np.abs(want[seen]))


@pytest.mark.parametrize("mode", MODES)
def test_golden(mode):
    units = golden("nano", "units")
    q, weights, keys = (units[f"iscore.{part}"][None] for part in ("q", "w", "k"))
    with use_kernels(mode), count_launches() as launches:
        assert_close_to_largest(index_scores(q, weights, keys)[0], units["iscore.f32"])
    assert launches["index_score"] == (mode == "emulate")


def test_golden_with_the_vendors_roundings():
    units = golden("nano", "units")
    q, weights, keys = (units[f"iscore.{part}"][None] for part in ("q", "w", "k"))
    assert_equal(index_scores(q, weights, keys, bf16=True)[0].astype(mx.bfloat16), units["iscore.bf16"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("S", [1, 7, 8, 31, 32, 33, 127, 128, 129, 513])
def test_ragged_keys(S, mode):
    arrays = random(2, 3, S, seed=S)
    bounds = np.array([S, max(S - 9, 0), S // 2], np.int32)
    want = np.where(np.arange(S) < bounds[:, None], float64(*arrays), -np.inf)
    with use_kernels(mode):
        assert_close(index_scores(*arrays, mx.array(bounds)), want)
        assert_close(index_scores(*arrays), float64(*arrays))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("H", "D"), [(32, 128), (12, 32), (5, 96), (3, 40), (64, 128)])
def test_other_sizes(H, D, mode):
    """The last two have no kernel: channels that are no multiple of 32, queries beyond threadgroup memory."""
    arrays = random(1, 2, 50, H, D)
    with use_kernels(mode, **({"checked": False} if mode == "emulate" else {})), count_launches() as launches:
        assert_close(index_scores(*arrays), float64(*arrays))
    assert launches["index_score"] == (mode == "emulate" and D % 32 == 0 and H * D <= 4096)


@needs_emulator
@pytest.mark.parametrize("order", ORDERS)
def test_rows_alone_and_together_are_equal_bits(order):
    q, weights, keys = random(1, 40, 150, seed=3)  # more rows than one threadgroup takes
    visible = mx.array(np.arange(111, 151).astype(np.int32))
    with use_kernels("emulate", order=order, checked=False):
        together = index_scores(q, weights, keys, visible)
        for i in (0, 1, 31, 32, 39):
            row = slice(i, i + 1)
            assert mx.array_equal(index_scores(q[:, row], weights[:, row], keys, visible[row]), together[:, row])


@pytest.mark.parametrize("mode", MODES)
def test_block_lists_give_the_same_scores(mode):
    q, weights, keys = random(2, 3, 150, seed=4)
    rng = np.random.default_rng(4)
    blocks = np.sort(rng.permuted(np.tile(np.arange(19), (6, 1)), axis=1)[:, :7], axis=1).reshape(2, 3, 7)
    blocks[0, 1, 3:] = -1
    blocks[1, 2] = -1
    blocks[0, 0, -1] = 18  # the last block is not whole
    visible = mx.array([149, 70, 0], dtype=mx.int32)
    entry = (blocks[..., None] * 8 + np.arange(8)).reshape(2, 3, 56)
    with use_kernels(mode):
        full = np.pad(
            np.array(index_scores(q, weights, keys, visible)), [(0, 0), (0, 0), (0, 2)], constant_values=-np.inf
        )
        got = index_scores(q, weights, keys, visible, mx.array(blocks.astype(np.int32)), block_size=8)
    want = np.where(entry >= 0, np.take_along_axis(full, np.maximum(entry, 0), axis=-1), -np.inf)
    assert_close(got, want)
    if mode == "emulate":
        np.testing.assert_array_equal(np.array(got), want)  # one key's score does not depend on its neighbours


@needs_emulator
def test_hidden_keys_are_not_read():
    q, weights, keys = random(1, 2, 1000)
    poisoned = mx.concatenate([keys[:, :300], mx.full((1, 700, 64), float("nan"), dtype=mx.bfloat16)], axis=1)
    visible = mx.array([299, 300], dtype=mx.int32)
    with use_kernels("emulate"):
        got = index_scores(q, weights, poisoned, visible)
        traffic = emulator().last_stats().buffers["keys"]
        assert traffic.read == traffic.distinct_read == 300 * 64 * 2  # and the others once
        blocks = mx.array([[[2, 9, -1], [3, 60, 124]]], dtype=mx.int32)
        compact = index_scores(q, weights, poisoned, visible, blocks, block_size=8)
        assert emulator().last_stats().buffers["keys"].distinct_read == 3 * 8 * 64 * 2
    want = np.where(np.arange(1000) < np.array([[299], [300]]), float64(q, weights, mx.nan_to_num(poisoned)), -np.inf)
    assert_close(got, want)
    assert np.isfinite(np.array(compact)).sum() == 3 * 8


def split(keys: mx.array, base: int, recent: int) -> SplitRows:
    """The keys in two parts, with NaN where no key lies."""
    B, S, D = keys.shape

    def poison(n: int) -> mx.array:
        return mx.full((B, n, D), float("nan"), dtype=keys.dtype)

    old = mx.concatenate([keys[:, :base], poison(150)], axis=1)
    new = mx.concatenate([keys[:, base:], poison(max(0, base + recent - S))], axis=1)[:, :recent]
    return SplitRows(old, new, mx.array([base], dtype=mx.int32))


@pytest.mark.parametrize("order", ["reference", *(pytest.param(o, marks=needs_emulator) for o in ORDERS)])
@pytest.mark.parametrize(("base", "recent"), [(0, 150), (127, 23), (149, 20), (150, 1)])
def test_keys_in_two_parts_are_equal_bits(base, recent, order):
    """Whole rows and block lists; what lies behind the last entry is hidden, and columns reach to the capacity."""
    q, weights, keys = random(2, 3, 150, seed=5)
    parts, ends = split(keys, base, recent), min(150, base + recent)
    blocks = mx.array(np.tile(np.array([0, 3, 15, 16, 18, 30, -1], np.int32), (2, 3, 1)))
    with use_kernels(**({"mode": "reference"} if order == "reference" else {"mode": "emulate", "order": order})):
        for visible in (mx.array([149, 150, 0], dtype=mx.int32), mx.array([ends, 20, 1], dtype=mx.int32)):
            got = index_scores(q, weights, parts, visible)
            assert got.shape == (2, 3, base + 150 + recent)
            assert mx.array_equal(got[..., :ends], index_scores(q, weights, keys, visible)[..., :ends])
            assert mx.all(got[..., ends:] == -mx.inf)
            lists = [index_scores(q, weights, k, visible, blocks, block_size=8) for k in (parts, keys)]
            assert mx.array_equal(*lists)
        all_seen = index_scores(q, weights, parts._replace(recent=mx.nan_to_num(parts.recent)))
    assert mx.all(mx.isfinite(all_seen) == (mx.arange(300 + base + recent - 150) < base + recent))


@needs_emulator
def test_each_part_is_read_once():
    q, weights, keys = random(1, 2, 150)
    with use_kernels("emulate"):
        index_scores(q, weights, split(keys, 100, 60), mx.array([140, 141], dtype=mx.int32))
    traffic = emulator().last_stats().buffers
    assert traffic["keys"].read == traffic["keys"].distinct_read == 100 * 64 * 2
    assert traffic["recent"].read == traffic["recent"].distinct_read == 41 * 64 * 2


@pytest.mark.parametrize("mode", MODES)
def test_faulty_keys_show(mode):
    """NaN and infinity among the visible keys reach the scores of these keys and no other's."""
    q, weights, keys = random(1, 1, 20)
    keys[:, 3, 5], keys[:, 7, 5] = float("nan"), float("inf")
    with use_kernels(mode):
        got = np.array(index_scores(q, weights, keys))[0, 0]
    assert np.isnan(got[3]) and not np.isfinite(got[7])
    assert np.isfinite(np.delete(got, [3, 7])).all()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_score(mode):
    q, weights, keys = random(1, 2, 9)
    none = mx.zeros((1, 2, 0), dtype=mx.int32)
    with use_kernels(mode):
        assert index_scores(q, weights, keys[:, :0]).shape == (1, 2, 0)
        assert index_scores(q[:, :0], weights[:, :0], keys).shape == (1, 0, 9)
        assert index_scores(q, weights, keys, None, none, block_size=8).shape == (1, 2, 0)
        hidden = index_scores(q, weights, keys, mx.array([0, -3], dtype=mx.int32))
    assert mx.all(hidden == -mx.inf)


@pytest.mark.parametrize("L", [1, 40])
@pytest.mark.parametrize("S", [1000, 20_000])
def test_needle(S, L):
    assert check(needle(L, S))[0] is None


@needs_emulator
@pytest.mark.parametrize(("L", "S"), [(1, 20_000), (6, 6000), (40, 5000)])
def test_needle_emulated(L, S):
    """Decode, verification and prefill through the kernels of scoring, candidates, top-k and attention."""
    with use_kernels("emulate", checked=False), count_launches() as launches:
        assert check(needle(L, S, chosen=20))[0] is None
    assert launches["index_score"] == 2 and launches["topk"] >= 2 and launches["sparse_attention"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": mx.zeros((1, 2, 3))}, "pass tensors of one step"),
        ({"keys": mx.zeros((2, 9, 64))}, "pass tensors of one step"),
        ({"keys": mx.zeros((1, 9, 32))}, "pass tensors of one step"),
        ({"visible": mx.zeros((3,), dtype=mx.int32)}, "pass tensors of one step"),
        ({"blocks": mx.zeros((1, 3, 4), dtype=mx.int32)}, "one list for each row"),
        ({"block_size": 0}, "a size of 1 or more"),
        ({"keys": split(mx.zeros((1, 9, 32)), 5, 4)}, "pass tensors of one step"),
        ({"keys": split(mx.zeros((1, 9, 64)), 5, 4)._replace(base=mx.array(5))}, "parts of one cache"),
        ({"keys": split(mx.zeros((1, 9, 64)), 5, 4)._replace(old=mx.zeros((1, 0, 64)))}, "parts of one cache"),
    ],
)
def test_wrong_calls(change, message):
    q, weights, keys = random(1, 2, 9)
    call = {"q": q, "weights": weights, "keys": keys, "visible": mx.array([9, 9]), "block_size": 8}
    call |= {"blocks": mx.zeros((1, 2, 4), dtype=mx.int32)} | change
    with pytest.raises(ValueError, match=message):
        index_scores(**call)
