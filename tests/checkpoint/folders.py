"""Damaging a copy of an official folder in one place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_ds4.formats.safetensors import SafetensorsFolder, write_safetensors


def patch_byte(folder: Path, name: str, value: int, index: int = 0) -> None:
    """Overwrites one byte of a tensor."""
    info = SafetensorsFolder(folder).tensors[name]
    with open(info.file, "r+b") as file:
        file.seek(info.offset + index)
        file.write(bytes([value]))


def rewrite(source: Path, target: Path, change: Callable[[dict[str, tuple]], None]) -> Path:
    """Writes the tensors of `source` as one file after `change` edited {name: (dtype, shape, bytes)}."""
    target.mkdir()
    with SafetensorsFolder(source) as folder:
        tensors = {n: (i.dtype, i.shape, folder.read(n)) for n, i in folder.tensors.items()}
    change(tensors)
    write_safetensors(
        target / "model.safetensors",
        [(name, dtype, shape, lambda data=data: [data]) for name, (dtype, shape, data) in tensors.items()],
    )
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target
