"""Planted faults: a kernel without one of its barriers, guards or tail checks must fail its own cases."""

from __future__ import annotations

import pytest

from mlx_ds4.custom_kernels._case import all_cases
from mlx_ds4.custom_kernels._kernel import Kernel, all_kernels, emulator_missing
from tests.kernels import mutants

pytestmark = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# The case that each family's mutants run.
CASES = {
    "rms_norm": "rms_norm/bfloat16_5x512",
    "rope": "rope/float16_2x7x66_tail64",
    "fake_quant": "fake_quant/fp4_e4m3_float32_9x96",
    "hyper_connection_site": "hyper_connection/site_3x4x129",
    "hyper_connection_collapse": "hyper_connection/collapse_3x4x129",
    "hyper_connection_collapse_norm": "hyper_connection/collapse_norm_3x4x129",
    "hyper_connection_coefficients": "hyper_connection/coefficients_11x2x33",
    "hyper_connection_expand": "hyper_connection/expand_3x2x300",
    "router": "router/1x33_k31_normal",
    "router_beside": "router/beside_3x40_4",
    "engram_embedding": "engram/embedding_3x5x32",
    "engram_update": "engram/3x4x129_float32",
    "cache_entry": "cache_entry/normed_fp8_3x96_tail16",
    "cache_entry_ring": "cache_entry/ring9_at1048571_normed_fp8_2x3x96_tail16",
    "cache_entry_norm_ring": "cache_entry/query1290_ring3_at2_1x2x32_tail8",
    "compress": "compress/2x3x272_at15_2",
    "compress_pending": "compress/2x3x272_at15_0",
    "topk": "topk/3x2500_k20_capacity",
    "index_score": "index_score/2x3x4x64_131_split99+32",
    "sparse_attention": "sparse_attention/1x96x4x64_5of9_70of30_turn_queries_split23+17",
    "clamped_swiglu": "shared_expert/clamped_swiglu_3x67",
}
# Every barrier of those kernels but one of topk, which keeps atomics from atomics: those are no race to the emulator.
BARRIERS = [(k.name, i) for k in all_kernels() if k.name in CASES for i in range(k.source.count(BARRIER))]
BARRIERS.remove(("topk", 1))
# (kernel, text, what replaces it, what is found)
MUTATIONS = [
    ("rms_norm", "i < uint(C)", "i < uint(C) + 32u", "out-of-bounds"),  # the tail check of the first loop
    ("rms_norm", "lane < uint(SG) ? part[lane] : 0.0f", "part[lane]", "out-of-bounds"),
    ("rms_norm", "if (lane == 0) part", "part", "race"),  # every lane writes one partial sum
    ("rope", "row < uint(x_shape[0]) * length * uint(H)", "true", "out-of-bounds"),
    ("rope", "uint(D / 2 - P)) {", "uint(D / 2 - P + 1)) {", "wrong result"),
    ("fake_quant", "if (inside) u =", "u =", "out-of-bounds"),
    ("fake_quant", "if (inside) y[i]", "y[i]", "out-of-bounds"),
    ("fake_quant", "BLOCK / 2", "16", "wrong result"),  # a block of 16 takes its neighbour's peak
    ("fake_quant", "(a < 192u ? 1 : 0)", "1", "wrong result"),
    ("hyper_connection_site", "metal::min(row0 + r, rows - 1u)", "(row0 + r)", "out-of-bounds"),  # beyond the last row
    ("hyper_connection_site", "metal::min(output0 + o, uint(O - 1))", "(output0 + o)", "out-of-bounds"),
    ("hyper_connection_site", "c = metal::min(c, uint(C - 1));", "", "out-of-bounds"),
    ("hyper_connection_site", "at = metal::min(at, ulong(M * C - 1));", "", "out-of-bounds"),
    ("hyper_connection_site", "k + 32u * d < end", "true", "wrong result"),  # products of the next part
    ("hyper_connection_site", "|| t + 32u * uint(SG) * i < uint(C)", "|| true", "wrong result"),
    ("hyper_connection_coefficients", "if (lane >= uint(OUTPUTS)) o = uint(OUTPUTS);", "", "out-of-bounds"),
    ("hyper_connection_coefficients", "row < uint(hc_dots_shape[0]) * uint(hc_dots_shape[1])", "true", "out-of-bounds"),
    ("hyper_connection_coefficients", "else if (lane < uint(OUTPUTS)) mix", "else mix", "race"),
    ("hyper_connection_coefficients", "i < ITERS", "i < 2", "wrong result"),
    ("hyper_connection_expand", "if (c < uint(C))", "if (true)", "race"),
    ("hyper_connection_expand", ", uint(C - 1));", ", 4000u);", "out-of-bounds"),
    ("hyper_connection_expand", "mix[row * uint(M + M * M) + i]", "mix[i]", "wrong result"),
    ("hyper_connection_collapse", "row < uint(h_shape[0])", "true", "out-of-bounds"),
    ("cache_entry", "t + 2u * uint(P) >= uint(D)", "t + 2u * uint(P) > uint(D)", "wrong result"),
    ("cache_entry", "if (t % 32u == 0) part", "part", "race"),
    ("cache_entry_ring", "word < words && place", "place", "out-of-bounds"),  # the last group of copies
    ("cache_entry_ring", "metal::min(word, words - 1u)", "word", "out-of-bounds"),
    ("cache_entry_ring", "&& place >= length", "", "race"),  # copies new rows too
    ("cache_entry_ring", "if (slot >= size) slot -= size;", "", "out-of-bounds"),
    ("cache_entry_ring", "slot + size - first", "slot - first", "race"),
    ("cache_entry_ring", "row / length * size", "row / length * length", "race"),  # the second sequence's ring
    ("cache_entry_ring", "first + row % length", "row % length", "race"),
    ("cache_entry_ring", "if (t % 32u == 0) part", "part", "race"),
    ("cache_entry_norm_ring", "metal::min(t, uint(D - 1))", "t", "out-of-bounds"),  # more threads than values
    ("cache_entry_norm_ring", "if (t < uint(D)) ring", "ring", "out-of-bounds"),
    ("cache_entry_norm_ring", ", uint(C - 1));", ", 4000u);", "out-of-bounds"),
    ("cache_entry_norm_ring", "t % 32u < uint(SG) ? part[t % 32u] : 0.0f", "part[t % 32u]", "uninitialised"),
    ("cache_entry_norm_ring", "group - 2u * rows", "group - rows", "unwritten"),
    ("compress", "first & ~1u", "first", "wrong result"),  # the pair that was open before the step
    ("compress", "if (row < length) {", "if (true) {", "out-of-bounds"),
    ("compress", "length + row) * ulong(D) + ulong(i)", "length) * ulong(D) + ulong(i)", "wrong result"),
    ("compress", "* 32u + slot) * ulong(D)", "* 16u + slot) * ulong(D)", "wrong result"),
    ("compress", "lane < uint(SG) ? part[lane] : 0.0f", "part[lane]", "out-of-bounds"),
    ("compress", "if (lane == 0u) part", "part", "race"),
    ("compress_pending", "line < uint(values_shape[0]) * 32u", "true", "out-of-bounds"),
    ("compress_pending", "row >= length", "row > length", "out-of-bounds"),
    ("compress_pending", "(line & 15u) - first", "(line & 15u)", "wrong result"),
    ("compress_pending", "(line & 16u) == 0u", "(line & 16u) != 0u", "wrong result"),
    ("index_score", "read && key[tile] >= int(start)", "read && key[tile] > int(start)", "wrong result"),
    ("index_score", "is_recent ? recent_rows :", "is_recent ? old_rows :", "out-of-bounds"),  # the second sequence
    ("index_score", "uint entries = start + recent_rows", "uint entries = old_rows + recent_rows", "out-of-bounds"),
    ("index_score", "pair < 2u && column < width", "pair < 2u", "race"),
    ("index_score", "head < heads ?", "true ?", "out-of-bounds"),
    ("topk", "GROUP > 1 || simd_any(all_keys != 0u)", "all_keys != 0u", "divergence"),
    ("topk", "metal::min(from + g, n - 1u)", "from + g", "out-of-bounds"),
    ("topk", "all_keys |= key;", "all_keys = key;", "wrong result"),
    ("topk", "(digit == 1u ? 11u : 10u)", "10u", "out-of-bounds"),
    ("sparse_attention", "id >= int(start)", "id > int(start)", "wrong result"),  # an entry from the old rows' free end
    ("sparse_attention", "near_rows : start + recent_rows", "near_rows : far_rows", "wrong result"),
    ("sparse_attention", "is_recent ? id - int(start)", "is_recent ? id", "out-of-bounds"),
    ("sparse_attention", "TURN_QUERIES && channel / 2u >=", "TURN_QUERIES && channel / 2u >", "wrong result"),
    ("sparse_attention", "float n = sine[of_table];", "float n = -sine[of_table];", "wrong result"),
    ("engram_embedding", "at < sizes[0]", "true", "out-of-bounds"),
    ("engram_embedding", "ulong(D + D / 32)", "ulong(D)", "wrong result"),
    ("engram_update", "c < uint(C)", "c < uint(C) + 256u", "out-of-bounds"),
    ("engram_update", "hk * (metal", "kk * (metal", "wrong result"),
    ("router", "if (e < uint(E)) {", "if (true) {", "out-of-bounds"),
    ("router", "if (int(lane) < K) {", "if (true) {", "out-of-bounds"),
    ("router", "k < id", "k > id", "wrong result"),
    ("router_beside", "row >= ulong(rows)", "row > ulong(rows)", "out-of-bounds"),
    ("router_beside", "if (t < 32u)\n            hyper", "hyper", "race"),
    ("cache_entry_norm_ring", "group >= 2u * rows + copies", "group > 2u * rows + copies", "unwritten"),
    ("cache_entry_norm_ring", "copies && t < 32u", "copies", "race"),
    ("clamped_swiglu", "if (i < size)", "if (true)", "out-of-bounds"),
]


def without(text: str, index: int) -> str:
    """The text without its index-th barrier."""
    parts = text.split(BARRIER)
    return BARRIER.join(parts[: index + 1]) + ";" + BARRIER.join(parts[index + 1 :])


def kernel_of(name: str) -> Kernel:
    return next(k for k in all_kernels() if k.name == name)


def found(name: str) -> str:
    return mutants.found(next(case for case in all_cases() if case.name == CASES[name]))


@pytest.mark.parametrize(("name", "index"), BARRIERS)
def test_a_lost_barrier_is_noticed(name, index, monkeypatch):
    kernel = kernel_of(name)
    mutants.replace(monkeypatch, kernel, source=without(kernel.source, index))
    assert found(name) in ("race", "uninitialised")


@pytest.mark.parametrize(("name", "old", "new", "finding"), MUTATIONS)
def test_a_lost_guard_is_noticed(name, old, new, finding, monkeypatch):
    mutants.plant(monkeypatch, kernel_of(name), old, new)
    assert found(name) == finding
