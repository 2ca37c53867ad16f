"""Loading: every tensor arrives with its value, damage is refused by name, memory is checked first."""

from __future__ import annotations

import gc
import os
import shutil

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_ds4.checkpoint import model_weights, official_names, scale_name
from mlx_ds4.config import ConfigError
from mlx_ds4.convert.synthetic_tokenizer import synthetic_tokenizer
from mlx_ds4.convert.to_gguf import official_to_gguf
from mlx_ds4.formats.gguf import FormatError, GGUFFile
from mlx_ds4.loader import NotEnoughMemoryError, describe, load_model, machine_memory
from mlx_ds4.model.linear import BlockWeight, dense
from tests.checkpoint.folders import patch_byte
from tests.golden_tools import GOLDEN, TINY, golden

NANO, NANO_K = GOLDEN / "nano" / "model", GOLDEN / "nano_k" / "model"


@pytest.fixture(scope="module")
def stored() -> dict[str, mx.array]:
    """Every tensor of the nano folder as MLX reads it."""
    out = {}
    for shard in NANO.glob("*.safetensors"):
        out.update(mx.load(str(shard)))
    return out


def trained_value(stored, weight) -> np.ndarray:
    """float32 values by another road than the loader's: ml_dtypes for the codes, one expert at a time."""

    def scaled(codes: np.ndarray, scales: mx.array, rows: int) -> np.ndarray:
        factors = np.ldexp(1.0, np.array(scales).astype(int) - 127)
        factors = np.repeat(np.repeat(factors, rows, 0), 32, 1)[: codes.shape[0], : codes.shape[1]]
        return (codes.astype(np.float64) * factors).astype(np.float32)

    if weight.storage == "FP4":
        experts = []
        for name in official_names(weight):
            packed = np.array(stored[name]).view(np.uint8)
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
            experts.append(scaled(codes.view(ml_dtypes.float4_e2m1fn), stored[scale_name(name)], 1))
        return np.stack(experts)
    if weight.storage == "FP8":
        codes = np.array(stored[weight.name]).view(ml_dtypes.float8_e4m3fn)
        return scaled(codes, stored[scale_name(weight.name)], 32)
    return np.array(stored[weight.name].astype(mx.float32))


def test_every_parameter_has_its_trained_value(nano, stored):
    bound = {}
    for name, module in nano.named_modules():
        for key, value in module.items():
            if isinstance(value, BlockWeight) or (isinstance(value, mx.array) and not isinstance(module, BlockWeight)):
                bound[f"{name}.{key}".lstrip(".")] = value
    weights = {w.name: w for w in model_weights(nano.config) if w.storage != "ROWS"}
    assert set(weights) - set(bound) == {f"layers.{layer}.ffn.gate.bias_vl" for layer in range(10)}
    assert set(bound) <= set(weights)
    for name, value in bound.items():
        want = trained_value(stored, weights[name])
        assert np.abs(want).max() > 0
        np.testing.assert_array_equal(np.array(dense(value)), want, err_msg=name)


def test_weights_keep_their_stored_form(nano):
    layer = nano.layers[2]
    assert layer.attn.wq_a.weight.format == "FP8" and layer.ffn.experts.w1.weight.format == "MXFP4"
    assert layer.ffn.experts.w2.weight.shape == (16, 128, 64)
    assert nano.embed.weight.dtype == layer.attn_norm.weight.dtype == mx.bfloat16
    assert layer.hc_attn_fn.dtype == layer.ffn.gate.bias.dtype == mx.float32
    stored = sum(value.nbytes for _, value in tree_flatten(nano.parameters()))
    unused = 10 * 16 * 4  # bias_vl
    assert describe(NANO).weight_bytes == stored + unused


