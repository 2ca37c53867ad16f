"""The translated text and the prelude, compiled by nvcc to PTX (nothing is run)."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import (
    _dense_few_cuda,
    _enter_cuda,
    _expand_cuda,
    _expert_tile_cuda,
    _hyper_cuda,
    _index_topk_cuda,
    _kernel,
    _quant_cuda,
    _quant_group_cuda,
    _quant_tile_cuda,
    _shared_routed_cuda,
    _tiles_cuda,
    hyper_connection,
    index_topk,
    sparse_attention,
    step_values,
)
from mlx_ds4.custom_kernels._case import all_cases
from mlx_ds4.custom_kernels._kernel import TICKETS, Kernel, Launch, all_kernels, watch_launches
from mlx_ds4.custom_kernels._portable import prelude, translate_body, translate_header
from mlx_ds4.custom_kernels._random_planes import random_planes
from mlx_ds4.custom_kernels._rows import SplitRows
from mlx_ds4.custom_kernels._switches import trace
from mlx_ds4.custom_kernels.hyper_connection import SUMS, SiteSums

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc here: install the CUDA toolkit to compile the text")

# What MLX puts in front of a kernel's header, as far as translated texts use it.
MLX = """
#include <cstdint>
#include <cooperative_groups.h>
#include <cuda/std/array>
#include "mlx/backend/cuda/device/config.h"
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, MAX_NDIM>;
using Strides = cuda::std::array<int64_t, MAX_NDIM>;
}
"""
CUDA_NAMES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.bool_: "bool",
    **{getattr(mx, f"{sign}int{bits}"): f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}

# Every name of the prelude, used once. The body is Metal.
ALL_NAMES_HEADER = """
#include <metal_stdlib>
using namespace metal;
MSL_TABLE(uchar, magnitudes, 4) = {1, 2, 3, 4};
constexpr constant uint step = 2u;
struct block { half d; uchar q[32]; };
template <typename P>
inline float first(P p, uint i) { return float(p[i]) + float(magnitudes[i & 3u]) * float(step); }
METAL_FUNC void sum(threadgroup float* a, thread float& b, const device block* c) {
    b = a[0] + float(c->d) + float(c->q[1]);
}
"""
ALL_NAMES_BODY = """
    threadgroup float shared_values[64];
    threadgroup atomic_uint histogram[8];
    uint3 at = thread_position_in_grid, in = thread_position_in_threadgroup, group = threadgroup_position_in_grid;
    uint3 size = threads_per_threadgroup, groups = threadgroups_per_grid, all = threads_per_grid;
    uint lane = thread_index_in_simdgroup + threads_per_simdgroup * simdgroup_index_in_threadgroup;
    uint flat = thread_index_in_threadgroup, count = simdgroups_per_threadgroup;
    const device T* px = x + elem_to_loc(flat, x_shape, x_strides, x_ndim);
    float r = first(px, at.x + in.y + group.z + size.x + groups.x + all.x + lane + count);
    shared_values[flat] = r;
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    sum(shared_values, r, (const device block*)q);
    float f = simd_sum(r) + simd_product(r) + simd_max(r) + simd_min(r) + simd_shuffle(r, 1) + simd_broadcast(r, 2)
        + simd_broadcast_first(r) + simd_shuffle_xor(r, 4) + simd_shuffle_down(r, 1) + simd_shuffle_up(r, 1)
        + simd_prefix_inclusive_sum(r) + simd_prefix_exclusive_sum(r) + simd_prefix_inclusive_product(r)
        + simd_prefix_exclusive_product(r);
    uint u = simd_or(lane) + simd_and(lane) + simd_xor(lane) + simd_sum(lane);
    u += uint(simd_any(lane > 3u)) + uint(simd_all(lane > 3u));
    simd_vote::vote_t vote = (simd_vote::vote_t)simd_ballot(lane > 3u);
    u += metal::popcount(uint(vote)) + metal::clz(u) + metal::ctz(u) + metal::reverse_bits(u) + metal::mulhi(u, u);
    u += metal::rotate(u, 3u) + metal::extract_bits(u, 1u, 3u) + as_type<uint>(f) + uint(simd_ballot(true).all());
    atomic_store_explicit(&histogram[flat & 7u], 0u, memory_order_relaxed);
    u += atomic_fetch_add_explicit(&histogram[0], 1u, memory_order_relaxed);
    u += atomic_fetch_sub_explicit(&histogram[0], 1u, memory_order_relaxed);
    u += atomic_fetch_max_explicit(&histogram[0], 1u, memory_order_relaxed);
    u += atomic_fetch_min_explicit(&histogram[0], 1u, memory_order_relaxed);
    u += atomic_fetch_or_explicit(&histogram[0], 1u, memory_order_relaxed);
    u += atomic_fetch_and_explicit(&histogram[0], 1u, memory_order_relaxed);
    u += atomic_fetch_xor_explicit(&histogram[0], 1u, memory_order_relaxed);
    u += atomic_exchange_explicit(&histogram[0], 1u, memory_order_relaxed);
    u += atomic_load_explicit(&histogram[0], memory_order_relaxed);
    uint old = 1u;
    u += uint(atomic_compare_exchange_weak_explicit(
        &histogram[0], &old, 2u, memory_order_relaxed, memory_order_relaxed));
    float4 a = float4(1.0f, 2.0f, 3.0f, 4.0f), b = float4(float2(r, f), float2(r)), c = (a + b) * 2.0f - -a / b;
    c += a; c *= b; c[1] = a.y;
    uint4 v = (uint4(u) >> 4u) & 15u, w = v | (v << 2u) ^ v;
    uchar4 bytes = uchar4(uchar(1), uchar(2), uchar(3), uchar(4));
    half4 h = half4(c); half2 h2 = half2(half(r)); float3 p3 = float3(1.0f); int4 i4 = int4(3); bfloat4 b4 = bfloat4(c);
    f += metal::dot(a, c) + float(h.x + h2.y) + p3.z + float(i4.w) + float(b4.x) + float(bytes.w) + float(w.x);
    f += metal::exp(f) + metal::precise::exp(f) + metal::fast::exp(f) + metal::exp2(f) + metal::log(f) + metal::log2(f)
        + metal::sqrt(f) + metal::rsqrt(f) + metal::precise::rsqrt(f) + metal::sin(f) + metal::cos(f) + metal::tanh(f)
        + metal::floor(f) + metal::ceil(f) + metal::round(f) + metal::rint(f) + metal::trunc(f) + metal::fabs(f)
        + metal::abs(f) + metal::pow(f, 2.0f) + metal::fmod(f, 2.0f) + metal::copysign(f, r) + metal::atan2(f, r)
        + metal::fma(f, f, f) + metal::ldexp(f, 2) + metal::sign(f) + metal::saturate(f) + metal::mix(f, r, 0.5f)
        + metal::min(f, r) + metal::max(f, r) + metal::clamp(f, 0.0f, 1.0f) + metal::select(f, r, f > r);
    f += float(metal::min(u, 3u)) + float(metal::max(int(u), 3));
    f += float(metal::clamp(u, 1u, 2u)) + float(metal::abs(int(u)));
    f += float(metal::exp(half(f))) + float(metal::max(bfloat(f), bfloat(r)));
    f += float(metal::isnan(f) || metal::isinf(f) || metal::isfinite(f) || metal::signbit(f));
    f += metal::min(f, FLT_MAX) + (f < INFINITY ? 1.0f : 0.0f);
    simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), n;
    simdgroup_load(m, shared_values, 8); simdgroup_load(n, shared_values, 8, ulong2(0, 1), true);
    simdgroup_multiply_accumulate(m, m, n, m); simdgroup_multiply(n, m, m); simdgroup_store(m, shared_values, 8);
    f += m.thread_elements()[0];
    y[flat] = T(f + float(u));
