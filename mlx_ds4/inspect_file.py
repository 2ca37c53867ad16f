"""What a model file says of itself: metadata, the tensor table, and totals per type, as lines of text.

Only headers are read. Strings from the file are quoted and escaped, so that no file can drive a terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.formats.safetensors import SafetensorsFolder

_SHOWN = 6  # elements of an array
_WIDTH = 80  # characters of a string
_MAX_CONFIG = 16 << 20

_Row = tuple[str, tuple[int, ...], str, int, str]  # name, shape, type, bytes, place


def inspect_file(path: str | os.PathLike) -> Iterator[str]:
    """The lines for a GGUF file (any architecture) or a folder of safetensors.

    Raises ValueError (FormatError) for files that are damaged or of another kind, and OSError.
    """
    return _folder_lines(Path(path)) if Path(path).is_dir() else _gguf_lines(path)


def _gguf_lines(path: str | os.PathLike) -> Iterator[str]:
    with GGUFFile(path) as file:
        yield f"GGUF v{file.version}, {file.size:,} bytes, tensor data from byte {file.data_start:,}"
        yield ""
        yield from _aligned(
            [(_plain(key), file.value_types[key], _short(value)) for key, value in file.metadata.items()], right=()
        )
        tensors = file.tensors.values()
        yield from _table([(t.name, t.shape, t.type_name, t.nbytes, f"{t.offset:,}") for t in tensors])


def _folder_lines(path: Path) -> Iterator[str]:
    with SafetensorsFolder(path) as folder:
        tensors = folder.tensors.values()
        files = len({t.file for t in tensors})
        yield f"safetensors folder, {files} file{'s' if files > 1 else ''}"
        yield ""
        yield from _aligned(_config_rows(path / "config.json"), right=())
        yield from _table([(t.name, t.shape, t.dtype, t.nbytes, f"{t.offset:,} {t.file.name}") for t in tensors])


def _config_rows(path: Path) -> list[tuple[str, ...]]:
    if not path.is_file():
        return [("config.json", "missing")]
    if path.stat().st_size > _MAX_CONFIG:
        raise ValueError(f"{path} has more than {_MAX_CONFIG} bytes, so it is no model's config.")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a JSON {type(config).__name__}, expected an object; download it again.")
    rows = []
    for key, value in config.items():
        nested = value.items() if isinstance(value, dict) else None
        rows += [(_plain(f"{key}.{k}"), _short(v)) for k, v in nested] if nested else [(_plain(key), _short(value))]
    return rows


def _table(tensors: list[_Row]) -> Iterator[str]:
    yield ""
    head = [("tensor", "shape", "type", "bytes", "offset")]
    body = [(_plain(name), str(list(shape)), kind, f"{size:,}", place) for name, shape, kind, size, place in tensors]
    yield from _aligned(head + body, right=(3,))
    yield ""
    totals: dict[str, list[int]] = {}
    for _, _, kind, size, _ in tensors:
        total = totals.setdefault(kind, [0, 0])
        total[0] += 1
        total[1] += size
    rows = [(kind, f"{count:,}", f"{size:,}") for kind, (count, size) in sorted(totals.items())]
    everything = ("all", f"{len(tensors):,}", f"{sum(row[3] for row in tensors):,}")
    yield from _aligned([("type", "tensors", "bytes"), *rows, everything], right=(1, 2))


def _aligned(rows: list[tuple[str, ...]], *, right: tuple[int, ...]) -> Iterator[str]:
    """Columns padded to equal widths, the `right` ones from the left; the last one is not padded."""
    columns = len(rows[0]) if rows else 0
    widths = [max(len(row[n]) for row in rows) for n in range(columns)]
    for row in rows:
        cells = [
            cell.rjust(w) if n in right else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _short(value: object) -> str:
    if isinstance(value, (list, np.ndarray)):
        items = value.tolist() if isinstance(value, np.ndarray) and len(value) <= _SHOWN else list(value[:_SHOWN])
        text = ", ".join(_short(item.item() if isinstance(item, np.generic) else item) for item in items)
        return f"[{text}]" if len(value) <= _SHOWN else f"[{text}, ...] ({len(value):,} values)"
    text = repr(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}... ({len(text):,} characters)"


def _plain(name: str) -> str:
    return name if name.isprintable() else repr(name)
