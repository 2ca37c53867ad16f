"""Every layer with golden inputs, within the class A limits: prefill and the three decode steps after it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.cache import LayerCache
from mlx_ds4.custom_kernels.topk import top_k_groups
from mlx_ds4.model.step import Step
from tests.golden_tools import (
    assert_close_to_largest,
    assert_equal,
    assert_one_ulp,
    equal_share,
    golden,
    row_cosine,
    row_error,
)

PHASES = ("prefill", "decode0", "decode1", "decode2")
# Our trace name -> the golden file's.
GOLDEN_NAMES = {"attn.kv": "attn.win_new", "ffn.logits": "ffn.z", "cand": "cand.mask", "engram.e": "engram.emb"}


def candidate_mask(blocks: mx.array, entries: int, size: int) -> np.ndarray:
    """bool [L, entries]: which entries lie in the listed blocks [L, n]."""
    mask = np.zeros((blocks.shape[0], entries), dtype=bool)
    for row, listed in zip(mask, blocks.tolist(), strict=True):
        for block in listed:
            row[block * size : (block + 1) * size] |= block >= 0
    return mask


def everywhere(compact: mx.array, blocks: mx.array, entries: int, size: int) -> mx.array:
    """Scores [L, n * size] of the entries of listed blocks [L, n], put in place of -inf in all entries [L, entries]."""
    scores = np.full((blocks.shape[0], entries), -np.inf, dtype=np.float32)
    for row, listed, values in zip(scores, blocks.tolist(), np.array(compact), strict=True):
        for block, part in zip(listed, values.reshape(-1, size), strict=True):
            if block >= 0:
                row[block * size : (block + 1) * size] = part[: entries - block * size]
            else:
                assert np.all(part == -np.inf)
    return mx.array(scores)


class Replay:
    """Runs all layers of one golden prompt, each with the reference's own inputs, and keeps what was computed."""

    def __init__(self, model, which: str):
        self.model, self.data = model, golden(which, "layers")
        self.config = model.config
        for layer in model.layers:
            if "indexer" in layer.attn:
                layer.attn.indexer.bf16_scores = True
        rows = self.data["prefill.L0.h_in"].shape[0]
        self.lengths = {"prefill": (0, rows), **{f"decode{i}": (rows + i, 1) for i in range(3)}}
        self.traces: dict[str, dict[str, mx.array]] = {}
        self.caches = caches = [LayerCache(self.config, layer) for layer in range(self.config.num_hidden_layers)]
        for phase in PHASES:
            self.traces[phase] = trace = {}
            step = Step(self.config, *self.lengths[phase], trace)
            for layer in range(self.config.num_hidden_layers):
                step.layer = layer
                h, pre = self.inputs(phase, layer)
                caches[layer].begin(1, *self.lengths[phase])
                model.layers[layer](h[None], pre[None], step, caches[layer])
                trace[f"L{layer}.ckv"] = _rows(caches[layer].compressed)
                trace[f"L{layer}.ikey"] = _rows(caches[layer].index_keys)
                if step.candidates is not None and self.config.publishes_candidates(layer):
                    trace[f"L{layer}.cand"] = step.candidates
        for layer in model.layers:
            if "indexer" in layer.attn:
                layer.attn.indexer.bf16_scores = False

    def want(self, phase: str, layer: int, name: str) -> mx.array | None:
        return self.data.get(f"{phase}.L{layer}.{GOLDEN_NAMES.get(name, name)}")

    def got(self, phase: str, layer: int, name: str) -> mx.array:
        return self.traces[phase][f"L{layer}.{name}"][0]

    def inputs(self, phase: str, layer: int) -> tuple[mx.array, mx.array]:
        h = self.want(phase, layer, "h_in")
        pre = self.want(phase, layer, "pre_in")
        if h is None:
            h = self.want(phase, layer - 1, "h_out")
        if pre is None:
            pre = self.want(phase, layer - 1, "ffn.pre")
        return h, pre


def _rows(rows):
    return rows.rows if rows is not None and rows.length else None


