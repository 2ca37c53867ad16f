"""A drafter that `--draft-model` takes along gives the drafts and confidences of its own file, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_ds4.checkpoint import CheckpointError
from mlx_ds4.config import ConfigError
from mlx_ds4.convert import mlx_folder, mlx_writer
from mlx_ds4.convert.cli import main
from mlx_ds4.convert.mlx_folder import Options, convert_to_folder
from mlx_ds4.convert.verify import verify_folder
from mlx_ds4.drafter_files import find_drafter, load_drafter
from mlx_ds4.formats.safetensors import SafetensorsFolder
from mlx_ds4.generate import main as generate
from mlx_ds4.loader import load_model
from mlx_ds4.model.linear import BlockWeight
from tests.checkpoint.folders import patch_byte
from tests.golden_tools import GOLDEN
from tests.speculative.dspark_gguf import DIALECTS, SETTINGS, Values, blocks, parameters, values_of, write

NANO = GOLDEN / "nano" / "model"
SHARDS = Options(shard_bytes=400_000)


@pytest.fixture(scope="module")
def target(nano_gguf):
    return load_model(nano_gguf)[0]


@pytest.fixture(scope="module")
def values(target) -> Values:
    return values_of(load_drafter(target, NANO))


@pytest.fixture(scope="module")
def dspark(tmp_path_factory, values) -> Path:
    return write(tmp_path_factory.mktemp("dspark") / "dspark-q8.gguf", values, kinds=blocks(values))


def same_drafts(target, wanted: Path, folder: Path) -> None:
    """The folder's drafter has the planes, drafts and confidences of the one in `wanted`."""
    assert find_drafter(folder) == folder
    model = load_model(folder)[0]
    drafters = load_drafter(target, wanted), load_drafter(model, folder)
    want, got = (dict(tree_flatten(drafter.parameters())) for drafter in drafters)
    assert got.keys() == want.keys() and len(got) > 70
    for name, array in want.items():
        assert got[name].dtype == array.dtype and mx.array_equal(got[name], array, equal_nan=True), name
    kinds = [{n: w.format for n, w in parameters(d).items() if isinstance(w, BlockWeight)} for d in drafters]
    assert kinds[0] == kinds[1]
    assert drafters[0].config == drafters[1].config and drafters[1].target_layer_ids == (7, 8, 9)
    for prompt, anchor in (([3, 5, 8], 27), (list(range(2, 40)), 300)):
        proposals = []
        for model_, drafter in zip((target, model), drafters, strict=True):
            cache = model_.make_cache()
            drafter.observe(cache, model_.forward(mx.array([prompt]), cache)[1])
            proposals.append(drafter.propose(model_, cache, anchor))
        assert proposals[0] == proposals[1] and len(proposals[0].tokens) == 5


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect(tmp_path, target, nano_gguf, values, dialect):
    file = write(tmp_path / "dspark.gguf", values, kinds=blocks(values), **DIALECTS[dialect])
    convert_to_folder(nano_gguf, tmp_path / "out", Options("packed"), draft_model=file)
    assert verify_folder(tmp_path / "out", nano_gguf, draft_model=file) == []
    os.rename(file, tmp_path / "away.gguf")  # the folder needs it no more
    same_drafts(target, tmp_path / "away.gguf", tmp_path / "out")


def test_the_drafter_of_a_release_beside_a_gguf(tmp_path, target, nano_gguf):
    convert_to_folder(nano_gguf, tmp_path / "out", draft_model=NANO)
    same_drafts(target, NANO, tmp_path / "out")


def test_a_named_drafter_takes_the_place_of_the_releases_own(tmp_path, dspark):
    convert_to_folder(NANO, tmp_path / "out", draft_model=dspark)
    same_drafts(load_model(NANO)[0], dspark, tmp_path / "out")
    drafter = json.loads((tmp_path / "out" / "config.json").read_text())["mlx_ds4"]["drafter"]
    assert drafter["formats"]["mtp.1.attn.wq_a.weight"] == "Q8_0" and drafter["source"]["kind"] == "gguf"


def test_quantizing_the_model_leaves_the_drafter(tmp_path, nano_gguf, dspark):
    convert_to_folder(nano_gguf, tmp_path / "a", draft_model=dspark)
    convert_to_folder(nano_gguf, tmp_path / "b", Options(quantize="Q8_0"), draft_model=dspark)
    sums = [json.loads((tmp_path / name / "manifest.json").read_text())["tensors"] for name in "ab"]
    drafts = [{name: entry["sha256"] for name, entry in s.items() if name.startswith("mtp.")} for s in sums]
    assert drafts[0] == drafts[1] and len(drafts[0]) > 70
    assert "layers.3.attn.wkv.weight.scales" in sums[1] and "layers.3.attn.wkv.weight.scales" not in sums[0]


