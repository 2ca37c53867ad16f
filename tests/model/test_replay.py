"""Prefill mode "replay": decoder layers over the end of the prompt only, and state that never passes for exact."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.cache import REWIND, Cache
from mlx_ds4.model.layer import Layer
from mlx_ds4.model.step import Step
from tests.golden_tools import manifest
from tests.model.test_memory import peak_of
from tests.model.test_steps import assert_same_state

A = manifest("nano")["sequences"]["A"]
N = 48  # beyond 16 rows of window, 4 candidate blocks of 4, top-k of 8


@pytest.fixture(scope="module")
def nano(nano_wide):
    return nano_wide


@pytest.fixture(scope="module")
def exact(nano):
    return fed(nano, A[:N], [N], "exact")


@pytest.fixture(scope="module")
def replayed(nano):
    return fed(nano, A[:N], [N])


def fed(model, tokens, sizes, mode="replay", rows=None, cache=None):
    """Last logits and cache behind `tokens` in chunks of `sizes`; the last `rows` of them go through the decoder."""
    cache = cache or model.make_cache(mode)
    tail = len(tokens) - (model.config.replay_rows if rows is None else rows)
    done, index = 0, 0
    while done < len(tokens):
        chunk = tokens[done : done + sizes[min(index, len(sizes) - 1)]]
        done, index = done + len(chunk), index + 1
        through = min(len(chunk), max(0, done - tail)) if mode == "replay" else None
        logits = model(mx.array([chunk]), cache, last_only=True, decoder_rows=through)
    return logits, cache


def by_definition(model, tokens, rows):
    """The exact pass, in which decoder layers' windows begin `rows` before the end; its last logits and state.

    Rows of a layer meet only in windows and compressed entries, so the last rows of this pass are the definition's.
    """

    class Masked(Step):
        def _window_list(self):
            listed = super()._window_list()
            first = len(tokens) - rows
            hidden = (self.positions[:, None] >= first) & (listed < first)
            for row in range(self.length):  # what is seen stands in front, as at the start of a sequence
                seen = listed[row][~hidden[row] & (listed[row] >= 0)]
                listed[row] = -1
                listed[row, : len(seen)] = seen
            return listed

    cache, cut = model.make_cache(), model.config.first_decoder_layer
    cache.begin(1, len(tokens))
    step = Step(model.config, 0, len(tokens))
    masked = Masked(model.config, 0, len(tokens))
    mapped, records = model.fetch(np.array([tokens]), cache)
    h, pre = model.run_layers(0, cut, *model.start(mx.array([tokens])), step, cache, records)
    h, pre = model.run_layers(cut, len(model.layers), h, pre, masked, cache, records)
    cache.advance(len(tokens), mapped)
    return model.logits(h, pre, True), cache


def windows(cache, count):
    """The last `count` rows of every decoder layer's window."""
    at = np.arange(cache.offset - count, cache.offset)
    return [
        np.array(layer.window.astype(mx.float32))[:, at % layer.window.shape[1]]
        for layer in cache.layers[cache.config.first_decoder_layer :]
    ]


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_the_definition(nano, exact, rows):
    logits, cache = fed(nano, A[:N], [N], rows=rows)
    want, state = by_definition(nano, A[:N], rows)
    np.testing.assert_array_equal(np.array(logits), np.array(want))
    for got, expected in zip(windows(cache, rows), windows(state, rows), strict=True):
        np.testing.assert_array_equal(got, expected)
    # Encoder layers, and the compressed rows and index keys of the first decoder layer, are exact.
    cut = nano.config.first_decoder_layer
    for layer, true in zip(cache.layers[: cut + 1], exact[1].layers[: cut + 1], strict=True):
        for name in ("compressed", "index_keys"):
            if (part := getattr(layer, name)) is not None:
                assert mx.array_equal(part.rows, getattr(true, name).rows)
        assert layer is cache[cut] or mx.array_equal(layer.window, true.window)
    assert np.abs(np.array(logits - exact[0])).max() > 1e-3  # an approximation, or the test tests nothing


