"""The drafter against the vendor's numbers (tests/golden/README.md, sections 3 and 5)."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from mlx_ds4.cache import DraftRings
from mlx_ds4.model.dspark import BlockStep, Ring
from tests.golden_tools import GOLDEN, assert_close_to_largest, assert_equal, equal_share, golden, row_cosine, row_error

TRACE = json.loads((GOLDEN / "nano" / "golden" / "dspark_trace.json").read_text())
RUNS = ("A17", "B40")
LOGITS, CONFIDENCE = 0.05, 0.6  # class A
CYCLES = 4  # of the six whose values are stored


def values(run: str) -> dict[str, mx.array]:
    return {name.removeprefix(run + "."): x for name, x in golden("nano", "dspark").items() if name.startswith(run)}


def in_order(slots: mx.array, last: int) -> mx.array:
    """Ring slots [.., W, D] as rows, oldest first, when `last` is the newest position."""
    width = slots.shape[-2]
    return mx.take(slots, (mx.arange(width) + last + 1) % width, axis=-2)


def state(nano, ring: mx.array, last: int):
    """A cache that holds the positions up to `last` and, as far as the drafter sees, the golden ring."""
    cache = nano.make_cache()
    cache.offset = last + 1
    cache.rings = DraftRings(ring.shape[1])
    cache.rings.rows, cache.rings.offset = ring, last + 1
    return cache


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("cycle", [0, 1])
def test_proposal_from_golden_rings(nano, drafter, run, cycle):
    """Cycle 0 from the ring after the prompt, cycle 1 from the ring that its own keys show."""
    gold, known = values(run), TRACE[run]["cycles"][cycle]
    if cycle:
        keys = mx.stack([gold[f"cycle1.stage{s}.attn.keys"] for s in range(3)])
        slots = keys[:, : -drafter.block_size]
    else:
        slots = gold["ring_after_prefill"]
    cache = state(nano, in_order(slots, known["p"]), known["p"])
    hidden = drafter.hidden(nano, drafter.ring(cache), known["anchor"], known["p"] + 1)
    tokens, logits, confidence = drafter.heads(nano, hidden, known["anchor"])
    assert tokens.tolist() == known["drafts"]
    assert row_error(logits, gold[f"cycle{cycle}.logits"]) < LOGITS
    assert mx.abs(confidence - gold[f"cycle{cycle}.confidence"]).max().item() < CONFIDENCE
    proposal = drafter.propose(nano, cache, known["anchor"])
    assert (proposal.tokens, proposal.confidence) == (tokens.tolist(), confidence.tolist())


@pytest.mark.parametrize("run", RUNS)
def test_rings_from_golden_taps(drafter, run):
    """The row of the position whose tap is stored, in every stage, and `main_x`."""
    gold, cycles = values(run), TRACE[run]["cycles"]
    first = drafter.mtp[0]
    assert_equal(first.main_norm(first.main_proj(gold["cycle1.tap"][None]))[0], gold["cycle1.main_x"])
    keys = mx.stack([gold[f"cycle1.stage{s}.attn.keys"] for s in range(3)])
    for cycle, slots in ((0, gold["ring_after_prefill"]), (1, keys[:, : -drafter.block_size])):
        p = cycles[cycle]["p"]
        rows = drafter.ring_rows(gold[f"cycle{cycle}.tap"], p)
        assert_equal(rows[:, 0], slots[:, p % drafter.config.sliding_window])


@pytest.mark.parametrize("run", RUNS)
def test_every_stage_of_cycle_1(nano, drafter, run):
    """Each stage from golden streams: class A limits of a layer, experts exactly, own keys in the right place."""
    gold, known = values(run), TRACE[run]["cycles"][1]
    for s, stage in enumerate(drafter.mtp):
        want = {k.removeprefix(f"cycle1.stage{s}."): x for k, x in gold.items() if k.startswith(f"cycle1.stage{s}.")}
        slots, own = want["attn.keys"][: -drafter.block_size], want["attn.keys"][-drafter.block_size :]
        ring = in_order(slots, known["p"])
        step = BlockStep(drafter.config, known["p"] + 1, drafter.block_size, ring.shape[0], trace := {})
        h, pre = stage(want["h_in"][None], want["pre_in"][None], step, Ring(ring[None]))
        trace = {name.removeprefix("L0."): x for name, x in trace.items()}
        assert equal_share(trace["attn.kv"][0], own) >= 0.99
        assert row_error(trace["attn.q"][0], want["attn.q"]) < 0.006
        assert row_error(trace["attn.y"][0], want["attn.y"]) < 0.006
        assert_equal(trace["ffn.experts"][0], mx.sort(want["ffn.experts"], axis=-1))
        assert row_error(trace["ffn.y"][0], want["ffn.y"]) < 0.04
        assert row_error(h[0], want["h_out"]) < 0.012 and row_cosine(h[0], want["h_out"]) > 0.9999
        assert mx.abs(pre[0] - want["pre_out"]).max().item() < 0.01


@pytest.mark.parametrize("run", RUNS)
def test_heads_from_the_golden_hidden_state(nano, drafter, run):
    gold, known = values(run), TRACE[run]["cycles"][1]
    hidden = gold["cycle1.hidden"]
    base = nano.head(drafter.mtp[-1].norm(hidden))
    assert row_error(base, gold["cycle1.base_logits"]) < 1e-5
    tokens, logits, confidence = drafter.heads(nano, hidden, known["anchor"])
    assert tokens.tolist() == known["drafts"]
    assert row_error(logits, gold["cycle1.logits"]) < 1e-5
    assert_close_to_largest(confidence, gold["cycle1.confidence"], 1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_cycles_of_the_whole(nano, drafter, run):
    """Prompt, proposals and verifications by our own numbers. The drafts, the accepted counts and the next anchors are
    the reference's; logits and confidences stay near, though the taps carry the noise of ten layers of the model."""
    gold = values(run)
    cache = nano.make_cache()
    _, taps = nano.forward(gold["ids"][None], cache)
    drafter.observe(cache, taps)
    size = cache.offset
    slots = mx.take(gold["ring_after_prefill"], mx.arange(size - 16, size) % 16, axis=1)
    assert row_error(drafter.ring(cache), slots) < 0.2 and row_cosine(drafter.ring(cache), slots) > 0.98
    for number, known in enumerate(TRACE[run]["cycles"][:CYCLES]):
        assert cache.offset == known["p"] + 1
        hidden = drafter.hidden(nano, drafter.ring(cache), known["anchor"], cache.offset)
        tokens, logits, confidence = drafter.heads(nano, hidden, known["anchor"])
        assert tokens.tolist() == known["drafts"]
        assert row_error(logits, gold[f"cycle{number}.logits"]) < 0.06
        assert mx.abs(confidence - gold[f"cycle{number}.confidence"]).max().item() < 1.0
        verified, taps = nano.forward(mx.array([[known["anchor"], *known["drafts"]]]), cache)
        best = mx.argmax(verified[0], axis=-1).tolist()
        accepted = next((i for i, d in enumerate(known["drafts"]) if best[i] != d), len(known["drafts"]))
        assert (accepted, best[accepted]) == (known["accepted"], known["next_anchor"])
        cache.trim(drafter.block_size - accepted)
        taps = [tap[:, : accepted + 1] for tap in taps]
        drafter.observe(cache, taps)
        following = gold.get(f"cycle{number + 1}.tap")
        if following is not None:
            assert row_error(mx.concatenate(taps, axis=-1)[0, -1:], following) < 0.25
