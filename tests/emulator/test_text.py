"""The text: as MLX generates it, as the lint sees it, and as it is changed.  Nothing here needs clang."""

from __future__ import annotations

import difflib
from pathlib import Path

import mlx.core as mx
import pytest

from tests.emulator._errors import EmulatorError
from tests.emulator._export import generated_text
from tests.emulator._lint import lint
from tests.emulator._text import Argument, arrays_to_pointers, mark_threadgroup_variables, prepare
from tests.emulator.sample_kernels import Spec

GOLDEN = Path(__file__).parent / "golden"

TEMPLATED = Spec(
    "templated",
    ["table", "small", "number", "half_number"],
    ["out", "count"],
    """
    uint i = thread_position_in_grid.x;
    out[i] = T(table[i % uint(table_shape[0])]) + T(small[0]) + T(number) + T(half_number) + T(N);
    count[i] = uint(table_strides[0]) + uint(table_ndim) + thread_index_in_simdgroup + threads_per_simdgroup;
""",
    "// the header\ninline float helper(float v) { return v; }\n",
)
PLAIN = Spec(
    "plain",
    ["x"],
    ["total"],
    "atomic_fetch_add_explicit(&total[0], x[thread_position_in_grid.x], memory_order_relaxed);",
    atomic_outputs=True,
)


def _templated() -> tuple[str, str]:
    inputs = [mx.zeros((4, 16)), mx.zeros(7, dtype=mx.bfloat16), 3, mx.array(1.0).astype(mx.float16)]
    template = [("T", mx.float32), ("N", 5), ("B", True)]
    return generated_text(TEMPLATED, inputs, template=template, output_dtypes=[mx.float32, mx.uint32])


def _plain() -> tuple[str, str]:
    return generated_text(PLAIN, [mx.zeros(300)], template=(), output_dtypes=[mx.float32])


@pytest.mark.parametrize(("name", "make"), [("templated", _templated), ("plain", _plain)])
def test_generated_text_is_the_stored_one(name, make):
    """The text of MLX 0.32.4. A difference means that MLX writes kernels in another way: read what, see whether
    `_text` still fits, and store the new text."""
    function, text = make()
    stored = (GOLDEN / f"{name}.metal").read_text()
    got = f"// {function}\n{text}"
    difference = "\n".join(difflib.unified_diff(stored.splitlines(), got.splitlines(), "stored", "MLX", lineterm=""))
    assert got == stored, difference


def test_arguments_and_places():
    prepared = prepare(TEMPLATED, *_templated())
    assert prepared.arguments == (
        Argument("table", "input", 0),
        Argument("table_shape", "shape", 0),
        Argument("table_strides", "strides", 0),
        Argument("table_ndim", "ndim", 0),
        Argument("small", "input", 1),
        Argument("number", "input", 2),
        Argument("half_number", "input", 3),
        Argument("out", "output", 0),
        Argument("count", "output", 1),
    )
    assert prepared.find("inline float") == ("header line 2", "inline float helper(float v) { return v; }")
    assert prepared.find("uint i =") == ("source line 2", "uint i = thread_position_in_grid.x;")
    assert prepared.place(len(prepared.lines)) == ("", "")
    assert "decltype" not in prepared.cpp and "<float, 5, 1>(" in prepared.cpp.split("emulator_entry")[1]


def test_mlx_errors_are_passed_on():
    with pytest.raises(EmulatorError) as caught:
        generated_text(PLAIN, [mx.zeros(8), mx.zeros(8)], template=(), output_dtypes=[mx.float32])
    assert caught.value.kind == "arguments"


def test_unknown_attribute_is_refused():
    spec = Spec("attributes", ["x"], ["o"], "o[thread_position_in_grid.x] = float(quadgroups_per_threadgroup);")
    text = generated_text(spec, [mx.zeros(8)], template=(), output_dtypes=[mx.float32])
    with pytest.raises(EmulatorError, match="quadgroups_per_threadgroup"):
        prepare(spec, *text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("threadgroup float a[4], b;", "MSL_THREADGROUP_VARIABLE threadgroup float a[4], b;"),
        ("threadgroup metal::array<float, 4> a;", "MSL_THREADGROUP_VARIABLE threadgroup metal::array<float, 4> a;"),
        ("f(); /* x */ threadgroup uint n;", "f(); /* x */ MSL_THREADGROUP_VARIABLE threadgroup uint n;"),
        ("threadgroup float* p = a;", "threadgroup float* p = a;"),
        ("const threadgroup float* p = a + 1;", "const threadgroup float* p = a + 1;"),
        ("// threadgroup float a;\nint b;", "// threadgroup float a;\nint b;"),
        ("g((threadgroup float*)a);", "g((threadgroup float*)a);"),
    ],
)
def test_threadgroup_variables_are_marked(before, after):
    assert mark_threadgroup_variables(before) == after


