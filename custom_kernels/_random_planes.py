"""Random block-quantized weights for cases and benchmarks: bytes drawn plane by plane, no encoder involved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_ds4.formats.planes import FP8_TILE, Planes

# Bytes of all planes for one weight.
BYTES = {"Q8_0": 34 / 32, "Q4_K": 144 / 256, "Q2_K": 84 / 256, "IQ2_XXS": 66 / 256, "MXFP4": 17 / 32, "FP8": 1.0}
_FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
BYTES |= {format: float(dtype.size) for format, dtype in _FLOATS.items()}
# Bytes of codes for 32 columns.
_CODES = {"Q8_0": 32, "Q4_K": 16, "Q2_K": 8, "IQ2_XXS": 8, "MXFP4": 16, "FP8": 32}
# Numbers that a device draws at a time: MLX makes four bytes of each before they shrink to their type.
_DRAW = 1 << 26


class Draws(Protocol):
    """Where the numbers come from."""

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> mx.array:
        """uint8 in [low, high)."""

    def uniform(self, shape: tuple[int, ...]) -> mx.array:
        """float32 in [0, 1)."""

    def normal(self, shape: tuple[int, ...]) -> mx.array: ...


class HostDraws:
    """NumPy's generator: the same numbers on every machine."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> mx.array:
        return mx.array(self._rng.integers(low, high, shape, dtype=np.uint8))

    def uniform(self, shape: tuple[int, ...]) -> mx.array:
        return mx.array(self._rng.random(shape, dtype=np.float32))

    def normal(self, shape: tuple[int, ...]) -> mx.array:
        return mx.array(self._rng.standard_normal(shape, dtype=np.float32))


class DeviceDraws:
    """MLX's generator on the default device: gigabytes a second there."""

    def __init__(self, seed: int):
        self._key = mx.random.key(seed)

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> mx.array:
        return mx.random.randint(low, high, shape, dtype=mx.uint8, key=self._next())

    def uniform(self, shape: tuple[int, ...]) -> mx.array:
        return mx.random.uniform(shape=shape, key=self._next())

    def normal(self, shape: tuple[int, ...]) -> mx.array:
        return mx.random.normal(shape, key=self._next())

    def _next(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key


def random_planes(rng: np.random.Generator | Draws, format: str, *shape: int) -> Planes:
    """Planes of a weight of `shape` [.., out, in] with values of the size of a trained projection's, and every code."""
    draws = HostDraws(rng) if isinstance(rng, np.random.Generator) else rng
    *leading, out, width = shape

    def draw(columns: int, low: int = 0, high: int = 256) -> mx.array:
        return draws.integers((*leading, out, columns), low, high)

    def halves(columns: int, size: float) -> mx.array:
        return (size * (0.5 + draws.uniform((*leading, out, columns)))).astype(mx.float16)

    def supers(size: float, mean: float) -> mx.array:
        """Scale and minimum of each block, the minimum larger by the mean code, so that weights are zero on average."""
        return (halves(width // 128, size) * mx.array([1.0, mean] * (width // 256))).astype(mx.float16)

    if format in _FLOATS:
        return {"codes": (draws.normal((*leading, out, width)) * 0.02).astype(_FLOATS[format])}
    codes = draw(_CODES[format] * width // 32)
    if format == "Q8_0":
        return {"codes": codes.view(mx.int8), "scales": halves(width // 32, 3e-4)}
    if format == "Q4_K":
        return {"codes": codes, "scales": draw(width // 256 * 12), "supers": supers(1e-4, 7.5)}
    if format == "Q2_K":
        return {"codes": codes, "scales": draw(width // 16), "supers": supers(2e-3, 1.5)}
    if format == "IQ2_XXS":
        return {"codes": codes.view(mx.uint32), "scales": halves(width // 256, 5e-4)}
    if format == "MXFP4":
        return {"codes": codes, "scales": draw(width // 32, 118, 124)}
    codes = mx.where((codes & 127) == 127, codes ^ 1, codes)  # the two NaNs
    tiles = (*leading, -(-out // FP8_TILE), width // FP8_TILE)
    return {"codes": codes, "scales": draws.integers(tiles, 112, 118)}


def device_planes(seed: int, format: str, *shape: int) -> Planes:
    """`random_planes` on the default device, evaluated, of any size: drawn in pieces of the first axis.

    Needs memory for the weight twice, and half a gigabyte. No FP8, whose tiles span rows.
    """
    draws = DeviceDraws(seed)
    step = max(1, _DRAW // int(np.prod(shape[1:])))
    pieces = []
    for start in range(0, shape[0], step):
        pieces.append(random_planes(draws, format, min(step, shape[0] - start), *shape[1:]))
        mx.eval(pieces[-1])
    if len(pieces) == 1:
        return pieces[0]
    planes = {name: mx.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    mx.eval(planes)
    return planes


def weights_of(formats: Sequence[str], arrays: Sequence[mx.array]) -> Iterator[tuple[str, Planes]]:
    """(format, planes) of each format from the arrays of all their planes, one after another."""
    left = iter(arrays)
    for format in formats:
        names = ("codes", "scales", "supers")[: 1 if format in _FLOATS else 3 if format in ("Q4_K", "Q2_K") else 2]
        yield format, {name: next(left) for name in names}
