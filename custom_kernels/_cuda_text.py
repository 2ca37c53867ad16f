"""The text that MLX makes of a custom CUDA kernel and the names under which it looks for the compiled module.

This repeats MLX's rules (`build_kernel` in mlx/backend/cuda/custom_kernel.cpp, `get_ptx_path` in jit_module.cpp) to the
letter: MLX finds a module by the hash of the text. With other rules it would find nothing and compile by itself.
`python -m tools.cuda_cache` compares with MLX's own text where a GPU is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

# dtype -> (its type in the text, its name in a kernel's name)
_TYPES = {
    mx.bool_: ("bool", "bool"),
    mx.float32: ("float", "float"),
    mx.float16: ("__half", "float16_t"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    **{getattr(mx, f"{s}int{bits}"): (f"{s}int{bits}_t",) * 2 for s in ("", "u") for bits in (8, 16, 32, 64)},
}
_BEFORE = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
_SIZES = (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int"))
_LONGEST_FILE_NAME = 245

Template = Sequence[tuple[str, int | bool | mx.Dtype]]


def function_name(name: str, template: Template) -> str:
    """The kernel's function: its name and the values of its template."""
    values = ("tf"[not v] if isinstance(v, bool) else v if isinstance(v, int) else _TYPES[v][1] for _, v in template)
    return "custom_kernel_" + name + "".join(f"_{v}" for v in values)


def kernel_text(
    fields: dict[str, Any], inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype], template: Template
) -> str:
    """The whole text for `mx.fast.cuda_kernel(**fields)`, launched with arrays of these dtypes, none of them scalar."""
    parameters = []
    for name, dtype in zip(fields["input_names"], inputs, strict=True):
        parameters.append(f"    const {_TYPES[dtype][0]}* {name}")
        sizes = [(w, kind) for w, kind in _SIZES if f"{name}_{w}" in fields["source"]]
        parameters += [f"    const __grid_constant__ {kind} {name}_{what}" for what, kind in sizes]
    named = zip(fields["output_names"], outputs, strict=True)
    parameters += [f"    {_TYPES[dtype][0]}* {name}" for name, dtype in named]
    lines = [f"  {_constant(name, value)};\n" for name, value in template]
    return "".join(
        (
            f"{_BEFORE}{fields['header']}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n",
            f"__global__ void {function_name(fields['name'], template)}(\n",
            ",\n".join(parameters) + ") {\n",
            *((*lines, "\n") if lines else ()),
            f"{fields['source']}\n}}\n\n}} // namespace mlx::core::cu\n",
        )
    )


def _constant(name: str, value: int | bool | mx.Dtype) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()}"
    if isinstance(value, int):
        return f"constexpr int {name} = {value}"
    return f"using {name} = {_TYPES[value][0]}"


@functools.cache
def _hash_bytes() -> Any:
    """What std::hash<std::string> calls in libstdc++, with which MLX is built and which it has loaded."""
    function = ctypes.CDLL("libstdc++.so.6")["_ZSt11_Hash_bytesPKvmm"]
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t), ctypes.c_size_t
    return function


def module_name(function: str, text: str) -> str:
    """The name by which MLX knows the compiled text."""
    data = text.encode()
    return f"{function}_{_hash_bytes()(data, len(data), 0xC70F6907):x}"


def module_path(folder: Path, module: str) -> Path:
    """Where MLX looks for a module's binary; a name that is too long goes over several folders."""
    while len(module) > _LONGEST_FILE_NAME:
        folder, module = folder / module[:_LONGEST_FILE_NAME], module[_LONGEST_FILE_NAME:]
    return folder / f"{module}.ptx"
