"""What a converted folder is made of: file names, the arrays of each stored format, records of packed experts.

Shared by the converter, which plans and writes, and by the loader, which expects. `docs/convert.md` describes
the same for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_ds4.formats.planes import FORMATS
from mlx_ds4.formats.safetensors import DTYPE_BYTES

VERSION = 1
JOURNAL = "conversion.json"  # there while a conversion is not finished
MANIFEST = "manifest.json"
ENGRAM = "engram.safetensors"
SECTION = "mlx_ds4"  # of config.json
ALIGNMENT = 16384  # of a record of packed experts: one page of an Apple machine, four of most others
FLOATS = ("F32", "F16", "BF16")

# Storage dtype of planes (safetensors names); scales of the MX formats are bytes.
_CODES = {"Q8_0": "I8", "IQ2_XXS": "U32"}
_SCALES = {"Q8_0": "F16", "IQ2_XXS": "F16"}
# format -> plane -> how many columns share one element of it
_COLUMNS = {
    "Q8_0": {"codes": (1, 1), "scales": (32, 1)},
    "Q4_K": {"codes": (2, 1), "scales": (256, 12), "supers": (256, 2)},
    "Q2_K": {"codes": (4, 1), "scales": (16, 1), "supers": (256, 2)},
    "IQ2_XXS": {"codes": (16, 1), "scales": (256, 1)},
    "MXFP4": {"codes": (2, 1), "scales": (32, 1)},
}


@dataclass(frozen=True)
class Stored:
    """One array of a folder: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def stored_arrays(name: str, format: str, shape: Sequence[int]) -> dict[str, Stored]:
    """The arrays of the weight `name`, by plane; a float weight is one array of its own name, plane "".

    ValueError for an unknown format, or a shape that it cannot hold.
    """
    shape = tuple(shape)
    if format in FLOATS:
        return {"": Stored(name, format, shape)}
    if format == "FP8" and len(shape) >= 2:
        tiles = (*shape[:-2], *(-(-n // 32) for n in shape[-2:]))
        return {"codes": Stored(f"{name}.codes", "U8", shape), "scales": Stored(f"{name}.scales", "U8", tiles)}
    if format not in _COLUMNS or any(shape[-1] % columns for columns, _ in _COLUMNS[format].values()):
        known = ", ".join((*FLOATS, *FORMATS))
        raise ValueError(f"{name} {list(shape)} cannot be {format!r:.40}, expected one of {known} in whole blocks")
    out = {}
    for plane, (columns, elements) in _COLUMNS[format].items():
        dtype = {"codes": _CODES, "scales": _SCALES}.get(plane, {}).get(format, "F16" if plane == "supers" else "U8")
        out[plane] = Stored(f"{name}.{plane}", dtype, (*shape[:-1], shape[-1] // columns * elements))
    return out


@dataclass(frozen=True)
class Part:
    """One array's share in the record of one expert: `offset` counts from the start of the record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Record:
    """The record of one expert: `parts` by array name, and the distance `stride` from record to record."""

    parts: Mapping[str, Part]
    stride: int


_PART_ALIGNMENT = 64  # lets a reader view any part as its dtype, and a kernel load it in whole vectors


def expert_record(arrays: Sequence[Stored]) -> Record:
    """Lays out one expert's share of stacked arrays [E, ..] in the order given: gate, up, down.

    Every part begins at a multiple of 64 bytes, every record at a multiple of 16 KiB.
    """
    parts, position = {}, 0
    for array in arrays:
        position = -(-position // _PART_ALIGNMENT) * _PART_ALIGNMENT
        share = Stored(array.name, array.dtype, array.shape[1:])
        parts[array.name] = Part(array.name, array.dtype, share.shape, position, share.nbytes)
        position += share.nbytes
    return Record(parts, -(-position // ALIGNMENT) * ALIGNMENT)


def experts_file(layer: int) -> str:
    """Name of the file with the packed experts of a layer."""
    return f"experts-{layer:05d}.bin"
