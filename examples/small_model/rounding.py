"""The roundings of training with straight-through gradients: forward the rounded value, backward the identity.

Activations take the package's own fake quantization. Weights are rounded to exactly what the release can store: FP8
with a scale per 32x32 tile, FP4 with a scale per 32 columns, Engram rows FP8 with a scale per 32 values. `off()`
makes all of them the identity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import mlx.core as mx

from mlx_ds4.custom_kernels import fake_quant as fq

_active = True


@contextlib.contextmanager
def off() -> Iterator[None]:
    """No value is rounded by the functions of this module inside the block."""
    global _active
    before, _active = _active, False
    try:
        yield
    finally:
        _active = before


def _straight_through(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    rounded = mx.custom_function(lambda x: function(x).astype(x.dtype))

    @rounded.vjp
    def gradient(primals, cotangents, outputs):
        return cotangents

    return lambda x: rounded(x) if _active else x


def _fp8_blocks(x: mx.array) -> mx.array:
    """x float32 [n, size] to e4m3 times the smallest power of two that keeps a row within 448."""
    peak = mx.abs(x).max(axis=-1, keepdims=True)
    scale = mx.where(peak > 0, fq._ceil_power_of_two(mx.maximum(peak, 1e-30) * fq._INV_448), 1.0)
    return fq._round_e4m3(mx.clip(x / scale, -448.0, 448.0)) * scale


def _fp4_blocks(x: mx.array) -> mx.array:
    """x float32 [n, 32] to e2m1 times the smallest power of two that keeps a row within 6."""
    peak = mx.abs(x).max(axis=-1, keepdims=True)
    scale = mx.where(peak > 0, fq._ceil_power_of_two(mx.maximum(peak, 1e-30) * fq._INV_6), 1.0)
    return fq._round_e2m1(mx.clip(x / scale, -6.0, 6.0)) * scale


fp8 = _straight_through(fq.fake_quant_fp8)
fp4 = _straight_through(fq.fake_quant_fp4)
fp4_e4m3 = _straight_through(fq.fake_quant_fp4_e4m3)
fp8_weight = _straight_through(_fp8_blocks)
fp4_weight = _straight_through(_fp4_blocks)
