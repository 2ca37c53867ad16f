"""Decoding of blocks: golden digests, and bit equality with the `gguf` package on every kind of block."""

from __future__ import annotations

import hashlib

import gguf
import ml_dtypes
import numpy as np
import pytest

from mlx_ds4.formats import quant_blocks as q

WEIGHTS = ["F32", "F16", "BF16", "Q8_0", "Q2_K", "Q4_K", "IQ2_XXS", "MXFP4"]
FACTORS = {"Q8_0": (0,), "Q2_K": (80, 82), "Q4_K": (0, 2), "IQ2_XXS": (0,)}
HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01]  # both zeros ... NaN


def digest(values: np.ndarray) -> str:
    return hashlib.sha256((values + 0.0).astype("<f4").tobytes()).hexdigest()  # -0 becomes +0


GOLDEN = {
    "Q8_0": "b81bd787709d805ab8fedc5f7a44b77c07742fafc712ce6b2a62b688c6dd14c5",
    "Q2_K": "de3a7a865d569cb4713399f42bee1ce65a599585adc8d7068df6460428733016",
    "Q4_K": "4f3987f514b163ce328aa5af0ecbbc46a35ff8d4f584c2bfc7241e4c2627f68c",
    "IQ2_XXS": "16d265cf57b5093d6c0e47c223e139234ca98a71b888043aae554bae6fd58a72",
    "MXFP4": "21c7a5fc95091dfcf3ffd0e1a3275c913cd52fdeb494ccd7bee176d6d9137d15",
}


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("Q8_0", [5.3125, 7.625, -6.0625, -3.75]),
        ("Q2_K", [2.0625, 0, 0.6875, 1.375]),
        ("Q4_K", [19.71875, -1.59375, 8.09375, 17.78125]),
        ("IQ2_XXS", [-3.6953125, 3.6953125, 2.1484375, -2.1484375]),
        ("MXFP4", [0, 0.046875, -0.015625, -0.09375]),
    ],
)
def test_golden_blocks(kind: str, first: list[float]) -> None:
    raw = ((37 * np.arange(q.TYPE_INFO[kind][2]) + 11) & 255).astype(np.uint8)
    if kind == "MXFP4":
        raw[0] = 121
    for at, half in zip(FACTORS.get(kind, ()), (0x2C00, 0x2800), strict=False):
        raw[at : at + 2] = half & 255, half >> 8
    values = q.dequantize(kind, raw)
    assert values[:4].tolist() == first
    assert digest(values) == GOLDEN[kind]


def test_golden_engram_row() -> None:
    raw = ((37 * np.arange(264) + 11) & 255).astype(np.uint8)
    raw[:256][(raw[:256] & 127) == 127] = 0x38
    raw[256:] = np.arange(118, 126)
    values = q.decode_engram_rows(raw[None])[0]
    assert values[:4].tolist() == [4.1961669921875e-05, 0.0009765625, 0.025390625, 0.625]
    assert digest(values) == "81b895bee07e8d26ebaf083dddbf4807d0363345ea0d535d2942cd83e1be1e90"


def test_tables() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for table, dtype in ((q.E4M3, ml_dtypes.float8_e4m3fn), (q.E8M0, ml_dtypes.float8_e8m0fnu)):
        assert np.array_equal(table, codes.view(dtype).astype(np.float32), equal_nan=True)
    expected = codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(q.E2M1.view(np.uint32), expected.view(np.uint32))


def test_iq2_tables() -> None:
    grid = q.iq2_xxs_grid().astype(np.uint8)
    assert hashlib.sha256(grid.tobytes()).hexdigest() == (
        "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54")  # fmt: skip
    packed = (np.searchsorted([8, 25, 43], grid) << 2 * np.arange(8)).sum(1)
    assert packed[0] == 0 and packed[-1] == 43268 and (np.diff(packed) > 0).all()
    assert hashlib.sha256(packed.astype("<u2").tobytes()).hexdigest() == (
        "915952ebc4af8ddba8113583ca1316fc818843f7b825bbf1a25ae1c39bf0e16d")  # fmt: skip
    signs = ((q.iq2_xxs_signs() < 0) << np.arange(8)).sum(1).astype(np.uint8)
    assert hashlib.sha256(signs.tobytes()).hexdigest() == (
        "a76742a603f8beca5212ecce0f1f02f11a4887fd2f7c8b15aca0ea3eb3380c31")  # fmt: skip


