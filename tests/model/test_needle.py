"""A needle at the level of the modules: rows whose attention depends on one entry among up to 200,000 of the cache.

Four layers in one pass: A publishes candidates and a selection (0), B reuses it (1), C scores only the candidates (2),
D reuses that (3). The cache is filled directly. Three kinds of entries are planted for the queries that the modules
themselves compute:

* each row's `first`, which layer 0 must find by its score,
* each row's `second` in the same block, which layer 2 finds if layer 0 made the block a candidate,
* `newest` for row 0, in its newest block, which layer 0 scores low: only the pin of that block makes it a candidate.

Against them stand decoys that win without rectification, and whole blocks that layer 2 would prefer but that are no
candidates. The planted value rows attract heads of the layers that shall attend to them, so that these heads' output is
the needle's value; a second sequence has them negated, which shows whether the output depends on them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

from mlx_ds4.cache import LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels import index_topk
from mlx_ds4.custom_kernels.fake_quant import fake_quant_fp4, fake_quant_fp4_e4m3
from mlx_ds4.custom_kernels.hyper_connection import SiteSums
from mlx_ds4.custom_kernels.rope import rope
from mlx_ds4.formats.quant_blocks import E2M1
from mlx_ds4.model import indexer as indexer_module
from mlx_ds4.model.attention import Attention
from mlx_ds4.model.step import Step

# ---- all that this file knows of the cache ---------------------------------------------------------------


def filled_caches(config: ModelConfig, keys: mx.array, rows: mx.array, length: int) -> list[LayerCache]:
    """Caches of all layers before a step of `length` rows; the owner's holds index keys and value rows [B, S, width].
    The window is empty."""
    caches = [LayerCache(config, layer) for layer in range(config.num_hidden_layers)]
    caches[0].index_keys.append(keys)
    caches[0].compressed.append(rows)
    for cache in caches:
        cache.begin(keys.shape[0], keys.shape[1], length)
    return caches


# ---- the haystack ------------------------------------------------------------------------------------------

CONFIG = ModelConfig(
    vocab_size=8, hidden_size=64, num_hidden_layers=4, moe_intermediate_size=32, num_attention_heads=4, head_dim=64,
    qk_rope_head_dim=32, q_lora_rank=64, o_lora_rank=32, o_groups=2, sliding_window=16, n_routed_experts=2,
    num_experts_per_tok=1, routed_scaling_factor=1.0, swiglu_limit=10.0, compress_ratios=(1, 1, 1, 1),
    kv_source_layer_ids=(0,), index_source_layer_ids=(0, 2), index_n_heads=4, index_head_dim=64, index_topk=512,
    candidate_source_layer_id=0, candidate_topk_blocks=2048, candidate_block_size=8, rope_theta=10000.0,
    compress_rope_theta=160000.0, rope_factor=16.0, rope_beta_fast=32.0, rope_beta_slow=1.0, rope_original_length=65536,
)  # fmt: skip
BLOCK, TOP, CANDIDATES = CONFIG.candidate_block_size, CONFIG.index_topk, CONFIG.candidate_topk_blocks
LIKED, SIGNS = 24.0, np.array([1, 1, -1, -1])  # head weights have these signs
ALL, EVEN, ODD = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]])  # attention heads that ask for a needle
SIZES = (1_004, 20_004, 200_004)  # entries before the step; the newest block is half full


@functools.cache
def layers() -> list[Attention]:
    """Four attention modules of random weights."""
    rng = np.random.default_rng(1)

    def draw(path: str, old: mx.array) -> mx.array:
        if path.endswith("k_norm.weight"):  # new entries matter to no index
            return mx.full(old.shape, 0.01, dtype=mx.bfloat16)
        if path.endswith("norm.weight"):
            return mx.ones(old.shape, dtype=mx.bfloat16)
        values = rng.standard_normal(old.shape) / np.sqrt(old.shape[-1])
        if path.endswith("weights_proj.weight"):
            values = 0.02 * values
            values[:, 0] = SIGNS
        return mx.array(0 * values if path == "attn_sink" else values).astype(old.dtype)

    out = [Attention(CONFIG, layer) for layer in range(4)]
    for attention in out:
        attention.update(tree_map_with_path(draw, attention.parameters()))
    return out


@dataclass
class Haystack:
    inputs: list[mx.array]  # of each layer, [2, L, C]
    keys: mx.array
    rows: mx.array
    first: np.ndarray  # places [L]
    second: np.ndarray
    newest: int


@functools.cache
def haystack(size: int, length: int) -> Haystack:
    """Index keys and value rows of two sequences: keys are the same, planted values are negated in the second."""
    rng = np.random.default_rng(size + length)
    inputs = [rng.standard_normal((length, CONFIG.hidden_size)) for _ in range(4)]
    for x in inputs:
        x[:, 0] = 4  # where the head weights come from
    inputs = [mx.array(np.tile(x, (2, 1, 1))).astype(mx.bfloat16) for x in inputs]
    index, heads = queries(inputs, size, length)

    # Values that FP4 holds; what is planted among them is rounded to it.
    keys, rows = (E2M1[rng.integers(0, 16, (size, 64), np.uint8)] / 16 for _ in range(2))
    blocks = size // BLOCK  # whole ones
    beyond = CANDIDATES + 10 if blocks > CANDIDATES else TOP // BLOCK + 2
    needles = beyond + rng.choice(blocks - beyond, length, replace=False)
    others = rng.permutation(np.setdiff1d(np.arange(blocks), needles))
    first, second, newest = needles * BLOCK + 3, needles * BLOCK + 5, size - 2
    liked, hidden = LIKED * (SIGNS > 0), -LIKED / 4 * SIGNS
    last = length - 1
    plant(keys, first, [answering((q, liked)) for q in index[0]])
    plant(keys, second, [answering((q, liked)) for q in index[2]])
    keys[size - BLOCK // 2 :] = 0
    plant(keys, [newest], [answering((index[0][0], hidden), (index[2][0], 2.5 * liked))])
    # Strongly negative products under negative weights: the best of all without rectification, else nothing.
    decoy = answering((index[0][last], np.where(SIGNS > 0, -LIKED / 4, -3 * LIKED)))
    if blocks > CANDIDATES:
        preferred = answering((index[0][last], hidden), (index[2][last], 2 * liked))
        late = others >= beyond
        places = (others[late][:80, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        plant(keys, places, preferred + rng.standard_normal((len(places), 64)) / 16)
        others = np.concatenate([others[late][80:], others[~late]])
        plant(keys, others[: CANDIDATES + 150] * BLOCK + 1, decoy)
    else:
        plant(keys, (others[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[: TOP + 60], decoy)

    attracted = 12 / CONFIG.head_dim**-0.5
    for places, readers, which in ((first, (0, 1), ALL), (second, (2, 3), EVEN), ([newest], (2, 3), ODD)):
        wishes = [answering(*((heads[r][row], attracted * which) for r in readers)) for row in range(len(places))]
        plant(rows, places, wishes, fake_quant_fp4_e4m3)
    rows = np.stack([rows] * 2)
    rows[1, [*first, *second, newest]] *= -1
    keys = mx.array(keys).astype(mx.bfloat16)
    return Haystack(
        inputs, mx.broadcast_to(keys, (2, *keys.shape)), mx.array(rows).astype(mx.bfloat16), first, second, newest
    )


def plant(values: np.ndarray, places, wanted, rounded=fake_quant_fp4) -> None:
    wanted = np.broadcast_to(np.asarray(wanted, np.float32), (len(places), values.shape[1]))
    values[places] = np.array(rounded(mx.array(wanted).astype(mx.bfloat16)).astype(mx.float32))


def queries(inputs: list[mx.array], start: int, length: int) -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
    """Index queries of the layers that have them, and attention queries of all, [L, heads, width] each."""
    step = Step(CONFIG, start, length)
    index, heads = {}, []
    for layer, (attention, x) in enumerate(zip(layers(), inputs, strict=True)):
        x = x[:1]
        low = attention.q_norm(attention.wq_a(x))
        q = attention.wq_b(low).reshape(1, length, CONFIG.num_attention_heads, CONFIG.head_dim)
        heads.append(np.array(rope(q, *step.rotation(1))[0].astype(mx.float32)))
        if CONFIG.owns_index(layer):
            q = attention.indexer.queries(attention.indexer.wq_b(low), step)
            weights = attention.indexer.weights_proj(x)
            assert (np.sign(np.array(weights.astype(mx.float32))) == SIGNS).all()
            index[layer] = np.array(q[0].astype(mx.float32))
    return index, heads


def answering(*wishes: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The shortest vector with the given products: (queries [H, D], products [H]) ..."""
    return np.linalg.pinv(np.concatenate([q for q, _ in wishes])) @ np.concatenate([p for _, p in wishes])


