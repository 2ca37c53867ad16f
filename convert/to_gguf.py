"""The official release's folder as a ds4 GGUF."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mlx_ds4.checkpoint import TILE, Weight, gguf_shape, model_weights, official_names, scale_name, scale_shape
from mlx_ds4.formats.host_planes import join_rows
from mlx_ds4.formats.quant_blocks import TYPE_INFO, dequantize
from mlx_ds4.formats.quant_encode import decode_fp4_rows, decode_fp8_tiles, encode
from mlx_ds4.formats.safetensors import SafetensorsFolder
from mlx_ds4.sources import OfficialSource, open_source, read_config_json

from .gguf_metadata import metadata_records
from .gguf_writer import GGUFTensor, write_gguf
from .imatrix import check_imatrix, read_imatrix
from .recipe import RECIPES, Recipe, plan

ALIGNMENT = 16384
_PIECE_WEIGHTS = 8 << 20  # weights encoded at a time outside the experts
_NUMPY = {"F32": "<f4", "BF16": "<u2"}


def official_to_gguf(
    folder: str | os.PathLike,
    path: str | os.PathLike,
    recipe: str,
    *,
    imatrix: str | os.PathLike | None = None,
    alignment: int = ALIGNMENT,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Writes the text model of an official folder as the GGUF `path` by one of `recipe.RECIPES`.

    FP4 experts become MXFP4 with the same bits; other types are encoded from the exact values, K-quants
    and IQ2_XXS with the column importance of the file `imatrix`, or each matrix's column energy where it says
    nothing. Memory: one expert, or 8 M weights of another tensor, at a time. ValueError (as `open_source`) for a
    folder that is not a complete release, for widths the recipe cannot hold, values that are NaN or infinite or do
    not fit their type, or too little free space; nothing is left under `path` then.
    """
    chosen, path = RECIPES[recipe], Path(path)
    importance = read_imatrix(imatrix) if imatrix is not None else {}
    source = open_source(folder)
    if not isinstance(source, OfficialSource):
        raise ValueError(f"{folder} is a GGUF file, expected an official folder: it is already converted")
    weights = model_weights(source.config)
    check_imatrix(importance, weights, imatrix)
    needed = sum(plan(weights, chosen).values())
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise ValueError(f"{path}: the file needs {needed} bytes but {free} are free: make room or choose another disk")
    tokenizer = source.tokenizer()
    token_map, hashes, _ = source.engram(tokenizer)
    calibration = "imatrix" if importance else "none" if chosen.exact else "weight-energy bootstrap"
    records = metadata_records(
        read_config_json(source.path), tokenizer.gguf_metadata(), token_map, hashes,
        recipe=chosen, alignment=alignment, calibration=calibration,
    )  # fmt: skip
    if importance:
        records.append(("quantize.imatrix.file", "string", Path(imatrix).name))
    tensors = [
        GGUFTensor(
            w.gguf, gguf_shape(w), chosen.type_of(w),
            _table(source, w) if w.storage == "ROWS" else pieces(source.folder, w, chosen, importance.get(w.gguf)),
        )
        for w in weights
    ]  # fmt: skip
    write_gguf(path, records, tensors, alignment=alignment, progress=progress)


def _table(source: OfficialSource, weight: Weight) -> Callable[[], Iterator[np.ndarray]]:
    return lambda: (piece[""] for piece in source.pieces(weight))


def pieces(
    folder: SafetensorsFolder, weight: Weight, recipe: Recipe, importance: np.ndarray | None
) -> Callable[[], Iterator[np.ndarray]]:
    """What makes a tensor of a GGUF, no Engram table, from the folder: a function that yields its bytes by rows."""
    kind = recipe.type_of(weight)

    def produce() -> Iterator[np.ndarray]:
        if weight.storage == "FP4" and kind == "MXFP4":
            for codes, scales in _packed_experts(folder, weight):
                yield join_rows("MXFP4", {"codes": codes, "scales": scales})
        else:
            for number, values in enumerate(_values(folder, weight)):
                row = None if importance is None else importance[number if weight.storage == "FP4" else 0]
                yield _encode(weight, kind, values, row, exact=recipe.exact)

    return produce


def _encode(weight: Weight, kind: str, values: np.ndarray, importance: np.ndarray | None, *, exact: bool) -> np.ndarray:
    if TYPE_INFO[kind][1] == 256 and (importance is None or not importance.any()):
        # Without calibration data the energy of the weights stands for that of the inputs.
        importance = np.square(values).sum(0)
    try:
        out = encode(kind, values, importance)
    except ValueError as error:
        raise ValueError(f"{weight.name}: {error}") from None
    if exact and not np.array_equal(dequantize(kind, out), values):
        raise ValueError(f"{weight.name}: {kind} cannot hold these values exactly: use the recipe f32")
    return out


def _values(folder: SafetensorsFolder, weight: Weight) -> Iterator[np.ndarray]:
    """The trained values as float32 [rows, in], in pieces: an expert each, or whole tiles of rows."""
    if weight.storage == "FP4":
        for codes, scales in _packed_experts(folder, weight):
            yield decode_fp4_rows(codes, scales)
        return
    columns = weight.shape[-1]
    rows = weight.shape[0] if len(weight.shape) == 2 else 1
    step = max(1, _PIECE_WEIGHTS // columns // TILE) * TILE
    size = 1 if weight.storage == "FP8" else np.dtype(_NUMPY[weight.storage]).itemsize
    scales = None
    if weight.storage == "FP8":
        scales = folder.read(scale_name(weight.name)).reshape(scale_shape(weight))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        raw = folder.read(weight.name, start * columns * size, stop * columns * size).reshape(stop - start, -1)
        if scales is None:
            yield dequantize(weight.storage, raw)
        else:
            yield decode_fp8_tiles(raw, scales[start // TILE : -(-stop // TILE)])


def _packed_experts(folder: SafetensorsFolder, weight: Weight) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    _, rows, columns = weight.shape
    for name in official_names(weight):
        scales = folder.read(scale_name(name)).reshape(rows, columns // TILE)
        if (scales == 255).any():
            raise ValueError(f"{name}: a scale is NaN: the file is damaged, download it again")
        yield folder.read(name).reshape(rows, columns // 2), scales
