"""The launch of the experts' last product whose last blocks add up and expand, as C++ on the CPU: the bits of two."""

from __future__ import annotations

import itertools
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import _expand_cuda, _kernel, _quant_cuda, expand_matmul
from mlx_ds4.custom_kernels._case import compare
from mlx_ds4.custom_kernels._kernel import watch_launches
from mlx_ds4.custom_kernels._random_planes import random_planes
from tests.cuda_host import COMPILER, launch, run

pytestmark = pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the bodies: install it to run them")
CASES = [case for case in expand_matmul.cases() if re.search("q2_k_q8_0_.*_of_|mxfp4", case.name) and not case.large]
E, K, M = 5, 3, 4


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def arrays(rows: int, C: int, F: int, formats: tuple[str, str], mode: int, experts: int = E) -> list:
    """Inputs of `_expand_cuda.experts`, shared as `mode` says."""
    rng = np.random.default_rng(rows)
    down = (formats[0], random_planes(rng, formats[0], experts, C, F))
    chosen = np.sort(np.argsort(rng.random((rows, experts)), axis=1)[:, :K], axis=1).astype(np.int32)
    weight = (formats[1], random_planes(rng, formats[1], C, 2 * F))
    shared = {0: None, 1: normal(4, rows, C), 2: (normal(5, rows, 2 * F), weight)}[mode]
    streams = normal(1, rows, M, C), normal(2, rows, M + M * M, dtype=mx.float32)
    return [normal(3, rows, K, F), down, mx.array(chosen), shared, *streams]


def both_orders(inputs: list) -> list[mx.array]:
    """Results of the one launch, from the first block to the last and the other way; the tickets stay zeros."""
    launches = []
    with watch_launches(launches.append):
        _expand_cuda.experts(*inputs, _kernel.tickets())
    (item,) = launches
    assert item.kernel.name == "expand_experts_few_mma"
    return [item.outputs[0], launch(item.kernel, item.inputs, item.call, step=-1)[0]]


def check(inputs: list) -> mx.array:
    want = run(lambda: _expand_cuda.experts(*inputs))
    assert not mx.any(mx.isnan(want))
    for got in both_orders(inputs):
        assert mx.array_equal(got, want)
    return want