def adversarial(kind: str) -> np.ndarray:
    """Random blocks, all-equal bytes, and every extreme factor with random contents: uint8 [n, bytes]."""
    rng = np.random.default_rng(7)
    size = q.TYPE_INFO[kind][2]
    blocks = [rng.integers(0, 256, (400, size), dtype=np.uint8)]
    blocks.append(np.repeat(np.arange(256, dtype=np.uint8)[:, None], size, axis=1))
    if kind in FACTORS:
        extreme = rng.integers(0, 256, (len(HALVES) ** 2, size), dtype=np.uint8)
        pairs = np.array([(a, b) for a in HALVES for b in HALVES], "<u2")
        for column, at in enumerate(FACTORS[kind]):
            extreme[:, at : at + 2] = pairs[:, column : column + 1].view(np.uint8).reshape(-1, 2)
        blocks.append(extreme)
    if kind == "MXFP4":
        scales = rng.integers(0, 256, (256, size), dtype=np.uint8)
        scales[:, 0] = np.arange(256)
        blocks.append(scales)
    return np.concatenate(blocks)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_dequantize_equals_gguf_bit_for_bit(kind: str) -> None:
    raw = adversarial(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    found = q.dequantize(kind, raw)
    nan = np.isnan(expected)
    assert found.dtype == np.float32 and np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    assert (~nan).mean() > 0.5


@pytest.mark.parametrize("kind", WEIGHTS)
def test_any_leading_shape_and_slices(kind: str) -> None:
    _, elements, size = q.TYPE_INFO[kind]
    raw = np.random.default_rng(1).integers(0, 60, (6, 4, 3 * size), dtype=np.uint8)
    found = q.dequantize(kind, raw[::2, 1:])
    assert found.shape == (3, 3, 3 * elements)
    assert np.array_equal(found[1, 2], q.dequantize(kind, raw[2, 3]))
    assert q.dequantize(kind, raw[:0]).shape == (0, 4, 3 * elements)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_bad_scales_are_those_that_decode_to_no_number(kind: str) -> None:
    raw = adversarial(kind)
    if kind == "MXFP4":
        expected = raw[:, 0] == 255  # GGML gives it a value, the format does not
    elif kind in FACTORS:
        halves = np.stack([raw[:, at : at + 2].copy().view("<f2")[:, 0] for at in FACTORS[kind]])
        expected = ~np.isfinite(halves).all(0)
    else:
        expected = ~np.isfinite(q.dequantize(kind, raw)[:, 0])
    assert expected.any() and not expected.all()
    assert q.find_bad_scales(kind, raw).tolist() == np.flatnonzero(expected).tolist()
    assert q.find_bad_scales(kind, raw.reshape(1, -1)).tolist() == np.flatnonzero(expected).tolist()


def test_wrong_input_is_refused() -> None:
    for kind in ("I8", "I32", "Q4_0"):
        with pytest.raises(ValueError, match=f"type '{kind}' holds no weights"):
            q.dequantize(kind, np.zeros(4, np.uint8))
    for raw in (np.zeros(33, np.uint8), np.zeros(34, np.int8), np.uint8(1)):
        with pytest.raises(ValueError, match="a multiple of 34 bytes"):
            q.find_bad_scales("Q8_0", np.asarray(raw))


def test_engram_rows_of_any_width() -> None:
    rng = np.random.default_rng(2)
    for width in (32, 64, 256):
        raw = rng.integers(0, 255, (50, width // 32 * 33), dtype=np.uint8)
        codes = raw[:, :width].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scales = 2.0 ** (raw[:, width:].astype(np.float64) - 127)
        with np.errstate(over="ignore"):
            expected = (codes * scales.repeat(32, 1)).astype(np.float32)
        assert np.array_equal(q.decode_engram_rows(raw), expected, equal_nan=True)
    for shape in ((2, 65), (2, 0), (66,)):
        with pytest.raises(ValueError, match="expected uint8"):
            q.decode_engram_rows(np.zeros(shape, np.uint8))


def test_bad_engram_rows() -> None:
    raw = np.full((6, 66), 126, np.uint8)
    raw[1, 0], raw[2, 63], raw[4, 65] = 0x7F, 0xFF, 255
    raw[5, 65] = 0x7F  # an ordinary scale
    assert q.find_bad_engram_rows(raw).tolist() == [1, 2, 4]
    assert np.flatnonzero(np.isnan(q.decode_engram_rows(raw)).any(1)).tolist() == [1, 2, 4]
