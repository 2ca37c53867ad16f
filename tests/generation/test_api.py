"""Text in, text out: fields, ends, stop strings, reuse; with a scripted model and a tokenizer of bytes."""

import asyncio
import dataclasses
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationResponse as MlxLmResponse

import mlx_ds4
from mlx_ds4.api import GenerationResponse, generate, stream_generate
from mlx_ds4.generation import PromptCache
from mlx_ds4.sampling import make_logits_processors, make_sampler
from tests.generation.fakes import BOS, EOS, ByteTokenizer, FakeModel, ScriptedModel

TOKENIZER = ByteTokenizer()
REPLY = "ok 🧪漢 and done"


def say(script, prompt="hi", **kwargs):
    """Responses of a model that says `script` behind the prompt."""
    model = ScriptedModel(script.encode(), len(prompt.encode()) + 1)
    return list(stream_generate(model, TOKENIZER, prompt, **kwargs))


def test_fields_are_mlx_lms_and_cached_tokens():
    theirs = [field.name for field in dataclasses.fields(MlxLmResponse)]
    assert [field.name for field in dataclasses.fields(GenerationResponse)] == [*theirs, "cached_tokens", "drafts"]


def test_one_response_per_token_until_the_end_token():
    responses = say(REPLY)
    size = len(REPLY.encode())
    assert [r.token for r in responses] == [*REPLY.encode(), EOS]
    assert "".join(r.text for r in responses) == REPLY
    assert all("�" not in r.text for r in responses)
    assert [r.finish_reason for r in responses] == [None] * size + ["stop"]
    assert [r.generation_tokens for r in responses] == list(range(1, size + 2))
    for r in responses:
        assert r.logprobs.shape == (258,) and mx.argmax(r.logprobs).item() == r.token
        assert (r.prompt_tokens, r.cached_tokens, r.from_draft) == (3, 0, False)
        assert r.prompt_tps > 0 and r.peak_memory > 0
    assert responses[0].generation_tps == 0 and responses[-1].generation_tps > 0


@pytest.mark.parametrize("count", [1, 4, 6])
def test_length(count):
    """Four bytes end in the middle of a character, which then shows as a replacement character."""
    responses = say(REPLY, max_tokens=count)
    assert [r.finish_reason for r in responses] == [None] * (count - 1) + ["length"]
    assert "".join(r.text for r in responses) == REPLY.encode()[:count].decode(errors="replace")


def test_max_tokens_zero():
    (only,) = say(REPLY, max_tokens=0)
    assert (only.text, only.token, only.logprobs, only.finish_reason) == ("", None, None, "length")
    assert (only.prompt_tokens, only.generation_tokens, only.cached_tokens) == (3, 0, 0)
    assert only.prompt_tps > 0 and only.generation_tps == 0
    assert generate(FakeModel(), TOKENIZER, "hi", max_tokens=0) == ""


def test_unlimited_ends_at_the_end_token_or_the_context():
    assert say(REPLY, max_tokens=-1)[-1].finish_reason == "stop"
    model = FakeModel(max_position_embeddings=20)
    responses = list(stream_generate(model, TOKENIZER, "hi", max_tokens=-1))
    assert len(responses) == 18 and responses[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("🧪", "ok "),
        ("k 🧪漢 an", "o"),
        (["zzz", " done"], "ok 🧪漢 and"),
        ("ok", ""),
        ("done!", REPLY),
        (["and", "漢 and"], "ok 🧪"),
    ],
)
def test_stop_strings(stop, text):
    responses = say(REPLY, stop=stop)
    assert "".join(r.text for r in responses) == text
    assert responses[-1].finish_reason == "stop"
    assert (responses[-1].token == EOS) is (text == REPLY)


def test_a_held_back_beginning_is_given_out_at_the_end():
    assert "".join(r.text for r in say("so\n\nUs", stop="\n\nUser:")) == "so\n\nUs"
    assert "".join(r.text for r in say("so\n\nUser:", max_tokens=6, stop="\n\nUser:")) == "so\n\nUs"


