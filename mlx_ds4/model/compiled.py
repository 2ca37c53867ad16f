"""Steps of decoding and verification as compiled graphs: the same modules, traced once for each shape of step.

A pass over up to 8 rows runs as a chain of graphs. The first of a model with Engram embeds the tokens and runs the
layers before Engram; it needs no number on the host, so the device works on it while the host still waits for the token
that Engram must hash. Without Engram nothing waits. The next graphs have one layer, two and four, then come nine each:
a graph is copied as a whole before any of it is evaluated, and the device would wait for that; it takes longer for a
layer than the host. Positions, bounds and slots are arrays, which the first graph unpacks from one array of the host
or, on CUDA, makes from the position; so a graph serves every step of its shape (`StepShape`) and cache capacity. The
arrays it makes are the rings and the recent rows, never the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain, repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_ds4.cache import Cache, LayerCache
from mlx_ds4.custom_kernels._cuda_cache import compiling, together
from mlx_ds4.custom_kernels.step_values import in_pairs, launches

from .module import Module
from .step import Layout, Step, StepShape, as_array, on_device, unpack

if TYPE_CHECKING:
    from .model import Model

# Layers of the parts with which the device begins once the token's number is known, and of each behind them.
FIRST, LAYERS = (1, 2, 4), 9


class CompiledSteps:
    """The compiled graphs of one model, made when first needed.

    A graph holds the weights that it was traced with, as constants. So where a module may have changed, the modules,
    arrays and settings that it was traced with are compared with those there now, and it is made anew if one has been
    replaced: part by part, because the device is at work from the first one on.
    """

    def __init__(self, model: Model):
        self._model = model
        self._graphs: dict[tuple, Callable] = {}
        self._held: dict[int, _Held] = {}  # for each part
        self._parts: list[tuple[int, int]] = []

    @together()  # CUDA kernels of graphs that are traced now compile side by side
    def __call__(
        self, tokens: mx.array | np.ndarray, cache: Cache, last_only: bool, sampled: bool
    ) -> tuple[mx.array, list[mx.array]]:
        """As `Model.forward`, for a step of at most 8 rows behind `cache.begin`."""
        model = self._model
        self._forget_if_changed(0)
        hashed, made_there = bool(model.config.engram_layer_ids), launches()
        # Tokens of several rows are the host's, which on CUDA sends them as pairs.
        sent = made_there and not sampled and tokens.shape[0] == 1 and tokens.shape[1] > 2
        ids = model.checked_ids(tokens) if sent or not (hashed or sampled) else None
        step = Step(model.config, cache.offset, tokens.shape[1], places=cache.places())
        shape = step.shape
        if made_there:
            values = in_pairs(step.numbers + (ids[0].tolist() if sent else []))
        else:
            values = [step.packed(step.layout())]
        state, arrays, published, outputs, taps = values if sent else [as_array(tokens), *values], {}, {}, [], []
        mapped = read = None
        self._parts = parts = self._parts or _parts(model)
        for part, (first, end) in enumerate(parts):
            if part > 0:
                self._forget_if_changed(part)
            if part == 1 and hashed:
                mapped, read = model.reader(model.checked_ids(tokens) if ids is None else ids, cache)
            ends = part + 1 == len(parts)
            key = (part, shape, ends and last_only, made_there, sent)
            if key not in self._graphs:
                self._hold(part, parts)
                layout = step.layout(sent)
                self._graphs[key] = mx.compile(self._part(parts, part, shape, layout, last_only, made_there, sent))
            inputs = [layer.inputs for layer in cache[first:end]]
            # Records of a later layer are read from disk while the device works on the layers before it.
            own = {layer: read(layer) for layer in model.config.engram_layer_ids if first <= layer < end}
            state, unpacked, published, made, some = self._graphs[key](state, arrays, inputs, own, published)
            if not ends and not compiling():
                mx.async_eval(state, unpacked, made)
            arrays = arrays or unpacked
            outputs += made
            taps += some
        for layer, made in zip(cache, outputs, strict=True):
            layer.take(made, shape.entries)
        cache.advance(shape.length, mapped)
        return state[0], taps

    def _part(
        self,
        parts: list[tuple[int, int]],
        part: int,
        shape: StepShape,
        layout: Layout,
        last_only: bool,
        made_there: bool,
        sent: bool,
    ) -> Callable:
        """A run of layers; the first part begins with the embedding and unpacks the step's arrays for all, or makes
        them there; the last one ends with the head."""
        model, (first, end) = self._model, parts[part]
        twins = [LayerCache(model.config, layer) for layer in range(len(model.layers))]

        def run(
            state: list[mx.array],
            arrays: dict[str, mx.array],
            inputs: list[list[mx.array]],
            records: dict[int, mx.array],
            published: dict[str, Any],
        ):
            if part == 0:
                tokens, *values = [None, *state] if sent else state
                words = on_device(values, model.config, layout) if made_there else values[0]
                arrays = unpack(words, layout)
            step = Step.traced(model.config, shape, arrays)
            caches = list(twins)
            caches[first:end] = [
                twin.twin(given, step.marks) for twin, given in zip(twins[first:end], inputs, strict=True)
            ]
            _read(published, step, caches[:first])
            h, pre = model.start(arrays["tokens"] if sent else tokens) if part == 0 else state
            h, pre = model.run_layers(first, end, h, pre, step, caches, records)
            out = [h, pre] if part + 1 < len(parts) else [model.logits(h, pre, last_only)]
            own = arrays if part == 0 and part + 1 < len(parts) else {}
            return out, own, _published(step), [cache.outputs for cache in caches[first:end]], step.taps

        return run

    def _hold(self, part: int, parts: list[tuple[int, int]]) -> None:
        """Notes what the module tree holds for a part: its layers; the first has all that belongs to no layer, too."""
        if part not in self._held:
            mx.eval(self._model.parameters())  # a graph takes no pending arrays as constants
            layers, (first, end) = self._model.layers, parts[part]
            self._held[part] = _Held(layers[first:end]) if part else _Held(self._model, but=layers[end:])

    def _forget_if_changed(self, part: int) -> None:
        """Forgets the graphs of a part, or behind a change to the first all of them."""
        if part not in self._held or self._held[part].unchanged():
            return
        gone = [other for other in self._held if part in (0, other)]
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] not in gone}
        self._held = {other: held for other, held in self._held.items() if other not in gone}
        self._parts = []


class _Held:
    """What a part of a module tree holds when its graphs are traced."""

    def __init__(self, root: Any, but: Collection[nn.Module] = ()):
        self._changes = Module.changes
        # Live views, and the values in them: of modules that count their changes, and of what else there is.
        self._counted, self._others = _Views(), _Views()
        for counts, view in _containers(root, but):
            (self._counted if counts else self._others).add(view)

    def unchanged(self) -> bool:
        """Whether it holds the same now."""
        changes = Module.changes
        if not self._others.unchanged() or (changes != self._changes and not self._counted.unchanged()):
            return False
        self._changes = changes
        return True


class _Views:
    def __init__(self) -> None:
        self._views: list[Collection] = []
        self._values: list[Any] = []

    def add(self, view: Collection) -> None:
        self._views.append(view)
        self._values += view

    def unchanged(self) -> bool:
        # Thousands of values: compared by iterators that run in C. By identity: modules are dicts to Python, so two
        # without parameters are equal whatever they do.
        return sum(map(len, self._views)) == len(self._values) and all(
            map(is_, chain.from_iterable(self._views), self._values)
        )


def _parts(model: Model) -> list[tuple[int, int]]:
    """The layers of each graph, from and to. With Engram the first holds those that may run before the token's number
    is known: those before Engram, if they publish nothing."""
    c, count = model.config, len(model.layers)
    split = min(c.engram_layer_ids, default=0)
    split = split if all(c.ratio(layer) == 0 for layer in range(split)) else 0
    ends, end, sizes = [split] if c.engram_layer_ids else [], split, chain(FIRST, repeat(LAYERS))
    while end < count:
        end = min(end + next(sizes), count)
        ends.append(end)
    return list(zip([0, *ends], ends, strict=False))


def _published(step: Step) -> dict[str, Any]:
    """What later layers read of a traced step: the lists, and the arrays of the cache whose rows they select."""
    source = None if step.source is None else step.source.inputs
    found = {"selection": step.selection, "candidates": step.candidates, "source": source}
    return {name: value for name, value in found.items() if value is not None}


def _read(published: dict[str, Any], step: Step, before: list[LayerCache]) -> None:
    """Puts what earlier parts have published into a traced step; the source is the last owner `before` this part."""
    step.selection, step.candidates = published.get("selection"), published.get("candidates")
    if "source" in published:
        owner = max(layer for layer in range(len(before)) if step.config.owns_kv(layer))
        step.source = before[owner].twin(published["source"], step.marks)


def _containers(value: Any, but: Collection[nn.Module] = ()) -> Iterator[tuple[bool, Collection]]:
    """The values of every dict and list of a module tree, parameters, modules, and plain settings, and whether they are
    those of a module that counts its changes. A tuple is one value, for what it holds cannot be replaced. What some
    modules hold is left out."""
    if any(value is module for module in but):
        return
    counts = isinstance(value, Module)
    if isinstance(value, nn.Module):
        yield counts, vars(value).values()
    if isinstance(value, dict):
        yield counts, value.values()
        parts = value.values()
    elif isinstance(value, list | tuple):
        if isinstance(value, list):
            yield False, value
        parts = value
    else:
        return
    for part in parts:
        yield from _containers(part, but)
