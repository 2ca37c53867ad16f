"""Fake quantization: values rounded to FP8 or FP4 and back, as in the model's training.

Three roundings over blocks of the last axis (sources: the vendor's kernels; architecture notes 3.1-3.3):

* `fake_quant_fp8`: e4m3, blocks of 32, power-of-two scale. Linear inputs and window KV.
* `fake_quant_fp4`: e2m1, blocks of 32, power-of-two scale. Index queries and keys.
* `fake_quant_fp4_e4m3`: e2m1, blocks of 16, e4m3 scale. Compressed KV.

Exact contract: the input is rounded to bfloat16 first, everything else is float32, the power-of-two
exponent comes from the bits (no logarithm), codes are rounded to nearest even, and the result fits
bfloat16 exactly. A row's result does not depend on other rows.
"""

from __future__ import annotations

import functools
from math import prod

import mlx.core as mx
import numpy as np

from ._case import Case
from ._kernel import Kernel
from ._switches import enabled

# What a kernel calls the three roundings, and their blocks.
KINDS = {"fp8": (0, 32), "fp4": (1, 32), "fp4_e4m3": (2, 16)}
_INV_448 = float(np.float32(1) / np.float32(448))
_INV_6 = float(np.float32(1) / np.float32(6))

# Everything but one product is integer arithmetic, because a GPU may flush float32 subnormals to zero (Apple's
# do) and may divide inexactly. |x| in bfloat16 is a * 2^(e - 134) with a < 256; a scale is n * 2^q with n < 16.
FAKE_QUANT_HEADER = (
    f"""
constexpr constant float fq_inv_448 = {_INV_448!r}f;
constexpr constant float fq_inv_6 = {_INV_6!r}f;
"""
    + """
inline uint fq_divide(uint a, uint b) {  // to nearest, ties to even
    uint n = a / b, rest = a - n * b;
    return n + ((2u * rest > b || (2u * rest == b && (n & 1u) != 0u)) ? 1u : 0u);
}
inline uint fq_encode(uint n, int q) {  // the bits of n * 2^q in bfloat16, for n < 128; exact, or infinity
    if (n == 0u) return 0u;
    uint top = 31u - metal::clz(n);
    int e = q + int(top) + 127;
    if (e >= 255) return 0x7f80u;
    return e > 0 ? (uint(e) << 7) | ((n << (7u - top)) & 127u) : n << uint(q + 133);
}
inline int fq_ceil_exponent(float r) {  // the smallest i with 2^i >= r, for normal r
    uint bits = as_type<uint>(r);
    return int(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0u ? 1 : 0);
}
// The bits u of a bfloat16 after rounding, with the peak of its block of lanes; every lane of the simdgroup calls it.
template <int KIND, int BLOCK>
inline uint fq_round(uint u) {
    uint size = u & 0x7fffu;
    uint peak = size;  // sizes of bfloat16 order as integers do
    for (uint step = BLOCK / 2; step > 0; step >>= 1) peak = metal::max(peak, simd_shuffle_xor(peak, ushort(step)));

    uint n = 1u;
    int q;
    if (KIND == 0) {  // e4m3 with a power of two
        q = fq_ceil_exponent(metal::max(as_type<float>(peak << 16), 1e-4f) * fq_inv_448);
    } else if (KIND == 1) {  // e2m1 with a power of two; the floor is 6 * 2^-126
        q = fq_ceil_exponent(as_type<float>(metal::max(peak, (3u << 7) | 64u) << 16) * fq_inv_6);
    } else {  // e2m1 with peak / 6 rounded to e4m3; the floor is 6 * 2^-9
        peak = metal::max(peak, (120u << 7) | 64u);
        int e = int(peak >> 7);
        uint a = (peak & 127u) | 128u;
        int k = metal::max(e - 129 - (a < 192u ? 1 : 0), -6);  // the exponent of peak / 6
        q = k - 3;
        n = k > 8 ? 15u : fq_divide(a, 6u << uint(q - e + 134));
        if (k >= 8 && n > 14u) { q = 5; n = 14u; }  // e4m3 ends at 448
    }

    int e = metal::max(int(size >> 7), 1);
    uint a = (size & 127u) | (size > 127u ? 128u : 0u);
    uint bits;
    if (KIND == 0) {
        int unit = metal::max(e - 127, q - 6) - 3;  // e4m3 keeps three bits after the first, above 2^-6
        bits = fq_encode(fq_divide(a, 1u << uint(metal::min(unit - e + 134, 20))), unit);
    } else {
        int h = e - 133 - q;  // twice x / scale is a * 2^h / n
        uint b = n << uint(metal::clamp(-h, 0, 16));
        uint code = 3u;
        int unit = 1;
        if (h > 0 && a != 0u) code = 3u;  // beyond 6
        else if (a < 4u * b) { code = fq_divide(a, b); unit = -1; }
        else if (a < 8u * b) { code = fq_divide(a, 2u * b); unit = 0; }
        else code = metal::min(fq_divide(a, 4u * b), 3u);
        bits = fq_encode(code * n, q + unit);
    }
    return bits | (u & 0x8000u);
}
"""
)

