"""Routed experts: float64 values, independence of rows, shared and saved reads, sorting, edges, the small model."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import _expert_sources, _kernel, expert_matmul
from mlx_ds4.custom_kernels._count import count_launches, count_primitives
from mlx_ds4.custom_kernels._kernel import emulator_missing
from mlx_ds4.custom_kernels._random_planes import random_planes
from mlx_ds4.custom_kernels._switches import disable, families, use_kernels
from mlx_ds4.custom_kernels.expert_matmul import expert_down, expert_down_ref, expert_swiglu, expert_swiglu_ref
from mlx_ds4.formats import planes as block_planes
from tests.golden_tools import golden
from tests.kernels import mutants

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]
E, C, F, LIMIT = 7, 96, 64, 3.0


def weights_of(format: str, *shape: int, seed: int = 0):
    return format, random_planes(np.random.default_rng(seed), format, *shape)


def gate_up_down(*formats: str):
    shapes = [(E, F, C), (E, F, C), (E, C, F)]
    return [weights_of(f, *s, seed=i) for i, (f, s) in enumerate(zip(formats, shapes, strict=True))]


def rows_of(N: int, K: int, seed: int = 1):
    """x, a, the shared expert's a and matrix, chosen and weights; chosen is distinct and ascending in a row."""
    rng = np.random.default_rng(seed)
    x, a, s = (
        mx.array(rng.standard_normal(shape).astype(np.float32)).astype(mx.bfloat16)
        for shape in ((N, C), (N, K, F), (N, F))
    )
    shared = (s, weights_of("Q8_0", C, F, seed=9))
    chosen = np.sort(np.argsort(rng.random((N, E)), axis=1)[:, :K], axis=1)
    return x, a, shared, mx.array(chosen.astype(np.int32)), mx.array(rng.random((N, K), dtype=np.float32))


def emulate(mode: str = "emulate"):
    return use_kernels("emulate", checked=False) if mode == "emulate" else use_kernels(mode)


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item()


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def rounded(x: np.ndarray) -> np.ndarray:
    return float64(mx.array(x.astype(np.float32)).astype(mx.bfloat16))


def values(weight) -> np.ndarray:
    format, planes = weight
    return float64(block_planes.dequantize(format, planes))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("N", "K"), [(1, 1), (1, 6), (2, 5), (4, 3), (8, 6), (9, 2), (40, 1)])
@pytest.mark.parametrize("formats", [("Q8_0", "MXFP4", "Q8_0"), ("BF16", "BF16", "BF16")])
def test_against_float64(formats, N, K, mode):
    gate, up, down = gate_up_down(*formats)
    x, a, shared, chosen, weights = rows_of(N, K)
    with emulate(mode):
        first = expert_swiglu(x, gate, up, chosen, weights, limit=LIMIT)
        second = expert_down(a, down, chosen, shared)
        alone = expert_down(a, down, chosen)
    index = np.array(chosen)
    g, u = (rounded(np.einsum("nc,nkfc->nkf", float64(x), values(w)[index])) for w in (gate, up))
    g, u = np.minimum(g, LIMIT), np.clip(u, -LIMIT, LIMIT)
    want = float64(weights)[..., None] * g / (1 + np.exp(-g)) * u
    parts = rounded(np.einsum("nkf,nkcf->nkc", float64(a), values(down)[index])).sum(1)
    assert first.shape == (N, K, F) and second.shape == alone.shape == (N, C)
    # A product that float32 rounds to the other side is a unit in the last place of bfloat16, rarely.
    last = rounded(float64(shared[0]) @ values(shared[1]).T)
    for got, exact in ((first, want), (second, parts + last), (alone, parts)):
        apart = np.abs(float64(got) - exact)
        assert np.all(apart <= 2.0**-6 * np.abs(exact).max())
        assert np.mean(apart <= 2.0**-8 * np.abs(exact) + 1e-30) >= 0.98


