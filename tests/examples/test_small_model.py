"""The small model's training code: its forward pass is the model's, its roundings are the release's storage."""

from __future__ import annotations

import contextlib
import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from examples.small_model import draft, parameters, rounding
from examples.small_model import forward as steps
from examples.small_model.forward import Pass, forward
from mlx_ds4.formats import quant_encode as qe
from mlx_ds4.formats.planes import dequantize_engram_rows
from mlx_ds4.model.engram import engram_constants
from tests.examples.tools import ids_of, row_error, rows_of, tiny

# ---- the forward passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 12, 79])
def test_training_and_inference_give_the_same_logits(system, length):
    """79: window, both selections, candidate blocks and an open pair all act. The Sinkhorn scales are one float32 unit
    apart at times, which now and then flips a bfloat16 rounding; everything else is bit-equal."""
    config, named, biases, model, *_ = system
    ids = ids_of(config, 2, length)
    state = Pass(config, length)
    ours = forward(named, biases, config, mx.array(ids), rows_of(system, ids), state)
    theirs, taps = model.forward(mx.array(ids))
    assert row_error(ours, theirs) <= (0.06 if length > 64 else 0.02)
    assert (mx.argmax(ours, axis=-1) == mx.argmax(theirs, axis=-1)).mean().item() > 0.98
    for tap, other in zip(state.taps, taps, strict=True):
        assert row_error(tap, other) <= 0.03


def test_sublayers_are_bit_equal(system):
    """Each on the model's own inputs, so that no difference is carried on."""
    config, named, biases, model, *_ = system
    ids = ids_of(config, 1, 79)
    rows, trace, state = rows_of(system, ids), model.trace(mx.array(ids)), Pass(config, 79)
    selected = 0
    for i in range(config.num_hidden_layers):
        at, h = f"L{i}.", trace[f"L{i}.h_in"]
        if i in rows:
            ours = steps.engram(named, config, f"layers.{i}.engram.", trace[f"L{i - 1}.h_out"], rows[i], state)
            assert mx.array_equal(ours, h)
        for site in ("attn", "ffn"):
            h = trace[at + ("h_in" if site == "attn" else "h_mid")]
            for ours, part in zip(
                steps.mix(named, config, f"layers.{i}.hc_{site}_", h), ("pre", "post", "comb"), strict=True
            ):
                assert mx.abs(ours - trace[f"{at}{site}.{part}"]).max().item() < 1e-6
        assert mx.array_equal(steps.attention(named, config, i, trace[at + "attn.x"], state), trace[at + "attn.y"])
        if f"{at}topk" in trace:
            listed = np.array(trace[at + "topk"])[0]
            mask = np.zeros((79, state.selection.shape[-1]), bool)
            for row, entries in enumerate(listed):
                mask[row, entries[entries >= 0]] = True
            assert np.array_equal(mask, np.array(state.selection[0]))
            selected += int((mask.sum(axis=1) == config.index_topk).sum())
        ours = steps.experts(named, biases, f"layers.{i}.ffn.", trace[at + "ffn.x"], 2, config, state)
        assert mx.array_equal(ours, trace[at + "ffn.y"])
    assert selected > 100  # rows from which something was left out
    assert state.candidates is not None and not np.array(state.candidates).all()
    assert [int(load.sum().item()) for load in state.loads] == [2 * 79] * config.num_hidden_layers


@pytest.mark.parametrize("mistake", ["no selection", "no Engram", "no candidates", "window", "no rounding"])
def test_a_mistake_is_larger_than_the_tolerance(system, mistake):
    config, named, biases, model, *_ = system
    ids = ids_of(config, 2, 79)
    state = Pass(config, 79, dense=mistake == "no selection")
    rows = {} if mistake == "no Engram" else rows_of(system, ids)
    changed = {
        "no candidates": {"candidate_topk_blocks": 1000},
        "window": {"sliding_window": config.sliding_window - 1},
    }.get(mistake, {})
    config = dataclasses.replace(config, **changed)
    state = dataclasses.replace(state, config=config)
    with rounding.off() if mistake == "no rounding" else contextlib.nullcontext():
        ours = forward(named, biases, config, mx.array(ids), rows, state)
    assert row_error(ours, model(mx.array(ids))) > 0.12


