"""The golden model through every loop: its greedy text is known (tests/golden/README.md, section 2)."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step

from mlx_ds4.api import load, stream_generate
from mlx_ds4.generation import PromptCache, generate_step
from tests.golden_tools import GOLDEN, manifest

A = manifest("nano")["sequences"]["A"]
START, COUNT = 40, 5
WANT = A[START : START + COUNT]


@pytest.fixture(scope="module")
def nano(nano_wide):
    return nano_wide


@pytest.fixture(scope="module")
def loaded():
    return load(GOLDEN / "nano" / "model")


@pytest.mark.parametrize("step", [13, 2048])
def test_our_loop(nano, step):
    cache = nano.make_cache()
    steps = generate_step(mx.array(A[:START]), nano, max_tokens=COUNT, prompt_cache=cache, prefill_step_size=step)
    assert [token for token, _ in steps] == WANT
    assert cache.offset == START + COUNT - 1


@pytest.mark.parametrize("step", [13])
def test_mlx_lms_loop(nano, step):
    steps = mlx_lm_generate_step(mx.array(A[:START]), nano, max_tokens=COUNT, prefill_step_size=step)
    assert [int(token) for token, _ in steps] == WANT


def test_prefill_only_then_more(nano):
    cache = nano.make_cache()
    assert list(generate_step(mx.array(A[:25]), nano, max_tokens=0, prompt_cache=cache)) == []
    assert cache.offset == 25
    steps = generate_step(mx.array(A[25:START]), nano, max_tokens=COUNT, prompt_cache=cache)
    assert [token for token, _ in steps] == WANT


def test_a_closed_generator_can_be_continued(nano):
    cache = nano.make_cache()
    steps = generate_step(mx.array(A[:START]), nano, prompt_cache=cache)
    assert [next(steps)[0] for _ in range(3)] == A[START : START + 3]
    steps.close()
    assert cache.offset == START + 3
    steps = generate_step(mx.array(A[START + 3 : START + 5]), nano, max_tokens=2, prompt_cache=cache)
    assert [token for token, _ in steps] == A[START + 5 : START + 7]


def test_stream_reuses_what_it_can(loaded):
    """Cold, then with a longer prompt, the same again, and a shorter one, on one cache."""
    model, tokenizer = loaded
    held = PromptCache(model)
    for size, cached in ((START, 0), (START + 6, START + 1), (START + 6, START + 5), (START + 1, START)):
        responses = list(stream_generate(model, tokenizer, A[:size], max_tokens=2, prompt_cache=held))
        assert [r.token for r in responses] == A[size : size + 2]
        assert {r.cached_tokens for r in responses} == {cached}
        text = "".join(r.text for r in responses)
        assert text == tokenizer.decode(A[size : size + 2])


def test_a_model_file_without_a_path_is_the_shipped_one():
    model, tokenizer = load()
    kinds = {model.config.ratio(layer) for layer in range(model.config.num_hidden_layers)}
    assert kinds == {0, 1, 2} and model.config.engram_layer_ids
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert len(list(stream_generate(model, tokenizer, prompt, max_tokens=2))) == 2
