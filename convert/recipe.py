"""Which GGUF type each class of tensor gets.

Q2, Q4 and MXFP4 are the recipes of the published and locally made ds4 files. F32 and F16 keep every
trained value exactly (F16 stores BF16 tensors as BF16 and refuses an FP8 or FP4 value that a half cannot
hold), so that a model can be compared between its two sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_ds4.checkpoint import ROLES, Weight, gguf_shape
from mlx_ds4.formats.quant_blocks import TYPE_INFO


@dataclass(frozen=True)
class Recipe:
    """Types of the three expert matrices and the text that the file's metadata shows.

    `exact` names the recipes that keep trained values: their other tensors follow from the storage.
    """

    name: str
    gate_up: str
    down: str
    text: str
    exact: bool = False

    def type_of(self, weight: Weight) -> str:
        """GGUF type of a weight: F32 for vectors, norms and the router, as in the published files."""
        if weight.role == "engram_table":
            return "I8"
        if self.exact:
            if self.name == "f32" or weight.storage == "F32":
                return "F32"
            return "BF16" if weight.storage == "BF16" else "F16"
        if weight.role in ("expert_gate", "expert_up"):
            return self.gate_up
        if weight.role == "expert_down":
            return self.down
        if weight.role in ("attention", "shared_expert", "head", "drafter"):
            return "Q8_0"
        if weight.role in ("embedding", "mixing", "compressor", "indexer", "engram"):
            return "F16"
        return "F32"


_REST = "Q8_0 attention/shared/head"
RECIPES = {
    "q2": Recipe("q2", "IQ2_XXS", "Q2_K", f"IQ2_XXS gate/up; Q2_K down; {_REST}"),
    "q4": Recipe("q4", "Q4_K", "Q4_K", f"Q4_K gate/up/down; {_REST}"),
    "mxfp4": Recipe("mxfp4", "MXFP4", "MXFP4", f"MXFP4 gate/up/down; {_REST}"),
    "f32": Recipe("f32", "F32", "F32", "F32, trained values", exact=True),
    "f16": Recipe("f16", "F16", "F16", "F16 and BF16, trained values", exact=True),
}


def tensor_bytes(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; ValueError when its rows are not whole blocks."""
    _, elements, size = TYPE_INFO[type_name]
    if shape[-1] % elements:
        raise ValueError(
            f"rows of {shape[-1]} cannot be {type_name}, whose blocks hold {elements}: "
            "choose another recipe, or widths that are multiples of it"
        )
    return math.prod(shape) // elements * size


def plan(weights: list[Weight], recipe: Recipe) -> dict[str, int]:
    """Payload bytes of a GGUF by part of the model; ValueError, naming the tensor, as `tensor_bytes`."""
    groups = dict.fromkeys((group for group, _ in ROLES.values()), 0)
    for weight in weights:
        try:
            groups[weight.group] += tensor_bytes(recipe.type_of(weight), gguf_shape(weight))
        except ValueError as error:
            raise ValueError(f"{weight.name}: {error}") from None
    return {group: count for group, count in groups.items() if count}
