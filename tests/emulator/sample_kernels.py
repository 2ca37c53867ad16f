"""Six kernels that between them use what the project's kernels use, with numpy references: the emulator's own test
material. They stand for their kind and are not the shipped ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ._launch import launch


@dataclass(frozen=True)
class Spec:
    """The arguments of mx.fast.metal_kernel."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False


@dataclass(frozen=True)
class Sample:
    """A kernel, one call of it, and what the call must give (relative to the largest value; 0 means equal)."""

    spec: Spec
    inputs: list[mx.array]
    template: dict[str, Any]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shape: tuple[int, ...]
    output_dtype: mx.Dtype
    expected: np.ndarray
    tolerance: float

    def run(self, **options: Any) -> np.ndarray:
        (out,) = launch(
            self.spec,
            self.inputs,
            template=list(self.template.items()),
            grid=self.grid,
            threadgroup=self.threadgroup,
            output_shapes=[self.output_shape],
            output_dtypes=[self.output_dtype],
            **options,
        )
        return np.array(out.astype(mx.float32) if out.dtype == mx.bfloat16 else out)

    def error(self, got: np.ndarray) -> float:
        return float(np.abs(got.astype(np.float64) - self.expected).max() / np.abs(self.expected).max())

    def edited(self, *edits: tuple[str, str]) -> Sample:
        """With each old text, which must occur in the header or source, replaced by the new one everywhere."""
        header, source = self.spec.header, self.spec.source
        for old, new in edits:
            assert old in header or old in source, f"{old!r} is not in kernel {self.spec.name}"
            header, source = header.replace(old, new), source.replace(old, new)
        return replace(self, spec=replace(self.spec, header=header, source=source))


# One thread an element; inputs of any strides.
_ADD = Spec(
    name="strided_add",
    input_names=["a", "b"],
    output_names=["out"],
    ensure_row_contiguous=False,
    source="""
    uint e = thread_position_in_grid.x;
    if (e >= uint(N)) return;
    uint in_a = elem_to_loc(e, a_shape, a_strides, a_ndim);
    uint in_b = elem_to_loc(e, b_shape, b_strides, b_ndim);
    out[e] = T(a[in_a]) + T(b[in_b]);
""",
)

# One threadgroup a row, of any number of simdgroups.
_RMS_NORM = Spec(
    name="row_rms_norm",
    input_names=["x", "weight", "eps"],
    output_names=["out"],
    source="""
    threadgroup float partial[32];
    uint first = threadgroup_position_in_grid.x * uint(D);
    uint tid = thread_position_in_threadgroup.x;
    uint step = threads_per_threadgroup.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    float squares = 0.0f;
    for (uint i = tid; i < uint(D); i += step) {
        float v = float(x[first + i]);
        squares += v * v;
    }
    squares = simd_sum(squares);
    if (lane == 0) partial[sg] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = simd_sum(lane < simdgroups_per_threadgroup ? partial[lane] : 0.0f);
    float scale = metal::rsqrt(total / float(D) + eps[0]);
    for (uint i = tid; i < uint(D); i += step)
        out[first + i] = T(float(x[first + i]) * scale * float(weight[i]));
""",
)

_Q8_HEADER = """
struct block_q8 { half scale; int8_t q[32]; };
// A quarter of a block, 8 weights, times 8 activations.
inline float q8_quarter(const device block_q8* b, const device float* x, uint part) {
    float sum = 0.0f;
    for (uint j = 0; j < 8; j++) sum += float(b->q[8 * part + j]) * x[8 * part + j];
    return sum * float(b->scale);
}
"""
# A simdgroup takes NR rows; 4 lanes share a block.
_Q8_VECTOR = Spec(
    name="q8_vector",
    input_names=["w", "x"],
    output_names=["y"],
    header=_Q8_HEADER,
    source="""
    uint lane = thread_index_in_simdgroup;
    uint sg = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    uint first = sg * uint(NR);
    const device block_q8* blocks = (const device block_q8*)w;
    float sums[NR];
    for (int r = 0; r < NR; r++) sums[r] = 0.0f;
    for (uint k = lane / 4; k < uint(NB); k += 8)
        for (int r = 0; r < NR; r++)
            if (first + r < uint(M)) sums[r] += q8_quarter(blocks + (first + r) * uint(NB) + k, x + 32 * k, lane % 4);
    for (int r = 0; r < NR; r++) {
        float s = simd_sum(sums[r]);
        if (lane == 0 && first + r < uint(M)) y[first + r] = s;
    }
""",
)

