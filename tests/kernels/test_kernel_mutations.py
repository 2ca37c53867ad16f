"""Planted faults: a kernel without one of its barriers, guards or tail checks must fail its own cases."""

from __future__ import annotations

import dataclasses

import pytest

from mlx_ds4.custom_kernels import _kernel
from mlx_ds4.custom_kernels._case import all_cases, check
from mlx_ds4.custom_kernels._kernel import all_kernels, emulator_missing, load_all, use_kernels

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
    "hyper_connection_expand": "hyper_connection/expand_3x2x300",
    "router": "router/1x33_k31_normal",
    "engram_embedding": "engram/embedding_3x5x32",
    "engram_update": "engram/3x4x129_float32",
    "cache_entry": "cache_entry/normed_fp8_3x96_tail16",
    "clamped_swiglu": "shared_expert/clamped_swiglu_3x67",
}
# Every barrier of those kernels.
BARRIERS = [(k.name, i) for k in all_kernels() if k.name in CASES for i in range(k.source.count(BARRIER))]
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
    ("hyper_connection_site", "row0 + r < rows ?", "true ?", "out-of-bounds"),  # rows beyond the last
    ("hyper_connection_site", "output0 + o < uint(O) ?", "true ?", "out-of-bounds"),
    ("hyper_connection_site", "c < uint(C);", "c < uint(C) + 32u;", "out-of-bounds"),
    ("hyper_connection_expand", "if (lane < outputs) m +=", "m +=", "out-of-bounds"),  # lanes without an output
    ("hyper_connection_expand", "c < uint(C);", "c < uint(C) + 256u;", "race"),
    ("hyper_connection_expand", "group == 0 && t", "t", "race"),
    ("hyper_connection_expand", "i < ITERS", "i < 2", "wrong result"),
    ("hyper_connection_collapse", "row < uint(h_shape[0])", "true", "out-of-bounds"),
    ("cache_entry", "t + 2u * uint(P) >= uint(D)", "t + 2u * uint(P) > uint(D)", "wrong result"),
    ("cache_entry", "if (t % 32u == 0) part", "part", "race"),
    ("engram_embedding", "at < sizes[0]", "true", "out-of-bounds"),
    ("engram_embedding", "ulong(D + D / 32)", "ulong(D)", "wrong result"),
    ("engram_update", "c < uint(C)", "c < uint(C) + 256u", "out-of-bounds"),
    ("engram_update", "hk * (metal", "kk * (metal", "wrong result"),
    ("router", "if (e < E) {", "if (true) {", "out-of-bounds"),
    ("router", "if (int(lane) < K) {", "if (true) {", "out-of-bounds"),
    ("router", "k < key", "k > key", "wrong result"),
    ("clamped_swiglu", "if (i < size)", "if (true)", "out-of-bounds"),
]


def source_of(name: str) -> str:
    return next(k.source for k in all_kernels() if k.name == name)


def without(text: str, index: int) -> str:
    """The text without its index-th barrier."""
    parts = text.split(BARRIER)
    return BARRIER.join(parts[: index + 1]) + ";" + BARRIER.join(parts[index + 1 :])


def finding(name: str, monkeypatch, **texts: str) -> str:
    """What is found when the kernel has this source or header: a kind of EmulatorError, "wrong result", or ""."""
    monkeypatch.setattr(_kernel, "_registry", dict(_kernel._registry))
    kernel = next(k for k in all_kernels() if k.name == name)
    mutant = dataclasses.replace(kernel, name=f"{name}_mutant", **texts)
    assert (mutant.source, mutant.header) != (kernel.source, kernel.header)
    module = load_all()[kernel.family]
    attribute = next(a for a, value in vars(module).items() if value is kernel)
    monkeypatch.setattr(module, attribute, mutant)
    case = next(case for case in all_cases() if case.name == CASES[name])
    try:
        with use_kernels("emulate"):
            return "wrong result" if check(case)[0] else ""
    except _kernel.emulator().EmulatorError as error:
        return error.kind


@pytest.mark.parametrize(("name", "index"), BARRIERS)
def test_a_lost_barrier_is_noticed(name, index, monkeypatch):
    assert finding(name, monkeypatch, source=without(source_of(name), index)) in ("race", "uninitialised")


@pytest.mark.parametrize(("name", "old", "new", "found"), MUTATIONS)
def test_a_lost_guard_is_noticed(name, old, new, found, monkeypatch):
    kernel = next(k for k in all_kernels() if k.name == name)
    part = next((part for part in ("source", "header") if old in getattr(kernel, part)), None)
    assert part, "the kernel changed: write the mutation anew"
    assert finding(name, monkeypatch, **{part: getattr(kernel, part).replace(old, new, 1)}) == found