@pytest.mark.parametrize("mode", MODES)
def test_the_clamps_are_reached(mode):
    """With a limit that most products pass, the gate is cut above only and up on both sides."""
    gate, up, _ = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    x, _, _, chosen, weights = rows_of(3, 2)
    with emulate(mode):
        small = expert_swiglu(100 * x, gate, up, chosen, weights, limit=0.5)
        large = expert_swiglu(100 * x, gate, up, chosen, weights, limit=1e9)
    assert mx.abs(small).max() <= 0.5 and mx.abs(large).max() > 50  # silu(0.5) * 0.5 is the most
    assert mx.array_equal(small == 0, large == 0)


@needs_emulator
def test_a_row_does_not_depend_on_its_neighbours(monkeypatch):
    """The same bits alone and among eight rows that share experts, whatever each simdgroup takes."""
    gate, up, down = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    x, a, shared, chosen, weights = rows_of(8, 3)
    x[2], a[2], shared[0][2] = 0, 0, 0
    chosen[4:] = chosen[4]  # one expert with five rows or more, others with one
    with emulate():
        for most in (1, 2):
            monkeypatch.setattr(expert_matmul, "rows_per_simdgroup", lambda *_, most=most: most)
            first = expert_swiglu(x, gate, up, chosen, weights, limit=LIMIT)
            second = expert_down(a, down, chosen, shared)
            for i in range(8):
                row = slice(i, i + 1)
                assert same_bits(expert_swiglu(x[row], gate, up, chosen[row], weights[row], limit=LIMIT), first[row])
                assert same_bits(expert_down(a[row], down, chosen[row], (shared[0][row], shared[1])), second[row])
    assert mx.all(first[2] == 0) and mx.all(second[2] == 0) and not mx.any(mx.all(first[3:] == 0, axis=-1))


@needs_emulator
def test_a_shared_expert_is_read_once_and_others_never():
    """Bytes that the kernels read: of three rows on one expert as of one row; nothing of experts without rows."""
    gate, up, down = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    reads = []
    for rows in (1, 3):
        x, a, shared, _, weights = rows_of(rows, 2)
        chosen = mx.array([[1, 4]] * rows, dtype=mx.int32)
        for name, call in (
            ("gate_codes", lambda x=x, w=weights, c=chosen: expert_swiglu(x, gate, up, c, w, limit=LIMIT)),
            ("codes", lambda a=a, s=shared, c=chosen: expert_down(a, down, c, s)),
        ):
            with use_kernels("emulate"):
                call()
            planes = _kernel.emulator().last_stats().buffers[name]
            assert planes.distinct_read == planes.size * 2 // E
            reads.append(planes.read)
    assert reads == [E_BYTES := 2 * F * C, E_BYTES, E_BYTES, E_BYTES]


@needs_emulator
@pytest.mark.parametrize("N", [1, 3, 8])
def test_the_shared_expert_is_one_expert_more(N):
    """The same bits as an expert with the highest number that every row chooses; and in one launch."""
    down = weights_of("Q8_0", E, C, F)
    _, a, (s, weight), chosen, _ = rows_of(N, 3)
    more = ("Q8_0", {name: mx.concatenate([plane, weight[1][name][None]]) for name, plane in down[1].items()})
    all_chosen = mx.concatenate([chosen, mx.full((N, 1), E, dtype=mx.int32)], axis=1)
    with use_kernels("emulate"), count_launches() as launches:
        got = expert_down(a, down, chosen, (s, weight))
        want = expert_down(mx.concatenate([a, s[:, None]], axis=1), more, all_chosen)
    assert same_bits(got, want) and launches == {"expert_down": 2}