# A simdgroup a row; a lane takes groups of 32 weights. The table of magnitudes is constant memory.
_IQ2_VECTOR = Spec(
    name="iq2_vector",
    input_names=["w", "x"],
    output_names=["y"],
    source="""
    uint lane = thread_index_in_simdgroup;
    uint row = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    if (row >= uint(M)) return;
    const device block_iq2* blocks = (const device block_iq2*)w + row * uint(NB);
    float sum = 0.0f;
    for (uint g = lane; g < uint(NB) * 8; g += 32) sum += iq2_group(blocks + g / 8, x + 32 * g, g % 8);
    sum = simd_sum(sum);
    if (lane == 0) y[row] = sum;
""",
)
_IQ2_HEADER = """
struct block_iq2 { half scale; ushort q[32]; };
inline float iq2_group(const device block_iq2* b, const device float* x, uint group) {
    const device ushort* q = b->q + 4 * group;
    uint rows = uint(q[0]) | (uint(q[1]) << 16);
    uint rest = uint(q[2]) | (uint(q[3]) << 16);
    float sum = 0.0f;
    for (uint l = 0; l < 4; l++) {
        uint row = (rows >> (8 * l)) & 255u;
        uint signs = (rest >> (7 * l)) & 127u;
        signs |= (metal::popcount(signs) & 1u) << 7;  // the eighth makes their number even
        for (uint j = 0; j < 8; j++) {
            float v = float((iq2_magnitudes[2 * row + j / 4] >> (8 * (j & 3))) & 255u);
            sum += ((signs >> j) & 1u ? -v : v) * x[8 * l + j];
        }
    }
    return sum * float(b->scale) * (0.5f + float(rest >> 28)) * 0.25f;
}
"""

# The K largest of N floats of a row, as ascending indices; of equal ones the first. A threadgroup of 256 a row finds
# the K-th largest key byte by byte, then writes the indices stripe by stripe.
_TOP_K = Spec(
    name="radix_top_k",
    input_names=["x"],
    output_names=["index"],
    header="""
inline uint ordered(float f) { uint u = as_type<uint>(f); return (u & 0x80000000u) ? ~u : (u | 0x80000000u); }
""",
    source="""
    threadgroup atomic_uint counts[256];
    threadgroup uint sums[8];
    threadgroup uint found[2];
    uint tid = thread_position_in_threadgroup.x;
    uint row = threadgroup_position_in_grid.x;
    uint lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup;
    const device float* values = x + row * uint(N);
    uint prefix = 0, need = uint(K);
    for (int shift = 24; shift >= 0; shift -= 8) {
        atomic_store_explicit(&counts[tid], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // zeroed
        for (uint i = tid; i < uint(N); i += 256) {
            uint key = ordered(values[i]);
            if (shift == 24 || (key >> (shift + 8)) == prefix)
                atomic_fetch_add_explicit(&counts[(key >> shift) & 255u], 1u, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);  // counted
        uint bin = 255u - tid;
        uint here = atomic_load_explicit(&counts[bin], memory_order_relaxed);
        uint above = simd_prefix_inclusive_sum(here);
        if (lane == 31) sums[sg] = above;
        threadgroup_barrier(mem_flags::mem_threadgroup);  // summed
        for (uint s = 0; s < sg; s++) above += sums[s];
        if (above >= need && above - here < need) {
            found[0] = (prefix << 8) | bin;
            found[1] = need - (above - here);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);  // found
        prefix = found[0];
        need = found[1];
        threadgroup_barrier(mem_flags::mem_threadgroup);  // read
    }
    uint larger = 0, equal = 0;
    for (uint i0 = 0; i0 < uint(N); i0 += 256) {
        uint i = i0 + tid;
        uint key = i < uint(N) ? ordered(values[i]) : 0u;
        uint is_larger = (i < uint(N) && key > prefix) ? 1u : 0u, is_equal = (i < uint(N) && key == prefix) ? 1u : 0u;
        uint both = is_larger | (is_equal << 16);
        uint before = simd_prefix_exclusive_sum(both);
        if (lane == 31) sums[sg] = before + both;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint all = 0;
        for (uint s = 0; s < 8; s++) {
            if (s < sg) before += sums[s];
            all += sums[s];
        }
        uint g = larger + (before & 0xffffu), e = equal + (before >> 16);
        if (is_larger != 0u) index[row * uint(K) + g + metal::min(e, need)] = i;
        if (is_equal != 0u && e < need) index[row * uint(K) + g + e] = i;
        larger += all & 0xffffu;
        equal += all >> 16;
        threadgroup_barrier(mem_flags::mem_threadgroup);  // stripe done
    }
""",
)

