"""Whole runs on real models: the golden drafter, drafters that lie, the shipped model, and the command."""

from __future__ import annotations

import json
import re

import mlx.core as mx
import pytest

from mlx_ds4 import generate
from mlx_ds4.api import load, stream_generate
from mlx_ds4.drafter_files import load_drafter
from mlx_ds4.generation import PromptCache, generate_step
from mlx_ds4.sampling import make_sampler
from mlx_ds4.speculative import speculative_step
from tests.golden_tools import GOLDEN, TINY, golden, manifest
from tests.speculative.fakes import Always, drafters

NANO = GOLDEN / "nano" / "model"
TRACE = json.loads((GOLDEN / "nano" / "golden" / "dspark_trace.json").read_text())


def arrays(cache) -> dict[str, mx.array]:
    """Everything of a cache that later steps can see, in the order of positions."""
    out = {}
    seen = mx.arange(max(0, cache.offset - (cache.config.sliding_window - 1)), cache.offset)
    for number, layer in enumerate(cache):
        out[f"{number}.window"] = mx.take(layer.window, seen % layer.window.shape[1], axis=1)
        for name, rows in (("compressed", layer.compressed), ("index_keys", layer.index_keys)):
            if rows is not None and rows.length:
                out[f"{number}.{name}"] = rows.rows
        if layer.pending is not None and cache.offset % 2:
            out[f"{number}.open"] = layer.pending[:, :, (cache.offset - 1) % layer.pending.shape[2]]
    if cache.history is not None:
        out["history"] = mx.array(cache.history)
    return out


def assert_same_state(ours, theirs) -> None:
    """Bit for bit, over the rows that both hold: one that was rewound holds fewer old ones, never too few."""
    assert ours.offset == theirs.offset
    mine, other = arrays(ours), arrays(theirs)
    assert mine.keys() == other.keys()
    for name, a in mine.items():
        b = other[name]
        axis = 1
        count = min(a.shape[axis], b.shape[axis])
        if name.endswith(("compressed", "index_keys")):
            assert a.shape == b.shape
        assert mx.array_equal(a[:, a.shape[1] - count :], b[:, b.shape[1] - count :]), name


def test_the_traced_run(nano, drafter):
    """A17 of the golden trace: tokens, accepted counts cycle by cycle, and the state that plain decoding leaves,
    rings included."""
    cycles = TRACE["A17"]["cycles"][:3]
    want = golden("nano", "dspark")["A17.tokens"].tolist()
    prompt = golden("nano", "dspark")["A17.ids"]
    count = 1 + sum(cycle["accepted"] + 1 for cycle in cycles)
    policy, cache = Always(), nano.make_cache()
    steps = speculative_step(prompt, nano, drafter, prompt_cache=cache, admission=policy)
    got = [next(steps) for _ in range(count)]
    steps.close()
    assert [token for token, *_ in got] == want[:count]
    flags = [flag for *_, flag in got][1:]
    assert flags == [i < cycle["accepted"] for cycle in cycles for i in range(cycle["accepted"] + 1)]
    assert policy.cycles == [(5, cycle["accepted"]) for cycle in cycles[:-1]]  # the last one was cut short

    serial = nano.make_cache()
    _, taps = nano.forward(prompt[None], serial)
    drafter.observe(serial, taps)
    for token in want[: cache.offset - prompt.size]:
        _, taps = nano.forward(mx.array([[token]]), serial)
        drafter.observe(serial, taps)
    assert_same_state(cache, serial)
    assert cache.rings.offset == serial.rings.offset == cache.offset
    assert mx.array_equal(drafter.ring(cache), drafter.ring(serial))


def test_sampled_text_with_the_golden_drafter(nano, drafter):
    """The same seed gives the same text, and the noise that is lent makes drafts agree with draws."""
    prompt, settings = golden("nano", "dspark")["A17.ids"], {"temp": 1.5, "top_p": 0.95, "seed": 2}
    want = [t for t, _ in generate_step(prompt, nano, max_tokens=8, sampler=make_sampler(**settings))]
    steps = list(
        speculative_step(prompt, nano, drafter, max_tokens=8, sampler=make_sampler(**settings), admission=Always())
    )
    assert [token for token, *_ in steps] == want and any(flag for *_, flag in steps)


