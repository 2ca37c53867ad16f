"""How long a prefill chunk may be: the estimate against measured peaks, and what follows from a device's memory."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4 import generation, loader, machine
from mlx_ds4.api import load
from mlx_ds4.generation import generate_step
from mlx_ds4.memory import SMALLEST_CHUNK, TILE_SCORES, chunk_bytes, chunk_size, row_bytes
from mlx_ds4.random_model import cut_config

FULL, TINY = cut_config(), cut_config(size="tiny")
RELEASE = cut_config(engram=True)


def test_bytes_of_a_row():
    """By hand: streams, coefficients and lists; for a while the mix of four streams with four, or Engram."""
    lists = 512 + 128 + FULL.candidate_topk_blocks
    assert row_bytes(FULL) == (6 * 20480 + 128 * 25 + 8 * lists, (8 * 4 + 8) * 20480)
    assert row_bytes(RELEASE)[1] == 48 * 20480
    assert row_bytes(TINY) == (6 * 1024 + 128 * 25 + 8 * (8 + 8 + 4), (8 * 4 + 8) * 1024)


def test_bytes_of_a_chunk():
    gathered = 8 * 64 * 640 * 512
    assert chunk_bytes(FULL, 8192, 8192) == 8192 * sum(row_bytes(FULL)) + gathered
    assert chunk_bytes(FULL, 8192, 1 << 20) == chunk_bytes(FULL, 8192, 8192)  # independent of the context
    always, _ = row_bytes(FULL)
    assert chunk_bytes(FULL, 1024, 1 << 20) == 1024 * always + 64 * TILE_SCORES + gathered  # scores are most of it
    assert chunk_bytes(TINY, 10, 500) == 10 * row_bytes(TINY)[0] + 64 * 10 * 2024 + 8 * 10 * 64 * 64
    plain = cut_config(2)  # two layers with windows alone
    assert not any(plain.compress_ratios)
    assert chunk_bytes(plain, 7, 10**6) == 7 * sum(row_bytes(plain)) + 8 * 7 * 640 * 512


@pytest.mark.parametrize(
    ("free", "rows"),
    [(None, 2048), (64 << 30, 8192), (20 << 30, 8192), (16 << 30, 4096), (8 << 30, 2048), (4 << 30, 1024), (0, 256)],
)
def test_chunk_of_the_release(free, rows):
    assert chunk_size(RELEASE, 131072, 131072, free) == rows
    if free and rows > SMALLEST_CHUNK:
        assert chunk_bytes(RELEASE, rows, 131072) <= free // 2
        assert rows == 8192 or chunk_bytes(RELEASE, 2 * rows, 131072) > free // 2


def test_a_short_prompt_is_not_split():
    free = 2 * chunk_bytes(RELEASE, 300, 300)
    assert chunk_size(RELEASE, 300, 300, free) == 8192
    assert chunk_size(RELEASE, 300, 300, free - 2) == 256


@pytest.mark.parametrize("rows", [128, 512])
@pytest.mark.parametrize("tile", [TILE_SCORES, 1 << 12])
def test_measured_on_the_shipped_model(rows, tile, monkeypatch):
    """The estimate bounds what a chunk holds at its peak, and is not many times that. With small tiles of scores the
    bytes of rows are seen alone."""
    monkeypatch.setattr("mlx_ds4.model.indexer.TILE_SCORES", tile)
    monkeypatch.setattr("mlx_ds4.memory.TILE_SCORES", tile)
    model, _ = load()
    mx.eval(model.parameters())
    tokens = mx.array(np.random.default_rng(0).integers(0, 512, (1, rows)))
    cache = model.make_cache()
    cache.begin(1, rows)
    mx.eval([layer.state for layer in cache], tokens)
    gc.collect()  # what earlier tests left must not end while this one measures
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(model(tokens, cache, last_only=True), [layer.state for layer in cache])
    peak = mx.get_peak_memory() - before
    estimate = chunk_bytes(model.config, rows, rows)
    assert estimate / 3 < peak < estimate


def test_the_default_follows_memory(nano_wide, monkeypatch):
    prompt = mx.array(np.random.default_rng(0).integers(0, 512, 270))

    def chunks(free, **settings):
        monkeypatch.setattr(generation, "free_memory", lambda: free)
        seen = []
        callback = lambda done, total: seen.append(done)  # noqa: E731
        list(generate_step(prompt, nano_wide, max_tokens=0, prompt_progress_callback=callback, **settings))
        return seen

    assert chunks(0) == [0, 256, 270]
    assert chunks(None) == [0, 270]
    assert chunks(0, prefill_step_size=300) == [0, 270]  # what is asked for is done


def test_free_memory(monkeypatch):
    assert machine.free_memory() is None  # this machine's CPU does not tell
    monkeypatch.setattr(mx, "get_active_memory", lambda: 30)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5)
    for info, free, whole in (
        ({"max_recommended_working_set_size": 96, "memory_size": 128}, 98, 128),
        ({"memory_size": 20}, 0, 20),
        ({"free_memory": 40, "total_memory": 140}, 45, 140),
    ):
        monkeypatch.setattr(mx, "device_info", lambda *device, info=info: info)
        assert machine.free_memory() == free
        assert loader.machine_memory() == whole