@pytest.mark.parametrize("start", [0, 3, 30])
def test_training_and_inference_give_the_same_drafts(system, start):
    """Nothing, a part and the whole of the window lie in the rings."""
    config, named, biases, model, drafter, *_ = system
    ids = ids_of(config, 1, 40)
    cache = model.make_cache()
    model.tap(drafter.target_layer_ids)
    _, taps = model.forward(mx.array(ids), model.make_cache())
    if start:
        _, before = model.forward(mx.array(ids[:, :start]), cache)
        drafter.observe(cache, before)
    theirs = drafter.hidden(model, drafter.ring(cache), int(ids[0, start]), start)
    taps = mx.concatenate(taps, axis=-1)
    starts = np.array([1, start])
    ours = draft.hidden(
        named, biases, config, named["embed.weight"], taps, mx.array(ids), starts, Pass(config, 40)
    )[:, 1]  # fmt: skip
    assert row_error(ours, theirs) < 0.02
    tokens, logits, confidence = drafter.heads(model, theirs, int(ids[0, start]))
    inputs = mx.concatenate([mx.array(ids[0, start : start + 1]), tokens[:-1]])
    ours = draft.heads(named, config, named["head.weight"], theirs, inputs)
    assert mx.abs(ours[0] - logits).max().item() < 1e-4 and mx.abs(ours[1] - confidence).max().item() < 1e-4


# ---- gradients and roundings ----------------------------------------------------------------------------


def test_every_weight_gets_a_gradient():
    """Both losses reach every weight of their part, and the indexers' weights only their own loss."""
    config, token_map = tiny()
    back, front = parameters.backbone(config), parameters.drafter(config)
    flat, drafts = back.initial(0), front.initial(1)
    zeros = {w.name: mx.zeros(w.shape) for w in (*back.biases, *front.biases)}
    ids = ids_of(config, 2, 64)
    mapped = token_map[ids]
    rows = {
        i: mx.array(h.row_numbers(mapped, 64))
        for i, h in zip(config.engram_layer_ids, engram_constants(config), strict=True)
    }
    tokens = mx.array(ids)

    def language(named, part):
        state = Pass(config, 64)
        logits = forward(named, zeros, config, tokens, rows, state)
        if part == "index":
            return sum(state.index_losses)
        return mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), tokens[..., None], -1).mean()

    named = back.named(flat)
    norms = {
        part: {n: mx.abs(g).max().item() for n, g in mx.grad(language)(named, part).items()}
        for part in ("index", "language")
    }
    for name in named:
        learner = "index" if ".indexer." in name else "language"
        assert norms[learner][name] > 0, name
        assert (norms["index"][name] > 0) == (learner == "index"), name

    state = Pass(config, 64)
    target = forward(named, zeros, config, tokens, rows, state)
    taps = mx.concatenate(state.taps, axis=-1)

    def drafting(own):
        return draft.loss(
            own, zeros, config, named, taps, target, tokens, np.array([4, 20, 50]), Pass(config, 64)
        )[0]  # fmt: skip

    assert all(mx.abs(g).max().item() > 0 for g in mx.grad(drafting)(front.named(drafts)).values())


@pytest.mark.parametrize("kind", ["FP4", "FP8", "ROWS"])
def test_rounded_weights_are_what_the_release_stores(kind):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((64, 96)) * np.exp2(rng.integers(-8, 8, (64, 1)))).astype(np.float32)
    x[5:40, 32:64] = 0
    if kind == "FP4":
        ours = rounding.fp4_weight(mx.array(x).reshape(-1, 32))
        stored = qe.decode_fp4_rows(*qe.encode_fp4_rows(x))
    elif kind == "FP8":
        tiles = mx.array(x).reshape(2, 32, 3, 32).swapaxes(1, 2).reshape(-1, 1024)
        ours = rounding.fp8_weight(tiles).reshape(2, 3, 32, 32).swapaxes(1, 2)
        stored = qe.decode_fp8_tiles(*qe.encode_fp8_tiles(x))
    else:
        ours = rounding.fp8_weight(mx.array(x).reshape(-1, 32))
        codes, scales = qe.encode_fp8_rows(x)
        records = mx.array(np.concatenate([codes, scales], axis=1))
        stored = np.array(dequantize_engram_rows(records).astype(mx.float32))
    assert np.array_equal(np.array(ours).reshape(x.shape), stored)
    again = qe.decode_fp4_rows(*qe.encode_fp4_rows(stored)) if kind == "FP4" else stored
    assert np.array_equal(again, stored)  # encoding what is rounded changes nothing
    grad = mx.grad(lambda v: (rounding.fp8_weight(v) * mx.arange(32)).sum())(mx.array(x[:, :32]))
    assert np.array_equal(np.array(grad), np.tile(np.arange(32, dtype=np.float32), (64, 1)))


def test_flat_vectors_and_named_weights_are_the_same_numbers():
    config, _ = tiny()
    layout = parameters.backbone(config)
    with rounding.off():
        flat = layout.initial(0)
        named = {name: np.array(v) for name, v in layout.named(flat).items()}
    again = layout.flat(named)
    for name, vector in flat.items():
        expected = vector.astype(mx.bfloat16).astype(mx.float32) if name in ("BF16", "VECTORS") else vector
        assert mx.array_equal(again[name], expected), name
    assert sum(v.size for v in named.values()) == layout.size
    for name, weights in layout.classes.items():  # each weight on its own multiple of 256 bytes
        assert flat[name].size == sum(-(-int(np.prod(w.shape)) // 64) * 64 for w in weights)