# y[R, M] = x[R, K] w[M, K]^T for R <= 8: a threadgroup of 4 simdgroups takes 32 columns, a simdgroup 8 of them.
_Q8_MATRIX = Spec(
    name="q8_matrix",
    input_names=["w", "x"],
    output_names=["y"],
    header=_Q8_HEADER,
    source="""
    threadgroup float xs[8 * 32];
    threadgroup float ws[32 * 32];
    uint tid = thread_position_in_threadgroup.x;
    uint sg = simdgroup_index_in_threadgroup;
    uint column0 = threadgroup_position_in_grid.x * 32;
    const device block_q8* blocks = (const device block_q8*)w;
    simdgroup_float8x8 acc = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    uint r = tid / 4, part = tid % 4;
    for (uint k = 0; k < uint(NB); k++) {
        for (uint i = tid; i < 256; i += 128)
            xs[i] = i / 32 < uint(R) ? x[(i / 32) * uint(NB) * 32 + k * 32 + i % 32] : 0.0f;
        bool inside = column0 + r < uint(M);
        const device block_q8* b = blocks + (inside ? column0 + r : 0) * uint(NB) + k;
        for (uint j = 0; j < 8; j++)
            ws[r * 32 + part * 8 + j] = inside ? float(b->scale) * float(b->q[part * 8 + j]) : 0.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint c = 0; c < 32; c += 8) {
            simdgroup_float8x8 left, right;
            simdgroup_load(left, xs + c, 32);
            simdgroup_load(right, ws + sg * 8 * 32 + c, 32, 0, true);
            simdgroup_multiply_accumulate(acc, left, right, acc);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    simdgroup_store(acc, xs + sg * 64, 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < 256; i += 128) {
        uint row = (i % 64) / 8, column = column0 + i / 64 * 8 + i % 8;
        if (row < uint(R) && column < uint(M)) y[row * uint(M) + column] = xs[i];
    }
""",
)


