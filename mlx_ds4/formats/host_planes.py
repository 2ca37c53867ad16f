"""Raw GGUF rows split into planes on the host, with NumPy: the way from a file to memory or to another file.

Bit for bit the planes of `planes.to_planes`, several times as fast as its MLX operations on a CPU.
"""

from __future__ import annotations

import numpy as np

# format -> plane -> (first byte of it in a block, behind the last, dtype)
_SPLITS = {
    "Q8_0": {"codes": (2, 34, "|i1"), "scales": (0, 2, "<f2")},
    "Q4_K": {"codes": (16, 144, "|u1"), "scales": (4, 16, "|u1"), "supers": (0, 4, "<f2")},
    "Q2_K": {"codes": (16, 80, "|u1"), "scales": (0, 16, "|u1"), "supers": (80, 84, "<f2")},
    "IQ2_XXS": {"codes": (2, 66, "<u4"), "scales": (0, 2, "<f2")},
    "MXFP4": {"codes": (1, 17, "|u1"), "scales": (0, 1, "|u1")},
}
_IN_CACHE = 4096  # blocks rearranged at a time
_BLOCK_BYTES = {"Q8_0": 34, "Q4_K": 144, "Q2_K": 84, "IQ2_XXS": 66, "MXFP4": 17}


def split_rows(name: str, raw: np.ndarray) -> dict[str, np.ndarray]:
    """Raw rows uint8 [n, row bytes] of a GGUF block format -> plane name -> contiguous [n, width].

    Raises ValueError for an unknown format or rows that are not whole blocks.
    """
    if name not in _SPLITS:
        raise ValueError(f"no planes for format {name!r}, expected one of {', '.join(_SPLITS)}")
    size = _BLOCK_BYTES[name]
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] % size:
        raise ValueError(f"{name} rows are {raw.dtype} {list(raw.shape)}, expected uint8 in blocks of {size}")
    blocks = raw.reshape(-1, size)
    out = {}
    for plane, (start, stop, dtype) in _SPLITS[name].items():
        part = np.ascontiguousarray(blocks[:, start:stop])
        if name == "MXFP4" and plane == "codes":
            part = _neighbours(part)
        out[plane] = part.reshape(len(raw), -1).view(dtype)
    return out


def _neighbours(codes: np.ndarray) -> np.ndarray:
    """Nibbles of 32 columns, [n, 16] with columns i and i + 16 in byte i, as pairs of columns 2i and 2i + 1."""
    out = np.empty((len(codes), 4), "<u4")
    for start in range(0, len(codes), _IN_CACHE):
        words = codes[start : start + _IN_CACHE].view("<u8")  # [n, 2]
        out[start : start + _IN_CACHE, :2] = _low_nibbles(words)
        out[start : start + _IN_CACHE, 2:] = _low_nibbles(words >> 4)
    return out.view(np.uint8)


def _low_nibbles(words: np.ndarray) -> np.ndarray:
    """The low nibbles of the 8 bytes of each uint64, one behind the other in 32 bits."""
    words = words & 0x0F0F0F0F0F0F0F0F
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
        words |= words >> shift
        words &= mask
    return words.astype("<u4")
