"""Quantized products on a GPU: correctness first, then time against MLX's own products and the run's copy rate.

    python benchmarks/quant_matmul.py [--quick]

One JSON line a case: shape, format, rows, microseconds, share of the copy rate, ratio to MLX's `quantized_matmul` (8
bit for Q8_0, mxfp4 for the rest). Weights rotate among copies larger than the L2 cache; medians of seven runs of one
compiled function with 120 launches that do not depend on one another, the same for both sides, so that the host's share
(about 14 us a launch) overlaps with the device's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time

import mlx.core as mx

from mlx_ds4.custom_kernels import _quant_cuda
from mlx_ds4.custom_kernels._random_planes import BYTES, device_planes
from mlx_ds4.custom_kernels.quant_matmul import quant_matmul
from mlx_ds4.formats.planes import dequantize

FORMATS = ("Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4")
SHAPES = [
    (32768, 1280), (5120, 8192), (129280, 5120), (25600, 6144), (1280, 5120), (512, 5120), (2304, 5120), (5120, 2304),
]  # fmt: skip
LAUNCHES = 120


def seconds(fn, xs: list, weights: list, repeat: int = 7) -> float:
    """Median time of fn(x, weight) inside one compiled function that calls it for every x, weights rotated.

    The x differ, so that no call is merged with another; the weights together exceed the cache.
    """
    run = mx.compile(lambda xs, weights: [fn(x, weights[i % len(weights)]) for i, x in enumerate(xs)])
    mx.eval(xs, weights)
    for _ in range(2):
        mx.eval(run(xs, weights))
    mx.synchronize()
    runs = []
    for _ in range(repeat):
        start = time.perf_counter()
        mx.eval(run(xs, weights))
        mx.synchronize()
        runs.append((time.perf_counter() - start) / len(xs))
    return sorted(runs)[repeat // 2]


def rows_of(count: int, width: int, launches: int = LAUNCHES) -> list[mx.array]:
    return [mx.random.normal((count, width), key=mx.random.key(i)).astype(mx.bfloat16) for i in range(launches)]


def copy_rate() -> float:
    """Bytes a second of x + 1 over 1 GB, read and written."""
    xs = [mx.random.normal((1 << 28,), key=mx.random.key(i)) for i in range(4)]
    return 2 * xs[0].nbytes / seconds(lambda x, _: x + 1, xs, [mx.zeros(1)])


def nbytes(planes) -> int:
    return sum(plane.nbytes for plane in planes.values())


def worst(got: mx.array, want: mx.array) -> float:
    return (mx.abs(got.astype(mx.float32) - want).max() / mx.abs(want).max()).item()


def check(name: str) -> None:
    """Every row count against the float32 product of the dequantized weight; rows equal bits whatever rides along."""
    for N, K in ((33, 5120), (1280, 5120)):
        planes = device_planes(1, name, N, K)
        weight = dequantize(name, planes)
        x = mx.random.normal((300, K), key=mx.random.key(2)).astype(mx.bfloat16)
        with mx.stream(mx.cpu):
            want = x.astype(mx.float32) @ weight.T
        whole = quant_matmul(x, name, planes, out_dtype=mx.float32)
        for rows in (1, 2, 6, 8, 9, 70, 128, 201):
            got = quant_matmul(x[:rows], name, planes, out_dtype=mx.float32)
            error = worst(got, want[:rows])
            assert error < 2e-5, (name, N, K, rows, error)
            assert mx.array_equal(got, whole[:rows]), (name, N, K, rows, "a row depends on its neighbours")
    print(json.dumps({"check": name, "ok": True, "error": error}), flush=True)


def dense_case(name, shape, rows, copy):
    N, K = shape
    size = int(N * K * BYTES[name])
    sets = [device_planes(seed, name, *shape) for seed in range(max(2, min(6, 400_000_000 // size)))]
    xs = rows_of(rows, K)
    ours = seconds(lambda x, p: quant_matmul(x, name, p), xs, sets)
    mode = {"group_size": 32, "bits": 8} if name == "Q8_0" else {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    theirs = [mx.quantize(mx.random.normal(shape).astype(mx.bfloat16), **mode) for _ in sets]
    peer = seconds(lambda x, q: mx.quantized_matmul(x, *q, **mode), xs, theirs)
    return {
        "op": "quant_matmul",
        "format": name,
        "shape": shape,
        "rows": rows,
        "us": round(ours * 1e6, 1),
        "copy_share": round(nbytes(sets[0]) / ours / copy, 3),
        "mlx_us": round(peer * 1e6, 1),
        "speedup": round(peer / ours, 2),
    }


def tune(copy) -> None:
    """One row in every split of the width over warps: the basis of `_quant_cuda.split`."""
    for name in ("Q8_0", "IQ2_XXS"):
        for N, K in SHAPES[:2]:
            sets = [device_planes(seed, name, N, K) for seed in range(4)]
            xs, result = rows_of(1, K), {}
            for split in (1, 2, 4, 8):
                _quant_cuda.split = lambda tiles, units, split=split: split
                result[split] = seconds(lambda x, p, name=name: quant_matmul(x, name, p), xs, sets)
            shares = {k: round(nbytes(sets[0]) / v / copy, 3) for k, v in result.items()}
            print(json.dumps({"tune": name, "shape": (N, K), "copy_share_by_split": shares}), flush=True)


def device() -> dict:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    info = mx.device_info()
    return {"device": info.get("device_name", "?"), "mlx": mx.__version__, "commit": commit or "?"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes")
    parser.add_argument("--tune", action="store_true", help="only: how many warps should share 16 rows")
    args = parser.parse_args()
    copy = copy_rate()
    print(json.dumps({**device(), "copy_GBps": round(copy / 1e9)}), flush=True)
    for name in FORMATS:
        check(name)
    if args.tune:
        tune(copy)
        return
    for name in FORMATS:
        for shape in SHAPES[:2] if args.quick else SHAPES:
            for rows in (1, 6):
                print(json.dumps(dense_case(name, shape, rows, copy)), flush=True)


if __name__ == "__main__":
    main()
