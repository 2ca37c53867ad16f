"""The boring equalities: chunked = whole, row by row = together, trimmed = untouched, batched = alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.cache import RECENT, REWIND, GrowingRows
from mlx_ds4.custom_kernels._rows import gather
from mlx_ds4.loader import load_model
from mlx_ds4.model import model as model_file
from tests.golden_tools import GOLDEN, golden, manifest


@pytest.fixture(scope="module")
def nano(nano_wide):
    return nano_wide


def test_widened_weights_change_no_bit(nano):
    """What lets the tests of this file use them."""
    stored = load_model(GOLDEN / "nano" / "model")[0]
    tokens = golden("nano", "e2e")["A17.ids"][None]
    np.testing.assert_array_equal(np.array(nano(tokens)), np.array(stored(tokens)))


@pytest.fixture(scope="module")
def sequence():
    return manifest("nano")["sequences"]["A"][:27]


def run(model, tokens, sizes, cache=None):
    """Logits of `tokens` fed in chunks of the given sizes (the last size repeats)."""
    cache = cache or model.make_cache()
    parts, start = [], 0
    for index in range(len(tokens)):
        size = sizes[min(index, len(sizes) - 1)]
        if start >= len(tokens):
            break
        parts.append(model(mx.array([tokens[start : start + size]]), cache)[0])
        start += size
    return mx.concatenate(parts), cache


def test_the_host_a_layer_ahead(nano, sequence, monkeypatch):
    """As on CUDA: behind the first layer nothing is waited for; the same logits and state."""
    monkeypatch.setattr(nano, "compiled", False)
    monkeypatch.setattr(model_file, "_EAGER_ROWS", 9)
    waits, evaluate = [], mx.eval
    monkeypatch.setattr(model_file.mx, "eval", lambda *made: waits.append(made[0]) or evaluate(*made))
    results = []
    for name, first in (("cuda", 0), ("metal", 3)):  # arrays of a layer
        monkeypatch.setattr(model_file, "backend", lambda name=name: name)
        del waits[:]
        results.append(run(nano, sequence, [27]))
        layers = [len(made) for made in waits if isinstance(made, list)][: nano.config.num_hidden_layers]
        assert layers == [first] + [3] * (len(layers) - 1) and len(layers) > 1
    np.testing.assert_array_equal(*(np.array(logits) for logits, _ in results))
    assert_same_state(results[0][1], results[1][1])


def snapshot(cache):
    """Everything that later steps can see, as arrays."""
    seen = np.arange(max(0, cache.offset - (cache.config.sliding_window - 1)), cache.offset)
    out = {"history": cache.history[:, -(cache.config.engram_max_ngram_size - 1) :]}
    for index, layer in enumerate(cache):
        out[f"{index}.window"] = np.array(layer.window.astype(mx.float32))[:, seen % layer.window.shape[1]]
        if layer.compressed is not None and layer.compressed.length:
            out[f"{index}.compressed"] = np.array(layer.compressed.rows.astype(mx.float32))
            out[f"{index}.keys"] = np.array(layer.index_keys.rows.astype(mx.float32))
        if layer.pending is not None and cache.offset % 2:
            out[f"{index}.open"] = np.array(layer.pending[:, :, (cache.offset - 1) % layer.pending.shape[2]])
    return out


def assert_same_state(a, b):
    assert a.offset == b.offset
    one, two = snapshot(a), snapshot(b)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(nano, sequence):
    return run(nano, sequence, [len(sequence)])


@pytest.mark.parametrize("sizes", [[1], [7], [9, 1, 1, 2], [26, 1]])
def test_any_chunks_give_the_same_bits(nano, sequence, whole, sizes):
    logits, cache = run(nano, sequence, sizes)
    np.testing.assert_array_equal(np.array(logits), np.array(whole[0]))
    assert_same_state(cache, whole[1])


@pytest.mark.parametrize("start", [5, 6, 21])
@pytest.mark.parametrize("rows", [1, 6])
def test_trim_leaves_no_trace(nano, sequence, start, rows):
    """Six rows of another text, taken back, then the true continuation: the bits of never having drafted."""
    _, plain = run(nano, sequence[:start], [start])
    drafted = plain.copy()
    wrong = [(token + 7) % nano.config.vocab_size for token in sequence[start : start + rows]]
    run(nano, wrong, [rows], drafted)
    assert drafted.trim(rows) == rows
    assert_same_state(drafted, plain)
    rest = sequence[start : start + 3]
    np.testing.assert_array_equal(*(np.array(run(nano, rest, [2, 1], c)[0]) for c in (drafted, plain)))


def test_partial_acceptance(nano, sequence):
    """Verify six rows, keep three: state and continuation equal those of three rows alone."""
    _, kept = run(nano, sequence[:20], [20])
    verified = kept.copy()
    run(nano, sequence[20:23], [1], kept)
    run(nano, [*sequence[20:23], 9, 8, 7], [6], verified)
    verified.trim(3)
    assert_same_state(verified, kept)


def test_trim_refuses_what_it_cannot_take_back(nano, sequence):
    _, cache = run(nano, sequence[:20], [20])
    assert cache.rewindable == REWIND
    with pytest.raises(ValueError, match="take back 9 of 20"):
        cache.trim(REWIND + 1)
    cache.trim(REWIND)
    assert not cache.is_trimmable()
    with pytest.raises(ValueError, match="expected 0 to 0"):
        cache.trim(1)


def test_batched_sequences_equal_single_ones(nano):
    a, b = (manifest("nano")["sequences"][name][:21] for name in "AB")
    alone = [run(nano, tokens, [19, 1])[0] for tokens in (a, b)]
    cache = nano.make_cache()
    both = [nano(mx.array([a[:19], b[:19]]), cache)]
    both += [nano(mx.array([[x], [y]]), cache) for x, y in zip(a[19:], b[19:], strict=True)]
    together = mx.concatenate(both, axis=1)
    for row, want in zip(together, alone, strict=True):
        np.testing.assert_array_equal(np.array(row), np.array(want))


def test_last_only_is_the_last_row(nano, sequence, whole):
    got = nano(mx.array([sequence]), last_only=True)
    assert got.shape == (1, 1, nano.config.vocab_size)
    np.testing.assert_array_equal(np.array(got[0, 0]), np.array(whole[0][-1]))


def test_tiles_change_nothing(nano, sequence, whole, monkeypatch):
    """Small tiles of rows and keys (the bound on memory) give the same bits."""
    from mlx_ds4.custom_kernels import index_score, sparse_attention
    from mlx_ds4.model import indexer

    monkeypatch.setattr(sparse_attention, "_ROWS", 5)
    monkeypatch.setattr(indexer, "TILE_SCORES", 200)
    monkeypatch.setattr(index_score, "_TILE_ELEMENTS", 64)
    np.testing.assert_array_equal(np.array(run(nano, sequence, [len(sequence)])[0]), np.array(whole[0]))


def test_wrong_tokens_are_refused(nano):
    for tokens, message in (
        (mx.array([[0, 512]]), "token id 512 is outside"),
        (mx.array([[-1]]), "token id -1"),
        (mx.array([1, 2]), "expected \\[batch, length\\]"),
        (mx.zeros((1, 0), dtype=mx.int32), "at least one token"),
        (mx.zeros((1, 4097), dtype=mx.int32), "4097 tokens exceed"),
    ):
        with pytest.raises(ValueError, match=message):
            nano(tokens)


def test_a_refused_step_leaves_the_cache_alone(nano, sequence):
    _, cache = run(nano, sequence[:5], [5])
    before = snapshot(cache)
    with pytest.raises(ValueError):
        nano(mx.array([[600]]), cache)
    assert cache.offset == 5
    for name, value in snapshot(cache).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_copy_is_independent(nano, sequence):
    _, cache = run(nano, sequence[:24], [24])
    twin, before = cache.copy(), snapshot(cache)
    run(nano, sequence[24:27], [2], twin)
    assert twin.offset == 27 and cache.offset == 24
    for name, value in snapshot(cache).items():
        np.testing.assert_array_equal(value, before[name])


def test_growing_rows_keep_their_content():
    rows = GrowingRows(8)
    pieces = [mx.random.normal((2, n, 8)).astype(mx.bfloat16) for n in (1, 255, 3, 300, 8000, 5, 8, *[7] * 90)]
    for piece in pieces:
        count = piece.shape[1]
        rows.begin(2, count if count <= REWIND else 0)
        if count > REWIND:
            rows.append(piece)
        else:
            at = rows.length - rows.base
            assert rows.marks[1].item() == at and at + count <= RECENT
            rows.put(mx.slice_update(rows.recent, piece, mx.array([at]), axes=(1,)), count)
        assert rows.length - rows.base >= min(rows.length, REWIND)
    assert rows.length == sum(p.shape[1] for p in pieces)
    want = mx.concatenate(pieces, axis=1)
    assert mx.array_equal(rows.rows, want)
    rows.begin(2, 1)
    index = mx.broadcast_to(mx.arange(rows.length, dtype=mx.int32), (2, rows.length))
    assert mx.array_equal(gather(rows.split, index), want)


def test_places_of_all_owners_agree(nano, sequence):
    """Behind prompts, steps and rewinds; what a step is told of a ratio holds for all of its layers."""
    _, cache = run(nano, sequence[:24], [11, 1, 6, 1, 5])
    for count in (0, 3):
        cache.trim(count)
        owned = {layer: cache[layer].compressed for layer in nano.config.kv_source_layer_ids}
        places = cache.places()
        assert places == {nano.config.ratio(layer): rows.places for layer, rows in owned.items()}
        for layer, rows in owned.items():
            rows.begin(1, 1)
            assert [mark.tolist() for mark in rows.marks] == [[place] for place in places[nano.config.ratio(layer)]]
    next(iter(owned.values())).length += 1
    with pytest.raises(RuntimeError, match="holds other rows than its cache"):
        cache.places()


def test_trace_names_every_layer(nano):
    trace = nano.trace(golden("nano", "e2e")["A5.ids"][None])
    assert trace["logits"].shape == (1, 5, nano.config.vocab_size)
    for layer in range(nano.config.num_hidden_layers):
        assert trace[f"L{layer}.h_out"].shape == (1, 5, nano.config.hc_mult, nano.config.hidden_size)
        assert f"L{layer}.attn.q" in trace and f"L{layer}.ffn.experts" in trace
