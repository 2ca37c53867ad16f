"""Steps as graphs: the bits of the eager step, one graph for all positions of a shape, and no stale weights.

MLX's CPU compiler needs minutes for the references' many operations, so most tests trace with compilation turned off:
the same functions, called with the same inputs. One slow test compiles.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlx_ds4.custom_kernels import _cuda_cache, _switches, expert_matmul
from mlx_ds4.custom_kernels._switches import families
from mlx_ds4.custom_kernels.step_values import step_values_ref
from mlx_ds4.generation import generate_step
from mlx_ds4.model import compiled, indexer, layer, step
from mlx_ds4.model import model as model_file
from mlx_ds4.model.compiled import CompiledSteps
from mlx_ds4.model.model import Model
from mlx_ds4.model.module import Module
from mlx_ds4.model.norm import RMSNorm
from mlx_ds4.random_model import cut_config, random_model
from mlx_ds4.speculative import speculative_step
from tests.golden_tools import manifest
from tests.model.test_steps import assert_same_state, run
from tests.speculative.fakes import Always, drafters


@pytest.fixture(scope="module")
def sequence():
    return manifest("nano")["sequences"]["A"][:40]


@pytest.fixture
def traced(nano_wide, monkeypatch):
    """The model with its graphs turned on and traced functions called as they are; the shapes that were traced."""
    shapes = []
    monkeypatch.setattr(expert_matmul, "_GATHERED_PAIRS", 64)  # the reference asks the host for more pairs
    monkeypatch.setattr(compiled, "FIRST", (1,))  # an end behind an owner, and one between a source and its readers
    monkeypatch.setattr(compiled, "LAYERS", 1)
    monkeypatch.setattr(nano_wide, "compiled", True)
    monkeypatch.setattr(nano_wide, "_steps", CompiledSteps(nano_wide))
    monkeypatch.setattr(compiled.mx, "compile", lambda fn: shapes.append(fn.__name__) or fn)
    yield nano_wide, shapes
    monkeypatch.undo()


@pytest.mark.parametrize("made_there", [False, True])
@pytest.mark.parametrize("sizes", [[20, 1], [12, 6, 1, 5], [8]])
def test_graphs_give_the_bits_of_eager_steps(traced, sequence, sizes, made_there, monkeypatch):
    """Also where the device makes what follows from the position, and is sent tokens in pairs."""
    model, _ = traced
    monkeypatch.setattr(compiled, "launches", lambda: made_there)
    monkeypatch.setattr(step, "step_values", step_values_ref)
    logits, cache = run(model, sequence[:24], sizes)
    monkeypatch.setattr(model, "compiled", False)
    want, eager = run(model, sequence[:24], sizes)
    np.testing.assert_array_equal(np.array(logits), np.array(want))
    assert_same_state(cache, eager)


@pytest.mark.parametrize("way", ["eager", "packed", "made there"])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_tokens_of_the_host(traced, sequence, way, size, monkeypatch):
    """As a NumPy array, and as MLX's: the same bits, the same refusals."""
    model, _ = traced
    monkeypatch.setattr(model, "compiled", way != "eager")
    monkeypatch.setattr(compiled, "launches", lambda: way == "made there")
    monkeypatch.setattr(step, "step_values", step_values_ref)
    _, cache = run(model, sequence[:20], [20])
    tokens = np.array([sequence[20 : 20 + size]])
    given = (tokens, tokens.astype(np.uint16), mx.array(tokens))
    logits = [np.array(model(ids, cache.copy())) for ids in given]
    assert all(np.array_equal(logits[0], other) for other in logits[1:])
    bad = tokens.copy()
    bad[0, -1] = model.config.vocab_size
    if way != "eager":
        with pytest.raises(ValueError, match="outside the vocabulary"):
            model(bad, cache.copy())
    with pytest.raises(ValueError, match="batch, length"):
        model(tokens[0], cache.copy())


def test_one_graph_serves_many_positions(traced, sequence):
    """From 20 entries on, single steps differ in whether they complete a pair, and in nothing else."""
    model, shapes = traced
    _, cache = run(model, sequence[:26], [26])
    del shapes[:]
    run(model, sequence[26:], [1], cache)
    assert len(shapes) == 2 * len(compiled._parts(model))


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


