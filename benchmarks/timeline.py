"""When each kernel of a decode step runs on an NVIDIA GPU.

    python -m benchmarks.timeline [--layers 40 --share 8] [--context 8192] [--rows 1,6] [--recipe q2] [--engram] [--toy]

One JSON line a kernel: launches a step, microseconds (mean, and the tenth and the ninetieth of a hundred), milliseconds
a step; then how long a step takes and the device works, and the longest gaps with the kernel behind each. The records
are CUPTI's, by way of PyTorch's profiler, which has to be installed: launches of MLX's CUDA graphs are in them one by
one. The profiler slows the host, so gaps are longer than without. Random weights of real sizes and random state.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx

from mlx_ds4.bench_timing import decode_seconds
from mlx_ds4.machine import machine
from mlx_ds4.random_model import cut_config, fill_cache, random_model

STEPS, GAPS = 10, 8
Record = tuple[float, float, str]  # begin and end in microseconds, name


def lines(records: Sequence[Record], steps: int) -> Iterator[dict[str, Any]]:
    """What the docstring says of kernels that ran in so many steps; nothing for none."""
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for begin, end, name in records:
        by_name[_short(name)].append(end - begin)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        times.sort()
        yield {"figure": "kernel", "kernel": name, "launches": round(len(times) / steps, 1),
               "us": round(statistics.mean(times), 2), "us_p10": round(times[len(times) // 10], 2),
               "us_p90": round(times[len(times) * 9 // 10], 2), "ms": round(sum(times) / steps / 1e3, 4)}  # fmt: skip
    if not records:
        return
    ordered, gaps, busy = sorted(records), [], 0.0
    end = ordered[0][0]
    for begin, until, name in ordered:  # kernels may run side by side
        if begin > end:
            gaps.append((round(begin - end, 1), _short(name)))
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    span = end - ordered[0][0]
    yield {"figure": "step", "ms": round(span / steps / 1e3, 3), "busy_ms": round(busy / steps / 1e3, 3),
           "longest_gaps_us": sorted(gaps, reverse=True)[:GAPS]}  # fmt: skip


def _short(name: str) -> str:
    """A kernel's name without what all have, and without its arguments' types."""
    return name.replace("mlx::core::cu::", "").replace("custom_kernel_", "").replace("void ", "")[:80]


def recorded(model, cache, rows: int, steps: int) -> tuple[list[Record], int]:
    """The kernels of `steps` decode steps or a few more, the first of which waits for nothing before it, and how many
    steps ran."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    decode_seconds(model, cache.copy(), rows=rows, steps=2, warm_up=2)  # compiles
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        decode_seconds(model, cache.copy(), rows=rows, steps=steps, warm_up=0)
        mx.synchronize()
    events = (event for event in found.events() if event.device_type == DeviceType.CUDA)
    records = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    return records, steps + 2 if rows == 1 else steps  # one row: `decode_seconds` runs two that it does not time


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument(
        "--share", type=int, default=8, help="layers from here on use the weights of earlier ones again"
    )
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rows", default="1,6")
    parser.add_argument("--recipe", default="q2", choices=("q2", "q4", "mxfp4"))
    parser.add_argument("--engram", action="store_true", help="with Engram layers, whose tables are in memory")
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    parser.add_argument("--commit", help="the commit to write into the lines, where git is not at hand")
    args = parser.parse_args(arguments)
    if not mx.cuda.is_available():
        print("timeline needs an NVIDIA GPU: it reads CUPTI's records of kernels.", file=sys.stderr)
        return 2
    try:
        import torch  # noqa: F401
    except ImportError:
        print("timeline needs PyTorch's profiler, which reads CUPTI's records: install torch.", file=sys.stderr)
        return 2
    config = cut_config(size="tiny") if args.toy else cut_config(args.layers, engram=args.engram)
    model = random_model(config, args.recipe, share=None if args.toy else args.share)
    cache = model.make_cache()
    fill_cache(cache, 64 if args.toy else args.context)
    about = machine() | {"layers": config.num_hidden_layers, "context": cache.offset}
    about |= {"commit": args.commit} if args.commit else {}
    for rows in map(int, args.rows.split(",")):
        for line in lines(*recorded(model, cache, rows, STEPS)):
            print(json.dumps({**line, "rows": rows} | about), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