@pytest.mark.parametrize("size", [1, 9, 16, N])
def test_a_span_over_the_whole_prompt_is_exact(nano, size):
    want, state = fed(nano, A[:size], [size], "exact")
    got, cache = fed(nano, A[:size], [size], rows=N)
    np.testing.assert_array_equal(np.array(got), np.array(want))
    assert_same_state(cache, state)
    assert (cache.prefill_mode, state.prefill_mode) == ("replay", "exact")  # equal, and still not mixed


def test_the_cut_path_over_all_rows_is_exact(nano, exact):
    """Publishing apart from the pass, and lists of the tail's own, change no bit."""
    cache = nano.make_cache("replay")
    cache.begin(1, N)
    step = Step(nano.config, 0, N)
    mapped, records = nano.fetch(np.array([A[:N]]), cache)
    h, pre, taps = nano._run_cut(*nano.start(mx.array([A[:N]])), step, cache, records, N)
    cache.advance(N, mapped)
    np.testing.assert_array_equal(np.array(nano.logits(h, pre, True)), np.array(exact[0]))
    assert_same_state(cache, exact[1])
    assert [tap.shape[1] for tap in taps] == [N] * 3


@pytest.mark.parametrize("sizes", [[13], [20, 15, 1, 2, 10], [32, 16], [33, 15], [47, 1]])
def test_any_chunks_give_the_same_bits(nano, replayed, sizes):
    want, state = replayed[0], replayed[1].copy()
    got, cache = fed(nano, A[:N], sizes)
    np.testing.assert_array_equal(np.array(got), np.array(want))
    assert cache.decoder_start == state.decoder_start == N - nano.config.replay_rows
    following = [A[N : N + 1], A[N + 1 : N + 7]]
    for tokens in following:
        got, want = (np.array(nano(mx.array([tokens]), c)) for c in (cache, state))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("count", [1, REWIND])
