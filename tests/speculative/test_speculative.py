"""Speculative decoding gives the tokens of serial decoding, whatever the drafter says, and leaves the same state."""

from __future__ import annotations

import warnings

import mlx.core as mx
import pytest

from mlx_ds4.api import stream_generate, summary
from mlx_ds4.generation import PromptCache, generate_step
from mlx_ds4.sampling import make_logits_processors, make_sampler
from mlx_ds4.speculative import DraftCounts, speculative_step
from tests.generation.fakes import EOS, ByteTokenizer
from tests.speculative.fakes import Always, FakeDrafter, ScriptedTapModel, TapModel, drafters

PROMPT = list(b"Once upon a time")
KINDS = ("right", "wrong", "end", "random", "partly")


def plain(model, prompt=PROMPT, **kwargs):
    cache = model.make_cache()
    return list(generate_step(mx.array(prompt), model, prompt_cache=cache, **kwargs)), cache


def truth(**kwargs) -> list[int]:
    steps, _ = plain(TapModel(), max_tokens=60, **kwargs)
    return PROMPT + [token for token, _ in steps]


def drafted(model, drafter, prompt=PROMPT, admission=None, **kwargs):
    cache = model.make_cache()
    steps = speculative_step(
        mx.array(prompt), model, drafter, prompt_cache=cache, admission=admission or Always(), **kwargs
    )
    return steps, cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 40])
def test_greedy_tokens_are_those_of_serial_decoding(kind, count):
    want, state = plain(TapModel(), max_tokens=count)
    drafter, counts = drafters(truth())[kind], DraftCounts()
    steps, cache = drafted(TapModel(), drafter, max_tokens=count, counts=counts)
    got = list(steps)
    assert [token for token, *_ in got] == [token for token, _ in want]
    for (_, ours, _), (_, theirs) in zip(got, want, strict=True):
        assert mx.array_equal(ours, theirs)
    assert cache.offset == state.offset and cache.arrays() == state.arrays()
    if count > 1:
        assert (drafter.proposals > 0) == (count > 2) and drafter.observed[-1] == cache.offset
    if kind == "right" and count == 40:
        assert drafter.proposals == counts.proposals == 7  # 1 + 6 * 6 tokens, then 3 with 2 drafts
        assert [flag for *_, flag in got].count(True) == sum(counts.accepted) == 32
        assert counts.verified == counts.accepted == [7, 7, 6, 6, 6]
    if kind in ("wrong", "end"):
        assert not any(flag for *_, flag in got) and sum(counts.accepted) == 0


SETTINGS = [
    {"temp": 0.0},
    {"temp": 1.0},
    {"temp": 0.8, "top_p": 0.9},
    {"temp": 1.3, "top_k": 5},
    {"temp": 1.0, "min_p": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["right", "partly", "random"])
def test_sampled_tokens_are_those_of_serial_decoding_with_the_seed(kind, settings):
    want, state = plain(TapModel(), max_tokens=30, sampler=make_sampler(**settings, seed=3))
    text = truth(sampler=make_sampler(**settings, seed=3))
    steps, cache = drafted(TapModel(), drafters(text)[kind], max_tokens=30, sampler=make_sampler(**settings, seed=3))
    got = list(steps)
    assert [token for token, *_ in got] == [token for token, _ in want]
    assert cache.arrays() == state.arrays()
    if kind == "right":
        assert sum(flag for *_, flag in got) >= 20


def test_a_sampler_of_ones_own_and_processors():
    """They see the same tokens and logits in the same order as in serial decoding."""
    for kind in KINDS:
        runs = []
        for speculative in (False, True):
            seen = []

            def sampler(logprobs, seen=seen):
                seen.append(mx.argmax(logprobs).item())
                return mx.argsort(-logprobs, axis=-1)[:, len(seen) % 3]

            def process(tokens, logits, seen=seen):
                seen.append(tokens.tolist())
                return logits

            kwargs = {
                "max_tokens": 20,
                "sampler": sampler,
                "logits_processors": [*make_logits_processors(repetition_penalty=1.5), process],
            }
            if speculative:
                steps, _ = drafted(TapModel(), drafters(truth())[kind], **kwargs)
            else:
                steps, _ = plain(TapModel(), **kwargs)
            runs.append(([token for token, *_ in steps], seen))
        assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", ["right", "partly", "wrong"])
def test_closing_anywhere_takes_back_what_nobody_saw(kind):
    text = truth()
    for seen in range(1, 16):
        steps, cache = drafted(TapModel(), drafters(text)[kind], max_tokens=40)
        got = [next(steps)[0] for _ in range(seen)]
        steps.close()
        fed = cache.offset - len(PROMPT)
        assert seen - 1 <= fed <= seen and got == text[len(PROMPT) :][:seen]
        fresh = TapModel()
        again = fresh.make_cache()
        fresh(mx.array([(PROMPT + got)[: cache.offset]]), again)
        assert again.arrays() == cache.arrays()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [None, "lazy d", "."])
