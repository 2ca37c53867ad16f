"""Top-k against numpy's stable sort: ragged and long rows, plateaus, values that are never chosen, launches."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._switches import trace, use_kernels
from mlx_ds4.custom_kernels.topk import top_k, top_k_groups, top_k_mask

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]
K = 20  # one value, so that few kernels are compiled
ORDERS = ("forward", "backward", "random")


def expected(scores: np.ndarray, k: int) -> np.ndarray:
    """The rule, on rows [n, ..]: sort by score descending and index ascending, drop NaN and -inf, list ascending."""
    out = np.full((scores.shape[0], min(k, scores.shape[1])), -1, np.int32)
    for row, values in zip(out, scores, strict=True):
        allowed = np.flatnonzero(~np.isnan(values) & (values != -np.inf))
        best = np.sort(allowed[np.argsort(-values[allowed].astype(np.float64), kind="stable")[:k]])
        row[: best.size] = best
    return out


def rows(n: int, seed: int = 0) -> np.ndarray:
    """A normal row, one of plateaus, one where few values may be chosen, one of extremes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, n)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2] = np.where(rng.random(n) < 0.98, np.where(rng.random(n) < 0.5, np.nan, -np.inf), x[2])
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    x[3] = np.where(rng.random(n) < 0.5, bits.view(np.float32), rng.choice(np.float32([0.0, -0.0, np.inf, 3e38]), n))
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [31, 32, 33, 511, 512, 513, 4097])
def test_ragged_rows(n, mode):
    x = rows(n, n)
    with use_kernels(mode):
        got = top_k(mx.array(x), K)
    assert got.dtype == mx.int32
    np.testing.assert_array_equal(np.array(got), expected(x, K))


@needs_emulator
@pytest.mark.parametrize("order", ORDERS)
def test_a_long_row_of_several_chunks(order):
    x = np.concatenate([rows(70_000)[:2], np.zeros((1, 70_000), np.float32)])
    with use_kernels("emulate", order=order, checked=False), count_launches() as launches:
        got = np.array(top_k(mx.array(x), K))
    np.testing.assert_array_equal(got, expected(x, K))
    assert launches["topk"] == 2


@needs_emulator
@pytest.mark.parametrize("order", ORDERS)
def test_equal_scores_give_the_first_indices_every_time(order):
    x = mx.zeros((1, 4096))
    with use_kernels("emulate", order=order, checked=False):
        for _ in range(20):
            np.testing.assert_array_equal(np.array(top_k(x, 512)), np.arange(512)[None])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "row",
    [
        [np.nan] * 40,
        [-np.inf] * 40,
        [-np.inf] * 39 + [-3e38],
        [1.0, np.nan] * 20,
        [-0.0, 0.0] * 20,
        [np.inf] * 30 + [1.0] * 10,
        [1e-45, 0.0, -1e-45, 2e-45] * 10,  # subnormal scores keep their order
        [-1.0] * 20 + [-2.0] * 20,
        list(range(40)),
        [3.0] * K + [-np.inf] * 20,  # exactly as many as wanted
        [3.0] * (K - 1) + [np.nan] * 21,
    ],
    ids=lambda row: ",".join(str(v) for v in row[:4]),
)
def test_hostile_rows(row, mode):
    x = np.array([row], np.float32)
    with use_kernels(mode):
        got = np.array(top_k(mx.array(x), K))
    np.testing.assert_array_equal(got, expected(x, K))


@pytest.mark.parametrize("mode", MODES)
def test_fewer_scores_than_k(mode):
    x = np.float32([[2.0, np.nan, -np.inf, 0.0]])
    with use_kernels(mode):
        assert top_k(mx.array(x), 100).tolist() == [[0, 3, -1, -1]]
        assert top_k(mx.array([[1.0]]), 1).tolist() == [[0]]
        assert top_k(mx.zeros((2, 0)), 3).shape == (2, 0)
        assert top_k(mx.zeros((0, 9)), 3).shape == (0, 3)


@needs_emulator
def test_random_bits_in_every_order_are_exact():
    rng = np.random.default_rng(5)
    for seed in range(12):
        few = rng.integers(1, 1 << 32, 6, dtype=np.uint32)  # values that meet in long prefixes of bits
        bits = np.where(rng.random((2, 900)) < 0.7, rng.choice(few, (2, 900)), few[0] ^ rng.integers(0, 4, (2, 900)))
        x = bits.astype(np.uint32).view(np.float32)
        with use_kernels("emulate", order=ORDERS[seed % 3], checked=False):
            np.testing.assert_array_equal(np.array(top_k(mx.array(x), K)), expected(x, K))


@pytest.mark.parametrize("mode", MODES)
def test_more_axes_and_strides(mode):
    x = np.random.default_rng(6).standard_normal((50, 3, 2)).astype(np.float32)
    with use_kernels(mode):
        got = np.array(top_k(mx.array(x).T, K))
    np.testing.assert_array_equal(got, expected(x.T.reshape(6, 50), K).reshape(2, 3, K))


