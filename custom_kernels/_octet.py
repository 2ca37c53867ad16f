"""Block formats inside kernels: eight weights of a row at a time, and 32-column tiles for the matrix units.

The unit is the octet: columns 8 o .. 8 o + 7 of a row, which lie in one block of 32. A lane decodes octet
`lane` of each 256-column step, so 32 lanes read whole cache lines of every plane. Decoding gives codes as floats
with a scale and an offset, weight = scale * q - low; both products are exact in float32 (at most 21 bits), so that
the one subtraction rounds exactly where `planes.dequantize` rounds.

Planes reach kernels as 32-bit words where codes are packed; offsets are computed in `ulong`, since the experts of
one layer pass 2^32 bytes.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_ds4.formats import planes as block_planes

# The numbers by which kernels know the formats.
FORMAT_IDS = {"Q8_0": 0, "Q4_K": 1, "Q2_K": 2, "IQ2_XXS": 3, "MXFP4": 4, "FP8": 5, "F32": 6, "F16": 7, "BF16": 8}
# Columns of one block, where a row must be whole blocks; FP8 tiles and 32-column blocks share one rule.
_BLOCK = {"Q4_K": 256, "Q2_K": 256, "IQ2_XXS": 256}
# MLX hands arrays of fewer elements to Metal in the constant address space.
_FEWEST_WORDS = 8

# The 256 codewords of IQ2_XXS, two bits a weight, first weight lowest: 0, 1, 2 stand for 8, 25, 43.
_IQ2_CODEWORDS = (
    "0000000200050008000a00110014002000220028002a00410044005000580061006400800082008a00a201010104011001150140"
    "01840198020002020222028204010404041004210424044004420448046004810484049004a40500050205080520054605690580"
    "0591060906100640068406a40800080508080814082808410844085008520888090409400a020a14100110041010102110401060"
    "1084109010951100110811201150115a118012241245140014081420142514491480151815621600161618011804181018401881"
    "1900190519a01a5120002002200a2044206120802082212921482200220224012404241024402456250025412564269028082820"
    "28942a44400140044010401840214024404040484056406040814084409041004120416141804185420142104248425642684400"
    "44084420448044994512452446004801480448104840484549004958496149824a454a9050005008501150195020508050885104"
    "514251a4529154905492550a56015654580058115819586459405a08600460106040606861006155621862606400640565106512"
    "6584684280008002800a804180828104811881408211840184048410841584408460850085468594860986408660880289048a11"
    "900490109024904090a1911691809245940094229444955198819920a002a050a085a109a200a418a850a904"
)


def iq2_words() -> list[int]:
    """The IQ2_XXS codewords as 512 words of four bytes, two for each, first weight in the lowest byte."""
    words = []
    for at in range(0, len(_IQ2_CODEWORDS), 4):
        code = int(_IQ2_CODEWORDS[at : at + 4], 16)
        values = [(8, 25, 43)[(code >> 2 * i) & 3] for i in range(8)]
        words += [int.from_bytes(bytes(values[half : half + 4]), "little") for half in (0, 4)]
    return words


OCTET_HEADER = (
    "MSL_TABLE(uint, octet_iq2, 512) = {" + ", ".join(f"{word}u" for word in iq2_words()) + "};\n"
    """
struct Octet { float q[8]; float scale; float low; };  // weight i is scale * q[i] - low

