"""Limit: on CUDA, arrays of more than 8 bytes that the host makes lie in managed memory, whose pages a launch fetches.

`python benchmarks/mlx_limits/managed_memory.py [--toy]` prints us beyond an empty launch: gathers of six rows by
indices of the device, by new ones of the host (24 bytes) and by new ones in pairs; 160 blocks that count in zeros of
the device or of the host. `--toy`: a try on a CPU, without the counting.
"""

import sys
import time

import mlx.core as mx

TOY = "--toy" in sys.argv
REPEATS = 3 if TOY else 200
if not TOY and not mx.cuda.is_available():
    sys.exit("managed_memory needs a CUDA device: it times reads of memory that the host has written.")
TABLE = mx.random.normal((1000, 5120))
ROWS = [3, 14, 159, 26, 535, 897]
there = mx.array(ROWS) + 0
mx.eval(TABLE, there)


def seconds(fn, make):
    """Median seconds of fn(make()) with the device idle before it."""
    times = []
    for _ in range(REPEATS + 5):
        arrays = make()
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(fn(*arrays))
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[5:])[REPEATS // 2]


def gather(*parts):
    return [TABLE[part] for part in parts]


idle = seconds(lambda x: x + 1, lambda: [TABLE[:1]])
print(f"gather, indices of the device {1e6 * (seconds(gather, lambda: [there]) - idle):.1f}")
print(f"gather, indices of the host {1e6 * (seconds(gather, lambda: [mx.array(ROWS)]) - idle):.1f}")
pairs = lambda: [mx.array(ROWS[i : i + 2]) for i in (0, 2, 4)]  # noqa: E731
print(f"three gathers, indices in pairs {1e6 * (seconds(gather, pairs) - idle):.1f}")
if not TOY:
    count = mx.fast.cuda_kernel(
        name="managed_memory_count",
        input_names=["counter"],
        output_names=["last"],
        source="if (threadIdx.x == 0) last[blockIdx.x] = atomicAdd(const_cast<int*>(counter) + blockIdx.x % 16, 1);",
    )

    def counted(counter):
        sizes = {"grid": (160 * 32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(160,)]}
        return count(inputs=[counter], output_dtypes=[mx.int32], **sizes)

    zeros = mx.zeros(256, dtype=mx.int32)
    mx.eval(zeros)
    print(f"160 arrivals, zeros of the device {1e6 * (seconds(counted, lambda: [zeros]) - idle):.1f}")
    print(f"160 arrivals, zeros of the host {1e6 * (seconds(counted, lambda: [mx.array([0] * 256)]) - idle):.1f}")
