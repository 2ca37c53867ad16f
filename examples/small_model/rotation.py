"""Rotary embedding with its own gradient: the gradient of a rotation is the rotation back, one operation on a GPU."""

from __future__ import annotations

import mlx.core as mx

from mlx_ds4.custom_kernels.rope import rope


def rotate(x: mx.array, cos: mx.array, sin: mx.array, *, inverse: bool = False) -> mx.array:
    """`mlx_ds4.custom_kernels.rope.rope`, differentiable in x."""

    @mx.custom_function
    def turned(x: mx.array) -> mx.array:
        return rope(x, cos, sin, inverse=inverse)

    @turned.vjp
    def gradient(primals, cotangent, outputs):
        return rope(cotangent, cos, sin, inverse=not inverse)

    return turned(x)
