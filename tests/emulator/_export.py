"""The text that MLX generates for a kernel, obtained without Metal.

A kernel made by `mx.fast.metal_kernel` cannot be called where there is no Metal, but it can be *exported*: MLX
then builds the graph node as it would on a Mac, with all its checks of the arguments, and the node carries the
complete text that Apple's compiler would be given (less MLX's own prelude).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from ._errors import EmulatorError

Scalar = (bool, int, float)


class KernelSpec(Protocol):
    """What the emulator reads from a kernel: the arguments of mx.fast.metal_kernel, as attributes."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool


def identity(spec: KernelSpec) -> tuple[Any, ...]:
    """A hashable value that is equal for two kernels with equal text."""
    return (
        spec.name,
        tuple(spec.input_names),
        tuple(spec.output_names),
        spec.source,
        spec.header,
        spec.ensure_row_contiguous,
        spec.atomic_outputs,
    )


def generated_text(
    spec: KernelSpec,
    inputs: Sequence[mx.array | bool | int | float],
    *,
    template: Sequence[tuple[str, Any]],
    output_dtypes: Sequence[mx.Dtype],
) -> tuple[str, str]:
    """(name of the generated function, text), as in mx.fast.metal_kernel(..., verbose=True) on a Mac.

    Of the inputs only dtypes and shapes matter. Raises EmulatorError ("arguments") for what MLX refuses.
    """
    kernel = mx.fast.metal_kernel(
        name=spec.name,
        input_names=list(spec.input_names),
        output_names=list(spec.output_names),
        source=spec.source,
        header=spec.header,
        ensure_row_contiguous=spec.ensure_row_contiguous,
        atomic_outputs=spec.atomic_outputs,
    )
    arrays = [mx.zeros(x.shape, dtype=x.dtype) for x in inputs if not isinstance(x, Scalar)]

    def call(*traced: mx.array) -> list[mx.array]:
        rest = iter(traced)
        return kernel(
            inputs=[x if isinstance(x, Scalar) else next(rest) for x in inputs],
            template=list(template),
            grid=(1, 1, 1),  # neither the grid nor the outputs' shapes are part of the text
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(output_dtypes),
            output_dtypes=list(output_dtypes),
        )

    found: list[tuple[str, str]] = []

    def note(item: dict[str, Any]) -> None:
        if item.get("name") == "CustomKernel":
            function, text, *_ = item["arguments"]
            found.append((function, text))

    try:
        mx.export_function(note, call, *arrays)
    except (ValueError, TypeError, RuntimeError) as e:
        raise EmulatorError(spec.name, "arguments", f"MLX refuses the call: {e}") from e
    if len(found) != 1:
        raise EmulatorError(spec.name, "toolchain", "this version of MLX exports no text for custom kernels")
    return found[0]