def test_the_commands(tmp_path, capsys, nano_gguf, dspark):
    args = ["--gguf", str(nano_gguf), "--draft-model", str(dspark), "--mlx-path", str(tmp_path / "out")]
    assert main([*args, "--dry-run"]) == 0 and not (tmp_path / "out").exists()
    text = capsys.readouterr().out
    sizes = {name.strip(): int(size.replace(",", "")) for name, size in re.findall(r"^  (\D+?)  +([\d,]+)", text, re.M)}
    assert re.search(rf"drafter .* \d+ MXFP4.*; {re.escape(str(dspark))}$", text, re.M)
    assert main(args) == 0
    held = SafetensorsFolder(tmp_path / "out").tensors.values()
    assert sizes["drafter"] == sum(info.nbytes for info in held if info.name.startswith("mtp."))
    assert sizes["weights"] == sum(info.nbytes for info in held if not info.name.startswith("mtp."))
    assert sizes["to write"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("model-*"))
    assert main([*args, "--verify"]) == 0
    capsys.readouterr()
    outputs = []
    for draft in (["--model", str(tmp_path / "out"), "--dspark"],
                  ["--model", str(nano_gguf), "--draft-model", str(dspark)]):  # fmt: skip
        assert generate([*draft, "--prompt-tokens", "3 5 8", "--max-tokens", "6", "--output", "tokens"]) == 0
        streams = capsys.readouterr()
        assert "Drafts: " in streams.err
        outputs.append(streams.out)
    assert outputs[0] == outputs[1] and len(outputs[0].split()) == 6


def test_verify(tmp_path, nano_gguf, values, dspark):
    folder, file = tmp_path / "out", Path(shutil.copy(dspark, tmp_path / "dspark.gguf"))
    convert_to_folder(nano_gguf, folder, draft_model=file)
    with pytest.raises(ValueError, match=r"was not made from .*f16.gguf, or .* --draft-model"):
        verify_folder(folder, nano_gguf)
    name = "mtp.1.ffn.experts.w2.weight.codes"
    shard = SafetensorsFolder(folder)
    patch_byte(folder, name, int(shard.read(name, 0, 1)[0]) ^ 1)
    (fault,) = verify_folder(folder, nano_gguf, draft_model=file)
    assert fault.startswith(f"{name} in model-") and "the folder's bytes changed" in fault
    patch_byte(folder, name, int(shard.read(name, 0, 1)[0]) ^ 1)
    own, array = values["mtp.2.attn_sinks.weight"]
    settings = {**SETTINGS, "noise_token_id": ("u32", 499)}
    other = {**values, "mtp.2.attn_sinks.weight": (own, array + 1)}
    write(file, other, kinds=blocks(values), settings=settings)
    faults = verify_folder(folder, nano_gguf, draft_model=file)
    assert faults[0] == "the drafter: its dspark_noise_token_id is 498, the source's is 499"
    assert len(faults) == 2 and re.match(r"mtp.2.attn.attn_sink in .*: the source's bytes differ", faults[1])


def test_resume(tmp_path, monkeypatch, nano_gguf, dspark):
    whole, folder, file = tmp_path / "whole", tmp_path / "out", Path(shutil.copy2(dspark, tmp_path / "dspark.gguf"))
    convert_to_folder(nano_gguf, whole, SHARDS, draft_model=file)
    last = max(path.name for path in whole.glob("model-*.safetensors"))
    assert any(
        info.name.startswith("mtp.") for info in SafetensorsFolder(whole).tensors.values() if info.file.name == last
    )

    def stop(folder, out, report):
        if out.name == last:
            raise KeyboardInterrupt
        return mlx_writer.write_file(folder, out, report)

    with monkeypatch.context() as patch:
        patch.setattr(mlx_folder, "write_file", stop)
        with pytest.raises(KeyboardInterrupt):
            convert_to_folder(nano_gguf, folder, SHARDS, draft_model=file)
    for path in (load_model, lambda path: load_drafter(load_model(nano_gguf)[0], path)):
        with pytest.raises(CheckpointError, match="its conversion is not finished"):
            path(folder)
    with pytest.raises(ValueError, match="was begun from another source"):
        convert_to_folder(nano_gguf, folder, SHARDS, resume=True)
    with pytest.raises(ValueError, match="was begun from another source"):
        convert_to_folder(nano_gguf, folder, SHARDS, resume=True, draft_model=dspark)
    before = file.stat()
    os.utime(file, (1, 1))
    with pytest.raises(ValueError, match="or it has changed: start again with --overwrite"):
        convert_to_folder(nano_gguf, folder, SHARDS, resume=True, draft_model=file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    convert_to_folder(nano_gguf, folder, SHARDS, resume=True, draft_model=file)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}


