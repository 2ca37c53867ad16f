"""Golden data and the metrics of `tests/golden/README.md`, section 5."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_ds4.model.linear import BlockWeight, dense

GOLDEN = Path(__file__).parent / "golden"
# Random weights in the Q2 recipe, made by `python -m mlx_ds4.convert.synthetic --tiny --recipe q2`.
TINY = Path(__file__).parent / "data" / "tiny-q2.gguf"


@functools.cache
def golden(which: str, name: str) -> dict[str, mx.array]:
    return mx.load(str(GOLDEN / which / "golden" / f"{name}.safetensors"))


@functools.cache
def manifest(which: str) -> dict:
    return json.loads((GOLDEN / which / "manifest.json").read_text())


def widened(model):
    """The model with its block weights as float32 values: the same bits in every result, in half the time."""
    for _, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), BlockWeight):
            module.weight = dense(module.weight)
    mx.eval(model.parameters())
    return model


def to_numpy(x: mx.array | np.ndarray) -> np.ndarray:
    if isinstance(x, mx.array):
        x = np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)
    return x.astype(np.float64)


def pair(got, want) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 of one shape; shapes and, for MLX arrays, dtypes must agree."""
    assert tuple(got.shape) == tuple(want.shape), f"shape {got.shape}, expected {want.shape}"
    if isinstance(got, mx.array) and isinstance(want, mx.array):
        assert got.dtype == want.dtype, f"dtype {got.dtype}, expected {want.dtype}"
    return to_numpy(got), to_numpy(want)


def equal_share(got, want) -> float:
    a, b = pair(got, want)
    return float((a == b).mean())


def assert_equal(got, want) -> None:
    a, b = pair(got, want)
    np.testing.assert_array_equal(a, b)


def assert_one_ulp(got: mx.array, want: mx.array, share: float = 0.99) -> None:
    """bfloat16 values at most one ulp apart, at least `share` of them equal."""
    assert equal_share(got, want) >= share
    bits = [np.array(x.view(mx.uint16)).astype(np.int64) for x in (got, want)]
    ordered = [np.where(b & 0x8000, 0x8000 - b, b) for b in bits]
    assert np.abs(ordered[0] - ordered[1]).max() <= 1


def assert_close_to_largest(got, want, limit: float = 4e-6) -> None:
    """float32 values within `limit` times the largest magnitude."""
    a, b = pair(got, want)
    assert np.abs(a - b).max() <= limit * np.abs(b).max()


def row_error(got, want) -> float:
    """Largest |a - b| / |b| over the rows of the last axis."""
    a, b = (x.reshape(-1, x.shape[-1]) for x in pair(got, want))
    return float((np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)).max())


def row_cosine(got, want) -> float:
    a, b = (x.reshape(-1, x.shape[-1]) for x in pair(got, want))
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def rms_error(got, want) -> float:
    a, b = pair(got, want)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
