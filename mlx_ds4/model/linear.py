"""Linear layers over dense or block-quantized weights, in the arithmetic of training.

A weight is either a float array or a `BlockWeight`, a module that holds the planes of a block format, so that
`model.parameters()`, printing and saving show what is stored. The product is float32 with one rounding of the
result; where the weights are the trained FP8 or FP4 ones, the input is rounded to FP8 first, as in training
(architecture notes 3.5). K-quants, IQ2_XXS, Q8_0 and float weights take plain inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_ds4.custom_kernels.cache_entry import norm_and_entry
from mlx_ds4.custom_kernels.entry_matmul import products_and_entry
from mlx_ds4.custom_kernels.expand_matmul import project_expand
from mlx_ds4.custom_kernels.fake_quant import fake_quant_fp8
from mlx_ds4.custom_kernels.quant_matmul import grouped_quant_matmul, quant_matmul, quant_matmul_group
from mlx_ds4.formats import planes as block_planes

from .module import Module


class BlockWeight(Module):
    """Planes of one block-quantized weight [.., out, in]; see `formats/planes.py` for their shapes."""

    def __init__(self, format: str, planes: dict[str, mx.array]):
        super().__init__()
        if format not in block_planes.FORMATS:
            raise ValueError(f"unknown block format {format!r}, expected one of {block_planes.FORMATS}")
        self._format = format
        self._planes = tuple(planes)
        for name, plane in planes.items():
            setattr(self, name, plane)
        self.freeze()

    @property
    def format(self) -> str:
        return self._format

    @property
    def planes(self) -> dict[str, mx.array]:
        return {name: self[name] for name in self._planes}

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], block_planes.columns_of(self._format, self.planes))

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    def dequantize(self, index: mx.array | int | None = None) -> mx.array:
        """The weight as float32; with `index` only those entries of the first axis (experts)."""
        planes = self.planes
        if index is not None:
            planes = {name: plane[index] for name, plane in planes.items()}
        return block_planes.dequantize(self._format, planes)

    def _extra_repr(self) -> str:
        return f"{self._format}, shape={self.shape}"


def stored(weight: mx.array | BlockWeight) -> tuple[str, dict[str, mx.array]]:
    """(format, planes) as the products take them; a float weight is its own plane."""
    if isinstance(weight, BlockWeight):
        return weight.format, weight.planes
    return block_planes.FLOATS[weight.dtype], {"codes": weight}


def dense(weight: mx.array | BlockWeight) -> mx.array:
    """Any weight as float32 values."""
    return block_planes.dequantize(*stored(weight))


class Linear(Module):
    """y = x W^T: x [.., in] -> [.., out].

    `trained` marks the layers that training quantizes (their inputs are rounded where the weight format is a
    trained one); `rounds_input` can be set to True or False to override the choice by format. float32 sum, one
    rounding to `out_dtype`.
    """

    def __init__(self, in_dims: int, out_dims: int, *, trained: bool = False, out_dtype: mx.Dtype = mx.bfloat16):
        super().__init__()
        self.weight = mx.zeros((out_dims, in_dims), dtype=mx.bfloat16)
        self._trained = trained
        self._out_dtype = out_dtype
        self._rounds_input: bool | None = None

    @property
    def rounds_input(self) -> bool:
        return self._trained and rounds_input(self.weight, self._rounds_input)

    @rounds_input.setter
    def rounds_input(self, value: bool | None) -> None:
        self._rounds_input = value

    def __call__(self, x: mx.array) -> mx.array:
        if self.rounds_input:
            x = fake_quant_fp8(x)
        return quant_matmul(x, *stored(self.weight), out_dtype=self._out_dtype)

    def _extra_repr(self) -> str:
        out_dims, in_dims = self.weight.shape
        return f"in={in_dims}, out={out_dims}, rounds_input={self.rounds_input}"


def apply_together(x: mx.array, *layers: Linear) -> list[mx.array]:
    """[layer(x) for layer in layers], the same bits, in one launch for few rows (up to five layers). Layers that round
    their input share the rounding; where only some do, there are two launches."""
    results: dict[int, mx.array] = {}
    for rounds in (False, True):
        some = [i for i, layer in enumerate(layers) if layer.rounds_input == rounds]
        if some:
            products = quant_matmul_group(
                fake_quant_fp8(x) if rounds else x,
                [stored(layers[i].weight) for i in some],
                out_dtype=[layers[i]._out_dtype for i in some],
            )
            results.update(zip(some, products, strict=True))
    return [results[i] for i in range(len(layers))]


def apply_and_enter(
    x: mx.array, query: Linear, kv: Linear, others: Sequence[Linear], q_weight: mx.array, *entry: Any, **options: Any
) -> tuple[mx.array, mx.array, mx.array, mx.array, list[mx.array]]:
    """`norm_and_entry` of query(x) and kv(x), its four results, and [layer(x) for layer in others]; for few rows the
    products of those that round their input as the query's share a launch, on CUDA with all that follows. The rest of
    the arguments: as `products_and_entry` takes them behind the weights."""
    rounds = query.rounds_input
    if kv.rounds_input != rounds:
        low_rank, latent, *rest = apply_together(x, query, kv, *others)
        options.pop("counts", None)
        return *norm_and_entry(low_rank, q_weight, latent, *entry, **options), rest
    together = [query, kv, *[layer for layer in others if layer.rounds_input == rounds]]
    products, *entered = products_and_entry(
        fake_quant_fp8(x) if rounds else x,
        [stored(layer.weight) for layer in together],
        [layer._out_dtype for layer in together],
        q_weight,
        *entry,
        **options,
    )
    found = iter(products)
    rest = iter(apply_together(x, *[layer for layer in others if layer.rounds_input != rounds]))
    return *entered, [next(found if layer.rounds_input == rounds else rest) for layer in others]


def apply_and_expand(x: mx.array, layer: Linear, h: mx.array, mix: mx.array) -> mx.array:
    """`expand(layer(x), h, mix)`, the same bits, in one launch for few rows."""
    x = fake_quant_fp8(x) if layer.rounds_input else x
    return project_expand(x, stored(layer.weight), h, mix)


def rounds_input(weight: mx.array | BlockWeight, override: bool | None) -> bool:
    """Whether a trained layer with this weight rounds its input to FP8."""
    if override is not None:
        return override
    return isinstance(weight, BlockWeight) and weight.format in block_planes.TRAINED_FORMATS


class GroupedLinear(Module):
    """Block-diagonal product: each of `groups` slices of x has its own matrix; the input is never rounded.

    weight [groups * rank, in / groups], rows of a group together; x [.., in] -> bfloat16 [.., groups * rank].
    """

    def __init__(self, in_dims: int, rank: int, groups: int):
        super().__init__()
        self.weight = mx.zeros((groups * rank, in_dims // groups), dtype=mx.bfloat16)
        self._groups = groups

    def __call__(self, x: mx.array) -> mx.array:
        return grouped_quant_matmul(x, *stored(self.weight), self._groups)
