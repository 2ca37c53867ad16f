"""Rotary embedding of the last channels, adjacent pairs, in float32 with one rounding at the end.

For pair i at position p, with t = p * f_i:  a' = a cos t - b sin t,  b' = a sin t + b cos t; the inverse
replaces t by -t. Only the last `2 * cos.shape[-1]` channels turn, the rest pass through unchanged
(architecture notes 3.7). Cosine and sine come from the host (`rope_table`): positions reach a million, where
a GPU's fast sine is not accurate enough, and a step needs only a few rows of the table.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np


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
    freq = (np.float32(1) / np.float32(base) ** exponent).astype(np.float32)
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
    """cos and sin, float32 [positions, pairs], of the float32 phase position * frequency."""
    phase = positions.astype(np.float32)[:, None] * frequencies[None, :]
    phase = phase.astype(np.float64)  # the phase is float32 as in the reference, the functions are exact
    return mx.array(np.cos(phase).astype(np.float32)), mx.array(np.sin(phase).astype(np.float32))


def rope(x: mx.array, cos: mx.array, sin: mx.array, *, inverse: bool = False) -> mx.array:
    """Rotates the tail of x [.., L, D] or [.., L, H, D] by cos, sin [L, pairs]; returns x.dtype.

    The position axis is the one before D, or before H and D when x has one axis more than
    [B, L, D] (x.ndim == 4).
    """
    return rope_ref(x, cos, sin, inverse=inverse)


def rope_ref(x: mx.array, cos: mx.array, sin: mx.array, *, inverse: bool = False) -> mx.array:
    if x.ndim == 4:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    width = 2 * cos.shape[-1]
    head, tail = x[..., :-width], x[..., -width:].astype(mx.float32)
    pairs = tail.reshape(*tail.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(tail.shape)
    return mx.concatenate([head, turned.astype(x.dtype)], axis=-1)
