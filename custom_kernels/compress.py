"""Compressor pooling for ratio 2: two tokens become one entry, channel by channel.

    (w0, w1) = softmax(g_{2j}, g_{2j+1});  u_j = w0 a_{2j} + w1 a_{2j+1}

float32 inside, one rounding to bfloat16 (the norm that follows reads the rounded value, as the reference does;
architecture notes 6.2). No bias, no overlap between groups. `pool_pairs` is for long steps. `compress` is a short step
with all that belongs to it: the rows that wait for their pair (`pending`), pooling and norm.

Kernels, within tolerance (exp, and the order of the norm's sum, differ). One launch. Bytes: `pending` in and out
(128 D a sequence each way, 64 KB at 512 channels), 4 rows a pair, the rows of the step.
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from ._case import Case
from ._kernel import Kernel, float_bits
from ._rows import ring_ref
from ._switches import enabled
from .rms_norm import rms_norm_ref, simdgroups_for

PENDING = 16  # positions that wait for their pair or may have to be taken back; position p lies in slot p % 16
_MULTIPLE, _WIDEST = 8, 2048  # channels: words of 16 bytes of inputs that Metal calls `device`, few registers a thread


_SETUP = """
    // Threadgroups of SG simdgroups, in this order: one for each latent, its channels split over threads as in
    // rms_norm.py; as many as it takes to write the pending rows, a word of 16 bytes a thread.
    threadgroup float part[SG];
    uint t = thread_index_in_threadgroup;
    uint lane = thread_index_in_simdgroup;
    uint group = threadgroup_position_in_grid.x;
    uint length = uint(values_shape[1]);
    uint first = uint(start[0]);
    const uint pairs = uint(values_shape[0]) * uint(ENTRIES);
"""
_LATENTS = """
    if (group < pairs) {  // the same for the whole threadgroup
        float pooled[VALUES];
        float sum = 0.0f;
        #pragma unroll
        for (uint c = 0; c < uint(VALUES); c++) {
            uint i = t + 32u * uint(SG) * c;
            if (i >= uint(D)) break;
            float value[2];
            float gate[2];
            #pragma unroll
            for (uint of_pair = 0; of_pair < 2u; of_pair++) {
                uint slot = ((first & ~1u) + group % uint(ENTRIES) * 2u + of_pair) & 15u;
                uint row = (slot - first) & 15u;  // in the step, if below its length
                if (row < length) {
                    ulong at = ulong(group / uint(ENTRIES) * length + row) * ulong(D) + ulong(i);
                    value[of_pair] = values[at];
                    gate[of_pair] = gates[at];
                } else {
                    ulong at = ulong(group / uint(ENTRIES) * 32u + slot) * ulong(D) + ulong(i);
                    value[of_pair] = pending[at];
                    gate[of_pair] = pending[at + 16ul * ulong(D)];
                }
            }
            float top = metal::max(gate[0], gate[1]);
            float a = metal::precise::exp(gate[0] - top);
            float b = metal::precise::exp(gate[1] - top);
            float v = float(bfloat16_t(a / (a + b) * value[0] + b / (a + b) * value[1]));
            pooled[c] = v;
            sum += v * v;
        }
        sum = simd_sum(sum);
        if (lane == 0u) part[t / 32u] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum = simd_sum(lane < uint(SG) ? part[lane] : 0.0f);
        float scale = metal::precise::rsqrt(sum / float(D) + as_type<float>(EPS_BITS));
        #pragma unroll
        for (uint c = 0; c < uint(VALUES); c++) {
            uint i = t + 32u * uint(SG) * c;
            if (i >= uint(D)) break;
            latents[ulong(group) * ulong(D) + ulong(i)] = bfloat16_t(float(weight[i]) * (pooled[c] * scale));
        }
    }
"""
_COPY = """
    if (group >= pairs) {
        uint word = (group - pairs) * (32u * uint(SG)) + t;
        uint line = word / uint(D / 4);  // counts slots, then values and gates, then sequences
        uint row = ((line & 15u) - first) & 15u;
        if (line < uint(values_shape[0]) * 32u) {
            ulong at = ulong(line / 32u * length + row) * ulong(D / 4) + ulong(word % uint(D / 4));
            uint4 four;
            if (row >= length) four = ((const device uint4*)pending)[word];
            else if ((line & 16u) == 0u) four = ((const device uint4*)values)[at];
            else four = ((const device uint4*)gates)[at];
            ((device uint4*)fresh)[word] = four;
        }
    }
