"""The results of `mlx_ds4.bench` as CSV, JSON and an SVG plot."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mlx_ds4.formats.atomic_file import atomic_file

# Columns of the CSV and keys of a record, in order. Empty where nothing was measured.
COLUMNS = (
    "context",  # positions in the cache when decoding began: the frontier
    "rows",  # rows of a decode step
    "prefill_tokens",  # tokens fed to come here from the frontier before
    "prefill_step_size",  # tokens of a chunk
    "prefill_tps",  # tokens a second over these
    "prefill_chunk_tps",  # tokens a second of a chunk of full size, median
    "prefill_tps_x_layers",  # the same times the number of layers, to compare models cut to different depths
    "decode_ms",  # a step, median
    "decode_ms_per_layer",  # the step, embedding and head included, over the number of layers
    "decode_tps",  # steps a second: tokens a second for one row
    "host_ms",  # CPU time of the thread that builds a one-row step and hands it to the device
    "cache_bytes",
    "peak_bytes",  # of the device's memory since the frontier before
)
_WIDTH, _HEIGHT, _MARGIN, _PANEL = 760, 320, 60, 260
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")


def write_report(stem: Path, about: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Writes STEM.csv, STEM.json and STEM.svg, each complete or not at all; OSError where that is impossible."""
    text = {
        ".csv": to_csv(records),
        ".json": json.dumps({**about, "figures": list(records)}, indent=1) + "\n",
        ".svg": to_svg(about, records),
    }
    paths = []
    for ending, content in text.items():
        paths.append(stem.with_name(stem.name + ending))
        with atomic_file(paths[-1]) as file:
            file.write(content.encode())
    return paths


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """One line a record under `COLUMNS`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def to_svg(about: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Two panels over the context length, which doubles from tick to tick: prefill and decode, tokens a second."""
    prefill = {r["context"]: r["prefill_tps"] for r in records if r.get("prefill_tps")}
    decode: dict[int, dict[int, float]] = {}
    for r in records:
        if r.get("decode_tps"):
            decode.setdefault(r["rows"], {})[r["context"]] = r["decode_tps"]
    names = {rows: "1 row" if rows == 1 else f"{rows} rows" for rows in decode}
    title = ", ".join(str(about[key]) for key in ("model", "device", "mlx", "commit") if about.get(key))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="20">{escape(title)}</text>',
        *_panel(_MARGIN, "prefill, tokens/s", {"": prefill}),
        *_panel(_MARGIN * 2 + _PANEL + 30, "decode, steps/s", {names[k]: v for k, v in decode.items()}),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(left: int, title: str, lines: Mapping[str, Mapping[int, float]]) -> list[str]:
    points = [(x, y) for line in lines.values() for x, y in line.items()]
    parts = [f'<text x="{left}" y="44" font-weight="bold">{title}</text>']
    if not points:
        return [*parts, f'<text x="{left}" y="64">not measured</text>']
    top, bottom = 56, _HEIGHT - 50
    low = math.floor(math.log2(min(x for x, _ in points)))
    high = max(low + 1, math.ceil(math.log2(max(x for x, _ in points))))
    most = _round_up(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(left + _PANEL * (math.log2(x) - low) / (high - low), 1),
            round(bottom - (bottom - top) * y / most, 1),
        )

    for share in range(5):
        _, y = place(2**low, most * share / 4)
        parts.append(f'<path d="M{left} {y}h{_PANEL}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{most * share / 4:g}</text>')
    for tick in range(low, high + 1, max(1, (high - low) // 6)):
        x, _ = place(2**tick, 0)
        name = f"{2 ** (tick - 10)}k" if tick >= 10 else str(2**tick)
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{name}</text>')
    parts.append(f'<text x="{left + _PANEL / 2}" y="{bottom + 34}" text-anchor="middle">context, tokens</text>')
    for colour, (name, line) in zip(_COLOURS, lines.items(), strict=False):
        places = [place(x, y) for x, y in sorted(line.items())]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{places[-1][0] + 6}" y="{places[-1][1] - 6}" fill="{colour}">{escape(name)}</text>')
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, so that quarters are short numbers."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 2, 4, 8, 10) if value <= unit * step * 1.0000001)
