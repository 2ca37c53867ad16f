"""The golden model from a GGUF that holds its values exactly: the same class A limits and the same tokens."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_ds4.convert.to_gguf import official_to_gguf
from mlx_ds4.loader import load_model
from tests.golden_tools import GOLDEN, assert_equal, golden, rms_error, row_cosine, row_error


@pytest.fixture(scope="module", params=["f32", "f16"])
def from_gguf(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / f"nano-{request.param}.gguf"
    official_to_gguf(GOLDEN / "nano" / "model", path, request.param)
    return load_model(path, activation_rounding=True)[0]


@pytest.mark.parametrize("name", ["A5", "B40"])
def test_logits_and_tokens(from_gguf, name):
    data = golden("nano", "e2e")
    cache = from_gguf.make_cache()
    logits = from_gguf(data[f"{name}.ids"][None], cache)[0]
    assert rms_error(logits, data[f"{name}.logits"]) <= 0.15
    assert row_error(logits, data[f"{name}.logits"]) <= 0.25
    assert row_cosine(logits, data[f"{name}.logits"]) >= 0.97
    assert_equal(mx.argmax(logits, axis=-1), mx.argmax(data[f"{name}.logits"], axis=-1))
    tokens = data[f"{name}.decode_tokens"].tolist()[:5]
    got = [mx.argmax(logits[-1]).item()]
    for token in tokens[:-1]:
        got.append(mx.argmax(from_gguf(mx.array([[token]]), cache)[0, -1]).item())
    assert got == tokens
