"""Planes split from raw rows on the host: the layout of `formats/planes.py`, and the way back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.formats.folder_layout import stored_arrays
from mlx_ds4.formats.host_planes import join_rows, split_rows
from mlx_ds4.formats.planes import FORMATS, dequantize
from mlx_ds4.formats.quant_blocks import TYPE_INFO
from mlx_ds4.formats.quant_blocks import dequantize as dequantize_rows

DTYPES = {"I8": "|i1", "U8": "|u1", "U32": "<u4", "F16": "<f2"}
BLOCKS = sorted(set(FORMATS) - {"FP8"})


def raw_rows(format: str, rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, 2 * TYPE_INFO[format][2]), np.uint8)


@pytest.mark.parametrize("rows", [0, 1, 4100])  # more than are rearranged at a time
@pytest.mark.parametrize("format", BLOCKS)
def test_split_and_joined_again(format, rows):
    raw = raw_rows(format, rows)
    planes = split_rows(format, raw)
    for plane, array in stored_arrays("w", format, (rows, 2 * TYPE_INFO[format][1])).items():
        assert planes[plane].shape == array.shape and planes[plane].dtype == DTYPES[array.dtype]
        assert planes[plane].flags.c_contiguous and planes[plane].nbytes == array.nbytes
    assert sum(plane.nbytes for plane in planes.values()) == raw.nbytes
    np.testing.assert_array_equal(join_rows(format, planes), raw)


@pytest.mark.parametrize("format", BLOCKS)
def test_planes_have_the_values_of_the_rows(format):
    """Two decoders, one of rows and one of planes: every value is in its place."""
    raw = raw_rows(format, 37)
    if format == "MXFP4":  # a scale that is no number, which loading refuses
        raw[:, ::17][raw[:, ::17] == 255] = 254
    planes = {name: mx.array(plane) for name, plane in split_rows(format, raw).items()}
    np.testing.assert_array_equal(np.array(dequantize(format, planes)), dequantize_rows(format, raw))


def test_refused_rows():
    raw = raw_rows("Q8_0", 3)
    for wrong in (raw[:, 1:], raw.astype(np.int8), raw[0]):
        with pytest.raises(ValueError, match="in blocks of"):
            split_rows("Q8_0", wrong)
    for convert, values in ((split_rows, raw), (join_rows, {"codes": raw})):
        with pytest.raises(ValueError, match="for format 'Q6_K', expected one of Q8_0"):
            convert("Q6_K", values)
