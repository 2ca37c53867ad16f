"""Counting launches: the main figure of this project that no particular machine enters.

`count_launches` counts custom kernels as they are launched. `count_primitives` counts every launch of a function,
custom kernels and MLX's own primitives, from MLX's graph, without a GPU.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ._kernel import Launch, watch_launches
from ._switches import trace

# Launches of one primitive on a GPU, where it is not one. Views cost nothing: their result shares the input's
# memory. Reshape, Flatten and a custom kernel do copy an input that a transposition or a slice left strided; the
# graph does not tell, so such copies are not counted.
VIEWS = """AsStrided Broadcast BroadcastAxes Copy CustomTransforms Depends ExpandDims Flatten Load NumberOfElements
    Reshape Slice Split Squeeze StopGradient Transpose Unflatten View"""
COSTS = {
    **dict.fromkeys(VIEWS.split(), 0),
    "Pad": 2,  # fill, then copy the inside
    "Scatter": 2,  # copy the array, then write into it
    "ScatterAxis": 2,
    "DynamicSlice": 2,  # work out the offset, then copy
    "DynamicSliceUpdate": 2,
}
PER_INPUT = ("Concatenate",)  # one copy for each part

_NODE = re.compile(r'^\{ (\d+) \[label ="([^"]*)"', re.M)
_INPUT = re.compile(r'^"[^"]*" -> (\d+)$', re.M)
_LAUNCH = re.compile(r'^(\d+) -> "launch(\d+)"$', re.M)


@contextlib.contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Within the context, counts launches of custom kernels by kernel name (references count nothing)."""
    counter: Counter[str] = Counter()

    def note(launch: Launch) -> None:
        counter[launch.kernel.name] += 1

    with watch_launches(note):
        yield counter


def count_primitives(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """Launches that `fn(*args)` costs on a GPU: custom kernels by their names, MLX's primitives by MLX's names.

    `fn` runs once, is traced rather than computed, and may return any tree of arrays; only what these depend
    on counts, so it must return the state that it writes. It must not evaluate anything, and objects that it
    changed hold arrays without values afterwards. Arrays it reads should be evaluated before: pending work on
    them counts too. Functions fused by `mx.compile` count once where MLX fuses them. MLX's `mx.fast` functions count
    as one on a GPU, and as the operations of their fallback when the default device is the CPU.
    """
    launches: list[Launch] = []

    def graphs() -> tuple[str, str]:
        with watch_launches(launches.append):
            result = fn(*args)
        arrays = [x for _, x in tree_flatten(result) if isinstance(x, mx.array)]
        named = {f"launch{i}": launch.outputs[0] for i, launch in enumerate(launches)}
        return _dot(*arrays), _dot(**named)

    needed, named = trace(graphs)
    labels = dict(_NODE.findall(needed))
    for node, launch in _LAUNCH.findall(named):
        if node in labels:  # otherwise nothing that is returned depends on it
            labels[node] = launches[int(launch)].kernel.name
    inputs = Counter(_INPUT.findall(needed))
    counter: Counter[str] = Counter()
    for node, label in labels.items():
        kind = label.partition(" ")[0]  # "View uint8", "Scatter Sum"
        counter[kind] += inputs[node] if kind in PER_INPUT else COSTS.get(kind, 1)
    return +counter  # without the views


def _dot(*arrays: mx.array, **named: mx.array) -> str:
    text = io.StringIO()
    mx.export_to_dot(text, *arrays, **named)
    return text.getvalue()


def format_table(rows: Sequence[tuple[str, int, Counter[str]]]) -> str:
    """A table of launches per token. A row is (kind of layer, how many of them a token passes, launches of one);
    columns split custom kernels (lower-case names) from MLX's primitives; the last line adds up."""
    lines = [("kind", "count", "custom", "MLX", "launches each", "launches per token")]
    totals = [0, 0, 0]
    for kind, count, launches in rows:
        custom = sum(n for name, n in launches.items() if name.islower())
        other = launches.total() - custom
        lines.append((kind, count, custom, other, custom + other, count * (custom + other)))
        totals = [t + count * n for t, n in zip(totals, (custom, other, custom + other), strict=True)]
    lines.append(("token", "", totals[0], totals[1], "", totals[2]))
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            str(cell).ljust(w) if i == 0 else str(cell).rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
