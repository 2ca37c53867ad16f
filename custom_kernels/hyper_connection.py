"""Hyper-connections: four residual streams, mixed by coefficients that depend on the streams.

    r      = rsqrt(mean over streams and channels of h^2 + eps)
    m      = (fn . h) * r                                         M + M + M*M values
    pre_j  = sigmoid(m_j scale_0 + base_j) + hc_eps
    post_j = 2 sigmoid(m_{M+j} scale_1 + base_{M+j})
    comb   = Sinkhorn(softmax over destinations of m_{2M+Mj+k} scale_2 + base_{2M+Mj+k}),  j source, k destination
    collapse(h, pre)         = sum_j pre_j h_j
    expand(y, h, post, comb) = post_k y + sum_j comb[j, k] h_j

Everything is float32 inside; collapse and expand round once to bfloat16 (architecture notes 4.2, 4.3). A site's `pre`
is consumed by the next site, `post` and `comb` by its own.
"""

from __future__ import annotations

import mlx.core as mx


def mix(
    h: mx.array, fn: mx.array, base: mx.array, scale: mx.array, *, iters: int, eps: float, norm_eps: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Coefficients of one site from streams h [.., M, C].

    fn float [M (M + 2), M C] (column = stream * C + channel), base [M (M + 2)], scale [3]. `iters` counts the
    Sinkhorn column passes. Returns float32 pre [.., M], post [.., M], comb [.., M source, M destination].
    """
    return mix_ref(h, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)


def collapse(h: mx.array, pre: mx.array) -> mx.array:
    """sum_j pre_j h_j: h [.., M, C], pre float32 [.., M] -> bfloat16 [.., C]."""
    return collapse_ref(h, pre)


def expand(y: mx.array, h: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    """post_k y + sum_j comb[j, k] h_j: y [.., C], h [.., M, C] -> bfloat16 [.., M, C]."""
    return expand_ref(y, h, post, comb)


def mix_ref(
    h: mx.array, fn: mx.array, base: mx.array, scale: mx.array, *, iters: int, eps: float, norm_eps: float
) -> tuple[mx.array, mx.array, mx.array]:
    streams = h.shape[-2]
    x = h.astype(mx.float32).reshape(*h.shape[:-2], -1)
    r = mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + norm_eps)
    m = (x @ fn.astype(mx.float32).T) * r
    return split_ref(m, base, scale, streams=streams, iters=iters, eps=eps)


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


def expand_ref(y: mx.array, h: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    mixed = (comb[..., None] * h.astype(mx.float32)[..., None, :]).sum(axis=-3)
    return (post[..., None] * y.astype(mx.float32)[..., None, :] + mixed).astype(mx.bfloat16)