def plan_of(inputs: list) -> tuple[int, list[list[int]]]:
    """Tiles of a part of the experts' blocks, and the parts that each block of the shared matrix lies across."""
    a, (_, planes), chosen, *_ = inputs
    _, template, blocks, _ = _quant_cuda.down_call(a, *inputs[1], *inputs[2:4])
    group = max(dict(template)["HELD_ROWS"], 1)
    groups = sum(-(-n // group) for n in np.bincount(np.array(chosen).reshape(-1)).tolist())
    tiles, S = -(-planes["codes"].shape[1] // 16), _quant_cuda.DOWN_WARPS
    span = S * -(-tiles // (S * max(blocks // (groups + 1), 1)))
    apart = min(max(blocks - -(-tiles // span) * groups, 1), tiles)
    ends = [i * tiles // apart for i in range(apart + 1)]
    return span, [list(range(b // span, (e - 1) // span + 1)) for b, e in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    "formats",
    [("Q8_0", "Q8_0"), ("Q4_K", "Q4_K"), ("Q2_K", "Q8_0"), ("IQ2_XXS", "MXFP4"), ("MXFP4", "IQ2_XXS"), ("FP8", "FP8")],
)
def test_bits_of_two_launches(on_cpu, monkeypatch, formats):
    """A row alone as among eight; one tile a warp, or several; an expert's pairs in one group, in two, or where they
    lie."""
    inputs = arrays(8, 160, 1024, formats, 2)
    want = check(inputs)
    a, down, chosen, (s, shared), h, mix = inputs
    for row in (slice(2, 3), slice(4, 8)):
        assert mx.array_equal(check([a[row], down, chosen[row], (s[row], shared), h[row], mix[row]]), want[row])
    monkeypatch.setattr(_quant_cuda, "SMS", 20)  # enough for as many warps to a shared tile as above
    monkeypatch.setattr(_quant_cuda, "_DOWN_BLOCKS", 1)
    monkeypatch.setattr(_quant_cuda, "_DOWN_ROUNDS", 1)
    grid = 4096 * ("IQ2_XXS" in formats)
    for held in (_quant_cuda._DOWN_HELD, 8448 + grid):
        monkeypatch.setattr(_quant_cuda, "_DOWN_HELD", held)
        assert mx.array_equal(check(inputs), want)
    monkeypatch.setattr(_quant_cuda, "_DOWN_HELD", 512 + grid)  # room for the sums of a row's columns alone
    check([a, down, chosen, None, h, mix])


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("C", [40, 67, 16, 1, 1000])
def test_what_is_added(on_cpu, C, mode):
    """Nothing, values, or a product; channels that are no whole tiles, and no whole strips of four."""
    for rows in (1, 4, 8):
        check(arrays(rows, C, 256, ("Q2_K", "Q8_0"), mode))


CROSSING = [(656, 9, 4, 8, 3), (656, 7, 8, 8, 5), (1296, 9, 8, 12, 4), (336, 6, 4, 4, 5)]


@pytest.mark.parametrize(("C", "sms", "rows", "span", "crossing"), CROSSING)
def test_shared_blocks_across_two_parts(on_cpu, monkeypatch, C, sms, rows, span, crossing):
    """A block may draw the last ticket of both."""
    monkeypatch.setattr(_quant_cuda, "SMS", sms)
    monkeypatch.setattr(_quant_cuda, "_DOWN_ROUNDS", 1)
    inputs = arrays(rows, C, 256, ("Q2_K", "Q8_0"), 2)
    tiles_of_a_part, parts = plan_of(inputs)
    assert (tiles_of_a_part, sum(len(across) == 2 for across in parts)) == (span, crossing)
    check(inputs)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("int arrivals = groups;", "int arrivals = groups + 1;", "leaves its input tickets"),
        ("- sharer_of(p * span) + 1;", "- sharer_of(p * span);", "leaves its input tickets"),
        ("if (is_last[threadIdx.x]) *ticket = 0;", "", "leaves its input tickets"),
        ("last_part = ((part + 1) * tiles / apart - 1) / span;", "", "leaves its input tickets"),
        ("is_last[p - first_part]", "is_last[0]", "wrong result"),
    ],
)
def test_a_lost_arrival_is_noticed(on_cpu, monkeypatch, old, new, found):
    monkeypatch.setattr(_quant_cuda, "SMS", CROSSING[1][1])
    monkeypatch.setattr(_quant_cuda, "_DOWN_ROUNDS", 1)
    inputs = arrays(CROSSING[1][2], CROSSING[1][0], 256, ("Q2_K", "Q8_0"), 2)
    want = run(lambda: _expand_cuda.experts(*inputs))
    source = _expand_cuda._experts.cuda_source
    assert source.count(old) == 1, "the kernel changed: write the mutation anew"
    monkeypatch.setitem(_expand_cuda._experts.__dict__, "cuda_source", source.replace(old, new))
    try:
        right = all(mx.array_equal(got, want) for got in both_orders(inputs))
    except ValueError as error:
        assert found in str(error)
    else:
        assert (found, right) == ("wrong result", False)


def test_arrivals_of_any_plan():
    """However many blocks, tiles and groups there are: a block of the shared matrix lies across two parts at most, and
    each part's last block counts as many of them as there are."""
    for blocks in (2, 7, 16, 60, 100, 792, 1584):
        for groups in range(1, min(blocks, 49)):
            for tiles in (1, 3, 4, 5, 41, 64, 320):
                wanted = 4 * max(blocks // (groups + 1), 1)
                rounds = -(-tiles // wanted)
                span = 4 * rounds
                each = -(-tiles // span)
                apart = min(max(blocks - each * groups, 1), tiles)
                assert apart + each * groups <= blocks
                crossed = [0] * each
                for i in range(apart):
                    first, last = i * tiles // apart // span, ((i + 1) * tiles // apart - 1) // span
                    assert first <= last <= first + 1
                    for p in range(first, last + 1):
                        crossed[p] += 1

                def sharer(tile, apart=apart, tiles=tiles):
                    return ((tile + 1) * apart - 1) // tiles

                for p in range(each):
                    assert crossed[p] == sharer(min((p + 1) * span, tiles) - 1) - sharer(p * span) + 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_public_op(case, on_cpu, monkeypatch):
    """One launch; two where there are no tickets or too few."""
    monkeypatch.setattr(expand_matmul, "backend", lambda: "cuda")
    monkeypatch.setattr(expand_matmul, "enabled", lambda family: True)
    inputs = case.inputs(np.random.default_rng(0))
    launches = []
    with watch_launches(launches.append):
        got = case.fn(*inputs)
        for counts in (mx.zeros(1, dtype=mx.int32), None):
            monkeypatch.setattr(expand_matmul, "tickets", lambda counts=counts: counts)
            assert mx.array_equal(case.fn(*inputs), got)
    two = ["expert_down_few_mma", "expand_sum_pairs"]
    assert [item.kernel.name for item in launches] == ["expand_experts_few_mma", *two, *two]
    assert compare(got, case.reference(*inputs), case.tolerance)[0] is None