def test_array_parameters_become_pointers():
    assert arrays_to_pointers("int f(constant const int64_t s[2], device T a[N])") == (
        "int f(constant const int64_t * s, device T * a)"
    )
    for text in ("threadgroup float a[4];", "f(a[1], b)", "threadgroup float* q = p[2];"):
        assert arrays_to_pointers(text) == text


CLEAN_HEADER = """
#define TWICE(x) ((x) * 2)
constexpr constant static float table[2] = {1.0f, 2.0f};
constant float weights[2] = {1.0f, 2.0f};
struct pair { float a, s0; thread float* p; };
typedef float real;
using whole = int;
enum class color : uint { red = 1, green };
template <typename T, int N = 4, bool B = true>
inline T f(const device T* p, thread T& r, constant int& n, threadgroup T* t) { return p[0] * T(N) + r * T(n); }
inline float declared(float x);
inline real g(device real* p, pair q) { return p[0] * q.a * q.s0; }
"""
CLEAN_BODY = """
threadgroup float shared[4];
threadgroup atomic_uint n[1];
const device float* p = x;  // double new goto
threadgroup float* t = shared;
float a[3] = {1.0f, 2.0f, 3.0f};
thread float* l = a; thread float& r = a[0];
static constexpr int k = 3;
uint m = 1u * 2u & 3u, e = 1e-5f < 1.0e+5f ? 1u : 0u;
float b = float(k) * a[1], c = (b) * (b);
for (uint i = 0; i < 4; i++) { shared[i] = float(uint(i) & 3u); }
"""


def test_lint_accepts_plain_kernels():
    assert lint(CLEAN_HEADER, CLEAN_BODY) == ([], [])


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        ("inline float f(float* p) { return p[0]; }", "", "pointer or reference to 'float'"),
        ("inline void f(const uint& n) {}", "", "pointer or reference to 'uint'"),
        ("template <typename T> inline void f(T* n) {}", "", "pointer or reference to 'T'"),
        ("struct s { float a; };\ninline float f(s* p) { return p->a; }", "", "pointer or reference to 's'"),
        ("inline float f(float a[2]) { return a[0]; }", "", "array parameter 'a'"),
        ("float g = 1.0f;", "", "program-scope variable 'g'"),
        ("struct s { float a; };\ns g;", "", "program-scope variable 'g'"),
        ("static constexpr uint g[2] = {1u, 2u};", "", "program-scope variable 'g'"),
        ("inline void f() { threadgroup float t[2]; }", "", "threadgroup variable"),
        ("inline void f() { constant float t = 1.0f; }", "", "variable in the constant address space"),
        ("inline void f() { static float t; }", "", "static local"),
        ("", "for (;;) { threadgroup float t; }", "threadgroup variable"),
        ("", "constant float t = 1.0f;", "variable in the constant address space"),
        ("", "static uint t = 1u;", "static local"),
        ("", "float* p = q;", "pointer or reference to 'float'"),
        ("", "p = (float*)q;", "pointer or reference to 'float'"),
        ("", "auto f = [&](float v) { return v; };", "lambda"),
        ("", "g(v.hi);", "'.hi'"),
        ("", "g(v.s0);", "'.s0'"),
        ("", "uint n = 0b11;", "literal 0b11"),
        ("", "uint n = 1'000;", "literal 1'000"),
        ("", "double d = 1;", "'double'"),
        ("", "long long d = 1;", "'long long'"),
    ],
)
def test_lint_finds(header, body, message):
    found = [f.message for part in lint(header, "\n" + body) for f in part]
    assert len(found) == 1 and message in found[0]
    assert {f.line for part in lint("\n\n" + header, "\n\n" + body) for f in part} == {
        3 + header.count("\n") if header else 3
    }
