"""Limit: on CUDA, a step that reads an array made on the host waits for it; more such arrays add little.

`python benchmarks/mlx_limits/host_arrays.py [--toy]` prints us a step, wall and CPU, of a compiled chain of 20 small
launches that reads "none", "one" or "eight" arrays made anew for it, or eight slices of one. `--toy`: a try on a CPU.
"""

import sys
import time

import mlx.core as mx

TOY = "--toy" in sys.argv
STEPS, SIZE, LAUNCHES = (5 if TOY else 300), 64, 20
if not TOY and not mx.cuda.is_available():
    sys.exit("host_arrays needs a CUDA device: it times what arrays cost that the host has made.")
NUMBERS = [0.5 * i for i in range(8 * SIZE)]


@mx.compile
def step(x, arrays):
    for i in range(LAUNCHES):
        x = mx.cumsum(x + arrays[i % 8], axis=-1)
    return x


@mx.compile
def sliced(x, packed):
    return step(x, [packed[i * SIZE : (i + 1) * SIZE] for i in range(8)])


def fresh(count):
    return mx.array(NUMBERS[:count])


kept = [fresh(SIZE) for _ in range(8)]
VARIANTS = {"none": lambda x: step(x, kept), "one": lambda x: step(x, [fresh(SIZE), *kept[1:]]),
    "eight": lambda x: step(x, [fresh(SIZE) for _ in range(8)]),
    "eight slices of one": lambda x: sliced(x, fresh(8 * SIZE))}  # fmt: skip
mx.eval(kept)
for name, run in VARIANTS.items():
    x, times = fresh(SIZE), []
    for _ in range(STEPS):
        start, cpu = time.perf_counter(), time.thread_time()
        mx.async_eval(run(x))
        cpu = time.thread_time() - cpu
        mx.synchronize()
        times.append((time.perf_counter() - start, cpu))
    wall, cpu = (sorted(part)[STEPS // 2] * 1e6 for part in zip(*times, strict=True))
    print(f'{{"variant": "{name}", "wall_us": {wall:.1f}, "cpu_us": {cpu:.1f}}}', flush=True)
