"""Converted folders hold what their source holds, and give its logits bit for bit."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_ds4.api import load
from mlx_ds4.checkpoint import CheckpointError, model_weights, other_part
from mlx_ds4.config import ConfigError
from mlx_ds4.convert import engram_files
from mlx_ds4.convert.cli import main
from mlx_ds4.convert.mlx_folder import Options, convert_to_folder
from mlx_ds4.convert.verify import verify_folder
from mlx_ds4.drafter_files import find_drafter, load_drafter, open_drafter
from mlx_ds4.formats.folder_layout import stored_arrays
from mlx_ds4.formats.gguf_header import FormatError
from mlx_ds4.formats.safetensors import SafetensorsFolder
from mlx_ds4.loader import describe, load_model
from mlx_ds4.model.linear import BlockWeight
from mlx_ds4.sources import open_source
from tests.golden_tools import GOLDEN, TINY

NANO, NANO_K = GOLDEN / "nano" / "model", GOLDEN / "nano_k" / "model"
SMALL = 300_000  # bytes of a shard: several of them, and tensors that are larger
IDS = mx.array([[5, 9, 200, 7, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 250, 0, 1]])


@pytest.fixture(scope="module")
def sources(nano_k_gguf, nano_gguf):
    def get(name: str) -> Path:
        if name in ("nano", "nano_k"):
            return GOLDEN / name / "model"
        if name == "tiny":
            return TINY
        return nano_gguf if name == "f16" else nano_k_gguf(name)

    return get


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("q2", "stacked"),
        ("q2", "packed"),
        ("q4", "stacked"),
        ("mxfp4", "stacked"),
        ("mxfp4", "packed"),
        ("f32", "stacked"),
        ("f16", "packed"),
        ("nano", "stacked"),
        ("nano", "packed"),
        ("tiny", "stacked"),
    ],
)
def test_same_logits_and_same_bits(tmp_path, sources, name, experts):
    path, folder = sources(name), tmp_path / "out"
    convert_to_folder(path, folder, Options(experts, "copy" if experts == "packed" else "reference"))
    assert verify_folder(folder, path) == []
    (model, tokenizer), (again, words) = load_model(path), load(folder)
    assert again.config == model.config and words.gguf_metadata() == tokenizer.gguf_metadata()
    np.testing.assert_array_equal(np.array(again(IDS)), np.array(model(IDS)))
    direct, converted = open_source(path), open_source(folder)
    for weight in model_weights(direct.config):
        if weight.storage != "ROWS":
            want, got = direct.read(weight), converted.read(weight)
            assert got.shape == want.shape and isinstance(got, BlockWeight) == isinstance(want, BlockWeight)
            if isinstance(want, BlockWeight):
                assert got.format == want.format
            got, want = ({"": x} if isinstance(x, mx.array) else x.planes for x in (got, want))
            assert got.keys() == want.keys()
            for plane, array in want.items():
                assert got[plane].dtype == array.dtype and mx.array_equal(got[plane], array), (weight.name, plane)
    if experts == "stacked":
        assert not list(folder.glob("*.bin"))
        names = set(SafetensorsFolder(folder).tensors) - {f"layers.{i}.ffn.gate.bias_vl" for i in range(99)}
        names = {name for name in names if not name.startswith("mtp.")}
        assert names == {name for name, _ in tree_flatten(again.parameters())}
    assert describe(folder).weight_bytes == describe(path).weight_bytes
    assert not [file for file in os.listdir(folder) if "partial" in file or file == "conversion.json"]


def test_shards_keep_to_their_size(tmp_path):
    convert_to_folder(NANO, tmp_path / "out", Options(shard_bytes=SMALL))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    folder = SafetensorsFolder(tmp_path / "out")
    shards: dict[str, list] = {}
    for info in folder.tensors.values():
        shards.setdefault(info.file.name, []).append(info)
    assert {other_part(infos[0].name) for infos in shards.values()} == {None, "drafter"}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in folder.tensors.values())
    assert len(shards) == len(set(index["weight_map"].values())) > 3
    for infos in shards.values():
        assert len({other_part(info.name) for info in infos}) == 1
        weights = {info.name.removesuffix(".codes").removesuffix(".scales") for info in infos}
        assert sum(info.nbytes for info in infos) <= SMALL or len(weights) == 1


def test_the_drafter_comes_along(tmp_path):
    convert_to_folder(NANO, tmp_path / "out", Options("packed"))
    drafters = []
    for path in (NANO, tmp_path / "out"):
        assert find_drafter(path) == path
        drafters.append(dict(tree_flatten(load_drafter(load_model(path)[0], path).parameters())))
    assert drafters[0].keys() == drafters[1].keys() and len(drafters[0]) > 50
    for name, want in drafters[0].items():
        np.testing.assert_array_equal(np.array(drafters[1][name].view(mx.uint8)), np.array(want.view(mx.uint8)))


def test_mlx_decodes_the_planes_of_a_release(tmp_path):
    """FP4 experts are MLX's mxfp4, FP8 matrices its mxfp8 once each tile's scale stands in all of its rows."""
    convert_to_folder(NANO_K, tmp_path / "out")
    shards = {}
    for shard in (tmp_path / "out").glob("model-*"):
        shards.update(mx.load(str(shard)))
    source, seen = open_source(NANO_K), set()
    for weight in model_weights(source.config):
        if weight.storage not in ("FP4", "FP8"):
            continue
        codes, scales = (shards[f"{weight.name}.{plane}"] for plane in ("codes", "scales"))
        mode = "mxfp4" if weight.storage == "FP4" else "mxfp8"
        if mode == "mxfp8":
            scales = mx.repeat(scales, 32, axis=0)[: codes.shape[0]]
        values = mx.dequantize(codes.view(mx.uint32), scales, group_size=32, mode=mode, dtype=mx.float32)
        np.testing.assert_array_equal(np.array(values), np.array(source.read(weight).dequantize()), err_msg=weight.name)
        seen.add(mode)
    assert seen == {"mxfp4", "mxfp8"}


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    if not Path("/proc/self/io").is_file():
        pytest.skip("what a process reads is counted in /proc/self/io, which only Linux has")
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", ["nano_k", "q4", "tiny"])
def test_a_folder_is_opened_without_reading_its_weights(tmp_path, sources, name):
    """A GGUF or a release is read and rearranged while it loads; here nothing is, and then each weight once."""
    path, folder = sources(name), tmp_path / "out"
    convert_to_folder(path, folder)
    weights, start = describe(path).weight_bytes, bytes_read()
    model, _ = load(path)
    assert bytes_read() - start > weights
    mx.eval(model(IDS))  # Python reads its own modules when they are first used
    start = bytes_read()
    model, _ = load(folder)
    opened = bytes_read() - start
    mx.eval(model(IDS))
    assert opened < 0.1 * weights, (opened, weights)
    assert 0.9 * weights < bytes_read() - start < 1.2 * weights


def test_arrays_come_lazily(tmp_path):
    convert_to_folder(NANO_K, tmp_path / "out")
    before = mx.get_active_memory()
    model, _ = load_model(tmp_path / "out")
    held = mx.get_active_memory() - before
    assert held < 0.1 * describe(NANO_K).weight_bytes
    mx.eval(model.parameters())
    assert mx.get_active_memory() - before > 0.9 * describe(NANO_K).weight_bytes


def test_manifest_has_a_checksum_of_every_array(tmp_path):
    convert_to_folder(NANO, tmp_path / "out", Options("packed", "copy", SMALL))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    source = open_source(NANO)
    names, drafter = set(), open_drafter(NANO, source.config)
    for weight in (*model_weights(source.config), *drafter.weights):
        if weight.storage == "ROWS":
            names.add(weight.name)
            continue
        for array in stored_arrays(weight.name, source.format_of(weight), weight.shape).values():
            names.add(array.name)
    assert manifest["tensors"].keys() == names and len(manifest["source"]["fingerprint"]) == 64
    weight = next(w for w in model_weights(source.config) if w.name == "layers.3.ffn.experts.w3.weight")
    codes = np.array(source.read(weight).codes)
    assert manifest["tensors"][weight.name + ".codes"] == {
        "file": "experts-00003.bin",
        "sha256": hashlib.sha256(codes.tobytes()).hexdigest(),
    }
    table = manifest["tensors"]["layers.1.engram.embed.weight"]
    assert table["sha256"] == hashlib.sha256((tmp_path / "out" / table["file"]).read_bytes()).hexdigest()


def test_one_read_fetches_one_packed_expert(tmp_path):
    convert_to_folder(NANO_K, tmp_path / "out", Options("packed"))
    source, folder = open_source(NANO_K), open_source(tmp_path / "out")
    weights = {w.name: w for w in model_weights(source.config) if ".experts." in w.name}
    file = folder.packed["layers.1.ffn.experts.w1.weight"]
    assert file is folder.packed["layers.1.ffn.experts.w2.weight"] and file.record.stride % 16384 == 0
    offsets = [(part.name, part.offset) for part in file.record.parts.values()]
    assert [name for name, _ in offsets] == [
        f"layers.1.ffn.experts.{w}.weight.{plane}" for w in ("w1", "w3", "w2") for plane in ("codes", "scales")
    ]
    assert offsets == sorted(offsets, key=lambda pair: pair[1]) and all(at % 64 == 0 for _, at in offsets)
    expert = file.expert(3)
    for name, array in expert.items():
        weight, _, plane = name.rpartition(".")
        np.testing.assert_array_equal(array, np.array(source.read(weights[weight]).planes[plane])[3])
    for number in (-1, file.count):
        with pytest.raises(IndexError, match="there is no number"):
            file.expert(number)
    with open(file.path, "r+b") as handle:
        handle.truncate(os.path.getsize(file.path) - 1)
    with pytest.raises(FormatError, match=r"experts-00001.bin: has \d+ bytes, expected"):
        open_source(tmp_path / "out")


# ---- Engram tables -----------------------------------------------------------------------------------


def rows_of(path: Path) -> list[np.ndarray]:
    source = open_source(path)
    return [table.rows(np.arange(table.count)) for table in source.engram(source.tokenizer())[2]]


@pytest.mark.parametrize("storage", ["reference", "copy", "clone"])
@pytest.mark.parametrize("kind", ["official", "gguf", "pieces"])
def test_tables_are_the_same_rows(tmp_path, monkeypatch, storage, kind):
    path = NANO if kind == "official" else TINY
    if kind == "pieces":  # the second table straddles the cut
        data, path = path.read_bytes(), tmp_path / "tiny.gguf.part1"
        path.write_bytes(data[:-90_000])
        (tmp_path / "tiny.gguf.part2").write_bytes(data[-90_000:])
    if storage == "clone":  # stands for a file system that shares blocks
        monkeypatch.setattr(engram_files, "clone_file", shutil.copyfile)
    convert_to_folder(path, tmp_path / "out", Options(engram=storage))
    for got, want in zip(rows_of(tmp_path / "out"), rows_of(path), strict=True):
        np.testing.assert_array_equal(got, want)
    assert verify_folder(tmp_path / "out", path) == []
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    assert len(rows_of(moved)) == 2


def extent_flags(path: Path) -> list[int]:
    """FIEMAP flags of a file's extents, once its data is on the disk (Linux)."""
    fcntl = pytest.importorskip("fcntl")
    request = bytearray(struct.pack("<QQIIII", 0, 2**64 - 1, 1, 0, 256, 0) + bytes(56 * 256))
    with open(path, "rb") as file:
        fcntl.ioctl(file.fileno(), 0xC020660B, request)
    count = struct.unpack_from("<I", request, 20)[0]
    return [struct.unpack_from("<I", request, 32 + 56 * number + 40)[0] for number in range(count)]