def test_a_stop_string_at_the_last_allowed_token_counts():
    responses = say("abcd", max_tokens=3, stop="bc")
    assert ("".join(r.text for r in responses), responses[-1].finish_reason) == ("a", "stop")


def test_prompts_of_every_kind():
    model = FakeModel()
    by_text = [r.token for r in stream_generate(model, TOKENIZER, "hey", max_tokens=8)]
    for prompt in ([BOS, *b"hey"], mx.array([BOS, *b"hey"]), (BOS, *b"hey")):
        assert [r.token for r in stream_generate(model, TOKENIZER, prompt, max_tokens=8)] == by_text
    without = [r.token for r in stream_generate(model, TOKENIZER, list(b"hey"), max_tokens=8)]
    assert without != by_text
    (only,) = stream_generate(model, TOKENIZER, "", max_tokens=1)
    assert only.prompt_tokens == 1


def test_arguments_are_checked_at_the_call():
    model = FakeModel()
    held = PromptCache(model)
    list(stream_generate(model, TOKENIZER, "hello", max_tokens=2, prompt_cache=held))
    fed, tokens = model.fed, list(held.tokens)
    for prompt, settings, found in (
        ([], {}, "prompt is empty"),
        (mx.array([], mx.int32), {}, "prompt is empty"),
        ([1, 2.5], {}, "neither text nor a flat list"),
        ([[1, 2]], {}, "neither text nor a flat list"),
        (mx.array([[1, 2]]), {}, "neither text nor a flat list"),
        ([1, 300], {}, "token id 300"),
        ([1, 2**80], {}, "token id"),
        ("hi", {"stop": ""}, "stop is"),
        ("hi", {"max_tokens": -3}, "max_tokens is -3"),
        ("hi", {"prefill_step_size": 0}, "prefill_step_size"),
    ):
        with pytest.raises(ValueError, match=found):
            stream_generate(model, TOKENIZER, prompt, **settings)
    with pytest.raises(ValueError, match="prompt is empty"):
        stream_generate(model, TOKENIZER, [], prompt_cache=held)
    assert model.fed == fed and held.tokens == tokens
    with pytest.raises(TypeError):
        stream_generate(model, TOKENIZER, "hi", max_kv_size=4)


def test_prewarm_then_a_turn():
    """max_tokens=0 over three chunks, then the same prompt with more behind it."""
    model = FakeModel()
    held = PromptCache(model)
    prompt = [BOS, *range(40)]
    (warm,) = stream_generate(model, TOKENIZER, prompt, 0, prompt_cache=held, prefill_step_size=15)
    assert (warm.finish_reason, warm.prompt_tokens, warm.cached_tokens) == ("length", 41, 0)
    assert model.fed == 41
    longer = [*prompt, 50, 51, 52]
    responses = list(stream_generate(model, TOKENIZER, longer, 5, prompt_cache=held))
    assert {(r.prompt_tokens, r.cached_tokens) for r in responses} == {(44, 41)}
    cold = [r.token for r in stream_generate(FakeModel(), TOKENIZER, longer, 5)]
    assert [r.token for r in responses] == cold and model.fed == 44 + 4


def test_the_same_then_a_shorter_prompt_behind_a_long_reply():
    model = FakeModel()
    held = PromptCache(model)
    prompt = [BOS, *range(40)]
    list(stream_generate(model, TOKENIZER, prompt, 30, prompt_cache=held))
    for request, cached in ((prompt, 40), (prompt[:-5], 35)):
        responses = list(stream_generate(model, TOKENIZER, request, 5, prompt_cache=held))
        assert responses[0].cached_tokens == cached
        cold = [r.token for r in stream_generate(FakeModel(), TOKENIZER, request, 5)]
        assert [r.token for r in responses] == cold


