"""GGUFs made from official folders: exact recipes keep every value, the others decode as `gguf` decodes them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.checkpoint import CheckpointError, gguf_shape, model_weights
from mlx_ds4.convert.cli import main
from mlx_ds4.convert.drafter_to_gguf import drafter_to_gguf
from mlx_ds4.convert.gguf_writer import GGUFTensor, write_gguf
from mlx_ds4.convert.imatrix import read_imatrix, write_imatrix
from mlx_ds4.convert.recipe import RECIPES
from mlx_ds4.convert.to_gguf import official_to_gguf
from mlx_ds4.drafter_files import load_drafter
from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.formats.quant_blocks import dequantize
from mlx_ds4.loader import load_model
from mlx_ds4.model.linear import dense
from mlx_ds4.sources import open_source
from tests.checkpoint.folders import patch_byte
from tests.golden_tools import GOLDEN, golden

NANO, NANO_K = GOLDEN / "nano" / "model", GOLDEN / "nano_k" / "model"


def values(source, weight) -> np.ndarray:
    return np.array(dense(source.read(weight)))


@pytest.mark.parametrize("recipe", ["f32", "f16"])
def test_exact_recipes_keep_every_value(tmp_path, recipe):
    path = tmp_path / "nano.gguf"
    official_to_gguf(NANO, path, recipe)
    official, made = open_source(NANO), open_source(path)
    for weight in model_weights(official.config):
        if weight.storage != "ROWS":
            np.testing.assert_array_equal(values(made, weight), values(official, weight), err_msg=weight.name)
    if recipe == "f16":
        return
    from_folder, from_gguf = load_model(NANO)[0], load_model(path, activation_rounding=True)[0]
    ids = golden("nano", "e2e")["B16.ids"][None]
    np.testing.assert_array_equal(np.array(from_gguf(ids)), np.array(from_folder(ids)))


@pytest.mark.parametrize("recipe", ["q2", "q4", "mxfp4"])
def test_block_recipes_decode_as_gguf_does(nano_k_gguf, recipe):
    path = nano_k_gguf(recipe)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    source = open_source(path)
    weights = model_weights(source.config)
    assert set(reader) == {w.gguf for w in weights}
    for weight in weights:
        tensor = reader[weight.gguf]
        assert tensor.tensor_type.name == RECIPES[recipe].type_of(weight)
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(weight.shape)
        np.testing.assert_array_equal(values(source, weight), want, err_msg=weight.name)


def test_mxfp4_keeps_the_trained_experts(nano_k_gguf):
    official, made = open_source(NANO_K), open_source(nano_k_gguf("mxfp4"))
    experts = [w for w in model_weights(official.config) if w.storage == "FP4"]
    assert len(experts) == 6
    for weight in experts:
        a, b = official.read(weight), made.read(weight)
        assert a.format == b.format == "MXFP4" and a.planes.keys() == b.planes.keys()
        for plane in a.planes:
            assert mx.array_equal(a.planes[plane], b.planes[plane]), (weight.name, plane)


@pytest.mark.parametrize(("recipe", "limit"), [("q2", 0.45), ("q4", 0.12), ("mxfp4", 0.01)])
def test_quantized_values_are_near_the_trained_ones(nano_k_gguf, recipe, limit):
    """Catches transposed experts and swapped names, which decode perfectly well."""
    official, made = open_source(NANO_K), open_source(nano_k_gguf(recipe))
    for weight in model_weights(official.config):
        want, got = values(official, weight), values(made, weight)
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want), weight.name


@pytest.mark.parametrize("recipe", ["q2", "q4", "mxfp4"])
def test_a_file_and_its_dequantized_twin_give_the_same_logits(nano_k_gguf, tmp_path, recipe):
    path, twin = nano_k_gguf(recipe), tmp_path / "twin.gguf"
    source = open_source(path)
    file = GGUFFile(path)
    records = [
        (key, kind, file.metadata[key] if kind != "bool" else bool(file.metadata[key]))
        for key, kind in file.value_types.items()
    ]

    def as_float(weight):
        info = file.tensors[weight.gguf]
        kind = "F32" if info.type_name in ("Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4") else info.type_name
        raw = file.read(info.name)
        data = dequantize(info.type_name, raw.reshape(-1, info.row_bytes)) if kind != info.type_name else raw
        return GGUFTensor(info.name, gguf_shape(weight), kind, lambda: [data])

    write_gguf(twin, records, [as_float(w) for w in model_weights(source.config)], alignment=file.alignment)
    ids = golden("nano_k", "e2e")["B33.ids"][None]
    for rounding in (False, True):
        a = load_model(path, activation_rounding=rounding)[0](ids)
        b = load_model(twin, activation_rounding=rounding)[0](ids)
        np.testing.assert_array_equal(np.array(a), np.array(b))


def test_only_trained_formats_round_by_default(nano_k_gguf):
    ids = golden("nano_k", "e2e")["B33.ids"][None]

    def logits(recipe, rounding):
        return np.array(load_model(nano_k_gguf(recipe), activation_rounding=rounding)[0](ids))

    np.testing.assert_array_equal(logits("q4", None), logits("q4", False))
    assert np.abs(logits("q4", None) - logits("q4", True)).max() > 1e-3
    for rounding in (True, False):  # the experts round, the Q8_0 attention does not
        assert np.abs(logits("mxfp4", None) - logits("mxfp4", rounding)).max() > 1e-3


def test_refusals_leave_nothing_behind(nano_k_gguf, tmp_path, monkeypatch):
    out = tmp_path / "out.gguf"
    with pytest.raises(ValueError, match=r"experts.w1.weight: rows of 128 cannot be IQ2_XXS, whose blocks hold 256"):
        official_to_gguf(NANO, out, "q2")
    with pytest.raises(ValueError, match="is a GGUF file"):
        official_to_gguf(nano_k_gguf("q4"), out, "q4")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(ValueError, match=r"needs \d+ bytes but 1000 are free"):
            official_to_gguf(NANO_K, out, "q4")
    assert os.listdir(tmp_path) == []


def test_interrupted_conversion_keeps_the_old_file(tmp_path):
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    seen = []

    def interrupt(done, total, name):
        seen.append((done, total, name))
        if len(seen) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        official_to_gguf(NANO_K, out, "q4", progress=interrupt)
    assert out.read_bytes() == b"old" and os.listdir(tmp_path) == ["out.gguf"]
    assert seen[0][0] < seen[-1][0] < seen[-1][1] and seen[0][2] == "token_embd.weight"


def test_f16_refuses_what_a_half_cannot_hold(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(NANO_K, folder)
    patch_byte(folder, "layers.0.attn.wkv.scale", 90)
    with pytest.raises(ValueError, match=r"layers.0.attn.wkv.weight: F16 cannot hold .* use the recipe f32"):
        official_to_gguf(folder, tmp_path / "out.gguf", "f16")
    assert os.listdir(tmp_path) == ["model"]
    official_to_gguf(folder, tmp_path / "out.gguf", "f32")


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("layers.0.attn.wkv.weight", 0, 127),
        ("layers.0.attn.wkv.scale", 0, 255),
        ("layers.1.ffn.experts.2.w3.scale", 5, 255),
        ("layers.0.attn_norm.weight", 1, 127),  # with its low byte 0x80 or more an infinity or NaN
        ("layers.1.engram.embed.weight", 7, 127),
        ("layers.1.engram.embed.scale", 3, 255),
    ],
)
def test_values_that_are_not_finite(tmp_path, capsys, name, index, value):
    folder = Path(shutil.copytree(NANO, tmp_path / "model"))
    patch_byte(folder, name, value, index)
    if name.endswith("norm.weight"):
        patch_byte(folder, name, 128, index - 1)
    args = ["--hf-path", str(folder), "--mlx-path", str(tmp_path / "x.gguf"), "--to", "gguf", "--recipe", "mxfp4"]
    assert main(args) == 2
    error = capsys.readouterr().err
    where = name.removesuffix(".weight").removesuffix(".scale")
    assert where in error and "NaN" in error and error.count("\n") == 1 and os.listdir(tmp_path) == ["model"]


def test_the_drafter_of_a_folder_as_a_file(tmp_path):
    """Experts keep their bits; the file says what the drafter needs."""
    path = tmp_path / "nano-dspark.gguf"
    drafter_to_gguf(NANO, path, alignment=32)
    model, _ = load_model(NANO)
    ours, theirs = load_drafter(model, path), load_drafter(model, NANO)
    assert ours.config == theirs.config and ours.block_size == theirs.block_size
    for stage, twin in zip(ours.mtp, theirs.mtp, strict=True):
        assert mx.array_equal(dense(stage.ffn.experts.w2.weight), dense(twin.ffn.experts.w2.weight))
        a, b = dense(stage.attn.wkv.weight), dense(twin.attn.wkv.weight)
        assert 0 < mx.abs(a - b).max().item() < 0.01 * mx.abs(b).max().item()


def test_a_folder_without_a_drafter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no drafter"):
        drafter_to_gguf(NANO_K, tmp_path / "no.gguf")
    assert not list(tmp_path.iterdir())


def test_an_imatrix_is_read_as_it_was_written(tmp_path):
    rng = np.random.default_rng(0)
    wanted = {"blk.0.attn_q_a.weight": rng.random((1, 5)), "blk.3.ffn_up_exps.weight": rng.random((4, 8))}
    write_imatrix(tmp_path / "some.dat", wanted)
    found = read_imatrix(tmp_path / "some.dat")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name].astype(np.float32).reshape(-1)) for name in wanted)
