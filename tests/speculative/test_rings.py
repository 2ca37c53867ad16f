"""The drafter's rings under any order of passes, proposals and rejections."""

from __future__ import annotations

import random
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_ds4.cache import REWIND, Cache, DraftRings
from mlx_ds4.model.dspark import Drafter

WINDOW = 6


def finish(rings: DraftRings) -> None:
    """Rows that tell their position's content: here a tap is its own row, in two stages."""
    if rings.taps is not None:
        rings.finish(mx.stack([rings.taps, rings.taps + 1]))


@pytest.mark.parametrize("seed", range(20))
def test_rejected_positions_leave_nothing(seed):
    """Against a plain list: after every operation the newest rows are those of the text so far."""
    rng = random.Random(seed)
    rings, text, spare = DraftRings(WINDOW), [], 0
    for number in range(60):
        what = rng.choice(("pass", "pass", "propose", "reject"))
        if what == "pass":
            new = [100 * number + i for i in range(rng.choice((1, 1, 6, 20)))]
            text += new
            taps = mx.array(new[-rings.keep :])[:, None].astype(mx.float32)
            rings.append([taps], len(text))
            spare = min(REWIND, spare + len(new))
        elif what == "reject" and spare:
            count = rng.randrange(1, spare + 1)
            del text[len(text) - count :]
            rings.trim(len(text))
            spare -= count
        assert rings.offset == len(text)
        if what == "propose":
            finish(rings)
            seen = rings.rows[0, -WINDOW:, 0].tolist() if rings.rows is not None else []
            assert seen == text[-WINDOW:] and rings.taps is None
            assert rings.rows is None or mx.array_equal(rings.rows[1], rings.rows[0] + 1)
        assert (0 if rings.rows is None else rings.rows.shape[1]) <= rings.keep
        assert rings.taps is None or len(rings.taps) <= rings.keep


def test_a_gap_forgets_what_was_before():
    """Positions that a pass without the drafter processed are unknown to it: it starts again behind them."""
    rings = DraftRings(WINDOW)
    rings.append([mx.ones((5, 1))], 5)
    finish(rings)
    rings.append([mx.zeros((2, 1))], 9)
    finish(rings)
    assert rings.rows.shape == (2, 2, 1) and rings.offset == 9


def test_a_prompt_keeps_no_more_than_its_end():
    """What waits of a long pass is a copy: slices would hold the taps of the whole prompt."""
    drafter = SimpleNamespace(config=SimpleNamespace(sliding_window=WINDOW))
    cache = SimpleNamespace(rings=None, offset=5000)
    before = mx.get_active_memory()
    taps = [mx.ones((1, 5000, 64), dtype=mx.bfloat16) * (1 + i) for i in range(3)]
    mx.eval(taps)
    Drafter.observe(drafter, cache, taps)
    del taps
    assert cache.rings.taps[-1, ::64].tolist() == [1, 2, 3]
    assert mx.get_active_memory() - before < 100_000  # of 1.9 MB


def test_a_copy_is_independent(nano_k):
    cache = Cache(nano_k.config)
    cache.offset, cache.rewindable, cache.rings = 5, 5, DraftRings(WINDOW)
    cache.rings.append([mx.ones((5, 2), dtype=mx.bfloat16)], 5)
    twin = cache.copy()
    assert twin.nbytes == cache.nbytes >= 20
    twin.trim(2)
    twin.rings.append([mx.zeros((1, 2), dtype=mx.bfloat16)], 4)
    assert (cache.rings.offset, len(cache.rings.taps)) == (5, 5) and mx.all(cache.rings.taps == 1).item()
    assert (twin.rings.offset, len(twin.rings.taps)) == (4, 4)