@pytest.mark.parametrize("mode", MODES)
def test_block_lists_map_positions_to_entries(mode):
    rng = np.random.default_rng(7)
    full = np.round(rng.standard_normal((3, 400)), 1).astype(np.float32)  # ties across blocks
    blocks = np.stack([np.sort(rng.permutation(50)[:12]) for _ in range(3)]).astype(np.int32)
    compact = full.reshape(3, 50, 8)[np.arange(3)[:, None], blocks].reshape(3, 96)
    blocks[2, 5:], compact[2, 40:] = -1, -np.inf
    admitted = np.full_like(full, -np.inf)
    for i in range(3):
        for block in blocks[i][blocks[i] >= 0]:
            admitted[i, block * 8 : block * 8 + 8] = full[i, block * 8 : block * 8 + 8]
    with use_kernels(mode):
        got = np.array(top_k(mx.array(compact), K, mx.array(blocks), block_size=8))
    np.testing.assert_array_equal(got, expected(admitted, K))


@needs_emulator
def test_block_lists_longer_than_a_chunk():
    x = np.random.default_rng(8).standard_normal((1, 17_000)).astype(np.float32)
    blocks = (2 * np.arange(4250, dtype=np.int32) + 1)[None]
    with use_kernels("emulate", checked=False):
        got = np.array(top_k(mx.array(x), K, mx.array(blocks), block_size=4))
    at = expected(x, K)
    np.testing.assert_array_equal(got, (at // 4 * 2 + 1) * 4 + at % 4)


def groups_expected(x: np.ndarray, visible: list[int], k: int, size: int) -> np.ndarray:
    best = np.pad(x, [(0, 0), (0, -x.shape[1] % size)], constant_values=-np.inf).reshape(len(x), -1, size)
    best = np.where(np.isnan(best), -np.inf, best).max(axis=-1)
    for row, count in zip(best, visible, strict=True):
        if count > 0:
            row[(count - 1) // size] = np.inf
    return expected(best, k)


@pytest.mark.parametrize("mode", MODES)
def test_groups_keep_the_newest(mode):
    x = np.round(np.random.default_rng(9).standard_normal((4, 333)).astype(np.float32), 1)
    x[3] = -5.0  # the newest group would not win by its score
    visible = [333, 100, 0, 201]
    x[np.arange(333) >= np.array(visible)[:, None]] = -np.inf
    x[3, 200] = np.nan
    with use_kernels(mode):
        got = np.array(top_k_groups(mx.array(x[None]), mx.array(visible, dtype=mx.int32), K, size=4))[0]
    np.testing.assert_array_equal(got, groups_expected(x, visible, K, 4))
    assert 200 // 4 in got[3] and np.all(got[2] == -1)


@needs_emulator
def test_groups_of_a_long_row():
    x = np.random.default_rng(10).standard_normal((1, 70_001)).astype(np.float32)
    with use_kernels("emulate", checked=False), count_launches() as launches:
        got = np.array(top_k_groups(mx.array(x[None]), mx.array([70_001], dtype=mx.int32), K, size=4))[0]
        best = top_k(mx.array(x), 1)  # a second launch with so few winners that Metal puts them elsewhere
    np.testing.assert_array_equal(got, groups_expected(x, [70_001], K, 4))
    assert best.item() == np.argmax(x)
    assert launches["topk"] == 4


@pytest.mark.parametrize(
    ("n", "k", "launches"),
    [(16_384, 512, 1), (300_000, 512, 2), (524_288, 512, 2), (131_072, 2048, 2), (1 << 20, 512, 3), (1 << 20, 2048, 3)],
)
def test_launches(n, k, launches):
    with count_launches() as counted:
        trace(lambda: top_k(mx.zeros((1, n)), k))
    assert counted["topk"] == launches


def test_a_mask_agrees_with_the_list():
    x = rows(200, 11)
    mask = np.array(top_k_mask(mx.array(x), K))
    np.testing.assert_array_equal([np.flatnonzero(m) for m in mask[:2]], expected(x, K)[:2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top_k(mx.zeros((2, 8)), 0), "expected k >= 1"),
        (lambda: top_k(mx.array(1.0), 2), "expected k >= 1 and rows"),
        (lambda: top_k(mx.zeros((2, 8)), 2, mx.zeros((2, 3), mx.int32), block_size=4), "one score for each entry"),
        (lambda: top_k(mx.zeros((2, 8)), 2, mx.zeros((2, 2), mx.int32)), "one score for each entry"),
        (lambda: top_k_groups(mx.zeros((1, 2, 8)), mx.zeros((3,), mx.int32), 2, size=4), "one bound for each row"),
        (lambda: top_k_groups(mx.zeros((1, 2, 8)), mx.zeros((2,), mx.int32), 2, size=0), "a size of 1 or more"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
