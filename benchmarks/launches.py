"""Launches of one decode step, by kind of layer and per token of the released 40-layer schedule; needs no GPU.

    python -m benchmarks.launches [--rows N] [--reference]

Counts the kernels that a GPU would launch (`custom_kernels/_count.py`) for each kind of layer of a tiny model,
which has every kind, and multiplies by how often the kind stands in the release. These are Metal's launches; CUDA
takes fewer. `--reference` counts plain MLX operations.
"""

from __future__ import annotations

import argparse

import mlx.core as mx

from mlx_ds4.cache import Cache
from mlx_ds4.custom_kernels._count import count_primitives, format_table
from mlx_ds4.custom_kernels._switches import use_kernels
from mlx_ds4.model.model import Model
from mlx_ds4.model.step import Step
from mlx_ds4.random_model import cut_config, random_model

CONTEXT = 64  # beyond the tiny model's top-k, so that selection works
# kind -> (layer of the tiny model, whether Engram rides along, how many the release has)
KINDS = {
    "window": (0, False, 1),
    "window, Engram": (1, True, 1),
    "owner, ratio 2": (2, False, 2),
    "owner, ratio 2, Engram": (2, True, 1),
    "candidate source": (4, False, 1),
    "reindex": (5, False, 4),
    "reuse": (3, False, 30),
}


def tiny_model() -> Model:
    """Random weights in the Q2 recipe, Engram in two layers."""
    return random_model(cut_config(size="tiny", engram=True), "q2")


def table(model: Model, rows: int) -> str:
    """The table for a step of `rows` rows behind CONTEXT positions."""
    c = model.config
    cache = model.make_cache()
    model(mx.array([[i % c.vocab_size for i in range(CONTEXT)]]), cache)
    mx.eval([layer.state for layer in cache])
    h = mx.zeros((1, rows, c.hc_mult, c.hidden_size), dtype=mx.bfloat16)
    pre = mx.ones((1, rows, c.hc_mult))
    width = c.engram_head_dim
    records = mx.zeros((1, rows, c.engram_columns, width + width // 32), dtype=mx.uint8)
    mx.eval(h, pre, records)
    counts = []
    for kind, (index, engram, times) in KINDS.items():
        twin, step = cache.copy(), Step(c, CONTEXT, rows)
        _publish(step, twin, index, rows)
        mx.eval(step.selection, step.candidates)

        def run(h, pre, records, index=index, engram=engram, twin=twin, step=step):
            out = model.layers[index](h, pre, step, twin[index], records if engram else None)
            return [*out, *twin[index].state]

        counts.append((kind, times, count_primitives(run, h, pre, records)))
    head = count_primitives(lambda h, pre: model.logits(h, pre, False), h, pre)
    tokens = mx.array([[0] * rows])
    counts.append(("embedding and head", 1, head + count_primitives(model.embed, tokens)))
    return format_table(counts)


def _publish(step: Step, cache: Cache, index: int, rows: int) -> None:
    """What earlier layers of the pass would have left for layer `index`."""
    c = step.config
    source = c.kv_source(index)
    if source is None or source == index:
        return
    step.source = cache[source]
    step.selection = mx.broadcast_to(mx.arange(c.index_topk, dtype=mx.int32), (1, rows, c.index_topk))
    if c.uses_candidates(index):
        blocks = mx.arange(c.candidate_topk_blocks, dtype=mx.int32)
        step.candidates = mx.broadcast_to(blocks, (1, rows, c.candidate_topk_blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1, help="rows of the step (1 to 8)")
    parser.add_argument("--reference", action="store_true", help="count plain MLX operations")
    options = parser.parse_args()
    model = tiny_model()
    with use_kernels("reference" if options.reference else "auto"):
        print(table(model, options.rows))


if __name__ == "__main__":
    main()
