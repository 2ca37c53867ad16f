"""The rules of the race check: what orders two accesses, and what does not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.emulator import EmulatorError, available, launch, unavailable_reason
from tests.emulator.sample_kernels import Spec

pytestmark = pytest.mark.skipif(not available(), reason=unavailable_reason())

N = 128  # two threadgroups of two simdgroups
GROUP = "threadgroup_barrier(mem_flags::mem_threadgroup);"
DEVICE = "threadgroup_barrier(mem_flags::mem_device);"
SIMD = "simdgroup_barrier(mem_flags::mem_threadgroup);"
BEGIN = """
    threadgroup float t[64];
    threadgroup atomic_uint a[2];
    uint i = thread_position_in_grid.x;
    uint k = thread_index_in_threadgroup;
    device atomic_uint* oa = (device atomic_uint*)o;
"""


def run(statements: str, **options: Any) -> list[float]:
    spec = Spec("race_rule", ["x"], ["o"], BEGIN + statements)
    call = {"grid": (N, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(N,)], "output_dtypes": [mx.float32]}
    return launch(spec, [mx.arange(N).astype(mx.float32)], **call, **options)[0].tolist()


ADD = "atomic_fetch_add_explicit(&a[0], 1u, memory_order_relaxed);"
STORE = "atomic_store_explicit(&a[0], 0u, memory_order_relaxed);"
LOAD = "atomic_load_explicit(&a[0], memory_order_relaxed)"
RULES = {
    # Ordered.
    "own value without barrier": ("t[k] = x[i]; o[i] = t[k];", None),
    "barrier between write and read": (f"t[k] = x[i]; {GROUP} o[i] = t[63 - k];", None),
    "barrier between read and write": (f"t[k] = x[i]; {GROUP} float v = t[63 - k]; {GROUP} t[k] = v; o[i] = v;", None),
    "many readers of one place": (f"if (k == 0) t[0] = 1.0f; {GROUP} o[i] = t[0];", None),
    "simdgroup barrier within a simdgroup": (
        f"t[k] = x[i]; {SIMD} float v = t[k ^ 1]; {SIMD} t[k] = v; o[i] = t[k];",
        None,
    ),
    "a lane that read again after others were ordered": (
        f"t[k] = 1.0f; {GROUP} float v = t[k & ~1u]; {SIMD} if (k % 2 == 0) {{ v += t[k]; t[k] = v; }} o[i] = v;",
        None,
    ),
    "atomic updates together": (f"if (k == 0) {STORE} {GROUP} {ADD} {GROUP} o[i] = float({LOAD});", None),
    "loads beside updates": (f"if (k == 0) {STORE} {GROUP} {ADD} o[i] = float({LOAD} <= 64u);", None),
    "device barrier for device memory": (f"o[i] = x[i]; {DEVICE} float v = o[i ^ 33]; {DEVICE} o[i] = v;", None),
    "atomic updates by two threadgroups": (
        "atomic_fetch_add_explicit(&oa[k], 1u, memory_order_relaxed);",
        None,
    ),
    # Not ordered.
    "read of another lane's value": (f"t[k] = 0.0f; {GROUP} t[k] = x[i]; o[i] = t[k ^ 1];", "race"),
    "simd operation is no barrier": ("t[k] = simd_sum(x[i]); float v = simd_sum(1.0f); o[i] = t[k ^ 1] + v;", "race"),
    "simdgroup barrier between simdgroups": (f"t[k] = x[i]; {SIMD} o[i] = t[63 - k];", "uninitialised"),
    "simdgroup barrier between simdgroups, later": (
        f"t[k] = 0.0f; {GROUP} t[k] = x[i]; {SIMD} o[i] = t[63 - k];",
        "race",
    ),
    "write after another's read": (f"t[k] = x[i]; {GROUP} float v = t[63 - k]; t[k] = v; o[i] = v;", "race"),
    "write after two lanes' reads": (
        f"t[k] = 1.0f; {GROUP} float v = t[k & ~1u]; if (k % 2 == 0) t[k] = 2.0f; o[i] = v;",
        "race",
    ),
    "store beside updates": (f"if (k == 0) {STORE} {GROUP} if (k == 5) {STORE} {ADD} o[i] = 1.0f;", "race"),
    "plain read beside updates": (
        f"if (k == 0) {STORE} {GROUP} {ADD} threadgroup uint* p = (threadgroup uint*)a; o[i] = float(p[0]);",
        "race",
    ),
    "threadgroup barrier for device memory": (f"o[i] = x[i]; {GROUP} o[i] = o[i ^ 33];", "race"),
    "two threadgroups write": (f"o[k] = x[i]; {DEVICE} if (k == 0) o[N - 1 - i] = 0.0f;".replace("N", str(N)), "race"),
    "read of another threadgroup's value": ("o[i] = x[i]; if (i >= 64) o[i] += o[i - 64];", "race"),
    "write of what another threadgroup read": (
        "float v = i < 64 ? o[i + 64] : 0.0f; o[i] = v;",
        "race",
    ),
}


@pytest.mark.parametrize("what", RULES)
def test_rule(what):
    statements, kind = RULES[what]
    with_value = "another threadgroup" in what or "two threadgroups" in what
    options = {"init_value": 0.0} if with_value else {}
    if kind is None:
        first = run(statements, **options)
        assert first == run(statements, order="backward", **options)
    else:
        with pytest.raises(EmulatorError) as caught:
            run(statements, **options)
        assert caught.value.kind == kind, str(caught.value)
