"""Damaged files: each is refused by one sentence that names the fault, at once and without large allocations."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from mlx_ds4.formats import gguf_header
from mlx_ds4.formats.gguf import FormatError, GGUFFile
from tests.formats import build_gguf as b

MIB = 1 << 20


def refused(path: Path, fragment: str) -> str:
    """Asserts that opening fails with `fragment` in its message, within 100 ms and 64 MiB."""
    before = sorted(path.parent.iterdir())
    message, best = "", 1.0
    for _ in range(3):  # the best of three: the machine may be busy with other tests
        start = time.perf_counter()
        with pytest.raises(FormatError) as error:
            GGUFFile(path)
        best = min(best, time.perf_counter() - start)
        message = str(error.value)
    assert best < 0.1
    tracemalloc.start()
    with pytest.raises(FormatError):
        GGUFFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * MIB
    assert fragment in message and "\n" not in message and len(message) < 500
    assert sorted(path.parent.iterdir()) == before
    return message


ARCH = ("general.architecture", "string", "test")
TENSORS = [("a.weight", (4, 64), "F32", b""), ("b.weight", (8, 256), "Q4_K", b"")]
GOOD = b.build([ARCH], TENSORS)


def one(*parts: bytes, tensors: int = 1, records: int = 1) -> bytes:
    """A file of the given parts, with enough room behind that it is not refused as too short."""
    return b.head(tensors, records) + b"".join(parts) + bytes(4096)


def records_of(*parts: bytes) -> bytes:
    return one(*parts, b.tensor("t", [32], 0, 0), records=len(parts))


def tensors_of(*parts: bytes) -> bytes:
    return one(b.record(*ARCH), *parts, tensors=len(parts))


def key(name: str, kind: int, raw: bytes) -> bytes:
    return b.string(name) + struct.pack("<I", kind) + raw


ALIGN = "general.alignment"
CASES = {
    # 1 to 5: not a file of this format
    "empty": (b"", "the file is empty"),
    "short": (b"GGUF\3\0\0\0", "has 8 bytes, a GGUF header has at least 24"),
    "magic": (b"ABCD" + bytes(100), "begins with b'ABCD', expected b'GGUF'"),
    "html": (b"\n<!DOCTYPE html><html>" + bytes(50), "a web page"),
    "json": (b'{"error": "Repository not found"}', "JSON"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer"),
    "safetensors": (struct.pack("<Q", 40) + b'{"a":{"dtype":"F32"}}' + bytes(60), "safetensors"),
    "ggml": (b"lmgg" + bytes(100), "an old GGML file"),
    "ggjt": (b"tjgg" + bytes(100), "an old GGJT file"),
    "version 1": (b.head(1, 1, version=1) + bytes(64), "GGUF version is 1, expected 3"),
    "version 2": (b.head(1, 1, version=2) + bytes(64), "GGUF version is 2, expected 3"),
    "version 4": (b.head(1, 1, version=4) + bytes(64), "GGUF version is 4, expected 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "big-endian"),
    # 6 to 8: counts
    "tensor count": (b.head(2**60, 1) + bytes(64), "tensor count is 1152921504606846976, expected 1 to 65536"),
    "record count": (b.head(1, 2**60) + bytes(64), "record count is 1152921504606846976, expected 1 to 65536"),
    "no tensors": (b.head(0, 1) + bytes(64), "tensor count is 0"),
    "one record too few": (one(b.record("k", "string", "v"), b.record("l", "string", "w"), b.tensor("t", [32], 0, 0)),
                           "tensor 'l' at byte 46 has rank 8"),
    "one record too many": (one(b.record("k", "string", "v"), b.tensor("t", [32], 0, 0), records=2),
                            "the name of tensor 0 at byte 60 is ''"),
    # 9 and 10: truncation
    "cut in a key": (b.head(1, 1) + struct.pack("<Q", 20) + b"general",
                     "the key of metadata record 0 at byte 32 needs 20"),
    "cut in a value": (b.head(1, 1) + b.record("k", "u64", 1)[:-3], "the value of 'k' at byte 37 needs 8 bytes"),
    "cut in the directory": (b.head(2, 1) + b.record(*ARCH) + b.tensor("t", [32], 0, 0) + b.string("u"),
                             "the rank of tensor 'u' at byte"),
    # 11 to 20: records
    "key length": (one(struct.pack("<Q", 2**63)), "claims 9223372036854775808 bytes, at most 65535"),
    "string length": (one(key("k", 8, struct.pack("<Q", 2**20))), "the string 'k' at byte 45 needs 1048576 bytes"),
    "string length beyond all": (one(key("k", 8, struct.pack("<Q", 2**62))), "the string 'k' at byte 37 claims"),
    "array count": (one(key("k", 9, struct.pack("<IQ", 4, 2**61))), "claims 2305843009213693952 elements"),
    "array of u8": (one(key("k", 9, struct.pack("<IQ", 0, 2**40))), "claims 1099511627776 elements"),
    "array of strings": (one(key("k", 9, struct.pack("<IQ", 8, 2**40))), "at least 8796093022208 bytes"),
    "string in array": (one(key("k", 9, struct.pack("<IQQ", 8, 1, 2**40))), "string 0 of the array 'k'"),
    "string in array cut": (one(key("k", 9, struct.pack("<IQQ", 8, 1, 9000))), "string 0 of the array 'k' at byte 57"),
    "nested array": (one(key("k", 9, struct.pack("<IQIQ", 9, 1, 4, 1))), "nested arrays are refused"),
    "nested 5000 deep": (one(key("k", 9, struct.pack("<IQ", 9, 1) * 5000)), "nested arrays are refused"),
    "value type": (one(key("k", 99, b"")), "'k' at byte 24 has unknown value type 99"),
    "element type": (one(key("k", 9, struct.pack("<IQ", 99, 1))), "has unknown element type 99"),
    "bool": (one(key("k", 7, b"\7")), "the bool 'k' holds the byte 7"),
    "bool in array": (one(key("k", 9, struct.pack("<IQ", 7, 2) + b"\1\2")), "the bool 'k' holds the byte 2"),
    "key not UTF-8": (one(key("k", 4, b"").replace(b"k", b"\xff")),
                      "the key of metadata record 0 at byte 24 is not UTF-8"),
    "key not printable": (one(b.record("a\0b", "u32", 1)), "metadata key 'a\\x00b' at byte 24 is not printable"),
    "string not UTF-8": (one(b.string("k") + struct.pack("<I", 8) + b.string(b"\xc3")),
                         "the string 'k' at byte 37 is not UTF-8"),
    # 21 and 22: keys
    "duplicate key": (records_of(b.record("k", "u32", 1), b.record("k", "u32", 1)), "metadata key 'k' occurs twice"),
    "alignment 0": (records_of(b.record(ALIGN, "u32", 0)), "general.alignment is 0, expected a power of two"),
    "alignment 24": (records_of(b.record(ALIGN, "u32", 24)), "general.alignment is 24"),
    "alignment 96": (records_of(b.record(ALIGN, "u32", 96)), "general.alignment is 96"),
    "alignment 2^31": (records_of(b.record(ALIGN, "u32", 2**31)), "general.alignment is 2147483648"),
    "alignment u64": (records_of(b.record(ALIGN, "u64", 32)), "general.alignment has type u64, expected u32"),
    "alignment array": (records_of(b.record(ALIGN, "[u32]", [32])), "general.alignment has type [u32]"),
    # 23 to 33: tensors
    "duplicate tensor": (tensors_of(b.tensor("t", [32], 0, 0), b.tensor("t", [32], 0, 128)), "tensor 't' occurs twice"),
    "rank 0": (tensors_of(b.tensor("t", [], 0, 0)), "tensor 't' at byte 68 has rank 0"),
    "rank 5": (tensors_of(b.tensor("t", [1] * 5, 0, 0)), "has rank 5, expected 1 to 4"),
    "rank 2^31": (tensors_of(b.tensor("t", [1], 0, 0, rank=2**31)), "has rank 2147483648"),
    "zero dimension": (tensors_of(b.tensor("t", [32, 0], 0, 0)), "has a dimension of 0"),
    "dimension 2^41": (tensors_of(b.tensor("t", [2**41], 0, 0)), "has a dimension of 2199023255552"),
    "product 2^80": (tensors_of(b.tensor("t", [2**40, 2**40], 0, 0)), "has 1208925819614629174706176 elements"),
    "product 2^64": (tensors_of(b.tensor("t", [2**32, 2**32], 0, 0)), "has 18446744073709551616 elements"),
    "retired type": (tensors_of(b.tensor("t", [32], 4, 0)), "tensor 't' has the retired type 4"),
    "unknown type": (tensors_of(b.tensor("t", [32], 777, 0)), "tensor 't' has the unsupported type 777"),
    "block": (tensors_of(b.tensor("t", [128, 2], 12, 0)), "rows of 128 elements, Q4_K needs a multiple of 256"),
    "unaligned": (tensors_of(b.tensor("t", [32], 0, 8)), "has offset 8, expected a multiple of the alignment 32"),
    "offset past the end": (tensors_of(b.tensor("t", [32], 0, 2**20)), "'t' begins at byte 1048704, past the end"),
    "offset wraps": (tensors_of(b.tensor("t", [32], 0, 2**64 - 32)), "impossible offset 18446744073709551584"),
    "offset 2^64-1": (tensors_of(b.tensor("t", [32], 0, 2**64 - 1)), "impossible offset 18446744073709551615"),
    "overlap, same": (tensors_of(b.tensor("t", [32], 0, 0), b.tensor("u", [32], 0, 0)), "tensors 't' and 'u' overlap"),
    "overlap, partly": (tensors_of(b.tensor("t", [32], 0, 64), b.tensor("u", [32], 0, 0)),
                        "tensors 'u' and 't' overlap"),
    "name empty": (tensors_of(b.tensor("", [32], 0, 0)), "expected printable ASCII"),
    "name NUL": (tensors_of(b.tensor("a\0", [32], 0, 0)), "expected printable ASCII"),
    "name slash": (tensors_of(b.tensor("../a", [32], 0, 0)), "is '../a', expected printable ASCII without slashes"),
    "name length": (tensors_of(b.tensor("n" * 128, [32], 0, 0)), "claims 128 bytes, at most 127"),
    "name not UTF-8": (tensors_of(b.tensor(b"\xfe", [32], 0, 0)), "the name of tensor 0 at byte 68 is not UTF-8"),
    "payload cut": (GOOD[:-100], "'b.weight' is cut off: the file has"),
    "payload missing": (GOOD[:1000], "needs 2368, 1368 are missing: resume the download"),
    "shard": (records_of(b.record("split.count", "u16", 9), b.record("split.no", "u16", 4)), "this is shard 5 of 9"),
}  # fmt: skip


def test_the_unbroken_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(GOOD)
    assert list(GGUFFile(path).tensors) == ["a.weight", "b.weight"]
    path.write_bytes(records_of(b.record("k", "u32", 1)))
    assert list(GGUFFile(path).tensors) == ["t"]
    path.write_bytes(tensors_of(b.tensor("t", [32], 0, 64)))
    assert list(GGUFFile(path).tensors) == ["t"]


@pytest.mark.parametrize("name", CASES)
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    content, fragment = CASES[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert refused(path, fragment).startswith("x.gguf: ")


def test_every_message_is_its_own() -> None:
    fragments = [fragment for _, fragment in CASES.values()]
    shared = {fragment for fragment in fragments if fragments.count(fragment) > 1}
    assert shared == {"nested arrays are refused", "expected printable ASCII"}


def test_one_byte_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    whole = b.build([ARCH], [("w", (3, 256), "Q4_K", b"")])
    path.write_bytes(whole[:-16])  # the padding behind the last tensor is not needed
    assert GGUFFile(path).tensors["w"].nbytes == 432
    path.write_bytes(whole[:-17])
    refused(path, "'w' is cut off: the file has 559 bytes but needs 560, 1 are missing")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for size in [*range(0, 300, 3), 700, len(GOOD) - 33]:
        path.write_bytes(GOOD[:size])
        with pytest.raises(FormatError):
            GGUFFile(path)


def test_header_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A sparse file of 80 MiB of zeros that claims one large array of them.
    path = tmp_path / "x.gguf"
    path.write_bytes(b.head(1, 1) + key("k", 9, struct.pack("<IQ", 0, 70 * MIB)))
    os.truncate(path, 80 * MIB)
    refused(path, "claims 73400320 elements, at least 73400320 bytes, but only 67108815 bytes can follow")
    # The same with strings: the number of objects is bounded, not only their bytes.
    path.write_bytes(b.head(1, 1) + key("k", 9, struct.pack("<IQ", 8, 2 * MIB)))
    os.truncate(path, 80 * MIB)
    refused(path, "claims 2097152 strings, at most 1048576 per file")
    monkeypatch.setattr(gguf_header, "MAX_HEADER", 64)
    path.write_bytes(b.head(1, 1) + b.record("k" * 50, "u32", 1) + bytes(100))
    refused(path, "headers may take at most 64")


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", f"there is no file {tmp_path}/none.gguf")
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    refused(folder, "is a folder, expected a file")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "is a pipe, expected a file")  # opening it would wait for a writer
    refused(Path("/dev/zero"), "is a device or socket")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "link.gguf", "symbolic link to nothing")
    with pytest.raises(FormatError, match="cannot be opened"):
        GGUFFile("a\0b.gguf")
    with pytest.raises(FormatError, match="cannot be opened"):
        GGUFFile(tmp_path / ("x" * 300))


def test_raw_pieces_opened_wrongly(tmp_path: Path) -> None:
    (tmp_path / "x.gguf.part1").write_bytes(GOOD[:800])
    refused(tmp_path / "x.gguf.part1", "resume the download and put .part2 beside the 1 raw piece(s) found")
    refused(tmp_path / "x.gguf", "put .part2 beside")
    (tmp_path / "x.gguf.part2").write_bytes(GOOD[800:])
    refused(tmp_path / "x.gguf.part2", "this is piece 2 of a raw split: open x.gguf.part1 instead")
    assert list(GGUFFile(tmp_path / "x.gguf.part1").tensors) == ["a.weight", "b.weight"]


def test_a_file_that_changes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(GOOD)
    gguf = GGUFFile(path)
    assert len(gguf.read("a.weight")) == 1024
    stamp = os.stat(path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    with pytest.raises(FormatError, match=r"x.gguf changed since it was opened"):
        gguf.read("a.weight")
    gguf = GGUFFile(path)
    with open(path, "ab") as file:
        file.write(b"more")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    with pytest.raises(FormatError, match="changed"):
        gguf.read_rows("a.weight", [0])
    gguf = GGUFFile(path)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    os.replace(other, path)
    with pytest.raises(FormatError, match="changed"):
        gguf.dequantize("b.weight")
    gguf = GGUFFile(path)
    path.unlink()
    with pytest.raises(FormatError, match="changed"):
        gguf.fingerprint()
    gguf.close()
