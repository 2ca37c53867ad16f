"""Rotary embedding of the last channels, adjacent pairs, in float32 with one rounding at the end.

For pair i at position p, with t = p * f_i:  a' = a cos t - b sin t,  b' = a sin t + b cos t; the inverse
replaces t by -t. Only the last `2 * cos.shape[-1]` channels turn, the rest pass through unchanged
(architecture notes 3.7). Cosine and sine come from the host (`rope_table`): positions reach a million, where
a GPU's fast sine is not accurate enough, and a step needs only a few rows of the table.

Kernel: within tolerance (a GPU may fuse the product and the sum). Bytes: x once in, once out.
"""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np

from ._case import Case
from ._kernel import Kernel
from ._switches import enabled

_ROPE_SOURCE = """
    // A thread owns one pair of adjacent channels of x [B, L, H, D].
    uint i = thread_position_in_grid.x;
    uint length = uint(x_shape[1]);
    uint row = i / uint(D / 2);
    if (row < uint(x_shape[0]) * length * uint(H)) {
        uint pair = i % uint(D / 2);
        ulong at = 2ul * ulong(i);
        if (pair < uint(D / 2 - P)) {
            y[at] = x[at];
            y[at + 1] = x[at + 1];
        } else {
            uint entry = row / uint(H) % length * uint(P) + pair - uint(D / 2 - P);
            float c = cosine[entry];
            float s = INVERSE ? -sine[entry] : sine[entry];
            float a = float(x[at]);
            float b = float(x[at + 1]);
            y[at] = T(a * c - b * s);
            y[at + 1] = T(a * s + b * c);
        }
    }
"""

_rope_kernel = Kernel("rope", ["x", "cosine", "sine"], ["y"], _ROPE_SOURCE, exact=False, family="rope")


def rope_frequencies(
    width: int,
    base: float,
    *,
    factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_length: int = 0,
) -> np.ndarray:
    """Frequencies float32 [width / 2]; YaRN is applied when `original_length` > 0, at any length."""
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # numpy's float32 power differs by CPU in the last place; rounded from float64 it is the same everywhere.
    freq = np.float32(1) / (np.float64(base) ** exponent.astype(np.float64)).astype(np.float32)
    if original_length <= 0:
        return freq

    def bound(turns: float) -> float:
        return width * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(bound(beta_fast)), 0)
    high = min(math.ceil(bound(beta_slow)), width - 1)
    ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001))
    ramp = np.clip(ramp, 0, 1).astype(np.float32)
    return (freq / np.float32(factor) * ramp + freq * (1 - ramp)).astype(np.float32)


def rope_table(positions: np.ndarray, frequencies: np.ndarray) -> tuple[mx.array, mx.array]:
    """`host_rope_table` as MLX's arrays."""
    cos, sin = host_rope_table(positions, frequencies)
    return mx.array(cos), mx.array(sin)


def host_rope_table(positions: np.ndarray, frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [positions, pairs], of the float32 phase position * frequency."""
    phase = positions.astype(np.float32)[:, None] * frequencies[None, :]
    phase = phase.astype(np.float64)  # the phase is float32 as in the reference, the functions are exact
    return np.cos(phase).astype(np.float32), np.sin(phase).astype(np.float32)


def rope(x: mx.array, cos: mx.array, sin: mx.array, *, inverse: bool = False) -> mx.array:
    """Rotates the tail of x [.., L, D] or [.., L, H, D] by cos, sin [L, pairs]; returns x.dtype.

    The position axis is the one before D, or before H and D when x has one axis more than
    [B, L, D] (x.ndim == 4).
    """
    D, P = x.shape[-1], cos.shape[-1]
    L, H = x.shape[-3:-1] if x.ndim == 4 else (x.shape[-2], 1)
    if cos.shape != (L, P) or sin.shape != (L, P) or 2 * P > D:
        raise ValueError(
            f"rope got cos {cos.shape} and sin {sin.shape} for x {x.shape}, expected [{L}, pairs] with at most"
            f" {D // 2} pairs; make the table from the positions of this x."
        )
    if x.size == 0 or P == 0 or D % 2 or not enabled("rope"):
        return rope_ref(x, cos, sin, inverse=inverse)
    return _rope_kernel(
        inputs=[x.reshape(-1, L, H, D), cos, sin],
        template=[("T", x.dtype), ("H", H), ("D", D), ("P", P), ("INVERSE", inverse)],
        grid=(-(-x.size // 512) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


def rope_ref(x: mx.array, cos: mx.array, sin: mx.array, *, inverse: bool = False) -> mx.array:
    if x.ndim == 4:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    width = 2 * cos.shape[-1]
    head, tail = x[..., :-width], x[..., -width:].astype(mx.float32)
    pairs = tail.reshape(*tail.shape[:-1], cos.shape[-1], 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(tail.shape)
    return mx.concatenate([head, turned.astype(x.dtype)], axis=-1)


def cases() -> list[Case]:
    def inputs(rng: np.random.Generator, shape: tuple[int, ...], width: int, dtype: mx.Dtype):
        length = shape[-3] if len(shape) == 4 else shape[-2]
        positions = rng.integers(0, 1_048_576, length)
        x = mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
        return [x, *rope_table(positions, rope_frequencies(width, 10000.0))]

    def case(shape: tuple[int, ...], width: int, dtype: mx.Dtype = mx.bfloat16, large: bool = False, **options):
        kind = "_inverse" if options else ""
        return Case(
            f"rope/{str(dtype).rpartition('.')[2]}_{'x'.join(map(str, shape))}_tail{width}{kind}",
            functools.partial(rope, **options),
            functools.partial(rope_ref, **options),
            functools.partial(inputs, shape=shape, width=width, dtype=dtype),
            tolerance=2e-6,
            bytes=2 * math.prod(shape) * dtype.size,
            large=large,
        )

    return [
        case((2, 5, 4, 96), 64),
        case((2, 5, 4, 96), 64, inverse=True),
        case((2, 7, 66), 64, mx.float16),
        case((3, 64), 64, mx.float32),
        case((1, 1, 2), 2, mx.float32),  # fewer than 8 values: Metal puts such inputs into another address space
        case((1, 6, 64, 512), 64, large=True),
        case((1, 512, 64, 512), 64, large=True),
    ]
