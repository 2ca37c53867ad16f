"""Random models: the layers that a cut keeps, numbers that behave like a model's, and random cache state."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.bench_timing import decode_seconds, host_seconds, prefill_seconds, random_tokens
from mlx_ds4.config import ConfigError, ModelConfig
from mlx_ds4.convert.official_config import released_config
from mlx_ds4.convert.synthetic import tiny_config
from mlx_ds4.custom_kernels._random_planes import device_planes, random_planes
from mlx_ds4.formats.planes import dequantize
from mlx_ds4.generation import generate_step
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.random_model import cut_config, fill_cache, random_drafter, random_model, scheduled_config

RELEASE = ModelConfig.from_dict(released_config())


def kinds(config):
    """(ratio, owns rows, owns index, publishes candidates, scores inside them) of each layer."""
    c = config
    return [
        (c.ratio(i), c.owns_kv(i), c.owns_index(i), c.publishes_candidates(i), c.uses_candidates(i))
        for i in range(c.num_hidden_layers)
    ]


def test_eight_layers_show_every_kind():
    window, reuse2, reuse1 = (0, *[False] * 4), (2, *[False] * 4), (1, *[False] * 4)
    owner, source, reindex = (2, True, True, False, False), (1, True, True, True, False), (1, False, True, False, True)
    assert kinds(cut_config(8)) == [window, window, owner, reuse2, source, reuse1, reindex, reuse1]
    assert set(kinds(RELEASE)) == set(kinds(cut_config(8)))
    assert kinds(cut_config(40)) == kinds(cut_config()) == kinds(RELEASE)


@pytest.mark.parametrize("layers", range(1, 41))
def test_every_cut_is_a_model_of_real_sizes(layers):
    c = cut_config(layers, engram=True)
    assert c.num_hidden_layers == layers == len(c.compress_ratios)
    assert (c.hidden_size, c.n_routed_experts, c.index_topk) == (5120, 384, 512)
    assert len(c.engram_layer_ids) == (layers >= 2) + (layers >= 13)  # layers 1 and 14 of the release
    assert cut_config(layers).engram_layer_ids == ()


def test_cuts_out_of_range_and_schedules_without_owner_are_refused():
    for layers in (0, 41):
        with pytest.raises(ValueError, match="expected 1 to 40"):
            cut_config(layers)
    with pytest.raises(ConfigError, match="reads compressed rows"):
        scheduled_config(RELEASE, [0, 3])
    repeated = scheduled_config(RELEASE, [0, 2, 3, 3, 3])
    assert repeated.compress_ratios == (0, 2, 2, 2, 2) and repeated.dspark_target_layer_ids == (2, 3, 4)


@pytest.mark.parametrize("recipe", ["q2", "q4", "mxfp4"])
def test_rows_route_apart_and_numbers_stay_in_bounds(recipe):
    """Rows of a random model must spread over experts, or six rows would read less than in a real one."""
    model = random_model(cut_config(size="tiny"), recipe)
    trace = model.trace(random_tokens(model.config, 48)[None])
    for layer in range(6):
        chosen = np.array(trace[f"L{layer}.ffn.experts"]).reshape(-1)
        counts = np.bincount(chosen, minlength=8)
        assert counts.min() > 0 and counts.max() < 0.4 * chosen.size, (layer, counts)
        size = mx.abs(trace[f"L{layer}.h_out"].astype(mx.float32)).mean().item()
        assert 1e-3 < size < 1e3
    assert mx.isfinite(trace["logits"]).all().item()
    formats = {w.format for _, w in model.named_modules() if isinstance(w, BlockWeight)}
    assert formats == {"Q8_0"} | {"q2": {"IQ2_XXS", "Q2_K"}, "q4": {"Q4_K"}, "mxfp4": {"MXFP4"}}[recipe]


@pytest.mark.parametrize("format", ["Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4", "F32", "F16", "BF16"])
def test_planes_of_host_and_device_have_one_form(format, monkeypatch):
    from mlx_ds4.custom_kernels import _random_planes

    host = random_planes(np.random.default_rng(0), format, 40, 3, 256)
    whole = device_planes(0, format, 40, 3, 256)
    monkeypatch.setattr(_random_planes, "_DRAW", 3 * 256 * 7)  # 7 entries at a time: the last piece is a smaller one
    for planes in (whole, device_planes(0, format, 40, 3, 256)):
        assert {k: (v.shape, v.dtype) for k, v in planes.items()} == {k: (v.shape, v.dtype) for k, v in host.items()}
        values = dequantize(format, planes)
        assert mx.isfinite(values).all().item()
        rms = mx.sqrt((values * values).mean()).item()
        assert abs(values.mean().item()) < 0.1 * rms and 0.01 < rms < 0.2
        assert len(np.unique(np.array(values[-1]))) > 8  # the last piece is drawn as well
    assert not mx.array_equal(whole["codes"], device_planes(1, format, 40, 3, 256)["codes"]).item()


def test_shared_weights_are_the_same_arrays():
    model = random_model(cut_config(size="tiny"), share=3)
    first, again = model.layers[0].ffn.experts.w1.weight, model.layers[3].ffn.experts.w1.weight
    assert again is first and model.layers[1].ffn.experts.w1.weight is not first
    assert model.layers[4].attn.indexer.wk.weight is model.layers[2].attn.indexer.wk.weight
    assert model.layers[2].attn.compressor.wgate.weight is not model.layers[2].attn.compressor.wkv.weight
    alone = random_model(cut_config(size="tiny"))
    assert alone.layers[3].ffn.experts.w1.weight is not alone.layers[0].ffn.experts.w1.weight


def test_random_state_continues_like_a_prefilled_cache():
    """Same arrays in shape and type as a prefill leaves, so a step costs the same; the numbers are used."""
    model = random_model(cut_config(size="tiny", engram=True))
    length = 75  # an open pair
    real, filled = model.make_cache(), model.make_cache()
    prefill_seconds(model, real, random_tokens(model.config, length), chunk=40)
    fill_cache(filled, length)
    assert filled.offset == real.offset == length and filled.rewindable == 0
    model(mx.array([[1]]), real), model(mx.array([[1]]), filled)
    for mine, theirs in zip(filled, real, strict=True):
        assert [(a.shape, a.dtype) for a in mine.state] == [(a.shape, a.dtype) for a in theirs.state]
    other = model.make_cache()
    fill_cache(other, length, seed=1)
    first, second = (model.trace(mx.array([[1]]), cache) for cache in (filled, other))
    assert not mx.array_equal(first["L2.topk"], second["L2.topk"]).item()
    assert (first["L5.topk"] >= 0).sum().item() == 7  # 8 of 4 blocks of 2, of which the newest is half full


def test_timing_feeds_what_it_says():
    model = random_model(cut_config(size="tiny"))
    cache = model.make_cache()
    tokens = random_tokens(model.config, 50)
    chunks = prefill_seconds(model, cache, tokens, chunk=20)
    assert [count for count, _ in chunks] == [20, 20, 10] and all(s > 0 for _, s in chunks) and cache.offset == 50
    expected = next(generate_step(tokens[-1:], model, max_tokens=1, prompt_cache=_trimmed(cache)))[0]
    fresh = model.make_cache()
    assert next(generate_step(tokens, model, max_tokens=1, prompt_cache=fresh))[0] == expected
    for rows, steps in ((1, 2), (4, 2)):
        twin = cache.copy()
        assert decode_seconds(model, twin, rows=rows, steps=steps, warm_up=1) > 0
        assert twin.offset == 50 + steps + 1 + (2 if rows == 1 else 0)
    assert host_seconds(model, cache.copy(), steps=2) > 0 and cache.offset == 50


def _trimmed(cache):
    twin = cache.copy()
    twin.trim(1)
    return twin


def test_random_drafter_proposes():
    config = ModelConfig.from_dict(
        tiny_config().to_dict()
        | {"engram_layer_ids": [], "num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_markov_rank": 32}
        | {"dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2, "dspark_target_layer_ids": [3, 4, 5]}
    )
    model = random_model(config)
    drafter = random_drafter(model)
    cache = model.make_cache()
    _, taps = model.forward(random_tokens(config, 20)[None], cache)
    drafter.observe(cache, taps)
    assert len(drafter.propose(model, cache, 1).tokens) == 3
