"""The small model with every kernel emulated generates the tokens that it generates with the references."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_ds4.custom_kernels._count import count_launches, count_primitives
from mlx_ds4.custom_kernels._kernel import all_kernels, emulator_missing
from mlx_ds4.custom_kernels._switches import use_kernels
from tests.golden_tools import golden, row_cosine, row_error

STEPS = 3
# Families that the emulated run must have gone through.
USED = {
    *("rms_norm", "fake_quant", "hyper_connection", "router", "expert_matmul", "quant_matmul"),
    *("topk", "index_score", "sparse_attention", "engram", "cache_entry", "compress", "shared_expert", "expand_matmul"),
}


def generate(model, ids: mx.array) -> tuple[list[int], mx.array]:
    """Greedy tokens after a prompt, and the logits of the prompt and of every step."""
    cache = model.make_cache()
    logits = [model(ids[None], cache)[0]]
    tokens = [mx.argmax(logits[-1][-1]).item()]
    for _ in range(STEPS):
        logits.append(model(mx.array([[tokens[-1]]]), cache)[0])
        tokens.append(mx.argmax(logits[-1][-1]).item())
    return tokens, mx.concatenate(logits)


@pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
def test_emulated_tokens_equal_the_reference(nano):
    ids = golden("nano", "e2e")["A17.ids"]
    with use_kernels("reference"):
        tokens, logits = generate(nano, ids)
    with use_kernels("emulate", checked=False), count_launches() as launches:
        emulated, other = generate(nano, ids)
    assert emulated == tokens == golden("nano", "e2e")["A17.decode_tokens"].tolist()[: STEPS + 1]
    assert row_error(other, logits) <= 0.25 and row_cosine(other, logits) >= 0.97  # class A, see the golden data
    assert {k.family for k in all_kernels() if launches[k.name]} >= USED


@pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
def test_a_pass_with_notes_has_the_bits_of_one_without(nano):
    """Five rows: to note a sublayer's result, its last product and the expansion are taken apart."""
    ids = golden("nano", "e2e")["A5.ids"][None]
    ends, layers = ("expand_project", "expand_experts", "hyper_connection_expand"), nano.config.num_hidden_layers
    with use_kernels("emulate", checked=False):
        with count_launches() as launches:
            logits = nano(ids, nano.make_cache())
        assert [launches[name] for name in ends] == [layers, layers, 0]
        with count_launches() as launches:
            trace = nano.trace(ids)
        assert [launches[name] for name in ends] == [0, 0, 2 * layers]
    assert mx.array_equal(trace["logits"].view(mx.uint8), logits.view(mx.uint8))
    assert {f"L0.{site}.{name}" for site in ("attn", "ffn") for name in ("x", "y", "pre", "post", "comb")} <= set(trace)


def test_kernels_save_launches(nano):
    """A decoding step, counted from the graph; the ceiling is what was reached, lower it with each new kernel."""
    ids = golden("nano", "e2e")["A17.ids"]
    counts = {}
    for mode in ("reference", "auto"):
        cache = nano.make_cache()
        with use_kernels("reference"):
            mx.eval(nano(ids[None], cache))
        with use_kernels(mode):
            counts[mode] = count_primitives(lambda cache=cache: nano(mx.array([[7]]), cache)).total()
    assert counts["auto"] < counts["reference"] / 3
    assert counts["auto"] <= 700
