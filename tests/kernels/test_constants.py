"""Constants of kernels under mx.compile: made once, from the host, wherever they are asked for first."""

from __future__ import annotations

import io

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_ds4.custom_kernels import topk
from mlx_ds4.custom_kernels._kernel import blank, floats
from mlx_ds4.custom_kernels._octet import numbers
from mlx_ds4.custom_kernels._random_planes import random_planes
from mlx_ds4.custom_kernels._switches import trace
from mlx_ds4.custom_kernels.engram import engram_embedding, engram_update
from mlx_ds4.custom_kernels.expand_matmul import experts_expand, project_expand
from mlx_ds4.custom_kernels.expert_matmul import expert_down, expert_swiglu
from mlx_ds4.custom_kernels.hyper_connection import SiteSums, coefficients, collapse, collapse_norm, expand, site
from mlx_ds4.custom_kernels.quant_matmul import quant_matmul, quant_matmul_group
from mlx_ds4.custom_kernels.rms_norm import rms_norm
from mlx_ds4.custom_kernels.router import route
from mlx_ds4.custom_kernels.shared_expert import shared_swiglu

MAKERS = [(floats, (1.5, 2.0)), (numbers, (3, 4)), (blank, (2, 4))]


@pytest.fixture(autouse=True)
def fresh():
    for maker, _ in MAKERS:
        maker.cache_clear()


def graph(*arrays: mx.array) -> str:
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue()


@pytest.mark.parametrize(("maker", "values"), MAKERS)
def test_a_constant_first_asked_for_while_tracing(maker, values):
    """It serves that function, another one and everyone else, and no function makes it again."""

    def function(x: mx.array) -> mx.array:
        return x + maker(*values).astype(mx.float32).sum()

    want = np.array(maker.__wrapped__(*values)).astype(np.float32).sum()
    first, second = mx.compile(function), mx.compile(lambda x: 2 * function(x))
    assert first(mx.zeros(3)).tolist() == [want] * 3
    assert second(mx.zeros(3)).tolist() == [2 * want] * 3
    assert function(mx.zeros(3)).tolist() == [want] * 3
    assert first(mx.zeros((1, 2))).tolist() == [[want] * 2]
    assert maker(*values) is maker(*values)
    assert "label" not in graph(maker(*values))  # no operation made it


def test_what_the_makers_avoid():
    """An array that an operation makes while tracing stays part of the function; one made from its inputs is lost."""
    kept = []

    def function(x: mx.array, make) -> mx.array:
        kept.append(make(x))
        return x.sum() + kept[-1].sum()

    zeros = mx.compile(lambda x: function(x, lambda _: mx.zeros(3)))
    mx.eval(zeros(mx.ones(3)))
    assert "Full" in graph(zeros(mx.ones(3)))
    mx.eval(mx.compile(lambda x: function(x, lambda x: 2 * x))(mx.ones(3)))
    with pytest.raises(RuntimeError, match="without a primitive"):
        mx.eval(kept[-1])


def calls():
    """(name, function, its inputs) of the ops that a step consists of, with weights as captured constants."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

    M, C, F, E, K = 4, 64, 64, 8, 2
    O = M * (M + 2)
    x, h, weight, pre = normal(2, C), normal(2, M, C), normal(C), normal(2, M, dtype=mx.float32)
    fn, base, scale = normal(O, M * C), normal(O, dtype=mx.float32), normal(3, dtype=mx.float32)
    q8, float_ = ("Q8_0", random_planes(rng, "Q8_0", F, C)), ("F16", random_planes(rng, "F16", E, C))
    experts, down = (("Q8_0", random_planes(rng, "Q8_0", E, *shape)) for shape in ((F, C), (C, F)))
    dots, mix, a = normal(2, 32, O + 1, dtype=mx.float32), normal(2, M + M * M, dtype=mx.float32), normal(2, K, F)
    chosen, weights = mx.array([[0, 1], [2, 3]], dtype=mx.int32), normal(2, K, dtype=mx.float32)
    records = mx.array(rng.integers(0, 100, (2, 3, 33), dtype=np.uint8))
    scores, visible = normal(1, 2, 600, dtype=mx.float32), mx.array([599, 600], dtype=mx.int32)
    steps = {"width": M * C, "iters": 20, "eps": 1e-6, "norm_eps": 1e-20}
    return [
        ("site", lambda *i: site(*i, fn, weight, norm_eps=1e-20), [h, pre]),
        ("coefficients", lambda dots: coefficients(SiteSums(dots, base, scale, **steps)), [dots]),
        ("expand", expand, [x, h, mix]),
        ("project_expand", lambda x, *i: project_expand(x, q8, *i), [x, h, mix]),
        ("experts_expand", lambda a, c, *i: experts_expand(a, down, c, (a[:, 0], q8), *i), [a, chosen, h, mix]),
        ("collapse", collapse, [h, pre]),
        ("collapse_norm", lambda *i: collapse_norm(*i, weight, 1e-20), [h, pre]),
        ("rms_norm", lambda x: rms_norm(x, weight, 1e-20), [x]),
        ("route", lambda z: route(z, mx.array(np.zeros(16, np.float32)), k=2, factor=1.5), [normal(2, 16)]),
        ("quant_matmul", lambda x: quant_matmul(x, *q8), [x]),
        ("quant_matmul_group", lambda x: quant_matmul_group(x, [q8, float_], out_dtype=[mx.bfloat16, mx.float32]), [x]),
        ("shared_swiglu", lambda x: shared_swiglu(x, q8, q8, x, float_, limit=1.0), [x]),
        ("expert_swiglu", lambda *i: expert_swiglu(*i, limit=1.0), [x, experts, experts, chosen, weights]),
        ("expert_down", lambda a, chosen: expert_down(a, down, chosen, (a[:, 0], q8)), [a, chosen]),
        ("engram_embedding", engram_embedding, [records]),
        ("engram_update", lambda h, kv: engram_update(h, kv, h[0], h[0], eps=1e-20), [h, normal(2, 5 * C)]),
        ("top_k", lambda s: topk.top_k(s, 8), [scores]),
        ("top_k_groups", lambda s: topk.top_k_groups(s, visible, 8, size=2), [scores]),
    ]


@pytest.mark.parametrize(("name", "op", "inputs"), calls(), ids=lambda value: value if isinstance(value, str) else "")
def test_ops_inside_a_compiled_function(name, op, inputs):
    """The launches are built within mx.compile, the constants first asked for there: nothing beside the kernels is left
    to run, and neither the next function nor an eager call meets what the first one left behind."""

    def build() -> list[str]:
        flat = [array for _, array in tree_flatten(inputs)]

        def call(*given: mx.array) -> list[mx.array]:
            left = iter(given)
            result = op(*tree_map(lambda _: next(left), inputs))
            return [result] if isinstance(result, mx.array) else list(result)

        return [graph(*fn(*flat)) for fn in (mx.compile(call), mx.compile(lambda *given: call(*given)), call)]

    for text in trace(build):
        assert "CustomKernel" in text
        assert not any(operation in text for operation in ("Full", "Arange", "Concatenate"))