def any_streams(*leading: int) -> tuple[mx.array, SiteSums]:
    """What the layers' results are added to, and how, on which nothing here depends."""
    M, C = CONFIG.hc_mult, CONFIG.hidden_size
    O = M * (M + 2)
    sums = SiteSums(mx.zeros((*leading, 1, O + 1)), mx.zeros(O), mx.zeros(3), M * C, iters=1, eps=1e-6, norm_eps=1e-20)
    return mx.zeros((*leading, M, C), dtype=mx.bfloat16), sums


def retrieved(hay: Haystack, size: int, length: int) -> dict[str, np.ndarray]:
    """Needle -> whether each row that asks for it has it in its selection; then both layers' outputs depend on it."""
    caches, trace = filled_caches(CONFIG, hay.keys, hay.rows, length), {}
    step = Step(CONFIG, size, length, trace)
    streams = any_streams(2, length)
    selections = []
    for layer, (attention, x) in enumerate(zip(layers(), hay.inputs, strict=True)):
        step.layer = layer
        attention(x, step, caches[layer], *streams)
        selections.append(np.array(step.selection))
    outputs = [np.array(trace[f"L{layer}.attn.o"].astype(mx.float32)) for layer in range(4)]
    np.testing.assert_array_equal(selections[0], selections[1])
    np.testing.assert_array_equal(selections[2], selections[3])
    values = np.array(hay.rows[0].astype(mx.float32))
    found = {}
    for name, places, layer, which in (
        ("first", hay.first, 0, ALL), ("second", hay.second, 2, EVEN), ("newest", [hay.newest], 2, ODD),
    ):  # fmt: skip
        count = len(places)  # the rows that ask for it
        chosen = (selections[layer][:, :count] == np.array(places)[:, None]).any(axis=-1)
        assert (chosen == chosen[0]).all()  # the sequences differ in values only
        found[name] = chosen[0]
        for reader in (layer, layer + 1):
            change = outputs[reader][0, :count] - outputs[reader][1, :count]
            change = np.linalg.norm(change, axis=-1) / np.linalg.norm(values[places], axis=-1)[:, None]
            assert (change[chosen[0]][:, which > 0] > 0.5).all(), (name, reader, change)
    return found


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("size", SIZES)
def test_the_needle_is_found(size, length):
    found = retrieved(haystack(size, length), size, length)
    assert {name: rows.all() for name, rows in found.items()} == {"first": True, "second": True, "newest": True}


