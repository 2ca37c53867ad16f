"""Encoding: equality with `gguf` and ml_dtypes where they define it, error bounds where a search decides."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from mlx_ds4.formats import quant_encode as e
from mlx_ds4.formats.quant_blocks import TYPE_INFO, dequantize, find_bad_scales, iq2_xxs_grid, iq2_xxs_signs

TYPES = ["F32", "F16", "BF16", "Q8_0", "MXFP4", "Q2_K", "Q4_K", "IQ2_XXS"]
SEARCHED = ["Q2_K", "Q4_K", "IQ2_XXS"]


def gaussian(rows: int, cols: int, seed: int = 0, spread: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, cols)) * spread).astype(np.float32)


def error(found: np.ndarray, x: np.ndarray, weight: np.ndarray | float = 1.0) -> float:
    """Root of the weighted mean square error, relative to that of x."""
    x = x.astype(np.float64)
    return float(np.sqrt((weight * (found - x) ** 2).sum() / (weight * x**2).sum()))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "MXFP4"])
def test_same_bytes_as_gguf(kind: str) -> None:
    x = np.concatenate([gaussian(40, 512, i, spread) for i, spread in enumerate((1e-3, 0.02, 1.0, 100.0))])
    x[3, :64] = 0
    x[5, :32] = np.linspace(-6, 6, 32)  # ties
    x[7] = 1 + (2 * np.arange(512) + 1) / 256  # halfway between two BF16 numbers
    x[6, :32] = np.round(x[6, :32] * 400) / 64
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(e.encode(kind, x), np.ascontiguousarray(expected).view(np.uint8))


@pytest.mark.parametrize(
    ("kind", "bound"),
    [("BF16", 0.0018), ("Q8_0", 0.006), ("MXFP4", 0.12), ("Q4_K", 0.072), ("Q2_K", 0.275), ("IQ2_XXS", 0.34)],
)
def test_error_on_gaussian_weights(kind: str, bound: float) -> None:
    x = gaussian(64, 1280)
    assert bound / 2 < error(dequantize(kind, e.encode(kind, x)), x) < bound


def test_error_on_fp4_weights() -> None:
    # The release's experts are FP4; these are the errors reported for GGML's own encoders on such sources.
    x = e.decode_fp4_rows(*e.encode_fp4_rows(gaussian(64, 1280)))
    for kind, bound in (("Q4_K", 0.066), ("Q2_K", 0.275), ("IQ2_XXS", 0.346)):
        assert error(dequantize(kind, e.encode(kind, x)), x) < bound
    assert error(dequantize("MXFP4", e.encode("MXFP4", x)), x) == 0


@pytest.mark.parametrize("kind", SEARCHED)
def test_importance_lowers_the_weighted_error(kind: str) -> None:
    x = gaussian(64, 512)
    importance = np.random.default_rng(1).exponential(1, 512).astype(np.float32) ** 2
    plain = error(dequantize(kind, e.encode(kind, x)), x, importance)
    weighted = error(dequantize(kind, e.encode(kind, x, importance)), x, importance)
    assert weighted < plain * 0.985
    # Only ratios count, and nothing breaks where no column was ever active.
    assert np.array_equal(e.encode(kind, x, importance), e.encode(kind, x, importance * 1024))
    zero = dequantize(kind, e.encode(kind, x, np.zeros(512, np.float32)))
    assert error(zero, x) < error(dequantize(kind, e.encode(kind, x)), x) * 1.1


@pytest.mark.parametrize("kind", SEARCHED)
def test_odd_distributions_stay_bounded(kind: str) -> None:
    rng = np.random.default_rng(3)
    limit = {"Q2_K": 0.5, "Q4_K": 0.12, "IQ2_XXS": 0.75}[kind]
    outlier = gaussian(8, 512)
    outlier[:, ::64] *= 30
    for x in (
        rng.uniform(-1, 1, (8, 512)).astype(np.float32),
        rng.standard_t(3, (8, 512)).astype(np.float32),
        outlier,
        np.full((8, 512), 0.37, np.float32),
        np.full((8, 512), -0.37, np.float32),
        gaussian(8, 512) + np.repeat(gaussian(8, 16, 5, 0.1), 32, 1),
        gaussian(8, 512, spread=1000.0),
        gaussian(8, 512, spread=1e-4),
    ):
        raw = e.encode(kind, x)
        assert find_bad_scales(kind, raw).size == 0
        assert error(dequantize(kind, raw), x) < limit


@pytest.mark.parametrize("kind", TYPES)
def test_zeros_empty_rows_and_independence(kind: str) -> None:
    size = 512 // TYPE_INFO[kind][1] * TYPE_INFO[kind][2]
    assert not dequantize(kind, e.encode(kind, np.zeros((3, 512), np.float32))).any()
    assert e.encode(kind, np.zeros((0, 512), np.float32)).shape == (0, size)
    assert e.encode(kind, np.zeros((4, 0), np.float32)).shape == (4, 0)
    x = gaussian(200, 512)  # more than one step of the loop
    whole = e.encode(kind, x)
    assert whole.shape == (200, size) and whole.dtype == np.uint8
    for row in (0, 63, 64, 199):
        assert np.array_equal(e.encode(kind, x[row : row + 1])[0], whole[row])
    half_zero = x[:2].copy()
    half_zero[:, :256] = 0
    decoded = dequantize(kind, e.encode(kind, half_zero))
    assert not decoded[:, :256].any() and decoded[:, 256:].any()


@pytest.mark.parametrize("kind", ["Q8_0", *SEARCHED])
def test_encoding_what_was_decoded_is_nearly_lossless(kind: str) -> None:
    # Values on the format's own grid: a search may miss the exact scales, but not by much.
    x = dequantize(kind, e.encode(kind, gaussian(32, 512)))
    bound = {"Q8_0": 3e-4, "Q4_K": 0.012, "Q2_K": 0.08, "IQ2_XXS": 0.02}[kind]
    assert error(dequantize(kind, e.encode(kind, x)), x) < bound


def test_iq2_codewords_are_nearly_the_best() -> None:
    # All 256 codewords with all 128 sign patterns, at the factor that the encoder stored.
    x = gaussian(16, 256, 1)
    raw = e.encode("IQ2_XXS", x)
    found = ((dequantize("IQ2_XXS", raw) - x) ** 2).reshape(-1, 8).sum(1)
    candidates = (iq2_xxs_grid()[:, None] * iq2_xxs_signs()).reshape(-1, 8)
    nibble = raw[:, 2:].copy().view("<u4").reshape(16, 8, 2)[:, :, 1] >> 28
    factor = raw[:, :2].copy().view("<f2").astype(np.float32) * (nibble + np.float32(0.5)) / 4
    eights = (x.reshape(16, 8, 4, 8) / factor[:, :, None, None]).reshape(-1, 8)
    errors = (eights**2).sum(1)[:, None] - 2 * eights @ candidates.T + (candidates**2).sum(1)
    best = errors.min(1) * np.repeat(factor.reshape(-1), 4) ** 2
    assert (found >= best * 0.999 - 1e-9).all()
    assert found.sum() < best.sum() * 1.004  # 1.008 when the weight with the wrong sign is ignored


def test_refusals() -> None:
    x = gaussian(2, 256)
    with pytest.raises(ValueError, match="type 'Q5_K' cannot be encoded"):
        e.encode("Q5_K", x)
    with pytest.raises(ValueError, match="multiple of 256"):
        e.encode("Q2_K", x[:, :128])
    with pytest.raises(ValueError, match=r"importance is \[3\], expected \[256\]"):
        e.encode("Q2_K", x, np.ones(3, np.float32))
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="negative or non-finite"):
            e.encode("Q2_K", x, np.full(256, bad, np.float32))
    for kind in TYPES:
        for bad in (np.nan, np.inf):
            y = x.copy()
            y[1, 5] = bad
            with pytest.raises(ValueError, match="row 1 holds NaN or infinity"):
                e.encode(kind, y)
    for kind, big in (("F16", 66000.0), ("Q8_0", 1e7), ("Q4_K", 1e9), ("Q2_K", 1e8), ("IQ2_XXS", 1e9), ("Q2_K", 1e30)):
        y = x.copy()
        y[1] *= np.float32(big) / np.abs(x[1]).max()
        with pytest.raises(ValueError, match="scale it down"):
            e.encode(kind, y)


# ---- the release's own formats -----------------------------------------------------------------------


def test_fp8_codes_round_as_ml_dtypes() -> None:
    rng = np.random.default_rng(4)
    v = np.concatenate([rng.standard_normal(20000) * s for s in (1e-3, 0.02, 1, 100)]).astype(np.float32)
    levels = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    v = np.concatenate([v, levels, -levels, (levels[1:] + levels[:-1]) / 2, np.float32([448, -448, 0, -0.0])])
    v = np.clip(v, -448, 448)
    assert np.array_equal(e._e4m3_codes(v), v.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    v = np.clip(np.concatenate([v, np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, -2.5])]), -6, 6)
    assert np.array_equal(e._e2m1_codes(v), v.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


@pytest.mark.parametrize("shape", [(64, 96), (33, 31), (1, 1), (80, 64)])
def test_fp8_tiles(shape: tuple[int, int]) -> None:
    x = gaussian(*shape) * np.float32(10)
    codes, scales = e.encode_fp8_tiles(x)
    assert codes.shape == shape and scales.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = np.abs(x[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]).max()
            assert 224 < tile / 2.0 ** (int(scales[i, j]) - 127) <= 448  # the smallest that fits
    found = e.decode_fp8_tiles(codes, scales)
    assert error(found, x) < 0.035
    again = e.encode_fp8_tiles(found)
    assert np.array_equal(e.decode_fp8_tiles(*again), found)


def test_fp4_rows() -> None:
    x = gaussian(10, 96)
    x[0, :32] = 0
    packed, scales = e.encode_fp4_rows(x)
    assert packed.shape == (10, 48) and scales.shape == (10, 3) and scales[0, 0] == 127
    largest = np.abs(x).reshape(10, 3, 32).max(2)
    ratio = largest / 2.0 ** (scales.astype(int) - 127)
    assert (ratio <= 6).all() and (ratio[largest > 0] > 3).all()
    found = e.decode_fp4_rows(packed, scales)
    assert error(found, x) < 0.13
    # The low nibble is the even column.
    one = np.zeros((1, 32), np.float32)
    one[0, :2] = 6, -0.5
    assert e.encode_fp4_rows(one)[0][0, 0] == 0x97
    assert np.array_equal(e.decode_fp4_rows(*e.encode_fp4_rows(found)), found)


def test_golden_checkpoint_survives_decoding_and_encoding() -> None:
    """The tiny release's own FP8 and FP4 tensors: decoded, encoded and decoded again they are the same."""
    folder = Path(__file__).parents[1] / "golden" / "nano" / "model"
    seen = set()
    for shard in sorted(folder.glob("*.safetensors")):
        raw = shard.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])

        def tensor(name: str, header: dict = header, raw: bytes = raw, base: int = 8 + length) -> np.ndarray:
            start, stop = header[name]["data_offsets"]
            return np.frombuffer(raw[base + start : base + stop], np.uint8).reshape(header[name]["shape"])

        for name, info in header.items():
            scale = name.removesuffix("weight") + "scale"
            if info.get("dtype") not in ("F8_E4M3", "I8") or scale not in header or "engram.embed" in name:
                continue
            kind = info["dtype"]
            decode, encode = {
                "F8_E4M3": (e.decode_fp8_tiles, e.encode_fp8_tiles),
                "I8": (e.decode_fp4_rows, e.encode_fp4_rows),
            }[kind]
            values = decode(tensor(name), tensor(scale))
            assert np.isfinite(values).all() and values.any()
            assert np.array_equal(decode(*encode(values)), values)
            seen.add(kind)
    assert seen == {"F8_E4M3", "I8"}


def test_refusals_of_the_release_formats() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        e.encode_fp4_rows(np.zeros((2, 40), np.float32))
    with pytest.raises(ValueError, match="NaN or infinity"):
        e.encode_fp8_tiles(np.full((2, 2), np.nan, np.float32))
    with pytest.raises(ValueError, match=r"expected \[2, 1\]"):
        e.decode_fp8_tiles(np.zeros((40, 20), np.uint8), np.zeros((1, 1), np.uint8))
    with pytest.raises(ValueError, match="one scale per row and 16 bytes"):
        e.decode_fp4_rows(np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8))
    assert np.isnan(e.decode_fp4_rows(np.zeros((1, 16), np.uint8), np.full((1, 1), 255, np.uint8))).all()
    assert np.isnan(e.decode_fp8_tiles(np.uint8([[0x7F]]), np.uint8([[127]]))).all()
