"""Limit: MLX's CUDA back end hashes a custom kernel's whole text at every launch.

`python benchmarks/mlx_limits/kernel_text.py` times compiled chains of one trivial kernel with 1 KB and with 64 KB of
comments in its header. CustomKernel::eval_gpu (mlx/backend/cuda/custom_kernel.cpp) names a module by std::hash of it.
"""

import sys
import time

import mlx.core as mx

LAUNCHES = 200
if not mx.cuda.is_available():
    sys.exit("kernel_text needs a CUDA device: it times launches of CUDA kernels.")


def microseconds(kilobytes):
    add = mx.fast.cuda_kernel(
        name=f"limit_text_{kilobytes}", input_names=["x"], output_names=["y"],
        header=("// " + "." * 60 + "\n") * (16 * kilobytes),
        source="unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i] + 1.0f;",
    )  # fmt: skip

    @mx.compile
    def chain(x):
        for _ in range(LAUNCHES):
            x = add(inputs=[x], grid=(1024, 1, 1), threadgroup=(256, 1, 1), output_shapes=[(1024,)],
                output_dtypes=[mx.float32])[0]  # fmt: skip
        return x

    times, x = [], mx.zeros(1024)
    for _ in range(21):
        start = time.perf_counter()
        mx.eval(chain(x))
        times.append((time.perf_counter() - start) / LAUNCHES * 1e6)
    return sorted(times[1:])[10]


short, long = microseconds(1), microseconds(64)
print(f"{mx.__version__}: {short:.2f} us a launch with 1 KB, {long:.2f} us with 64 KB")
