"""From float32 weights to the block formats of GGUF and to the release's FP8 tiles and FP4 rows, in NumPy.

`encode` chooses scales by short searches that minimise the (importance-weighted) squared error; decoding
(`quant_blocks.dequantize`) defines what the bytes mean. Rows are encoded independently of each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlx_ds4.formats.quant_blocks import (
    E2M1,
    E4M3,
    E8M0,
    TYPE_INFO,
    find_bad_scales,
    iq2_xxs_grid,
)

_CHUNK = 1 << 15  # weights per step: IQ2_XXS needs 256 bytes of scores for each, which should stay in a cache
# Beyond this no float16 factor reaches a weight, and squares would overflow float32.
_LARGEST = float(1 << 30)


# ---- plain types and blocks of 32 --------------------------------------------------------------------


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2").view(np.uint8)


def _q8_0(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    step = np.abs(x).max(1, keepdims=True) / np.float32(127)
    inverse = np.where(step == 0, np.float32(0), np.float32(1) / step)
    scaled = x * inverse
    magnitude = np.abs(scaled)
    floor = np.floor(magnitude)
    # Half away from zero, as GGML rounds; adding 0.5 first would round up the largest number below 0.5.
    codes = np.sign(scaled) * (floor + np.floor(2 * (magnitude - floor)))
    return np.concatenate([_f16_bytes(step), codes.astype(np.int8).view(np.uint8)], axis=1)


def _mxfp4(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    # GGML's rule: the exponent of the largest magnitude minus 2, ties to the smaller magnitude, no -0.
    largest = np.abs(x).max(1, keepdims=True)
    exponent = np.clip(np.frexp(largest)[1] - 1 - 2 + 127, 0, 254)
    exponent[largest == 0] = 0
    steps = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    codes = np.searchsorted(steps, np.ldexp(np.abs(x), 127 - exponent), side="left").astype(np.uint8)
    codes |= ((x < 0) & (codes > 0)).astype(np.uint8) << 3
    return np.concatenate([exponent.astype(np.uint8), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def _f16_bytes(x: np.ndarray) -> np.ndarray:
    return x.astype("<f2").view(np.uint8)


# ---- scale and minimum: Q2_K and Q4_K ----------------------------------------------------------------


def _fit_scale_min(x: np.ndarray, w: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum (both >= 0, [groups]) so that `scale * code - minimum` is near x [groups, size].

    Tries step sizes around (max - min) / top; each gives codes, and the codes a weighted least-squares
    fit of scale and minimum. The best squared error wins; a fit with a minimum of the wrong sign gives
    way to one without a minimum.
    """
    low = np.minimum(x.min(1), 0)
    span = x.max(1) - low
    best_scale, best_low = np.zeros_like(low), low.copy()
    best_error = np.full_like(low, np.inf)
    usable = np.where(span > 0, span, np.float32(1))
    sum_w, sum_x, sum_xx = w.sum(1), (w * x).sum(1), (w * x * x).sum(1)
    for step in np.linspace(top - 0.9, top + 0.9, 13, dtype=np.float32):
        codes = np.rint((x - low[:, None]) * (step / usable)[:, None])
        np.clip(codes, 0, top, out=codes)
        wc = w * codes
        sum_c, sum_cc, sum_xc = wc.sum(1), (wc * codes).sum(1), (wc * x).sum(1)
        det = sum_w * sum_cc - sum_c * sum_c
        scale = (sum_w * sum_xc - sum_x * sum_c) / det
        fit_low = (sum_cc * sum_x - sum_c * sum_xc) / det
        alone = sum_xc / sum_cc
        # Without a spread of codes only the scale can be fitted.
        positive = (fit_low > 0) | (det <= 1e-6 * sum_w * sum_cc)
        scale, fit_low = np.where(positive, alone, scale), np.where(positive, 0, fit_low)
        error = (
            sum_xx
            - 2 * (scale * sum_xc + fit_low * sum_x)
            + scale * scale * sum_cc
            + fit_low * (2 * scale * sum_c + fit_low * sum_w)
        )
        better = (error < best_error) & (scale > 0)  # a NaN (no weight, a single code) is never better
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, fit_low, best_low)
        best_error = np.where(better, error, best_error)
    return best_scale, -best_low


