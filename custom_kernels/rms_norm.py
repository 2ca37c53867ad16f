"""RMSNorm with one rounding.

    y = cast(w * (f32(x) * rsqrt(mean(f32(x)^2) + eps)), x.dtype)

Everywhere in the model (architecture notes 3.6). Everything inside is float32; the only rounding to a shorter type
is the last cast. `mx.fast.rms_norm` on bfloat16 rounds before it multiplies by the weight, which is another function.
A row's result does not depend on the rows beside it: how a row is split over threads follows from its width alone.

Kernel: within tolerance (the order of the sum differs). Bytes: x twice (the second time from cache), w, y.
"""

from __future__ import annotations

import functools
from math import prod

import mlx.core as mx
import numpy as np

from ._case import Case
from ._kernel import Kernel, float_bits
from ._switches import enabled

_RMS_NORM_SOURCE = """
    // A threadgroup of SG simdgroups owns one row of C values; thread t owns the values t, t + 32 SG, ...
    threadgroup float part[SG];
    uint t = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint simdgroup = simdgroup_index_in_threadgroup;
    ulong row = ulong(threadgroup_position_in_grid.x) * ulong(C);
    float sum = 0.0f;
    for (uint i = t; i < uint(C); i += 32u * uint(SG)) {
        float v = float(x[row + i]);
        sum += v * v;
    }
    sum = simd_sum(sum);
    if (lane == 0) part[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = simd_sum(lane < uint(SG) ? part[lane] : 0.0f);
    float scale = metal::precise::rsqrt(sum / float(C) + as_type<float>(EPS_BITS));
    for (uint i = t; i < uint(C); i += 32u * uint(SG))
        y[row + i] = T(float(weight[i]) * (float(x[row + i]) * scale));
"""

_rms_norm_kernel = Kernel("rms_norm", ["x", "weight"], ["y"], _RMS_NORM_SOURCE, exact=False, family="rms_norm")


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm over the last axis of `x` [..., C] with `weight` [C] of any float dtype; returns x's shape and dtype.

    An all-zero row gives zeros for any positive eps that float32 can hold. Raises ValueError when the shapes do not
    fit or x is no float array.
    """
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm got weight {weight.shape} for x {x.shape}, expected one weight per entry of x's last axis;"
            " pass the norm that belongs to this width."
        )
    if x.dtype not in (mx.bfloat16, mx.float16, mx.float32):
        raise ValueError(f"rms_norm got x of {x.dtype}, expected a float dtype; convert it first.")
    if x.size == 0 or not enabled("rms_norm"):
        return rms_norm_ref(x, weight, eps)
    *leading, width = x.shape
    simdgroups = simdgroups_for(width)
    return _rms_norm_kernel(
        inputs=[x, weight],
        template=[("T", x.dtype), ("C", width), ("SG", simdgroups), ("EPS_BITS", float_bits(eps))],
        grid=(prod(leading) * 32 * simdgroups, 1, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


def rms_norm_ref(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """The formula in plain float32 MLX operations; same arguments and result as `rms_norm`."""
    v = x.astype(mx.float32)
    y = v * mx.rsqrt(mx.mean(v * v, axis=-1, keepdims=True) + eps)
    return (weight.astype(mx.float32) * y).astype(x.dtype)


def simdgroups_for(width: int) -> int:
    """How many simdgroups share a row of this width: four values a lane, at most 512 threads."""
    return min(-(-width // 128), 16)


def cases() -> list[Case]:
    def inputs(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, weight: mx.Dtype):
        x = rng.standard_normal(shape).astype(np.float32)
        rows = x.reshape(-1, shape[-1])  # edge rows where there is room: zeros, tiny, large
        rows[1:2], rows[2:3], rows[3:4] = 0, rows[2:3] * 1e-12, rows[3:4] * 1e4
        return [mx.array(x).astype(dtype), mx.array(1 + rng.standard_normal(shape[-1])).astype(weight)]

    def case(shape: tuple[int, ...], dtype: mx.Dtype, weight: mx.Dtype = mx.bfloat16, large: bool = False):
        what = "x".join(map(str, shape))
        return Case(
            f"rms_norm/{str(dtype).rpartition('.')[2]}_{what}",
            functools.partial(rms_norm, eps=1e-20),
            functools.partial(rms_norm_ref, eps=1e-20),
            functools.partial(inputs, shape=shape, dtype=dtype, weight=weight),
            tolerance=2e-6,
            bytes=2 * prod(shape) * dtype.size,
            large=large,
        )

    return [
        *[case((5, width), mx.bfloat16) for width in (31, 32, 33, 512)],
        case((1, 5), mx.float32),  # fewer than 8 values: Metal puts such inputs into another address space
        case((2, 3, 129), mx.float16, mx.float32),
        case((3, 1500), mx.float32, mx.float32),
        case((2, 5120), mx.bfloat16),
        case((1, 5120), mx.bfloat16, large=True),
        case((4096, 5120), mx.bfloat16, large=True),
    ]