def test_ends_inside_a_block_are_those_of_serial_decoding(kind, stop):
    """End of text, stop strings and `max_tokens`, and the cache afterwards."""
    script = b"The quick brown fox jumps over the lazy dog."
    text = PROMPT + list(script) + [EOS] * 8
    for limit in (-1, 3, 22, 24):
        runs = []
        for drafter in (None, drafters(text)[kind]):
            model = ScriptedTapModel(script, len(PROMPT))
            held = PromptCache(model)
            extra = {"draft_model": drafter, "admission": Always()} if drafter else {}
            responses = list(stream_generate(model, Tokenizer(), PROMPT, limit, stop=stop, prompt_cache=held, **extra))
            runs.append([(r.text, r.token, r.generation_tokens, r.finish_reason) for r in responses])
            tokens = [r.token for r in responses]
            assert held.tokens == (PROMPT + tokens)[: held.cache.offset]
            assert len(PROMPT) + len(tokens) - 1 <= held.cache.offset <= len(PROMPT) + len(tokens)
            again = model.make_cache()
            model(mx.array([held.tokens]), again)
            assert again.arrays() == held.cache.arrays()
            if drafter:
                assert [r.from_draft for r in responses].count(True) <= sum(responses[-1].drafts.verified) + 5
                assert "Drafts: " in summary(responses[-1])
        assert runs[0] == runs[1]


class Tokenizer(ByteTokenizer):
    def token_id(self, text):
        return {"<think>": 1, "</think>": 2}.get(text)


def test_the_end_of_the_context():
    for size in range(len(PROMPT) + 1, len(PROMPT) + 9):
        want, _ = plain(TapModel(max_position_embeddings=size), max_tokens=-1)
        steps, cache = drafted(TapModel(max_position_embeddings=size), drafters(truth())["right"], max_tokens=-1)
        assert [token for token, *_ in steps] == [token for token, _ in want]
        assert cache.offset <= size


def test_fewer_drafts_and_the_default_policy():
    drafter, policy = drafters(truth())["right"], Always()
    steps, _ = drafted(TapModel(), drafter, max_tokens=20, num_draft_tokens=2, admission=policy)
    assert [token for token, *_ in steps] == truth()[len(PROMPT) :][:20]
    assert policy.cycles[:-1] == [(2, 2)] * (len(policy.cycles) - 1)
    model, counts = TapModel(), DraftCounts()
    steps = speculative_step(mx.array(PROMPT), model, drafter, max_tokens=60, counts=counts)
    assert [token for token, *_ in steps] == truth()[len(PROMPT) :]
    assert counts.proposals >= 1
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="num_draft_tokens"):
            speculative_step(mx.array(PROMPT), model, drafter, num_draft_tokens=wrong)
    with pytest.raises(ValueError, match="non-empty vector"):
        speculative_step(mx.array([], mx.int32), model, drafter)