def _q8_rows(rng: np.random.Generator, rows: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Random Q8_0 bytes [rows, blocks * 34] and the float32 weights they stand for."""
    scale = rng.uniform(0.001, 0.02, (rows, blocks, 1)).astype(np.float16)
    q = rng.integers(-127, 128, (rows, blocks, 32), dtype=np.int8)
    raw = np.concatenate([scale.view(np.uint8), q.view(np.uint8)], -1).reshape(rows, blocks * 34)
    return raw, (scale.astype(np.float32) * q).reshape(rows, blocks * 32)


def add(rng: np.random.Generator) -> Sample:
    a = mx.array(rng.standard_normal((64, 100), dtype=np.float32))[:, ::2]
    b = mx.array(rng.standard_normal((50, 64)).astype(np.float16)).T
    expected = np.array(a) + np.array(b).astype(np.float32)
    template = {"T": mx.float32, "N": a.size}
    return Sample(_ADD, [a, b], template, (3328, 1, 1), (256, 1, 1), a.shape, mx.float32, expected, 0)


def rms_norm(rng: np.random.Generator, dtype: mx.Dtype = mx.float32) -> Sample:
    x = mx.array(rng.standard_normal((5, 1500), dtype=np.float32)).astype(dtype)
    weight = mx.array(rng.standard_normal(1500, dtype=np.float32)).astype(dtype)
    x32, weight32 = (np.array(v.astype(mx.float32)).astype(np.float64) for v in (x, weight))
    expected = x32 / np.sqrt((x32 * x32).mean(-1, keepdims=True) + 1e-6) * weight32
    template = {"T": dtype, "D": 1500}
    inputs = [x, weight, mx.array([1e-6])]
    tolerance = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 8e-3}[dtype]
    return Sample(_RMS_NORM, inputs, template, (5 * 256, 1, 1), (256, 1, 1), x.shape, dtype, expected, tolerance)


def q8_vector(rng: np.random.Generator, rows: int = 515, blocks: int = 9) -> Sample:
    raw, weights = _q8_rows(rng, rows, blocks)
    x = rng.standard_normal(blocks * 32, dtype=np.float32)
    template = {"NR": 4, "NB": blocks, "M": rows}
    grid = (-(-rows // 8) * 64, 1, 1)
    return Sample(
        _Q8_VECTOR, [mx.array(raw), mx.array(x)], template, grid, (64, 1, 1), (rows,), mx.float32, weights @ x, 2e-6
    )


@functools.cache
def _iq2_magnitudes() -> np.ndarray:
    """[256, 8] uint8, from the gguf package."""
    from gguf.quants import IQ2_XXS

    IQ2_XXS.init_grid()
    return IQ2_XXS.grid.reshape(256, 8).astype(np.uint8)


def iq2_vector(rng: np.random.Generator, rows: int = 130, blocks: int = 3) -> Sample:
    from gguf import GGMLQuantizationType, quants

    words = _iq2_magnitudes().view(np.uint32).reshape(-1)
    table = "constexpr constant static uint iq2_magnitudes[512] = {" + ", ".join(f"{w}u" for w in words) + "};"
    spec = replace(_IQ2_VECTOR, header=table + _IQ2_HEADER)
    raw = rng.integers(0, 256, (rows, blocks, 66), dtype=np.uint8)
    raw[..., :2] = rng.uniform(0.001, 0.02, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    raw = raw.reshape(rows, blocks * 66)
    x = rng.standard_normal(blocks * 256, dtype=np.float32)
    expected = quants.dequantize(raw, GGMLQuantizationType.IQ2_XXS) @ x
    template = {"NB": blocks, "M": rows}
    grid = (-(-rows // 4) * 128, 1, 1)
    return Sample(spec, [mx.array(raw), mx.array(x)], template, grid, (128, 1, 1), (rows,), mx.float32, expected, 2e-6)


def top_k(rng: np.random.Generator) -> Sample:
    rows, n, k = 3, 1300, 100
    x = rng.standard_normal((rows, n), dtype=np.float32)
    x[:, ::7] = np.round(x[:, ::7], 1)  # equal values
    expected = np.sort(np.argsort(-x, -1, kind="stable")[:, :k], -1)
    template = {"N": n, "K": k}
    return Sample(_TOP_K, [mx.array(x)], template, (rows * 256, 1, 1), (256, 1, 1), (rows, k), mx.uint32, expected, 0)


def q8_matrix(rng: np.random.Generator) -> Sample:
    columns, blocks, rows = 90, 3, 6
    raw, weights = _q8_rows(rng, columns, blocks)
    x = rng.standard_normal((rows, blocks * 32), dtype=np.float32)
    template = {"NB": blocks, "M": columns, "R": rows}
    inputs = [mx.array(raw), mx.array(x)]
    grid, shape = (3 * 128, 1, 1), (rows, columns)
    return Sample(_Q8_MATRIX, inputs, template, grid, (128, 1, 1), shape, mx.float32, x @ weights.T, 2e-6)


SAMPLES: dict[str, Callable[[np.random.Generator], Sample]] = {
    "add": add,
    "rms_norm": rms_norm,
    "q8_vector": q8_vector,
    "iq2_vector": iq2_vector,
    "top_k": top_k,
    "q8_matrix": q8_matrix,
}


@functools.cache
def sample(name: str) -> Sample:
    return SAMPLES[name](np.random.default_rng(0))