def test_a_drafter_with_weights_that_are_not_finite(nano):
    """Its own check finds them; generation goes on."""
    broken = load_drafter(nano, NANO)
    broken.mtp[1].attn_norm.weight = broken.mtp[1].attn_norm.weight * mx.nan
    prompt = golden("nano", "dspark")["A17.ids"]
    with pytest.warns(RuntimeWarning, match="not finite") as caught:
        steps = list(speculative_step(prompt, nano, broken, max_tokens=5, admission=Always()))
    assert [token for token, *_ in steps] == golden("nano", "dspark")["A17.tokens"].tolist()[:5]
    assert len(caught) == 1 and "DraftError" in broken.failure


LONG = [pytest.param(300, kind, marks=pytest.mark.slow) for kind in ("right", "wrong", "end", "random", "partly")]


@pytest.mark.parametrize(("count", "kind"), [(16, "partly"), *LONG])
def test_the_shipped_model_under_lying_drafters(shipped, count, kind):
    model, tokenizer = shipped["loaded"]
    prompt, text, state = serially(shipped, count)
    liar = drafters(text, vocab=model.config.vocab_size, eos=tokenizer.eos_token_id)[kind]
    cache = model.make_cache()
    steps = speculative_step(
        mx.array(prompt), model, liar, max_tokens=len(text) - len(prompt), prompt_cache=cache, admission=Always()
    )
    assert prompt + [token for token, *_ in steps] == text
    assert_same_state(cache, state)


@pytest.fixture(scope="module")
def shipped():
    """The shipped model and, by length, what plain decoding makes of a prompt."""
    return {"loaded": load()}


def serially(shipped, count: int):
    """A prompt for the shipped model, the prompt with the tokens of plain decoding, and the state after them."""
    if count not in shipped:
        model, tokenizer = shipped["loaded"]
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Tell me."}])
        cache = model.make_cache()
        steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache)
        shipped[count] = prompt, prompt + [token for token, _ in steps], cache
    return shipped[count]


def test_rings_survive_the_prompt_cache(nano, drafter):
    """A second turn drafts from rings of the positions that were reused."""
    model, tokenizer = nano, load(NANO)[1]
    ids, held = manifest("nano")["sequences"]["A"], PromptCache(nano)
    for size in (20, 24):
        responses = list(
            stream_generate(model, tokenizer, ids[:size], 3, prompt_cache=held, draft_model=drafter, admission=Always())
        )
        assert [r.token for r in responses] == ids[size : size + 3]
        assert held.cache.rings.offset == held.cache.offset
    assert responses[0].cached_tokens == 22
    assert drafter.ring(held.cache).shape[1] == nano.config.sliding_window


@pytest.mark.slow  # 6 s; the gate runs it
def test_the_command(capsys):
    ids = ",".join(map(str, manifest("nano")["sequences"]["A"][:17]))
    common = ["--model", str(NANO), "--prompt-tokens", ids, "-m", "20"]
    assert generate.main([*common, "--output", "tokens", "--dspark", "--num-draft-tokens", "1"]) == 0
    out, err = capsys.readouterr()
    assert list(map(int, out.split())) == manifest("nano")["sequences"]["A"][17:37]
    assert re.search(r"\nDrafts: [12] proposals, 0 declined, .*by position [012]/[12]\)", err)
    assert generate.main([*common, "--no-dspark", "--draft-model", str(NANO)]) == 2
    assert "--no-dspark contradicts --draft-model" in capsys.readouterr().err
    assert generate.main(["--num-draft-tokens", "3"]) == 2
    assert "--num-draft-tokens needs --dspark" in capsys.readouterr().err
    assert generate.main(["--model", str(TINY), "--dspark", "--prompt", "x"]) == 2
    assert "expected one drafter beside the model, found none" in capsys.readouterr().err


def test_drafts_behind_a_replayed_prompt(nano, drafter):
    """The drafter gets the taps of the replayed rows, a window of them, whatever the chunks; the text stays."""
    prompt = mx.array(manifest("nano")["sequences"]["A"][:40])
    want = [token for token, _ in generate_step(prompt, nano, max_tokens=6, prefill_mode="replay")]
    rings = []
    for step in (40, 13):
        cache = nano.make_cache("replay")
        steps = speculative_step(prompt, nano, drafter, max_tokens=6, prompt_cache=cache, prefill_mode="replay",
            admission=Always(), prefill_step_size=step)  # fmt: skip
        got = [next(steps)[0]]
        assert cache.rings.offset == 40 and cache.rings.taps.shape[0] == nano.config.replay_rows
        rings.append(cache.rings.taps)
        assert got + [token for token, *_ in steps] == want
    assert mx.array_equal(*rings)
    assert drafter.failure is None
