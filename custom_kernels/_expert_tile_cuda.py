"""CUDA bodies of the experts' products of many rows: pairs sorted by expert, 128 weight rows by 48 pairs a block.

A weight is decoded once for 48 pairs, and the pairs' rows cross the L2 cache once for 128 weight rows; the order of
sums is that of the few rows' kernels (`_quant_cuda.py`), so are the bits.

On an H200, 2,048 rows, top 6 of 384 (32 pairs an expert, rarely more than 48), matrices of 5120 x 2304: gate and up in
IQ2_XXS 4.2 ms, the last product in Q2_K 2.3 (docs/log.md), where tensor cores need 1.4 and 0.8.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from ._kernel import Kernel, float_bits
from ._octet import FORMAT_IDS, ceil_div
from ._quant_cuda import GATE_UP_SPLIT, IQ2_TABLES, RING, planes_of
from ._quant_tile_cuda import HEADER as TILE_HEADER

HEADER = TILE_HEADER + IQ2_TABLES + (Path(__file__).parent / "_expert_tile.h").read_text()

_WARPS = 8
_TILES, _FEW_TILES = 6, 2  # of 8 pairs; where a block may have 99 KB only
_TABLES_END = 128 << 10  # tables of IQ2_XXS lie at a multiple of 64 KB, behind all else

_START = """
    using namespace ds4;
    const int expert = blockIdx.y, begin = start[expert], end = start[expert + 1];
    if (begin == end) return;
    __shared__ uint4 grid_s[F == IQ2_XXS && !TABLES ? 256 : 1];
    const ExpertMemory<F, NT, MATRICES, TABLES> memory(dynamic_shared());
    Iq2Tables tables(memory.tables);
    if (TABLES) {
      Iq2Tables::Words().stage(memory.tables);
      __syncthreads();
      tables.begin();
    } else if (F == IQ2_XXS) {
      stage_grid(grid_s);
      __syncthreads();
    }
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = 8 * blockIdx.x + (threadIdx.x >> 5);
"""

_GATE_UP_SOURCE = (
    """
    // Block (i, expert): gate and up in rows 128 i .. for all pairs of the expert, 8 NT of them at a time.
"""
    + _START
    + """
    const Planes w[2] = {
        {(const unsigned char*)codes1, (const unsigned char*)scales1, (const unsigned char*)supers1},
        {(const unsigned char*)codes3, (const unsigned char*)scales3, (const unsigned char*)supers3}};
    const float LIMIT = __int_as_float(LIMIT_BITS);
    const int K = x_shape[1], N = codes1_shape[1];
    for (int at = begin; at < end; at += 8 * NT) {
      const int count = min(8 * NT, end - at);
      float sum[2][NT][4];
      expert_product<F, NT, 2, S, TABLES>(
          sum, memory, w, (size_t)expert * N, tile, N, K, (const bf16*)x,
          [&](int column) { return (size_t)(order[at + min(column, count - 1)] / SLOTS); }, grid_s, tables);
#pragma unroll
      for (int i = 0; i < NT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const int n = 8 * i + 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1);
          if (n >= count || r >= N) continue;
          const int pair = order[at + n];
          const float a = fminf(round_bf16(sum[0][i][c]), LIMIT);
          const float b = fminf(fmaxf(round_bf16(sum[1][i][c]), -LIMIT), LIMIT);
          y[(size_t)pair * N + r] = bf16(weights[pair] * (a / (1.f + expf(-a)) * b));
        }
    }
"""
)

_DOWN_SOURCE = (
    """
    // Block (i, expert): outputs 128 i .. for all pairs of the expert, 8 NT of them at a time; slots are summed later.
