"""Engram rows by number: both sources give the golden bytes, and nothing else of the tables is read."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mlx_ds4.checkpoint import model_weights, scale_name
from mlx_ds4.convert.gguf_writer import GGUFTensor, write_gguf
from mlx_ds4.convert.to_gguf import official_to_gguf
from mlx_ds4.formats.engram_rows import GGUFEngramRows
from mlx_ds4.formats.gguf import FormatError, GGUFFile
from mlx_ds4.sources import open_source
from tests.checkpoint.folders import patch_byte
from tests.golden_tools import GOLDEN, golden

NANO = GOLDEN / "nano" / "model"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The nano model as folder and as GGUF, each with (token map, hashes, tables)."""
    path = tmp_path_factory.mktemp("engram") / "nano.gguf"
    official_to_gguf(NANO, path, "mxfp4")
    return [(s, *s.engram(s.tokenizer())) for s in (open_source(NANO), open_source(path))]


def test_both_sources_give_the_same_rows(sources):
    (official, _, _, folder_tables), (_, _, _, gguf_tables) = sources
    weights = [w for w in model_weights(official.config) if w.storage == "ROWS"]
    rng = np.random.default_rng(0)
    for weight, a, b in zip(weights, folder_tables, gguf_tables, strict=True):
        codes = official.folder.read(weight.name).reshape(weight.shape)
        scales = official.folder.read(scale_name(weight.name)).reshape(len(codes), -1)
        whole = np.concatenate([codes, scales], axis=1)
        ids = rng.integers(0, len(whole), (3, 5, 6))
        ids[0, 0] = [0, len(whole) - 1, 7, 7, 8, 0]
        for table in (a, b):
            assert (table.count, table.row_bytes) == whole.shape
            np.testing.assert_array_equal(table.rows(ids), whole[ids])
            np.testing.assert_array_equal(table.rows(np.arange(len(whole))), whole)
            assert table.rows(np.empty((2, 0), np.int64)).shape == (2, 0, whole.shape[1])


def test_constants_are_the_golden_ones(sources):
    data = golden("nano", "engram")
    for _, token_map, hashes, tables in sources:
        np.testing.assert_array_equal(token_map, np.array(data["token_map"]))
        assert [table.count for table in tables] == [int(h.primes.sum()) for h in hashes] == [660, 864]
    for a, b in zip(sources[0][2], sources[1][2], strict=True):
        np.testing.assert_array_equal(a.primes, b.primes)
        np.testing.assert_array_equal(a.multipliers, b.multipliers)
        assert a.pad_id == b.pad_id == 2


@pytest.mark.parametrize("bad", [[-1, 3], [3, 660], [2**40]])
def test_rows_outside_the_table(sources, bad):
    for _, _, _, tables in sources:
        with pytest.raises(IndexError, match="has 660 rows"):
            tables[0].rows(np.array(bad))


def test_threads_share_a_table(sources):
    for _, _, _, tables in sources:
        whole = tables[1].rows(np.arange(864))
        requests = np.random.default_rng(1).integers(0, 864, (64, 50))
        with ThreadPoolExecutor(8) as pool:
            for ids, rows in zip(requests, pool.map(tables[1].rows, requests), strict=True):
                np.testing.assert_array_equal(rows, whole[ids])


def test_damaged_rows_are_refused_when_read(tmp_path):
    folder, gguf = tmp_path / "model", tmp_path / "x.gguf"
    shutil.copytree(NANO, folder)
    official_to_gguf(folder, gguf, "f32")
    patch_byte(folder, "layers.1.engram.embed.weight", 0xFF, index=5 * 32 + 3)
    patch_byte(folder, "layers.4.engram.embed.scale", 255, index=9)
    tables = [w for w in model_weights(open_source(gguf).config) if w.storage == "ROWS"]
    damage = ((tables[0], 5, 3, 0xFF), (tables[1], 9, 32, 255))  # a code of row 5, the scale of row 9
    for weight, row, byte, value in damage:
        (span,) = open_source(gguf).table_spans(weight)
        with open(gguf, "r+b") as file:
            file.seek(span.offset + row * span.width + byte)
            file.write(bytes([value]))
    for source in (open_source(folder), open_source(gguf)):
        first, second = source.engram(source.tokenizer())[2]
        for table, row in ((first, 5), (second, 9)):
            table.rows(np.array([row - 1, row + 1]))
            with pytest.raises(FormatError, match=f"row {row} holds a NaN"):
                table.rows(np.array([row - 1, row, row + 1]))
    with pytest.raises(FormatError, match="NaN"):
        official_to_gguf(folder, tmp_path / "y.gguf", "f32")


def test_rows_behind_many_gibibytes(tmp_path):
    """A table of the released length as a hole: the last row lies 94 GiB into it."""
    path, rows = tmp_path / "big.gguf", 384_016_682
    records = [("general.alignment", "u32", 16384)]
    write_gguf(path, records, [GGUFTensor("t", (rows, 264), "I8", None)], alignment=16384)
    file = GGUFFile(path)
    with open(path, "r+b") as raw:
        for row in (2**32 // 264 + 1, rows - 1):
            raw.seek(file.tensors["t"].offset + 264 * row)
            raw.write(bytes([row % 100]) * 264)
    table = GGUFEngramRows(GGUFFile(path), "t")
    near, last = (2**32 // 264 + 1) % 100, (rows - 1) % 100
    got = table.rows(np.array([rows - 1, 0, 2**32 // 264 + 1]))
    np.testing.assert_array_equal(got, np.repeat(np.array([[last], [0], [near]], np.uint8), 264, axis=1))
