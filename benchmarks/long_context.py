"""What long contexts cost: scoring and selection alone, decode steps by kind of layer, prefill with its memory.

    python -m benchmarks.long_context [--parts scores,layers,prefill] [--recipe q2] [--toy]

* scores: one row over 8k to 1M index keys, in chains of dependent calls: scores and top-512 (an owner's layer), the
  candidate blocks as well (layer 20), and scores and top-512 inside 2,048 candidate blocks (layers 24 to 36).
* layers: a step of 40 layers at 8k, 128k and 300k of random state, their ratio, and milliseconds of one layer of each
  kind: the time that four more of them add to a short schedule.
* prefill: 128k rows through eight layers, tokens/s by stretch, and the peak memory beyond the weights.

Memory: 34 GB of weights for q2 (40 layers on the weights of eight), and a few GB of caches. One JSON line a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx

from mlx_ds4.bench_timing import decode_seconds, host_seconds, prefill_seconds, random_tokens, warm
from mlx_ds4.config import ModelConfig
from mlx_ds4.convert.official_config import released_config
from mlx_ds4.convert.synthetic import tiny_config
from mlx_ds4.custom_kernels._kernel import tickets
from mlx_ds4.custom_kernels.index_topk import index_top_k
from mlx_ds4.custom_kernels.topk import top_k_groups
from mlx_ds4.machine import machine
from mlx_ds4.model.model import Model
from mlx_ds4.random_model import fill_cache, random_model, scheduled_config

CHAIN = 20  # dependent calls in a chain
REPEATS = 7
MORE = 4  # layers of a kind that are added to see what one costs

# Sizes of the two models: contexts, keys, rows to prefill. Schedules name layers of the model: `whole` is all of it,
# `short` one layer of each kind, `kinds` a kind's layer and the place in `short` where more of it go.
FULL = {
    "keys": (8192, 65536, 300_000, 1 << 20),
    "contexts": (8192, 131_072, 300_000),
    "prefill": 131_072,
    "whole": tuple(range(40)),
    "short": (0, 2, 3, 20, 24, 25),
    "eight": (0, 1, 2, 3, 20, 21, 24, 25),
    "kinds": {"window": (0, 1), "owner": (2, 2), "reuse": (25, 6), "reindex": (24, 5)},
    "without_source": (0, 2, 3),
}
TOY = {
    "keys": (100, 300),
    "contexts": (64, 300),
    "prefill": 128,
    "whole": tuple(range(6)),
    "short": (0, 2, 3, 4, 5),
    "eight": tuple(range(6)),
    "kinds": {"window": (0, 1), "owner": (2, 2), "reindex": (5, 5)},
    "without_source": (0, 2, 3),
}


def scores(config: ModelConfig, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Microseconds of a row's scores and selection at each number of keys, and the keys' bytes a second."""
    c = config
    blocks, size = c.candidate_topk_blocks, c.candidate_block_size
    q = mx.random.normal((1, 1, c.index_n_heads, c.index_head_dim)).astype(mx.bfloat16)
    weights = mx.random.normal((1, 1, c.index_n_heads)).astype(mx.bfloat16)
    for count in sizes:
        keys = mx.random.normal((1, count, c.index_head_dim)).astype(mx.bfloat16)
        visible = mx.array([count], dtype=mx.int32)
        arrays = [q, weights, keys, visible, tickets()]

        def owner(q, weights, keys, visible, counts):
            return [index_top_k(q, weights, keys, visible, k=c.index_topk, counts=counts)[1]]

        def source(q, weights, keys, visible, counts):
            found, chosen = index_top_k(q, weights, keys, visible, k=c.index_topk, counts=counts)
            return [chosen, top_k_groups(found, visible, blocks, size=size)]

        def restricted(q, weights, keys, visible, counts, listed):
            options = {"k": c.index_topk, "block_size": size, "counts": counts}
            return [index_top_k(q, weights, keys, visible, listed, **options)[1]]

        seconds = chained(owner, arrays)
        yield {"figure": "score and select", "keys": count, "us": round(seconds * 1e6, 1),
               "key_gb_per_s": round(keys.nbytes / seconds / 1e9, 1)}  # fmt: skip
        if count > blocks * size:  # below, every block is a candidate and the list is not used
            seconds = chained(source, arrays)
            yield {"figure": "score, select, publish candidates", "keys": count, "us": round(seconds * 1e6, 1)}
            listed = source(*arrays)[1]
            seconds = chained(restricted, [*arrays, listed])
            yield {"figure": "score and select in candidates", "keys": count, "us": round(seconds * 1e6, 1)}


def chained(fn: Callable[..., list[mx.array]], arrays: list[mx.array]) -> float:
    """Median seconds of a call in one compiled chain in which each call waits for the one before."""

    def chain(first, *rest):
        result = None
        for _ in range(CHAIN):
            if result is not None:
                first = mx.depends([first], result)[0]
            result = fn(first, *rest)
        return result

    run = mx.compile(chain)
    times = []
    mx.eval(arrays)
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        mx.eval(run(*arrays))
        times.append((time.perf_counter() - start) / CHAIN)
    return statistics.median(times[2:])


