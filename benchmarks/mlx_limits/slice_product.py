"""Limit: on CUDA, a matrix product fails for an operand that is a slice whose start is no multiple of 16 bytes.

`python benchmarks/mlx_limits/slice_product.py`: x @ w, where w is a part of one long vector, with different starts.
cublasLtMatmul ends with code 15 (not supported); on a CPU every start works.
"""

import mlx.core as mx

N = 256
print(mx.default_device(), mx.__version__)
flat = mx.random.normal((N * N + 64,)).astype(mx.bfloat16)
x = mx.random.normal((N, N)).astype(mx.bfloat16)
mx.eval(flat, x)
for start in (0, 64, 8, 4, 1):
    w = flat[start : start + N * N].reshape(N, N)  # shares the memory of `flat`
    copied = mx.contiguous(w + 0)
    mx.eval(copied)
    try:
        y = x @ w
        mx.eval(y)
        print(f"start at {2 * start} bytes: {'right' if mx.array_equal(y, x @ copied) else 'WRONG'}")
    except RuntimeError as error:
        print(f"start at {2 * start} bytes: {error}")
