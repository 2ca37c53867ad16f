"""Trained parameters as one flat vector per storage class, and the named tensors that they stand for.

A step then rounds all FP4 weights in one operation, all FP8 weights in another, and the optimizer touches five arrays
instead of 250, which is what keeps a training step from being bound by launches. Names, shapes and storage are those of
`mlx_ds4.checkpoint`, so what is trained is what the model loads.

FP8 weights lie tile by tile, so that a tile of 32x32 is one row of 1,024; the others row by row. Routing biases
follow the load, not a gradient, and live apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_ds4.checkpoint import Weight, drafter_weights, model_weights
from mlx_ds4.config import ModelConfig
from mlx_ds4.model.dspark import stage_config

from . import rounding

TILE = 32
# Every weight starts at a multiple of so many numbers: cuBLAS picks products for matrices that start at 256 bytes, and
# refuses a slice that does not.
_ALIGNED = 64
CLASSES = ("FP4", "FP8", "ROWS", "BF16", "VECTORS", "F32")


def backbone(config: ModelConfig) -> Layout:
    """The text model's trained weights."""
    return Layout(model_weights(config))


def drafter(config: ModelConfig) -> Layout:
    """The drafter's trained weights."""
    return Layout(drafter_weights(stage_config(config), len(config.dspark_target_layer_ids)))


class Layout:
    """Which weight lies where in the flat vectors; `biases` are the routing biases, by name."""

    def __init__(self, weights: Sequence[Weight]):
        self.classes: dict[str, list[Weight]] = {name: [] for name in CLASSES}
        self.biases: list[Weight] = []
        for weight in weights:
            if weight.name.endswith("gate.bias"):
                self.biases.append(weight)
            elif not weight.name.endswith(".bias_vl"):
                self.classes[_class(weight)].append(weight)
        self.classes = {name: ws for name, ws in self.classes.items() if ws}

    @property
    def size(self) -> int:
        """Trained numbers."""
        return sum(math.prod(w.shape) for ws in self.classes.values() for w in ws)

    def initial(self, seed: int) -> dict[str, mx.array]:
        """Flat vectors of fresh weights."""
        rng = np.random.default_rng(seed)
        return {
            name: mx.array(np.concatenate([_padded(_flat(w, _fresh(w, rng))) for w in ws]))
            for name, ws in self.classes.items()
        }

    def flat(self, named: dict[str, np.ndarray]) -> dict[str, mx.array]:
        """Flat vectors of named float32 arrays."""
        return {
            name: mx.array(np.concatenate([_padded(_flat(w, np.asarray(named[w.name], np.float32))) for w in ws]))
            for name, ws in self.classes.items()
        }

    def named(self, flat: dict[str, mx.array]) -> dict[str, mx.array]:
        """Every weight under its name as float32, rounded to what its storage holds. Differentiable."""
        out: dict[str, mx.array] = {}
        for name, weights in self.classes.items():
            vector = _ROUND[name](flat[name])
            ends = np.cumsum([-(-math.prod(w.shape) // _ALIGNED) * _ALIGNED for w in weights])[:-1].tolist()
            for weight, part in zip(weights, mx.split(vector, ends) if ends else [vector], strict=True):
                out[weight.name] = _shaped(weight, part[: math.prod(weight.shape)])
        return out


def _padded(flat: np.ndarray) -> np.ndarray:
    return np.pad(flat, (0, -flat.size % _ALIGNED))


_ROUND = {
    "FP4": lambda v: rounding.fp4_weight(v.reshape(-1, TILE)).reshape(-1),
    "FP8": lambda v: rounding.fp8_weight(v.reshape(-1, TILE * TILE)).reshape(-1),
    "ROWS": lambda v: rounding.fp8_weight(v.reshape(-1, TILE)).reshape(-1),
    "BF16": lambda v: v.astype(mx.bfloat16).astype(mx.float32),
    "VECTORS": lambda v: v.astype(mx.bfloat16).astype(mx.float32),
    "F32": lambda v: v,
}


def _class(weight: Weight) -> str:
    return "VECTORS" if weight.storage == "BF16" and len(weight.shape) == 1 else weight.storage


def _flat(weight: Weight, values: np.ndarray) -> np.ndarray:
    if weight.storage == "FP8":
        rows, columns = weight.shape
        values = values.reshape(rows // TILE, TILE, columns // TILE, TILE).swapaxes(1, 2)
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def _shaped(weight: Weight, part: mx.array) -> mx.array:
    if weight.storage == "FP8":
        rows, columns = weight.shape
        part = part.reshape(rows // TILE, columns // TILE, TILE, TILE).swapaxes(1, 2)
    return part.reshape(weight.shape)


def _fresh(weight: Weight, rng: np.random.Generator) -> np.ndarray:
    name, shape = weight.name, weight.shape
    noise = rng.standard_normal(shape, np.float32)
    if "hc_" in name:
        return _fresh_mixing(name, shape, noise)
    if name.endswith("attn_sink"):
        return np.zeros(shape, np.float32)
    if len(shape) == 1 or name.endswith(("q_weight", "k_weight")):
        return np.ones(shape, np.float32)
    if weight.role == "embedding" or name.endswith("markov_head.embed.weight"):
        return noise * np.float32(0.5)
    if weight.role == "engram_table":
        return noise * np.float32(0.3)
    # Sublayers start small, so that depth does not blow the streams up; the head starts near indifference.
    gain = 0.3 if name.endswith(("wo_b.weight", "w2.weight", "head.weight")) else 1.0
    return noise * np.float32(gain / math.sqrt(shape[-1]))


def _fresh_mixing(name: str, shape: tuple[int, ...], noise: np.ndarray) -> np.ndarray:
    """Streams start nearly separate (comb close to the identity) and unequal, which is what lets them differ later."""
    if name.endswith("_fn"):
        return noise * np.float32(1 / math.sqrt(shape[-1]))
    if name.endswith("_scale"):
        return np.full(shape, 0.1, np.float32)
    streams = math.isqrt(len(noise) + 1) - 1  # M (M + 2) = (M + 1)^2 - 1
    base = np.float32(0.3) * noise
    base[:streams] -= np.float32(math.log(streams - 1))  # sigmoid: a share of one stream each
    base[2 * streams :] += (4 * np.eye(streams, dtype=np.float32)).reshape(-1)
    return base