inline void octet_bytes(uint word, thread float* q) {
    uchar4 b = as_type<uchar4>(word);
    q[0] = float(b.x); q[1] = float(b.y); q[2] = float(b.z); q[3] = float(b.w);
}
inline void octet_chars(uint word, thread float* q) {
    char4 b = as_type<char4>(word);
    q[0] = float(b.x); q[1] = float(b.y); q[2] = float(b.z); q[3] = float(b.w);
}
inline float octet_sign(float v, uint bit) {  // v with the sign that bit 0 says
    return as_type<float>(as_type<uint>(v) ^ (bit << 31));
}
inline float octet_power(uint e) {  // 2^(e - 127), infinity from 255 on
    return as_type<float>(metal::min(e, 255u) << 23);
}
inline float octet_e4m3(float v, uint code) {  // v unless the code is one of the two NaNs
    return (code & 127u) == 127u ? as_type<float>(0x7fc00000u) : v;
}
// Four e4m3 codes times 2^-8: their bits are those of a half with a smaller exponent bias.
inline void octet_e4m3_word(uint word, thread float* q) {
    uint even = word & 0x00ff00ffu, odd = (word >> 8) & 0x00ff00ffu;
    half2 a = as_type<half2>(((even & 0x007f007fu) << 7) | ((even & 0x00800080u) << 8));
    half2 b = as_type<half2>(((odd & 0x007f007fu) << 7) | ((odd & 0x00800080u) << 8));
    q[0] = octet_e4m3(float(a.x), even); q[1] = octet_e4m3(float(b.x), odd);
    q[2] = octet_e4m3(float(a.y), even >> 16); q[3] = octet_e4m3(float(b.y), odd >> 16);
}

// Which run of `part` octets holds octet o of a row, counted over all rows: the index of a block's scale.
inline ulong octet_index(ulong row, uint octets, uint o, uint part) {
    return row * ulong(octets / part) + ulong(o / part);
}

// Octet o of a row of `octets`. FORMAT as in FORMAT_IDS; S and D are pointers to scales and supers.
template <int FORMAT, typename S, typename D>
inline Octet octet_at(const device uint* codes, S scales, D supers, ulong row, uint octets, uint o) {
    Octet w;
    w.low = 0.0f;
    uint in_block = o & 31u, quarter = o & 3u;  // where in 256 and in 32 columns
    ulong here = octet_index(row, octets, o, 1u);
    ulong block32 = octet_index(row, octets, o, 4u), block256 = octet_index(row, octets, o, 32u);
    if (FORMAT == 0) {
        uint2 c = ((const device uint2*)codes)[here];
        octet_chars(c.x, w.q); octet_chars(c.y, w.q + 4);
        w.scale = float(scales[block32]);
    } else if (FORMAT == 1) {  // a byte holds columns c and c + 32 of 64
        uint j = in_block / 4u;
        uint2 c = ((const device uint2*)codes)[block256 * 16ul + ulong((j / 2u) * 4u + quarter)];
        uint shift = (j & 1u) * 4u;
        octet_bytes((c.x >> shift) & 0x0f0f0f0fu, w.q); octet_bytes((c.y >> shift) & 0x0f0f0f0fu, w.q + 4);
        uint byte = (j & 3u) * 8u;
        uint a = (uint(scales[block256 * 3ul]) >> byte) & 255u;
        uint b = (uint(scales[block256 * 3ul + 1ul]) >> byte) & 255u;
        uint high = (uint(scales[block256 * 3ul + 2ul]) >> byte) & 255u;
        uint scale = j < 4u ? a & 63u : (high & 15u) | ((a >> 6) << 4);
        uint low = j < 4u ? b & 63u : (high >> 4) | ((b >> 6) << 4);
        w.scale = float(supers[block256 * 2ul]) * float(scale);
        w.low = float(supers[block256 * 2ul + 1ul]) * float(low);
    } else if (FORMAT == 2) {  // a byte holds columns c, c + 32, c + 64, c + 96 of 128
        uint2 c = ((const device uint2*)codes)[block256 * 8ul + ulong((in_block / 16u) * 4u + quarter)];
        uint shift = ((in_block / 4u) & 3u) * 2u;
        octet_bytes((c.x >> shift) & 0x03030303u, w.q); octet_bytes((c.y >> shift) & 0x03030303u, w.q + 4);
        uint both = uint(scales[octet_index(row, octets, o, 2u)]);
        w.scale = float(supers[block256 * 2ul]) * float(both & 15u);
        w.low = float(supers[block256 * 2ul + 1ul]) * float(both >> 4);
    } else if (FORMAT == 3) {  // four codeword numbers, then four times seven signs and a scale of four bits
        uint2 c = ((const device uint2*)codes)[block32];
        uint word = ((c.x >> (8u * quarter)) & 255u) * 2u;
        uint signs = (c.y >> (7u * quarter)) & 127u;
        signs |= (metal::popcount(signs) & 1u) << 7;
        octet_bytes(octet_iq2[word], w.q); octet_bytes(octet_iq2[word + 1u], w.q + 4);
        for (uint i = 0; i < 8u; i++) w.q[i] = octet_sign(w.q[i], signs >> i);
        w.scale = float(scales[block256]) * (0.5f + float(c.y >> 28)) * 0.25f;
    } else if (FORMAT == 4) {  // e2m1 codes times 2^-14: their bits are those of a half
        uint c = codes[here];
        for (uint i = 0; i < 4u; i++) {
            uint two = c >> (4u * i);
            half2 v = as_type<half2>(((two & 0x00070007u) << 9) | ((two & 0x00080008u) << 12));
            w.q[i] = float(v.x); w.q[i + 4u] = float(v.y);
        }
        w.scale = octet_power(uint(scales[block32]) + 14u);
    } else if (FORMAT >= 6) {  // float32, float16, bfloat16: the values themselves
        w.scale = 1.0f;
        if (FORMAT == 6) {
            for (uint i = 0; i < 8u; i++) w.q[i] = ((const device float*)codes)[here * 8ul + ulong(i)];
        } else {
            uint4 c = ((const device uint4*)codes)[here];
            for (uint i = 0; i < 4u; i++) {
                uint two = i == 0u ? c.x : i == 1u ? c.y : i == 2u ? c.z : c.w;
                half2 h = as_type<half2>(two);
                w.q[2u * i] = FORMAT == 7 ? float(h.x) : as_type<float>(two << 16);
                w.q[2u * i + 1u] = FORMAT == 7 ? float(h.y) : as_type<float>(two & 0xffff0000u);
            }
        }
    } else {
        uint2 c = ((const device uint2*)codes)[here];
        octet_e4m3_word(c.x, w.q); octet_e4m3_word(c.y, w.q + 4);
        w.scale = octet_power(uint(scales[octet_index(row / 32ul, octets, o, 4u)]) + 8u);
    }
    return w;
}

