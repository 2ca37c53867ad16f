"""Hyper-connections: four residual streams, mixed by coefficients that depend on the streams.

    r      = rsqrt(mean over streams and channels of h^2 + eps)
    m      = (fn . h) * r                                         M + M + M*M values
    pre_j  = sigmoid(m_j scale_0 + base_j) + hc_eps
    post_j = 2 sigmoid(m_{M+j} scale_1 + base_{M+j})
    comb   = Sinkhorn(softmax over destinations of m_{2M+Mj+k} scale_2 + base_{2M+Mj+k}),  j source, k destination
    collapse(h, pre)         = sum_j pre_j h_j
    expand(y, h)             = post_k y + sum_j comb[j, k] h_j,  destination k

Everything is float32 inside; collapse and expand round once to bfloat16 (architecture notes 4.2, 4.3). A site's `pre`
is consumed by the next site, `post` and `comb` by its own.

A site takes up to three launches, where the mix, the split, the collapse, the norm and the expansion would be five:

* `site`: the products fn . h and the sum of squares in `_PARTS` partial sums, and in other threadgroups of the same
  grid the input of the sublayer, which needs the previous site's `pre` only. Bytes: fn once for eight rows, h twice
  (the second time from cache). Many rows on CUDA take a launch for each of the two: see `_hyper_cuda.py`.
* `coefficients`: one simdgroup a row adds the partial sums and goes through the Sinkhorn passes, 4,000 to 7,000 cycles
  of waiting. Nothing needs them before the sublayer's last product, so for a few rows they ride with a launch in
  between, as more threadgroups of it (`SiteSums`): with `norm_and_entry` and `route_beside`. Bytes: 3 KB a row.
* `expand`. Bytes: y, h in, h out. For a few rows it is the end of the sublayer's last product: see `expand_matmul.py`.

Within tolerance of the references. A row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import functools
from math import isqrt, prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from . import _hyper_cuda
from ._case import Case
from ._hyper_sources import (
    COEFFICIENTS_HEADER,
    COEFFICIENTS_SOURCE,
    COLLAPSE_NORM_SOURCE,
    COLLAPSE_SOURCE,
    EXPAND_HEADER,
    EXPAND_SOURCE,
    SITE_SOURCE,
)
from ._kernel import Kernel, float_bits
from ._switches import backend, enabled
from .rms_norm import rms_norm_ref, simdgroups_for

# A row's sum over M C products is cut into this many parts, whatever the number of rows: enough threadgroups
# for one row of decoding, and the same order of additions for every batch.
_PARTS = 32
_TILE = 8  # rows that share one reading of fn
# Streams that the kernels of coefficients (walks over powers of two in 32 lanes) and of expansions take.
STREAMS = (1, 2, 4)

_kernel = functools.partial(Kernel, exact=False, family="hyper_connection")
_collapse_kernel = _kernel("hyper_connection_collapse", ["h", "pre"], ["x"], COLLAPSE_SOURCE)
_collapse_norm_kernel = _kernel("hyper_connection_collapse_norm", ["h", "pre", "weight"], ["x"], COLLAPSE_NORM_SOURCE)
# Its registers hold what a thread reads; without the bound it would keep to 32 of them and wait two or three times.
_site_kernel = _kernel(
    "hyper_connection_site", ["h", "pre", "fn", "weight"], ["x", "dots"], SITE_SOURCE, cuda_bounds=(512, 1)
)
_dots_kernel = _kernel(
    "hyper_connection_dots",
    ["h", "fn"],
    ["dots"],
    None,
    cuda_source=_hyper_cuda.SOURCE,
    cuda_header=_hyper_cuda.HEADER,
)
# What a kernel takes and gives that the coefficients ride with.
RIDER_INPUTS, RIDER_OUTPUTS = ("hc_dots", "hc_base", "hc_scale"), ("hc_pre", "hc_mix")
_coefficients_kernel = _kernel(
    "hyper_connection_coefficients", RIDER_INPUTS, RIDER_OUTPUTS, COEFFICIENTS_SOURCE, COEFFICIENTS_HEADER
)
_expand_kernel = _kernel("hyper_connection_expand", ["y", "h", "mix"], ["expanded"], EXPAND_SOURCE, EXPAND_HEADER)


def site(h: mx.array, pre: mx.array, fn: mx.array, weight: mx.array, *, norm_eps: float) -> tuple[mx.array, mx.array]:
    """What a site starts with, from streams h [.., M, C] and the previous site's `pre` float32 [.., M].

    Returns the sublayer's input `collapse_norm(h, pre, weight)` bfloat16 [.., C], and partial sums float32
    [.., P, M (M + 2) + 1] for the site's `coefficients`: products with fn float [M (M + 2), M C] (column = stream * C +
    channel), last the squares. How many parts there are is up to the implementation.
    """
    if not _use_kernel(h):
        return site_ref(h, pre, fn, weight, norm_eps=norm_eps)
    *leading, M, C = h.shape
    N, O, simdgroups = prod(leading), M * (M + 2), simdgroups_for(C)
    if backend() == "cuda" and N > 2 * _TILE and M in (2, 4):
        return collapse_norm(h, pre, weight, norm_eps), _many_dots(h, fn)
    # A few rows are bound by the time to memory: they read ahead, on many threadgroups. Many keep a GPU busy anyway.
    tile, slots, spread, ahead = (1, 1, 4, 20) if N == 1 else (2, 1, 2, 10) if N <= _TILE else (_TILE, 4, 1, 1)
    chunk = _chunk(M * C)
    x, dots = _site_kernel(
        inputs=[h if h.ndim == 4 else h.reshape(1, N, M, C), pre, fn, weight],
        template=[
            *[("R", tile), ("M", M), ("C", C), ("O", O), ("SG", simdgroups), ("PARTS", _PARTS), ("CHUNK", chunk)],
            *[("SLOTS", slots), ("SPREAD", spread), ("EPS_BITS", float_bits(norm_eps))],
            ("DEPTH", next(d for d in range(ahead, 0, -1) if chunk // 32 % d == 0)),
        ],
        grid=((N + spread * _PARTS * -(-N // tile)) * 32 * simdgroups, 1, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[(*leading, C), (*leading, _PARTS, O + 1)],
        output_dtypes=[mx.bfloat16, mx.float32],
    )
    return x, dots


def _chunk(width: int) -> int:
    """How many products a part has: whole simdgroups of them."""
    return -(-width // (32 * _PARTS)) * 32


def _many_dots(h: mx.array, fn: mx.array) -> mx.array:
    """The partial sums of `site` for at least 8 rows, M 2 or 4, on CUDA; the same bits."""
    *leading, M, C = h.shape
    N, O = prod(leading), M * (M + 2)
    tiles = -(-N // _hyper_cuda.TILE)
    threads = _hyper_cuda.THREADS * (O // 8 + 1)
    return _dots_kernel(
        inputs=[h.reshape(N, M, C), fn],
        template=[("M", M), ("C", C), ("O", O), ("PARTS", _PARTS), ("CHUNK", _chunk(M * C))],
        grid=(min(tiles, max(8, -(-tiles // 4))) * threads, _PARTS, 1),  # 64 rows a block where there are enough
        threadgroup=(threads, 1, 1),
        output_shapes=[(*leading, _PARTS, O + 1)],
        output_dtypes=[mx.float32],
    )[0]


def collapse(h: mx.array, pre: mx.array) -> mx.array:
    """sum_j pre_j h_j: h [.., M, C], pre float32 [.., M] -> bfloat16 [.., C]."""
    if not _use_kernel(h):
        return collapse_ref(h, pre)
    *leading, M, C = h.shape
    return _collapse_kernel(
        inputs=[h.reshape(-1, M, C), pre],
        template=[("M", M), ("C", C)],
        grid=(-(-prod(leading) * C // 256) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(*leading, C)],
        output_dtypes=[mx.bfloat16],
    )[0]


def collapse_norm(h: mx.array, pre: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`rms_norm(collapse(h, pre), weight, eps)` in one launch: h [.., M, C], weight [C] -> bfloat16 [.., C].

    The collapsed value is rounded to bfloat16 before the norm, as it is between the two.
    """
    if not _use_kernel(h):
        return collapse_norm_ref(h, pre, weight, eps)
    *leading, M, C = h.shape
    threads = 32 * simdgroups_for(C)
    return _collapse_norm_kernel(
        inputs=[h, pre, weight],
        template=[("M", M), ("C", C), ("SG", threads // 32), ("EPS_BITS", float_bits(eps))],
        grid=(prod(leading) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*leading, C)],
        output_dtypes=[mx.bfloat16],
    )[0]


class SiteSums(NamedTuple):
    """What a site's coefficients are made of: the partial sums `dots` [.., P, M (M + 2) + 1] of `site` over `width` =
    M C products, base [M (M + 2)], scale [3]; `iters` counts the Sinkhorn column passes."""

    dots: mx.array
    base: mx.array
    scale: mx.array
    width: int
    iters: int
    eps: float
    norm_eps: float

    @property
    def rows(self) -> int:
        return prod(self.dots.shape[:-2])

    @property
    def takes_kernel(self) -> bool:
        return _streams_of(self.base) in STREAMS and _use_kernel(self.dots)

    def behind(self, call: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """What a launch gets that makes the coefficients too: behind its own `call`, `RIDER_INPUTS`, the template of
        `COEFFICIENTS_CALL` and `RIDER_OUTPUTS`."""
        dots, M = self.dots, _streams_of(self.base)
        leading = dots.shape[:-2]
        own = {
            "inputs": [dots if dots.ndim == 4 else dots.reshape(1, -1, *dots.shape[-2:]), self.base, self.scale],
            "template": [
                *[("HC_M", M), ("HC_PARTS", dots.shape[-2]), ("HC_ITERS", self.iters), ("HC_WIDTH", self.width)],
                *[("HC_SMALL_BITS", float_bits(self.eps)), ("HC_EPS_BITS", float_bits(self.norm_eps))],
            ],
            "output_shapes": [(*leading, M), (*leading, M + M * M)],
            "output_dtypes": [mx.float32] * 2,
        }
        return {name: call.get(name, []) + values for name, values in own.items()}


def coefficients(sums: SiteSums) -> tuple[mx.array, mx.array]:
    """A site's coefficients: float32 pre [.., M], for the next site, and mix [.., M + M M] for `expand`: post, then
    comb with one source after the other."""
    if not sums.takes_kernel:
        return coefficients_ref(sums)
    rows = min(sums.rows, 8)  # of a threadgroup
    pre, mix = _coefficients_kernel(
        **sums.behind({}), grid=(-(-sums.rows // rows) * 32 * rows, 1, 1), threadgroup=(32 * rows, 1, 1)
    )
    return pre, mix


def _streams_of(base: mx.array) -> int:
    """M of the M (M + 2) coefficients of a row."""
    return isqrt(base.shape[0] + 1) - 1


def expand(y: mx.array, h: mx.array, mix: mx.array) -> mx.array:
    """How a site ends: post_k y + sum_j comb[j, k] h_j, with post and comb in `mix` as `coefficients` makes it.

    y [.., C], h [.., M, C], mix float32 [.., M + M M] -> bfloat16 [.., M, C].
    """
    *leading, M, C = h.shape
    if M not in STREAMS or not _use_kernel(h):
        return expand_ref(y, h, mix)
    N = prod(leading)
    groups = -(-C // (256 if N <= _TILE else 1024))  # with many rows a thread has four channels for one read of mix
    return _expand_kernel(
        inputs=[y, h, mix],
        template=[("M", M), ("C", C), ("GROUPS", groups)],
        grid=(groups * 256, N, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[h.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def _use_kernel(h: mx.array) -> bool:
    return h.size > 0 and enabled("hyper_connection")


def site_ref(
    h: mx.array, pre: mx.array, fn: mx.array, weight: mx.array, *, norm_eps: float
) -> tuple[mx.array, mx.array]:
    v = h.astype(mx.float32)
    products = v.reshape(*h.shape[:-2], -1) @ fn.astype(mx.float32).T
    squares = (v * v).sum(axis=-1).sum(axis=-1, keepdims=True)  # in two steps: one float32 sum of M C would err more
    dots = mx.concatenate([products, squares], axis=-1)
    return collapse_norm_ref(h, pre, weight, norm_eps), dots[..., None, :]


def split_ref(
    m: mx.array, base: mx.array, scale: mx.array, *, streams: int, iters: int, eps: float
) -> tuple[mx.array, mx.array, mx.array]:
    """pre, post and comb from the raw mixes m [.., M (M + 2)]."""
    pre = mx.sigmoid(m[..., :streams] * scale[0] + base[:streams]) + eps
    post = 2 * mx.sigmoid(m[..., streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    g = m[..., 2 * streams :] * scale[2] + base[2 * streams :]
    g = g.reshape(*g.shape[:-1], streams, streams)
    g = mx.exp(g - g.max(axis=-1, keepdims=True))
    g = g / g.sum(axis=-1, keepdims=True) + eps
    g = g / (g.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iters - 1):
        g = g / (g.sum(axis=-1, keepdims=True) + eps)
        g = g / (g.sum(axis=-2, keepdims=True) + eps)
    return pre, post, g


def collapse_ref(h: mx.array, pre: mx.array) -> mx.array:
    return (pre[..., None] * h.astype(mx.float32)).sum(axis=-2).astype(mx.bfloat16)


def coefficients_ref(sums: SiteSums) -> tuple[mx.array, mx.array]:
    dots, base, scale, width, iters, eps, norm_eps = sums
    total = dots.sum(axis=-2)
    m = total[..., :-1] * mx.rsqrt(total[..., -1:] / width + norm_eps)
    pre, post, comb = split_ref(m, base, scale, streams=_streams_of(base), iters=iters, eps=eps)
    return pre, mx.concatenate([post, comb.flatten(-2)], axis=-1)


def unmix(mix: mx.array, streams: int) -> tuple[mx.array, mx.array]:
    """post [.., M] and comb [.., M source, M destination] in what `coefficients` returns."""
    return mix[..., :streams], mix[..., streams:].reshape(*mix.shape[:-1], streams, streams)


def expand_ref(y: mx.array, h: mx.array, mix: mx.array) -> mx.array:
    return spread_ref(y, h, *unmix(mix, h.shape[-2]))


def spread_ref(y: mx.array, h: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    """post_k y + sum_j comb[j, k] h_j: y [.., C], h [.., M, C] -> bfloat16 [.., M, C]."""
    mixed = (comb[..., None] * h.astype(mx.float32)[..., None, :]).sum(axis=-3)
    return (post[..., None] * y.astype(mx.float32)[..., None, :] + mixed).astype(mx.bfloat16)


def collapse_norm_ref(h: mx.array, pre: mx.array, weight: mx.array, eps: float) -> mx.array:
    return rms_norm_ref(collapse_ref(h, pre), weight, eps)


def random_sums(rng: np.random.Generator, *leading: int, streams: int = 4) -> list[mx.array]:
    """Arrays of `SiteSums` for cases of kernels that the coefficients ride with; `SUMS` are its numbers."""
    outputs = streams * (streams + 2)
    shapes = ((*leading, _PARTS, outputs + 1), outputs, 3)
    dots, *more = (mx.array(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes)
    return [mx.abs(dots), *more]


SUMS = {"width": 32, "iters": 3, "eps": 1e-6, "norm_eps": 1e-20}


def cases() -> list[Case]:
    def arrays(rng: np.random.Generator, N: int, M: int, C: int) -> dict[str, mx.array]:
        O = M * (M + 2)
        normal = {
            "h": (N, M, C),
            "y": (N, C),
            "fn": (O, M * C),
            "base": (O,),
            "scale": (3,),
            "pre": (N, M),
            "mix": (N, M + M * M),
            "weight": (C,),
        }
        made = {name: mx.array(rng.standard_normal(shape, dtype=np.float32)) for name, shape in normal.items()}
        made["fn"] = made["fn"] * (2.0 / (M * C) ** 0.5)
        made["dots"] = mx.array(rng.standard_normal((N, _PARTS, O + 1), dtype=np.float32)) * (1.0 / _PARTS**0.5)
        made["dots"] = mx.concatenate(
            [made["dots"][..., :-1], mx.abs(made["dots"][..., -1:]) + M * C / _PARTS], axis=-1
        )
        return made | {name: made[name].astype(mx.bfloat16) for name in ("h", "y", "weight")}

    def complete(op):
        """`site` with the sums of its parts, which are the implementation's own; the squares are far larger."""

        def sums(*some, **options):
            x, dots = op(*some, **options)
            return x, dots[..., :-1].sum(axis=-2), dots[..., -1:].sum(axis=-2)

        return sums

    def of_sums(op):
        return lambda *arrays, **options: op(SiteSums(*arrays, **options))

    ops = {
        "site": (complete(site), complete(site_ref), ("h", "pre", "fn", "weight"), {"norm_eps": 1e-20}),
        "coefficients": (of_sums(coefficients), of_sums(coefficients_ref), ("dots", "base", "scale"), {}),
        "expand": (expand, expand_ref, ("y", "h", "mix"), {}),
        "collapse": (collapse, collapse_ref, ("h", "pre"), {}),
        "collapse_norm": (collapse_norm, collapse_norm_ref, ("h", "pre", "weight"), {"eps": 1e-20}),
    }

    def case(name: str, N: int, M: int, C: int, large: bool = False) -> Case:
        op, reference, names, options = ops[name]
        if name == "coefficients":
            options = {"width": M * C, "iters": 20, "eps": 1e-6, "norm_eps": 1e-20}

        def inputs(rng: np.random.Generator) -> list[mx.array]:
            made = arrays(rng, N, M, C)
            return [made[n] for n in names]

        moved = {"site": 2 * N * (M + 1) * C + 4 * M * M * (M + 2) * C, "expand": 2 * N * C * (2 * M + 1)}
        moved["coefficients"] = 4 * N * (_PARTS * (M * (M + 2) + 1) + M * (M + 2))
        return Case(
            f"hyper_connection/{name}_{N}x{M}x{C}",
            functools.partial(op, **options),
            functools.partial(reference, **options),
            inputs,
            tolerance=1e-5 if name in ("site", "coefficients") else 2e-6,
            bytes=moved.get(name, 2 * N * C * (M + 1)),
            large=large,
            roundings=2 if name in ("site", "collapse_norm") else 1,  # before the norm and after it
        )

    return [
        *[case(name, 3, 4, 129) for name in ops],
        *[case(name, 1, 4, 40) for name in ops],
        case("site", 10, 2, 33),
        case("site", 19, 2, 33),  # many rows
        case("site", 2, 3, 1000),
        case("coefficients", 11, 2, 33),  # a short last threadgroup
        case("coefficients", 2, 1, 5),
        case("expand", 3, 2, 300),  # two groups a row
        case("expand", 11, 4, 1100),  # many rows, two groups of up to four channels a thread
        case("expand", 2, 1, 5),
        case("expand", 1, 2, 3),  # fewer than 8 values in every input
        *[case(name, 1, 4, 5120, large=True) for name in ops],
        *[case(name, 512, 4, 5120, large=True) for name in ops],
    ]
