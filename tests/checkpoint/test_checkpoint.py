"""The list of expected tensors, and what is refused because it differs from the list."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from mlx_ds4.checkpoint import (
    CheckpointError,
    Expected,
    compare,
    gguf_tensors,
    model_weights,
    official_bytes,
    official_tensors,
    other_part,
)
from mlx_ds4.config import ConfigError, ModelConfig
from mlx_ds4.convert.gguf_writer import GGUFTensor, write_gguf
from mlx_ds4.convert.official_config import official_config, released_config
from mlx_ds4.formats.gguf import FormatError
from mlx_ds4.formats.safetensors import SafetensorsFolder
from mlx_ds4.loader import load_model
from mlx_ds4.sources import open_source, read_config
from tests.checkpoint.folders import rewrite
from tests.golden_tools import GOLDEN

NANO, NANO_K = GOLDEN / "nano" / "model", GOLDEN / "nano_k" / "model"


def test_released_list_is_complete():
    config = ModelConfig.from_dict(released_config())
    weights = model_weights(config)
    names = official_tensors(config)
    # Counts and bytes of the release: 96,085 tensors less 2,401 of the drafter and 266 of the vision encoder.
    assert len(weights) == len(gguf_tensors(config)) == 1046
    assert len(names) == 96_085 - 2_401 - 266
    per_layer = Counter(name.split(".")[1] for name in names if name.startswith("layers."))
    assert [per_layer[i] for i in ("0", "1", "2", "14", "20", "24")] == [2334, 2340, 2342, 2348, 2341, 2337]
    tables = sum(official_bytes(w) for w in weights if w.storage == "ROWS")
    assert tables == 202_758_032_400
    assert sum(map(official_bytes, weights)) - tables == 295_976_914_368 + 2_647_664_640
    assert [w.gguf for w in weights[-2:]] == ["blk.1.engram_embd.weight", "blk.14.engram_embd.weight"]
    assert names["layers.1.engram.embed.scale"] == Expected((384006168, 8), ("F8_E8M0",))
    assert names["layers.3.ffn.experts.383.w2.weight"] == Expected((5120, 1152), ("I8", "U8"))
    assert names["layers.3.attn.wo_a.scale"].shape == (256, 128)


@pytest.mark.parametrize("folder", [NANO, NANO_K])
def test_golden_folders_hold_exactly_the_list(folder):
    found = set(SafetensorsFolder(folder).tensors)
    assert set(official_tensors(read_config(folder))) == {name for name in found if other_part(name) is None}


@pytest.mark.parametrize("folder", [NANO, NANO_K])
def test_official_config_gives_the_config_back(folder):
    config = read_config(folder)
    assert ModelConfig.from_dict(json.loads(json.dumps(official_config(config)))) == config


def test_everything_wrong_is_listed_at_once(tmp_path):
    def change(tensors):
        del tensors["layers.0.attn.wq_a.scale"], tensors["layers.1.ffn.experts.3.w2.weight"]
        dtype, shape, data = tensors["layers.0.attn_norm.weight"]
        tensors["layers.0.attn_norm.weight"] = ("F16", shape, data)
        dtype, shape, data = tensors["layers.1.attn.wkv.weight"]
        tensors["layers.1.attn.wkv.weight"] = (dtype, shape[::-1], data)
        tensors["layers.0.attn.wq_c.weight"] = ("U8", (1,), b"1")

    folder = rewrite(NANO_K, tmp_path / "model", change)
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    for part in (
        "2 missing: layers.0.attn.wq_a.scale, layers.1.ffn.experts.3.w2.weight",
        "1 unexpected: layers.0.attn.wq_c.weight",
        "1 of a wrong shape: layers.1.attn.wkv.weight is [256, 64] not [64, 256]",
        "1 of a wrong type: layers.0.attn_norm.weight is F16 not BF16",
    ):
        assert part in str(error.value)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_unknown_tensors_are_accepted_on_request(tmp_path):
    folder = rewrite(NANO_K, tmp_path / "model", lambda tensors: tensors.update(extra=("U8", (1,), b"1")))
    with pytest.raises(CheckpointError, match="1 unexpected: extra"):
        open_source(folder)
    load_model(folder, strict=False)


def test_drafter_and_vision_tensors_are_not_unexpected(tmp_path):
    names = ("mtp.0.main_proj.weight", "vision.blocks.0.attn.weight", "aligner.x", "image_start")
    folder = rewrite(
        NANO_K, tmp_path / "model", lambda tensors: tensors.update(dict.fromkeys(names, ("U8", (1,), b"1")))
    )
    open_source(folder)


def test_long_lists_are_cut_but_counted():
    expected = {f"t{i}": Expected((1,), ("F32",)) for i in range(30)}
    with pytest.raises(CheckpointError, match=r"30 missing: t0, .*t19, and 10 more"):
        compare(expected, {}, where="x")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("embed.weight", "hc_head_fn", "layers.2.attn.compressor.ape"), "this is a DeepSeek V4 checkpoint"),
        (("model.layers.0.self_attn.q_a_proj.weight",), "converted to another program's tensor names"),
        (("blk.0.attn_q_a.weight", "token_embd.weight"), "GGUF tensor names"),
        (("mtp.0.main_proj.weight",), "only the drafter of a release"),
        (("vision.a", "aligner.b"), "only the vision encoder of a release"),
    ],
)
def test_foreign_folders_are_named(tmp_path, names, message):
    def change(tensors):
        tensors.clear()
        tensors.update(dict.fromkeys(names, ("U8", (1,), b"1")))

    with pytest.raises(CheckpointError, match=message):
        open_source(rewrite(NANO_K, tmp_path / "model", change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "deepseek_v4", "hidden_size": 4096}', "a DeepSeek V4 model of another architecture"),
        ('{"model_type": "llama"}', "not a V4.1 checkpoint"),
        ('{"model_type": "deepseek_v41"}', "config lacks vocab_size"),
        ("[]", "expected an object"),
        ("{", "not valid JSON"),
    ],
)
def test_foreign_configs_are_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_source(tmp_path)


def test_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match="name a folder of the release"):
        open_source(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ConfigError, match=r"name the \.gguf file itself"):
        open_source(tmp_path)


@pytest.mark.parametrize("architecture", ["deepseek4", "deepseek41-dspark", "deepseek4-vision", "llama"])
def test_foreign_gguf_files_are_named(tmp_path, architecture):
    path = tmp_path / "x.gguf"
    tensor = GGUFTensor("token_embd.weight", (1,), "F32", None)
    write_gguf(path, [("general.architecture", "string", architecture)], [tensor], alignment=32)
    with pytest.raises(FormatError, match=architecture):
        load_model(path)
