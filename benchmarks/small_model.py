"""Greedy tokens of small models on this GPU: with kernels, without, and on the CPU; they must be equal.

    python -m benchmarks.small_model [--tokens N]

The shipped model and the golden nano model (FP8 and FP4 weights). One JSON line a model; where tokens differ, it says
how far apart the best two logits are at the first difference, and how far kernels move logits there (rms).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

# The reference means float32; MLX's products on CUDA would otherwise keep 10 bits. Read when MLX multiplies first.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx

from mlx_ds4.api import shipped_model
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._switches import backend, use_kernels
from mlx_ds4.generation import generate_step
from mlx_ds4.loader import load_model
from mlx_ds4.machine import machine

NANO = Path(__file__).parent.parent / "tests" / "golden" / "nano" / "model"
PROMPTS = {"shipped": [0, 72, 101, 108, 108, 111], "nano": [0, 337, 47, 343, 214, 325, 224, 327, 194, 394]}


def tokens(path: Path, prompt: list[int], count: int) -> list[int]:
    model = load_model(path)[0]
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def first_difference(path: Path, ids: list[int]) -> dict[str, float]:
    """The gap of the reference's best two logits behind `ids`, and the rms by which kernels move logits there."""
    logits = []
    for mode in ("auto", "reference"):
        with use_kernels(mode):
            logits.append(load_model(path)[0](mx.array([ids]), last_only=True)[0, 0])
            mx.eval(logits[-1])
    kernels, reference = logits
    second, best = mx.sort(reference)[-2:].tolist()
    moved = mx.sqrt(mx.mean(mx.square(kernels - reference))).item()
    return {"gap": round(best - second, 4), "moved": round(moved, 4), "logits_std": round(mx.std(reference).item(), 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=24)
    count = parser.parse_args().tokens
    bad = 0
    for name, path in (("shipped", shipped_model()), ("nano", NANO)):
        with count_launches() as launches:
            kernels = tokens(path, PROMPTS[name], count)
        where = backend()
        with use_kernels("reference"):
            reference = tokens(path, PROMPTS[name], count)
        device = mx.default_device()
        mx.set_default_device(mx.cpu)
        cpu = tokens(path, PROMPTS[name], count)
        mx.set_default_device(device)
        equal = kernels == reference == cpu
        bad += not equal
        line = {"model": name, "backend": where, "tokens": count, "equal": equal, "launches": sum(launches.values())}
        if not equal:
            line |= {"kernels": kernels, "reference": reference, "cpu": cpu}
            if kernels != reference:
                same = next(i for i, pair in enumerate(zip(kernels, reference, strict=True)) if len(set(pair)) == 2)
                line |= first_difference(path, PROMPTS[name] + kernels[:same])
        print(json.dumps(line | machine()), flush=True)
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
