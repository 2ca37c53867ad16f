"""The compressor's short steps: in any division the latents of one long step, and rows that wait in their slots."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._switches import use_kernels
from mlx_ds4.custom_kernels.compress import compress, pool_pairs
from mlx_ds4.custom_kernels.rms_norm import rms_norm

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]
EPS = 1e-20


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def one(start: int) -> mx.array:
    return mx.array([start], dtype=mx.int32)


def steps(values: mx.array, gates: mx.array, pending: mx.array, weight: mx.array, start: int, lengths) -> list:
    """The latents of steps of these lengths from `start` on, and what is pending at the end."""
    latents, done = [], 0
    for L in lengths:
        new, entries = slice(done, done + L), (start + done + L) // 2 - (start + done) // 2
        part, pending = compress(
            values[:, new], gates[:, new], pending, one(start + done), weight, entries=entries, eps=EPS
        )
        assert part.shape[1] == entries
        latents.append(part)
        done += L
    return [mx.concatenate(latents, axis=1), pending]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", [0, 16, 1_048_560])
@pytest.mark.parametrize("D", [40, 512])
def test_short_steps_are_the_long_one(D, start, mode):
    """From an even start: nothing waits, whatever `pending` holds."""
    values, gates, weight = normal(2, 31, D), normal(2, 31, D, seed=1), normal(D, seed=2).astype(mx.bfloat16)
    stale = mx.full((2, 2, 16, D), float("nan"))
    options = {} if mode == "reference" else {"checked": False}
    with use_kernels(mode, **options):
        want = steps(values, gates, stale, weight, start, (8, 8, 8, 7))
        got = steps(values, gates, stale, weight, start, (1, 1, 3, 8, 1, 6, 2, 2, 7))
        long = rms_norm(pool_pairs(values[:, :30], gates[:, :30]), weight, EPS)
    for g, w in zip(got, want, strict=True):
        assert mx.array_equal(g, w)
    assert mx.all(mx.isfinite(got[1]))
    slots = (start + np.arange(15, 31)) % 16
    assert mx.array_equal(got[1][:, :, mx.array(slots)], mx.stack([values[:, 15:], gates[:, 15:]], axis=1))
    if mode == "reference":
        assert mx.array_equal(got[0], long)
    else:  # pooled on the CPU there: a rounding to bfloat16 may go the other way
        differs = np.abs(np.array((got[0] - long).astype(mx.float32)))
        assert differs.max() <= 2.0**-6 * np.abs(np.array(long.astype(mx.float32))).max()
        assert np.mean(differs == 0) >= 0.99


@needs_emulator
@pytest.mark.parametrize("order", ["forward", "backward", "random"])
def test_sequences_alone_and_together_are_equal_bits(order):
    values, gates, pending, weight = normal(3, 5, 40), normal(3, 5, 40, seed=1), normal(3, 2, 16, 40), normal(40)
    with use_kernels("emulate", order=order), count_launches() as launches:
        together = compress(values, gates, pending, one(13), weight, entries=3, eps=EPS)
        assert dict(launches) == {"compress": 1}
        for b in range(3):
            row = slice(b, b + 1)
            alone = compress(values[row], gates[row], pending[row], one(13), weight, entries=3, eps=EPS)
            assert all(mx.array_equal(a, t[row]) for a, t in zip(alone, together, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_an_open_pair_spoils_no_other(mode):
    """Entries asked for beyond what the step completes: their rows alone may hold anything."""
    values, gates, weight = normal(1, 3, 40), normal(1, 3, 40, seed=1), normal(40)
    pending = mx.full((1, 2, 16, 40), float("nan"))
    with use_kernels(mode):
        latents, _ = compress(values, gates, pending, one(6), weight, entries=2, eps=EPS)
        want, _ = compress(values, gates, pending, one(6), weight, entries=1, eps=EPS)
        two, _ = compress(values[:, :2], gates[:, :2], pending, one(6), weight, entries=1, eps=EPS)
    assert mx.all(mx.isnan(latents[:, 1])) and mx.array_equal(latents[:, :1], want) and mx.array_equal(want, two)


@pytest.mark.parametrize("mode", MODES)
def test_only_pending(mode):
    values, gates, pending = normal(2, 3, 40), normal(2, 3, 40, seed=1), normal(2, 2, 16, 40, seed=2)
    before = np.array(pending)
    with use_kernels(mode), count_launches() as launches:
        latents, new = compress(values, gates, pending, one(14), normal(40), entries=0, eps=EPS)
    assert latents.shape == (2, 0, 40) and latents.dtype == mx.bfloat16
    assert dict(launches) == ({"compress_pending": 1} if mode == "emulate" else {})
    want = before.copy()
    want[:, :, [14, 15, 0]] = np.stack([np.array(values), np.array(gates)], axis=1)
    np.testing.assert_array_equal(np.array(new), want)
    np.testing.assert_array_equal(np.array(pending), before)


@pytest.mark.parametrize("mode", MODES)
def test_without_a_kernel(mode):
    """Widths that are no multiple of 8 take the reference; a step of no rows changes nothing."""
    pending = normal(1, 2, 16, 36)
    with use_kernels(mode), count_launches() as launches:
        compress(normal(1, 2, 36), normal(1, 2, 36), pending, one(0), normal(36), entries=1, eps=EPS)
        none = normal(1, 0, 36)
        latents, same = compress(none, none, pending, one(3), normal(36), entries=0, eps=EPS)
    assert not launches and latents.shape == (1, 0, 36) and mx.array_equal(same, pending)


@pytest.mark.parametrize(
    "change",
    [
        {"gates": mx.zeros((1, 3, 40))},
        {"values": mx.zeros((1, 2, 40), dtype=mx.bfloat16)},
        {"values": mx.zeros((1, 9, 40)), "gates": mx.zeros((1, 9, 40))},
        {"pending": mx.zeros((1, 2, 8, 40))},
        {"start": mx.array([1.0])},
        {"start": mx.array(1)},
        {"weight": mx.zeros((39,))},
        {"entries": 9},
        {"entries": -1},
    ],
)
def test_wrong_calls(change):
    call = {"values": normal(1, 2, 40), "gates": normal(1, 2, 40), "pending": normal(1, 2, 16, 40), "start": one(0)}
    call |= {"weight": normal(40), "entries": 1, "eps": EPS} | change
    with pytest.raises(ValueError, match="pass one short step of one layer"):
        compress(**call)