@pytest.fixture(scope="module")
def replays(nano, nano_k):
    return {"nano": Replay(nano, "nano"), "nano_k": Replay(nano_k, "nano_k")}


CASES = [
    (which, phase, layer)
    for which, count in (("nano", 10), ("nano_k", 2))
    for phase in PHASES
    for layer in range(count)
]


@pytest.mark.parametrize(("which", "phase", "layer"), CASES)
def test_layer_with_golden_inputs(replays, which, phase, layer):
    replay = replays[which]

    def both(name):
        return replay.got(phase, layer, name), replay.want(phase, layer, name)

    got, want = both("h_out")
    assert row_error(got, want) <= 0.012
    assert row_cosine(got, want) >= 0.9999
    assert equal_share(got, want) >= 0.95
    compared = {"h_out"}
    for name, limit in (("attn.y", 0.006), ("ffn.y", 0.04), ("attn.o", 0.006), ("attn.q", 0.006)):
        if replay.want(phase, layer, name) is not None:
            assert row_error(*both(name)) <= limit, name
            compared.add(name)
    for name in ("attn.pre", "attn.post", "attn.comb", "ffn.pre", "ffn.post", "ffn.comb", "ffn.logits"):
        if replay.want(phase, layer, name) is not None:
            limit = 4e-6 if name.startswith("attn") else 0.02  # the ffn site sees the attention's rounding noise
            assert_close_to_largest(*both(name), limit)
            compared.add(name)
    for name in ("attn.x", "attn.qr", "latent"):
        if replay.want(phase, layer, name) is not None and replay.want(phase, layer, name).size:
            assert_one_ulp(*both(name), share=0.98)
            compared.add(name)
    for name in ("attn.kv", "ckv", "ikey"):
        want = replay.want(phase, layer, name)
        if want is not None and want.size:
            got = replay.got(phase, layer, name)
            assert equal_share(got, want) >= 0.98, name
            assert row_error(got, want) <= 0.10, name
            compared.add(name)
    experts, weights = replay.want(phase, layer, "ffn.experts"), replay.want(phase, layer, "ffn.weights")
    order = mx.argsort(experts, axis=-1)
    assert_equal(replay.got(phase, layer, "ffn.experts"), mx.take_along_axis(experts, order, axis=-1))
    want = mx.take_along_axis(weights, order, axis=-1)
    assert_close_to_largest(replay.got(phase, layer, "ffn.weights"), want, 0.02)
    assert {"h_out", "attn.y", "ffn.y"} <= compared


@pytest.mark.parametrize(("which", "phase", "layer"), list(CASES))
def test_selection_and_candidates(replays, which, phase, layer):
    """Top-k lists exactly; scores and candidate masks where the reference publishes them."""
    replay = replays[which]
    config = replay.config
    if not config.owns_index(layer):
        assert replay.want(phase, layer, "topk") is None
        return
    want = replay.want(phase, layer, "topk")
    got = replay.got(phase, layer, "topk")
    # The reference marks an invisible entry in place; here the list is ascending with -1 at the end.
    for row in range(want.shape[0]):
        assert [i for i in got[row].tolist() if i >= 0] == [i for i in want[row].tolist() if i >= 0]
    mask = replay.want(phase, layer, "cand")
    if mask is not None:
        blocks = replay.traces[phase].get(f"L{layer}.cand")
        entries = mask.shape[-1]
        start, length = replay.lengths[phase]
        visible = (np.arange(start, start + length) + 1)[:, None] > np.arange(entries)
        ours = (
            np.ones(mask.shape, bool)
            if blocks is None
            else candidate_mask(blocks[0], entries, config.candidate_block_size)
        )
        np.testing.assert_array_equal(ours & visible, np.array(mask).astype(bool) & visible)


