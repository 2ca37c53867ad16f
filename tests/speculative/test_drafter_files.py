"""Drafters on disk: the release's folder, GGUF files in each dialect, and what is refused."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_ds4.checkpoint import CheckpointError
from mlx_ds4.config import ConfigError
from mlx_ds4.drafter_files import find_drafter, load_drafter
from mlx_ds4.formats.gguf import FormatError
from mlx_ds4.loader import NotEnoughMemoryError
from mlx_ds4.model.linear import BlockWeight, dense
from tests.checkpoint.folders import patch_byte, rewrite
from tests.golden_tools import GOLDEN
from tests.speculative.dspark_gguf import DIALECTS, SETTINGS, parameters, values_of, write

NANO, NANO_K = GOLDEN / "nano" / "model", GOLDEN / "nano_k" / "model"


@pytest.fixture(scope="module")
def values(drafter):
    return values_of(drafter)


def test_the_folder_gives_every_weight(nano, drafter):
    stored = {}
    for shard in NANO.glob("*.safetensors"):
        stored.update({k: v for k, v in mx.load(str(shard)).items() if k.startswith("mtp.")})
    held = parameters(drafter)
    for name, value in held.items():
        if name in stored and not isinstance(value, BlockWeight):
            assert mx.array_equal(value, stored[name]), name
    assert held["mtp.0.main_proj.weight"].format == "FP8" and held["mtp.1.ffn.experts.w2.weight"].format == "MXFP4"
    calls = []
    load_drafter(nano, NANO, progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] and {call[2] for call in calls} == set(held)
    total = sum(array.nbytes for _, array in tree_flatten(drafter.parameters()))
    assert calls[-1][1] == total
    with pytest.raises(NotEnoughMemoryError, match="leave the drafter out"):
        load_drafter(nano, NANO, memory_limit=total)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_gguf_dialects(nano, drafter, values, tmp_path, dialect):
    loaded = load_drafter(nano, write(tmp_path / "dspark.gguf", values, **DIALECTS[dialect]))
    assert loaded.config == drafter.config and loaded.target_layer_ids == (7, 8, 9) and loaded.block_size == 5
    held = parameters(loaded)
    for name, array in values.values():
        np.testing.assert_array_equal(np.array(dense(held[name])), array, err_msg=name)
    cache = nano.make_cache()
    loaded.observe(cache, nano.forward(mx.array([[3, 5, 8]]), cache)[1])
    assert loaded.propose(nano, cache, 27).tokens == drafter.propose(nano, cache, 27).tokens


def changed(**settings):
    return {**SETTINGS, **settings}


REFUSED = {
    "V4 by name": ({"architecture": "deepseek4-dspark"}, FormatError, "drafter of DeepSeek V4"),
    "V4 by taps": ({"settings": changed(target_layer_ids=("[u32]", [40, 41, 42]))}, ConfigError, "V4's taps"),
    "V4 by variant": (
        {"extra": [("dspark.checkpoint_variant", "string", "v4-flash")]}, FormatError, "expected 'v4.1-flash'",
    ),
    "experts": ({"settings": changed(expert_count=("u32", 256))}, ConfigError, "n_routed_experts is 256"),
    "window": ({"settings": changed(sliding_window=("u32", 32))}, ConfigError, "sliding_window is 32"),
    "block": ({"settings": changed(block_size=("u32", 0))}, ConfigError, "dspark_block_size is 0"),
    "rank": ({"settings": changed(markov_rank=("u32", 64))}, CheckpointError, "markov_w1.weight is"),
    "a noise token": ({"settings": changed(noise_token_id=("u32", 512))}, ConfigError, "expected an id below 512"),
    "another kind": ({"architecture": "llama", "spell": lambda n: n.replace("mtp", "x")}, FormatError, "DSpark"),
    "a bad scale": (
        {"kinds": {"mtp.1.attn_q_a.weight": "Q8_0"}, "damaged": ["mtp.1.attn_q_a.weight"]}, FormatError,
        r"mtp.1.attn_q_a.weight \(Q8_0\) holds a scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_files(nano, values, tmp_path, what):
    options, error, message = REFUSED[what]
    path = write(tmp_path / "dspark.gguf", values, **options)
    with pytest.raises(error, match=message):
        load_drafter(nano, path)


def test_refused_tensors(nano, nano_k, values, tmp_path):
    name = "mtp.1.attn_q_a.weight"
    wrong = {**values, name: (values[name][0], values[name][1][:-1])}
    with pytest.raises(CheckpointError, match=r"1 of a wrong shape: mtp.1.attn_q_a.weight is"):
        load_drafter(nano, write(tmp_path / "a.gguf", wrong))
    with pytest.raises(CheckpointError, match=r"1 missing: mtp.1.attn_q_a.weight"):
        load_drafter(nano, write(tmp_path / "b.gguf", {k: v for k, v in values.items() if k != name}))
    with pytest.raises(ConfigError, match="this drafter belongs to another model"):
        load_drafter(nano_k, write(tmp_path / "c.gguf", values))
    with pytest.raises((ConfigError, CheckpointError), match="no drafter"):
        load_drafter(nano_k, NANO_K)


def test_refused_folders(nano, tmp_path):
    folder = shutil.copytree(NANO, tmp_path / "nan")
    patch_byte(folder, "mtp.2.ffn.experts.3.w1.scale", 255)
    with pytest.raises(FormatError, match=r"mtp.2.ffn.experts.3.w1.scale holds"):
        load_drafter(nano, folder)

    def to_v4(tensors):
        tensors["mtp.2.hc_head_fn"] = tensors["mtp.2.hc_attn_fn"]

    with pytest.raises(CheckpointError, match="drafter of DeepSeek V4"):
        load_drafter(nano, rewrite(NANO, tmp_path / "v4", to_v4))

    def without(tensors):
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    bare = rewrite(NANO, tmp_path / "bare", without)
    with pytest.raises(CheckpointError, match="holds no drafter"):
        load_drafter(nano, bare)


def test_a_drafter_beside_the_model(values, tmp_path):
    assert find_drafter(NANO) == NANO
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    with pytest.raises(CheckpointError, match="found none: name its file"):
        find_drafter(model)
    first = write(tmp_path / "some-DSpark-Q8.gguf", values)
    assert find_drafter(model) == first == find_drafter(tmp_path)
    write(tmp_path / "other.dspark.gguf", values)
    with pytest.raises(CheckpointError, match=r"found other.dspark.gguf, some-DSpark-Q8.gguf"):
        find_drafter(model)
