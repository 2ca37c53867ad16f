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

import mlx.core as mx
import numpy as np

_INV_448 = float(np.float32(1) / np.float32(448))
_INV_6 = float(np.float32(1) / np.float32(6))


def fake_quant_fp8(x: mx.array) -> mx.array:
    """Rounds x [.., D] to e4m3 in blocks of 32 with power-of-two scales; returns bfloat16 [.., D].

    The block maximum is floored at 1e-4. D must be a multiple of 32 (ValueError otherwise).
    """
    return fake_quant_fp8_ref(x)


def fake_quant_fp4(x: mx.array) -> mx.array:
    """Rounds x [.., D] to e2m1 in blocks of 32 with power-of-two scales; returns bfloat16 [.., D]."""
    return fake_quant_fp4_ref(x)


def fake_quant_fp4_e4m3(x: mx.array) -> mx.array:
    """Rounds x [.., D] to e2m1 in blocks of 16 with e4m3 scales; returns bfloat16 [.., D]."""
    return fake_quant_fp4_e4m3_ref(x)


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
    if x.shape[-1] % size:
        raise ValueError(f"fake quantization of width {x.shape[-1]}: expected a multiple of {size}")
    return x.astype(mx.bfloat16).astype(mx.float32).reshape(*x.shape[:-1], -1, size)


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