def test_progress_counts_bytes_to_the_total():
    calls = []
    load_model(NANO, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and len(calls) == len({call[2] for call in calls}) == 271
    total = describe(NANO).weight_bytes
    assert {call[1] for call in calls} == {total}
    assert done[-1] == total - 10 * 16 * 4  # bias_vl is not read


def test_memory_is_checked_before_anything_is_read():
    needed = describe(NANO).weight_bytes
    with pytest.raises(NotEnoughMemoryError, match=rf"take {needed} bytes .* but {needed - 1} "):
        load_model(NANO, memory_limit=needed - 1, progress=lambda *_: pytest.fail("read a tensor"))
    load_model(NANO, memory_limit=needed)
    assert 1 << 28 < machine_memory() < 1 << 50


@pytest.mark.parametrize("which", ["official", "gguf"])
def test_loading_holds_one_tensor_twice_and_frees_everything(which):
    path = NANO if which == "official" else TINY
    load_model(path)
    gc.collect()
    files, before = len(os.listdir("/dev/fd")), mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = load_model(path)
    held = mx.get_active_memory() - before
    largest = max(
        weight.nbytes for module in model.modules() for weight in module.values() if hasattr(weight, "nbytes")
    )
    assert describe(path).weight_bytes * 0.95 < held < describe(path).weight_bytes * 1.05
    assert mx.get_peak_memory() - before - held <= largest + (64 << 10)
    del model
    gc.collect()
    assert (len(os.listdir("/dev/fd")), mx.get_active_memory()) == (files, before)


def test_config_overrides():
    model, _ = load_model(NANO_K, config_overrides={"sliding_window": 4})
    plain, _ = load_model(NANO_K)
    ids = golden("nano_k", "e2e")["B33.ids"][None]
    a, b = model(ids), plain(ids)
    assert model.config.sliding_window == 4 and plain.config.sliding_window == 16
    np.testing.assert_array_equal(np.array(a[:, :4]), np.array(b[:, :4]))
    assert mx.abs(a - b).max() > 0.01
    with pytest.raises(ConfigError, match="overriding hidden_size changes tensors"):
        load_model(NANO_K, config_overrides={"hidden_size": 512})


def test_activation_rounding_reaches_every_trained_layer():
    ids = golden("nano_k", "e2e")["B33.ids"][None]
    logits = [np.array(load_model(NANO_K, activation_rounding=r)[0](ids)) for r in (None, True, False)]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 1e-3
    model = load_model(NANO_K, activation_rounding=False)[0]
    assert not any(getattr(module, "rounds_input", False) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.0.attn.wq_a.scale", 255),
        ("layers.1.ffn.experts.2.w3.scale", 255),
        ("layers.1.attn.wo_a.weight", 0x7F),
        ("layers.0.ffn.shared_experts.w2.weight", 0xFF),
    ],
)
def test_nan_codes_and_scales_are_refused_by_name(tmp_path, name, value):
    shutil.copytree(NANO_K, tmp_path / "model")
    patch_byte(tmp_path / "model", name, value)
    with pytest.raises(FormatError, match=rf"tensor {name} .*NaN"):
        load_model(tmp_path / "model")


def test_nan_floats_are_refused_by_name(tmp_path):
    shutil.copytree(NANO_K, tmp_path / "model")
    for index, byte in enumerate((0, 0, 0xC0, 0x7F)):
        patch_byte(tmp_path / "model", "layers.1.ffn.gate.bias", byte, index)
    with pytest.raises(FormatError, match=r"tensor layers\.1\.ffn\.gate\.bias "):
        load_model(tmp_path / "model")


def test_infinite_block_scale_in_a_gguf_is_refused_by_name(tmp_path):
    path = tmp_path / "x.gguf"
    official_to_gguf(NANO_K, path, "q4")
    info = GGUFFile(path).tensors["blk.1.ffn_down_exps.weight"]
    with open(path, "r+b") as file:
        file.seek(info.offset + 144 * 5)
        file.write(b"\x00\x7c")
    with pytest.raises(FormatError, match=r"blk.1.ffn_down_exps.weight \(Q4_K\) .* infinite"):
        load_model(path)


def test_another_tokenizer_is_refused(tmp_path):
    for model, message in ((NANO_K, "512 tokens, the model 288"), (NANO, "300 tokens with .* the config says 512")):
        folder = tmp_path / model.parent.name
        shutil.copytree(model, folder)
        synthetic_tokenizer(512 if model is NANO_K else 300).save(folder)
        with pytest.raises(ConfigError, match=message):
            load_model(folder)


def test_raw_pieces_load_as_one_file(tmp_path):
    official_to_gguf(NANO_K, tmp_path / "x.gguf", "q4")
    data = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").rename(tmp_path / "whole.gguf")
    for number, piece in enumerate((data[:900_001], data[900_001:]), 1):
        (tmp_path / f"x.gguf.part{number}").write_bytes(piece)
    ids = golden("nano_k", "e2e")["A4.ids"][None]
    pieces, whole = load_model(tmp_path / "x.gguf.part1")[0](ids), load_model(tmp_path / "whole.gguf")[0](ids)
    np.testing.assert_array_equal(np.array(pieces), np.array(whole))
