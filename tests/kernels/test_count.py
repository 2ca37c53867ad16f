"""Launch counts."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest

from mlx_ds4.custom_kernels._count import count_launches, count_primitives, format_table
from mlx_ds4.custom_kernels._switches import disable, trace, use_kernels
from mlx_ds4.custom_kernels.rms_norm import rms_norm

X = mx.ones((4, 64))
W = mx.ones((64,))
mx.eval(X, W)


def norm(x):
    return rms_norm(x, W, 1e-6)


def test_launches_by_name():
    with count_launches() as counter:
        trace(lambda: norm(norm(X)))
        with count_launches() as inner:
            trace(lambda: norm(X))
    trace(lambda: norm(X))  # no longer watched
    assert counter == {"rms_norm": 3}
    assert inner == {"rms_norm": 1}


def test_references_launch_nothing_of_ours():
    with use_kernels("reference"), count_launches() as counter:
        norm(X)
    assert not counter


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x + 1, {"Add": 1}),
        (lambda x: x.T.reshape(-1)[2:][None], {}),
        (lambda x: mx.exp(x) * mx.exp(x), {"Exp": 2, "Multiply": 1}),
        (lambda x: (x @ x.T).astype(mx.float16), {"Matmul": 1, "AsType": 1}),
        (lambda x: x.astype(mx.float32), {}),
        (lambda x: mx.concatenate([x, x, x], axis=0), {"Concatenate": 3}),
        (lambda x: mx.softmax(x, axis=-1), {"Softmax": 1}),
        (lambda x: mx.contiguous(x.T), {"Contiguous": 1}),
        (lambda x: mx.compile(lambda y: mx.exp(y) + 1)(x), {"CompiledExpBroadcastAdd": 1}),
        (lambda x: mx.pad(x, 1), {"Pad": 2}),
        (lambda x: x.view(mx.uint8), {}),
        (lambda x: x.at[mx.array([1])].add(x[:1]), {"Scatter": 2}),
        (lambda x: [x + 1, {"a": (x * 2, None)}], {"Add": 1, "Multiply": 1}),
        (norm, {"rms_norm": 1}),
        (lambda x: norm(norm(x) + x), {"rms_norm": 2, "Add": 1}),
        (lambda x: (norm(x), x + 1)[1], {"Add": 1}),  # nothing returned depends on the norm
        (lambda x: x, {}),
    ],
)
def test_primitives(fn, expected):
    assert count_primitives(fn, X) == expected


def test_primitives_of_the_reference():
    with disable("rms_norm"):
        counter = count_primitives(norm, X)
    assert "rms_norm" not in counter
    assert counter.total() >= 6  # square, mean, add, rsqrt, two products


def test_counting_computes_nothing():
    with pytest.raises(RuntimeError):
        count_primitives(lambda x: mx.eval(norm(x)), X)


def test_table():
    rows = [("window", 2, Counter(rms_norm=2, Matmul=3)), ("compressed", 38, Counter(topk=1))]
    assert format_table(rows) == "\n".join(
        [
            "kind        count  custom  MLX  launches each  launches per token",
            "window          2       2    3              5                  10",
            "compressed     38       1    0              1                  38",
            "token                  42    6                                 48",
        ]
    )
    assert format_table([]).splitlines()[1].split() == ["token", "0", "0", "0"]