def part_of(model: Model, base: ModelConfig, layers: Sequence[int]) -> Model:
    """A model of these layers of `model`, whose own layers are all those of `base`; nothing is copied."""
    part = Model(scheduled_config(base, layers))
    part.embed, part.norm, part.head = model.embed, model.norm, model.head
    part.layers = [model.layers[layer] for layer in layers]
    return part


def layers(model: Model, base: ModelConfig, sizes: dict[str, Any], steps: int) -> Iterator[dict[str, Any]]:
    """Steps of the whole schedule and of one layer of each kind, at each context."""
    warm(model, chunk=64, rows=(1,))
    first = None
    for context in sizes["contexts"]:
        cache = model.make_cache()
        fill_cache(cache, context)
        ms = decode_seconds(model, cache.copy(), steps=steps) * 1e3
        first = first or ms
        yield {"figure": "decode", "context": context, "layers": len(sizes["whole"]), "ms": round(ms, 3),
               "host_ms": round(host_seconds(model, cache.copy()) * 1e3, 3), "cache_bytes": cache.nbytes,
               "speed_over_first": round(first / ms, 3)}  # fmt: skip
        del cache
        mx.clear_cache()

    def step_ms(schedule: Sequence[int], context: int) -> float:
        part = part_of(model, base, schedule)
        cache = part.make_cache()
        fill_cache(cache, context)
        return decode_seconds(part, cache, steps=steps) * 1e3

    for context in (sizes["contexts"][0], sizes["contexts"][-1]):
        short = sizes["short"]
        whole = step_ms(short, context)
        kinds = {}
        for kind, (layer, place) in sizes["kinds"].items():
            longer = (*short[:place], *[layer] * MORE, *short[place:])
            kinds[kind] = (step_ms(longer, context) - whole) / MORE
        rest = short[len(sizes["without_source"]) + 1 :]
        names = ["reindex" if base.owns_index(layer) else "reuse" for layer in rest]
        kinds["candidate source"] = whole - step_ms(sizes["without_source"], context) - sum(kinds[n] for n in names)
        for kind, ms in kinds.items():
            yield {"figure": "layer", "kind": kind, "context": context, "ms": round(ms, 4)}


def prefill(model: Model, rows: int, chunk: int) -> Iterator[dict[str, Any]]:
    """Tokens a second of each quarter of a prefill, and its peak memory beyond what was there before."""
    cache = model.make_cache()
    prefill_seconds(model, model.make_cache(), random_tokens(model.config, chunk), chunk=chunk)  # compiles
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for start in range(0, rows, rows // 4):
        tokens = random_tokens(model.config, rows // 4, seed=start)
        chunks = prefill_seconds(model, cache, tokens, chunk=chunk)
        tps = sum(count for count, _ in chunks) / sum(seconds for _, seconds in chunks)
        yield {"figure": "prefill", "from": start, "to": cache.offset, "layers": model.config.num_hidden_layers,
               "tps": round(tps, 1), "tps_x_layers": round(tps * model.config.num_hidden_layers, 1),
               "peak_beyond_weights": mx.get_peak_memory() - before, "cache_bytes": cache.nbytes}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="scores,layers,prefill")
    parser.add_argument("--recipe", default="q2", choices=("q2", "q4", "mxfp4"))
    parser.add_argument("--share", type=int, default=8, help="layers with weights of their own")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--chunk", type=int, default=2048, help="rows of a prefill chunk")
    parser.add_argument("--toy", action="store_true", help="a tiny model: a try on a CPU")
    parser.add_argument("--commit", help="commit to write into the lines, where git is not at hand")
    args = parser.parse_args(arguments)
    parts = args.parts.split(",")
    if not set(parts) <= {"scores", "layers", "prefill"}:
        parser.error(f"--parts is {args.parts}, expected some of scores, layers, prefill")
    full = tiny_config() if args.toy else ModelConfig.from_dict(released_config())
    sizes, chunk, steps = (TOY, 32, 2) if args.toy else (FULL, args.chunk, args.steps)
    base = scheduled_config(full, sizes["whole"])
    about = machine() | ({"commit": args.commit} if args.commit else {})

    def lines() -> Iterator[dict[str, Any]]:
        if "scores" in parts:
            yield from scores(base, sizes["keys"])
        if "layers" in parts or "prefill" in parts:
            model = random_model(base, args.recipe, share=args.share)
        if "layers" in parts:
            yield from layers(model, base, sizes, steps)
        if "prefill" in parts:
            yield from prefill(part_of(model, base, sizes["eight"]), sizes["prefill"], chunk)

    for line in lines():
        print(json.dumps(line | about), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
