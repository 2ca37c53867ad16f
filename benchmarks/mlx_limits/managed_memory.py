"""Limit: on CUDA, arrays of more than 8 bytes that the host makes lie in managed memory, whose pages a launch fetches.

`python benchmarks/mlx_limits/managed_memory.py` prints us beyond an empty launch: gathers of six rows by indices of the
device, by new ones of the host (24 bytes) and by new ones in pairs; 160 blocks that count in zeros of either.
"""

import sys
import time

import mlx.core as mx

if not mx.cuda.is_available():
    sys.exit("managed_memory needs a CUDA device: it times reads of memory that the host has written.")
TABLE, ROWS = mx.random.normal((1000, 5120)), [3, 14, 159, 26, 535, 897]
there, zeros = mx.array(ROWS) + 0, mx.zeros(256, dtype=mx.int32)
mx.eval(TABLE, there, zeros)
SOURCE = "if (threadIdx.x == 0) last[blockIdx.x] = atomicAdd(const_cast<int*>(counter) + blockIdx.x % 16, 1);"
count = mx.fast.cuda_kernel(name="arrive", input_names=["counter"], output_names=["last"], source=SOURCE)


def arrive(counter):
    sizes = {"grid": (160 * 32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(160,)]}
    return count(inputs=[counter], output_dtypes=[mx.int32], **sizes)


def us(fn, make):
    """Median us of fn(*make()) with the device idle before it."""
    times = []
    for _ in range(205):
        arrays = make()
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(fn(*arrays))
        mx.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return sorted(times[5:])[100]


gather = lambda *parts: [TABLE[part] for part in parts]  # noqa: E731
PAIRS = [ROWS[i : i + 2] for i in (0, 2, 4)]
idle = us(lambda x: x + 1, lambda: [TABLE[:1]])
for name, fn, make in (
    ("gather, device", gather, lambda: [there]), ("gather, host", gather, lambda: [mx.array(ROWS)]),
    ("gather, pairs", gather, lambda: [mx.array(pair) for pair in PAIRS]),
    ("arrive, device", arrive, lambda: [zeros]), ("arrive, host", arrive, lambda: [mx.array([0] * 256)]),
):  # fmt: skip
    print(f"{name}_us {us(fn, make) - idle:.1f}")
