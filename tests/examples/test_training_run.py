"""A whole run at the smallest size: prepare, train, interrupt, resume, export, load, and the text that comes out."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from examples import train_small
from examples.small_model import train as training
from examples.small_model.batches import Data
from examples.small_model.corpus import prepare
from examples.small_model.export import importance, official_folder
from examples.small_model.forward import Pass, forward
from examples.small_model.shape import with_tokens
from mlx_ds4.chat import ASSISTANT, USER
from mlx_ds4.config import ModelConfig
from mlx_ds4.convert.imatrix import read_imatrix
from mlx_ds4.drafter_files import find_drafter, load_drafter
from mlx_ds4.loader import load_model
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.tokenizer import Tokenizer

SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 32, "q_lora_rank": 32,
    "o_lora_rank": 32, "sliding_window": 8, "index_topk": 8, "candidate_topk_blocks": 2, "candidate_block_size": 4,
    "engram_vocab_size": 61, "dspark_markov_rank": 32, "hc_sinkhorn_iters": 4,
}  # fmt: skip
OPTIONS = training.Options(batch=2, length=32, learning_rate=5e-3, steps=16)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    about = prepare(folder, vocab_size=400, cut_windows=20, limit=6)
    assert about["documents"] == 6 and about["tokens"] > 10_000
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    token_map = np.load(folder / "token_map.npy")
    config = with_tokens(dataclasses.replace(config, **SIZES), token_map, config.dspark_noise_token_id)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    np.save(folder / "held.npy", np.load(folder / "tokens.npy")[:3000])
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run")
    training.train(data, out, OPTIONS)
    return out


@pytest.fixture(scope="module")
def exported(data, run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported")
    args = ["export", "--data", data, "--run", run, "--out", out, "--calibration-windows", 4]
    assert train_small.main([str(a) for a in [*args, "--recipe", "mxfp4", "--recipe", "f32"]]) == 0
    return out


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_losses_fall(run):
    model = [r for r in records(run) if r.get("part") == "model" and "loss" in r]
    draft = [r for r in records(run) if r.get("part") == "draft" and "loss" in r]
    assert model[0]["loss"] > 5.8 and model[-1]["loss"] < model[0]["loss"] - 0.5
    assert draft[-1]["draft"] < draft[0]["draft"] - 0.1
    assert np.isfinite([r["held"] for r in records(run) if "held" in r]).all()


def test_the_corpus_is_packed_as_the_tokenizer_says(data):
    tokenizer = Tokenizer.from_folder(data)
    tokens, cut = np.load(data / "tokens.npy"), np.load(data / "cut.npy")
    text = tokenizer.decode(tokens[:2000].tolist())
    assert tokenizer.encode(text, allow_special=True)[:1900] == tokens[:1900].tolist()
    assert "\n    " in text and "def " in tokenizer.decode(tokens.tolist())
    user, header = tokenizer.token_id(USER), tokenizer.token_id(ASSISTANT)
    assert (cut[:, 0] == tokenizer.bos_token_id).all() and (cut[1::2, 1] == user).all()
    assert all((row == header).sum() == 1 for row in cut[1::2]) and not (cut[::2] == user).any()
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "x = "}])
    assert asked[:2] == [tokenizer.bos_token_id, user] and asked[-2] == header


def test_a_resumed_run_is_the_same_run(data, run, tmp_path, monkeypatch):
    options = dataclasses.replace(OPTIONS, checkpoint=tmp_path / "state.safetensors")
    real = training._Run._model_step

    def breaks(self, share):
        if self.learners["model"].step == 5:
            raise KeyboardInterrupt
        return real(self, share)

    monkeypatch.setattr(training._Run, "_model_step", breaks)
    with pytest.raises(KeyboardInterrupt):
        training.train(data, tmp_path / "out", options)
    monkeypatch.undo()
    training.train(data, tmp_path / "out", dataclasses.replace(options, resume=True))
    for stem in ("model", "drafter"):
        whole, resumed = (training.read_weights(folder, stem) for folder in (run, tmp_path / "out"))
        assert whole.keys() == resumed.keys()
        # An array read from a file lies elsewhere in memory, which moves the last bit of MLX's sums on the CPU: four
        # units in the last place of 1, in a handful of steps.
        assert all(mx.abs(whole[name] - resumed[name]).max().item() <= 5e-7 for name in whole)


def test_a_drafter_of_its_own(data, run, tmp_path):
    """Its loss falls, on the very model of the run before."""
    args = ["train", "--data", data, "--out", tmp_path, "--model", run, "--batch", 2, "--length", 32, "--steps", 6]
    assert train_small.main([str(a) for a in args]) == 0
    before, after = (training.read_weights(folder, "model") for folder in (run, tmp_path))
    assert before.keys() == after.keys() and all(mx.array_equal(before[name], after[name]) for name in before)
    assert {r["part"] for r in records(tmp_path) if "part" in r} == {"draft"}
    draft = [r for r in records(tmp_path) if "loss" in r]
    assert draft[-1]["draft"] < draft[0]["draft"]
    assert not mx.array_equal(
        *(training.read_weights(folder, "drafter")["mtp.0.attn.wkv.weight"] for folder in (run, tmp_path))
    )


@pytest.mark.slow
def test_a_run_ends_with_its_time(data, tmp_path):
    options = dataclasses.replace(OPTIONS, steps=None, minutes=6 / 60)
    training.train(data, tmp_path, options)
    last = [r for r in records(tmp_path) if r.get("part") == "model" and "loss" in r][-1]
    assert last["seconds"] < 60 and (tmp_path / "drafter-1.safetensors").is_file()
    assert training.rate_at(1.0, 1.0) == pytest.approx(0.02) and training.rate_at(0.02, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["official", "small-mxfp4.gguf", "small-f32.gguf"])
def test_what_was_trained_is_what_loads(data, run, exported, kind):
    prepared = Data(data)
    named = {**training.read_weights(run, "model"), **training.read_weights(run, "drafter")}
    model, tokenizer = load_model(exported / kind, activation_rounding=True)
    assert tokenizer.get_vocab() == Tokenizer.from_folder(data).get_vocab()
    ids = next(prepared.held_batches(1, 48, 1))[0]
    ours = forward(named, named, prepared.config, mx.array(ids), prepared.rows(ids), Pass(prepared.config, 48))
    theirs = model(mx.array(ids))
    error = mx.linalg.norm(ours - theirs, axis=-1) / mx.linalg.norm(theirs, axis=-1)
    # The recipe mxfp4 has Q8_0 for the FP8 matrices; the other two hold the trained values.
    assert error.max().item() < (0.2 if "mxfp4" in kind else 0.03), error.max().item()


def test_the_drafter_loads_from_both(exported):
    model, _ = load_model(exported / "official")
    ours = load_drafter(model, exported / "official")
    file = find_drafter(exported / "small-mxfp4.gguf")
    assert file == exported / "small-dspark.gguf"
    other = load_drafter(load_model(exported / "small-mxfp4.gguf")[0], file)
    assert ours.config == other.config and ours.target_layer_ids == other.target_layer_ids
    for stage, twin in zip(ours.mtp, other.mtp, strict=True):
        for part in ("w1", "w2", "w3"):
            a, b = (s.ffn.experts[part].weight for s in (stage, twin))
            assert isinstance(a, BlockWeight) and mx.array_equal(a.dequantize(), b.dequantize())


def test_the_imatrix_names_every_matrix(data, run, exported):
    found = read_imatrix(exported / "small.imatrix")
    prepared = Data(data)
    named = training.read_weights(run, "model")
    again = importance(prepared, named, 4)
    assert found.keys() == again.keys() and len(found) > 60
    assert all(np.allclose(found[name], again[name].reshape(-1), rtol=1e-5) for name in found)
    gate = again["blk.2.ffn_gate_exps.weight"]
    assert gate.shape == (prepared.config.n_routed_experts, 64) and not np.allclose(gate[0], gate[1])


def test_values_that_do_not_fit_their_storage_are_refused(data, run, tmp_path):
    config = Data(data).config
    values = {stem: training.read_weights(run, stem) for stem in ("model", "drafter")}
    named = {k: np.array(v) for part in values.values() for k, v in part.items()}
    named["layers.0.ffn.experts.w1.weight"] = named["layers.0.ffn.experts.w1.weight"] * 1.1
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.experts\.w1\.weight: FP4 does not hold"):
        official_folder(tmp_path / "folder", config, named, Tokenizer.from_folder(data))


def test_errors_are_one_line(tmp_path, capsys):
    assert train_small.main(["train", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "run `prepare` first" in capsys.readouterr().err
    assert train_small.main(["export", "--data", str(tmp_path), "--run", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_training_needs_only_mlx_numpy_and_gguf():
    """A machine that only trains has neither tokenizers nor a progress bar."""
    code = (
        "import sys, examples.small_model.train\n"
        "found = {'tokenizers', 'sentencepiece', 'tqdm', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