def test_reasoning_is_serial():
    """Drafting begins at the first look after the mark that ends the reasoning, and stops after one that opens it."""
    script = bytes([65] * 10 + [2] + [66] * 30 + [1] + [67] * 10)
    prompt = [*PROMPT, 1]
    drafter = FakeDrafter(lambda offset: (list(script) + [EOS] * 9)[offset - len(prompt) + 1 :][:5])
    steps, _ = drafted(ScriptedTapModel(script, len(prompt)), drafter, prompt, max_tokens=50, reasoning=(1, 2))
    flags = [flag for *_, flag in steps]
    assert not any(flags[:11]) and sum(flags[11:42]) >= 20 and not any(flags[47:])


# ---- faults ------------------------------------------------------------------------------------------


class Failing(FakeDrafter):
    def __init__(self, where: str, after: int):
        super().__init__(lambda offset: [7] * 5)
        self.where, self.after, self.calls = where, after, 0

    def _count(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls > self.after:
                raise RuntimeError("out of luck")

    def observe(self, cache, taps):
        self._count("observe")

    def propose(self, model, cache, anchor, sample=None):
        self._count("propose")
        return super().propose(model, cache, anchor, sample)


@pytest.mark.parametrize("where", ["observe", "propose"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_drafter_that_raises_is_switched_off_with_one_warning(where, after):
    drafter = Failing(where, after)
    with pytest.warns(RuntimeWarning, match="RuntimeError: out of luck") as caught:
        steps, cache = drafted(TapModel(), drafter, max_tokens=30)
        got = [token for token, *_ in steps]
    want, state = plain(TapModel(), max_tokens=30)
    assert got == [token for token, _ in want] and cache.arrays() == state.arrays()
    assert len(caught) == 1 and drafter.failure and drafter.calls == after + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps, _ = drafted(TapModel(), drafter, max_tokens=30)
        assert [token for token, *_ in steps] == got
    assert drafter.calls == after + 1


def test_a_failing_model_is_reported_as_in_serial_decoding():
    """Logits without any number inside a block: the tokens before come, then the same error."""

    class Broken(TapModel):
        def logits(self, mixed, start):
            places = mx.arange(start, start + mixed.size)[:, None]
            return mx.where(places == len(PROMPT) + 9, mx.nan, super().logits(mixed, start))

    outcomes = []
    for run in (
        lambda: generate_step(mx.array(PROMPT), Broken(), max_tokens=30),
        lambda: drafted(Broken(), drafters(truth())["right"], max_tokens=30)[0],
    ):
        tokens = []
        with pytest.raises(ValueError, match="The logits at position") as error:
            tokens.extend(token for token, *_ in _keep(run(), tokens))
        outcomes.append((tokens, str(error.value)))
    assert outcomes[0] == outcomes[1]


def _keep(steps, into):
    for step in steps:
        into.append(step[0])
    return []


def test_an_interruption_during_a_verification():
    """Ctrl+C inside the model call acts after it, and the rows nobody saw are taken back."""
    import signal

    model = TapModel()
    steps, cache = drafted(model, drafters(truth())["right"], max_tokens=40)
    got = [next(steps)[0] for _ in range(7)]  # the next one starts a verification
    model.between_layers = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert cache.offset == len(PROMPT) + len(got)
    fresh = TapModel()
    again = fresh.make_cache()
    fresh(mx.array([PROMPT + got]), again)
    assert again.arrays() == cache.arrays()


def test_counts_say_what_happened():
    counts = DraftCounts(proposals=3, declined=1)
    assert str(counts) == "3 proposals, 1 declined, 0.00 drafts accepted per verification"
    counts.add(5, 2)
    counts.add(3, 3)
    assert (counts.verified, counts.accepted) == ([2, 2, 2, 1, 1], [2, 2, 1, 0, 0])
    assert str(counts).endswith("2.50 drafts accepted per verification (by position 2/2 2/2 1/2 0/1 0/1)")