// Eight activations: octet `at` of an array of bfloat16 or, WIDE, of float32.
template <bool WIDE>
inline void octet_of_x(const device uint* x, ulong at, thread float* v) {
    if (WIDE) {
        uint4 a = ((const device uint4*)x)[2ul * at], b = ((const device uint4*)x)[2ul * at + 1ul];
        v[0] = as_type<float>(a.x); v[1] = as_type<float>(a.y); v[2] = as_type<float>(a.z); v[3] = as_type<float>(a.w);
        v[4] = as_type<float>(b.x); v[5] = as_type<float>(b.y); v[6] = as_type<float>(b.z); v[7] = as_type<float>(b.w);
    } else {
        uint4 a = ((const device uint4*)x)[at];
        v[0] = as_type<float>(a.x << 16); v[1] = as_type<float>(a.x & 0xffff0000u);
        v[2] = as_type<float>(a.y << 16); v[3] = as_type<float>(a.y & 0xffff0000u);
        v[4] = as_type<float>(a.z << 16); v[5] = as_type<float>(a.z & 0xffff0000u);
        v[6] = as_type<float>(a.w << 16); v[7] = as_type<float>(a.w & 0xffff0000u);
    }
}

// A simdgroup's sums of R weight rows times M rows of x: sum[r * M + m] is complete in every lane. at[m] is where row
// m of x starts, in octets. Each weight is read once for all M; the additions of one sum come in the same
// order whatever M and R are, and are fused explicitly, so that its bits do not depend on them.
template <int FORMAT, bool WIDE, int R, int M, typename S, typename D>
inline void octet_sums(const device uint* x, const thread ulong* at, const device uint* codes, S scales, D supers,
                       const thread ulong* rows, uint octets, uint lane, thread float* sum) {
#pragma unroll
    for (uint i = 0; i < uint(R * M); i++) sum[i] = 0.0f;
    for (uint o = lane; o < octets; o += 32u) {
        Octet w[R];
#pragma unroll
        for (uint r = 0; r < uint(R); r++) w[r] = octet_at<FORMAT>(codes, scales, supers, rows[r], octets, o);
#pragma unroll
        for (uint m = 0; m < uint(M); m++) {
            float v[8];
            octet_of_x<WIDE>(x, at[m] + ulong(o), v);
            float total = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#pragma unroll
            for (uint r = 0; r < uint(R); r++) {
                float dot = w[r].q[0] * v[0];
#pragma unroll
                for (uint i = 1; i < 8u; i++) dot = metal::fma(w[r].q[i], v[i], dot);
                float s = metal::fma(w[r].scale, dot, sum[r * uint(M) + m]);
                if (FORMAT == 1 || FORMAT == 2) s = metal::fma(-w[r].low, total, s);
                sum[r * uint(M) + m] = s;
            }
        }
    }
#pragma unroll
    for (uint i = 0; i < uint(R * M); i++) sum[i] = simd_sum(sum[i]);
}
"""
)

ROWS_HEADER = (
    OCTET_HEADER
    + """