def test_penalties_see_the_cached_tokens_too():
    processors = make_logits_processors(repetition_penalty=3.0, repetition_context_size=100)
    prompt = [BOS, *range(0, 200, 2)]
    held = PromptCache(FakeModel())
    list(stream_generate(FakeModel(), TOKENIZER, prompt[:-3], 0, prompt_cache=held))
    warm = stream_generate(FakeModel(), TOKENIZER, prompt, 20, prompt_cache=held, logits_processors=processors)
    cold = stream_generate(FakeModel(), TOKENIZER, prompt, 20, logits_processors=processors)
    plain = [r.token for r in stream_generate(FakeModel(), TOKENIZER, prompt, 20)]
    assert [r.token for r in warm] == [r.token for r in cold] != plain


def test_stopping_early_keeps_the_exchange():
    model = FakeModel()
    held = PromptCache(model)
    responses = stream_generate(model, TOKENIZER, "hello", 50, prompt_cache=held)
    got = [next(responses).token for _ in range(3)]
    responses.close()
    assert held.tokens == [BOS, *b"hello", *got] and held.cache.offset == 9
    text = ScriptedModel(b"one END two", 6)
    held = PromptCache(text)
    list(stream_generate(text, TOKENIZER, "hello", 50, prompt_cache=held, stop="END"))
    assert held.tokens == [BOS, *b"hello", *b"one END"]


@pytest.mark.parametrize(("error", "kept"), [(KeyboardInterrupt, 20), (asyncio.CancelledError, 20), (RuntimeError, 0)])
def test_interrupted_prefill_keeps_chunks_and_a_failure_clears(error, kept):
    model = FakeModel()
    held = PromptCache(model)

    def progress(done, total):
        if done == 20:
            raise error

    prompt = list(range(40))
    with pytest.raises(error):
        list(
            stream_generate(
                model,
                TOKENIZER,
                prompt,
                prompt_cache=held,
                prefill_step_size=10,
                prompt_progress_callback=progress,
            )
        )
    assert held.tokens == prompt[:kept] and held.cache.offset == kept


def test_a_plain_cache_is_continued():
    model = FakeModel()
    cache = model.make_cache()
    list(stream_generate(model, TOKENIZER, [1, 2, 3], 0, prompt_cache=cache))
    got = list(stream_generate(model, TOKENIZER, [4, 5], 6, prompt_cache=cache))
    assert [r.token for r in got] == [r.token for r in stream_generate(model, TOKENIZER, [1, 2, 3, 4, 5], 6)]
    assert (got[0].prompt_tokens, got[0].cached_tokens) == (2, 0)


def test_generate_joins_and_prints(capsys):
    model = ScriptedModel(REPLY.encode(), 3)
    assert generate(model, TOKENIZER, "hi", sampler=make_sampler(temp=1e-9, seed=0)) == REPLY
    assert capsys.readouterr().out == ""
    assert generate(model, TOKENIZER, "hi", verbose=True) == REPLY
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["=" * 10, REPLY, "=" * 10]
    assert [line.split(":")[0] for line in lines[3:]] == ["Prompt", "Generation", "Peak memory", "Cached"]
    assert lines[3].startswith("Prompt: 3 tokens, ") and lines[3].endswith(" tokens-per-sec")
    assert lines[4].startswith(f"Generation: {len(REPLY.encode()) + 1} tokens, ")


def test_package_exports():
    from mlx_ds4 import api, cache, config, generation

    assert mlx_ds4.load is api.load and mlx_ds4.stream_generate is api.stream_generate
    assert mlx_ds4.GenerationResponse is api.GenerationResponse
    assert mlx_ds4.generate_step is generation.generate_step
    assert mlx_ds4.Cache is cache.Cache and mlx_ds4.ModelConfig is config.ModelConfig
    assert set(mlx_ds4.__all__) <= set(dir(mlx_ds4))
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = mlx_ds4.no_such_thing


def test_importing_the_package_imports_nothing_else():
    code = (
        "import sys, mlx_ds4\n"
        "assert 'mlx.core' not in sys.modules and 'numpy' not in sys.modules\n"
        "import mlx_ds4.loader\n"
        "from mlx_ds4 import load\n"
        "assert callable(load), load\n"
        "assert 'mlx_ds4.generate' not in sys.modules\n"
        "assert not {'torch', 'transformers', 'mlx_lm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
