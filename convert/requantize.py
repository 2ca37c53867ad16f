"""Float weights of a research model in a block format, on request; nothing else is ever quantized again.

MLX's modes are mapped to the block formats that the kernels read: affine with 8, 4 and 2 bits to Q8_0, Q4_K and Q2_K
(scale and offset for 32 or 16 columns, in the K-quants themselves quantized), mxfp4 to MXFP4, mxfp8 to FP8 with one
scale for a tile of 32x32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from mlx_ds4.formats.folder_layout import FLOATS, stored_arrays
from mlx_ds4.formats.host_planes import split_rows
from mlx_ds4.formats.quant_blocks import TYPE_INFO, dequantize
from mlx_ds4.formats.quant_encode import encode, encode_fp8_tiles

from .mlx_plan import Item, item_bytes

# (mode, bits, group size) -> block format
MODES = {
    ("affine", 4, 32): "Q4_K",
    ("affine", 8, 32): "Q8_0",
    ("affine", 2, 16): "Q2_K",
    ("mxfp4", 4, 32): "MXFP4",
    ("mxfp8", 8, 32): "FP8",
}
_ROLES = ("attention", "shared_expert", "head", "expert_gate", "expert_up", "expert_down")
_ROWS = 1024  # of a matrix at a time: whole tiles; of stacked experts one expert


def block_format(mode: str, bits: int | None, group: int | None) -> str:
    """The block format of MLX's mode; without bits or group size those of its first entry in `MODES`.

    ValueError for what no block format holds.
    """
    for (a, b, c), name in MODES.items():
        if a == mode and bits in (None, b) and group in (None, c):
            return name
    known = "; ".join(f"{a}: {b} bits, group {c}" for a, b, c in MODES)
    raise ValueError(
        f"no format holds {mode} with {bits or 'any'} bits in groups of {group or 'any'}: use one of {known}"
    )


def requantize(items: Sequence[Item], format: str, path: object) -> list[Item]:
    """The items with their float matrices of attention, experts and head in `format`, where their widths allow it.

    ValueError when the source is quantized already: its values would be rounded twice.
    """
    blocks = sorted({item.format for item in items} - set(FLOATS))
    if blocks:
        raise ValueError(f"{path}: holds {', '.join(blocks)} already: -q is for models of float weights, leave it out")
    return [_quantized(item, format) for item in items]


def _quantized(item: Item, format: str) -> Item:
    weight = item.weight
    block = 32 if format == "FP8" else TYPE_INFO[format][1]
    if weight.role not in _ROLES or len(weight.shape) < 2 or weight.shape[-1] % block:
        return item
    arrays = stored_arrays(weight.name, format, weight.shape)
    return dataclasses.replace(item, format=format, arrays=arrays, pieces=lambda: _encoded(item, format))


def _encoded(item: Item, format: str) -> Iterator[dict[str, np.ndarray]]:
    for rows in _matrices(item):
        try:
            if format == "FP8":
                codes, scales = encode_fp8_tiles(rows)
                yield {"codes": codes, "scales": scales}
            else:
                yield split_rows(format, encode(format, rows))
        except ValueError as error:
            raise ValueError(f"{item.weight.name}: {error}") from None


def _matrices(item: Item) -> Iterator[np.ndarray]:
    """The values as float32 [n, in]: an expert each, or `_ROWS` rows."""
    shape = item.weight.shape
    step = shape[-2] if len(shape) == 3 else _ROWS
    kept: list[np.ndarray] = []
    for piece in item.pieces():
        rows = np.ascontiguousarray(piece[""]).view(np.uint8).reshape(-1, shape[-1] * piece[""].itemsize)
        kept.append(dequantize(item.format, rows))
        while sum(map(len, kept)) >= step:
            whole = np.concatenate(kept)
            yield whole[:step]
            kept = [whole[step:]]
    if sum(map(len, kept)):
        yield np.concatenate(kept)


def table(before: Sequence[Item], after: Sequence[Item]) -> Iterator[str]:
    """What each weight became: its name, old and new format, bytes."""
    width = max(len(item.weight.name) for item in before)
    for old, new in zip(before, after, strict=True):
        sizes = [item_bytes([item]) for item in (old, new)]
        change = new.format if new.format != old.format else "kept"
        yield f"{old.weight.name:<{width}}  {old.format:<5}{sizes[0]:>16,}  {change:<7}{sizes[1]:>16,}"
