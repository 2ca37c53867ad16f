"""Metal to CUDA, token by token."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ds4.custom_kernels._kernel import all_kernels
from mlx_ds4.custom_kernels._portable import (
    PortableError,
    prelude,
    translate_body,
    translate_header,
)


def header(text: str) -> str:
    return translate_header(text).removeprefix(prelude() + "\n")


def squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


@pytest.mark.parametrize(
    ("metal", "cuda"),
    [
        ("const device float* p = x;", "const float* p = x;"),
        ("device const uchar *p = (const device uchar*)x;", "const uchar *p = (const uchar*)x;"),
        ("thread float& r = a;", "float& r = a;"),
        ("const constant int* s = x_shape;", "const int* s = x_shape;"),
        # words inside identifiers, members and qualified names stay
        ("device_count = my_device + constants;", "device_count = my_device + constants;"),
        ("a.device = b->thread + mem_flags::constant;", "a.device = b->thread + mem_flags::constant;"),
        ("uint thread1 = threadgroups;", "uint thread1 = threadgroups;"),
        # comments and strings stay
        ("// a device float\nx = 1; /* threadgroup y; */", "// a device float x = 1; /* threadgroup y; */"),
        ("// goes on \\\n device float\ny = 1;", "// goes on \\ device float y = 1;"),
        ("s = \"device \\\" thread\"; c = 't'; d = '\\'';", "s = \"device \\\" thread\"; c = 't'; d = '\\'';"),
        # threadgroup: variables become shared, pointers lose the word
        ("threadgroup float a[32];", "__shared__ float a[32];"),
        ("{ threadgroup uint n; }", "{ __shared__ uint n; }"),
        ("/* c */ threadgroup atomic<uint> h[2], g[N * 2];", "/* c */ __shared__ atomic<uint> h[2], g[N * 2];"),
        ("threadgroup vec<float, 4> v[8];", "__shared__ vec<float, 4> v[8];"),
        ("#if N > 2\nthreadgroup half h[4];\n#endif", "#if N > 2 __shared__ half h[4]; #endif"),
        ("threadgroup float* p = a;", "float* p = a;"),
        ("for (threadgroup float* p = a; p != b; p++) {}", "for ( float* p = a; p != b; p++) {}"),
        ("f((threadgroup float*)a, b);", "f(( float*)a, b);"),
        ("auto p = (const threadgroup half4*)(a + 2 * i);", "auto p = (const half4*)(a + 2 * i);"),
        # macros are text too
        ("#define PTR(n) const device float* n", "#define PTR(n) const float* n"),
        ("#define LIMIT 8 // thread", "#define LIMIT 8 // thread"),
        ("#pragma unroll\nfor (;;) {}", "#pragma unroll for (;;) {}"),
        # numbers
        ("x = 0x1fu + 1e-5f + 0xah + .5f + 10ul;", "x = 0x1fu + 1e-5f + 0xah + .5f + 10ul;"),
        ("x = v.x + v.w + p->y;", "x = v.x + v.w + p->y;"),
    ],
)  # fmt: skip
def test_body(metal, cuda):
    assert squeeze(translate_body(metal)) == cuda


@pytest.mark.parametrize(
    ("metal", "cuda"),
    [
        ("inline float f(const device float* p) { return p[0]; }",
         "__device__ inline float f(const float* p) { return p[0]; }"),
        ("template <typename P> inline uint g(P p, uint inline_count) { return 1; }",
         "template <typename P> __device__ inline uint g(P p, uint inline_count) { return 1; }"),
        ("METAL_FUNC void h(threadgroup float a[4], threadgroup float* b, constant uint& c) {}",
         "METAL_FUNC void h( float a[4], float* b, uint& c) {}"),
        ("#include <metal_stdlib>\n#pragma METAL fp contract(off)\nusing namespace metal;\n"
         "constexpr constant uint N = 3;",
         "constexpr uint N = 3;"),
        ("using namespace metal ; // all\nusing T = float;", "// all using T = float;"),
        ("MSL_TABLE(uint, t, 2) = {1u, 2u};", "MSL_TABLE(uint, t, 2) = {1u, 2u};"),
        ("#ifndef MSL_TABLE\n#define MSL_TABLE(T, name, n) constexpr constant static T name[n]\n#endif",
         "#ifndef MSL_TABLE #define MSL_TABLE(T, name, n) constexpr constant static T name[n] #endif"),
        ("struct block { half d; uchar q[32]; };", "struct block { half d; uchar q[32]; };"),
    ],
)  # fmt: skip
def test_header(metal, cuda):
    assert squeeze(header(metal)) == cuda


@pytest.mark.parametrize(
    ("where", "metal", "message"),
    [
        (translate_body, "threadgroup float a = 1.0f;", "initialiser"),
        (translate_body, "const threadgroup float a[2];", "begin a declaration"),
        (translate_body, "#define TG threadgroup float", "begin a declaration"),
        (translate_body, "x = 1.0h;", "literal 1.0h"),
        (translate_body, "x = 1.5bf;", "literal 1.5bf"),
        (translate_body, "x = v.xy;", r"swizzle \.xy"),
        (translate_body, "x = v.rgb;", r"swizzle \.rgb"),
        (translate_header, "constant uint t[2] = {1, 2};", "MSL_TABLE"),
        (translate_header, "constexpr constant static float t[4][2] = {};", "MSL_TABLE"),
        (translate_header, '#include "mine.h"', "put the helpers into the header"),
    ],
)
def test_what_cuda_cannot_say_is_refused(where, metal, message):
    with pytest.raises(PortableError, match=message) as error:
        where(metal)
    assert "\n" not in str(error.value)


PIECES = st.sampled_from([
    "device ", "threadgroup float a[2];", "constant", " thread", "x", "1.0f", "// c\n", "/* device */", '"thread"',
    "\n", "#define A ", "{", "}", "(", ")", "<", ">", ",", ";", "*", "inline ", "'", '"', "#", "/*", "\\",
])  # fmt: skip


@given(st.lists(PIECES, max_size=12).map("".join))
def test_any_text_ends_in_a_translation_or_an_error(text):
    try:
        body = translate_body(text)
    except PortableError:
        return
    assert translate_body(body) == body  # nothing is left to translate


def test_every_kernel_translates():
    for kernel in (k for k in all_kernels() if k.cuda_source is None):
        texts = "".join(kernel.cuda_text()).removeprefix(prelude())
        code = re.sub(r"//[^\n]*|/\*.*?\*/|#define MSL_TABLE[^\n]*", "", texts, flags=re.S)
        assert not re.search(r"\b(device|threadgroup|constant|thread)\b", code), kernel.name
