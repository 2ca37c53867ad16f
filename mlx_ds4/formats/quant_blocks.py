"""Block formats of GGUF tensors: their sizes and what their bytes mean, in NumPy.

`dequantize` gives, bit for bit, what `gguf.quants.dequantize` gives; it is the definition of a weight's
value that kernels, repacking and encoders are tested against. Engram rows, which GGUF stores as plain
I8, are decoded here too. Everything computes in float32, in the order in which it is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

# name -> (GGML type id, elements of a block, bytes of a block)
TYPE_INFO: dict[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q4_K": (12, 256, 144),
    "IQ2_XXS": (16, 256, 66),
    "I8": (24, 1, 1),
    "I32": (26, 1, 4),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}

# Where the float16 factors of a block lie.
_F16_FIELDS = {"Q8_0": (0,), "Q2_K": (80, 82), "Q4_K": (0, 2), "IQ2_XXS": (0,)}

# E2M1 code -> value; code 8 is -0.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_table() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


# E4M3 code -> value: no infinities, 0x7F and 0xFF are NaN, the largest value is 448.
E4M3 = _e4m3_table()

# E8M0 byte -> 2^(byte - 127); 0 is the subnormal 2^-127 and 255 is NaN.
E8M0 = np.append(np.ldexp(np.ones(255, np.float32), np.arange(255) - 127), np.float32(np.nan))


def _e8m0_half_table() -> np.ndarray:
    # The factor of doubled E2M1 values, 2^(byte - 128), as bit patterns: 255 stays the finite 2^127 as in GGML.
    byte = np.arange(256, dtype=np.uint32)
    return np.where(byte < 2, np.uint32(0x00200000) << (byte & 1), (byte - 1) << 23).astype("<u4").view("<f4")


_E8M0_HALF = _e8m0_half_table()
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # +0 twice


@functools.cache
def iq2_xxs_grid() -> np.ndarray:
    """The 256 codewords of IQ2_XXS: float32 [256, 8] with entries 8, 25 and 43 (from the `gguf` package)."""
    from gguf.quants import IQ2_XXS  # here, since importing it costs more than everything else in this file

    IQ2_XXS.init_grid()
    return IQ2_XXS.grid.reshape(256, 8).astype(np.float32)


@functools.cache
def iq2_xxs_signs() -> np.ndarray:
    """The 128 sign patterns of IQ2_XXS: float32 [128, 8] of +-1; an even number of them is negative."""
    index = np.arange(128)
    bits = index[:, None] >> np.arange(8) & 1
    bits[:, 7] = bits[:, :7].sum(1) & 1
    return (1 - 2 * bits).astype(np.float32)


def _field(blocks: np.ndarray, start: int, stop: int, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _f16(blocks: np.ndarray, start: int) -> np.ndarray:
    return _field(blocks, start, start + 2, "<f2").astype(np.float32)  # [n, 1]


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _field(blocks, 2, 34, "i1").astype(np.float32) * _f16(blocks, 0)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    n = len(blocks)
    scales = blocks[:, :16]
    scale = _f16(blocks, 80) * (scales & 15).astype(np.float32)  # [n, 16], one per 16 weights
    low = _f16(blocks, 82) * (scales >> 4).astype(np.float32)
    # Two halves of 128 weights; a byte holds the same lane of four planes of 32.
    planes = blocks[:, 16:80].reshape(n, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    codes = (planes & 3).astype(np.float32).reshape(n, 16, 16)
    return (scale[:, :, None] * codes - low[:, :, None]).reshape(n, 256)


def q4_k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit scales and mins of Q4_K blocks: two uint8 [n, 8] from uint8 [n, 144]."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales, mins


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    n = len(blocks)
    scales, mins = q4_k_scales(blocks)
    scale = _f16(blocks, 0) * scales.astype(np.float32)  # [n, 8], one per 32 weights
    low = _f16(blocks, 2) * mins.astype(np.float32)
    nibbles = blocks[:, 16:].reshape(n, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    codes = (nibbles & 15).astype(np.float32).reshape(n, 8, 32)
    return (scale[:, :, None] * codes - low[:, :, None]).reshape(n, 256)


def _iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    n = len(blocks)
    words = _field(blocks, 2, 66, "<u4").reshape(n, 8, 2)
    factor = _f16(blocks, 0) * (np.float32(0.5) + (words[:, :, 1] >> 28).astype(np.float32)) * np.float32(0.25)
    index = np.ascontiguousarray(words[:, :, 0]).view("<u4")[:, :, None] >> np.array([0, 8, 16, 24], np.uint32)
    sign = words[:, :, 1:] >> np.array([0, 7, 14, 21], np.uint32)
    out = factor[:, :, None, None] * iq2_xxs_grid()[index & 255]  # [n, 8, 4, 8]
    out *= iq2_xxs_signs()[sign & 127]
    return out.reshape(n, 256)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[:, 1:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1)  # the high nibbles are the second half
    return _E8M0_HALF[blocks[:, :1]] * _E2M1_DOUBLED[codes]


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda blocks: blocks.view("<f4").astype(np.float32),
    "F16": lambda blocks: blocks.view("<f2").astype(np.float32),
    "BF16": lambda blocks: (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "IQ2_XXS": _iq2_xxs,
    "MXFP4": _mxfp4,
}


def _blocks(type_name: str, raw: np.ndarray) -> np.ndarray:
    """Contiguous uint8 [blocks, bytes of a block]; ValueError for a type or a width that does not fit."""
    if type_name not in _DECODERS:
        raise ValueError(f"type {type_name!r} holds no weights, expected one of {', '.join(_DECODERS)}")
    size = TYPE_INFO[type_name][2]
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % size:
        raise ValueError(
            f"{type_name} rows are {raw.dtype} {list(raw.shape)}, expected uint8 whose last axis is a multiple "
            f"of {size} bytes: pass whole rows of the tensor"
        )
    return np.ascontiguousarray(raw).reshape(-1, size)


def dequantize(type_name: str, raw: np.ndarray) -> np.ndarray:
    """Values of quantized rows: uint8 [..., bytes] -> float32 [..., elements], equal to `gguf`'s.

    Works on the float types too. Damaged scales are not refused here (see `find_bad_scales`): they give
    NaN or infinity like any other number. ValueError for I8, I32, an unknown type, or a last axis that is
    not whole blocks. Temporaries take several times the result, so large tensors belong in pieces.
    """
    blocks = _blocks(type_name, raw)
    with np.errstate(invalid="ignore", over="ignore"):
        values = _DECODERS[type_name](blocks)
    return values.reshape(*raw.shape[:-1], raw.shape[-1] // TYPE_INFO[type_name][2] * TYPE_INFO[type_name][1])


def find_bad_scales(type_name: str, raw: np.ndarray) -> np.ndarray:
    """Flat numbers (int64, ascending) of the blocks of uint8 [..., bytes] that cannot be weights.

    A block is bad when one of its float16 factors is NaN or infinite, or when its E8M0 byte is 255; for
    the float types every element is a block of its own. Same ValueError as `dequantize`.
    """
    blocks = _blocks(type_name, raw)
    if type_name == "MXFP4":
        bad = blocks[:, 0] == 255
    elif type_name == "F32":
        bad = (blocks.view("<u4")[:, 0] & 0x7F800000) == 0x7F800000
    elif type_name == "BF16":
        bad = (blocks.view("<u2")[:, 0] & 0x7F80) == 0x7F80
    else:
        bad = np.zeros(len(blocks), bool)
        for start in _F16_FIELDS.get(type_name, (0,)):
            bad |= (_field(blocks, start, start + 2, "<u2")[:, 0] & 0x7C00) == 0x7C00
    return np.flatnonzero(bad)


def _engram_width(raw: np.ndarray) -> int:
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] == 0 or raw.shape[1] % 33:
        raise ValueError(
            f"Engram rows are {raw.dtype} {list(raw.shape)}, expected uint8 [rows, D + D/32]: "
            "pass whole rows of the table"
        )
    return raw.shape[1] // 33 * 32


def decode_engram_rows(raw: np.ndarray) -> np.ndarray:
    """Values of Engram rows: uint8 [n, D + D/32] -> float32 [n, D].

    A row is D E4M3 codes and then one E8M0 byte for each 32 of them: `e4m3(code) * 2^(scale - 127)`.
    NaN codes and the scale 255 give NaN (`find_bad_engram_rows` finds them). ValueError for another shape.
    """
    width = _engram_width(raw)
    codes = E4M3[raw[:, :width]].reshape(len(raw), -1, 32)
    with np.errstate(over="ignore"):
        return (codes * E8M0[raw[:, width:]][:, :, None]).reshape(len(raw), width)


def find_bad_engram_rows(raw: np.ndarray) -> np.ndarray:
    """Numbers (int64, ascending) of the rows of uint8 [n, D + D/32] that hold a NaN code or the scale 255."""
    width = _engram_width(raw)
    return np.flatnonzero(((raw[:, :width] & 127) == 127).any(1) | (raw[:, width:] == 255).any(1))
