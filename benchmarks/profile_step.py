"""Where the time of a step goes, kernel by kernel.

    python -m benchmarks.profile_step [--layers 8] [--context 8192] [--rows 1,6,2048] [--recipe q2] [--toy]

Random weights of real sizes. One step of each row count runs once, its launches are recorded with their inputs, and
each kind of launch (kernel, template, shapes) is then timed alone, on the inputs that it had: a compiled chain in which
every call waits for the one before. MLX needs about 10 us of host time for a launch, so that is the least a line can
show. One JSON line a kind, the dearest first, then the sum. Launches of MLX's own primitives are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx

from mlx_ds4.bench_timing import random_tokens
from mlx_ds4.custom_kernels._kernel import Launch, watch_launches
from mlx_ds4.custom_kernels._switches import backend
from mlx_ds4.machine import machine
from mlx_ds4.random_model import cut_config, fill_cache, random_model

CHAIN, REPEATS = 30, 5


def recorded(model, context: int, rows: int) -> list[Launch]:
    """The launches of one step of `rows` rows behind `context` positions, evaluated."""
    cache = model.make_cache()
    fill_cache(cache, context)
    launches: list[Launch] = []
    with watch_launches(launches.append):
        logits = model(random_tokens(model.config, rows)[None], cache, last_only=True)
        mx.eval(logits, [layer.state for layer in cache])
    return launches


def kind(launch: Launch) -> tuple:
    """Launches of one kind take the same time: kernel, template and shapes agree."""
    template = tuple((name, str(value)) for name, value in launch.call["template"])
    return launch.kernel.name, template, tuple((x.shape, str(x.dtype)) for x in launch.inputs)


def seconds(launch: Launch, chain: int) -> float:
    """Median seconds of a launch in a chain of `chain` of them."""
    first, *rest = launch.inputs

    def run(first: mx.array, rest: list[mx.array]) -> list[mx.array]:
        outputs = launch.kernel(inputs=[first, *rest], **launch.call)
        for _ in range(chain - 1):
            outputs = launch.kernel(inputs=[mx.depends([first], outputs)[0], *rest], **launch.call)
        return outputs

    if backend() in ("metal", "cuda"):
        run = mx.compile(run)
    mx.eval(run(first, rest))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(run(first, rest))
        mx.synchronize()
        times.append((time.perf_counter() - start) / chain)
    return statistics.median(times)


def profile(model, context: int, rows: int, chain: int = CHAIN) -> Iterator[dict[str, Any]]:
    kinds: dict[tuple, list[Launch]] = {}
    for launch in recorded(model, context, rows):
        kinds.setdefault(kind(launch), []).append(launch)
    lines = []
    for launches in kinds.values():
        launch = launches[0]
        us = seconds(launch, chain) * 1e6
        lines.append({
            "figure": "kernel", "rows": rows, "kernel": launch.kernel.name, "launches": len(launches),
            "us": round(us, 1), "us_a_step": round(us * len(launches), 1),
            "template": " ".join(f"{name}={value}" for name, value in launch.call["template"]),
            "inputs": [list(x.shape) for x in launch.inputs[:4]],
        })  # fmt: skip
    yield from sorted(lines, key=lambda line: -line["us_a_step"])
    yield {"figure": "kernels", "rows": rows, "context": context, "launches": sum(line["launches"] for line in lines),
           "us_a_step": round(sum(line["us_a_step"] for line in lines), 1)}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rows", default="1,6,2048")
    parser.add_argument("--recipe", default="q2", choices=("q2", "q4", "mxfp4"))
    parser.add_argument("--toy", action="store_true", help="a tiny model and short chains: a try in the emulator")
    parser.add_argument("--commit", help="commit to write into the lines, where git is not at hand")
    args = parser.parse_args(arguments)
    if backend() is None:
        print("No kernel runs here, so there is nothing to time: use a GPU, or MLX_DS4_KERNELS=emulate with --toy.",
              file=sys.stderr)  # fmt: skip
        return 2
    config = cut_config(size="tiny") if args.toy else cut_config(args.layers)
    model = random_model(config, args.recipe)
    model.compiled = False  # every launch is to be seen
    about = machine() | ({"commit": args.commit} if args.commit else {}) | {"layers": config.num_hidden_layers}
    for rows in map(int, args.rows.split(",")):
        for line in profile(model, 100 if args.toy else args.context, rows, chain=2 if args.toy else CHAIN):
            print(json.dumps(line | about), flush=True)
        mx.clear_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