def test_a_real_clone_shares_its_blocks(tmp_path):
    """No stand-in: needs a file system that clones, such as Btrfs or XFS (`pytest --basetemp` chooses one)."""
    path = Path(shutil.copy(TINY, tmp_path / "tiny.gguf"))
    try:
        engram_files.clone_file(path, tmp_path / "probe")
    except OSError as error:
        pytest.skip(f"the file system of {tmp_path} cannot clone: {error.strerror}")
    want = rows_of(path)
    convert_to_folder(path, tmp_path / "out", Options(engram="clone"))
    clone = tmp_path / "out" / "engram-tiny.gguf"
    assert clone.read_bytes() == path.read_bytes()
    if sys.platform == "linux":
        flags = extent_flags(clone)
        assert flags and all(flag & 0x2000 for flag in flags)  # FIEMAP_EXTENT_SHARED
    damage(path, path.stat().st_size - 100_000, bytes(100_000))  # the source changes and goes, the clone stays
    path.unlink()
    for got, rows in zip(rows_of(tmp_path / "out"), want, strict=True):
        np.testing.assert_array_equal(got, rows)


def test_clone_says_where_it_cannot(tmp_path, monkeypatch):
    def refuse(source, target):
        Path(target).touch()
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(engram_files, "clone_file", refuse)
    with pytest.raises(ValueError, match=r"cannot clone .*: use --engram copy or reference"):
        convert_to_folder(NANO, tmp_path / "out", Options(engram="clone"))
    assert os.listdir(tmp_path / "out") == []