@pytest.mark.parametrize("which", ["nano", "nano_k"])
def test_index_scores(replays, which):
    replay = replays[which]
    config, seen = replay.config, 0
    for phase in PHASES:
        start, length = replay.lengths[phase]
        for layer in config.index_source_layer_ids:
            want = replay.want(phase, layer, "idx.score")
            attn, ratio = replay.model.layers[layer].attn, config.ratio(layer)
            x, qr = replay.got(phase, layer, "attn.x")[None], replay.got(phase, layer, "attn.qr")[None]
            q = attn.indexer.queries(attn.indexer.wq_b(qr), Step(config, start, length))
            weights = attn.indexer.weights_proj(x)
            if replay.want(phase, layer, "idx.q") is not None:
                assert equal_share(q[0], replay.want(phase, layer, "idx.q")) >= 0.98
                scaled = weights.astype(mx.float32) * (config.index_head_dim * config.index_n_heads) ** -0.5
                assert_one_ulp(scaled.astype(mx.bfloat16)[0], replay.want(phase, layer, "idx.w"), share=0.98)
            keys = replay.got(phase, config.kv_source(layer), "ikey")[None]
            visible = mx.array((np.arange(start, start + length) + 1) // ratio)
            candidates = None
            if config.uses_candidates(layer):
                candidates = replay.traces[phase][f"L{config.candidate_source_layer_id}.cand"]
            attn.indexer.bf16_scores = True
            got = attn.indexer.select(q, weights, keys, visible, candidates)[0][0]
            attn.indexer.bf16_scores = False
            if candidates is not None:
                got = everywhere(got, candidates[0], want.shape[-1], config.candidate_block_size)
            assert equal_share(got, want) >= 0.98, (phase, layer)
            np.testing.assert_array_equal(np.isfinite(np.array(got)), np.isfinite(np.array(want)))
            seen += 1
    assert seen == len(PHASES) * len(config.index_source_layer_ids)


def test_window_rows_and_open_pairs(replays):
    """The window and the pending compressor rows after the last step hold the reference's state."""
    replay = replays["nano"]
    window = replay.config.sliding_window
    compared = 0
    for phase, end in (("decode2", sum(replay.lengths["decode2"])),):
        for layer, cache in enumerate(replay.caches):
            ring = replay.want(phase, layer, "ring")
            if ring is not None:
                positions = np.arange(end - window, end)
                got = cache.window[0, mx.array(positions % cache.window.shape[1])]
                assert equal_share(got, ring[mx.array(positions % window)]) >= 0.98
                compared += 1
            pending = replay.want(phase, layer, "pend_a")
            if pending is not None and end % 2:
                slot = (end - 1) % 2 if pending.ndim > 1 and pending.shape[0] == 2 else 0
                got = cache.pending[0, 0, (end - 1) % cache.pending.shape[2]]
                assert_close_to_largest(got, pending.reshape(-1, got.shape[-1])[slot], 1e-5)
                compared += 1
    assert compared


@pytest.mark.parametrize("phase", ["prefill", "decode0"])
def test_engram_with_golden_residual(nano, phase):
    data = golden("nano", "layers")
    for layer in nano.config.engram_layer_ids:
        before = data[f"{phase}.L{layer - 1}.h_out"]
        _hashing, table = nano._engram[layer]
        rows = np.array(data[f"{phase}.L{layer}.engram.rows"])
        step = Step(nano.config, 0, before.shape[0], trace := {})
        step.layer = layer
        got = nano.layers[layer].engram(before[None], mx.array(table.rows(rows))[None], step)[0]
        assert_equal(trace[f"L{layer}.engram.e"][0], data[f"{phase}.L{layer}.engram.emb"])
        assert row_error(got, data[f"{phase}.L{layer}.h_in"]) <= 0.002


def test_candidate_mask_primitive():
    units = golden("nano", "units")
    scores, visible = units["cand.scores"], units["cand.lens"]
    mask = candidate_mask(top_k_groups(scores[None], visible, 3, size=4)[0], scores.shape[1], 4)
    seen = np.arange(scores.shape[1]) < np.array(visible)[:, None]
    np.testing.assert_array_equal(mask & seen, np.array(units["cand.mask"]).astype(bool) & seen)