_FAKE_QUANT_SOURCE = """
    // A thread owns one value; a simdgroup owns 32 in a row, which are one block of 32 or two of 16.
    uint i = thread_position_in_grid.x;
    bool inside = i < uint(x_shape[0]);
    uint u = 0u;  // the value's bits in bfloat16
    if (inside) u = WIDE ? (uint(x[i]) + 0x7fffu + ((uint(x[i]) >> 16) & 1u)) >> 16 : uint(x[i]);
    u = fq_round<KIND, BLOCK>(u);
    if (inside) y[i] = as_type<bfloat16_t>(ushort(u));
"""

_fake_quant_kernel = Kernel(
    "fake_quant", ["x"], ["y"], _FAKE_QUANT_SOURCE, FAKE_QUANT_HEADER, exact=True, family="fake_quant"
)


def fake_quant_fp8(x: mx.array) -> mx.array:
    """Rounds x [.., D] to e4m3 in blocks of 32 with power-of-two scales; returns bfloat16 [.., D].

    The block maximum is floored at 1e-4. D must be a multiple of 32 (ValueError otherwise).
    """
    return _fake_quant(x, "fp8") if _use_kernel(x) else fake_quant_fp8_ref(x)


def fake_quant_fp4(x: mx.array) -> mx.array:
    """Rounds x [.., D] to e2m1 in blocks of 32 with power-of-two scales; returns bfloat16 [.., D]."""
    return _fake_quant(x, "fp4") if _use_kernel(x) else fake_quant_fp4_ref(x)


def fake_quant_fp4_e4m3(x: mx.array) -> mx.array:
    """Rounds x [.., D] to e2m1 in blocks of 16 with e4m3 scales; returns bfloat16 [.., D]."""
    return _fake_quant(x, "fp4_e4m3") if _use_kernel(x) else fake_quant_fp4_e4m3_ref(x)


def _use_kernel(x: mx.array) -> bool:
    return x.size > 0 and x.dtype in (mx.bfloat16, mx.float32) and enabled("fake_quant")