"""


def compile_cuda(texts: list[str], folder: Path) -> str:
    """nvcc's complaint about these kernels in one file, or ""."""
    source = folder / "kernels.cu"
    source.write_text("\n".join(texts))
    cuda = Path(NVCC).resolve().parent.parent
    include = [Path(mx.__file__).parent / "include", cuda / "include" / "cccl", cuda / "include"]
    command = [NVCC, "-ptx", "-arch=sm_90a", "-std=c++17", "--expt-relaxed-constexpr", "-w"]
    command += [f"-I{p}" for p in include] + ["-o", str(folder / "kernels.ptx"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def function(kernel: Kernel, launch: Launch, name: str, body: str) -> str:
    """The function that MLX writes around a body."""
    parameters = []
    for n, x in zip(kernel.input_names, launch.inputs, strict=True):
        parameters.append(f"const {CUDA_NAMES[x.dtype]}* {n}")
        for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if f"{n}_{suffix}" in body:
                parameters.append(f"const __grid_constant__ {kind} {n}_{suffix}")
    outputs = zip(kernel.output_names, launch.call["output_dtypes"], strict=True)
    parameters += [f"{CUDA_NAMES[d]}* {n}" for n, d in outputs]
    values = ""
    for n, v in launch.call["template"]:
        if isinstance(v, mx.Dtype):
            values += f"using {n} = {CUDA_NAMES[v]};\n"
        else:
            values += f"constexpr {'bool' if isinstance(v, bool) else 'int'} {n} = {str(v).lower()};\n"
    arguments = ", ".join(parameters)
    return f"namespace mlx::core::cu {{ __global__ void {name}({arguments}) {{\n{values}{body}\n}} }}\n"


def all_names() -> list[str]:
    """Every name of the prelude in three functions, after the header that they share."""
    kernel = Kernel("test_all_names", ["x", "q"], ["y"], ALL_NAMES_BODY, ALL_NAMES_HEADER, exact=True, family="test")
    texts = [translate_header(kernel.header)]
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        call = {"output_dtypes": [dtype], "template": [("T", dtype), ("N", 3), ("FLAG", True)]}
        launch = Launch(kernel, [mx.zeros((4, 4), dtype), mx.zeros((68,), mx.uint8)], call, [])
        texts.append(function(kernel, launch, f"k{len(texts)}", translate_body(kernel.source)))
    return texts


def test_a_fault_is_reported(tmp_path):
    assert compile_cuda(["__global__ void k(float* y) { *y = 1.0f; }"], tmp_path) == ""
    assert "error" in compile_cuda(["__global__ void k(float* y) { y = 1.0f; }"], tmp_path)


@pytest.mark.slow  # 15 s; the gate runs it
def test_every_name_and_every_kernel(tmp_path):
    """The prelude's names, and one instance for each kernel, set of types and switches of its template."""
    launches: list[Launch] = []
    rng = np.random.default_rng(0)

    def run():
        for case in all_cases():
            if not case.large:
                case.fn(*case.inputs(rng))

    with watch_launches(launches.append):
        trace(run)
    kinds = {}
    for x in launches:
        switches = (value for _, value in x.call["template"] if isinstance(value, bool))
        kinds[(x.kernel.name, *(i.dtype for i in x.inputs), *switches)] = x
    shared, own = [MLX, *all_names()], []
    for i, launch in enumerate(kinds.values()):
        head, body = launch.kernel.cuda_text()
        text = function(launch.kernel, launch, f"k{i}", body)
        if launch.kernel.cuda_source is not None:
            own.append([MLX, head, text])
        else:  # each in a namespace of its own, where helpers of one name do not meet
            head = head.removeprefix(prelude())
            shared.append(f"namespace n{i} {{\nusing namespace ::mlx::core::cu;\n{head}\n{text}\n}}")
    for texts in [shared, *own]:
        assert compile_cuda(texts, tmp_path) == ""


def bodies_for_cuda_alone() -> None:
    """Launches each of the products' tensor-core bodies, in every format that it takes."""
    rng = np.random.default_rng(0)
    x, many = (mx.zeros((rows, 1024), dtype=mx.bfloat16) for rows in (3, 40))
    chosen, weights = mx.zeros((3, 2), dtype=mx.int32), mx.zeros((3, 2))
    hyper_connection._many_dots(mx.zeros((40, 4, 64), dtype=mx.bfloat16), mx.zeros((24, 256)))
    plan = (mx.zeros(6, dtype=mx.int32), mx.zeros(4, dtype=mx.int32))
    for format in ("Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4", "FP8"):
        planes = random_planes(rng, format, 64, 1024)
        for rows, dtype in ((x, mx.bfloat16), (many, mx.float32)):
            _quant_cuda.dense(rows, format, planes, groups=1, out_dtype=dtype)
            if not format.endswith("_K"):
                _quant_tile_cuda.product(rows, format, planes, groups=1, out_dtype=dtype)
        group = [
            (format, planes),
            *[(f, random_planes(rng, f, 8, 1024)) for f in ("F32", "F16", "BF16")],
            (format, planes),
        ]
        for count in range(2, 6):
            dtypes = [mx.float32, mx.bfloat16] * 3
            _quant_group_cuda.together(x, group[:count], dtypes[:count])
        h, mix = mx.zeros((3, 4, 64), dtype=mx.bfloat16), mx.zeros((3, 20))
        _expand_cuda.project(x, (format, planes), h, mix)
        counts, bias = mx.zeros(TICKETS, dtype=mx.int32), mx.zeros(64)
        sums = SiteSums(mx.zeros((1, 3, 32, 25)), mx.zeros(24), mx.zeros(3), **SUMS)
        for router in group[:2]:
            half = (x, group[0], group[0], x, router)
            _quant_group_cuda.shared_swiglu(*half, 10.0)
            _shared_routed_cuda.shared_swiglu_routed(*half, bias, sums, counts, k=2, factor=1.5, limit=10.0)
        table, ring = mx.zeros((3, 8)), mx.zeros((1, 9, 64), dtype=mx.bfloat16)
        entry = (mx.ones(64), table, table, "fp8", mx.ones(64), 1e-6, sums, ring, mx.zeros(1, dtype=mx.int32), counts)
        for count in range(2, 6):
            some, kinds = [group[0], group[4], *group[1:4]][:count], [mx.bfloat16] * 2 + [mx.float32] * (count - 2)
            _enter_cuda.products_and_entry(x[None], some, kinds, *entry)
        if format != "FP8":
            up, down = random_planes(rng, format, 3, 256, 1024), random_planes(rng, format, 3, 1024, 256)
            a = mx.zeros((3, 2, 256), dtype=mx.bfloat16)
            wide = mx.zeros((3, 4, 1024), dtype=mx.bfloat16)
            last = (x, (format, random_planes(rng, format, 1024, 1024)))
            for given in (None, counts):
                _expand_cuda.experts(a, (format, down), chosen, last, wide, mix, given)
            _quant_cuda.gate_up_few(x, format, up, up, chosen, weights, 10.0)
            for room in (227 << 10, 99 << 10):  # a card whose blocks have less takes fewer pairs at a time
                with mock.patch.object(_kernel, "block_bytes", lambda room=room: room):
                    _expert_tile_cuda.gate_up(x, format, up, up, chosen, weights, 10.0, *plan)
            for shared in (None, x, last):
                _quant_cuda.down_few(a, format, down, chosen, shared)
            _expert_tile_cuda.down(a, format, down, *plan)


def attention_of_few_rows() -> None:
    """Every width, with and without a second source, recent rows and turns."""
    for width in (64, 128, 256, 512):
        q, rows = mx.zeros((1, 2, 6, width), dtype=mx.bfloat16), mx.zeros((1, 40, width), dtype=mx.bfloat16)
        lists, turn = mx.zeros((1, 2, 70), dtype=mx.int32), (mx.zeros((2, 9)), mx.zeros((2, 9)))
        parts = SplitRows(rows, rows, mx.zeros(1, dtype=mx.int32))
        attend = functools.partial(sparse_attention.sparse_attention, q, sinks=mx.zeros(6), scale=0.1)
        attend = functools.partial(attend, tickets=mx.zeros(TICKETS, dtype=mx.int32))
        attend([(rows, lists)])
        attend([(rows, lists), (parts, lists)], turn=turn, turn_queries=True)


def selection_with_scores() -> None:
    """Whole rows and lists, keys in one and in two parts."""
    q, weights = mx.zeros((1, 1, 32, 128), dtype=mx.bfloat16), mx.zeros((1, 1, 32), dtype=mx.bfloat16)
    blocks, counts = mx.zeros((1, 1, 20), dtype=mx.int32), mx.zeros(TICKETS, dtype=mx.int32)
    rows = mx.zeros((1, 600, 128), dtype=mx.bfloat16)
    for keys in (rows, SplitRows(rows, rows, mx.zeros(1, dtype=mx.int32))):
        for listed in (None, blocks):
            index_topk.index_top_k(q, weights, keys, None, listed, k=512, block_size=8, counts=counts)


@pytest.mark.slow
def test_every_body_for_cuda_alone(tmp_path, monkeypatch):
    launches: list[Launch] = []

    def node(self, inputs, call):
        outputs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype=dtype) for shape, dtype in outputs]

    monkeypatch.setattr(Kernel, "_launch", node)  # nothing of it is ever run
    for module in (sparse_attention, index_topk):
        monkeypatch.setattr(module, "enabled", lambda family: True)
        monkeypatch.setattr(module, "backend", lambda: "cuda")
    with watch_launches(launches.append):
        bodies_for_cuda_alone()
        attention_of_few_rows()
        selection_with_scores()
        numbers = step_values.in_pairs([0, 0])
        step_values.step_values(numbers, mx.zeros((9, 4), dtype=mx.int32), *[mx.ones(8)] * 2, width=3, slots=5)
    kinds = {(x.kernel.name, *(i.dtype for i in x.inputs), *x.call["template"]): x for x in launches}
    own, few = _quant_cuda.HEADER, _quant_cuda.FEW_HEADER
    tile, expert_tile = _quant_tile_cuda.HEADER, _expert_tile_cuda.HEADER
    heads = (own, few, _quant_group_cuda.HEADER, _expand_cuda.HEADER, tile, expert_tile, _hyper_cuda.HEADER)
    heads += ("#include <cuda_bf16.h>\n", _tiles_cuda.HEADER, own + _dense_few_cuda.HEADER, None)
    texts = [MLX, _quant_group_cuda.HEADER, _expand_cuda.HEADER.removeprefix(own), tile.removeprefix(own)]
    texts += [
        expert_tile.removeprefix(tile + _quant_cuda.IQ2_TABLES),
        _hyper_cuda.HEADER,
        _tiles_cuda.HEADER.removeprefix(_tiles_cuda.PTX),
    ]
    texts.append(_dense_few_cuda.HEADER)
    # These have Metal's names, and two of them the functions of the coefficients, each in a namespace of its own here.
    finishing = [module._HEADER.removeprefix(_quant_group_cuda.HEADER) for module in (_shared_routed_cuda, _enter_cuda)]
    finishing.append(_index_topk_cuda.HEADER.removeprefix(_tiles_cuda.HEADER))
    texts += [header.replace("ds4_metal", f"ds4_metal{i}") for i, header in enumerate(finishing)]
    for i, launch in enumerate(kinds.values()):
        kernel = launch.kernel
        text = function(kernel, launch, f"k{i}", kernel.cuda_text()[1])
        if kernel.cuda_header not in heads:
            base = _tiles_cuda.HEADER if kernel.family == "index_topk" else _quant_group_cuda.HEADER
            head = finishing.index(kernel.cuda_header.removeprefix(base))
            text = text.replace("ds4_metal", f"ds4_metal{head}")
        if kernel.cuda_bounds:
            assert text.count("__global__ ") == 1
            text = text.replace("__global__ ", "__global__ __launch_bounds__({}, {}) ".format(*kernel.cuda_bounds))
        texts.append(text)
    missing = {k.name for k in all_kernels() if k.source is None} - {x.kernel.name for x in launches}
    assert not missing and compile_cuda(texts, tmp_path) == ""
