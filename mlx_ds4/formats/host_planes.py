"""Raw GGUF rows split into planes and joined again, bit for bit, with NumPy: the way between a file and memory.

The planes are those of `planes.py`. MLX operations for the same took two to eight times as long on a CPU
(`docs/log.md`).
"""

from __future__ import annotations

import numpy as np

from mlx_ds4.formats.quant_blocks import TYPE_INFO

# format -> plane -> (first byte of it in a block, behind the last, dtype)
_SPLITS = {
    "Q8_0": {"codes": (2, 34, "|i1"), "scales": (0, 2, "<f2")},
    "Q4_K": {"codes": (16, 144, "|u1"), "scales": (4, 16, "|u1"), "supers": (0, 4, "<f2")},
    "Q2_K": {"codes": (16, 80, "|u1"), "scales": (0, 16, "|u1"), "supers": (80, 84, "<f2")},
    "IQ2_XXS": {"codes": (2, 66, "<u4"), "scales": (0, 2, "<f2")},
    "MXFP4": {"codes": (1, 17, "|u1"), "scales": (0, 1, "|u1")},
}
_IN_CACHE = 4096  # blocks rearranged at a time


def split_rows(name: str, raw: np.ndarray) -> dict[str, np.ndarray]:
    """Raw rows uint8 [n, row bytes] of a GGUF block format -> plane name -> contiguous [n, width].

    Raises ValueError for an unknown format or rows that are not whole blocks.
    """
    if name not in _SPLITS:
        raise ValueError(f"no planes for format {name!r}, expected one of {', '.join(_SPLITS)}")
    size = TYPE_INFO[name][2]
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] % size:
        raise ValueError(f"{name} rows are {raw.dtype} {list(raw.shape)}, expected uint8 in blocks of {size}")
    blocks, count = raw.reshape(-1, size), raw.shape[1] // size
    out = {}
    for plane, (start, stop, dtype) in _SPLITS[name].items():
        part = np.ascontiguousarray(blocks[:, start:stop])
        if name == "MXFP4" and plane == "codes":
            part = _neighbours(part)
        out[plane] = part.reshape(len(raw), count * (stop - start)).view(dtype)
    return out


def join_rows(name: str, planes: dict[str, np.ndarray]) -> np.ndarray:
    """The raw rows uint8 [n, row bytes] of planes [n, width]: the inverse of `split_rows`.

    Raises ValueError for an unknown format.
    """
    if name not in _SPLITS:
        raise ValueError(f"no GGUF rows for format {name!r}, expected one of {', '.join(_SPLITS)}")
    size = TYPE_INFO[name][2]
    start, stop, _ = _SPLITS[name]["codes"]
    rows, width = planes["codes"].shape
    count = width * planes["codes"].itemsize // (stop - start)
    blocks = np.empty((rows * count, size), np.uint8)
    for plane, (start, stop, _) in _SPLITS[name].items():
        part = np.ascontiguousarray(planes[plane]).view(np.uint8).reshape(len(blocks), stop - start)
        if name == "MXFP4" and plane == "codes":
            blocks[:, start:stop:2] = part[:, :8] & 0x0F | part[:, 8:] << 4
            blocks[:, start + 1 : stop : 2] = part[:, :8] >> 4 | part[:, 8:] & 0xF0
        else:
            blocks[:, start:stop] = part
    return blocks.reshape(rows, count * size)


def _neighbours(codes: np.ndarray) -> np.ndarray:
    """Nibbles of 32 columns, [n, 16] with columns i and i + 16 in byte i, as pairs of columns 2i and 2i + 1."""
    out = np.empty_like(codes)
    for start in range(0, len(codes), _IN_CACHE):
        pairs, part = codes[start : start + _IN_CACHE].view("<u2"), out[start : start + _IN_CACHE]
        part[:, :8] = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
        part[:, 8:] = (pairs >> 4 & 0x0F) | (pairs >> 8 & 0xF0)
    return out
