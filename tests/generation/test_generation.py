"""The loop over tokens: what it yields, what it leaves in the cache, and how it stops."""

import functools
import signal
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step

from mlx_ds4.generation import PromptCache, generate_step
from mlx_ds4.sampling import make_logits_processors, make_sampler
from tests.generation.fakes import REWIND, VOCAB, FakeModel

PROMPT = mx.array(np.random.default_rng(3).integers(0, 256, 37))


def tokens_of(model, prompt=PROMPT, **kwargs):
    return [token for token, _ in generate_step(prompt, model, **kwargs)]


def greedy_by_hand(prompt, count):
    """One token after the other, the whole history anew each time."""
    return list(_greedy(tuple(prompt.tolist()), count))


@functools.cache
def _greedy(history, count):
    if count == 0:
        return ()
    token = mx.argmax(FakeModel()(mx.array([history]))[0, -1]).item()
    return (token, *_greedy((*history, token), count - 1))


def cold_cache(tokens):
    model = FakeModel()
    cache = model.make_cache()
    model(mx.array([tokens]), cache=cache)
    return cache


def test_yields_the_greedy_tokens_with_their_logprobs():
    model = FakeModel()
    want = greedy_by_hand(PROMPT, 20)
    got = list(generate_step(PROMPT, model, max_tokens=20))
    assert [token for token, _ in got] == want
    logits = model(mx.array([PROMPT.tolist() + want]))[0, PROMPT.size - 1 : -1]
    for (token, logprobs), row in zip(got, logits, strict=True):
        assert isinstance(token, int) and logprobs.shape == (VOCAB,) and logprobs.dtype == mx.float32
        np.testing.assert_allclose(
            np.array(logprobs)[:256], np.array(row - mx.logsumexp(row))[:256], rtol=1e-5, atol=1e-5
        )
        assert np.array(logprobs)[256:].tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("step", [1, 7, 8, 9, 36, 37, 38])
def test_chunk_size_changes_nothing(step):
    model = FakeModel()
    cache = model.make_cache()
    assert tokens_of(model, prompt_cache=cache, prefill_step_size=step, max_tokens=20) == greedy_by_hand(PROMPT, 20)
    assert cache.arrays() == cold_cache(PROMPT.tolist() + greedy_by_hand(PROMPT, 19)).arrays()


@pytest.mark.parametrize("prefill_step_size", [5, 2048])
def test_mlx_lm_drives_the_same_model(prefill_step_size):
    model = FakeModel()
    theirs = list(mlx_lm_generate_step(PROMPT, model, max_tokens=15, prefill_step_size=prefill_step_size))
    ours = list(generate_step(PROMPT, model, max_tokens=15, prefill_step_size=prefill_step_size))
    assert [int(token) for token, _ in theirs] == [token for token, _ in ours]
    for (_, a), (_, b) in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)
    processors = make_logits_processors(repetition_penalty=1.4, frequency_penalty=0.3, logit_bias={47: -9.0})
    theirs = mlx_lm_generate_step(PROMPT, model, max_tokens=15, logits_processors=processors)
    changed = tokens_of(model, max_tokens=15, logits_processors=processors)
    assert [int(token) for token, _ in theirs] == changed != [token for token, _ in ours]
    theirs = mlx_lm_generate_step(PROMPT, model, max_tokens=15, sampler=make_sampler(temp=1.0, seed=4))
    assert [int(t) for t, _ in theirs] == tokens_of(model, max_tokens=15, sampler=make_sampler(temp=1.0, seed=4))


def test_no_step_is_wasted_and_the_last_token_is_not_fed():
    for count in (1, 2, 6):
        model = FakeModel()
        cache = model.make_cache()
        assert len(tokens_of(model, prompt_cache=cache, max_tokens=count)) == count
        assert model.fed == cache.offset == PROMPT.size + count - 1


def test_max_tokens_zero_prefills_and_stops():
    model = FakeModel()
    cache = model.make_cache()
    seen = []
    callback = lambda done, total: seen.append((done, total, cache.offset))  # noqa: E731
    steps = generate_step(
        PROMPT,
        model,
        max_tokens=0,
        prompt_cache=cache,
        prefill_step_size=15,
        prompt_progress_callback=callback,
    )
    assert list(steps) == []
    assert seen == [(0, 37, 0), (15, 37, 15), (30, 37, 30), (37, 37, 37)]
    assert cache.arrays() == cold_cache(PROMPT.tolist()).arrays()
    assert tokens_of(model, mx.array([65]), prompt_cache=cache, max_tokens=5) == greedy_by_hand(
        mx.array([*PROMPT.tolist(), 65]), 5
    )


def test_progress_sees_a_cache_of_exactly_the_prompt():
    model = FakeModel()
    cache = model.make_cache()
    seen = []
    callback = lambda done, total: seen.append((done, total, cache.offset))  # noqa: E731
    tokens_of(model, prompt_cache=cache, max_tokens=3, prefill_step_size=20, prompt_progress_callback=callback)
    assert seen == [(0, 37, 0), (20, 37, 20), (37, 37, 37)]


def test_unlimited_runs_to_the_end_of_the_context():
    model = FakeModel(max_position_embeddings=50)
    cache = model.make_cache()
    assert tokens_of(model, prompt_cache=cache, max_tokens=-1) == greedy_by_hand(PROMPT, 14)
    assert cache.offset == 50
    assert tokens_of(model, max_tokens=99) == greedy_by_hand(PROMPT, 14)
    with pytest.raises(ValueError, match="87 tokens, but the model ends at 50"):
        generate_step(PROMPT, model, prompt_cache=cache)