def test_trimmed_is_untouched(nano, replayed, count):
    """Rows that are run again see the window that they saw: nothing from before the tail."""
    want, plain = replayed
    trimmed = plain.copy()
    trimmed.trim(count)
    assert plain.prefill_mode == trimmed.prefill_mode == "replay" and trimmed.decoder_start == N - 16
    for start in range(N - count, N):
        again = nano(mx.array([A[start : start + 1]]), trimmed)
    np.testing.assert_array_equal(np.array(again), np.array(want))
    for got, expected in zip(windows(trimmed, 16), windows(plain, 16), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_trim_beyond_the_replayed_rows(nano):
    _, cache = fed(nano, A[:30], [30], rows=2)
    cache.trim(5)
    assert cache.decoder_start == cache.offset == 25
    _, never = fed(nano, A[:25], [25], rows=0)
    got, want = (np.array(nano(mx.array([A[25:28]]), c)) for c in (cache, never))
    np.testing.assert_array_equal(got, want)


def test_a_second_prompt(nano, replayed):
    """A short one continues the windows; behind a long one they begin anew."""
    _, short = fed(nano, A[:28], [28])
    long = short.copy()
    fed(nano, A[28:38], [10], cache=short)
    assert short.decoder_start == 12 and short.offset == 38
    got, _ = fed(nano, A[28:N], [20], cache=long)
    assert long.decoder_start == N - 16
    np.testing.assert_array_equal(np.array(got), np.array(replayed[0]))


def test_batches(nano):
    B = manifest("nano")["sequences"]["B"][:30]
    cache = nano.make_cache("replay")
    both = nano(mx.array([A[:30], B]), cache, decoder_rows=16)
    assert both.shape == (2, 16, nano.config.vocab_size)
    for row, tokens in zip(both, (A[:30], B), strict=True):
        np.testing.assert_array_equal(np.array(row[-1]), np.array(fed(nano, tokens, [30])[0][0, 0]))


def test_taps_are_those_of_the_replayed_rows(nano):
    _, all_taps = nano.forward(mx.array([A[:30]]), nano.make_cache())
    logits, taps = nano.forward(mx.array([A[:30]]), nano.make_cache("replay"), decoder_rows=16)
    assert logits.shape[1] == 16
    assert [tap.shape for tap in taps] == [(1, 16, nano.config.hidden_size)] * len(all_taps)
    logits, taps = nano.forward(mx.array([A[:30]]), nano.make_cache("replay"), decoder_rows=0)
    assert logits.shape == (1, 0, nano.config.vocab_size) and taps == []


def test_decoder_layers_run_over_the_tail_alone(nano, monkeypatch):
    rows = np.zeros(nano.config.num_hidden_layers, dtype=int)
    run = Layer.__call__

    def counted(layer, h, pre, step, *rest):
        rows[step.layer] += h.shape[1]
        return run(layer, h, pre, step, *rest)

    monkeypatch.setattr(Layer, "__call__", counted)
    for sizes in ([N], [20]):
        rows[:] = 0
        fed(nano, A[:N], sizes)
        assert rows.tolist() == [N] * 6 + [16] * 4


def test_memory_shrinks(nano, monkeypatch):
    """What the decoder layers hold at their peak, as one graph: 16 rows of 160."""
    monkeypatch.setattr("mlx_ds4.model.model._EAGER_ROWS", 10**9)
    monkeypatch.setattr("mlx_ds4.cache.RECENT", 64)
    count, rows, cut = 160, nano.config.replay_rows, nano.config.first_decoder_layer
    ids = np.array([(A * 4)[:count]])

    def peak(replay: bool) -> int:
        cache, step = nano.make_cache("replay"), Step(nano.config, 0, count)
        cache.begin(1, count)
        _, records = nano.fetch(ids, cache)
        h, pre = nano.run_layers(0, cut, *nano.start(mx.array(ids)), step, cache, records)
        if replay:
            nano.layers[cut].publish(h, pre, step, cache[cut])
            h, pre, step = h[:, -rows:], pre[:, -rows:], step.tail(rows, count - rows)
        mx.eval(h, pre, [layer.state for layer in cache])
        return peak_of(lambda: nano.run_layers(cut, len(nano.layers), h, pre, step, cache, records))

    assert peak(replay=True) < 0.25 * peak(replay=False)


def test_what_is_refused(nano):
    tokens = mx.array([A[:20]])
    with pytest.raises(ValueError, match="5 of 20, but the cache holds exact state"):
        nano(tokens, nano.make_cache(), decoder_rows=5)
    for rows in (-1, 21):
        with pytest.raises(ValueError, match=f"decoder_rows is {rows}, expected 0 to the step's 20 rows"):
            nano(tokens, nano.make_cache("replay"), decoder_rows=rows)
    with pytest.raises(ValueError, match="prefill_mode is 'fast', expected one of 'exact', 'replay'"):
        nano.make_cache("fast")
    plain = dataclasses.replace(
        nano.config, compress_ratios=(0,) * 10, kv_source_layer_ids=(), index_source_layer_ids=()
    )
    assert plain.first_decoder_layer is None
    with pytest.raises(ValueError, match="no KV source layer to cut at"):
        Cache(plain, "replay")


def test_missing_rows(nano):
    cache = nano.make_cache("replay")
    assert cache.missing_rows(0, 5) == 0  # the start of the sequence is all there is
    fed(nano, A[:N], [N], rows=0, cache=cache)
    assert [cache.missing_rows(N, count) for count in (1, 15, 16, 99)] == [15, 1, 0, 0]
    fed(nano, A[:16], [16], cache=cache)
    assert [cache.missing_rows(N + 16 - back, 1) for back in (0, 1, 2, 8)] == [0, 0, 1, 7]
