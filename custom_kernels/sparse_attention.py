"""Sparse attention: one softmax over listed rows, keys equal values, a sink in the denominator.

Every query row has a list of cache rows (-1 = nothing) shared by all heads; a row is gathered once and used
as key and value. Blocks of 64 list entries are taken in order with a running maximum (architecture notes 5.4):

    s = scale q.k;  m' = max(m, max s);  f = exp(m - m');  p = exp(s - m')
    den = den f + sum p;  acc = acc f + sum bf16(p) k;      at the end den += exp(sink - m), o = acc / den

float32 inside, probabilities rounded to bfloat16 for the value product as in the reference, one rounding of the
result. The running maximum starts at -1e30, so a row with an empty list gives zeros. Blocks are always
whole: a -1 entry changes no bit, and a row's result depends on neither the other rows nor the padding.
"""

from __future__ import annotations

import mlx.core as mx

_BLOCK = 64
_FLOOR = -1e30
# Query rows handled at a time: bounds the gathered rows, whatever the length of the prompt.
_ROWS = 64


def sparse_attention(
    q: mx.array, sources: list[tuple[mx.array, mx.array]], sinks: mx.array, *, scale: float
) -> mx.array:
    """q [B, L, H, D]; sources: pairs of rows [B, S, D] and list int32 [B, L, P], taken one after the other in one
    softmax (window first, then compressed rows); sinks float32 [H]. Returns bfloat16 [B, L, H, D].

    List entries outside 0..S-1 other than -1 are undefined.
    """
    return sparse_attention_ref(q, sources, sinks, scale=scale)


def sparse_attention_ref(
    q: mx.array, sources: list[tuple[mx.array, mx.array]], sinks: mx.array, *, scale: float
) -> mx.array:
    L = q.shape[1]
    if L <= _ROWS:
        return _attend(q, sources, sinks, scale)
    parts = []
    for start in range(0, L, _ROWS):
        rows = slice(start, start + _ROWS)
        part = _attend(q[:, rows], [(x, index[:, rows]) for x, index in sources], sinks, scale)
        mx.eval(part)  # keeps one tile of gathered rows alive at a time
        parts.append(part)
    return mx.concatenate(parts, axis=1)


def _attend(q: mx.array, sources: list[tuple[mx.array, mx.array]], sinks: mx.array, scale: float) -> mx.array:
    B, L, H, D = q.shape
    keys = mx.concatenate([_gather(rows, index) for rows, index in sources], axis=2)  # [B, L, P, D]
    valid = mx.concatenate([index >= 0 for _, index in sources], axis=2)[:, :, None]  # [B, L, 1, P]
    short = -keys.shape[2] % _BLOCK
    if short:
        keys = mx.pad(keys, [(0, 0), (0, 0), (0, short), (0, 0)])
        valid = mx.pad(valid, [(0, 0), (0, 0), (0, 0), (0, short)])
    q = q.astype(mx.float32)
    peak = mx.full((B, L, H, 1), _FLOOR, dtype=mx.float32)
    total = mx.zeros((B, L, H, 1), dtype=mx.float32)
    acc = mx.zeros((B, L, H, D), dtype=mx.float32)
    for start in range(0, keys.shape[2], _BLOCK):
        k = keys[:, :, start : start + _BLOCK].astype(mx.float32)
        scores = mx.where(valid[..., start : start + _BLOCK], (q @ k.swapaxes(2, 3)) * scale, -mx.inf)
        new_peak = mx.maximum(peak, scores.max(axis=-1, keepdims=True))
        fade = mx.exp(peak - new_peak)
        p = mx.exp(scores - new_peak)
        total = total * fade + p.sum(axis=-1, keepdims=True)
        acc = acc * fade + p.astype(mx.bfloat16).astype(mx.float32) @ k
        peak = new_peak
    total = total + mx.exp(sinks[:, None] - peak)
    return (acc / total).astype(mx.bfloat16)


def _gather(rows: mx.array, index: mx.array) -> mx.array:
    """Rows [B, S, D] at index [B, L, P] -> [B, L, P, D]; a -1 entry gives a row of zeros."""
    B, S, D = rows.shape
    if S == 0:
        return mx.zeros((*index.shape, D), dtype=rows.dtype)
    offset = (mx.arange(B, dtype=mx.int32) * S)[:, None, None]
    picked = rows.reshape(B * S, D)[mx.maximum(index, 0) + offset]
    return mx.where((index >= 0)[..., None], picked, 0)