"""

_compress_kernel = Kernel(
    "compress",
    ["values", "gates", "pending", "start", "weight"],
    ["fresh", "latents"],
    _SETUP + _LATENTS + _COPY,
    exact=False,
    family="compress",
)
_pending_kernel = Kernel(
    "compress_pending",
    ["values", "gates", "pending", "start"],
    ["fresh"],
    _SETUP + _COPY,
    exact=True,
    family="compress",
)


def compress(
    values: mx.array, gates: mx.array, pending: mx.array, start: mx.array, weight: mx.array, *, entries: int, eps: float
) -> tuple[mx.array, mx.array]:
    """A short step of the compressor: the new pending rows, and the latents of `entries` pairs.

    values, gates float32 [B, L, D] of the positions start .. start + L - 1, L <= 8 (start int32 [1]); pending float32
    [B, 2, 16, D] holds values and gates of the last positions, p in slot p % 16. Returns (latents, pending): the new
    pending holds the new rows too; latents bfloat16 [B, entries, D] are the pairs (2j, 2j + 1) from j = start // 2 on,
    pooled as by `pool_pairs` from the new pending and normed. A pair that the step does not complete is pooled with
    what its slots hold: hide it. Raises ValueError when the shapes do not fit, for L > 8, or entries not 0 .. 8.
    """
    B, L, D = values.shape
    fits = values.shape == gates.shape and pending.shape == (B, 2, PENDING, D) and weight.shape == (D,)
    fits = fits and values.dtype == gates.dtype == pending.dtype == mx.float32
    if not fits or not L <= PENDING // 2 >= entries >= 0 or start.shape != (1,) or start.dtype != mx.int32:
        raise ValueError(
            f"compress got values {values.dtype} {values.shape}, gates {gates.dtype} {gates.shape}, pending"
            f" {pending.dtype} {pending.shape}, start {start.dtype} {start.shape}, weight {weight.shape} and"
            f" {entries} entries, expected float32 [B, L, D] twice with L <= 8, float32 [B, 2, 16, D], int32 [1], [D]"
            " and 0 to 8; pass one short step of one layer, and longer ones to pool_pairs."
        )
    if D % _MULTIPLE or D > _WIDEST or values.size == 0 or not enabled("compress"):
        return compress_ref(values, gates, pending, start, weight, entries=entries, eps=eps)
    simdgroups = simdgroups_for(D)
    copies = -(-pending.size // 4 // (32 * simdgroups))
    kernel = _compress_kernel if entries else _pending_kernel
    fresh, *latents = kernel(
        inputs=[values, gates, pending, start, *([weight] if entries else [])],
        template=[
            *[("D", D), ("SG", simdgroups), ("VALUES", -(-D // (32 * simdgroups))), ("ENTRIES", entries)],
            *([("EPS_BITS", float_bits(eps))] if entries else []),
        ],
        grid=((B * entries + copies) * 32 * simdgroups, 1, 1),
        threadgroup=(32 * simdgroups, 1, 1),
        output_shapes=[pending.shape, *([(B, entries, D)] if entries else [])],
        output_dtypes=[mx.float32, *([mx.bfloat16] if entries else [])],
    )
    return latents[0] if entries else mx.zeros((B, 0, D), dtype=mx.bfloat16), fresh


def compress_ref(
    values: mx.array, gates: mx.array, pending: mx.array, start: mx.array, weight: mx.array, *, entries: int, eps: float
) -> tuple[mx.array, mx.array]:
    pending = ring_ref(pending, mx.stack([values, gates], axis=1), start, axis=2)
    slots = mx.remainder(2 * (start // 2) + mx.arange(2 * entries, dtype=mx.int32), PENDING)
    pairs = mx.take(pending, slots, axis=2)
    return rms_norm_ref(pool_pairs_ref(pairs[:, 0], pairs[:, 1]), weight, eps), pending


def pool_pairs(values: mx.array, gates: mx.array) -> mx.array:
    """values, gates float32 [.., 2 G, D] -> bfloat16 [.., G, D]."""
    return pool_pairs_ref(values, gates)


def pool_pairs_ref(values: mx.array, gates: mx.array) -> mx.array:
    shape = (*values.shape[:-2], values.shape[-2] // 2, 2, values.shape[-1])
    values, gates = values.reshape(shape), gates.reshape(shape)
    weights = mx.exp(gates - gates.max(axis=-2, keepdims=True))
    weights = weights / weights.sum(axis=-2, keepdims=True)
    return (weights * values).sum(axis=-2).astype(mx.bfloat16)


def cases() -> list[Case]:
    def call(*arrays: mx.array, op, entries: int) -> list[mx.array]:
        latents, pending = op(*arrays, entries=entries, eps=1e-20)
        return [latents, pending] if entries else [pending]

    def case(B: int, L: int, D: int, start: int, entries: int, *, hostile: bool = False, large: bool = False) -> Case:
        def inputs(rng: np.random.Generator) -> list[mx.array]:
            def normal(*shape: int) -> np.ndarray:
                return rng.standard_normal(shape, dtype=np.float32) * 3

            values, gates, pending = normal(B, L, D), normal(B, L, D), normal(B, 2, PENDING, D)
            if hostile:
                gates[:, 0, ::5], gates[:, -1, ::7] = 300, -300  # one side of a pair has all the weight
                pending[:, 1, :, ::3] = -np.inf  # and where the other is new, always that one
                values[:, 0] *= 1e-12
            weight = mx.array(1 + 0.1 * rng.standard_normal(D)).astype(mx.bfloat16)
            start_array = mx.array([start], dtype=mx.int32)
            return [mx.array(values), mx.array(gates), mx.array(pending), start_array, weight]

        return Case(
            f"compress/{B}x{L}x{D}_at{start}_{entries}" + "_hostile" * hostile,
            functools.partial(call, op=compress, entries=entries),
            functools.partial(call, op=compress_ref, entries=entries),
            inputs,
            tolerance=2e-6,
            bytes=4 * B * D * (64 + 2 * L + 5 * entries),
            large=large,
        )

    return [
        case(2, 3, 272, 15, 2),  # an open pair from before, over the end of the ring
        case(2, 3, 272, 1_048_572, 1),
        case(1, 8, 40, 5, 4),
        case(1, 1, 8, 7, 1, hostile=True),
        case(2, 5, 96, 9, 3, hostile=True),
        case(2, 3, 272, 15, 0),
        *[case(1, rows, 512, 1001, (rows + 1) // 2, large=True) for rows in (1, 6)],
        case(1, 1, 512, 1000, 0, large=True),
    ]
