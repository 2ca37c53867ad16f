"""Limit: MLX's CUDA back end compiles custom kernels anew in every process.

`python benchmarks/mlx_limits/kernel_start.py` times the first launches of eight kernels in two processes: a cache on
the disk would make the second fast. CustomKernel::eval_gpu asks for its module with use_disk_cache=false.
"""

import subprocess
import sys
import time

import mlx.core as mx

KERNELS = 8
if not mx.cuda.is_available():
    sys.exit("kernel_start needs a CUDA device: it times the compilation of CUDA kernels.")
if "--child" in sys.argv:
    x = mx.zeros(1024)
    mx.eval(x + 1)
    start = time.perf_counter()
    for k in range(KERNELS):
        add = mx.fast.cuda_kernel(
            name=f"limit_start_{k}", input_names=["x"], output_names=["y"],
            source=f"unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i] + {k}.0f;",
        )  # fmt: skip
        mx.eval(add(inputs=[x], grid=(1024, 1, 1), threadgroup=(256, 1, 1), output_shapes=[(1024,)],
            output_dtypes=[mx.float32]))  # fmt: skip
    print(f"{(time.perf_counter() - start) / KERNELS:.3f} s a kernel")
else:
    print(mx.__version__)
    for number in ("first", "second"):
        print(number, "process:", flush=True, end=" ")
        subprocess.run([sys.executable, __file__, "--child"], check=True)