def test_graphs_are_made_where_a_gpu_is_and_not_if_disabled(traced, sequence, monkeypatch):
    """Here the GPU is a claim: no family may launch, so that the graphs hold references."""
    model, shapes = traced
    monkeypatch.setattr(model, "compiled", None)
    monkeypatch.setattr(_switches, "_gpu", lambda: "cuda")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    logits = []
    for disabled, graphs in ((families(), len(compiled._parts(model))), ((*families(), "compiled_step"), 0)):
        monkeypatch.setenv("MLX_DS4_DISABLE", ",".join(disabled))
        _switches.reset_settings()
        del shapes[:]
        logits.append(np.array(run(model, sequence[:4], [4])[0]))
        assert len(shapes) == graphs
    monkeypatch.undo()
    _switches.reset_settings()
    np.testing.assert_array_equal(*logits)
    assert not model._compiles()  # a CPU: nothing to gain


@pytest.mark.parametrize("kind", ["right", "partly"])
def test_drafts_verified_by_graphs_give_the_serial_text(traced, sequence, kind, monkeypatch):
    """Six-row graphs, rewinds and one-row graphs take turns on one cache."""
    model, shapes = traced
    prompt = mx.array(sequence[:18])
    monkeypatch.setattr(model, "compiled", False)
    cache = model.make_cache()
    serial = [token for token, _ in generate_step(prompt, model, max_tokens=9, prompt_cache=cache)]
    monkeypatch.setattr(model, "compiled", True)
    drafter = drafters([*sequence[:18], *serial], vocab=model.config.vocab_size)[kind]
    drafted = model.make_cache()
    steps = speculative_step(prompt, model, drafter, max_tokens=9, prompt_cache=drafted, admission=Always())
    assert [token for token, *_ in steps] == serial
    assert drafter.proposals and shapes
    assert_same_state(drafted, cache)


@pytest.mark.parametrize("change", ["array", "module", "equal module", "setting", "layer", "last"])
def test_a_changed_model_is_traced_anew(traced, sequence, change, monkeypatch):
    """As far as it has changed: behind the first part one alone."""
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
    elif change == "equal module":  # as dicts, which modules are
        other = RMSNorm(model.config.hidden_size, 1.0)
        other.weight = model.norm.weight
        assert other == model.norm
        monkeypatch.setitem(model, "norm", other)
    elif change == "layer":
        monkeypatch.setitem(model, "layers", [*model.layers[:-1], model.layers[-2]])
    elif change == "last":
        monkeypatch.setitem(model.layers[-1].attn.wkv, "weight", model.layers[-2].attn.wkv.weight)
    else:
        monkeypatch.setattr(model.norm, "eps", 1.0)
    after = np.array(model(mx.array([sequence[20:21]]), cache.copy()))
    again = 1 if change == "last" else len(compiled._parts(model))
    assert len(shapes) == traced_once + again and not np.array_equal(before, after)


def test_what_is_not_counted_is_compared(traced, sequence, monkeypatch):
    """A module of another class, as a user may put into the model, and the list of layers."""
    model, shapes = traced
    other = nn.RMSNorm(model.config.hidden_size, model.norm.eps)
    other.weight = model.norm.weight
    monkeypatch.setitem(model, "norm", other)
    monkeypatch.setitem(model, "layers", list(model.layers))
    _, cache = run(model, sequence[:20], [20])
    token = mx.array([sequence[20:21]])
    logits = [np.array(model(token, cache.copy()))]
    for holder, key, value in ((other, "weight", other.weight * 2), (model.layers, -1, model.layers[-2])):
        counted, traced_before = Module.changes, len(shapes)
        holder[key] = value
        assert Module.changes == counted
        logits.append(np.array(model(token, cache.copy())))
        assert len(shapes) > traced_before and not np.array_equal(*logits[-2:])


