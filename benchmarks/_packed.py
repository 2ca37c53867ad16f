"""Cache rows as the codes that they are: 4 bits a value and a scale a block, instead of bfloat16 values.

A compressed row is all e2m1 codes (its rotated tail too) in blocks of 16 with e4m3 scales, 288 bytes for 512 values
(kind "fp4_e4m3"); an index key e2m1 codes in blocks of 32 with power-of-two scales, 68 bytes for 128 ("fp4"). No part
of either stays bfloat16. A word holds 8 values: bits 4 j .. 4 j + 3 are value 2 j, those 16 above it value 2 j + 1
(j < 4), so that the word shifted by 4 j shows two neighbours as the halves of 32 bits. A scale is a byte: e4m3, or an
exponent plus 127.

Lossless both ways for what `fake_quant` makes: `pack` takes the smallest scale whose largest code reaches the block's
peak, which is the scale that the values were rounded with, or half of it where the peak's code was 3. Exact: integer
arithmetic, and one float32 product of normal numbers. Subnormal values and the sign of zero are kept.

Unpacking is one launch (Metal, CUDA, emulator); bytes: half a byte and a share of the scales a value, 2 out. Index
scores of packed keys are the body of `index_score` on CUDA with another load, and give its bits. Neither is a part of
the model: they are here to be measured (`packed_rows.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_ds4.custom_kernels import _index_score_cuda, _tiles_cuda, index_score
from mlx_ds4.custom_kernels._kernel import Kernel, blank, float_bits
from mlx_ds4.custom_kernels._rows import gather
from mlx_ds4.custom_kernels._switches import backend
from mlx_ds4.custom_kernels.fake_quant import KINDS

_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12])  # the e2m1 values, in halves
_CODES = np.full(16, 7, dtype=np.uint32)  # of so many halves; what is no code is found when the row is compared
_CODES[_HALVES] = np.arange(8)
_SHIFTS = np.array([16 * (i % 2) + 4 * (i // 2) for i in range(8)], dtype=np.uint32)  # of a word's values, in order


def _reach(kind: str) -> np.ndarray:
    """Bits of the bfloat16 values 6 * scale, for the scale bytes 1, 2, ..; those beyond bfloat16 go on counting."""
    if kind == "fp4":  # 6 * 2^(s - 127) = 1.5 * 2^(s + 2 - 127)
        return ((np.arange(1, 254) + 2) << 7) | 64
    byte = np.arange(1, 127)
    scale = np.where(byte > 7, (8 + byte % 8) * 2.0 ** (byte // 8 - 10), byte * 2.0**-9)
    return (6 * scale).astype(np.float32).view(np.uint32) >> 16


_REACH = {kind: mx.array(_reach(kind).astype(np.int32)) for kind in ("fp4", "fp4_e4m3")}


class Packed(NamedTuple):
    """`codes` uint32 [B, S, D / 8] and `scales` uint8 [B, S, D / block] of rows of this kind."""

    codes: mx.array
    scales: mx.array
    kind: str

    @property
    def shape(self) -> tuple[int, int, int]:
        B, S, words = self.codes.shape
        return B, S, 8 * words

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def row_bytes(width: int, kind: str) -> int:
    """Bytes of a packed row."""
    return width // 2 + width // KINDS[kind][1]


def pack(rows: mx.array, kind: str) -> Packed:
    """bfloat16 [B, S, D], D a multiple of the kind's block -> the same values packed.

    Raises ValueError when `unpack` would not give these bits again: rows that no fake quantization of this kind made.
    """
    B, S, D = rows.shape
    block = KINDS[kind][1]
    bits = rows.view(mx.uint16).astype(mx.int32).reshape(B, S, D // block, block)
    size = bits & 0x7FFF
    peak = size.max(axis=-1, keepdims=True)
    reach = _REACH[kind]
    scales = mx.minimum(1 + (reach < peak).sum(axis=-1, keepdims=True), reach.size)
    n, q = _scale(scales, kind)
    # |x| = a 2^(e - 134), so in halves of the scale n 2^q it is a 2^(e - 133 - q) / n.
    e = mx.maximum(size >> 7, 1)
    a = (size & 127) + mx.where(size > 127, 128, 0)
    halves = (a >> mx.clip(133 + q - e, 0, 20)) // n
    codes = mx.array(_CODES)[mx.minimum(halves, 15)] + (bits >> 15).astype(mx.uint32) * 8
    words = (codes.reshape(B, S, D // 8, 8) << mx.array(_SHIFTS)).sum(axis=-1)
    packed = Packed(words.astype(mx.uint32), scales.reshape(B, S, D // block).astype(mx.uint8), kind)
    if not same_bits(unpack_ref(packed), rows):
        raise ValueError(f"rows {rows.shape} are no result of fake quantization of kind {kind!r}; round them first.")
    return packed


def same_bits(x: mx.array, y: mx.array) -> bool:
    return mx.array_equal(x.view(mx.uint16), y.view(mx.uint16)).item()


def _scale(scales: mx.array, kind: str) -> tuple[mx.array, mx.array]:
    """n and q of scales n 2^q with n < 16, from their bytes; int32 of their shape."""
    scales = scales.astype(mx.int32)
    if kind == "fp4":
        return mx.ones_like(scales), scales - 127
    return (scales & 7) + mx.where(scales > 7, 8, 0), mx.maximum(scales >> 3, 1) - 10


_HEADER = """
// The bits in bfloat16 of a code under the scale of this byte, which is above 0.
template <bool E4M3>
inline uint packed_value(uint code, uint scale) {
    uint sign = (code & 8u) << 12;
    uint i = code & 7u;
    if (E4M3) {  // at least 2^-10: normal numbers, and products of fewer than 9 bits
        uint halves = (0xc8643210u >> (4u * i)) & 15u;
        uint n = (scale & 7u) | (scale > 7u ? 8u : 0u);
        float half_unit = as_type<float>((metal::max(scale >> 3, 1u) + 116u) << 23);
        return (as_type<uint>(float(halves * n) * half_unit) >> 16) | sign;
    }
    // 1 or 1.5 times a power of two; 0 and 0.5 are the exceptions, and half of the smallest scale is subnormal.
    if (i < 2u) return sign | (i == 0u ? 0u : scale > 1u ? (scale - 1u) << 7 : 64u);
    return sign | ((scale + (i >> 1) - 1u) << 7) | ((i & 1u) << 6);
}
"""

_UNPACK = """
    // A thread owns a word of a row: 8 values of one block. With LISTED, row r of the result is row list[r] of its
    // batch, or zeros where the list names none; else the row itself.
    uint i = thread_position_in_grid.x;
    uint word = i % uint(D / 8);
    uint row = i / uint(D / 8);
    uint stored = uint(codes_shape[1]);
    uint wanted = LISTED ? uint(list_shape[1]) : stored;
    if (row < uint(codes_shape[0]) * wanted) {
        int entry = LISTED ? list[row] : int(row % wanted);
        bool named = entry >= 0 && entry < int(stored);
        ulong from = ulong(row / wanted) * ulong(stored) + ulong(named ? entry : 0);
        uint code = named ? codes[from * ulong(D / 8) + ulong(word)] : 0u;
        uint scale = uint(scales[from * ulong(D / BLOCK) + ulong(word / uint(BLOCK / 8))]);
        uint4 words;
        #pragma unroll
        for (uint j = 0; j < 4u; j++) {
            uint two = code >> (4u * j);
            words[j] = packed_value<(BLOCK == 16)>(two, scale) | (packed_value<(BLOCK == 16)>(two >> 16, scale) << 16);
        }
        ((device uint4*)y)[i] = words;
    }
