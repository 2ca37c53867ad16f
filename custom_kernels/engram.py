"""Engram: table records as values, and how much of a looked-up n-gram value each residual stream takes in.

    e[32 b + i] = e4m3(code 32 b + i) 2^(scale b - 127)                         exact in bfloat16

    dot_m = sum_c h_m[c] q_m[c] k_m[c] key_m[c] * rsqrt(mean h_m^2 + eps) * rsqrt(mean key_m^2 + eps) * C^-0.5
    g_m   = sigmoid(copysign(sqrt(max(|dot_m|, 1e-6)), dot_m));   h_m <- h_m + g_m value

float32 inside, statistics per stream, one rounding to bfloat16 (architecture notes 9.6). A row's result does not depend
on the rows beside it.

Kernels: `engram_embedding`, one launch instead of four; values below 2^-126 in size may be flushed to zero. Bytes: a
record once, 2 a value out. `engram_update`, within tolerance (the order of the sums differs): one launch instead of
about 30. Bytes: h twice (the second time from cache), keys, value and weights once, h out.
"""

from __future__ import annotations

import functools
from math import prod

import mlx.core as mx
import numpy as np

from mlx_ds4.formats.planes import dequantize_engram_rows

from ._case import Case
from ._kernel import Kernel, float_bits
from ._octet import numbers
from ._switches import enabled

_THREADS = 256

_ENGRAM_SOURCE = """
    // A threadgroup owns stream m of one row: C values of h and of key m, and the value that all streams share.
    threadgroup float part[3 * 8];
    uint t = thread_index_in_threadgroup;
    uint group = threadgroup_position_in_grid.x;
    uint m = group % uint(M);
    ulong at = ulong(group) * ulong(C);
    ulong kv_row = ulong(group / uint(M)) * ulong((M + 1) * C);
    ulong key_at = kv_row + ulong(m) * ulong(C);
    ulong value_at = kv_row + ulong(M) * ulong(C);
    float hh = 0.0f;
    float kk = 0.0f;
    float hk = 0.0f;
    for (uint c = t; c < uint(C); c += 256u) {
        float a = float(h[at + c]);
        float b = float(kv[key_at + c]);
        ulong w = ulong(m) * ulong(C) + ulong(c);
        hh += a * a;
        kk += b * b;
        hk += a * (float(q_weight[w]) * float(k_weight[w])) * b;
    }
    hh = simd_sum(hh);
    kk = simd_sum(kk);
    hk = simd_sum(hk);
    if (thread_index_in_simdgroup == 0) {
        part[simdgroup_index_in_threadgroup] = hh;
        part[8u + simdgroup_index_in_threadgroup] = kk;
        part[16u + simdgroup_index_in_threadgroup] = hk;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    hh = 0.0f;
    kk = 0.0f;
    hk = 0.0f;
    for (uint i = 0; i < 8u; i++) {
        hh += part[i];
        kk += part[8u + i];
        hk += part[16u + i];
    }
    float width = float(C);
    float eps = as_type<float>(EPS_BITS);
    float dot = hk * (metal::precise::rsqrt(hh / width + eps) * metal::precise::rsqrt(kk / width + eps))
              * metal::precise::rsqrt(width);
    float root = metal::precise::sqrt(metal::max(metal::abs(dot), 1e-6f));
    float gate = 1.0f / (1.0f + metal::precise::exp((as_type<uint>(dot) >> 31) != 0u ? root : -root));
    for (uint c = t; c < uint(C); c += 256u)
        y[at + c] = bfloat16_t(float(h[at + c]) + gate * float(kv[value_at + c]));
"""

_EMBEDDING_SOURCE = """
    // A thread owns one value: code c of a record (D codes, D / 32 scales). sizes: values in all. The bits of an e4m3
    // code are those of a half with a smaller exponent bias: 2^8 makes up for it.
    uint at = thread_position_in_grid.x;
    if (at < sizes[0]) {
        ulong record = ulong(at / uint(D)) * ulong(D + D / 32);
        uint c = at % uint(D);
        uint code = uint(records[record + ulong(c)]);
        uint scale = uint(records[record + ulong(D) + ulong(c / 32u)]);
        float v = float(as_type<half>(ushort(((code & 127u) << 7) | ((code & 128u) << 8)))) * 256.0f;
        if ((code & 127u) == 127u) v = as_type<float>(0x7fc00000u);
        e[at] = bfloat16_t(v * as_type<float>(scale << 23));
    }
"""

_embedding_kernel = Kernel(
    "engram_embedding", ["records", "sizes"], ["e"], _EMBEDDING_SOURCE, exact=False, family="engram"
)

_engram_kernel = Kernel(
    "engram_update",
    ["h", "kv", "q_weight", "k_weight"],
    ["y"],
    _ENGRAM_SOURCE,
    exact=False,
    family="engram",
)


