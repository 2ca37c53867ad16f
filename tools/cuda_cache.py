"""On an NVIDIA GPU: whether MLX takes the modules that `custom_kernels/_cuda_cache.py` compiles.

    python -m tools.cuda_cache

Compares the text of a kernel with the one that MLX prints, and puts under its name a module that gives another result.
Both must hold before a version of MLX goes into `KNOWN`. Exits with 1 where something differs, and with 2 where nothing
can be compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import mlx.core as mx

from mlx_ds4.custom_kernels import _cuda_cache
from mlx_ds4.custom_kernels._cuda_text import function_name, kernel_text

TEMPLATE = [("N", 8), ("T", mx.bfloat16), ("F", True), ("G", False)]
SOURCE = """if (threadIdx.x == 0) {
  bool sizes = x_shape[0] == 2 && x_shape[1] == 3 && x_strides[0] == 3 && x_strides[1] == 1 && x_ndim == 2;
  y[0] = sizes && N == 8 && sizeof(T) == 2 && F && !G ? 1.0f : -1.0f;
  z[0] = x[5];
}
"""


def main() -> int:
    try:
        compiler = _cuda_cache.make_compiler()
    except (AttributeError, KeyError, OSError, ValueError) as error:
        print(f"MLX compiles by itself here: {error}")
        return 2
    print(f"{compiler.folder}\n{compiler.stamp}", end="")
    fields = {
        "name": "cuda_cache_check",
        "input_names": ["x"],
        "output_names": ["y", "z"],
        "source": SOURCE,
        "header": f"{compiler.stamp}// {time.time_ns()}\n",  # a module that no earlier run has left
    }
    call = {
        "inputs": [mx.array([[0, 1, 2], [3, 4, 5]], dtype=mx.uint32)],
        "template": TEMPLATE,
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(1,), (1,)],
        "output_dtypes": [mx.float32, mx.float16],
    }
    (y, z), printed = printed_by(lambda: mx.fast.cuda_kernel(**fields)(verbose=True, **call))
    function = function_name(fields["name"], TEMPLATE)
    text = kernel_text(fields, [mx.uint32], call["output_dtypes"], TEMPLATE)
    begin = time.perf_counter()
    other = compiler.compile(function, text.replace("? 1.0f", "? 2.0f"))
    seconds = time.perf_counter() - begin
    path = compiler.keep(function, text, *other)
    try:
        results = y.item(), z.item()
    finally:
        for suffix in (".ptx", ".txt"):
            path.with_suffix(suffix).unlink()
    same, taken = text in printed, results == (2.0, 5.0)
    print(f"text as MLX's: {same}; module taken: {taken}, results {results}; compiled in {seconds:.2f} s")
    if not same:
        print(f"--- ours\n{text}\n--- MLX's\n{printed}")
    return 0 if same and taken else 1


def printed_by(run):
    """(what `run()` returns, what it printed), also from C++."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            result = run()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return result, file.read().decode()


if __name__ == "__main__":
    sys.exit(main())
