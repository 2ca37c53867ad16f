"""Block formats as planes: codes apart from scales, the same bits in another order.

A GGUF row is a run of small records (34, 66, 84 or 144 bytes) that mix scales and codes; a kernel wants
each kind contiguous and aligned (`host_planes.py` splits and joins them). `dequantize` computes float32
values in the order of ggml's formulas, so that they equal the `gguf` package's. Any leading axes (stacked
experts) are kept.

| format | planes (in = input width) |
| --- | --- |
| Q8_0 | codes int8 [.., in], scales float16 [.., in/32] |
| Q4_K | codes uint8 [.., in/2], scales uint8 [.., in/256*12], supers float16 [.., in/256*2] (d, dmin) |
| Q2_K | codes uint8 [.., in/4], scales uint8 [.., in/16], supers float16 [.., in/256*2] (d, dmin) |
| IQ2_XXS | codes uint32 [.., in/16] (pairs a0, a1 per 32 weights), scales float16 [.., in/256] |
| MXFP4 | codes uint8 [.., in/2], low nibble = even column (MLX's order), scales uint8 [.., in/32] |
| FP8 | codes uint8 [out, in] (e4m3), scales uint8 [ceil(out/32), ceil(in/32)], official release only |
| F32, F16, BF16 | codes float [.., in]: the values themselves |
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

Planes = dict[str, mx.array]

FORMATS = ("Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4", "FP8")
# Formats whose weights are the trained ones: their linears round activations to FP8 as in training.
TRAINED_FORMATS = ("MXFP4", "FP8")
FP8_TILE = 32
# Float weights as formats of one plane, so that products take any weight the same way.
FLOATS = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}


def columns_of(name: str, planes: Planes) -> int:
    """Input width of the weight that `planes` hold."""
    width = planes["codes"].shape[-1]
    return width * {"IQ2_XXS": 16, "Q2_K": 4, "Q4_K": 2, "MXFP4": 2}.get(name, 1)


def dequantize(name: str, planes: Planes) -> mx.array:
    """The weight as float32 [.., out, in], equal to `gguf.quants.dequantize` bit for bit."""
    codes = planes["codes"]
    if name in FLOATS.values():
        return codes.astype(mx.float32)
    scales = planes["scales"]
    if name == "Q8_0":
        return _flat(codes.reshape(*codes.shape[:-1], -1, 32).astype(mx.float32) * scales[..., None])
    if name == "MXFP4":
        nibbles = mx.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1, 32)
        return _flat(_table("e2m1")[nibbles] * _table("e8m0")[scales][..., None])
    if name == "FP8":
        grid = mx.repeat(mx.repeat(_table("e8m0")[scales], FP8_TILE, axis=-2), FP8_TILE, axis=-1)
        return _table("e4m3")[codes] * grid[..., : codes.shape[-2], : codes.shape[-1]]
    if name == "IQ2_XXS":
        pairs = codes.reshape(*codes.shape[:-1], -1, 8, 2)
        low, high = pairs[..., 0], pairs[..., 1]
        unit = scales[..., None].astype(mx.float32) * (0.5 + (high >> 28).astype(mx.float32)) * 0.25
        lanes = mx.arange(4, dtype=mx.uint32)
        grid = _table("iq2")[(low[..., None] >> (8 * lanes)) & 255]  # [.., blocks, 8, 4, 8]
        signs = _table("iq2_signs")[(high[..., None] >> (7 * lanes)) & 127]
        return _flat((unit[..., None, None] * grid * signs).reshape(*codes.shape[:-1], -1, 256))
    supers = planes["supers"].astype(mx.float32).reshape(*codes.shape[:-1], -1, 2, 1)
    if name == "Q2_K":
        steps = scales.reshape(*codes.shape[:-1], -1, 16)
        scale = supers[..., 0, :] * (steps & 15)
        low = supers[..., 1, :] * (steps >> 4)
        shifts = mx.array([0, 2, 4, 6], dtype=mx.uint8)[:, None]
        q = (codes.reshape(*codes.shape[:-1], -1, 2, 1, 32) >> shifts) & 3
        q = q.reshape(*codes.shape[:-1], -1, 16, 16)
    else:
        packed = scales.reshape(*codes.shape[:-1], -1, 3, 4)
        first, second, third = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
        scale6 = mx.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
        low6 = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
        scale, low = supers[..., 0, :] * scale6, supers[..., 1, :] * low6
        shifts = mx.array([0, 4], dtype=mx.uint8)[:, None]
        q = (codes.reshape(*codes.shape[:-1], -1, 4, 1, 32) >> shifts) & 15
        q = q.reshape(*codes.shape[:-1], -1, 8, 32)
    values = scale[..., None] * q.astype(mx.float32) - low[..., None]
    return values.reshape(*codes.shape[:-1], -1)


def dequantize_engram_rows(raw: mx.array) -> mx.array:
    """Engram records uint8 [.., D + D/32] (e4m3 codes, then one e8m0 scale per 32) -> bfloat16 [.., D], exact."""
    width = raw.shape[-1] * 32 // 33
    codes = raw[..., :width].reshape(*raw.shape[:-1], -1, 32)
    return _flat(_table("e4m3")[codes] * _table("e8m0")[raw[..., width:]][..., None]).astype(mx.bfloat16)


def _flat(blocks: mx.array) -> mx.array:
    return blocks.reshape(*blocks.shape[:-2], -1)


@functools.cache
def _table(name: str) -> mx.array:
    if name == "e2m1":  # code 8 is minus zero; ggml decodes it as plus zero
        half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
        table = np.concatenate([half, 0 - half])
    elif name == "e8m0":
        with np.errstate(over="ignore"):
            table = np.ldexp(np.float32(1), np.arange(256) - 127).astype(np.float32)
    elif name == "e4m3":
        code = np.arange(256)
        exponent, mantissa = (code >> 3) & 15, code & 7
        size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
        table = np.where(code & 127 == 127, np.nan, np.where(code & 128, -size, size)).astype(np.float32)
    elif name == "iq2":
        from gguf.quants import IQ2_XXS

        IQ2_XXS.init_grid()
        table = IQ2_XXS.grid.reshape(256, 8).astype(np.float32)
    else:  # the eighth sign of a group makes the number of minus signs even
        code = np.arange(128)
        parity = sum((code >> bit) & 1 for bit in range(7)) & 1
        bits = ((code | (parity << 7))[:, None] >> np.arange(8)) & 1
        table = (1 - 2 * bits).astype(np.float32)
    return mx.array(table)
