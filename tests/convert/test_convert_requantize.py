"""Requantization on request: what each mode does to a float model, and what it leaves alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.checkpoint import model_weights
from mlx_ds4.convert.cli import main
from mlx_ds4.convert.mlx_folder import Options, convert_to_folder
from mlx_ds4.convert.requantize import MODES, block_format
from mlx_ds4.convert.to_gguf import official_to_gguf
from mlx_ds4.convert.verify import verify_folder
from mlx_ds4.formats.quant_blocks import dequantize
from mlx_ds4.formats.quant_encode import decode_fp8_tiles, encode, encode_fp8_tiles
from mlx_ds4.loader import load_model
from mlx_ds4.model.linear import BlockWeight, dense
from mlx_ds4.sources import open_source
from tests.golden_tools import GOLDEN

NANO_K = GOLDEN / "nano_k" / "model"
IDS = mx.array([[5, 9, 200, 7, 3, 1, 2, 3, 4, 5, 6, 7, 8]])
# Largest share of a matrix's norm by which rounding changes it; F32 holds FP4 experts, which MXFP4 keeps.
LIMITS = {"Q8_0": 0.01, "Q4_K": 0.1, "Q2_K": 0.4, "MXFP4": 0.15, "FP8": 0.04}


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    path = tmp_path_factory.mktemp("floats") / "f32.gguf"
    official_to_gguf(NANO_K, path, "f32")
    return path


@pytest.mark.parametrize("format", sorted(MODES.values()))
def test_matrices_become_blocks(tmp_path, floats, format):
    convert_to_folder(floats, tmp_path / "out", Options("packed", quantize=format))
    if format == "MXFP4":  # encodes all once more
        assert verify_folder(tmp_path / "out", floats) == []
    before, after = open_source(floats), open_source(tmp_path / "out")
    changed = 0
    for weight in model_weights(before.config):
        old, new = before.read(weight), after.read(weight)
        if not isinstance(new, BlockWeight):
            assert mx.array_equal(old, new) and old.dtype == new.dtype, weight.name
            wide = weight.shape[-1] % {"FP8": 32, "Q8_0": 32, "MXFP4": 32}.get(format, 256) == 0
            assert not (wide and ".experts." in weight.name)
            continue
        changed += 1
        values, got = np.array(old), np.array(dense(new))
        assert new.format == format and np.linalg.norm(got - values) <= LIMITS[format] * np.linalg.norm(values)
        if weight.name not in ("head.weight", "layers.1.ffn.experts.w2.weight"):
            continue
        flat = values.reshape(-1, values.shape[-1])
        if format != "FP8":  # the encoder's own result, whatever the pieces were
            want = dequantize(format, encode(format, flat)).reshape(values.shape)
        else:
            matrices = values.reshape(-1, *values.shape[-2:])
            want = np.stack([decode_fp8_tiles(*encode_fp8_tiles(matrix)) for matrix in matrices]).reshape(values.shape)
        np.testing.assert_array_equal(got, want)
    assert changed >= 13
    model, _ = load_model(tmp_path / "out")
    assert not any(getattr(module, "rounds_input", False) for module in model.modules())
    plain = np.array(load_model(floats)[0](IDS))
    error = np.linalg.norm(np.array(model(IDS)) - plain) / np.linalg.norm(plain)
    assert 0 < error < (1.5 if format == "Q2_K" else 0.5)


def test_table_says_what_each_tensor_became(tmp_path, capsys, floats):
    args = ["--gguf", str(floats), "--mlx-path", str(tmp_path / "out"), "-q", "--q-mode", "mxfp4"]
    assert main([*args, "--dry-run"]) == 0 and not (tmp_path / "out").exists()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("layers.", "head."))]
    rows = {line[0]: line[1:] for line in lines}
    assert rows["layers.1.ffn.experts.w2.weight"] == ["F32", "1,048,576", "MXFP4", "139,264"]
    assert rows["layers.1.attn_norm.weight"] == ["F32", "1,024", "kept", "1,024"]
    assert rows["head.weight"][2] == "MXFP4"


def test_modes():
    assert block_format("affine", None, None) == block_format("affine", 4, 32) == "Q4_K"
    assert [block_format("affine", bits, None) for bits in (8, 2)] == ["Q8_0", "Q2_K"]
    assert [block_format(mode, None, None) for mode in ("mxfp4", "mxfp8")] == ["MXFP4", "FP8"]
    for mode, bits, group in (("affine", 3, None), ("affine", 4, 64), ("mxfp4", 8, None), ("mxfp8", None, 16)):
        with pytest.raises(ValueError, match="use one of affine: 4 bits, group 32"):
            block_format(mode, bits, group)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--hf-path", str(NANO_K), "-q"], "holds FP8, MXFP4 already: -q is for models of float weights"),
        (["--hf-path", str(NANO_K), "--q-bits", "4"], "need -q"),
        (["--hf-path", str(NANO_K), "-q", "--q-bits", "3"], "no format holds affine with 3 bits"),
        (["--hf-path", str(NANO_K), "-q", "--to", "gguf", "--recipe", "q4"], "--draft-model, -q"),
    ],
)
def test_refusals(tmp_path, capsys, args, message):
    assert main([*args, "--mlx-path", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