"""
    + _START
    + """
    const Planes w[1] = {{(const unsigned char*)codes, (const unsigned char*)scales, (const unsigned char*)supers}};
    const int K = x_shape[1], N = codes_shape[1];
    for (int at = begin; at < end; at += 8 * NT) {
      const int count = min(8 * NT, end - at);
      float sum[1][NT][4];
      expert_product<F, NT, 1, 0, TABLES>(
          sum, memory, w, (size_t)expert * N, tile, N, K, (const bf16*)x,
          [&](int column) { return (size_t)order[at + min(column, count - 1)]; }, grid_s, tables);
#pragma unroll
      for (int i = 0; i < NT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const int n = 8 * i + 2 * t + (c & 1), r = 16 * tile + g + 8 * (c >> 1);
          if (n < count && r < N) y[(size_t)order[at + n] * N + r] = bf16(sum[0][i][c]);
        }
    }
"""
)


def _kernel(name: str, inputs: list[str], source: str, room: int, blocks: int) -> Kernel:
    limits = {"shared_memory": room, "cuda_bounds": (32 * _WARPS, blocks)}
    text = {"cuda_source": source, "cuda_header": HEADER}
    return Kernel(name, inputs, ["y"], None, **text, **limits, exact=False, family="expert_matmul")


def _bytes(matrices: int, tiles: int) -> int:
    """For two stages of 256 columns, sums of one, and a ring a warp."""
    return 8 * tiles * (2 * 512 + 96) + _WARPS * matrices * RING


_ONE = ["codes", "scales", "supers"]
_TWO = [f"{plane}{index}" for index in (1, 3) for plane in _ONE]
_GATE_UP_INPUTS = ["x", *_TWO, "order", "start", "weights"]
_gate_up = _kernel(
    "expert_swiglu_many_mma", _GATE_UP_INPUTS, _GATE_UP_SOURCE, max(_bytes(2, _TILES), _TABLES_END), blocks=1
)
_gate_up_small = _kernel("expert_swiglu_some_mma", _GATE_UP_INPUTS, _GATE_UP_SOURCE, _bytes(2, _FEW_TILES), blocks=1)
_down = _kernel("expert_down_many_mma", ["x", *_ONE, "order", "start"], _DOWN_SOURCE, _bytes(1, _TILES), blocks=2)


def gate_up(x, format, gate, up, chosen, weights, limit: float, order, starts) -> mx.array:
    """As `_quant_cuda.gate_up_few`, for any number of pairs: `order` sorts them by expert, those of each begin at
    `starts` (`expert_matmul.Plan`)."""
    (E, F, _), slots = gate["codes"].shape, chosen.shape[1]
    kernel, tiles = (_gate_up, _TILES) if _gate_up.has_room else (_gate_up_small, _FEW_TILES)
    return _launch(
        kernel,
        [x, *planes_of(gate), *planes_of(up), order, starts, weights.reshape(-1)],
        [
            ("F", FORMAT_IDS[format]),
            ("S", GATE_UP_SPLIT),
            ("SLOTS", slots),
            ("NT", tiles),
            ("MATRICES", 2),
            ("TABLES", format == "IQ2_XXS" and kernel is _gate_up),
            ("LIMIT_BITS", float_bits(limit)),
        ],
        (E, F),
        (*chosen.shape, F),
    )


def down(a, format, planes, order, starts) -> mx.array:
    """The experts' outputs of every pair, rounded: a [rows, slots, F] -> bfloat16 [rows, slots, C]."""
    E, C, _ = planes["codes"].shape
    return _launch(
        _down,
        [a.reshape(-1, a.shape[-1]), *planes_of(planes), order, starts],
        [("F", FORMAT_IDS[format]), ("NT", _TILES), ("MATRICES", 1), ("TABLES", False)],
        (E, C),
        (*a.shape[:2], C),
    )


def _launch(kernel: Kernel, inputs, template, sizes: tuple[int, int], shape: tuple[int, ...]) -> mx.array:
    experts, outputs = sizes
    return kernel(
        inputs=inputs,
        template=template,
        grid=(ceil_div(outputs, 16 * _WARPS) * 32 * _WARPS, experts, 1),
        threadgroup=(32 * _WARPS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.bfloat16],
    )[0]
