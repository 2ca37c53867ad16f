"""Prefill mode "replay" through the loops: chunks, interruption, caches of another mode, drafts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.api import load, stream_generate
from mlx_ds4.generation import PromptCache, generate_step
from mlx_ds4.speculative import DraftCounts, speculative_step
from tests.golden_tools import GOLDEN, manifest
from tests.speculative.fakes import Always, FakeDrafter

A = manifest("nano")["sequences"]["A"]
PROMPT = A[:40]  # the window, and so the replayed end, has 16


@pytest.fixture(scope="module")
def nano(nano_wide):
    return nano_wide


@pytest.fixture(scope="module")
def tokenizer():
    return load(GOLDEN / "nano" / "model")[1]


def replay(model, prompt, count=4, cache=None, **settings):
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=cache, prefill_mode="replay", **settings
    )
    return list(steps)


@pytest.fixture(scope="module")
def want(nano):
    """What the definition gives: one pass with 16 rows through the decoder, and single steps."""
    cache = nano.make_cache("replay")
    logits, out = nano(mx.array([PROMPT]), cache, last_only=True, decoder_rows=16), []
    for _ in range(4):
        out.append((mx.argmax(logits[0, -1]).item(), logits[0, -1] - mx.logsumexp(logits[0, -1])))
        logits = nano(mx.array([[out[-1][0]]]), cache)
    return out


@pytest.mark.parametrize("step", [13, 30, 2048])
def test_chunks_change_nothing(nano, want, step):
    seen = []
    cache = nano.make_cache("replay")
    callback = lambda done, total: seen.append((done, cache.offset))  # noqa: E731
    got = replay(nano, PROMPT, cache=cache, prefill_step_size=step, prompt_progress_callback=callback)
    for (token, logprobs), (expected, row) in zip(got, want, strict=True):
        assert token == expected
        np.testing.assert_array_equal(np.array(logprobs), np.array(row))
    assert seen[0] == (0, 0) and all(done == offset for done, offset in seen) and seen[-1][0] == 40
    assert (cache.decoder_start, cache.offset, cache.prefill_mode) == (24, 43, "replay")


def test_a_prompt_of_a_window_is_exact(nano):
    exact = list(generate_step(mx.array(A[:16]), nano, max_tokens=2))
    for (token, logprobs), (other, row) in zip(exact, replay(nano, A[:16], 2), strict=True):
        assert token == other
        np.testing.assert_array_equal(np.array(logprobs), np.array(row))


def test_an_interrupted_prefill_goes_on_with_the_same_prompt_only(nano, want):
    held = PromptCache(nano)
    assert held.reuse(PROMPT, "replay") == 0

    def interrupt(done, total):
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(nano, PROMPT, cache=held.cache, prefill_step_size=20, prompt_progress_callback=interrupt)
    held.record(PROMPT)
    assert held.cache.offset == held.cache.decoder_start == 20
    with pytest.raises(ValueError, match=r"ends inside a prompt of prefill_mode 'replay'.* go on with 6 tokens more"):
        generate_step(mx.array(A[20:30]), nano, prompt_cache=held.cache, prefill_mode="replay")
    assert held.reuse(PROMPT, "replay") == 20
    got = replay(nano, PROMPT[20:], cache=held.cache)
    assert [token for token, _ in got] == [token for token, _ in want]
    np.testing.assert_array_equal(np.array(got[0][1]), np.array(want[0][1]))


def test_modes_do_not_mix(nano, tokenizer):
    for mode, other in (("exact", "replay"), ("replay", "exact")):
        cache = nano.make_cache(mode)
        nano(mx.array([A[:3]]), cache)
        found = f"holds state of prefill_mode '{mode}', but '{other}' is asked for"
        with pytest.raises(ValueError, match=found):
            generate_step(mx.array(A[3:6]), nano, prompt_cache=cache, prefill_mode=other)
        with pytest.raises(ValueError, match=found):
            stream_generate(nano, tokenizer, A[3:6], prompt_cache=cache, prefill_mode=other)
        with pytest.raises(ValueError, match=found):
            speculative_step(mx.array(A[3:6]), nano, FakeDrafter(lambda at: [0] * 5), prompt_cache=cache,
                prefill_mode=other)  # fmt: skip
        assert cache.offset == 3
    with pytest.raises(ValueError, match="prefill_mode is 'quick'"):
        generate_step(mx.array(A[3:6]), nano, prefill_mode="quick")


def test_a_prompt_cache_starts_afresh_for_another_mode(nano, tokenizer):
    held = PromptCache(nano)

    def cached(prompt, mode):
        responses = list(stream_generate(nano, tokenizer, prompt, 2, prompt_cache=held, prefill_mode=mode))
        assert held.cache.prefill_mode == mode
        return responses[-1].cached_tokens

    assert [cached(A[:20], mode) for mode in ("exact", "replay", "replay", "exact")] == [0, 0, 19, 0]
    assert cached(A[:20], "replay") == 0
    assert cached([*A[:18], 7, 8, 9], "replay") == 18
    # Rewound further than it grows again: the decoder layers would have run over less than a window.
    assert cached([*A[:18], 7], "replay") == 0


def test_drafts_change_nothing(nano, want):
    """Verified and taken back, right ones and wrong ones, on top of a replayed prompt."""
    truth = [*PROMPT, *(token for token, _ in want)]
    guesses = lambda offset: (truth[offset + 1 : offset + 3] + [9] * 5)[:5]  # noqa: E731
    cache, counts, drafter = nano.make_cache("replay"), DraftCounts(), FakeDrafter(guesses)
    steps = speculative_step(
        mx.array(PROMPT), nano, drafter, max_tokens=4, prompt_cache=cache, prefill_mode="replay",
        admission=Always(), counts=counts, prefill_step_size=13,
    )  # fmt: skip
    assert [token for token, _, _ in steps] == truth[40:]
    assert cache.prefill_mode == "replay" and cache.decoder_start == 24 and sum(counts.accepted) > 0
    assert drafter.observed[:3] == [26, 39, 40]  # the chunk before the replayed rows has no taps