def test_a_clone_that_fails_takes_the_others_with_it(tmp_path, monkeypatch, capsys):
    """The first piece can be cloned, the second lies on another disk."""
    data, path, out = TINY.read_bytes(), tmp_path / "tiny.gguf.part1", tmp_path / "out"
    path.write_bytes(data[:-90_000])
    (tmp_path / "tiny.gguf.part2").write_bytes(data[-90_000:])

    def clone(source, target):
        if str(source).endswith("part2"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        shutil.copyfile(source, target)

    monkeypatch.setattr(engram_files, "clone_file", clone)
    args = ["--gguf", str(path), "--mlx-path", str(out)]
    assert main([*args, "--engram", "clone"]) == 2
    error = capsys.readouterr().err
    assert "part2 (Invalid cross-device link): use --engram copy or reference" in error and error.count("\n") == 1
    assert os.listdir(out) == []
    assert main([*args, "--engram", "copy"]) == 0 and len(rows_of(out)) == 2


def damage(path: Path, offset: int, value: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "the table is in .*tiny.gguf, which cannot be read .*--engram copy"),
        (
            lambda path: damage(path, path.stat().st_size, b"x"),
            r"not the file that the conversion saw \(it has \d+ bytes",
        ),
        (lambda path: damage(path, 3000, b"x"), "its header is another one"),
        (
            lambda path: damage(path, path.stat().st_size - 834 * 66 - 32, bytes(66 * 400)),
            "rows of the table are others",
        ),
    ],
)
def test_a_referenced_source_that_changed_is_refused(tmp_path, change, message):
    path = Path(shutil.copy(TINY, tmp_path / "tiny.gguf"))
    convert_to_folder(path, tmp_path / "out")
    change(path)
    with pytest.raises(FormatError, match=message):
        load_model(tmp_path / "out")