def _fit_integers(values: np.ndarray, w: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """float16 factor d [n, 1] and codes 0..top so that `d * codes` is near values >= 0 [n, parts]."""
    largest = values.max(1, keepdims=True)
    usable = np.where(largest > 0, largest, np.float32(1))
    best = np.zeros_like(largest)
    best_gain = np.full_like(largest, -np.inf)
    for step in np.linspace(top - 0.8, top + 0.8, 9, dtype=np.float32):
        codes = np.clip(np.rint(values * (step / usable)), 0, top)
        cross = (w * values * codes).sum(1, keepdims=True)
        square = (w * codes * codes).sum(1, keepdims=True)
        factor, gain = cross / square, cross * cross / square
        better = gain > best_gain
        best, best_gain = np.where(better, factor, best), np.where(better, gain, best_gain)
    stored = best.astype("<f2").astype(np.float32)
    codes = np.where(stored > 0, np.rint(values / np.where(stored > 0, stored, 1)), 0)
    return stored, np.clip(codes, 0, top).astype(np.uint8)


def _k_codes(
    x: np.ndarray, w: np.ndarray, size: int, top: int, top_scale: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """d, dmin [n, 1], scale and min codes [n, 256/size], codes [n, 256] of blocks x [n, 256]."""
    n = len(x)
    groups, weights = x.reshape(-1, size), w.reshape(-1, size)
    scale, low = _fit_scale_min(groups, weights, top)
    share = weights.sum(1).reshape(n, -1)
    d, scale_codes = _fit_integers(scale.reshape(n, -1), share, top_scale)
    dmin, min_codes = _fit_integers(low.reshape(n, -1), share, top_scale)
    # Codes for what is stored, not for what was wished.
    stored = (d * scale_codes)[:, :, None]
    offset = (dmin * min_codes)[:, :, None]
    codes = np.rint((x.reshape(n, -1, size) + offset) / np.where(stored > 0, stored, 1))
    codes = np.where(stored > 0, np.clip(codes, 0, top), 0)
    return d, dmin, scale_codes, min_codes, codes.astype(np.uint8).reshape(n, 256)


def _q2_k(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    d, dmin, scales, mins, codes = _k_codes(x, _weights(x, weight, 1), 16, 3, 15)
    planes = codes.reshape(-1, 2, 4, 32)
    packed = planes[:, :, 0] | planes[:, :, 1] << 2 | planes[:, :, 2] << 4 | planes[:, :, 3] << 6
    return np.concatenate([scales | mins << 4, packed.reshape(-1, 64), _f16_bytes(d), _f16_bytes(dmin)], axis=1)


def _q4_k(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    d, dmin, scales, mins, codes = _k_codes(x, _weights(x, weight, 2), 32, 15, 63)
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = mins[:, :4] | mins[:, 4:] >> 4 << 6
    third = (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4
    pairs = codes.reshape(-1, 4, 2, 32)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_f16_bytes(d), _f16_bytes(dmin), first, second, third, packed], axis=1)


def _weights(x: np.ndarray, importance: np.ndarray | None, spread: float) -> np.ndarray:
    """What an element's squared error counts: 1, or GGML's importance * sqrt(spread * mean(x^2) + x^2)."""
    if importance is None:
        return np.ones_like(x)
    return importance * np.sqrt(spread * (x * x).mean(1, keepdims=True) + x * x)


# ---- IQ2_XXS -----------------------------------------------------------------------------------------

_SIGN_BITS = np.uint32(1) << np.arange(7, dtype=np.uint32)


def _iq2_xxs(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """Each group of 32 gets a factor, each 8 weights the codeword with the least error at that factor."""
    n = len(x)
    w = _weights(x, weight, 1).reshape(-1, 8)
    eights = x.reshape(-1, 8)
    negative = eights < 0
    magnitude = np.abs(eights)
    # An even number of signs is negative: where it is odd, the cheapest weight takes the wrong sign.
    odd = np.flatnonzero(negative.sum(1) & 1)
    cheapest = (w[odd] * magnitude[odd] ** 2).argmin(1)
    negative[odd, cheapest] ^= True
    magnitude[odd, cheapest] *= -1

    # The error of codeword g at factor f is const - f cross + f^2 square, cross = 2 (w x).g, square = w.g^2.
    grid = iq2_xxs_grid()
    cross = (w * (2 * magnitude)) @ grid.T
    square = w @ (grid * grid).T
    scores = np.empty_like(cross)

    def choose(factor: np.ndarray) -> np.ndarray:
        f = np.repeat(factor, 4)[:, None]  # four codewords of a group share a factor
        np.multiply(f, square, out=scores)  # the error divided by f: f > 0 does not move the minimum
        np.subtract(scores, cross, out=scores)
        return scores.argmin(1)

    def sums(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(len(index))
        return cross[rows, index].reshape(-1, 4).sum(1) / 2, square[rows, index].reshape(-1, 4).sum(1)

    largest = magnitude.reshape(-1, 32).max(1)
    best, best_gain = np.zeros_like(largest), np.zeros_like(largest)
    for reach in (8, 25, 32, 40, 50):  # the level that the group's largest magnitude is put on at first
        factor = np.maximum(largest, 1e-30) / np.float32(reach)
        for _ in range(2):
            a, b = sums(choose(factor))
            fitted, gain = a / b, a * a / b
            better = (gain > best_gain) & (a > 0)
            best, best_gain = np.where(better, fitted, best), np.where(better, gain, best_gain)
            factor = np.where(a > 0, fitted, factor)

    # factor = d * (0.5 + code) / 4 with a 4-bit code; d in float16, rounded before the codes are chosen.
    per_block = best.reshape(n, 8)
    d = (per_block.max(1, keepdims=True) / np.float32(15.5 / 4)).astype("<f2").astype(np.float32)
    safe = np.where(d > 0, d, np.float32(1))
    code = np.clip(np.rint(per_block * 4 / safe - np.float32(0.5)), 0, 15)
    index = choose((safe * (code + np.float32(0.5)) / 4).reshape(-1)).astype(np.uint8)

    words = np.empty((n, 8, 2), "<u4")
    words[:, :, 0] = index.reshape(n, 8, 4).view("<u4")[:, :, 0]
    signs = (negative[:, :7] * _SIGN_BITS).sum(1, dtype=np.uint32).reshape(n, 8, 4)
    shifts = np.array([0, 7, 14, 21], np.uint32)
    words[:, :, 1] = (signs << shifts).sum(2, dtype=np.uint32) | code.astype(np.uint32) << 28
    return np.concatenate([_f16_bytes(d), words.reshape(n, 16).view(np.uint8)], axis=1)


_BLOCK_ENCODERS: dict[str, Callable[[np.ndarray, np.ndarray | None], np.ndarray]] = {
    "F32": lambda x, w: x.astype("<f4").view(np.uint8),
    "F16": lambda x, w: _f16_bytes(x),
    "BF16": lambda x, w: _bf16(x),
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "IQ2_XXS": _iq2_xxs,
}


def encode(type_name: str, x: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Encodes float32 [rows, cols] as uint8 [rows, row_bytes] of a GGUF type.

    F32, F16, BF16, Q8_0 and MXFP4 give the bytes that the `gguf` package gives (round to nearest even for
    the float types) and take no notice of importance. Q2_K, Q4_K and IQ2_XXS minimise the squared error,
    weighted by importance float32 [cols] (>= 0) when it is given. An all-zero block decodes to zeros.

    Raises ValueError when the type cannot be written, shapes do not fit, the last axis is not whole
    blocks, importance is negative or not finite, or a weight or its scale does not fit the type (NaN,
    infinity, beyond float16).
    """
    if type_name not in _BLOCK_ENCODERS:
        raise ValueError(f"type {type_name!r} cannot be encoded, expected one of {', '.join(_BLOCK_ENCODERS)}")
    _, elements, size = TYPE_INFO[type_name]
    x = _matrix(x, elements, type_name)
    rows, cols = x.shape
    if elements == 256 and np.abs(x).max(initial=0) > _LARGEST:
        raise ValueError(f"a weight is {np.abs(x).max():.3g}, {type_name} reaches 2^30 at most: scale it down")
    if importance is not None:
        importance = np.asarray(importance, np.float32)
        if importance.shape != (cols,):
            raise ValueError(f"importance is {list(importance.shape)}, expected [{cols}], one per column")
        if not (np.isfinite(importance).all() and (importance >= 0).all()):
            raise ValueError("importance holds a negative or non-finite number, expected means of squares")
        # Only ratios matter; a floor keeps columns that were never active from being left to chance.
        importance = np.maximum(importance / max(float(importance.max(initial=0)), 1e-30), np.float32(1e-6))
    out = np.empty((rows, cols // elements * size), np.uint8)
    if not x.size:
        return out
    step = max(1, _CHUNK // cols)
    for start in range(0, rows, step):
        part = x[start : start + step]
        weight = None
        if importance is not None:
            weight = np.broadcast_to(importance, part.shape).reshape(-1, elements)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # zero blocks; the rest is refused next
            blocks = _BLOCK_ENCODERS[type_name](part.reshape(-1, elements), weight)
        if (bad := find_bad_scales(type_name, blocks)).size:
            row = start + int(bad[0]) * elements // cols
            raise ValueError(f"row {row} does not fit {type_name}: a weight or scale exceeds its range, scale it down")
        out[start : start + step] = blocks.reshape(len(part), -1)
    return out


def _matrix(x: np.ndarray, elements: int, what: str) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim != 2 or x.shape[1] % elements:
        raise ValueError(f"weights are {list(x.shape)}, {what} needs [rows, cols] with cols a multiple of {elements}")
    if not np.isfinite(x).all():
        row = int(np.flatnonzero(~np.isfinite(x).all(1))[0])
        raise ValueError(f"row {row} holds NaN or infinity, expected finite weights: the source is damaged")
    return x


# ---- the release's FP8 tiles and FP4 rows ------------------------------------------------------------


def _power_of_two(largest: np.ndarray, top: float) -> np.ndarray:
    """E8M0 byte (int32) of the smallest power of two s with `largest * (1/top) <= s`; 127 for zero."""
    mantissa, exponent = np.frexp(largest * np.float32(1 / top))
    byte = np.clip(exponent - (mantissa == 0.5) + 127, 0, 254)
    return np.where(largest == 0, 127, byte)


def _e4m3_codes(v: np.ndarray) -> np.ndarray:
    """Nearest E4M3 codes (ties to even, saturating at 448) of finite float32."""
    a = np.minimum(np.abs(v), np.float32(448))
    quantum = np.ldexp(np.ones_like(a), np.maximum(np.frexp(a)[1] - 1, -6) - 3)
    a = np.rint(a / quantum) * quantum
    normal = (a.view(np.uint32) >> 20).astype(np.int32) - (120 << 3)
    codes = np.where(a < 2.0**-6, a * 512, normal).astype(np.uint8)
    return codes | np.signbit(v).astype(np.uint8) << 7


def _e2m1_codes(v: np.ndarray) -> np.ndarray:
    """Nearest E2M1 codes (ties to even, saturating at 6) of finite float32."""
    a = np.minimum(np.abs(v), np.float32(6))
    quantum = np.where(a < 2, np.float32(0.5), np.where(a < 4, np.float32(1), np.float32(2)))
    a = np.rint(a / quantum) * quantum
    codes = np.searchsorted(E2M1[:8], a).astype(np.uint8)
    return codes | np.signbit(v).astype(np.uint8) << 3


def encode_fp8_tiles(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FP8 storage of the release: float32 [out, in] -> E4M3 codes uint8 [out, in] and E8M0 scales uint8
    [ceil(out/32), ceil(in/32)], one per 32x32 tile (smaller at the edges).

    The scale is the smallest power of two that keeps the tile within 448; codes round to nearest even. A
    zero tile has scale byte 127. ValueError for another rank or weights that are not finite.
    """
    x = _matrix(x, 1, "FP8")
    rows, cols = x.shape
    padded = np.zeros((-(-rows // 32) * 32, -(-cols // 32) * 32), np.float32)
    padded[:rows, :cols] = np.abs(x)
    largest = padded.reshape(padded.shape[0] // 32, 32, padded.shape[1] // 32, 32).max((1, 3))
    byte = _power_of_two(largest, 448)
    return _e4m3_codes(np.ldexp(x, 127 - _spread(byte, x.shape))), byte.astype(np.uint8)


def decode_fp8_tiles(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Inverse of `encode_fp8_tiles`: float32 [out, in] = e4m3(code) * 2^(scale - 127).

    NaN codes and the scale 255 give NaN. ValueError when the tile grid does not cover the codes.
    """
    grid = tuple(-(-n // 32) for n in codes.shape)
    if codes.ndim != 2 or scales.shape != grid:
        raise ValueError(f"FP8 scales are {list(scales.shape)} for codes {list(codes.shape)}, expected {list(grid)}")
    with np.errstate(over="ignore"):
        return E4M3[codes] * _spread(E8M0[scales], codes.shape)


def _spread(tiles: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return tiles.repeat(32, 0)[: shape[0]].repeat(32, 1)[:, : shape[1]]


def encode_fp8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Engram rows of the release: float32 [rows, D] -> E4M3 codes uint8 [rows, D] and E8M0 scales uint8 [rows, D/32].

    The rule of `encode_fp8_tiles` for 32 columns of one row. ValueError unless 32 divides D and all values are finite.
    """
    x = _matrix(x, 32, "FP8")
    groups = x.reshape(len(x), -1, 32)
    byte = _power_of_two(np.abs(groups).max(2), 448)
    return _e4m3_codes(np.ldexp(groups, 127 - byte[:, :, None])).reshape(x.shape), byte.astype(np.uint8)


def encode_fp4_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FP4 storage of the release: float32 [out, in] -> packed E2M1 codes uint8 [out, in/2], the even column
    in the low nibble, and E8M0 scales uint8 [out, in/32], one per 32 columns of a row.

    The scale is the smallest power of two that keeps the 32 weights within 6; codes round to nearest even
    and keep the sign of zero. ValueError unless 32 divides `in` and all weights are finite.
    """
    x = _matrix(x, 32, "FP4")
    groups = x.reshape(len(x), -1, 32)
    byte = _power_of_two(np.abs(groups).max(2), 6)
    codes = _e2m1_codes(np.ldexp(groups, 127 - byte[:, :, None])).reshape(x.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, byte.astype(np.uint8)


def decode_fp4_rows(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Inverse of `encode_fp4_rows`: float32 [out, in] = e2m1(code) * 2^(scale - 127).

    The scale 255 gives NaN. ValueError when the scales are not one per 16 bytes of a row.
    """
    if packed.ndim != 2 or packed.shape[1] % 16 or scales.shape != (len(packed), packed.shape[1] // 16):
        raise ValueError(
            f"FP4 scales are {list(scales.shape)} for packed codes {list(packed.shape)}, "
            "expected one scale per row and 16 bytes"
        )
    codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1, 32)
    with np.errstate(over="ignore"):
        return (E2M1[codes] * E8M0[scales][:, :, None]).reshape(len(packed), -1)