def _fake_quant(x: mx.array, name: str) -> mx.array:
    kind, block = KINDS[name]
    _check_width(x, block)
    wide = x.dtype == mx.float32
    return _fake_quant_kernel(
        inputs=[x.view(mx.uint32 if wide else mx.uint16).reshape(-1)],
        template=[("KIND", kind), ("BLOCK", block), ("WIDE", wide)],
        grid=(-(-x.size // 256) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def _check_width(x: mx.array, block: int) -> None:
    if x.shape[-1] % block:
        raise ValueError(f"fake quantization of width {x.shape[-1]}: expected a multiple of {block}")


def fake_quant_fp8_ref(x: mx.array) -> mx.array:
    blocks = _blocks(x, 32)
    peak = mx.maximum(mx.abs(blocks).max(axis=-1, keepdims=True), 1e-4)
    scale = _ceil_power_of_two(peak * _INV_448)
    return _merge(_round_e4m3(mx.clip(blocks / scale, -448.0, 448.0)) * scale, x)


def fake_quant_fp4_ref(x: mx.array) -> mx.array:
    blocks = _blocks(x, 32)
    peak = mx.maximum(mx.abs(blocks).max(axis=-1, keepdims=True), 6 * 2.0**-126)
    scale = _ceil_power_of_two(peak * _INV_6)
    return _merge(_round_e2m1(mx.clip(blocks / scale, -6.0, 6.0)) * scale, x)


def fake_quant_fp4_e4m3_ref(x: mx.array) -> mx.array:
    blocks = _blocks(x, 16)
    peak = mx.maximum(mx.abs(blocks).max(axis=-1, keepdims=True), 6 * 2.0**-9)
    scale = _round_e4m3(mx.minimum(peak / 6.0, 448.0))
    return _merge(_round_e2m1(mx.clip(blocks / scale, -6.0, 6.0)) * scale, x)


def _blocks(x: mx.array, size: int) -> mx.array:
    _check_width(x, size)
    return x.astype(mx.bfloat16).astype(mx.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _merge(blocks: mx.array, x: mx.array) -> mx.array:
    return blocks.reshape(x.shape).astype(mx.bfloat16)


def _ceil_power_of_two(r: mx.array) -> mx.array:
    """The smallest power of two >= r, for normal positive float32 r."""
    bits = r.view(mx.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(mx.uint32)
    return (exponent << 23).view(mx.float32)


def _round_e4m3(v: mx.array) -> mx.array:
    """Nearest e4m3 value (ties to even) of |v| <= 448, as float32."""
    exponent = mx.maximum((v.view(mx.uint32) >> 23) & 255, 127 - 6)  # below 2^-6 the step stays 2^-9
    step = ((exponent - 3) << 23).view(mx.float32)
    return mx.round(v / step) * step


def _round_e2m1(v: mx.array) -> mx.array:
    """Nearest e2m1 value (ties to even code) of |v| <= 6, as float32."""
    size = mx.abs(v)
    step = mx.where(size < 2.0, 0.5, mx.where(size < 4.0, 1.0, 2.0))
    return mx.round(v / step) * step


def cases() -> list[Case]:
    ops = {
        "fp8": (fake_quant_fp8, fake_quant_fp8_ref),
        "fp4": (fake_quant_fp4, fake_quant_fp4_ref),
        "fp4_e4m3": (fake_quant_fp4_e4m3, fake_quant_fp4_e4m3_ref),
    }

    def edges(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype):
        rows = rng.standard_normal(shape).astype(np.float32)
        flat = rows.reshape(-1, 16)  # every block of 16 at another magnitude, from subnormal to near overflow
        flat *= np.exp2(rng.integers(-140, 124, (len(flat), 1))).astype(np.float32)
        flat[::5] *= rng.choice(np.float32([0, 1, 2.0**-5, 2.0**-9]), flat[::5].shape)  # small beside large, zeros
        flat[1::7] = rng.integers(-48, 49, flat[1::7].shape) / np.float32(8)  # many ties
        flat[2::11, 0] = np.float32(448) * np.exp2(rng.integers(-20, 20, flat[2::11, 0].shape)).astype(np.float32)
        return [mx.array(rows).astype(dtype)]

    def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype):
        return [mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)]

    def case(name: str, shape: tuple[int, ...], dtype: mx.Dtype = mx.bfloat16, large: bool = False):
        return Case(
            f"fake_quant/{name}_{str(dtype).rpartition('.')[2]}_{'x'.join(map(str, shape))}",
            *ops[name],
            functools.partial(normal if large else edges, shape=shape, dtype=dtype),
            bytes=prod(shape) * (dtype.size + 2),
            large=large,
        )

    return [
        *[case(name, (7, 5, 128)) for name in ops],
        *[case(name, (9, 96), mx.float32) for name in ops],
        case("fp4_e4m3", (3, 16)),
        case("fp8", (1, 32)),
        case("fp8", (4096, 5120), large=True),
        case("fp4_e4m3", (4096, 512), large=True),
    ]
