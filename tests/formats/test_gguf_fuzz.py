"""Random damage to headers: nothing but FormatError may come out, and little memory may go in."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_ds4.formats.deepseek41 import check_metadata
from mlx_ds4.formats.gguf import FormatError, GGUFFile
from mlx_ds4.formats.sidecar import check_sidecar
from tests.formats import build_gguf as b

SMALL = b.build(
    [("general.architecture", "string", "deepseek41"), ("general.alignment", "u32", 32), ("f", "f32", 1.5),
     ("b", "bool", True), ("n", "[u32]", [1, 2]), ("s", "[string]", ["a", "bc"])],
    [("w", (2, 32), "Q8_0", b""), ("v", (4,), "F32", b"")],
)  # fmt: skip
TINY = b.tiny_file()
TINY_HEADER = len(TINY) - sum(-(-b.nbytes(*entry[1:]) // 32) * 32 for entry in b.tiny_entries())


def survives(path: Path, content: bytes) -> bool:
    """Opens, checks and reads a file; whether it was accepted. Anything but FormatError escapes."""
    path.write_bytes(content)
    try:
        with GGUFFile(path) as file:
            file.fingerprint()
            for name, info in file.tensors.items():
                file.read(name, 0, min(info.nbytes, 10))
                file.read_rows(name, np.array([0]))
            check_metadata(file)
            check_sidecar(file, file)
    except FormatError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.gguf"


def test_every_header_byte_flipped(path: Path) -> None:
    header = len(SMALL) - 96 - 32
    for index, value in itertools.product(range(header), (0x00, 0xFF, 0x80)):
        content = bytearray(SMALL)
        content[index] = value if value in (0, 0xFF) else content[index] ^ value
        survives(path, bytes(content))


numbers = st.sampled_from([0, 1, 2, 8, 9, 31, 2**16, 2**31, 2**32 - 1, 2**40, 2**61, 2**63, 2**64 - 1])
edits = st.lists(
    st.tuples(
        st.integers(0, TINY_HEADER - 1),
        st.one_of(
            st.binary(min_size=1, max_size=9),
            numbers.map(lambda n: struct.pack("<Q", n)),
            numbers.map(lambda n: struct.pack("<I", n & 0xFFFFFFFF)),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits, st.sampled_from(["write", "insert", "delete"]))
def test_edited_model_headers(path: Path, changes: list[tuple[int, bytes]], how: str) -> None:
    content = bytearray(TINY)
    for index, piece in changes:
        width = 0 if how == "insert" else len(piece)
        content[index : index + width] = b"" if how == "delete" else piece
    survives(path, bytes(content))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_edited_values_reach_the_metadata_checks(path: Path, data: st.DataObject) -> None:
    # Well-formed files with any types and values: the parser is content, the checks must cope.
    records = b.tiny_records()
    for key in data.draw(st.lists(st.sampled_from(sorted(records)), min_size=1, max_size=3)):
        kind = data.draw(st.sampled_from(["u8", "i32", "u32", "u64", "i64", "f32", "f64", "bool", "string"]))
        one = {
            "string": st.one_of(
                st.text(max_size=20), st.sampled_from(["deepseek41", "{}", "[]", '{"text_config":[]}'])
            ),
            "bool": st.integers(0, 1),
            "f32": st.floats(width=32),
            "f64": st.floats(),
            "i32": st.integers(-(2**31), 2**31 - 1),
            "i64": st.integers(-(2**63), 2**63 - 1),
            "u8": st.integers(0, 255),
            "u32": st.integers(0, 2**32 - 1),
            "u64": st.integers(0, 2**64 - 1),
        }[kind]
        if data.draw(st.booleans()):
            records[key] = (f"[{kind}]", data.draw(st.lists(one, max_size=12)))
        else:
            records[key] = (kind, data.draw(one))
    survives(path, b.tiny_file(records))


def test_memory_stays_near_the_size_of_the_file(path: Path) -> None:
    assert survives(path, TINY) is False  # a model is no sidecar, everything before that passes
    rng = np.random.default_rng(0)
    tracemalloc.start()
    for _ in range(100):
        content = bytearray(TINY)
        for index in rng.integers(0, TINY_HEADER, 3):
            content[index] = rng.integers(0, 256)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        survives(path, bytes(content))
        assert tracemalloc.get_traced_memory()[1] - before < 10 * len(TINY)
    tracemalloc.stop()
