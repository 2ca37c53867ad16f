"""Timing a model the way it is used: prefill in chunks, decode one step ahead, passes of several rows.

Every function works on the cache it is given. A decode step makes it one position longer, whatever its rows. Times are
medians after warming up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_ds4.generation import generate_step


def random_tokens(config, count: int, seed: int = 0) -> mx.array:
    """`count` ids, int32, that a text of the model could hold: no pattern, so that routing and selection spread."""
    return mx.array(np.random.default_rng(seed).integers(0, config.vocab_size, count).astype(np.int32))


def prefill_seconds(
    model, cache, tokens: mx.array, *, chunk: int = 2048, progress: Callable[[int, int], None] | None = None
) -> list[tuple[int, float]]:
    """(tokens, seconds) of each chunk of a prefill that feeds `tokens` behind what the cache holds."""
    chunks: list[tuple[int, float]] = []
    last, start = 0, time.perf_counter()

    def note(done: int, total: int) -> None:
        nonlocal last, start
        now = time.perf_counter()
        if done > last:
            chunks.append((done - last, now - start))
        last, start = done, now
        if progress:
            progress(done, total)

    for _ in generate_step(
        tokens,
        model,
        max_tokens=0,
        prompt_cache=cache,
        prefill_step_size=chunk,
        prefill_mode=cache.prefill_mode,
        prompt_progress_callback=note,
    ):
        pass
    return chunks


def decode_seconds(model, cache, *, rows: int = 1, steps: int = 16, warm_up: int = 4) -> float:
    """Median seconds of a decode step of `rows` rows.

    One row: `generate_step`, which starts a step before it hands out the token of the one before. More rows: what
    verification does, one pass, its greedy tokens on the host, and the rows behind the first taken back; the next pass
    cannot start before, because its rows depend on these tokens. Tokens come in pairs: what is larger MLX moves to
    another memory on CUDA before the host may read it, 0.1 to 0.3 ms for 24 bytes.
    """
    times = _one_row(model, cache, steps + warm_up) if rows == 1 else _passes(model, cache, rows, steps + warm_up)
    return statistics.median(times[warm_up:])


def _one_row(model, cache, steps: int) -> list[float]:
    times = []
    # Two tokens more: the first comes from the prompt, and with the last no further step is started.
    token, mode = random_tokens(model.config, 1), cache.prefill_mode
    run = generate_step(token, model, max_tokens=steps + 2, prompt_cache=cache, prefill_mode=mode)
    next(run)
    for _ in range(steps):
        start = time.perf_counter()
        next(run)
        times.append(time.perf_counter() - start)
    run.close()
    return times


def _passes(model, cache, rows: int, steps: int) -> list[float]:
    times = []
    tokens = random_tokens(model.config, rows).tolist()
    for _ in range(steps):
        start = time.perf_counter()
        logits, _ = model.forward(np.array([tokens]), cache)
        chosen = [mx.argmax(logits[0, row : row + 2], axis=-1) for row in range(0, rows, 2)]
        mx.async_eval(chosen, [layer.state for layer in cache])
        tokens = [token for pair in chosen for token in pair.tolist()]
        cache.trim(rows - 1)
        times.append(time.perf_counter() - start)
    return times


def host_seconds(model, cache, *, steps: int = 8) -> float:
    """Median CPU seconds of the calling thread to build a one-row step and hand it to the device.

    The device is idle when a step begins, so nothing waits for it; other threads of MLX are not counted.
    """
    times = []
    token = random_tokens(model.config, 1)
    for _ in range(steps):
        mx.eval(token)
        mx.synchronize()
        start = time.thread_time()
        logits = model(token[None], cache=cache, last_only=True, sampled=True)
        token = mx.argmax(logits[:, -1], axis=-1)
        mx.async_eval(token, [layer.state for layer in cache])
        times.append(time.thread_time() - start)
    mx.eval(token)
    return statistics.median(times)


def warm(model, *, chunk: int, rows: Sequence[int], prefill_mode: str = "exact") -> None:
    """Runs a chunk of prefill and a step of each row count on a cache of its own, so that kernels are compiled."""
    cache = model.make_cache(prefill_mode)
    prefill_seconds(model, cache, random_tokens(model.config, chunk), chunk=chunk)
    for count in rows:
        decode_seconds(model, cache, rows=count, steps=1, warm_up=1)
    mx.clear_cache()
