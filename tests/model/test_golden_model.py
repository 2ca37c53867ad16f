"""The whole model against the reference: logits of every prompt at every position, and greedy tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.golden_tools import assert_equal, golden, manifest, rms_error, row_cosine, row_error

PROMPTS = ["nano-A1", "nano-B2", "nano-A5", "nano-B16", "nano-A17", "nano-B40", "nano-A97", "nano_k-A4", "nano_k-B33"]
# Class A limits, tests/golden/README.md section 5: largest rms, row error and smallest cosine.
LIMITS = {"nano": (0.15, 0.25, 0.97), "nano_k": (0.05, 0.05, 0.99)}


def assert_class_a(got, want, which):
    rms, row, cosine = LIMITS[which]
    assert rms_error(got, want) <= rms
    assert row_error(got, want) <= row
    assert row_cosine(got, want) >= cosine


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefill_and_decode(prompt, request):
    which, name = prompt.split("-")
    model, data = request.getfixturevalue(which), golden(which, "e2e")
    cache = model.make_cache()
    logits = model(data[f"{name}.ids"][None], cache)[0]
    assert logits.dtype == mx.float32
    assert_class_a(logits, data[f"{name}.logits"], which)
    assert_equal(mx.argmax(logits, axis=-1), mx.argmax(data[f"{name}.logits"], axis=-1))
    tokens = data[f"{name}.decode_tokens"][: 13 if name == "B16" else 5]
    assert mx.argmax(logits[-1]).item() == tokens[0].item()
    steps = []
    for index in range(tokens.size - 1):
        steps.append(model(tokens[index : index + 1][None], cache)[0])
        assert mx.argmax(steps[-1]).item() == tokens[index + 1].item()
    assert_class_a(mx.concatenate(steps), data[f"{name}.decode_logits"][: len(steps)], which)


@pytest.mark.parametrize("name", ["A1", "B2"])
def test_short_prompts_are_sharp(nano, name):
    """Before anything is compressed and with a window of a few rows, rounding noise has no room."""
    data = golden("nano", "e2e")
    assert row_error(nano(data[f"{name}.ids"][None])[0], data[f"{name}.logits"]) <= 0.002


def test_taps_and_final_state(nano):
    data = golden("nano", "layers")
    rows = data["prefill.L0.h_in"].shape[0]
    _, taps = nano.forward(data["ids"][None, :rows])
    assert len(taps) == len(nano.config.dspark_target_layer_ids)
    taps = mx.concatenate(taps, axis=-1)[0]
    assert row_error(taps, data["prefill.taps"].reshape(taps.shape)) <= 0.25


@pytest.mark.slow  # 7 s; every prompt decodes on in test_prefill_and_decode
def test_sequences_continue_themselves(nano):
    """Greedy decoding from one token reproduces the whole recorded sequence."""
    sequence = manifest("nano")["sequences"]["A"][:24]
    cache, token, out = nano.make_cache(), sequence[0], []
    for _ in sequence[1:]:
        token = mx.argmax(nano(mx.array([[token]]), cache)[0, -1]).item()
        out.append(token)
    assert out == sequence[1:]
    assert np.array_equal(cache.offset, len(sequence) - 1)
