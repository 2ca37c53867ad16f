"""A checkpoint folder in the release's layout: shards, config.json, index."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_ds4.formats.atomic_file import atomic_file
from mlx_ds4.formats.safetensors import DTYPE_BYTES, Producer, write_safetensors

StoredTensor = tuple[str, str, Sequence[int], Producer]  # name, dtype, shape, bytes in pieces


def write_official(
    folder: str | os.PathLike,
    config: Mapping[str, Any],
    tensors: Iterable[StoredTensor],
    *,
    shard_bytes: int = 5 << 30,
) -> None:
    """Writes a release folder, all but its tokenizer files.

    Tensors are packed in the order given into shards of up to `shard_bytes` (a larger tensor gets a shard
    of its own). The index comes last, so that a folder whose writing was cut short is not taken for a
    checkpoint. Files that exist are replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    shards: list[list[StoredTensor]] = [[]]
    room, total = shard_bytes, 0
    for tensor in tensors:
        size = math.prod(tensor[2]) * DTYPE_BYTES[tensor[1]]
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room, total = room - size, total + size
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard)
        places.update(dict.fromkeys((tensor[0] for tensor in shard), name))
    _write_json(folder / "config.json", config)
    _write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def _write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False).encode())