def test_a_drafter_that_changes_on_the_way_is_refused(tmp_path, nano_gguf, dspark):
    file = Path(shutil.copy(dspark, tmp_path / "dspark.gguf"))
    with pytest.raises(ValueError, match=r"dspark.gguf: changed since the conversion began"):
        convert_to_folder(
            nano_gguf, tmp_path / "out", draft_model=file, progress=lambda *_: os.utime(file, (1, time.time()))
        )
    assert not (tmp_path / "out" / "config.json").exists()


def test_manifest_and_config_name_both_sources(tmp_path, nano_gguf, dspark):
    convert_to_folder(nano_gguf, tmp_path / "a", draft_model=dspark)
    convert_to_folder(nano_gguf, tmp_path / "b")
    convert_to_folder(NANO, tmp_path / "c")
    a, b, c = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in "abc")
    assert a["source"] == b["source"] and "drafter" not in b and c["drafter"] == c["source"]
    assert a["drafter"]["kind"] == "gguf" and [f["name"] for f in a["drafter"]["files"]] == ["dspark-q8.gguf"]
    assert a["drafter"]["fingerprint"] != a["source"]["fingerprint"]
    section = json.loads((tmp_path / "a" / "config.json").read_text())["mlx_ds4"]
    assert section["drafter"]["source"] == {key: a["drafter"][key] for key in ("kind", "fingerprint")}
    with pytest.raises(CheckpointError, match="holds no drafter"):
        load_drafter(load_model(tmp_path / "b")[0], tmp_path / "b")


# ---- what is refused -----------------------------------------------------------------------------------


def changed(**settings):
    return {"settings": {**SETTINGS, **settings}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "deepseek4-dspark"}, "this is the drafter of DeepSeek V4"),
        (changed(target_layer_ids=("[u32]", [40, 41, 42])), "V4's taps are 40, 41, 42"),
        (changed(expert_count=("u32", 256)), "n_routed_experts is 256, the model's is 8"),
        (changed(markov_rank=("u32", 64)), "markov_w1.weight is [512, 32] not [512, 64]"),
        (changed(block_size=("u32", 0)), "dspark_block_size is 0"),
        ({"architecture": "llama", "spell": lambda name: name.replace("mtp", "x")}, "expected a DSpark drafter"),
        ({"damaged": ["mtp.1.attn_q_a.weight"]}, "tensor mtp.1.attn_q_a.weight (Q8_0) holds a scale or value that is"),
    ],
)
def test_drafters_that_are_not_right(tmp_path, capsys, nano_gguf, values, options, message):
    file, out = write(tmp_path / "dspark.gguf", values, kinds=blocks(values), **options), tmp_path / "out"
    assert main(["--gguf", str(nano_gguf), "--draft-model", str(file), "--mlx-path", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not out.exists() or ("damaged" in options and not {"config.json", "manifest.json"} & {*os.listdir(out)})


def test_drafters_that_are_none(tmp_path, capsys, nano_gguf, dspark):
    convert_to_folder(nano_gguf, tmp_path / "other", draft_model=dspark)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(dspark.read_bytes()[:-1000])
    for args, message in (
        (["--gguf", nano_gguf, "--draft-model", tmp_path / "no.gguf"], "there is no file"),
        (["--gguf", nano_gguf, "--draft-model", nano_gguf], "expected a DSpark drafter"),
        (["--gguf", nano_gguf, "--draft-model", cut], "are missing: resume the download"),
        (["--gguf", nano_gguf, "--draft-model", tmp_path / "other"], "is a converted folder: name the DSpark GGUF"),
        (["--gguf", nano_gguf, "--draft-model", GOLDEN / "nano_k" / "model"], "no drafter"),
        (["--hf-path", GOLDEN / "nano_k" / "model", "--draft-model", dspark], "belongs to another model"),
        (["--hf-path", NANO, "--to", "gguf", "--recipe", "f16", "--draft-model", dspark], "leave --resume"),
    ):
        assert main([*map(str, args), "--mlx-path", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists(), error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda section: section.update(drafter=3), "does not describe its drafter"),
        (lambda section: section["drafter"].pop("settings"), "does not describe its drafter"),
        (lambda section: section["drafter"]["settings"].update(more=1), "does not describe its drafter"),
        (lambda section: section["drafter"]["settings"].update(dspark_block_size=0), "dspark_block_size is 0"),
        (lambda section: section["drafter"].update(formats={}), "lists formats of other tensors"),
        (lambda section: section.update(format_version=9), "has format version 9"),
        (lambda section: section.pop("drafter"), "lacks one of"),
    ],
)
def test_folders_that_are_not_right(tmp_path, target, nano_gguf, dspark, change, message):
    convert_to_folder(nano_gguf, tmp_path / "out", draft_model=dspark)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    change(config["mlx_ds4"])
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message) as caught:
        load_drafter(target, tmp_path / "out")
    assert "\n" not in str(caught.value)
