"""CUDA body of the quantized product of many rows: 128 weight rows by 128 activation rows a block.

The kernel of `_quant_cuda.py` makes 16 by 32 a block, so a weight is decoded once for 32 rows and activations cross the
L2 cache once for 16 outputs. Here both happen once for 128, in the same order of sums: the bits are the same.

Estimate for 32 columns of a tile on an H200: tensor cores 400 cycles by the rate of mma.sync, shared memory 510 (reads
384, fragments and activations written 128), L2 12.5 KB, about 430. 134 KB of shared memory, one block a
multiprocessor.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import mlx.core as mx

from ._kernel import Kernel
from ._octet import FORMAT_IDS, ceil_div
from ._quant_cuda import HEADER as MMA_HEADER
from ._quant_cuda import planes_of, split, takes

HEADER = MMA_HEADER + (Path(__file__).parent / "_quant_tile.h").read_text()

_TILE = 128  # as in the header
_WARPS = 8
_SHARED_BYTES = 2 * (32768 + 2048 + 32768)  # two TileStage
# K-quants keep sums of their own for the minima, for which registers do not suffice.
_FORMATS = ("Q8_0", "IQ2_XXS", "MXFP4", "FP8")

SOURCE = """
    // Block (i, j): activation rows 128 i .. by weight rows 128 j ..; x [.., G K] as in the kernel of fewer rows. There
    // are 128 or more of both; the last block takes the last 128, some of which the block before makes too, with the
    // same bits.
    using namespace ds4;
    __shared__ uint4 grid_s[F == IQ2_XXS ? 256 : 1];
    if (F == IQ2_XXS) {
      stage_grid(grid_s);
      __syncthreads();
    }
    const int N = codes_shape[0], pitch = width_of(x_shape, x_ndim), from = min(128 * (int)blockIdx.y, N - 128);
    const int K = codes_shape[1] * (int)sizeof(*codes) / Weight<F>::CODES * Weight<F>::UNIT;
    const size_t first = min(128 * (int)blockIdx.x, rows_of(x_shape, x_ndim) - 128);
    const Planes w = {(const unsigned char*)codes, (const unsigned char*)scales, nullptr};
    float acc[2][8][4];
    tile_product<F, S>(
        acc, (TileStage*)dynamic_shared(), w, from, K, (const bf16*)x + first * pitch + from / (N / (pitch / K)) * K,
        pitch, grid_s);
    store_tile(acc, (T*)dynamic_shared(), y + first * N + from, N);
"""

_tile = Kernel(
    "quant_matmul_tile",
    ["x", "codes", "scales"],
    ["y"],
    None,
    cuda_source=SOURCE,
    cuda_header=HEADER,
    shared_memory=_SHARED_BYTES,
    exact=False,
    family="quant_matmul",
)


def takes_many(x: mx.array, format: str, planes: dict[str, mx.array], groups: int = 1) -> bool:
    """Whether tiles multiply x [.., groups * K] by this weight; the rows of a group are whole tiles."""
    *leading, width = x.shape
    M, N = prod(leading), planes["codes"].shape[0]
    whole = groups == 1 or N // groups % _TILE == 0
    fits = _tile.has_room and whole and takes(x, format, width // groups)
    return format in _FORMATS and min(M, N) >= _TILE and fits


def product(x: mx.array, format: str, planes: dict[str, mx.array], *, groups: int, out_dtype: mx.Dtype) -> mx.array:
    """As `_quant_cuda.dense`, to the bit."""
    *leading, width = x.shape
    M, N = prod(leading), planes["codes"].shape[0]
    return _tile(
        inputs=[x, *planes_of(planes)[:2]],
        template=[
            ("F", FORMAT_IDS[format]),
            ("S", split(ceil_div(N, 16), width // groups // 128)),
            ("T", out_dtype),
        ],
        grid=(ceil_div(M, _TILE) * 32 * _WARPS, ceil_div(N, _TILE), 1),
        threadgroup=(32 * _WARPS, 1, 1),
        output_shapes=[(*leading, N)],
        output_dtypes=[out_dtype],
    )[0]