def test_a_step_changes_nothing(traced, sequence):
    """Otherwise each would compare thousands of values with those of the one before."""
    model, _ = traced
    _, cache = run(model, sequence[:21], [20, 1])
    before = Module.changes
    run(model, sequence[21:29], [1, 6, 1], cache)
    assert Module.changes == before


@pytest.mark.parametrize("hashed", [False, True])
def test_only_engram_waits_for_a_sampled_token(hashed, monkeypatch):
    """Other ids are checked in any case; with Engram the host needs the number."""
    monkeypatch.setattr(compiled.mx, "compile", lambda fn: fn)
    model = random_model(cut_config(size="tiny", engram=hashed), "q2")
    model.compiled = True
    checked = []
    monkeypatch.setattr(model, "checked_ids", lambda ids: checked.append(ids.shape) or Model.checked_ids(model, ids))
    prompt = mx.array([3, 1, 4])
    tokens = {}
    for name, sampler in (("greedy", None), ("own", lambda logprobs: mx.argmax(logprobs, axis=-1))):
        del checked[:]
        tokens[name] = [token for token, _ in generate_step(prompt, model, max_tokens=3, sampler=sampler)]
        waited = hashed or sampler is not None
        assert checked == [(1, 3)] + 2 * waited * [(1, 1)]
    assert tokens["own"] == tokens["greedy"]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(mx.array([[model.config.vocab_size]]))


@pytest.mark.slow
def test_compiled_on_the_cpu(nano_k, monkeypatch):
    """Really compiled: MLX fuses operations there, so numbers may differ in the last place, tokens may not."""
    monkeypatch.setattr(expert_matmul, "_GATHERED_PAIRS", 64)
    ids = manifest("nano_k")["sequences"]["A"][:20]
    tokens = {}
    for on in (True, False):
        monkeypatch.setattr(nano_k, "compiled", on)
        cache = nano_k.make_cache()
        logits = nano_k(mx.array([ids]), cache)
        tokens[on] = []
        for _ in range(6):
            tokens[on].append(mx.argmax(logits[0, -1]).item())
            logits = nano_k(mx.array([[tokens[on][-1]]]), cache)
    assert tokens[True] == tokens[False]
    assert len(nano_k._steps._graphs) == 2 * len(compiled._parts(nano_k))  # a pair is completed, or not


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


def test_kernels_that_still_compile_hold_the_graphs_back(traced, sequence, monkeypatch):
    """Evaluated now, they would be compiled by MLX one after the other."""
    model, _ = traced
    starts = []
    _, cache = run(model, sequence[:20], [20])
    monkeypatch.setattr(compiled.mx, "async_eval", lambda *arrays: starts.append(arrays))
    for busy, count in ((False, len(compiled._parts(model)) - 1), (True, 0)):
        monkeypatch.setattr(compiled, "compiling", lambda busy=busy: busy)
        del starts[:]
        model(mx.array([sequence[20:21]]), cache.copy())
        assert len(starts) == count


def test_nothing_is_evaluated_while_its_kernels_compile(traced, sequence, monkeypatch):
    """In a prefill: neither a layer, nor the tiles of an indexer inside."""
    model, _ = traced

    class Pending:
        finished = False

        def done(self) -> bool:
            return self.finished

        def result(self) -> None:
            self.finished = True

    call, evaluate, evaluated = layer.Layer.__call__, mx.eval, []

    def begin(self, *arguments):
        _cuda_cache._turn.started.append(Pending())
        return call(self, *arguments)

    def watched(*arrays):
        asks = Path(sys._getframe(1).f_code.co_filename)
        if asks.parent.name == "model":  # references, which no kernel goes into, evaluate some of their own
            evaluated.append((asks.stem, _cuda_cache.compiling()))
        evaluate(*arrays)

    monkeypatch.setattr(layer.Layer, "__call__", begin)
    monkeypatch.setattr(indexer, "TILE_SCORES", 1)
    monkeypatch.setattr(model_file, "_EAGER_ROWS", 9)
    monkeypatch.setattr(mx, "eval", watched)
    model(mx.array([sequence]), model.make_cache())
    assert {asks for asks, _ in evaluated} == {"indexer", "model"}
    assert not any(busy for _, busy in evaluated)
