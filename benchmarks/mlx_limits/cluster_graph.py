"""Limit: on CUDA, a kernel compiled for clusters of blocks gives wrong results in a graph made for another kernel.

`python benchmarks/mlx_limits/cluster_graph.py` (CUDA only) launches a plain kernel and one with clusters of 8 in turn,
each alone in its graph, and counts wrong values; `MLX_USE_CUDA_GRAPHS=0` shows that the kernels are right.
"""

import sys

import mlx.core as mx

if not mx.cuda.is_available():
    sys.exit("cluster_graph needs a CUDA device: it launches CUDA kernels.")

CLUSTER = """
#undef __global__
#define __global__ __attribute__((global)) __cluster_dims__(8, 1, 1)
"""
SUM = """
    __shared__ float mine[32];
    mine[threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    float sum = 0.f;
    for (unsigned block = 0; block < 8; block++) {
      unsigned long long there;
      asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((unsigned long long)(mine + threadIdx.x)), "r"(block));
      sum += *(const float*)there;
    }
    y[blockIdx.x * 32 + threadIdx.x] = sum;
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
"""
PLAIN = "unsigned i = blockIdx.x * 32 + threadIdx.x; y[i] = x[i] + 1.f;"
MAKE = {"input_names": ["x"], "output_names": ["y"]}
KERNELS = {
    "plain": mx.fast.cuda_kernel(name="limit_plain", source=PLAIN, **MAKE),
    "cluster": mx.fast.cuda_kernel(name="limit_cluster", source=SUM, header=CLUSTER, **MAKE),
}
WANTED = {
    "plain": lambda x: x + 1,
    "cluster": lambda x: mx.broadcast_to(x.reshape(-1, 8, 32).sum(axis=1, keepdims=True), (4, 8, 32)).reshape(-1),
}
x = mx.random.randint(0, 100, (4 * 8 * 32,)).astype(mx.float32)
wanted = {name: fn(x) for name, fn in WANTED.items()}
mx.eval(x, wanted)
for number, name in enumerate(("cluster", "cluster", "plain", "cluster", "cluster", "plain")):
    shape = {"output_shapes": [x.shape], "output_dtypes": [mx.float32]}
    (y,) = KERNELS[name](inputs=[x], grid=(x.size, 1, 1), threadgroup=(32, 1, 1), **shape)
    mx.eval(y)
    wrong = int((y != wanted[name]).sum().item())
    print(f'{{"launch": {number}, "kernel": "{name}", "wrong": {wrong}, "of": {x.size}}}', flush=True)
