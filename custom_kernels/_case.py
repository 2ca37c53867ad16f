"""Cases: the example calls that every family declares, for tests, dumps, checks on a device and benchmarks.

A family module with kernels has `cases() -> list[Case]`. The same list is emulated in the tests, written out as
Metal files, run on a real Mac and timed on a GPU, so that all four speak of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ._kernel import load_all

# Half types: one unit in the last place, and the share of elements that must not differ at all.
_ULP = {mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10}
_EQUAL_SHARE = 0.99


@dataclass(frozen=True)
class Case:
    """One call. `name` is "family/what". `fn` and `reference` take the arrays that `inputs(rng)` makes and return an
    array or a sequence of them. `tolerance` None demands equal bits; a number bounds |got - want| by that number
    times the largest |want| of the row, where results in half precision may differ by one unit in the last place
    more, in at most 1 % of the elements. `bytes` is what the call must at least read and write, for GB/s.
    The reference is compared as the CPU computes it: GPUs flush subnormals or multiply float32 in fewer bits. `large`
    cases are for GPUs and are not emulated; keep their reference within seconds.

    Among millions of values some stand so near the middle of two numbers of half precision that another order of a
    sum rounds them to the other one. Where such a value goes on into the result, the case says what that can do:
    `roundings` counts the roundings to half precision that an element itself passes, each worth one unit in the last
    place; `moved(want, *arrays)` returns for each output of `reference` how far roundings of other values can move it,
    an array >= 0 of its shape or 0. The share of elements that may differ stays 1 %."""

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[np.random.Generator], list[mx.array]]
    tolerance: float | None = None
    bytes: int = 0
    large: bool = False
    roundings: int = 1
    moved: Callable[..., list[Any]] | None = None

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]


def all_cases() -> list[Case]:
    """The cases of every family that declares some, in the order of the families."""
    return [case for module in load_all().values() if hasattr(module, "cases") for case in module.cases()]


def check(case: Case, *, seed: int = 0) -> tuple[str | None, float]:
    """Run a case once; returns (None or what is wrong in a few words, largest error relative to its row)."""
    arrays = case.inputs(np.random.default_rng(seed))
    mx.eval(arrays)
    got = outputs(case.fn(*arrays))
    with mx.stream(mx.cpu):
        want = outputs(case.reference(*arrays))
        moved = case.moved(want, *arrays) if case.moved else [0.0] * len(want)
    if len(got) != len(want):
        return f"{len(got)} outputs instead of {len(want)}", float("inf")
    worst = 0.0
    for i, (g, w, m) in enumerate(zip(got, want, moved, strict=True)):
        fault, error = compare(g, w, case.tolerance, roundings=case.roundings, moved=m)
        worst = max(worst, error)
        if fault:
            return f"output {i}: {fault}", worst
    return None, worst


def outputs(result: Any) -> list[mx.array]:
    """The arrays of an op's result, evaluated."""
    arrays = [result] if isinstance(result, mx.array) else list(result)
    mx.eval(arrays)
    return arrays


def compare(
    got: mx.array, want: mx.array, tolerance: float | None, *, roundings: int = 1, moved: mx.array | float = 0.0
) -> tuple[str | None, float]:
    """(None or the fault, largest error relative to its row); the bounds are those of `Case`. Empty arrays agree."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {got.shape} instead of {want.dtype} {want.shape}", float("inf")
    if got.size == 0:
        return None, 0.0
    g, w = _float64(got), _float64(want)
    same = g == w
    if np.any(np.isnan(g) != np.isnan(w)) or np.any(np.isinf(w) & ~same) or np.any(np.isinf(g) & ~same):
        return "NaN or infinity in other places", float("inf")
    finite = np.isfinite(w)
    row = np.max(np.where(finite, np.abs(w), 0), axis=-1, keepdims=True) if w.ndim else np.abs(w)
    difference = np.abs(np.where(finite, g, 0) - np.where(finite, w, 0))
    error = float(np.max(difference / np.where(row == 0, 1, row)))
    if tolerance is None:
        differ = int(np.sum(_bits(got) != _bits(want)))
        return (f"{differ} of {got.size} elements differ in bits" if differ else None), error
    allowed = tolerance * row + roundings * _ULP.get(got.dtype, 0.0) * np.abs(np.where(finite, w, 0))
    allowed = allowed + (_float64(moved) if isinstance(moved, mx.array) else moved)
    if np.any(difference > allowed):
        return f"{int(np.sum(difference > allowed))} of {got.size} elements beyond tolerance", error
    if got.dtype in _ULP and np.mean(same | ~finite) < _EQUAL_SHARE and np.sum(~same & finite) > 2:
        return f"only {np.mean(same | ~finite):.2%} of the elements equal", error
    return None, error


def _float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32) if x.dtype in _ULP else x).astype(np.float64)


def _bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint8)) if x.dtype != mx.bool_ else np.array(x)
