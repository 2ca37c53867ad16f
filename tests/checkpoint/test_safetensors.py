"""The safetensors reader and writer: against MLX's own, and against files that lie."""

from __future__ import annotations

import json
import os
import struct

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.formats.gguf import FormatError
from mlx_ds4.formats.safetensors import SafetensorsFolder, read_header, write_safetensors
from tests.golden_tools import GOLDEN

NANO = GOLDEN / "nano" / "model"


def test_reads_what_mlx_reads():
    with SafetensorsFolder(NANO) as folder:
        seen = 0
        for shard in sorted(NANO.glob("*.safetensors")):
            for name, want in mx.load(str(shard)).items():
                want = np.array(want.view(mx.uint8)).reshape(-1)
                np.testing.assert_array_equal(folder.read(name), want)
                np.testing.assert_array_equal(folder.read(name, 1, len(want)), want[1:])
                seen += 1
        assert seen == len(folder.tensors) == 1547
        assert folder.tensors["layers.0.attn.wkv.scale"].dtype == "F8_E8M0"
        assert folder.tensors["layers.0.ffn.experts.3.w2.weight"].shape == (128, 32)


def test_writes_what_mlx_reads(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 5), np.float32), rng.integers(0, 255, (2, 4, 2), np.uint8)
    path = tmp_path / "x.safetensors"
    write_safetensors(
        path, [("a", "F32", a.shape, lambda: [a[:1], a[1:]]), ("b", "F8_E4M3", b.shape, lambda: [b.tobytes()])]
    )
    loaded = mx.load(str(path))
    np.testing.assert_array_equal(np.array(loaded["a"]), a)
    np.testing.assert_array_equal(np.array(loaded["b"]), b)
    assert os.listdir(tmp_path) == ["x.safetensors"]
    single = tmp_path / "model.safetensors"
    path.rename(single)
    with SafetensorsFolder(tmp_path) as folder:
        np.testing.assert_array_equal(folder.read("a").view(np.float32).reshape(3, 5), a)
        with pytest.raises(ValueError, match="cannot read 4 to 61"):
            folder.read("a", 4, 61)
        os.truncate(single, single.stat().st_size - 1)
        with pytest.raises(FormatError, match="ends inside tensor b"):
            folder.read("b")


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def breaks():
        yield b"1234"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(path, [("a", "U8", (8,), breaks)])
    with pytest.raises(ValueError, match="yielded 7 bytes, its shape needs 8"):
        write_safetensors(path, [("a", "U8", (8,), lambda: [b"1234567"])])
    with pytest.raises(ValueError, match="given twice"):
        write_safetensors(path, [("a", "U8", (1,), lambda: [b"1"])] * 2)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]


def _file(header: object, payload: int = 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(payload)


def _tensor(dtype="F32", shape=(4,), span=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a safetensors file"),
        (b"1234567", "not a safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "claim a header of 1152921504606846976 bytes"),
        (struct.pack("<Q", 90) + b"{}", "expected 2 to 2"),
        (_file(b"<html>"), "not valid JSON"),
        (_file(b"[" * 5000), "not valid JSON"),
        (_file(b"\xff\xfe{}"), "not valid JSON"),
        (_file(b'{"a": 1, "a": 2}'), "a name occurs twice"),
        (_file([1]), "JSON list"),
        (_file({"a": 3}), "dtype None"),
        (_file({"a": _tensor(dtype="F8_E9M9")}), "dtype 'F8_E9M9'"),
        (_file({"a": _tensor(dtype=["F32"])}), "dtype"),
        (_file({"a": _tensor(shape=(-4,))}), "lacks a valid shape"),
        (_file({"a": _tensor(shape=(True, 4))}), "lacks a valid shape"),
        (_file({"a": _tensor(span=(0, 16, 32))}), "lacks a valid shape"),
        (_file({"a": _tensor(span=(16, 0))}), "has -16 bytes, expected 16"),
        (_file({"a": _tensor(shape=(2**40, 2**40))}), "expected 4835703278458516698824704"),
        (_file({"a": _tensor(span=(4, 20))}), "4 bytes are missing"),
        (_file({"a": _tensor(), "b": _tensor(dtype="U8", span=(15, 19))}, payload=32), "a and b overlap"),
    ],
)
def test_malformed(tmp_path, data, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def sharded(tmp_path):
    """A folder of two shards and a function that replaces its index."""
    for number, name in enumerate("ab", 1):
        write_safetensors(tmp_path / f"{number}.safetensors", [(name, "U8", (2,), lambda: [b"12"])])

    def index(weight_map):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    return index


def test_all_missing_shards_are_named(sharded):
    folder = sharded({"a": "1.safetensors", "c": "3.safetensors", "d": "4.safetensors", "e": "3.safetensors"})
    with pytest.raises(FormatError, match=r"2 of 3 shards are missing \(3.safetensors, 4.safetensors\)"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ({"a": "../1.safetensors"}, "expected a plain file name"),
        ({"a": 3}, "expected a plain file name"),
        ({"a": "2.safetensors"}, "holds tensor 'b', which the index puts into None"),
        ({"a": "1.safetensors", "b": "2.safetensors", "z": "2.safetensors"}, r"lists 1 tensors no shard holds \(z"),
    ],
)
def test_index_that_does_not_fit(sharded, places, message):
    with pytest.raises(FormatError, match=message):
        SafetensorsFolder(sharded(places))


def test_folder_without_weights(tmp_path):
    with pytest.raises(FormatError, match="holds neither"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(FormatError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")
