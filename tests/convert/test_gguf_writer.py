"""The GGUF writer, read back by the `gguf` package."""

from __future__ import annotations

import os

import gguf
import numpy as np
import pytest

from mlx_ds4.convert.gguf_writer import GGUFTensor, write_gguf

RECORDS = [
    ("general.architecture", "string", "x"),
    ("a.u32", "u32", 2**32 - 1),
    ("a.i32", "i32", -3),
    ("a.f32", "f32", 0.1),
    ("a.bool", "bool", True),
    ("a.u64", "u64", 2**63 + 5),
    ("a.words", "[string]", ["a", "", "｜x｜"]),
    ("a.numbers", "[u32]", np.array([1, 2**32 - 1])),
    ("a.large", "[u64]", [2**63 + 5, 0]),
    ("a.none", "[u32]", ()),
    ("a.types", "[i32]", [-1, 3]),
]


@pytest.mark.parametrize("alignment", [32, 16384])
def test_the_gguf_package_reads_what_was_written(tmp_path, alignment):
    rng = np.random.default_rng(0)
    floats, blocks = rng.standard_normal((2, 3, 32), np.float32), rng.integers(0, 255, (4, 2 * 34), np.uint8)
    path = tmp_path / "x.gguf"
    tensors = [
        GGUFTensor("floats", (2, 3, 32), "F32", lambda: list(floats)),
        GGUFTensor("hole", (40,), "I8", None),
        GGUFTensor("blocks", (4, 64), "Q8_0", lambda: [blocks]),
    ]
    seen = []
    records = [*RECORDS, ("general.alignment", "u32", alignment)]
    write_gguf(path, records, tensors, alignment=alignment, progress=lambda *call: seen.append(call))
    assert seen == [(384, 1080, "floats"), (768, 1080, "floats"), (1080, 1080, "blocks")]
    assert os.listdir(tmp_path) == ["x.gguf"]
    reader = gguf.GGUFReader(path)
    for key, kind, value in records:
        found = reader.fields[key].contents()
        if kind == "f32":
            assert found == np.float32(value)
        else:
            assert found == (list(value) if kind.startswith("[") else value), key
    got = {tensor.name: tensor for tensor in reader.tensors}
    np.testing.assert_array_equal(got["floats"].data, floats)
    np.testing.assert_array_equal(got["hole"].data, np.zeros(40, np.int8))
    np.testing.assert_array_equal(got["blocks"].data, blocks)
    assert all(tensor.data_offset % alignment == 0 for tensor in reader.tensors)
    assert path.stat().st_size == reader.tensors[-1].data_offset + -(-272 // alignment) * alignment


@pytest.mark.parametrize(
    ("record", "message"),
    [(("a", "u32", -1), "-1 is not u32"), (("a", "u32", 1.5), "not u32"), (("a", "[u32]", [2**32]), "not .u32")],
)
def test_numbers_that_do_not_fit(tmp_path, record, message):
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "x.gguf", [record], [], alignment=32)
    assert os.listdir(tmp_path) == []


def test_wrong_amount_of_bytes_leaves_nothing(tmp_path):
    tensor = GGUFTensor("t", (3,), "F32", lambda: [np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match="yielded 8 bytes, its shape needs 12"):
        write_gguf(tmp_path / "x.gguf", [], [tensor], alignment=32)
    assert os.listdir(tmp_path) == []
