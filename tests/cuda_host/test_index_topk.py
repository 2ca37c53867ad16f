"""Scores and selection in one launch, as C++ on the CPU: the bits of `index_scores` and the indices of `top_k`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import _index_topk_cuda, _kernel, index_score, index_topk, topk
from mlx_ds4.custom_kernels._case import compare, outputs
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import Kernel, tickets, watch_launches
from mlx_ds4.custom_kernels._rows import SplitRows
from mlx_ds4.custom_kernels._switches import disable, use_kernels
from tests.cuda_host import COMPILER, launch
from tests.kernels.test_topk import expected, rows

pytestmark = pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the bodies: install it to run them")

CASES = [case for case in index_topk.cases() if not case.large]
STEPS = (1, -1, 7)  # from block to block
LONG = 1024  # in place of CHUNK: what the smallest instance of `topk` chooses from


@pytest.fixture
def cuda(on_cpu, monkeypatch):
    """The op takes the launch that only CUDA has; the rest is emulated."""
    for module in (index_topk, index_score, topk):
        monkeypatch.setattr(module, "enabled", lambda family: True)
    monkeypatch.setattr(index_topk, "backend", lambda: "cuda")
    with use_kernels("emulate", checked=False):
        yield


@pytest.fixture
def short_chunks(monkeypatch):
    for module in (index_topk, topk):
        monkeypatch.setattr(module, "CHUNK", LONG)


def normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(mx.bfloat16)


def arrays(L: int, S: int, *, lists: int = 0, seed: int = 0) -> list[mx.array]:
    """q, weights, keys in two parts, visible, and lists of blocks of 8: values with all their bits in use."""
    rng = np.random.default_rng(seed)
    keys = normal(rng, 1, S, 32)
    parts = SplitRows(keys, normal(rng, 1, 40, 32), mx.array([S - 30], dtype=mx.int32))
    visible = mx.array(np.linspace(S // 2, S + 9, L).astype(np.int32))
    blocks = np.sort(rng.integers(0, (S + 10) // 8, (1, L, lists)), axis=-1)
    blocks[:, -1, lists // 2 :] = -1
    given = [normal(rng, 1, L, 3, 32), normal(rng, 1, L, 3), parts, visible]
    return [*given, mx.array(blocks.astype(np.int32)) if lists else None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_launch(case, cuda):
    """In whatever order blocks come: and launch() sees that the tickets are zeros again."""
    given = case.inputs(np.random.default_rng(0))
    launches = []
    with watch_launches(launches.append):
        got = case.fn(*given)
    (item,) = launches
    assert item.kernel.name == "index_topk" and item.inputs[-1].shape == (_kernel.TICKETS,)
    want = outputs(case.reference(*given))
    for results in (got, *[launch(item.kernel, item.inputs, item.call, step=step)[::-1] for step in STEPS[1:]]):
        for g, w in zip(results, want, strict=True):
            assert compare(g, w, case.tolerance)[0] is None


@pytest.mark.parametrize("lists", [0, 30])
@pytest.mark.parametrize("L", [1, 8])
def test_bits_of_launches_of_their_own(L, lists, cuda):
    """Among others and alone."""
    given = arrays(L, 260, lists=lists)
    options = {"block_size": 8, "factor": 0.3}
    scores, index = index_topk.index_top_k(*given, k=40, counts=tickets(), **options)
    alone = index_score.index_scores(*given, **options)
    assert mx.array_equal(scores, alone)
    assert mx.array_equal(index, topk.top_k_ref(alone, 40, given[4], block_size=8))
    q, weights, keys, visible, blocks = given
    last = [q[:, -1:], weights[:, -1:], keys, visible[-1:], blocks[:, -1:] if lists else None]
    for one, whole in zip(
        index_topk.index_top_k(*last, k=40, counts=tickets(), **options), (scores, index), strict=True
    ):
        assert mx.array_equal(one, whole[:, -1:])


@pytest.mark.parametrize("S", [1000, 1024 - 40, 1025 - 40, 2900])
@pytest.mark.parametrize("k", [100, 400])
def test_a_row_of_several_chunks(S, k, cuda, short_chunks):
    """One launch more than chunks of winners take, in any order of blocks; the last chunk is short, or hidden."""
    given = arrays(1, S, seed=1)
    chunks = -(-(S + 40) // LONG)
    for visible in (S + 10, 500):
        given[3] = mx.array([visible], dtype=mx.int32)
        launches = []
        with watch_launches(launches.append):
            scores, index = index_topk.index_top_k(*given, k=k, counts=tickets())
        names = [item.kernel.name for item in launches]
        assert names == ["index_topk"] + ["topk"] * (0 if chunks == 1 else 1 if chunks * k <= LONG else 2)
        assert mx.array_equal(index, topk.top_k_ref(scores, k))
        assert mx.array_equal(scores, index_score.index_scores(*given))
        for step in STEPS[1:]:
            again = launch(launches[0].kernel, launches[0].inputs, launches[0].call, step=step)
            assert all(map(mx.array_equal, again, launches[0].outputs))


def test_lists_of_several_chunks(cuda, short_chunks):
    """The launch behind it says which entries the winners are."""
    given = arrays(1, 3000, lists=300, seed=2)
    with count_launches() as launches:
        scores, index = index_topk.index_top_k(*given, k=50, block_size=8, counts=tickets())
    assert launches == {"index_topk": 1, "topk": 1}
    assert mx.array_equal(index, topk.top_k_ref(scores, 50, given[4], block_size=8))


_choose = Kernel(
    "test_choose",
    ["scores"],
    ["index"],
    None,
    cuda_source="""
    unsigned* const sort_keys = (unsigned*)ds4_ptx::dynamic_shared();
    ds4_select::choose(
        scores + (size_t)blockIdx.x * scores_shape[1], scores_shape[1], K, sort_keys, (int*)(sort_keys + 16384),
        index + (size_t)blockIdx.x * K, [](int at) { return at; });