@needs_emulator
def test_tiles_of_experts_without_rows_read_nothing():
    x, a, _, _, weights = rows_of(12, 3)
    gate, up, down = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    chosen = mx.array([[0, 2, 5]] * 12, dtype=mx.int32)
    read = []
    with use_kernels("emulate"):
        expert_swiglu(x, gate, up, chosen, weights, limit=LIMIT)
        read.append(_kernel.emulator().last_stats().buffers["gate_codes"])
        expert_down(a, down, chosen)
        read.append(_kernel.emulator().last_stats().buffers["codes"])
    assert all(b.distinct_read == b.size * 3 // E for b in read)
    assert read[0].read == read[0].distinct_read  # 12 rows are one tile, 64 outputs two: each weight is read once


def test_plan():
    """Pairs sorted by expert; each expert's pairs and tiles of 32 begin where the last one's end."""
    rng = np.random.default_rng(3)
    chosen = rng.choice(9, (50, 4), p=[0.5, *[0.5 / 7] * 7, 0]).astype(np.int32)
    order, starts, tile_starts, tiles = expert_matmul._plan(mx.array(chosen), 9)
    flat, counts = chosen.reshape(-1), np.bincount(chosen.reshape(-1), minlength=9)
    assert sorted(order.tolist()) == list(range(200)) and np.all(np.diff(flat[np.array(order)]) >= 0)
    assert starts.tolist() == [0, *np.cumsum(counts)]
    assert tile_starts.tolist() == [0, *np.cumsum(-(-counts // 32))]
    assert tile_starts[-1].item() <= tiles == 200 // 32 + 9


@needs_emulator
def test_a_layer_plans_once(nano_k, monkeypatch):
    """Both products of many rows share a plan; few rows and the reference make none."""
    calls, plan = [], expert_matmul._plan
    monkeypatch.setattr(expert_matmul, "_plan", lambda *args: calls.append(args) or plan(*args))
    ids = mx.zeros((1, 9), dtype=mx.int32)
    for mode, rows, times in (("emulate", 9, len(nano_k.layers)), ("emulate", 8, 0), ("reference", 9, 0)):
        with emulate(mode), disable(*[name for name in families() if name != "expert_matmul"]):
            mx.eval(nano_k(ids[:, :rows], nano_k.make_cache()))
        assert len(calls) == times
        calls.clear()


@needs_emulator
def test_a_plan_made_before_gives_the_same_bits():
    gate, up, down = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    x, a, shared, chosen, weights = rows_of(20, 3)
    with emulate():
        plan = expert_matmul.plan_pairs(chosen, E)
        first = expert_swiglu(x, gate, up, chosen, weights, limit=LIMIT)
        assert same_bits(expert_swiglu(x, gate, up, chosen, weights, limit=LIMIT, plan=plan), first)
        assert same_bits(expert_down(a, down, chosen, shared, plan=plan), expert_down(a, down, chosen, shared))


@needs_emulator
def test_which_kernels_are_launched():
    gate, up, down = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    for rows, chosen, suffix in ((8, 7, ""), (9, 1, "_tile")):
        x, a, shared, choice, weights = rows_of(rows, chosen)
        with emulate(), count_launches() as launches:
            expert_swiglu(x, gate, up, choice, weights, limit=LIMIT)
            expert_down(a, down, choice, shared)
            with disable("expert_matmul"):
                expert_down(a, down, choice, shared)
        products = {"quant_tile": 1} if suffix else {}  # of many rows, the shared expert's is one of its own
        assert launches == {f"expert_gate_up{suffix}": 1, f"expert_down{suffix}": 1} | products
    # Nothing of a decoding step runs beside the two launches.
    x, a, shared, choice, weights = rows_of(2, 6)

    def step():
        return expert_swiglu(x, gate, up, choice, weights, limit=LIMIT), expert_down(a, down, choice, shared)

    mx.eval(x, a, shared, choice, weights, gate, up, down, step())
    with use_kernels("auto"):
        assert count_primitives(step) == {"expert_gate_up": 1, "expert_down": 1}


def test_the_reference_keeps_one_expert_alive(monkeypatch):
    """Beyond a few pairs every dequantized weight is one matrix; gathered pairs give the same bits."""
    gate, up, down = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    x, a, shared, chosen, weights = rows_of(4, 2)
    gathered = expert_swiglu_ref(x, gate, up, chosen, weights, limit=LIMIT), expert_down_ref(a, down, chosen, shared)
    seen, original = [], block_planes.dequantize
    monkeypatch.setattr(
        block_planes, "dequantize", lambda name, planes: seen.append(planes["codes"].ndim) or original(name, planes)
    )
    monkeypatch.setattr(expert_matmul, "_GATHERED_PAIRS", 0)
    single = expert_swiglu_ref(x, gate, up, chosen, weights, limit=LIMIT), expert_down_ref(a, down, chosen, shared)
    assert all(mx.allclose(a, b, rtol=2.0**-7) for a, b in zip(gathered, single, strict=True))
    assert set(seen) == {2} and len(seen) == 3 * np.unique(np.array(chosen)).size + 1  # the shared one's


@pytest.mark.parametrize("mode", MODES)
def test_empty(mode):
    x, a, shared, chosen, weights = rows_of(0, 3)
    gate, up, down = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    with emulate(mode), count_launches() as launches:
        assert expert_swiglu(x, gate, up, chosen, weights, limit=LIMIT).shape == (0, 3, F)
        assert expert_down(a, down, chosen, shared).shape == (0, C)
        assert expert_down(a, weights_of("BF16", E, C, F), chosen).shape == (0, C)
    assert not launches


def test_wrong_inputs():
    x, a, _, chosen, weights = rows_of(2, 2)
    gate, up, down = gate_up_down("Q8_0", "MXFP4", "Q8_0")
    with pytest.raises(ValueError, match="width 96, expected the weight's 64"):
        expert_swiglu(x, gate, down, chosen, weights, limit=LIMIT)
    with pytest.raises(ValueError, match="width 64, expected the weight's 96"):
        expert_down(a, up, chosen)
    with pytest.raises(ValueError, match="format 'Q9', expected one of"):
        expert_down(a, ("Q9", down[1]), chosen)


def test_weight_rows_are_64_bit():
    """An expert's first row times its octets passes 2^32: rows are made from `ulong` factors in every kernel."""
    assert _expert_sources.FEW_HEADER.count("ulong(e) * ulong(outputs)") == 2
    assert "ulong base = ulong(e) * ulong(outputs);" in _expert_sources._TILE
    for text in (_expert_sources.FEW_HEADER, _expert_sources.GATE_UP_TILE_SOURCE, _expert_sources.DOWN_TILE_SOURCE):
        assert " e * outputs" not in text and "uint row" not in text


MUTATIONS = [
    # (kernel, its part, text, what replaces it, what is found)
    ("gate_up", "source", "uint(metal::ctz(mask)) < p || ", "", "race"),  # every pair's groups write
    (
        "gate_up",
        "source",
        "lane < pairs ? one : -1",
        "lane < 32u ? one : -1",
        "out-of-bounds",
    ),  # lanes without a pair vote
    ("down", "header", "m < count && lane ==", "lane ==", "wrong result"),  # the last row of a list again
    ("down", "source", "two > e ? two : none", "two", "out-of-bounds"),  # the same expert for ever
    ("down", "source", "- 1ul, pairs / K", "- 1ul, MOST", "wrong result"),  # rows that are not there
]


@needs_emulator
@pytest.mark.parametrize(("which", "part", "old", "new", "found"), MUTATIONS)
def test_a_lost_guard_is_noticed(which, part, old, new, found, monkeypatch):
    mutants.plant(monkeypatch, getattr(expert_matmul, f"_{which}_kernel"), old, new, part=part)
    case = next(c for c in expert_matmul.cases() if "6x3_of_8" in c.name)
    assert mutants.found(case) == found


@needs_emulator
def test_emulated_tokens_equal_the_reference(nano_k):
    """K-quant layers: a short prompt (few-row kernels), three steps, with only the products' kernels emulated."""
    ids = golden("nano_k", "e2e")["A4.ids"]
    others = [name for name in families() if name not in ("quant_matmul", "expert_matmul")]

    def generate() -> list[int]:
        cache, tokens, new = nano_k.make_cache(), [], ids[None]
        for _ in range(4):
            tokens.append(mx.argmax(nano_k(new, cache)[0, -1]).item())
            new = mx.array([tokens[-1:]])
        return tokens

    with use_kernels("reference"):
        want = generate()
    with emulate(), disable(*others), count_launches() as launches:
        got = generate()
    assert got == want == golden("nano_k", "e2e")["A4.decode_tokens"].tolist()[:4]
    assert launches["expert_gate_up"] and launches["expert_down"] and launches["quant_rows"]
