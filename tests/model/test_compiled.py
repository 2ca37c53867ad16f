"""Steps as graphs: the bits of the eager step, one graph for all positions of a shape, and no stale weights.

MLX's CPU compiler needs minutes for the references' many operations, so most tests trace with compilation turned off:
the same functions, called with the same inputs. One slow test compiles.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import expert_matmul
from mlx_ds4.model import compiled
from mlx_ds4.model.compiled import CompiledSteps
from tests.golden_tools import manifest
from tests.model.test_steps import assert_same_state, run


@pytest.fixture(scope="module")
def sequence():
    return manifest("nano")["sequences"]["A"][:40]


@pytest.fixture
def traced(nano_wide, monkeypatch):
    """The model with its graphs turned on and traced functions called as they are; the shapes that were traced."""
    shapes = []
    monkeypatch.setattr(expert_matmul, "_GATHERED_PAIRS", 64)  # the reference asks the host for more pairs
    monkeypatch.setattr(nano_wide, "compiled", True)
    monkeypatch.setattr(nano_wide, "_steps", CompiledSteps(nano_wide))
    monkeypatch.setattr(compiled.mx, "compile", lambda fn: shapes.append(fn.__name__) or fn)
    yield nano_wide, shapes
    monkeypatch.undo()


@pytest.mark.parametrize("sizes", [[9, 1], [12, 6, 1, 1, 5, 8, 1], [1], [8]])
def test_graphs_give_the_bits_of_eager_steps(traced, sequence, sizes, monkeypatch):
    model, _ = traced
    logits, cache = run(model, sequence, sizes)
    monkeypatch.setattr(model, "compiled", False)
    want, eager = run(model, sequence, sizes)
    np.testing.assert_array_equal(np.array(logits), np.array(want))
    assert_same_state(cache, eager)


def test_one_graph_serves_many_positions(traced, sequence):
    """From 20 entries on, single steps differ in whether they complete a pair, and in nothing else."""
    model, shapes = traced
    _, cache = run(model, sequence[:26], [26])
    del shapes[:]
    run(model, sequence[26:], [1], cache)
    assert len(shapes) == 4  # two graphs each


def test_rejected_drafts_leave_no_trace(traced, sequence):
    model, _ = traced
    _, plain = run(model, sequence[:21], [21])
    drafted = plain.copy()
    run(model, [7, 9, 11, 13, 15, 17], [6], drafted)
    drafted.trim(6)
    assert_same_state(drafted, plain)
    np.testing.assert_array_equal(*(np.array(run(model, sequence[21:24], [1], c)[0]) for c in (drafted, plain)))


def test_taps_of_a_graph(traced, sequence):
    model, _ = traced
    tokens, prompt = mx.array([sequence[20:24]]), mx.array([sequence[:20]])
    taps = []
    for on in (True, False):
        model.compiled = on
        model.forward(prompt, cache := model.make_cache())
        taps.append(model.forward(tokens, cache)[1])
    assert len(taps[0]) == len(model.config.dspark_target_layer_ids) > 0
    for one, other in zip(*taps, strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("change", ["array", "module", "setting"])
def test_a_changed_model_is_traced_anew(traced, sequence, change, monkeypatch):
    model, shapes = traced
    _, cache = run(model, sequence[:20], [20])
    before = np.array(model(mx.array([sequence[20:21]]), cache.copy()))
    traced_once = len(shapes)
    np.testing.assert_array_equal(before, np.array(model(mx.array([sequence[20:21]]), cache.copy())))
    assert len(shapes) == traced_once
    if change == "array":
        monkeypatch.setitem(model.norm, "weight", model.norm.weight * 2)
    elif change == "module":
        monkeypatch.setitem(model.layers[0].attn, "wo_b", model.layers[1].attn.wo_b)
    else:
        monkeypatch.setattr(model.norm, "eps", 1.0)
    after = np.array(model(mx.array([sequence[20:21]]), cache.copy()))
    assert len(shapes) > traced_once and not np.array_equal(before, after)


def test_a_replayed_prompt_decodes_in_graphs(traced, sequence, monkeypatch):
    """A step that may see beyond where the decoder's windows begin, after a rewind, is not a graph's; others are."""
    model, shapes = traced
    cache = model.make_cache("replay")
    model(mx.array([sequence[:33]]), cache, decoder_rows=16)
    cache.trim(2)  # position 31 sees 16 rows, 17 and on are there
    twin = cache.copy()
    for count in (1, 1, 4):
        tokens = mx.array([sequence[cache.offset : cache.offset + count]])
        before = len(shapes)
        got = model(tokens, cache)
        assert (len(shapes) > before) == (cache.offset > 32)
        monkeypatch.setattr(model, "compiled", False)
        np.testing.assert_array_equal(np.array(got), np.array(model(tokens, twin)))
        monkeypatch.setattr(model, "compiled", True)
    assert_same_state(cache, twin)