# ---- what must lose it ----------------------------------------------------------------------------------------


def without_rectification(q, weights, *rest, real=index_topk.index_scores, **options):
    return real(q, weights, *rest, **options) - real(-q, weights, *rest, **options)  # max(a, 0) - max(-a, 0) = a


def first_ones(scores: mx.array) -> mx.array:
    return mx.where(mx.isfinite(scores), -mx.arange(scores.shape[-1], dtype=mx.float32), -mx.inf)


def first_entries(scores, *rest, real=index_topk.top_k, **options):
    return real(first_ones(scores), *rest, **options)


def first_blocks(scores, *rest, real=indexer_module.top_k_groups, **options):
    return real(first_ones(scores), *rest, **options)


def without_the_newest_block(scores, visible, *rest, real=indexer_module.top_k_groups, **options):
    return real(scores, mx.zeros_like(visible), *rest, **options)


# name -> (what is replaced, by what, needles that it loses)
MUTATIONS = {
    "no rectification": ("index_scores", without_rectification, {"first", "second"}),
    "the first 512 entries": ("top_k", first_entries, {"first", "second", "newest"}),
    "the first blocks": ("top_k_groups", first_blocks, {"second"}),
    "newest block not pinned": ("top_k_groups", without_the_newest_block, {"newest"}),
    "candidates ignored": (None, None, {"second"}),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize(("size", "length"), [(SIZES[1], 1), (SIZES[1], 9), (SIZES[2], 1)])
def test_mutations_lose_the_needle(monkeypatch, size, length, mutation):
    name, replacement, lost = MUTATIONS[mutation]
    if name is None:
        monkeypatch.setattr(layers()[2].indexer, "_restricted", False)
    else:
        monkeypatch.setattr(indexer_module if name == "top_k_groups" else index_topk, name, replacement)
    found = retrieved(haystack(size, length), size, length)
    assert {needle for needle, rows in found.items() if not rows[-1]} == lost


@pytest.mark.parametrize("length", [1, 9])
def test_mutations_lose_the_needle_without_candidates(monkeypatch, length):
    """1,000 entries: there are no candidates yet, scores and top-k decide alone."""
    for name, replacement, lost in (
        ("index_scores", without_rectification, {"first"}),
        ("top_k", first_entries, {"first", "second", "newest"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(index_topk, name, replacement)
            found = retrieved(haystack(SIZES[0], length), SIZES[0], length)
        assert {needle for needle, rows in found.items() if not rows[-1]} == lost
