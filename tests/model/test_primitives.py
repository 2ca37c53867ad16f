"""Every primitive of the model against the vendor's reference code (tests/golden/README.md, units)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels.compress import pool_pairs
from mlx_ds4.custom_kernels.engram import engram_gate
from mlx_ds4.custom_kernels.fake_quant import fake_quant_fp4, fake_quant_fp4_e4m3, fake_quant_fp8
from mlx_ds4.custom_kernels.hyper_connection import SiteSums, coefficients, collapse, expand, site, split_ref, unmix
from mlx_ds4.custom_kernels.index_score import index_scores
from mlx_ds4.custom_kernels.rms_norm import rms_norm
from mlx_ds4.custom_kernels.rope import rope, rope_frequencies, rope_table
from mlx_ds4.custom_kernels.router import route, router_scores
from mlx_ds4.custom_kernels.shared_expert import clamped_swiglu
from mlx_ds4.custom_kernels.sparse_attention import sparse_attention
from mlx_ds4.model.linear import BlockWeight, Linear
from tests.golden_tools import assert_close_to_largest, assert_equal, assert_one_ulp, golden, row_error

EPS = 1e-20


@pytest.fixture(scope="module")
def units():
    return golden("nano", "units")


def with_weight(layer: Linear, format: str, codes: mx.array, scales: mx.array) -> Linear:
    layer.weight = BlockWeight(format, {"codes": codes, "scales": scales})
    return layer


@pytest.mark.parametrize(
    ("function", "name"), [(fake_quant_fp8, "q8"), (fake_quant_fp4, "q4u"), (fake_quant_fp4_e4m3, "q4e")]
)
def test_fake_quantization_is_exact(units, function, name):
    got = np.array(function(units["fq.x"]).view(mx.uint16))
    np.testing.assert_array_equal(got, np.array(units[f"fq.{name}.y"].view(mx.uint16)))


def test_fake_quantization_of_the_specification():
    i = np.arange(32)
    x = mx.array(((-1.0) ** i * 0.37 * (i + 1)).astype(np.float32)).astype(mx.bfloat16)
    q8 = [0.375, -0.75, 1.125, -1.5, 1.875, -2.25, 2.5, -3, 3.25, -3.75, 4, -4.5, 5, -5, 5.5, -6]
    q4u = [0, -1, 1, -1, 2, -2, 3, -3, 3, -4, 4, -4, 4, -6, 6, -6, 6, -6, 8, -8, 8, -8, 8, -8, 8, -8, 8, -12]
    q4e = [0.5, -0.5, 1, -1.5, 2, -2, 3, -3, 3, -4, 4, -4, 4, -6, 6, -6]
    assert fake_quant_fp8(x).tolist()[:16] == q8
    assert fake_quant_fp4(x).tolist()[:28] == q4u
    assert fake_quant_fp4_e4m3(x).tolist()[:16] == q4e


def test_fake_quantization_refuses_partial_blocks():
    with pytest.raises(ValueError, match="width 40"):
        fake_quant_fp8(mx.zeros((2, 40)))


@pytest.mark.parametrize("width", ["128", "5120"])
def test_rms_norm(units, width):
    got = rms_norm(units[f"rms{width}.x"], units[f"rms{width}.w"], EPS)
    assert_one_ulp(got, units[f"rms{width}.y"])


@pytest.mark.parametrize("kind", ["plain", "compressed"])
def test_rotation_at_the_released_tables(units, kind):
    yarn = {} if kind == "plain" else {"factor": 16.0, "original_length": 65536}
    frequencies = rope_frequencies(64, 10000 if kind == "plain" else 160000, **yarn)
    assert_equal(mx.array(frequencies), units[f"rope.{kind}.freqs"])
    turn = rope_table(np.array(units[f"rope.{kind}.pos"]), frequencies)
    for got, name in zip(turn, ("cos", "sin"), strict=True):
        assert np.abs(np.array(got - units[f"rope.{kind}.{name}"])).max() < 1.2e-7
    x = units[f"rope.{kind}.x"][None]
    assert_one_ulp(rope(x, *turn)[0], units[f"rope.{kind}.y"])
    assert_one_ulp(rope(x, *turn, inverse=True)[0], units[f"rope.{kind}.y_inv"])


def test_sinkhorn(units):
    got = split_ref(units["sinkhorn.m"], units["sinkhorn.base"], units["sinkhorn.scale"], streams=4, iters=20, eps=1e-6)
    for value, name in zip(got, ("pre", "post", "comb"), strict=True):
        assert_close_to_largest(value, units[f"sinkhorn.{name}"])


def test_hyper_connection(units):
    h, pre = units["hc.h"], units["hc.pre"]
    x, dots = site(h, pre, units["hc.fn"], mx.ones(h.shape[-1]), norm_eps=EPS)
    assert_one_ulp(x, rms_norm(units["hc.collapsed"], mx.ones(h.shape[-1]), EPS))
    options = {"width": h.shape[-2] * h.shape[-1], "iters": 20, "eps": 1e-6, "norm_eps": EPS}
    after, mix = coefficients(SiteSums(dots, units["hc.base"], units["hc.scale"], **options))
    for value, name in zip((after, *unmix(mix, 4)), ("pre", "post", "comb"), strict=True):
        assert_close_to_largest(value, units[f"hc.{name}"])
    assert_one_ulp(collapse(h, pre), units["hc.collapsed"])
    for some in (mix, mx.concatenate([units["hc.post"], units["hc.comb"].flatten(-2)], axis=-1)):
        assert_one_ulp(expand(units["hc.y"], h, some), units["hc.expanded"])


def test_router(units):
    assert_close_to_largest(router_scores(units["router.z"]), units["router.s"])
    scores = np.array(router_scores(units["router.z"]))
    want = np.array(units["router.s"])
    np.testing.assert_allclose(scores[want > 1e-15], want[want > 1e-15], rtol=1e-5)  # tiny scores count too
    logits = units["router.x"].astype(mx.float32) @ units["router.w"].astype(mx.float32).T
    assert_close_to_largest(logits, units["router.logits"])
    chosen, weights = route(logits, units["router.bias"], k=3, factor=1.5)
    order = mx.argsort(units["router.experts"], axis=-1)
    assert_equal(chosen, mx.take_along_axis(units["router.experts"], order, axis=-1))
    assert_close_to_largest(weights, mx.take_along_axis(units["router.weights"], order, axis=-1))


def test_fp8_linear_with_a_partial_tile(units):
    layer = with_weight(Linear(160, 80, trained=True), "FP8", units["lin8.codes"], units["lin8.scale"])
    assert layer.rounds_input
    assert_one_ulp(layer(units["lin8.x"]), units["lin8.y"])


def test_fp4_linear(units):
    layer = with_weight(Linear(160, 48, trained=True), "MXFP4", units["lin4.packed"], units["lin4.scale"])
    assert_one_ulp(layer(units["lin8.x"]), units["lin4.y"])


@pytest.mark.parametrize("limit", [2, 10])
def test_clamped_swiglu(units, limit):
    names = [f"swiglu{limit}.{part}" for part in ("gate", "up", "weight", "y")]
    gate, up, weight, want = (units[name] for name in names)
    assert_one_ulp(clamped_swiglu(gate, up, float(limit), weight), want)


@pytest.mark.parametrize("weighted", [True, False])
def test_one_expert(units, weighted):
    w = {}
    for name, shape in (("w1", (128, 64)), ("w3", (128, 64)), ("w2", (64, 128))):
        packed, scale = units[f"expert.{name}.packed"], units[f"expert.{name}.scale"]
        w[name] = with_weight(Linear(*shape, trained=True), "MXFP4", packed, scale)
    x = units["expert.x"]
    weight = units["expert.weight"] if weighted else None
    got = w["w2"](clamped_swiglu(w["w1"](x), w["w3"](x), 2.0, weight))
    assert_one_ulp(got, units["expert.y" if weighted else "expert.y_unweighted"])


def test_sparse_attention(units):
    q, rows, lists = units["attn.q"][None], units["attn.kv"][None], units["attn.idx"][None]
    got = sparse_attention(q, [(rows, lists)], units["attn.sink"], scale=1 / 8)[0]
    filled = mx.array([0, 1, 2, 3])
    assert row_error(got[filled], units["attn.o"][filled]) <= 0.004
    assert not got[4].any()  # an empty list gives zeros


def test_pair_pooling(units):
    pooled = pool_pairs(units["pool.a"][:8], units["pool.g"][:8])
    assert_one_ulp(pooled, units["pool.u"])
    assert_one_ulp(rms_norm(pooled, units["pool.norm"], EPS), units["pool.latent"])


def test_index_scores(units):
    q, weights, keys = (units[f"iscore.{part}"][None] for part in ("q", "w", "k"))
    assert_close_to_largest(index_scores(q, weights, keys)[0], units["iscore.f32"])
    assert_equal(index_scores(q, weights, keys, bf16=True)[0].astype(mx.bfloat16), units["iscore.bf16"])


def test_engram_gate(units):
    assert_close_to_largest(engram_gate(units["gate.dot"]), units["gate.g"])
    assert engram_gate(mx.array([0.0, -0.0])).tolist() == pytest.approx([0.50025, 0.49975], abs=1e-6)
