"""The bodies that exist for CUDA alone, run on the CPU as C++: threads are fibers, warps wait for one another.

`launch(kernel, ...)` compiles `host.h` (CUDA's names, and `_cuda_ptx.h` in plain C++), the kernel's header and body
with clang++-19 and runs the grid block by block. It checks what the mathematics and the lane layouts do, against the
same cases as everything else. It does not look for races or bad addresses, and says nothing about speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_ds4.custom_kernels._kernel import watch_launches
from mlx_ds4.custom_kernels._switches import trace
from mlx_ds4.custom_kernels._tiles_cuda import PTX

COMPILER = shutil.which("clang++-19")
_FOLDER = Path(__file__).parent
_BUILDS = Path(tempfile.gettempdir()) / "mlx_ds4-cuda-host"
_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int8: "int8_t",
    mx.uint8: "uint8_t",
}


def launch(kernel, inputs: list[mx.array], call: dict, halves_at: int = 0, *, step: int = 1) -> list[mx.array]:
    """One launch of a kernel with a CUDA body; `call` as `Launch.call` holds it. Outputs start as NaN, or as a number
    that no index is. Inputs of float16 start `halves_at` bytes behind a multiple of 16, as those of a slice may. Each
    block is `step` behind the one before, around the grid: -1 is from the last to the first. Raises ValueError where
    the launch leaves an input other than it was."""
    arrays = [_placed(np.array(x.view(mx.uint8)), halves_at * (x.dtype == mx.float16)) for x in inputs]
    outputs = [
        np.full(int(np.prod(shape)) * dtype.size, 0x7F if mx.issubdtype(dtype, mx.integer) else 0xFF, dtype=np.uint8)
        for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
    ]
    library = _build(_source(kernel, inputs, call))
    entry, ctypes.c_int.in_dll(library, "block_step").value = library.run, step
    shapes = [np.array(x.shape, dtype=np.int32) for x in inputs]
    everything = (*arrays, *outputs, *shapes)
    pointers = (ctypes.c_void_p * len(everything))(*(a.ctypes.data for a in everything))
    blocks = [g // t for g, t in zip(call["grid"], call["threadgroup"], strict=True)]
    ndims = (ctypes.c_int * len(inputs))(*(x.ndim for x in inputs))
    entry(pointers, *map(ctypes.c_int, (*blocks, int(np.prod(call["threadgroup"])))), ndims)
    for name, x, data in zip(kernel.input_names, inputs, arrays, strict=True):
        if not np.array_equal(data, np.array(x.view(mx.uint8)).reshape(-1)):
            raise ValueError(f"{kernel.name} leaves its input {name} other than it was.")
    return [
        mx.array(data).view(dtype).reshape(shape)
        for data, shape, dtype in zip(outputs, call["output_shapes"], call["output_dtypes"], strict=True)
    ]


def run_all(fn) -> list[mx.array]:
    """The results of the last launch that `fn` makes, from the CUDA bodies."""
    launches = []
    with watch_launches(launches.append):
        fn()
    return launches[-1].outputs


def run(fn) -> mx.array:
    return run_all(fn)[0]


def run_op(fn) -> mx.array:
    """The result of a public operation of one launch, which no device here would launch."""
    launches = []
    with watch_launches(launches.append):
        trace(fn)
    (item,) = launches
    return launch(item.kernel, item.inputs, item.call)[0]


def _placed(data: np.ndarray, at: int) -> np.ndarray:
    room = np.empty(data.size + 32, dtype=np.uint8)
    start = -room.ctypes.data % 16 + at
    room[start : start + data.size] = data.reshape(-1)
    return room[start : start + data.size]


def _source(kernel, inputs: list[mx.array], call: dict) -> str:
    header = (kernel.cuda_header or "").replace(PTX, "")
    header = re.sub(r"#include <cuda\w*\.h>", "", header)
    names = [*kernel.input_names, *kernel.output_names]
    dtypes = [*(x.dtype for x in inputs), *call["output_dtypes"]]
    parameters, values, shapes, settings = [], [], [], []
    for index, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        const = "const " if index < len(inputs) else ""
        parameters.append(f"{const}{_TYPES[dtype]}* {name}")
        values.append(f"({const}{_TYPES[dtype]}*)p[{index}]")
    for index, name in enumerate(kernel.input_names):  # set at each run, so that one build serves every shape
        shapes.append(f"static const int* {name}_shape;")
        settings.append(f"{name}_shape = (const int*)p[{len(names) + index}];")
        shapes.append(f"static int {name}_ndim;")
        settings.append(f"{name}_ndim = ndims[{index}];")
    constants = [
        f"using {name} = {_TYPES[value]};" if isinstance(value, mx.Dtype) else f"constexpr int {name} = {int(value)};"
        for name, value in call["template"]
    ]
    return "\n".join(
        [
            '#include "host.h"',
            header,
            *shapes,
            f"static void body({', '.join(parameters)}) {{",
            *constants,
            kernel.cuda_source,
            "}",
            'extern "C" void run(void** p, int x, int y, int z, int threads, const int* ndims) {',
            *settings,
            f"  run_grid(x, y, z, threads, [=] {{ body({', '.join(values)}); }});",
            "}",
        ]
    )


def _build(source: str) -> ctypes.CDLL:
    key = hashlib.sha256((source + (_FOLDER / "host.h").read_text()).encode()).hexdigest()[:20]
    library = _BUILDS / f"{key}.so"
    if not library.exists():
        _BUILDS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILDS) as folder:
            text, made = Path(folder) / "body.cpp", Path(folder) / "body.so"
            text.write_text(source)
            flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{_FOLDER}", "-fno-strict-aliasing"]
            done = subprocess.run([COMPILER, *flags, "-o", made, text], capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"the body does not compile as C++: {done.stderr[:2000]}")
            made.rename(library)
    return ctypes.CDLL(str(library))