// A simdgroup: weight rows first .. first + R - 1 of group g times the M rows of x.
template <int FORMAT, bool WIDE, int R, int M, typename S, typename D, typename T>
inline void quant_rows(const device uint* x, const device uint* codes, S scales, D supers, device T* y,
                       uint octets, uint g, uint groups, uint outputs, uint first, uint lane) {
    if (first >= outputs) return;  // a whole simdgroup
    ulong rows[R], at[M];
    float sum[R * M];
    for (uint r = 0; r < uint(R); r++)  // behind the last row, the last once more
        rows[r] = ulong(g) * ulong(outputs) + ulong(metal::min(first + r, outputs - 1u));
    for (uint m = 0; m < uint(M); m++) at[m] = (ulong(m) * ulong(groups) + ulong(g)) * ulong(octets);
    octet_sums<FORMAT, WIDE, R, M>(x, at, codes, scales, supers, rows, octets, lane, sum);
    for (uint r = 0; r < uint(R); r++)
        for (uint m = 0; m < uint(M); m++)
            if (lane == 0u && first + r < outputs)
                y[ulong(m) * ulong(groups) * ulong(outputs) + rows[r]] = T(sum[r * uint(M) + m]);
}
"""
)

# 32 rows of x times 64 rows of weights by 128 threads. Both tiles are float32 (Apple's matrix units multiply floats
# at the rate of halves), 36 values a row against bank conflicts: 13.5 KB of threadgroup memory.
TILE_ROWS, TILE_OUT, TILE_THREADS = 32, 64, 128
TILE_HEADER = (
    OCTET_HEADER
    + """
constexpr constant uint tile_pitch = 36u, tile_result_pitch = 68u;

template <int FORMAT, typename S, typename D>
inline void tile_weights(const device uint* codes, S scales, D supers, ulong row, uint octets, uint o,
                         threadgroup float* to) {
    Octet w = octet_at<FORMAT>(codes, scales, supers, row, octets, o);
    for (uint i = 0; i < 8u; i++) to[i] = metal::fma(w.scale, w.q[i], -w.low);
}

