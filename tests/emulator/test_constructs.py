"""Which Metal is accepted, and computes what, and which is refused, and why."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import EmulatorError, available, launch, unavailable_reason
from tests.emulator.sample_kernels import Spec

pytestmark = pytest.mark.skipif(not available(), reason=unavailable_reason())

N = 64
X = np.arange(N, dtype=np.float32)


def run(statements: str, header: str = "", **options: Any) -> np.ndarray:
    """`o[i]` of statements that find `i`, the thread, and `x[i]`, which is i."""
    spec = Spec("construct", ["x"], ["o"], f"uint i = thread_position_in_grid.x;\n{statements}", header)
    call = {"grid": (N, 1, 1), "threadgroup": (N, 1, 1), "output_shapes": [(N,)], "output_dtypes": [mx.float32]}
    (out,) = launch(spec, [mx.array(X)], **{**call, **options})
    return np.array(out)


ACCEPTED = {
    "auto pointer": ("auto p = x + i; o[i] = *p;", "", X),
    "unsuffixed literals are float": ("o[i] = sizeof(0.5) == 4 ? x[i] * 0.5 : 0.0f;", "", X / 2),
    "table in constant memory": (
        "o[i] = table[i & 3];",
        "constant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};",
        X % 4 + 1,
    ),
    "template helper": (
        "o[i] = twice<4>(x[i]);",
        "template <int N = 2, typename T = float>\ninline T twice(T v) { return v * T(N) / T(2); }",
        X * 2,
    ),
    "local array to a helper": (
        "float a[4] = {1.0f, 2.0f, 3.0f, x[i]}; o[i] = last(a);",
        "inline float last(thread float* a) { return a[3]; }",
        X,
    ),
    "struct with a reference parameter": (
        "pair p; p.a = x[i]; p.b = 2.0f; swap(p); o[i] = p.b;",
        "struct pair { float a, b; };\ninline void swap(thread pair& p) { float t = p.a; p.a = p.b; p.b = t; }",
        X,
    ),
    "vectors": (
        "float4 v = float4(x[i], 1.0f, float2(2.0f, 3.0f)); v.xy = v.yx; v.w += v.y; o[i] = dot(v, float4(1.0f));",
        "",
        1 + X + 2 + 3 + X,
    ),
    "vector loads": ("const device float4* v = (const device float4*)x; o[i] = v[i / 4].w;", "", X // 4 * 4 + 3),
    "vector select and any": (
        "float4 v = float4(x[i]); o[i] = any(v > 5.0f) ? select(v, -v, v > 9.0f).x : 0.0f;",
        "",
        np.where(X > 9, -X, np.where(X > 5, X, 0)),
    ),
    "metal::vec of one value": ("metal::vec<float, 4> v = metal::vec<float, 4>(x[i]); o[i] = v.z;", "", X),
    "as_type": ("o[i] = as_type<float>(as_type<uint>(x[i]) ^ 0x80000000u);", "", -X),
    "integer functions": (
        "o[i] = float(popcount(i) + clz(i) + ctz(i | 64u) + reverse_bits(uchar(i)) + extract_bits(i, 1u, 3u));",
        "",
        np.array(
            [
                i.bit_count()
                + 32
                - i.bit_length()
                + ((i | 64) & -(i | 64)).bit_length()
                - 1
                + int(f"{i:08b}"[::-1], 2)
                + (i >> 1 & 7)
                for i in range(N)
            ]
        ),
    ),
    "half arithmetic rounds each time": (
        "half h = half(x[i]) * half(0.1f); o[i] = float(h + half(1000.0f));",
        "",
        (X.astype(np.float16) * np.float16(0.1) + np.float16(1000)).astype(np.float32),
    ),
    "ballot and votes": (
        "uint votes = uint(simd_vote::vote_t(simd_ballot(i % 2 == 0))); bool all = simd_all(i < 32);"
        " o[i] = (votes == 0x55555555u && simd_any(i == 5) == (i < 32)) ? float(all) : -1.0f;",
        "",
        (X < 32) * 1.0,
    ),
    "shuffles": (
        "float down = simd_shuffle_down(x[i], ushort(1)); float up = simd_shuffle_up(down, ushort(2));"
        " float across = simd_shuffle_xor(up, ushort(5)); o[i] = across + simd_broadcast(x[i], ushort(3));",
        "",
        None,  # filled in below
    ),
    "shuffle of 64 bits": ("o[i] = float(simd_shuffle_down(uint64_t(i), uint16_t(0)));", "", X),
    "prefix sums": (
        "o[i] = simd_prefix_inclusive_sum(x[i]) - simd_prefix_exclusive_sum(x[i]) + quad_sum(x[i]);",
        "",
        X + 4 * (X // 4 * 4) + 6,
    ),
    "simd maximum and minimum": ("o[i] = simd_max(x[i]) - simd_min(x[i]);", "", np.full(N, 31.0)),
    "simdgroup barrier orders a simdgroup": (
        "threadgroup float t[64]; t[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = t[i ^ 1];",
        "",
        np.arange(N) ^ 1,
    ),
}


def _shuffled() -> np.ndarray:
    lane, out = np.arange(32), []
    for base in (0, 32):
        v = np.arange(base, base + 32, dtype=np.float32)
        down = np.append(v[1:], v[31])
        up = np.concatenate([down[:2], down[:-2]])
        out.append(up[lane ^ 5] + v[3])
    return np.concatenate(out)


@pytest.mark.parametrize("what", ACCEPTED)
def test_accepted(what):
    statements, header, expected = ACCEPTED[what]
    expected = _shuffled() if expected is None else expected
    assert np.array_equal(run(statements, header), np.asarray(expected, np.float32))


REFUSED = {
    "C cast to another space": ("const thread float* p = (const thread float*)x; o[i] = p[i];", "", "address-space"),
    "cast from threadgroup to device": (
        "threadgroup float s[64]; s[i] = x[i]; device float* p = (device float*)s; o[i] = p[i];",
        "",
        "address-space",
    ),
    "reinterpret_cast to another space": (
        "const thread float* p = reinterpret_cast<const thread float*>(x); o[i] = p[i];",
        "",
        "compile",
    ),
    "implicit change of space": ("const thread float* p = x; o[i] = p[i];", "", "compile"),
    "method called on device memory": (
        "const device S* s = (const device S*)x; o[i] = s[i / 2].get();",
        "struct S { float a, b; float get() const { return a; } };",
        "compile",
    ),
    # The next two are Metal; clang's C++ has no constructors for other address spaces.
    "struct in threadgroup memory": (
        "threadgroup S t[64]; t[i].a = x[i]; o[i] = t[i].a;",
        "struct S { float a, b; };",
        "compile",
    ),
    "struct copied from device memory": (
        "S s = ((const device S*)x)[i / 2]; o[i] = s.a;",
        "struct S { float a, b; };",
        "compile",
    ),
    "goto": ("if (i == 1) goto end; o[i] = 1.0f; end: ;", "", "refused"),
    "lambda": ("auto f = [](float a) { return a + 1.0f; }; o[i] = f(x[i]);", "", "refused"),
    "OpenCL's .lo": ("float4 v = float4(1.0f); o[i] = v.lo.x;", "", "refused"),
    "OpenCL's .s0": ("float4 v = float4(1.0f); o[i] = v.s0;", "", "refused"),
    "unsuffixed literal that is no float": ("o[i] = x[i] * 0.1;", "", "compile"),
    "half literal": ("half h = 1.0h; o[i] = float(h);", "", "compile"),
    "binary literal": ("o[i] = float(0b101u);", "", "refused"),
    "long long": ("long long n = 3; o[i] = float(n);", "", "refused"),
    "simd_sum of 64 bits": ("long v = simd_sum(long(i)); o[i] = float(v);", "", "compile"),
    "simd_sum of bfloat": ("o[i] = float(simd_sum(bfloat(x[i])));", "", "compile"),
    "MLX's name for another thing": ("o[i] = 1.0f;", "struct Limits { float a; };", "compile"),
    "constant in a function": ("constant float c = 2.0f; o[i] = c;", "", "refused"),
    "static constant in a function": ("static constexpr constant float c = 2.0f; o[i] = c;", "", "refused"),
    "global variable": ("o[i] = g;", "float g = 1.0f;", "refused"),
    "global table without constant": ("o[i] = g[i & 1];", "constexpr float g[2] = {1.0f, 2.0f};", "refused"),
    "threadgroup variable in a helper": (
        "o[i] = f();",
        "inline float f() { threadgroup float t[4]; return 1.0f; }",
        "refused",
    ),
    "array parameter without space": (
        "float a[4] = {}; o[i] = f(a);",
        "inline float f(float a[4]) { return a[0]; }",
        "refused",
    ),
    "reference without space": ("float a = 1.0f; f(a); o[i] = a;", "inline void f(float& a) { a = 2.0f; }", "refused"),
    "function pointer": (
        "auto f = i == 0u ? one : two; o[i] = f();",
        "inline float one() { return 1.0f; }\ninline float two() { return 2.0f; }",
        "recursion",
    ),
    "mutual recursion": (
        "o[i] = even(i);",
        "float even(uint n);\ninline float odd(uint n) { return n == 0u ? 0.0f : even(n - 1u); }\n"
        "inline float even(uint n) { return n == 0u ? 1.0f : odd(n - 1u); }",
        "recursion",
    ),
    "memory order other than relaxed": (
        "atomic_fetch_add_explicit((device atomic_uint*)o, 1u, memory_order_acquire);",
        "",
        "compile",
    ),
    "float atomic in threadgroup memory": (
        "threadgroup atomic_float s[1]; atomic_fetch_add_explicit(&s[0], 1.0f, memory_order_relaxed); o[i] = 0.0f;",
        "",
        "compile",
    ),
    "printf": ('printf("%d", i); o[i] = 0.0f;', "", "compile"),
    "library of C++": ("o[i] = std::sqrt(x[i]);", "", "refused"),
    "new": ("thread float* p = new float; o[i] = *p;", "", "refused"),
    "unknown function": ("o[i] = sqroot(x[i]);", "", "compile"),
    "syntax error": ("o[i] = x[i]", "", "compile"),
    "too many components": ("float4 v = float4(1.0f, float4(x[i])); o[i] = v.x;", "", "compile"),
    "int vector from float vector": ("int2 v = float2(1.0f, 2.0f); o[i] = float(v.x);", "", "compile"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    statements, header, kind = REFUSED[what]
    with pytest.raises(EmulatorError) as caught:
        run(statements, header)
    assert caught.value.kind == kind, str(caught.value)
    # An error inside the shim is blamed on the line that led there, in the author's text.
    assert caught.value.place in ("source line 2", "header line 1", "header line 2"), str(caught.value)


def test_language_version():
    for std, year in (("c++14", 2014), ("c++17", 2017)):
        assert run("o[i] = float(__cplusplus / 100);", std=std)[0] == year
