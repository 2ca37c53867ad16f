"""Many small reads: each item once, in every way that a system allows."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mlx_ds4.formats import parallel_reads
from mlx_ds4.formats.gguf_bytes import ByteSource


@pytest.fixture(params=[True, False], ids=["hints", "threads"])
def hints(request, monkeypatch):
    monkeypatch.setattr(parallel_reads, "TAKES_HINTS", request.param)
    return request.param


@pytest.mark.parametrize("count", [0, 1, 2, 3, 24, 700])
@pytest.mark.parametrize("slow", [False, True])
def test_every_item_once(hints, count, slow, monkeypatch):
    monkeypatch.setattr(parallel_reads, "_WAITED", -1.0 if slow else 1e9)
    read, told, names = [], [], set()

    def note(number: int, text: str) -> None:
        assert text == str(number)
        names.add(threading.current_thread().name)
        read.append(number)

    parallel_reads.read_all(note, lambda number, _: told.append(number), [(i, str(i)) for i in range(count)])
    assert sorted(read) == list(range(count))
    assert told == (list(range(1, count)) if hints and slow and count > 2 else [])
    assert any(name.startswith("reader") for name in names) == (slow and not hints and count > 2)


def test_hints_are_ahead_of_the_reads(monkeypatch):
    monkeypatch.setattr(parallel_reads, "TAKES_HINTS", True)
    monkeypatch.setattr(parallel_reads, "_AHEAD", 3)
    monkeypatch.setattr(parallel_reads, "_WAITED", -1.0)
    calls = []
    parallel_reads.read_all(lambda i: calls.append(i), lambda i: calls.append(f"hint {i}"), [(i,) for i in range(6)])
    assert calls == [0, "hint 1", "hint 2", "hint 3", 1, "hint 4", 2, "hint 5", 3, 4, 5]


def test_readers_wait_for_the_disk_together(monkeypatch):
    """24 reads of 10 ms: one, then two rounds of sixteen readers."""
    monkeypatch.setattr(parallel_reads, "TAKES_HINTS", False)
    start = time.perf_counter()
    parallel_reads.read_all(lambda _: time.sleep(0.01), lambda _: None, [(i,) for i in range(24)])
    assert time.perf_counter() - start < 0.15  # one after the other they take 0.24


def test_an_error_comes_when_no_reader_is_at_work(hints, monkeypatch):
    monkeypatch.setattr(parallel_reads, "_WAITED", -1.0)
    busy = []

    def read(number: int) -> None:
        busy.append(number)
        try:
            time.sleep(0.001)
            if number == 9:
                raise ValueError("the disk is gone")
        finally:
            busy.remove(number)

    with pytest.raises(ValueError, match="the disk is gone"):
        parallel_reads.read_all(read, lambda _: None, [(i,) for i in range(40)])
    assert not busy


def test_bytes_of_raw_pieces(hints, tmp_path, monkeypatch):
    """Across the border of two pieces; where hints are refused, reads are as without."""
    monkeypatch.setattr(parallel_reads, "_WAITED", -1.0)
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    (tmp_path / "X.gguf.part1").write_bytes(data[:2100].tobytes())
    (tmp_path / "X.gguf.part2").write_bytes(data[2100:].tobytes())
    source = ByteSource(str(tmp_path / "X.gguf.part1"))
    offsets = [0, 1000, 2000, 2090, 2100, 4800]
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(parallel_reads.os, "posix_fadvise", _refuse, raising=False)
        out = np.zeros((len(offsets), 200), np.uint8)
        source.read_all(list(zip(offsets, out, strict=True)))
        for offset, row in zip(offsets, out, strict=True):
            np.testing.assert_array_equal(row, data[offset : offset + 200])
    source.close()


def _refuse(*_: int) -> None:
    raise OSError("not on this file system")