// result[n * tile_result_pitch + j], in the memory of ws, is row n of x times weight row j; j < 32 come from matrix a,
// the others from matrix b. Thread t reads weight rows a_row and b_row at its quarter of 32 columns, and row `from`
// (in octets; below `count` rows only) of x. Ends with a barrier.
template <int FA, int FB, bool WIDE, typename SA, typename DA, typename SB, typename DB>
inline void tile_product(const device uint* x, ulong from, uint count,
                         const device uint* a_codes, SA a_scales, DA a_supers, ulong a_row,
                         const device uint* b_codes, SB b_scales, DB b_supers, ulong b_row,
                         uint octets, uint t, uint simdgroup, threadgroup float* xs, threadgroup float* ws) {
    simdgroup_float8x8 sum[8];  // 4 blocks of 8 rows by 2 of 8 weight rows
    for (uint i = 0; i < 8u; i++) sum[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    uint line = t / 4u, quarter = t & 3u, at = line * tile_pitch + quarter * 8u;
    for (uint block = 0; block < octets; block += 4u) {
        float v[8];
        for (uint i = 0; i < 8u; i++) v[i] = 0.0f;
        if (line < count) octet_of_x<WIDE>(x, from + ulong(block + quarter), v);
        for (uint i = 0; i < 8u; i++) xs[at + i] = v[i];
        tile_weights<FA>(a_codes, a_scales, a_supers, a_row, octets, block + quarter, ws + at);
        tile_weights<FB>(b_codes, b_scales, b_supers, b_row, octets, block + quarter, ws + 32u * tile_pitch + at);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint k = 0; k < 32u; k += 8u) {
            simdgroup_float8x8 left, right0, right1;
            simdgroup_load(right0, ws + simdgroup * 16u * tile_pitch + k, tile_pitch, 0, true);
            simdgroup_load(right1, ws + (simdgroup * 16u + 8u) * tile_pitch + k, tile_pitch, 0, true);
#pragma unroll
            for (uint i = 0; i < 4u; i++) {
                if (i * 8u < count) {  // the same for the whole group: blocks without rows cost nothing
                    simdgroup_load(left, xs + i * 8u * tile_pitch + k, tile_pitch);
                    simdgroup_multiply_accumulate(sum[2u * i], left, right0, sum[2u * i]);
                    simdgroup_multiply_accumulate(sum[2u * i + 1u], left, right1, sum[2u * i + 1u]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup float* to = ws + simdgroup * 16u;
    for (uint i = 0; i < 4u; i++) {
        simdgroup_store(sum[2u * i], to + i * 8u * tile_result_pitch, tile_result_pitch);
        simdgroup_store(sum[2u * i + 1u], to + i * 8u * tile_result_pitch + 8u, tile_result_pitch);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
"""
)


def kernel_takes(format: str, planes: block_planes.Planes) -> bool:
    """Whether kernels can read this weight: whole octets and blocks, and not so small that Metal moves it to the
    constant address space."""
    codes = planes["codes"]
    width = block_planes.columns_of(format, planes)
    words = codes.size * codes.dtype.size // 4
    whole_tiles = format != "FP8" or codes.ndim == 2 or codes.shape[-2] % block_planes.FP8_TILE == 0
    return width > 0 and width % _BLOCK.get(format, 32) == 0 and words >= _FEWEST_WORDS and whole_tiles


def plane_inputs(format: str, planes: block_planes.Planes) -> list[mx.array]:
    """The three arrays by which kernels know a weight: codes as words, scales (codes again without any), supers (scales
    again without any)."""
    scales = planes.get("scales", planes["codes"])
    if format == "Q4_K":
        scales = scales.view(mx.uint32)
    return [planes["codes"].view(mx.uint32), scales, planes.get("supers", scales)]


def x_input(x: mx.array) -> tuple[mx.array, bool]:
    """(activations as 32-bit words, whether they are float32). bfloat16 stays, everything else becomes float32."""
    wide = x.dtype != mx.bfloat16
    return (x.astype(mx.float32) if wide else x).view(mx.uint32), wide


@functools.lru_cache(maxsize=256)
def numbers(*values: int) -> mx.array:
    """Sizes as an input, so that one compiled kernel serves every shape."""
    return mx.array(values, dtype=mx.uint32)


def check_planes(what: str, format: str, planes: block_planes.Planes, width: int) -> None:
    """Raises ValueError when the format is unknown or its rows are not `width` columns."""
    if format not in FORMAT_IDS:
        raise ValueError(f"{what} got the format {format!r}, expected one of {', '.join(FORMAT_IDS)}; convert it.")
    columns = block_planes.columns_of(format, planes)
    if columns != width:
        raise ValueError(f"{what} got inputs of width {width}, expected the weight's {columns}; pass the right weight.")


def rows_per_simdgroup(outputs: int, most: int, simdgroups_wanted: int = 2048) -> int:
    """How many weight rows a simdgroup takes: more reuse activations, fewer keep a big GPU busy."""
    rows = 1
    while rows < most and outputs >= 2 * rows * simdgroups_wanted:
        rows *= 2
    return rows


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The next power of two that is at least n."""
    return 1 << (n - 1).bit_length()
