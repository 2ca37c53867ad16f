"""The machine that is emulated: grids, atomics, matrices, number formats, strides, statistics, wrong calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import EmulatorError, available, last_stats, launch, unavailable_reason
from tests.emulator.sample_kernels import Spec, sample

pytestmark = pytest.mark.skipif(not available(), reason=unavailable_reason())
RNG = np.random.default_rng(5)


def run(spec: Spec, inputs: list[Any], shape: tuple[int, ...], grid: tuple[int, int, int], **options: Any) -> mx.array:
    options = {"threadgroup": (64, 1, 1), "output_dtypes": [mx.float32], **options}
    (out,) = launch(spec, inputs, grid=grid, output_shapes=[shape], **options)
    return out


def test_threadgroups_at_the_edge_are_smaller():
    spec = Spec(
        "positions",
        ["x"],
        ["o"],
        """
        uint3 p = thread_position_in_grid;
        uint3 n = threads_per_threadgroup;
        uint3 full = dispatch_threads_per_threadgroup;
        uint at = ((p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x) * 8;
        o[at] = float(n.x);
        o[at + 1] = float(n.y);
        o[at + 2] = float(n.z);
        o[at + 3] = float(thread_index_in_threadgroup);
        o[at + 4] = float(simdgroups_per_threadgroup);
        o[at + 5] = float(full.x * full.y * full.z);
        o[at + 6] = float(thread_index_in_simdgroup + 32 * simdgroup_index_in_threadgroup);
        o[at + 7] = float(threadgroup_position_in_grid.x + 10 * threadgroup_position_in_grid.y);
        """,
    )
    out = np.array(run(spec, [mx.zeros(8)], (2, 3, 10, 8), (10, 3, 2), threadgroup=(8, 2, 4)))
    # The group is first cut to the grid (z: 2), then smaller ones stand at the ends of x (8 + 2) and y (2 + 1).
    for z, y, x in np.ndindex(2, 3, 10):
        n = (8 if x < 8 else 2, 2 if y < 2 else 1, 2)
        index = (z * n[1] + y % 2) * n[0] + x % 8
        want = [*n, index, -(-n[0] * n[1] * n[2] // 32), 32, index, x // 8 + 10 * (y // 2)]
        assert out[z, y, x].tolist() == want


def test_atomic_outputs_init_value_and_scalar_input():
    spec = Spec(
        "histogram",
        ["x", "scale"],
        ["h"],
        """
        uint2 p = thread_position_in_grid.xy;
        uint bin = uint(x[p.y * uint(x_shape[1]) + p.x] * scale);
        atomic_fetch_add_explicit(&h[bin], 1u, memory_order_relaxed);
        """,
        atomic_outputs=True,
    )
    x = RNG.random((33, 70), dtype=np.float32)
    got = run(
        spec, [mx.array(x), 10.0], (10,), (70, 33, 1), threadgroup=(16, 8, 1), output_dtypes=[mx.uint32], init_value=0
    )
    assert np.array_equal(np.array(got), np.bincount((x * np.float32(10)).astype(int).ravel(), minlength=10))


def test_atomic_functions():
    spec = Spec(
        "atomics",
        ["x"],
        ["o"],
        """
        threadgroup atomic_int least[1];
        threadgroup atomic_uint bits[3];
        uint i = thread_position_in_grid.x;
        if (i == 0) {
            atomic_store_explicit(&least[0], 1000, memory_order_relaxed);
            for (uint k = 0; k < 3; k++) atomic_store_explicit(&bits[k], k == 1u ? ~0u : 0u, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_min_explicit(&least[0], int(x[i]) - 7, memory_order_relaxed);
        atomic_fetch_or_explicit(&bits[0], 1u << (i % 32), memory_order_relaxed);
        atomic_fetch_and_explicit(&bits[1], ~(1u << (i % 8)), memory_order_relaxed);
        uint expected = 0;
        const memory_order relaxed = memory_order_relaxed;
        if (atomic_compare_exchange_weak_explicit(&bits[2], &expected, i + 1, relaxed, relaxed)) expected = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint winner = atomic_load_explicit(&bits[2], memory_order_relaxed);
        bool fits = i + 1 == winner ? expected == 0 : expected == winner;
        o[i] = float(atomic_load_explicit(&least[0], memory_order_relaxed))
             + (atomic_load_explicit(&bits[0], memory_order_relaxed) == ~0u ? 100.0f : 0.0f)
             + (atomic_load_explicit(&bits[1], memory_order_relaxed) == 0xffffff00u ? 1000.0f : 0.0f)
             + (fits ? 10000.0f : 0.0f);
        """,
    )
    for order in ("forward", "random"):
        out = run(spec, [mx.arange(64).astype(mx.float32)], (64,), (64, 1, 1), order=order)
        assert np.array_equal(np.array(out), np.full(64, 11093.0))


def test_float_atomics():
    spec = Spec(
        "float_sum",
        ["x"],
        ["h"],
        "atomic_fetch_add_explicit(&h[0], x[thread_position_in_grid.x], memory_order_relaxed);",
        atomic_outputs=True,
    )
    x = RNG.integers(-9, 9, 300).astype(np.float32)
    assert run(spec, [mx.array(x)], (1,), (300, 1, 1), init_value=0.5).item() == x.sum() + 0.5


@pytest.mark.parametrize("kind", ["half", "bfloat", "float"])
def test_matrices(kind):
    dtype = {"half": mx.float16, "bfloat": mx.bfloat16, "float": mx.float32}[kind]
    spec = Spec(
        "matrix",
        ["a", "b"],
        ["o"],
        f"""
        simdgroup_{kind}8x8 left, right;
        simdgroup_float8x8 sum(2.0f);
        simdgroup_load(left, a, 8);
        simdgroup_load(right, b, 8, 0, true);
        simdgroup_multiply_accumulate(sum, left, right, sum);
        sum.thread_elements()[1] += 1.0f;
        uint row = thread_index_in_simdgroup;
        simdgroup_store(sum, o, 8);
        """,
    )
    a, b = (mx.array(RNG.integers(-8, 8, (8, 8)).astype(np.float32)) for _ in range(2))
    got = run(spec, [a.astype(dtype), b.astype(dtype)], (8, 8), (32, 1, 1), threadgroup=(32, 1, 1))
    want = np.array(a) @ np.array(b).T + 2 * np.eye(8) + np.arange(8) % 2
    assert np.array_equal(np.array(got), want)


def test_half_and_bfloat_round_to_nearest_even():
    spec = Spec(
        "rounding", ["x"], ["h", "b"], "uint i = thread_position_in_grid.x; h[i] = half(x[i]); b[i] = bfloat(x[i]);"
    )
    x = np.concatenate(
        [RNG.standard_normal(500) * 10.0 ** RNG.integers(-6, 5, 500), [1 + 2**-8, 1 + 3 * 2**-8, 1e-7, 0, -0.0]]
    )
    x = mx.array(x.astype(np.float32))
    n = x.size
    h, b = launch(
        spec,
        [x],
        grid=(n, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(n,)] * 2,
        output_dtypes=[mx.float16, mx.bfloat16],
    )
    assert (h.dtype, b.dtype) == (mx.float16, mx.bfloat16)
    assert mx.array_equal(h.view(mx.uint16), x.astype(mx.float16).view(mx.uint16))  # half denormals are kept
    assert mx.array_equal(b.view(mx.uint16), x.astype(mx.bfloat16).view(mx.uint16))


def test_every_dtype_goes_through():
    spec = Spec("copy", ["x"], ["o"], "uint i = thread_position_in_grid.x; o[i] = x[i];")
    for dtype in (mx.bool_, mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int64, mx.uint64, mx.bfloat16):
        x = mx.array(RNG.integers(0, 2, 40)).astype(dtype)
        out = run(spec, [x], (40,), (40, 1, 1), output_dtypes=[dtype], checked=False)
        assert out.dtype == dtype and mx.array_equal(out, x)


def test_denormals():
    spec = Spec("double_it", ["x"], ["o"], "uint i = thread_position_in_grid.x; o[i] = x[i] + x[i];")
    x = mx.array([1e-40, 1e-38, 2.0, 0.0] * 3)
    assert run(spec, [x], (12,), (12, 1, 1)).tolist() == [0.0, 0.0, 4.0, 0.0] * 3
    assert mx.array_equal(run(spec, [x], (12,), (12, 1, 1), flush_denormals=False), 2 * x)
    assert (np.float32(1e-40) * np.float32(1)) != 0  # the mode of this process is as before


def test_fused_multiply_add():
    spec = Spec("fma", ["x"], ["o"], "uint i = thread_position_in_grid.x; o[i] = x[i] * x[i] - 1.0f;")
    x = np.full(8, 1 + 2**-12, np.float32)
    exact = float(x[0]) ** 2 - 1
    assert run(spec, [mx.array(x)], (8,), (8, 1, 1), fast_fma=True)[0].item() == np.float32(exact)
    assert run(spec, [mx.array(x)], (8,), (8, 1, 1))[0].item() == np.float32(np.float32(x[0] * x[0]) - 1)


@pytest.mark.parametrize("checked", [True, False])
def test_strides(checked):
    source = "uint i = thread_position_in_grid.x; o[i] = x[elem_to_loc(long(i), x_shape, x_strides, x_ndim)];"
    raw = Spec("strides", ["x"], ["o"], source, ensure_row_contiguous=False)
    copied = replace(raw, ensure_row_contiguous=True)
    x = mx.arange(60).reshape(5, 12).astype(mx.float32)
    for view in (x.T, x[1:4, ::3], x[:, ::-2], mx.broadcast_to(x[0], (3, 12)), x[2:, 3:].astype(mx.bfloat16).T):
        for spec in (raw, copied):
            out = run(spec, [view], (view.size,), (view.size, 1, 1), checked=checked)
            assert mx.array_equal(out.reshape(view.shape), view.astype(mx.float32))


def test_small_inputs_are_in_constant_memory():
    """As MLX writes it: fewer than 8 elements `constant`, more `device`."""
    header = (
        "inline float of(const device float*) { return 1.0f; }\n"
        "inline float of(const constant float*) { return 2.0f; }\n"
    )
    spec = Spec("spaces", ["x"], ["o"], "o[thread_position_in_grid.x] = of(x);", header)
    assert run(spec, [mx.zeros(8)], (1,), (1, 1, 1)).item() == 1
    assert run(spec, [mx.zeros(7)], (1,), (1, 1, 1)).item() == 2


def test_statistics():
    sample("rms_norm").run()
    stats = last_stats()
    assert stats.barriers == 5 and stats.simd_operations == 5 * 256 * 2 and stats.threadgroup_bytes == 128
    assert stats.accesses > 2 * 5 * 1500
    assert stats.buffers["weight"].read == 5 * 6000 and stats.buffers["weight"].distinct_read == 6000
    assert stats.buffers["out"].written == 30000 and set(stats.buffers) == {"x", "weight", "eps", "out"}
    sample("rms_norm").run(checked=False)
    assert last_stats().buffers == {} and last_stats().accesses == 0


WRONG_CALLS = {
    "an input missing": {"inputs": []},
    "a list for an input": {"inputs": [[1.0]]},
    "complex input": {"inputs": [mx.zeros(8, dtype=mx.complex64)]},
    "grid of zero": {"grid": (0, 1, 1)},
    "grid of two numbers": {"grid": (1, 1)},
    "threadgroup of zero": {"threadgroup": (32, 0, 1)},
    "no output shape": {"output_shapes": []},
    "negative shape": {"output_shapes": [(-1,)]},
    "unknown order": {"order": "sideways"},
    "unknown standard": {"std": "c++98"},
    "template of floats": {"template": [("T", 0.5)]},
}


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_wrong_calls(what):
    call = {
        "inputs": [mx.zeros(8)],
        "grid": (8, 1, 1),
        "threadgroup": (8, 1, 1),
        "output_shapes": [(8,)],
        "output_dtypes": [mx.float32],
    }
    spec = Spec("copy", ["x"], ["o"], "uint i = thread_position_in_grid.x; o[i] = x[i];")
    with pytest.raises(EmulatorError) as caught:
        call = {**call, **WRONG_CALLS[what]}
        launch(spec, call.pop("inputs"), **call)
    assert caught.value.kind == "arguments"


def test_limits():
    spec = Spec("copy", ["x"], ["o"], "uint i = thread_position_in_grid.x; o[i] = x[i];")
    with pytest.raises(EmulatorError, match="64 MiB"):
        run(spec, [mx.zeros(8)], (1 << 25,), (8, 1, 1))
    many = Spec("many", [f"x{i}" for i in range(31)], ["o"], "o[thread_position_in_grid.x] = x0[0];")
    with pytest.raises(EmulatorError, match="32 buffers"):
        run(many, [mx.zeros(8)] * 31, (8,), (8, 1, 1))