"""

_unpack_kernel = Kernel(
    "packed_rows_unpack", ["codes", "scales", "list"], ["y"], _UNPACK, _HEADER, exact=True, family="packed_rows"
)


def unpack(packed: Packed, index: mx.array | None = None) -> mx.array:
    """The rows that index int32 [B, P] names (zeros where it names none), or all -> bfloat16 [B, P or S, D]."""
    B, S, D = packed.shape
    P = S if index is None else index.shape[1]
    if B * P * D == 0 or S == 0 or backend() is None:
        return unpack_ref(packed, index)
    return _unpack_kernel(
        inputs=[packed.codes, packed.scales, blank(1, 1) if index is None else index],
        template=[("D", D), ("BLOCK", KINDS[packed.kind][1]), ("LISTED", index is not None)],
        grid=(-(-B * P * (D // 8) // 256) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(B, P, D)],
        output_dtypes=[mx.bfloat16],
    )[0]


def unpack_ref(packed: Packed, index: mx.array | None = None) -> mx.array:
    codes, scales, kind = packed
    if index is not None:
        codes, scales = gather(codes, index), gather(scales, index)
    block = KINDS[kind][1]
    values = (codes[..., None] >> mx.array(_SHIFTS)) & 15
    values = values.reshape(*codes.shape[:-1], -1, block)
    n, q = _scale(scales[..., None], kind)
    units = mx.array(_HALVES.astype(np.int32))[values & 7] * n  # fewer than 9 bits
    as_float = units.astype(mx.float32).view(mx.uint32).astype(mx.int32) >> 16  # exact, in bfloat16's bits
    exponent = (as_float >> 7) + q - 1
    bits = mx.where(exponent < 255, (exponent << 7) | (as_float & 127), 0x7F80)
    bits = mx.where(exponent > 0, bits, units << mx.clip(q + 132, 0, 20))  # subnormal: multiples of 2^-133
    bits = mx.where(units == 0, 0, bits) | ((values >> 3).astype(mx.int32) << 15)
    return bits.astype(mx.uint16).view(mx.bfloat16).reshape(*codes.shape[:-1], 8 * codes.shape[-1])


# What the body of the index scores does to get a key's octets, and what it does instead: a lane's octet of each 32
# channels is one word, the 32 are one block. Codes are exponents and mantissas of bfloat16 once they are shifted; two
# products with powers of two bring them to their place, since one power of two does not reach.
_LOAD = """      const __nv_bfloat16* from = (is_recent ? recent : keys) + 8 * t
          + ((size_t)batch * (is_recent ? recent_rows : old_rows) + (read ? is_recent ? key - start : key : 0)) * D;
      #pragma unroll
      for (int c = 0; c < D / 32; c++) k[i][c] = octet(from + 32 * c, read);
