"""The first products of an attention layer, and what its window keeps of them.

    low_rank, kv, others.. = x W_i^T          float32 sums, each rounded to its own type
    then `cache_entry.norm_and_entry` of the first two

On CUDA up to 8 rows take one launch, within tolerance of the reference and with the products' bits of
`quant_matmul_group`; elsewhere there are two, one after the other. A row's result does not depend on the rows beside
it. Bytes: the matrices once, and a ring of R rows 4 R D.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import mlx.core as mx
import numpy as np

from mlx_ds4.formats import planes as block_planes

from . import _enter_cuda
from ._case import Case
from ._kernel import tickets
from ._octet import check_planes, kernel_takes
from ._random_planes import random_planes, weights_of
from ._switches import backend, enabled
from .cache_entry import norm_and_entry, norm_and_entry_ref
from .hyper_connection import SUMS, SiteSums, random_sums
from .quant_matmul import MOST_ROWS, quant_matmul_group, quant_matmul_group_ref
from .rope import rope_table

Weight = tuple[str, block_planes.Planes]


def products_and_entry(
    x: mx.array,
    weights: Sequence[Weight],
    dtypes: Sequence[mx.Dtype],
    q_weight: mx.array,
    cos: mx.array,
    sin: mx.array,
    kind: str,
    kv_weight: mx.array,
    eps: float,
    sums: SiteSums,
    *,
    into: mx.array,
    at: mx.array,
    counts: mx.array | None = None,
) -> tuple[list[mx.array], mx.array, mx.array, mx.array, mx.array]:
    """x [B, L, K] times two or more weights (format, planes), as `quant_matmul_group` rounds the products to `dtypes`:
    the third and later ones, and the four results of `norm_and_entry`, whose low_rank and kv are the first two.

    `counts`: int32 zeros, `_kernel.tickets()`, that no launch uses which may run at the same time; zeros again behind
    this one; without them there are two launches. Raises ValueError for an unknown format, weights of another width, or
    parts that do not fit each other.
    """
    for weight in weights:
        check_planes("products_and_entry", *weight, x.shape[-1])
    if counts is None or not _launches(x, weights, dtypes, cos, sums, into, at):
        products = quant_matmul_group(x, weights, out_dtype=dtypes)
        rest = norm_and_entry(
            products[0], q_weight, products[1], cos, sin, kind, kv_weight, eps, sums, into=into, at=at
        )
        return products[2:], *rest
    results = _enter_cuda.products_and_entry(
        x, weights, dtypes, q_weight, cos, sin, kind, kv_weight, eps, sums, into, at, counts
    )
    return results[:-4], *results[-4:]


def _launches(x, weights, dtypes, cos, sums: SiteSums, into: mx.array, at: mx.array) -> bool:
    if backend() != "cuda" or not all(map(enabled, ("entry_matmul", "quant_matmul", "cache_entry", "rms_norm"))):
        return False
    if x.ndim != 3 or not 0 < prod(x.shape[:2]) <= MOST_ROWS or len(weights) < 2:
        return False
    if not all(kernel_takes(*weight) for weight in weights):
        return False
    D = weights[1][1]["codes"].shape[0]
    fits = into.dtype == mx.bfloat16 and into.ndim == 3 and (into.shape[0], into.shape[2]) == (x.shape[0], D)
    fits = fits and x.shape[1] <= into.shape[1] and at.shape == (1,) and at.dtype == mx.int32
    fits = fits and cos.shape[0] == x.shape[1] and 0 < 2 * cos.shape[1] <= D
    return fits and _enter_cuda.takes(x, weights, dtypes, sums)


def products_and_entry_ref(
    x, weights, dtypes, q_weight, cos, sin, kind: str, kv_weight, eps: float, sums: SiteSums, *, into, at
) -> tuple[list[mx.array], mx.array, mx.array, mx.array, mx.array]:
    products = quant_matmul_group_ref(x, weights, out_dtype=dtypes)
    entry = norm_and_entry_ref(
        *(products[0], q_weight, products[1]), cos, sin, kind, kv_weight, eps, sums, into=into, at=at
    )
    return products[2:], *entry


def cases() -> list[Case]:
    def case(
        shape: tuple[int, int, int], C: int, D: int, R: int, at: int, pairs: int, *kinds: tuple[str, int], large=False
    ) -> Case:
        formats = [kind for kind, _ in kinds]
        dtypes = [mx.bfloat16] * 2 + [mx.float32] * (len(kinds) - 2)

        def arrays(rng: np.random.Generator) -> list[mx.array]:
            def normal(*sizes: int) -> mx.array:
                return mx.array(rng.standard_normal(sizes, dtype=np.float32))

            table = rope_table(np.arange(shape[1]) * 7 + 5, 1.0 / 1.3 ** np.arange(pairs, dtype=np.float32))
            planes = [random_planes(rng, kind, rows, shape[2]) for kind, rows in kinds]
            return [
                *(normal(*shape).astype(mx.bfloat16), 1 + 0.1 * normal(C), *table, 1 + 0.1 * normal(D)),
                *random_sums(rng, *shape[:2]),
                *(normal(shape[0], R, D).astype(mx.bfloat16), mx.array([at], dtype=mx.int32)),
                *[array for some in planes for array in some.values()],
            ]

        def run(op, x, q_weight, cos, sin, kv_weight, dots, base, scale, into, at, *planes):
            weights, sums = list(weights_of(formats, planes)), SiteSums(dots, base, scale, **SUMS)
            options = {"into": into, "at": at} | ({"counts": tickets()} if op is products_and_entry else {})
            products, *rest = op(x, weights, dtypes, q_weight, cos, sin, "fp8", kv_weight, 1e-20, sums, **options)
            return [*rest, *products]

        return Case(
            f"entry_matmul/{'_'.join(f'{f.lower()}{rows}' for f, rows in kinds)}_{'x'.join(map(str, shape))}_ring{R}",
            functools.partial(run, products_and_entry),
            functools.partial(run, products_and_entry_ref),
            arrays,
            tolerance=1e-5,
            bytes=4 * shape[0] * R * D + 2 * prod(shape),
            large=large,
            roundings=2,
        )

    real = (("Q8_0", 1280), ("Q8_0", 512))
    return [
        case((1, 1, 128), 70, 64, 9, 1_048_571, 8, ("Q8_0", 70), ("Q8_0", 64)),
        case((2, 3, 256), 160, 96, 5, 3, 16, ("Q4_K", 160), ("MXFP4", 96), ("F16", 20), ("F32", 7)),
        *[case((1, rows, 5120), 1280, 512, 136, 1000, 32, *real, large=True) for rows in (1, 6)],
        case((1, 6, 5120), 1280, 512, 136, 1000, 32, *real, ("F16", 32), ("F32", 512), ("F32", 512), large=True),
    ]