""",
    cuda_header=_index_topk_cuda.HEADER,
    shared_memory=_index_topk_cuda.BYTES,
    exact=True,
    family="test",
)


def chosen(x: np.ndarray, k: int) -> np.ndarray:
    call = {
        "template": [("K", k)],
        "grid": (256 * len(x), 1, 1),
        "threadgroup": (256, 1, 1),
        "output_shapes": [(len(x), k)],
        "output_dtypes": [mx.int32],
    }
    return np.array(launch(_choose, [mx.array(x)], call)[0])


@pytest.mark.parametrize("n", [1, 31, 33, 255, 257, 512, 513, 4095, 4097, 16_383, 16_384])
def test_the_choice_alone(n):
    """Normal scores, plateaus, few that may be chosen, random bits; NaN and -inf never are."""
    x = rows(n, n)
    for k in (1, 20, 512):
        want = np.full((len(x), k), -1)
        want[:, : min(k, n)] = expected(x, k)
        np.testing.assert_array_equal(chosen(x, k), want)


@pytest.mark.parametrize(
    "kind", ["equal", "two values", "long prefixes", "ascending", "hidden", "one more than wanted"]
)
def test_the_choice_of_hostile_rows(kind):
    rng, n = np.random.default_rng(3), 5000
    few = rng.integers(1, 1 << 31, 6, dtype=np.uint32)
    x = {
        "equal": np.zeros(n),
        "two values": rng.integers(0, 2, n) - 1.0,
        "long prefixes": (rng.choice(few, n) ^ rng.integers(0, 4, n, dtype=np.uint32)).view(np.float32),
        "ascending": np.arange(n) - 2500.0,
        "hidden": np.full(n, -np.inf),
        "one more than wanted": np.where(np.arange(n) % 9 == 0, np.arange(n) % 7, -np.inf)[: 9 * 513],
    }[kind].astype(np.float32)[None]
    for k in (1, 512, 2048):
        np.testing.assert_array_equal(chosen(x, k), expected(x, k))


def test_which_launches_it_takes(cuda, monkeypatch):
    one, six = arrays(1, 300), arrays(6, 300)
    many = [mx.repeat(array, 2, axis=1) for array in six[:2]] + [six[2], mx.repeat(six[3], 2), None]

    def names(given: list, **options) -> list[str]:
        launches = []
        with watch_launches(launches.append):
            index_topk.index_top_k(*given, **({"k": 20, "counts": tickets()} | options))
        return [item.kernel.name for item in launches]

    apart = ["index_score", "topk"]
    assert names(one) == names(six) == ["index_topk"]
    assert names(one, counts=None) == names(many) == apart
    assert names(one, counts=mx.zeros(0, dtype=mx.int32)) == apart
    assert names(one, bf16=True) == ["topk"]
    with monkeypatch.context() as patch:
        patch.setattr(_kernel, "block_bytes", lambda: 64 << 10)
        assert names(one) == apart
    for family in ("index_topk", "index_score", "topk"):
        with monkeypatch.context() as patch:
            patch.setattr(index_topk, "enabled", lambda name, family=family: name != family)
            assert names(one) == apart
    for module in (index_topk, topk):
        monkeypatch.setattr(module, "CHUNK", 256)
    assert names(six, k=1)[0] == "index_score" and names(one, k=1)[0] == "index_topk"


@pytest.mark.parametrize("rows", [1, 6])
def test_steps_of_the_model(nano, on_cpu, monkeypatch, rows):
    """All else by references: the index layers select the same entries, among all and among candidates, so logits are
    equal."""
    tokens = mx.array(np.random.default_rng(5).integers(0, nano.config.vocab_size, (1, 120 + rows)))

    def step() -> mx.array:
        cache = nano.make_cache()
        mx.eval(nano(tokens[:, :120], cache))
        return nano(tokens[:, 120:], cache)

    with use_kernels("reference"), disable("compiled_step"), count_launches() as launches:
        want = step()
        monkeypatch.setattr(index_topk, "backend", lambda: "cuda")
        monkeypatch.setattr(index_topk, "enabled", lambda family: True)
        assert not launches and mx.array_equal(step(), want)
    assert launches == {"index_topk": len(nano.config.index_source_layer_ids)}