"""
_PACKED_LOAD = """      const size_t at = (size_t)batch * old_rows + (read ? key : 0);
      #pragma unroll
      for (int c = 0; c < D / 32; c++)
        k[i][c] = octet_of(__ldg(keys + at * (D / 8) + 4 * c + t), __ldg(scales + at * (D / 32) + c), read);
"""
_OCTET = """
namespace ds4_tiles {
__device__ __forceinline__ uint4 octet_of(u32 word, u32 scale, bool present) {
  const u32 codes = present ? word : 0, power = scale * 0x00800080u;
  u32 two[4];
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 bits = (j < 2 ? codes << (6 - 4 * j) : codes >> (4 * j - 6)) & 0x01c001c0u;
    two[j] = mul2(mul2(bits | ((codes << (12 - 4 * j)) & 0x80008000u), 0x7e807e80u), power);
  }
  return make_uint4(two[0], two[1], two[2], two[3]);
}
}  // namespace ds4_tiles
"""
_scores_kernel = Kernel(
    "packed_rows_scores",
    ["q", "weights", "keys", "scales", "recent", "base", "visible", "blocks"],
    ["scores"],
    None,
    cuda_source=_index_score_cuda.SOURCE.replace(_LOAD, _PACKED_LOAD),
    cuda_header=_tiles_cuda.HEADER + _OCTET,
    exact=False,
    family="packed_rows",
)


def packed_scores(q: mx.array, weights: mx.array, keys: Packed, visible: mx.array, *, factor: float) -> mx.array:
    """`index_scores(q, weights, unpack(keys), visible, factor=factor)`, with its bits: on CUDA in one launch, elsewhere
    these two."""
    if backend() != "cuda":
        return index_score.index_scores(q, weights, unpack(keys), visible, factor=factor)
    B, L, H, D = q.shape
    S, rows = keys.shape[1], index_score._ROWS
    codes = keys.codes
    return _scores_kernel(
        inputs=[q, weights, codes, keys.scales, codes, visible, visible, blank(1, 1, 8)],
        template=[
            *[("HEADS", -(-H // 8) * 8), ("D", D), ("ROWS", rows), ("SPLIT", False), ("BLOCK", 0)],
            ("FACTOR_BITS", float_bits(factor)),
        ],
        grid=(B * -(-L // rows) * -(-S // index_score._COLUMNS) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(B, L, S)],
        output_dtypes=[mx.float32],
    )[0]
