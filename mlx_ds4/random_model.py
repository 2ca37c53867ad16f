"""Models of random numbers made in memory, of the release's sizes or small, to measure speed without a model file.

The numbers are drawn on the device, plane by plane, so that 30 GB take seconds. Every layer does what a layer of its
kind does in the release: it scores, selects and routes for real, over data that mean nothing.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_ds4.cache import Cache
from mlx_ds4.checkpoint import Weight, drafter_weights
from mlx_ds4.config import ModelConfig
from mlx_ds4.convert.official_config import released_config
from mlx_ds4.convert.recipe import RECIPES, Recipe
from mlx_ds4.convert.synthetic import tiny_config
from mlx_ds4.custom_kernels._random_planes import BYTES, device_planes
from mlx_ds4.formats import planes
from mlx_ds4.loader import NotEnoughMemoryError, bind, bound_weights, machine_memory
from mlx_ds4.model.dspark import Drafter
from mlx_ds4.model.engram import engram_constants
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.model.model import Model

# The order in which a cut model takes the release's layers: one of each kind first (window, owner of ratio 2, candidate
# source of ratio 1, index over candidates, each with a layer that reuses its selection), then more, then the rest.
_GROWTH = (0, 1, 2, 3, 20, 21, 24, 25, 8, 9, 28, 29, 14, 15, 32, 33, 36, 37)
_TABLE_ROWS = 1 << 16  # records behind a random Engram table
_FILL_ROWS = 1 << 16  # cache rows drawn at a time


def cut_config(layers: int | None = None, *, size: str = "full", engram: bool = False) -> ModelConfig:
    """The release's config (`size` "full"), or a small one of the same structure ("tiny"), with `layers` layers.

    Fewer layers than the release's 40 keep every kind of layer while there is room: eight are window, window, owner of
    ratio 2, reuse, candidate source of ratio 1, reuse, index over candidates, reuse. The tiny model has six layers.
    Without `engram` no layer has a table. ValueError for a number of layers that the model does not have.
    """
    full = ModelConfig.from_dict(released_config()) if size == "full" else tiny_config()
    count = full.num_hidden_layers
    if layers is not None and not 1 <= layers <= count:
        raise ValueError(f"{layers} layers were asked for, expected 1 to {count}: the {size} model has no more")
    growth = [*_GROWTH, *(i for i in range(count) if i not in _GROWTH)] if size == "full" else range(count)
    return scheduled_config(full, sorted(growth[:layers]), engram=engram)


def scheduled_config(config: ModelConfig, layers: Sequence[int], *, engram: bool = False) -> ModelConfig:
    """`config` with these of its layers, in this order; a layer may come several times, the candidate source once.

    The drafter's taps become the last layers. ConfigError where a layer misses the owner of its compressed rows.
    """
    c = config

    def places(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(place for place, layer in enumerate(layers) if layer in ids)

    source = places((c.candidate_source_layer_id,))
    with_table = places(c.engram_layer_ids) if engram else ()
    taps = len(c.dspark_target_layer_ids)
    cut = dataclasses.replace(
        c,
        num_hidden_layers=len(layers),
        compress_ratios=tuple(c.ratio(layer) for layer in layers),
        kv_source_layer_ids=places(c.kv_source_layer_ids),
        index_source_layer_ids=places(c.index_source_layer_ids),
        candidate_source_layer_id=source[0] if source else len(layers),
        engram_layer_ids=with_table,
        engram_num_embeddings=(_TABLE_ROWS,) * len(with_table),
        engram_compressed_vocab_size=c.engram_compressed_vocab_size or c.vocab_size,
        dspark_target_layer_ids=tuple(range(len(layers)))[-taps:] if taps else (),
    )
    return ModelConfig.from_dict(cut.to_dict())


def random_model(
    config: ModelConfig,
    recipe: str = "q2",
    *,
    seed: int = 0,
    share: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Model:
    """A model of random weights in the formats of a recipe (`convert/recipe.py`), evaluated.

    With `share` the layers from that number on use the weights of earlier ones where these have such weights, in turn:
    40 layers of the real sizes run in the memory of 8, and no weight stays in a cache between two uses. `progress` gets
    (bytes done, bytes in all, name) after each weight. NotEnoughMemoryError where they do not fit this machine.
    """
    model = Model(config)
    _fill(model, bound_weights(model, config), RECIPES[recipe], seed, share, progress)
    if config.engram_layer_ids:
        model.set_engram(
            np.arange(config.vocab_size) % config.engram_compressed_vocab_size,
            engram_constants(config),
            [RandomRows(config.engram_head_dim, seed + i) for i in range(len(config.engram_layer_ids))],
        )
    return model


def random_drafter(model: Model, recipe: str = "q2", *, seed: int = 0) -> Drafter:
    """A DSpark drafter of random weights for `model`, which gives its taps from now on."""
    drafter = Drafter(model.config)
    weights = drafter_weights(drafter.config, len(drafter.target_layer_ids))
    _fill(drafter, weights, RECIPES[recipe], seed, None, None)
    model.tap(drafter.target_layer_ids)
    return drafter


class RandomRows:
    """Engram records of random numbers in memory: any row number is served, from a small table."""

    def __init__(self, width: int, seed: int):
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 0x7F, (_TABLE_ROWS, width), dtype=np.uint8)
        scales = rng.integers(112, 118, (_TABLE_ROWS, width // 32), dtype=np.uint8)
        self._records = np.concatenate([codes, scales], axis=1)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self._records[ids % _TABLE_ROWS]


def fill_cache(cache: Cache, length: int, seed: int = 0) -> None:
    """Makes an empty cache of one sequence hold `length` positions of random state, none of which can be rewound.

    Index keys and rows are normal numbers, so selections are spread over the whole context.
    """
    c = cache.config
    key = mx.random.key(seed)

    def noise(shape: tuple[int, ...], dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        nonlocal key
        key, use = mx.random.split(key)
        return mx.random.normal(shape, key=use).astype(dtype)

    cache.begin(1, length)  # makes the arrays
    for index, layer in enumerate(cache):
        layer.window = noise(layer.window.shape)
        if layer.pending is not None:
            layer.pending = noise(layer.pending.shape, mx.float32)
        if layer.compressed is not None:
            entries = length // c.ratio(index)
            for start in range(0, entries, _FILL_ROWS):
                count = min(_FILL_ROWS, entries - start)
                layer.compressed.append(noise((1, count, c.head_dim)))
                layer.index_keys.append(noise((1, count, c.index_head_dim)))
                mx.eval(layer.state)
        mx.eval(layer.state)
    ids = np.random.default_rng(seed).integers(0, 2, (1, min(length, 16))) if c.engram_layer_ids else None
    cache.advance(length, ids)
    cache.rewindable = 0


def _fill(module, weights: list[Weight], recipe: Recipe, seed: int, share: int | None, progress) -> None:
    first: dict[tuple, list[Weight]] = {}  # the weights that are drawn, by what may stand for them
    stands_for: dict[str, str] = {}
    for weight in weights:
        layer, rest = _layer_and_rest(weight.name)
        drawn = first.setdefault((rest, weight.shape), [])
        if share is not None and layer is not None and layer >= share and drawn:
            stands_for[weight.name] = drawn[layer % len(drawn)].name
        else:
            drawn.append(weight)
    total = sum(_nbytes(weight, recipe) for group in first.values() for weight in group)
    if total > machine_memory():
        raise NotEnoughMemoryError(
            f"the random weights take {total} bytes but {machine_memory()} are available: "
            "use fewer layers, or let layers share weights"
        )
    values: dict[str, mx.array | BlockWeight] = {}
    done = 0
    for weight in weights:
        if weight.name not in stands_for:
            values[weight.name] = _draw(weight, recipe, seed)
            done += _nbytes(weight, recipe)
        bind(module, weight, values[stands_for.get(weight.name, weight.name)])
        if progress:
            progress(done, total, weight.name)
        mx.clear_cache()


def _draw(weight: Weight, recipe: Recipe, seed: int) -> mx.array | BlockWeight:
    format = _format(weight, recipe)
    matrix = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    drawn = device_planes(seed + zlib.crc32(weight.name.encode()), format, *matrix)
    if format in planes.FORMATS:
        return BlockWeight(format, drawn)
    value = drawn["codes"].reshape(weight.shape)
    if weight.role != "drafter" and ("norm" in weight.role + weight.name or weight.name.endswith("_scale")):
        value = value + 1  # what multiplies is near one in a trained model
        mx.eval(value)
    return value


def _format(weight: Weight, recipe: Recipe) -> str:
    """The recipe's type; the drafter's own matrices are Q8_0, as in published files, where their rows are blocks."""
    if weight.role == "drafter":
        return "Q8_0" if weight.shape[-1] % 32 == 0 else "F32"
    return recipe.type_of(weight)


def _nbytes(weight: Weight, recipe: Recipe) -> int:
    return int(BYTES[_format(weight, recipe)] * np.prod(weight.shape))


def _layer_and_rest(name: str) -> tuple[int | None, str]:
    parts = name.split(".", 2)
    return (int(parts[1]), parts[2]) if parts[0] == "layers" else (None, name)
