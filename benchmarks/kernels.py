"""Check every kernel case on the GPU, then time it against its reference; one JSON line each.

    python -m benchmarks.kernels [NAME ...] [--check] [--size small|large] [--commit ID]

NAME is a case's name or its beginning.

A call is timed in a chain: each call's first input depends on the call before (`mx.depends`, which costs no launch),
so calls cannot overlap. Kernel and reference take turns; a figure is the median of up to 20 chains of up to 20 calls
after warming up. No time is given for a case that fails. `bytes` is what the call must move at least, so `gb_per_s`
is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# References mean float32; MLX's products on CUDA would otherwise keep 10 bits. Read when MLX multiplies first.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import numpy as np

from mlx_ds4.custom_kernels._case import Case, all_cases, check
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._switches import backend
from mlx_ds4.machine import machine

CHAIN = 20  # calls in one chain
REPEATS = 20
MOST_SECONDS = 2.0  # for one case: slow references are repeated less often


def chain_seconds(fn: Callable[..., Any], arrays: list[mx.array], calls: int) -> float:
    """Seconds a call, in one dependent chain."""
    start = time.perf_counter()
    first, *rest = arrays
    result = None
    for _ in range(calls):
        if result is not None:
            first = mx.depends([first], result)[0]
        result = fn(first, *rest)
        result = [result] if isinstance(result, mx.array) else list(result)
    mx.eval(result)
    mx.synchronize()
    return (time.perf_counter() - start) / calls


def times(case: Case) -> tuple[float, float]:
    """Median seconds of the kernel and of the reference, taking turns."""
    arrays = case.inputs(np.random.default_rng(0))
    mx.eval(arrays)
    chain_seconds(case.fn, arrays, 1), chain_seconds(case.reference, arrays, 1)  # these compile
    slowest = max(chain_seconds(fn, arrays, 1) for fn in (case.fn, case.reference))
    calls = max(1, min(CHAIN, int(MOST_SECONDS / (2 * REPEATS * slowest))))
    kernel, reference, start = [], [], time.perf_counter()
    while len(kernel) < 3 or (len(kernel) < REPEATS and time.perf_counter() - start < MOST_SECONDS):
        kernel.append(chain_seconds(case.fn, arrays, calls))
        reference.append(chain_seconds(case.reference, arrays, calls))
    return statistics.median(kernel), statistics.median(reference)


def record(case: Case, timed: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"case": case.name, "exact": case.tolerance is None}
    try:
        with count_launches() as launches:
            fault, error = check(case)
        line |= {"ok": fault is None, "error": error, "launches": sum(launches.values())}
        if fault or not timed:
            return line | ({"fault": fault} if fault else {})
        kernel, reference = times(case)
    except Exception as e:  # the other cases still run; the line says what happened
        return line | {"ok": False, "fault": str(e)[:1000]}
    line |= {"kernel_us": round(kernel * 1e6, 2), "reference_us": round(reference * 1e6, 2)}
    if case.bytes:
        line |= {"bytes": case.bytes, "gb_per_s": round(case.bytes / kernel / 1e9, 1)}
    return line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="case names, or their beginnings")
    parser.add_argument("--check", action="store_true", help="only check the results")
    parser.add_argument("--size", choices=("small", "large"), help="only the small or the large cases")
    parser.add_argument("--commit", help="commit to write into the lines, where git is not at hand")
    options = parser.parse_args(arguments)
    if backend() not in ("metal", "cuda"):
        print("No GPU is the default device here, so there is nothing to time.", file=sys.stderr)
        return 2
    about = machine() | ({"commit": options.commit} if options.commit else {})
    bad = 0
    for case in all_cases():
        if options.names and not case.name.startswith(tuple(options.names)):
            continue
        if options.size and case.large != (options.size == "large"):
            continue
        line = record(case, not options.check)
        bad += not line["ok"]
        print(json.dumps(line | about), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