# ---- folders that are not right ------------------------------------------------------------------------


def test_damage_is_found_by_verify(tmp_path):
    folder = tmp_path / "out"
    convert_to_folder(TINY, folder, Options("packed", "copy"))
    info = SafetensorsFolder(folder).tensors["layers.2.attn.wq_a.weight.scales"]
    damage(info.file, info.offset + 7, b"\x55")
    damage(folder / "experts-00001.bin", 100, b"\x55\xaa\x55")
    faults = verify_folder(folder, TINY)
    assert [fault.split(" in ")[0] for fault in faults] == [
        "layers.2.attn.wq_a.weight.scales",
        "layers.1.ffn.experts.w1.weight.codes",
    ]
    assert all("the folder's bytes changed" in fault for fault in faults)


def test_verify_finds_another_source(tmp_path):
    other = Path(shutil.copytree(NANO_K, tmp_path / "source"))
    convert_to_folder(other, tmp_path / "out")
    info = SafetensorsFolder(other).tensors["layers.0.attn.wkv.weight"]
    damage(info.file, info.offset, b"\x31\x32")
    assert verify_folder(tmp_path / "out", other) == [
        "layers.0.attn.wkv.weight.codes in model-00001-of-00001.safetensors: the source's bytes differ"
    ]
    with pytest.raises(ValueError, match="was not made from"):
        verify_folder(tmp_path / "out", NANO)
    with pytest.raises(ValueError, match="is no converted folder"):
        verify_folder(NANO_K, NANO_K)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "out"
    convert_to_folder(NANO, folder, Options(shard_bytes=SMALL))
    return folder


def edit(key: str, value) -> callable:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        section = config["mlx_ds4"]
        if value is None:
            del section[key]
        else:
            section[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (edit("format_version", 2), ConfigError, "has format version 2, this program reads 1"),
        (edit("formats", None), ConfigError, "lacks one of"),
        (edit("formats", {"x": "Q8_0"}), ConfigError, "lists formats of other tensors"),
        (edit("experts", "loose"), ConfigError, "names the layout 'loose'"),
        (edit("activation_rounding", 1), ConfigError, "activation rounding 1"),
        (edit("engram", {"tables": []}), ConfigError, "does not say where the Engram tables lie"),
        (edit("engram", {"tables": [{"sample_sha256": "", "spans": [{"path": 3}]}] * 2}), ConfigError, "expected one"),
        (edit("experts", "packed"), FormatError, "experts-00000.bin"),
        (lambda folder: (folder / "engram.safetensors").unlink(), FormatError, "engram.safetensors"),
        (lambda folder: (folder / "conversion.json").touch(), CheckpointError, "not finished: run .* --resume"),
        (lambda folder: next(folder.glob("model-00002*")).unlink(), FormatError, "1 of .* shards are missing"),
        (lambda folder: damage(folder / "config.json", 0, b"["), ConfigError, "is not valid JSON"),
    ],
)
def test_load_refuses_in_one_sentence(tmp_path, converted, change, error, message):
    shutil.copytree(converted, tmp_path / "out")
    change(tmp_path / "out")
    with pytest.raises(error, match=message) as caught:
        load_model(tmp_path / "out")
    assert "\n" not in str(caught.value)
