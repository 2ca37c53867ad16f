"""Steps of decoding and verification as compiled graphs: the same modules, traced once for each shape of step.

A pass over up to 8 rows runs as two graphs. The first embeds the tokens and runs the layers before the first Engram
layer; it needs no number on the host, so the device works on it while the host still waits for the token that Engram
must hash. The second runs the rest. Positions, bounds and slots are arrays, so a graph serves every step of its shape
(`StepShape`) and cache capacity; the arrays it makes are the rings and the recent rows, never the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from mlx_ds4.cache import Cache, LayerCache

from .step import Step, StepShape

if TYPE_CHECKING:
    from .model import Model


class CompiledSteps:
    """The compiled graphs of one model, made when first needed.

    A graph holds the weights that it was traced with, as constants. So every call compares the modules, arrays and
    settings of the model with those seen when tracing, and starts anew if one has been replaced.
    """

    def __init__(self, model: Model):
        self._model = model
        self._graphs: dict[tuple, Callable] = {}
        # What the module tree held when the graphs were traced, and live views of the places that held it.
        self._views: list[Collection] = []
        self._seen: list[Any] = []

    def __call__(self, tokens: mx.array, cache: Cache, last_only: bool) -> tuple[mx.array, list[mx.array]]:
        """As `Model.forward`, for a step of at most 8 rows behind `cache.begin`."""
        model = self._model
        self._start_anew_if_changed()
        step = Step(model.config, cache.offset, tokens.shape[1])
        shape, arrays = step.shape, step.inputs()
        inputs = [layer.inputs for layer in cache]
        split = _split(model)
        begin = self._graph(("begin", shape), lambda: self._begin(shape, split))
        h, pre, early, first_taps = begin(tokens, arrays, inputs[:split])
        mx.async_eval(h, pre)
        mapped, records = model.fetch(model.checked_ids(tokens), cache)
        finish = self._graph(("finish", shape, last_only), lambda: self._finish(shape, split, last_only))
        logits, late, taps = finish(h, pre, arrays, inputs[split:], records)
        for layer, outputs in zip(cache, [*early, *late], strict=True):
            layer.take(outputs, shape.entries)
        cache.advance(shape.length, mapped)
        return logits, [*first_taps, *taps]

    def _begin(self, shape: StepShape, split: int) -> Callable:
        """Embedding and the first `split` layers."""
        model, twins = self._model, [LayerCache(self._model.config, layer) for layer in range(split)]

        def run(tokens: mx.array, arrays: dict[str, mx.array], inputs: list[list[mx.array]]):
            step = Step.traced(model.config, shape, arrays)
            caches = [twin.twin(given) for twin, given in zip(twins, inputs, strict=True)]
            h, pre = model.run_layers(0, split, *model.start(tokens), step, caches, {})
            return h, pre, [cache.outputs for cache in caches], step.taps

        return run

    def _finish(self, shape: StepShape, split: int, last_only: bool) -> Callable:
        """The other layers and the head."""
        model, count = self._model, len(self._model.layers)
        twins = [LayerCache(model.config, layer) for layer in range(count)]

        def run(h: mx.array, pre: mx.array, arrays: dict, inputs: list[list[mx.array]], records: dict[int, mx.array]):
            step = Step.traced(model.config, shape, arrays)
            caches = [twins[split + i].twin(given) for i, given in enumerate(inputs)]
            caches = [*twins[:split], *caches]
            h, pre = model.run_layers(split, count, h, pre, step, caches, records)
            return model.logits(h, pre, last_only), [cache.outputs for cache in caches[split:]], step.taps

        return run

    def _graph(self, key: tuple, make: Callable[[], Callable]) -> Callable:
        if key not in self._graphs:
            if not self._seen:
                self._views = list(_containers(self._model))
                self._seen = list(chain.from_iterable(self._views))
                mx.eval(self._model.parameters())  # a graph takes no pending arrays as constants
            self._graphs[key] = mx.compile(make())
        return self._graphs[key]

    def _start_anew_if_changed(self) -> None:
        # Thousands of values at each step: compared by iterators that run in C.
        same = sum(map(len, self._views)) == len(self._seen)
        if not same or not all(map(is_, chain.from_iterable(self._views), self._seen)):
            self._graphs, self._views, self._seen = {}, [], []


def _split(model: Model) -> int:
    """How many layers may run before the token's number is known: those before Engram, if they publish nothing."""
    c = model.config
    first = min(c.engram_layer_ids, default=0)
    return first if all(c.ratio(layer) == 0 for layer in range(first)) else 0


def _containers(value: Any) -> Iterator[Collection]:
    """The values of every dict and list of a module tree: parameters, modules, and plain settings. A tuple is one
    value, for what it holds cannot be replaced."""
    if isinstance(value, nn.Module):
        yield vars(value).values()
    if isinstance(value, dict):
        yield value.values()
        parts = value.values()
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            yield value
        parts = value
    else:
        return
    for part in parts:
        yield from _containers(part)
