"""Random block-quantized weights for cases and benchmarks: bytes drawn plane by plane, no encoder involved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlx_ds4.formats.planes import FP8_TILE, Planes

# Bytes of all planes for one weight.
BYTES = {"Q8_0": 34 / 32, "Q4_K": 144 / 256, "Q2_K": 84 / 256, "IQ2_XXS": 66 / 256, "MXFP4": 17 / 32, "FP8": 1.0}
_FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
BYTES |= {format: float(dtype.size) for format, dtype in _FLOATS.items()}
# Bytes of codes for 32 columns.
_CODES = {"Q8_0": 32, "Q4_K": 16, "Q2_K": 8, "IQ2_XXS": 8, "MXFP4": 16, "FP8": 32}


def random_planes(rng: np.random.Generator, format: str, *shape: int) -> Planes:
    """Planes of a weight of `shape` [.., out, in] with values of the size of a trained projection's, and every code."""
    *leading, out, width = shape

    def draw(columns: int, low: int = 0, high: int = 256) -> np.ndarray:
        return rng.integers(low, high, (*leading, out, columns), dtype=np.uint8)

    def halves(columns: int, size: float) -> mx.array:
        spread = rng.random((*leading, out, columns), dtype=np.float32)
        return mx.array((size * (0.5 + spread)).astype(np.float16))

    if format in _FLOATS:
        values = rng.standard_normal((*leading, out, width), dtype=np.float32) * np.float32(0.02)
        return {"codes": mx.array(values).astype(_FLOATS[format])}
    codes = draw(_CODES[format] * width // 32)
    if format == "Q8_0":
        return {"codes": mx.array(codes.view(np.int8)), "scales": halves(width // 32, 3e-4)}
    if format == "Q4_K":
        supers = halves(width // 128, 1e-4)
        return {"codes": mx.array(codes), "scales": mx.array(draw(width // 256 * 12)), "supers": supers}
    if format == "Q2_K":
        return {"codes": mx.array(codes), "scales": mx.array(draw(width // 16)), "supers": halves(width // 128, 2e-3)}
    if format == "IQ2_XXS":
        return {"codes": mx.array(codes.view(np.uint32)), "scales": halves(width // 256, 5e-4)}
    if format == "MXFP4":
        return {"codes": mx.array(codes), "scales": mx.array(draw(width // 32, 118, 124))}
    codes[(codes & 127) == 127] ^= 1  # the two NaNs
    tiles = (*leading, -(-out // FP8_TILE), width // FP8_TILE)
    return {"codes": mx.array(codes), "scales": mx.array(rng.integers(112, 118, tiles, dtype=np.uint8))}


def weights_of(formats: Sequence[str], arrays: Sequence[mx.array]) -> Iterator[tuple[str, Planes]]:
    """(format, planes) of each format from the arrays of all their planes, one after another."""
    left = iter(arrays)
    for format in formats:
        names = ("codes", "scales", "supers")[: 1 if format in _FLOATS else 3 if format in ("Q4_K", "Q2_K") else 2]
        yield format, {name: next(left) for name in names}