def engram_embedding(records: mx.array) -> mx.array:
    """Records uint8 [.., columns, D + D/32], e4m3 codes and then one scale for 32 -> bfloat16 [.., columns D].

    Raises ValueError for records that are not whole blocks of 33 bytes.
    """
    *leading, columns, length = records.shape
    if length % 33 or records.dtype != mx.uint8:
        raise ValueError(
            f"engram_embedding got records of {length} {records.dtype}, expected uint8 in multiples of 33: codes and"
            " scales; pass rows of the table."
        )
    if records.size == 0 or not enabled("engram"):
        return engram_embedding_ref(records)
    width = length // 33 * 32
    size = prod(leading) * columns * width
    return _embedding_kernel(
        inputs=[records, numbers(size)],
        template=[("D", width)],
        grid=(-(-size // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*leading, columns * width)],
        output_dtypes=[mx.bfloat16],
    )[0]


def engram_embedding_ref(records: mx.array) -> mx.array:
    return dequantize_engram_rows(records).reshape(*records.shape[:-2], -1)


def engram_update(h: mx.array, kv: mx.array, q_weight: mx.array, k_weight: mx.array, *, eps: float) -> mx.array:
    """h [.., M, C], kv [.., (M + 1) C] (M keys, then the value), weights [M, C] of any float -> bfloat16 [.., M, C]."""
    *leading, M, C = h.shape
    if kv.shape[-1] != (M + 1) * C or q_weight.shape != (M, C) or k_weight.shape != (M, C):
        raise ValueError(
            f"engram_update got kv {kv.shape} and weights {q_weight.shape}, {k_weight.shape} for streams {h.shape},"
            f" expected [.., {(M + 1) * C}] and [{M}, {C}]; pass what belongs to this layer."
        )
    if h.size < 8 or not enabled("engram"):
        return engram_update_ref(h, kv, q_weight, k_weight, eps=eps)
    return _engram_kernel(
        inputs=[h, kv, q_weight, k_weight],
        template=[("M", M), ("C", C), ("EPS_BITS", float_bits(eps))],
        grid=(prod(leading) * M * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[h.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def engram_update_ref(h: mx.array, kv: mx.array, q_weight: mx.array, k_weight: mx.array, *, eps: float) -> mx.array:
    *leading, M, C = h.shape
    keys, value = kv[..., : M * C].reshape(*leading, M, C), kv[..., M * C :]
    qk = q_weight.astype(mx.float32) * k_weight.astype(mx.float32)
    gate = engram_gate(engram_dot(h, keys, qk, eps=eps))
    update = gate[..., None] * value.astype(mx.float32)[..., None, :]
    return (h.astype(mx.float32) + update).astype(mx.bfloat16)


def engram_dot(h: mx.array, keys: mx.array, qk: mx.array, *, eps: float) -> mx.array:
    """The normalized dot product of each stream, float32 [.., M]."""
    h, keys = h.astype(mx.float32), keys.astype(mx.float32)
    norms = mx.rsqrt((h * h).mean(axis=-1) + eps) * mx.rsqrt((keys * keys).mean(axis=-1) + eps)
    return (h * qk * keys).sum(axis=-1) * norms * h.shape[-1] ** -0.5


def engram_gate(dot: mx.array) -> mx.array:
    """sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)); the sign of a zero is its sign bit."""
    root = mx.sqrt(mx.maximum(mx.abs(dot), 1e-6))
    negative = (dot.view(mx.uint32) >> 31) != 0
    return mx.sigmoid(mx.where(negative, -root, root))


def cases() -> list[Case]:
    def inputs(rng: np.random.Generator, rows: int, M: int, C: int, dtype: mx.Dtype) -> list[mx.array]:
        def draw(*shape: int) -> mx.array:
            return mx.array(rng.standard_normal(shape, dtype=np.float32))

        h, kv = draw(rows, M, C), draw(rows, (M + 1) * C)
        if rows > 1:
            h[1] = 0  # a row of zeros
        return [h.astype(mx.bfloat16), kv.astype(mx.bfloat16), draw(M, C).astype(dtype), draw(M, C).astype(dtype)]

    def case(rows: int, M: int, C: int, dtype: mx.Dtype = mx.float32, large: bool = False) -> Case:
        return Case(
            f"engram/{rows}x{M}x{C}_{str(dtype).rpartition('.')[2]}",
            functools.partial(engram_update, eps=1e-20),
            functools.partial(engram_update_ref, eps=1e-20),
            functools.partial(inputs, rows=rows, M=M, C=C, dtype=dtype),
            tolerance=1e-5,
            bytes=rows * C * (2 * M + 2 * M + 2 * (M + 1)) + 2 * M * C * dtype.size,
            large=large,
        )

    def table(rows: int, columns: int, D: int, large: bool = False) -> Case:
        def records(rng: np.random.Generator) -> list[mx.array]:
            made = rng.integers(0, 256, (rows, columns, D + D // 32), dtype=np.uint8)
            made[..., D:] = made[..., D:] % 40 + 100
            return [mx.array(np.where(made & 127 == 127, made - 1, made).astype(np.uint8))]  # no NaN

        return Case(
            f"engram/embedding_{rows}x{columns}x{D}",
            engram_embedding,
            engram_embedding_ref,
            records,
            tolerance=None,
            bytes=rows * columns * (3 * D + D // 32),
            large=large,
        )

    return [
        table(3, 5, 32),
        table(1, 6, 64),
        table(6, 24, 256, large=True),
        case(3, 4, 129),
        case(1, 2, 31, mx.bfloat16),
        case(2, 4, 512, mx.bfloat16),
        case(1, 4, 5120, large=True),
        case(512, 4, 5120, large=True),
    ]
