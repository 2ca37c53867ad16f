"""Bugs planted in working kernels: each must be reported, as what it is and at its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import EmulatorError, available, unavailable_reason
from tests.emulator.sample_kernels import Sample, sample

pytestmark = pytest.mark.skipif(not available(), reason=unavailable_reason())

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SUM = "squares = simd_sum(squares);"
OUT = "out[first + i] ="
COUNT = "atomic_fetch_add_explicit(&counts[(key >> shift) & 255u], 1u, memory_order_relaxed)"


@dataclass(frozen=True)
class Bug:
    """`edits` are made in the kernel's text; `line` is a part of the line to be blamed ("" where none can be)."""

    what: str
    kernel: str
    kind: str
    line: str
    edits: tuple[tuple[str, str], ...] = ()
    change: Callable[[Sample], Sample] = lambda s: s


def _with_header(text: str) -> Callable[[Sample], Sample]:
    return lambda s: replace(s, spec=replace(s.spec, header=text + s.spec.header))


def _call(**changes: Any) -> Callable[[Sample], Sample]:
    return lambda s: replace(s, **changes)


BUGS = [
    # Barriers and simd operations.
    Bug("barrier missing", "rms_norm", "uninitialised", "partial[lane]", ((BARRIER, ""),)),
    Bug("barrier with mem_none", "rms_norm", "race", "partial[lane]", (("::mem_threadgroup", "::mem_none"),)),
    Bug("barrier for other memory", "rms_norm", "race", "partial[lane]", (("::mem_threadgroup", "::mem_device"),)),
    Bug("barrier in some simdgroups", "rms_norm", "race", "partial[lane]", ((BARRIER, "if (tid < 64) " + BARRIER),)),
    Bug("barrier in some lanes", "rms_norm", "divergence", "lane < 16", ((BARRIER, "if (lane < 16) " + BARRIER),)),
    Bug("return before barrier", "rms_norm", "divergence", BARRIER, ((SUM, SUM + " if (tid >= 224) return;"),)),
    Bug("simd_sum in some lanes", "rms_norm", "divergence", "lane < 16", ((SUM, "if (lane < 16) " + SUM),)),
    Bug(
        "simd_sum at two places",
        "rms_norm",
        "divergence",
        "else",
        ((SUM, f"if (lane < 16) {SUM} else squares = simd_sum(squares * 2.0f);"),),
    ),
    Bug(
        "simd_sum after lanes returned",
        "q8_vector",
        "divergence",
        "return",
        (("float s =", "if (lane == 31) return; float s ="),),
    ),
    Bug(
        "shuffle from beyond the simdgroup",
        "iq2_vector",
        "inactive-lane",
        "simd_shuffle",
        (("sum = simd_sum(sum)", "sum = simd_shuffle(sum, ushort(lane + 1))"),),
    ),
    Bug(
        "matrix operation in half a simdgroup",
        "q8_matrix",
        "divergence",
        "simdgroup_multiply_accumulate",
        (("simdgroup_multiply_accumulate", "if (tid % 32 < 16) simdgroup_multiply_accumulate"),),
    ),
    Bug("barrier lost after zeroing", "top_k", "uninitialised", COUNT, ((BARRIER + "  // zeroed", ""),)),
    Bug("barrier lost before reading counts", "top_k", "race", "sums[s]", ((BARRIER + "  // summed", ""),)),
    Bug("barrier lost at the end of a stripe", "top_k", "race", "sums[sg]", ((BARRIER + "  // stripe done", ""),)),
    Bug(
        "barrier lost at the end of a loop",
        "q8_matrix",
        "race",
        "xs[i] =",
        (("left, right, acc);\n        }\n        " + BARRIER, "left, right, acc);\n        }"),),
    ),
    # Memory.
    Bug(
        "read past an input",
        "rms_norm",
        "out-of-bounds",
        "float v",
        (("float(x[first + i]);", "float(x[first + uint(D) + i]);"),),
    ),
    Bug("write past an output", "rms_norm", "out-of-bounds", OUT[:3], ((OUT, "out[first + uint(D) + i] ="),)),
    Bug("write before an output", "rms_norm", "out-of-bounds", OUT[:3], ((OUT, "(out - 1)[first + i] ="),)),
    Bug(
        "threadgroup index past the array",
        "rms_norm",
        "out-of-bounds",
        "sg + 30",
        (("partial[sg] =", "partial[sg + 30] ="),),
    ),
    Bug("local array index", "q8_vector", "out-of-bounds", "r + 1", (("simd_sum(sums[r])", "simd_sum(sums[r + 1])"),)),
    Bug(
        "matrix load past its tile",
        "q8_matrix",
        "out-of-bounds",
        "simdgroup_load(right",
        (("ws + sg * 8 * 32 + c, 32,", "ws + sg * 8 * 32 + c, 64,"),),
    ),
    Bug(
        "no check of the last rows",
        "q8_vector",
        "out-of-bounds",
        "b->q[",
        (("if (first + r < uint(M)) sums", "sums"), ("lane == 0 && first + r < uint(M)", "lane == 0")),
    ),
    Bug(
        "uninitialised threadgroup memory",
        "rms_norm",
        "uninitialised",
        "partial[lane]",
        (("lane < simdgroups_per_threadgroup ? partial[lane] : 0.0f", "partial[lane]"),),
    ),
    Bug("output read", "rms_norm", "uninitialised", OUT, ((OUT, OUT + " out[first] * T(0.0f) +"),)),
    Bug(
        "output not all written",
        "rms_norm",
        "unwritten",
        "",
        (("i < uint(D); i += step)\n        out", "i < uint(D) - 1; i += step)\n        out"),),
    ),
    Bug("two threads write one element", "rms_norm", "race", "i / 2", ((OUT, "out[first + i / 2] ="),)),
    Bug("two threadgroups write one element", "rms_norm", "race", "out[i]", ((OUT, "out[i] ="),)),
    Bug("simdgroups share a tile", "q8_matrix", "race", "simdgroup_store", (("xs + sg * 64", "xs"),)),
    Bug(
        "counts without atomics",
        "top_k",
        "race",
        "+= 1u",
        (
            ("threadgroup atomic_uint counts", "threadgroup uint counts"),
            ("atomic_store_explicit(&counts[tid], 0u, memory_order_relaxed)", "counts[tid] = 0u"),
            (COUNT, "counts[(key >> shift) & 255u] += 1u"),
            ("atomic_load_explicit(&counts[bin], memory_order_relaxed)", "counts[bin]"),
        ),
    ),
    Bug(
        "write to an input",
        "rms_norm",
        "compile",
        "x[first]",
        (("squares += v * v;", "squares += v * v; x[first] = 0.0f;"),),
    ),
    Bug(
        "write to an input through a cast",
        "rms_norm",
        "read-only",
        "(device float*)",
        (("squares += v * v;", "squares += v * v; ((device float*)x)[first] = 0.0f;"),),
    ),
    Bug(
        "misaligned word",
        "q8_vector",
        "misaligned",
        "uint*",
        (("float sum = 0.0f;", "float sum = float(*(const device uint*)(b->q + 8 * part) >> 31) * 1e-9f;"),),
    ),
    # Arithmetic.
    Bug("shift by 32", "q8_vector", "undefined", "1u <<", (("lane == 0 &&", "(1u << (lane + 1)) == 2u &&"),)),
    Bug("division by zero", "q8_vector", "undefined", "/ lane", (("lane == 0 &&", "7u / lane < 9u && lane == 0 &&"),)),
    Bug(
        "float to integer out of range",
        "rms_norm",
        "undefined",
        "uint(",
        (("float scale =", "if (uint(-1.0f - total) == 3u) return; float scale ="),),
    ),
    # The language.
    Bug("double", "rms_norm", "refused", "double", (("float squares", "double squares"),)),
    Bug(
        "ambiguous min",
        "rms_norm",
        "compile",
        "metal::min",
        (("squares += v * v;", "squares += v * v * float(metal::min(tid, 1));"),),
    ),
    Bug(
        "float vector to half vector",
        "rms_norm",
        "compile",
        "half4",
        ((SUM, "half4 h = float4(1.0f); squares += float(h.x);" + SUM),),
    ),
    Bug(
        "float to bfloat without a cast",
        "rms_norm",
        "compile",
        "bfloat z",
        ((SUM, "bfloat z = squares; squares = float(z);" + SUM),),
    ),
    Bug("arithmetic on an atomic", "top_k", "compile", "+= 1u", ((COUNT, "counts[(key >> shift) & 255u] += 1u"),)),
    Bug("threadgroup initialiser", "rms_norm", "compile", "partial[32]", (("partial[32];", "partial[32] = {0.0f};"),)),
    Bug(
        "threadgroup variable in a block",
        "rms_norm",
        "refused",
        "z[4]",
        ((BARRIER, "{ threadgroup float z[4]; z[sg % 4] = 0.0f; }" + BARRIER),),
    ),
    Bug("static local", "rms_norm", "refused", "static", (("float squares", "static float squares"),)),
    Bug(
        "small input to a helper that wants device memory",
        "rms_norm",
        "compile",
        "first_of(eps)",
        (("+ eps[0]", "+ first_of(eps)"),),
        _with_header("inline float first_of(const device float* p) { return p[0]; }\n"),
    ),
    Bug(
        "helper without address space",
        "q8_vector",
        "refused",
        "const float* x",
        (("const device float* x, uint part", "const float* x, uint part"),),
    ),
    Bug(
        "helper with another address space",
        "q8_vector",
        "compile",
        "q8_quarter",
        (("const device float* x, uint part", "const threadgroup float* x, uint part"),),
    ),
    Bug(
        "local pointer without address space",
        "q8_vector",
        "refused",
        "float* p",
        (("float s = simd_sum(sums[r]);", "float* p = sums; float s = simd_sum(p[r]);"),),
    ),
    Bug(
        "cast to another address space",
        "rms_norm",
        "address-space",
        "thread float*",
        ((SUM, "squares += ((const thread float*)x)[first] * 0.0f; " + SUM),),
    ),
    Bug(
        "recursion",
        "iq2_vector",
        "recursion",
        "again(n - 1)",
        (("sum = simd_sum(sum);", "sum = simd_sum(sum) + again(lane) * 0.0f;"),),
        _with_header("inline float again(uint n) { return n == 0 ? 0.0f : 1.0f + again(n - 1); }\n"),
    ),
    # Limits.
    Bug("33 KB of threadgroup memory", "rms_norm", "limit", "partial[8300]", (("partial[32]", "partial[8300]"),)),
    Bug("1056 threads", "rms_norm", "limit", "", (), _call(threadgroup=(1056, 1, 1), grid=(5280, 1, 1))),
    Bug(
        "large local array",
        "rms_norm",
        "stack",
        "",  # the frame itself does not fit, so the fault comes before any line of the body
        ((SUM, "float big[20000]; for (uint j = tid; j < 20000; j += 7) big[j] = 1.0f; squares += big[tid]; " + SUM),),
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.what)
def test_bug_is_reported(bug):
    broken = bug.change(sample(bug.kernel).edited(*bug.edits))
    with pytest.raises(EmulatorError) as caught:
        broken.run(time_limit=20.0)
    error = caught.value
    assert (error.kernel, error.kind) == (broken.spec.name, bug.kind), str(error)
    assert bug.line in error.line, str(error)
    assert bool(bug.line) == bool(error.place)


def test_some_bugs_show_in_one_order_only():
    """Why kernels are run in three orders: a lost barrier may be harmless in one of them."""
    s = sample("rms_norm").edited((BARRIER, ""))
    s = replace(s, threadgroup=(64, 1, 1), grid=(5 * 64, 1, 1))
    for order in ("forward", "backward", "random"):
        with pytest.raises(EmulatorError, match=r"uninitialised|race"):
            s.run(order=order)


def test_endless_loop_ends():
    s = sample("rms_norm").edited(("squares += v * v;", "while (v != 12345.0f) v = v * 0.5f;"))
    with pytest.raises(EmulatorError) as caught:
        s.run(time_limit=0.2)
    assert caught.value.kind == "timeout" and "while" in caught.value.line


def test_unchecked_fault_is_an_error_and_the_process_goes_on():
    s = sample("rms_norm")
    wild = s.edited(("float(x[first + i]);", "float(x[first + i + (1ul << 40)]);"))
    with pytest.raises(EmulatorError) as caught:
        wild.run(checked=False)
    assert caught.value.kind == "fault" and "1ul << 40" in caught.value.line
    assert s.error(s.run()) <= s.tolerance


def test_message_is_one_sentence_with_the_line():
    with pytest.raises(EmulatorError) as caught:
        sample("rms_norm").edited((OUT, "out[first + uint(D) + i] =")).run()
    assert caught.value.place == "source line 19"
    assert str(caught.value) == (
        "kernel row_rms_norm (out-of-bounds): write of 4 bytes at byte 30000 of 'out', which has 30000 bytes "
        "[thread (0,0,0) of threadgroup (4,0,0), simdgroup 0, lane 0], at source line 19 `out[first + uint(D) + i] = "
        "T(float(x[first + i]) * scale * float(weight[i]));`; guard the index."
    )


def test_wrong_results_are_seen_by_the_numbers():
    """The reference values do their part: a wrong formula passes all checks of the emulator, and the tolerance not."""
    s = sample("rms_norm").edited(("total / float(D)", "total / float(D - 1)"))
    assert s.error(s.run()) > 10 * s.tolerance
    assert not np.isnan(s.run()).any() and s.output_dtype == mx.float32
