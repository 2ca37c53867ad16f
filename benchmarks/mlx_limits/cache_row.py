"""Limit: on CUDA, writing one row into a large array copies the array; in place, its size S would not matter.

`python benchmarks/mlx_limits/cache_row.py [--toy]`"""

import sys
import time

import mlx.core as mx

CHAIN = 16


def update(cache, row, i):
    return mx.slice_update(cache, row, mx.array([i]), axes=(1,))


def assign(cache, row, i):
    cache[:, i : i + 1] = row
    return cache


def index(cache, row, i):
    cache[:, mx.array([i])] = row
    return cache


print(mx.default_device(), mx.__version__)
for S in (1024, 4096) if "--toy" in sys.argv else (65536, 1 << 20):
    for write in (update, assign, index):
        for _ in range(2):  # the first run warms up
            cache = None
            mx.reset_peak_memory()
            cache, row = mx.zeros((1, S, 512), mx.bfloat16), mx.ones((1, 1, 512), mx.bfloat16)
            mx.eval(cache, row)
            start = time.perf_counter()
            for i in range(CHAIN):
                cache = write(cache, row, i)
            mx.eval(cache)
            us = (time.perf_counter() - start) / CHAIN * 1e6
        print(f"{S} rows, {write.__name__}: {us:.1f} us a write, peak {mx.get_peak_memory() / cache.nbytes:.1f} caches")
