"""The reader on valid files: the `gguf` package as the second opinion, pieces, gaps, rows, threads."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from mlx_ds4.formats import gguf as ours
from mlx_ds4.formats import gguf_bytes
from mlx_ds4.formats.gguf import TYPE_INFO, FormatError, GGUFFile
from mlx_ds4.formats.gguf_header import _WINDOW, MAX_STRINGS
from tests.formats import build_gguf as b

RECORDS = [
    ("general.architecture", "string", "test"), ("general.alignment", "u32", 64), ("u8", "u8", 200),
    ("i8", "i8", -3), ("u16", "u16", 60000), ("i16", "i16", -300), ("i32", "i32", -70000), ("f32", "f32", 0.1),
    ("bool", "bool", True), ("u64", "u64", 2**64 - 1), ("i64", "i64", -(2**63)), ("f64", "f64", 0.1),
    ("text", "string", "grüße, 世界"), ("empty", "string", ""), ("[bool]", "[bool]", [1, 0, 1]),
    ("[i8]", "[i8]", [-1, 2]), ("[u64]", "[u64]", [2**64 - 1, 0]), ("[f32]", "[f32]", [0.5, -2.25]),
    ("[f64]", "[f64]", []), ("[string]", "[string]", ["a", "", "世"]), ("[none]", "[string]", []),
]  # fmt: skip


def payload(shape: tuple[int, ...], kind: str, seed: int) -> bytes:
    """Random blocks whose float16 factors are finite."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        return reference.quants.quantize(
            rng.standard_normal(shape).astype(np.float32), reference.GGMLQuantizationType[kind]
        ).tobytes()
    raw = rng.integers(0, 256, (b.nbytes(shape, kind) // b.TYPES[kind][2], b.TYPES[kind][2]), dtype=np.uint8)
    for at in {"Q8_0": (0,), "Q2_K": (80, 82), "Q4_K": (0, 2), "IQ2_XXS": (0,)}.get(kind, ()):
        raw[:, at : at + 2] = rng.uniform(0, 0.1, (len(raw), 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(100, 140, len(raw))
    return raw.tobytes()


SHAPES = [("F32", (3, 5)), ("F16", (2, 3, 7)), ("BF16", (9,)), ("I8", (5, 66)), ("I32", (4,)), ("Q8_0", (3, 4, 64)),
          ("Q2_K", (2, 512)), ("Q4_K", (2, 3, 256)), ("IQ2_XXS", (4, 256)), ("MXFP4", (2, 2, 2, 96))]  # fmt: skip
TENSORS = [(f"{kind}.weight", shape, kind, payload(shape, kind, i)) for i, (kind, shape) in enumerate(SHAPES)]
FILE = b.build(RECORDS, TENSORS, 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    out = tmp_path / "x.gguf"
    out.write_bytes(FILE)
    return out


def test_types_agree_with_gguf() -> None:
    for name, info in TYPE_INFO.items():
        kind = reference.GGMLQuantizationType[name]
        assert info == (int(kind), *reference.GGML_QUANT_SIZES[kind]) == b.TYPES[name]


def test_metadata_and_tensors_agree_with_gguf(path: Path) -> None:
    file, other = GGUFFile(path), reference.GGUFReader(path)
    assert (file.version, file.alignment, file.size, file.architecture) == (3, 64, len(FILE), "test")
    keys = [key for key in other.fields if not key.startswith("GGUF.")]
    assert list(file.metadata) == keys == [key for key, _, _ in RECORDS]
    for key, kind, content in RECORDS:
        mine, theirs = file.metadata[key], other.fields[key].contents()
        assert file.value_types[key] == kind
        if isinstance(mine, np.ndarray):
            assert mine.tolist() == theirs == content
        else:
            assert type(mine) is type(theirs) and mine == theirs
    assert list(file.tensors) == [tensor.name for tensor in other.tensors]
    assert file.data_start == other.data_offset
    for tensor, (_, _, _, raw) in zip(other.tensors, TENSORS, strict=True):
        info = file.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape[::-1].tolist())
        assert (info.type_name, info.offset, info.nbytes) == (
            tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)  # fmt: skip
        assert file.read(tensor.name).tobytes() == tensor.data.tobytes() == raw
        assert info.row_bytes * int(np.prod(info.shape[:-1])) == info.nbytes


def test_dequantize_agrees_with_gguf(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_DEQUANTIZE_STEP", 100)  # so that tensors are taken in several pieces
    file, other = GGUFFile(path), reference.GGUFReader(path)
    for tensor in other.tensors:
        if tensor.name[0] == "I" and tensor.name[1] in "38":
            with pytest.raises(FormatError, match="holds no weights"):
                file.dequantize(tensor.name)
            continue
        expected = reference.quants.dequantize(tensor.data, tensor.tensor_type)
        found = file.dequantize(tensor.name)
        assert found.dtype == np.float32 and found.shape == file.tensors[tensor.name].shape
        assert np.array_equal(
            found.reshape(-1).view(np.uint32), np.ascontiguousarray(expected, "<f4").reshape(-1).view(np.uint32)
        )


def test_damaged_blocks_are_refused(tmp_path: Path) -> None:
    for kind, shape, at, raw in (
        ("Q8_0", (4, 64), 34 * 5, b"\0\x7c"),  # infinity
        ("Q2_K", (3, 512), 84 * 5 + 82, b"\1\xfe"),  # NaN in dmin
        ("Q4_K", (3, 512), 144 * 5 + 2, b"\0\xfc"),
        ("IQ2_XXS", (3, 512), 66 * 5, b"\xff\x7f"),
        ("MXFP4", (3, 64), 17 * 5, b"\xff"),
        ("F32", (3, 4), 4 * 5, struct.pack("<f", np.nan)),
        ("BF16", (3, 4), 2 * 5, b"\x80\x7f"),
        ("F16", (3, 4), 2 * 5, b"\0\xfc"),
    ):
        content = bytearray(payload(shape, kind, 3))
        content[at : at + len(raw)] = raw
        (tmp_path / "x.gguf").write_bytes(b.build(RECORDS[:1], [("w", shape, kind, bytes(content))]))
        with pytest.raises(FormatError, match=rf"block 5 of 'w' \({kind}\) has a scale or value"):
            GGUFFile(tmp_path / "x.gguf").dequantize("w")


def test_a_file_of_the_gguf_package_opens(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = reference.GGUFWriter(path, "test")
    writer.add_uint32("number", 7)
    writer.add_array("names", ["a", "b"])
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("w", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(str(path)) as file:
        assert file.architecture == "test" and file.metadata["number"] == 7
        assert np.array_equal(file.dequantize("w"), data)


def test_ranges(path: Path) -> None:
    file = GGUFFile(path)
    raw = TENSORS[3][3]
    assert file.read("I8.weight", 10, 20).tobytes() == raw[10:20]
    assert file.read("I8.weight", 300).tobytes() == raw[300:]
    assert file.read("I8.weight", 330).size == 0
    for start, stop in ((-1, 5), (5, 4), (0, 331), (331, None)):
        with pytest.raises(FormatError, match="were asked for, it has 330"):
            file.read("I8.weight", start, stop)
    with pytest.raises(FormatError, match="there is no tensor 'nothing'"):
        file.read("nothing")


def test_rows(path: Path) -> None:
    file = GGUFFile(path)
    table = np.frombuffer(TENSORS[3][3], np.uint8).reshape(5, 66)
    for ids in ([3, 0, 0, 4, 1], [2], [], [4, 3, 2, 1, 0], np.array([1, 1], np.uint8)):
        assert np.array_equal(file.read_rows("I8.weight", np.asarray(ids, getattr(ids, "dtype", int))), table[ids])
    assert np.array_equal(file.read_rows("Q4_K.weight", np.array([5])), file.read("Q4_K.weight").reshape(6, 144)[5:])
    for ids, fragment in (
        ([5], "row 5"),
        ([-1], "row -1"),
        ([2**40], "row 1099511627776"),
        ([0.5], "expected integers"),
    ):
        with pytest.raises(FormatError, match=fragment):
            file.read_rows("I8.weight", np.array(ids))
    with pytest.raises(FormatError, match="expected integers"):
        file.read_rows("I8.weight", np.array([[1]]))


def test_rows_are_read_once_and_neighbours_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUFFile(path)
    calls = []
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, out, at: (calls.append(len(out[0])), read(fd, out, at))[1])
    file.read_rows("I8.weight", np.array([4, 0, 1, 4, 0]))
    assert calls == [2 * 66, 66]


@pytest.mark.parametrize("cuts", [(100,), (len(FILE) - 1,), (1500, 2500, 2501)])
def test_raw_pieces_read_as_one_file(tmp_path: Path, path: Path, cuts: tuple[int, ...]) -> None:
    whole = GGUFFile(path)
    for number, (start, stop) in enumerate(zip((0, *cuts), (*cuts, len(FILE)), strict=True), 1):
        (tmp_path / f"split.gguf.part{number}").write_bytes(FILE[start:stop])
    for name in ("split.gguf", "split.gguf.part1"):
        file = GGUFFile(tmp_path / name)
        assert file.tensors == whole.tensors and file.size == whole.size
        assert file.fingerprint() == whole.fingerprint()
        for tensor in file.tensors:
            assert np.array_equal(file.read(tensor), whole.read(tensor))
        assert np.array_equal(file.read_rows("I8.weight", np.arange(5)), whole.read_rows("I8.weight", np.arange(5)))
    os.utime(tmp_path / "split.gguf.part2", ns=(1, 1))
    with pytest.raises(FormatError, match="part2 changed"):
        file.read("F32.weight")


def test_reads_in_chunks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_bytes, "_CHUNK", 7)
    file = GGUFFile(path)
    for name, _, _, raw in TENSORS:
        assert file.read(name).tobytes() == raw


def test_gaps_and_any_order_are_legal(tmp_path: Path) -> None:
    data = np.arange(64, dtype=np.float32)
    raw = b.head(2, 1) + b.record(*RECORDS[0]) + b.tensor("late", [32], 0, 4096) + b.tensor("early", [32], 0, 32)
    start = -(-len(raw) // 32) * 32
    content = bytearray(start + 4096 + 128)
    content[: len(raw)] = raw
    content[start + 32 : start + 160] = data[:32].tobytes()
    content[start + 4096 :] = data[32:].tobytes()
    (tmp_path / "x.gguf").write_bytes(content)
    file = GGUFFile(tmp_path / "x.gguf")
    assert list(file.tensors) == ["late", "early"]
    assert np.array_equal(file.dequantize("early"), data[:32])
    assert np.array_equal(file.dequantize("late"), data[32:])


def test_strings_across_the_reading_window(tmp_path: Path) -> None:
    # Lengths and contents that begin, end and lie on every side of the window's end.
    words = ["x" * (i % 41) for i in range(3 * _WINDOW // 28)]
    long = ["y" * (_WINDOW + 3), "z"]
    records = [RECORDS[0], ("a", "[string]", words), ("b", "[string]", long), ("n", "[u32]", list(range(1000)))]
    (tmp_path / "x.gguf").write_bytes(b.build(records, TENSORS[:1]))
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.metadata["a"] == words and file.metadata["b"] == long
    assert file.metadata["n"].tolist() == list(range(1000))
    assert len(words) + len(long) < MAX_STRINGS


def test_array_strings_keep_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b.build([RECORDS[0], ("a", "[string]", [b"\xff\x41"])], TENSORS[:1]))
    (found,) = GGUFFile(tmp_path / "x.gguf").metadata["a"]
    assert found.encode("utf-8", "surrogateescape") == b"\xff\x41"


def test_threads_read_the_right_bytes(path: Path) -> None:
    file = GGUFFile(path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(file.read, [name for name, *_ in TENSORS] * 20))
    assert all(raw.tobytes() == TENSORS[i % len(TENSORS)][3] for i, raw in enumerate(found))


def test_fingerprint_names_header_and_size(tmp_path: Path, path: Path) -> None:
    first = GGUFFile(path).fingerprint()
    (tmp_path / "y.gguf").write_bytes(FILE)
    assert GGUFFile(tmp_path / "y.gguf").fingerprint() == first
    (tmp_path / "y.gguf").write_bytes(FILE + bytes(64))
    assert GGUFFile(tmp_path / "y.gguf").fingerprint() != first
    (tmp_path / "y.gguf").write_bytes(FILE.replace(b"test", b"tess", 1))
    assert GGUFFile(tmp_path / "y.gguf").fingerprint() != first


def test_closing(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with GGUFFile("x.gguf") as file:
        monkeypatch.chdir("/")
        assert file.read("F32.weight").size == 60
    file.close()
    with pytest.raises(FormatError, match="is closed"):
        file.read("F32.weight")
    handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    (tmp_path / "y.gguf").write_bytes(FILE[:500])
    with pytest.raises(FormatError):
        GGUFFile(tmp_path / "y.gguf")
    if handles is not None:
        assert len(os.listdir("/proc/self/fd")) == handles