def test_a_closed_generator_leaves_what_was_yielded():
    model = FakeModel()
    cache = model.make_cache()
    steps = generate_step(PROMPT, model, max_tokens=50, prompt_cache=cache)
    got = [next(steps)[0] for _ in range(4)]
    steps.close()
    assert cache.arrays() == cold_cache(PROMPT.tolist() + got).arrays()
    assert tokens_of(model, mx.array([70]), prompt_cache=cache, max_tokens=5) == greedy_by_hand(
        mx.array([*PROMPT.tolist(), *got, 70]), 5
    )


@pytest.mark.parametrize("call", range(1, 9))
def test_ctrl_c_inside_a_model_call_leaves_a_consistent_cache(call):
    """A real SIGINT between two layers, in the prefill (chunks 1 to 3) and while decoding."""
    model = FakeModel()
    cache = model.make_cache()
    calls = []

    def interrupt():
        calls.append(0)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)

    model.between_layers = interrupt
    got = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        for token, _ in generate_step(PROMPT, model, max_tokens=20, prompt_cache=cache, prefill_step_size=15):
            got.append(token)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(calls) == call and len(got) == max(call - 4, 0)
    fed = PROMPT.tolist()[: min(15 * call, 37)] + got
    assert cache.arrays() == cold_cache(fed).arrays() and cache.offset == len(fed)


def test_a_second_ctrl_c_does_not_wait():
    model = FakeModel()

    def interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the call went on")

    model.between_layers = interrupt
    with pytest.raises(KeyboardInterrupt):
        tokens_of(model)


def test_runs_in_another_thread():
    got = []
    thread = threading.Thread(target=lambda: got.extend(tokens_of(FakeModel(), max_tokens=5)))
    thread.start()
    thread.join()
    assert got == greedy_by_hand(PROMPT, 5)


def test_an_exception_from_the_callback_ends_the_prefill_between_chunks():
    model = FakeModel()
    cache = model.make_cache()

    def callback(done, total):
        if done >= 20:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        tokens_of(model, prompt_cache=cache, prefill_step_size=10, prompt_progress_callback=callback)
    assert cache.arrays() == cold_cache(PROMPT.tolist()[:20]).arrays()


@pytest.mark.parametrize("at", [37, 40])
def test_nan_logits_name_the_position(at):
    model = FakeModel()
    honest = model.logits
    model.logits = lambda mixed, start: honest(mixed, start) * (np.nan if start + mixed.size > at - 1 else 1)
    got = []
    with pytest.raises(ValueError, match=f"position {at - 1} hold 258 NaN among 258"):
        for token, _ in generate_step(PROMPT, model, max_tokens=9):
            got.append(token)
    assert got == greedy_by_hand(PROMPT, at - 37)


def test_arguments_are_checked_at_the_call():
    model = FakeModel()
    for prompt, found in (
        (mx.array([], mx.int32), r"shape \(0,\)"),
        (mx.zeros((1, 3), mx.int32), r"shape \(1, 3\)"),
        (mx.zeros((3,)), "float32"),
        (mx.array([1, 258]), "token id 258, but this model's ids are 0 to 257"),
        (mx.array([-1, 2]), "token id -1"),
        (mx.array([2**40]), f"token id {2**40}"),
    ):
        with pytest.raises(ValueError, match=found):
            generate_step(prompt, model)
    for settings in ({"max_tokens": -2}, {"max_tokens": 1.5}, {"prefill_step_size": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            generate_step(PROMPT, model, **settings)
    assert model.fed == 0


def run(prompt_cache, prompt, count=6):
    """One exchange as `stream_generate` makes it; returns (tokens from the cache, tokens produced)."""
    cached = prompt_cache.reuse(prompt)
    assert prompt_cache.cache.offset == cached and prompt_cache.tokens == prompt[:cached]

    def progress(done, total):
        if done == total:
            prompt_cache.checkpoint(prompt)

    got = tokens_of(
        FakeModel(),
        mx.array(prompt[cached:]),
        prompt_cache=prompt_cache.cache,
        max_tokens=count,
        prompt_progress_callback=progress,
    )
    prompt_cache.record(prompt + got)
    return cached, got


def test_prompt_cache_reuses_the_longest_usable_prefix():
    prompt = PROMPT.tolist()
    held = PromptCache(FakeModel())

    def expect(request, cached):
        got = run(held, request)
        assert got == (cached, greedy_by_hand(mx.array(request), 6))
        return got[1]

    reply = expect(prompt, 0)
    expect(prompt, 36)  # the same again: all but the last token
    expect(prompt[:-5], 31)  # shorter
    expect(prompt, 32)  # and longer again, from the shorter one's end
    following = [*prompt, *reply, 1, 2, 3]
    expect(following, 42)  # the next turn: the reply's last token was never fed
    expect([*following[:-2], 9, 9], 44)  # a turn that differs in its last two tokens
    expect([*prompt, 99], 0)  # further back than the checkpoint can be rewound
    expect([98, *prompt], 0)  # nothing in common


def test_checkpoint_serves_a_long_reply_rendered_otherwise():
    prompt = PROMPT.tolist()
    held = PromptCache(FakeModel())
    _, reply = run(held, prompt, count=60)
    assert len(reply) > REWIND
    request = [*prompt, *reply[30:], 5, 6]
    assert run(held, request) == (37, greedy_by_hand(mx.array(request), 6))


def test_prompt_cache_that_lost_count_starts_afresh():
    held = PromptCache(FakeModel())
    run(held, PROMPT.tolist())
    held.record(PROMPT.tolist()[:-1])
    assert held.tokens == [] and held.cache.offset == 0
