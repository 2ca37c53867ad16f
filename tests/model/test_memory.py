"""Memory of a long step: tiles bound the index scores and the gathered rows, whatever the rows and the context."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np

from mlx_ds4.cache import GrowingRows
from mlx_ds4.custom_kernels import index_score, sparse_attention
from mlx_ds4.model import indexer as indexer_module
from mlx_ds4.model.step import Step


def peak_of(run) -> int:
    """Bytes in use at the highest point of `run`, beyond what was in use before and beyond its result."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = run()
    mx.eval(result)
    return mx.get_peak_memory() - before - sum(array.nbytes for array in result)


def test_selection_of_many_rows_over_a_long_context(nano, monkeypatch):
    """Four times the keys and twice the rows: the same peak, not eight times as much."""
    monkeypatch.setattr(indexer_module, "TILE_SCORES", 1 << 16)
    monkeypatch.setattr(index_score, "_TILE_ELEMENTS", 1 << 16)
    config = nano.config
    indexer = nano.layers[config.candidate_source_layer_id].attn.indexer
    rng = np.random.default_rng(0)

    def select(rows: int, entries: int):
        keys = GrowingRows(config.index_head_dim)
        draw = rng.standard_normal((1, entries, config.index_head_dim)).astype(np.float32)
        keys.append(mx.array(draw).astype(mx.bfloat16))
        x = mx.array(rng.standard_normal((1, rows, config.hidden_size)).astype(np.float32)).astype(mx.bfloat16)
        qr = x[..., : config.q_lora_rank]
        q, weights = indexer.wq_b(qr), indexer.weights_proj(x)
        mx.eval(keys.split, q, weights)

        def run():
            step = Step(config, entries - rows, rows)
            indexer(1, keys.split, step, q, weights)
            return [step.selection, step.candidates]

        return peak_of(run)

    small, large = select(16, 4000), select(32, 16000)
    scores = 32 * 16384 * 4  # as wide as the cache of 16,000 rows
    assert large < 2.5 * small
    assert large < 4 * scores  # the [rows, heads, keys] array alone would be that


def test_gathered_rows_come_in_tiles(monkeypatch):
    monkeypatch.setattr(sparse_attention, "_ROWS", 8)
    B, H, D, P = 1, 4, 64, 128
    rows = mx.random.normal((B, 4096, D)).astype(mx.bfloat16)
    sinks = mx.zeros(H)

    def attend(length: int):
        q = mx.random.normal((B, length, H, D)).astype(mx.bfloat16)
        lists = mx.sort(mx.random.randint(0, 4096, (B, length, P)), axis=-1).astype(mx.int32)
        mx.eval(rows, q, lists)
        return peak_of(lambda: [sparse_attention.sparse_attention(q, [(rows, lists)], sinks, scale=0.1)])

    few, many = attend(32), attend(128)
    gathered = 128 * P * D * 2
    assert many < 2 * few
    assert many < gathered  # all gathered rows at once would be that, before any float32 copy


def test_layers_are_evaluated_one_by_one(nano, monkeypatch):
    """The peak of a long step stays below that of the same step evaluated as one graph."""
    tokens = mx.array([[i % 500 for i in range(120)]])
    monkeypatch.setattr("mlx_ds4.cache.RECENT", 64)  # else scores over free rows are most of a layer this small

    def peak() -> int:
        cache = nano.make_cache()
        cache.begin(*tokens.shape)
        mx.eval([layer.state for layer in cache])  # both ways begin with the same arrays
        return peak_of(lambda: [nano(tokens, cache, last_only=True)])

    one_by_one = peak()
    monkeypatch.setattr("mlx_ds4.model.model._EAGER_ROWS", 10**9)
    together = peak()
    assert one_by_one < 0.9 * together


def test_a_step_copies_no_cache(nano_wide, monkeypatch):
    """Eight times the old rows: a step of one row needs a little more memory for their scores, never for a copy."""
    config = dataclasses.replace(nano_wide.config, max_position_embeddings=1 << 20)
    monkeypatch.setattr(nano_wide, "config", config)
    monkeypatch.setattr(index_score, "_TILE_ELEMENTS", 1 << 14)  # the reference widens the keys of one tile
    peaks, sizes = [], []
    for positions in (16_000, 128_000):
        cache = nano_wide.make_cache()
        cache.begin(1, 1)
        owned = []
        for index, layer in enumerate(cache):
            for rows in (layer.compressed, layer.index_keys):
                if rows is not None:
                    shape = (1, positions // config.ratio(index), rows.recent.shape[-1])
                    rows.append(mx.random.normal(shape).astype(mx.bfloat16))
                    owned.append(rows)
        cache.offset = positions
        cache.history = np.zeros((1, config.engram_max_ngram_size - 1), np.int64)
        mx.eval([layer.state for layer in cache])
        old = [rows.old for rows in owned]
        sizes.append(cache.nbytes)
        peaks.append(peak_of(lambda cache=cache: [nano_wide(mx.array([[5]]), cache)]))
        assert all(rows.old is before for rows, before in zip(owned, old, strict=True))
    grown, cached = peaks[1] - peaks[0], sizes[1] - sizes[0]
    assert cached > 50e6 and grown < cached / 4, (peaks, sizes)
