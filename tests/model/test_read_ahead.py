"""Records of the next chunk are read while a chunk runs: the same rows, and no difference but that."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.generation import generate_step
from mlx_ds4.model.engram import ReadAhead
from mlx_ds4.speculative import _Run
from tests.golden_tools import manifest


class Watched:
    """A table that notes which rows are asked for."""

    def __init__(self, table):
        self.table, self.calls = table, []

    def rows(self, ids: np.ndarray) -> np.ndarray:
        self.calls.append(ids)
        return self.table.rows(ids)


@pytest.fixture
def watched(nano_wide, monkeypatch):
    """The golden model with its one Engram table watched."""
    tables = {layer: (hashing, Watched(table)) for layer, (hashing, table) in nano_wide._engram.items()}
    monkeypatch.setitem(nano_wide, "_engram", tables)  # a module keeps its dicts as items
    monkeypatch.setattr(nano_wide, "_read_ahead", ReadAhead())
    return nano_wide, tables[1][1]


@pytest.mark.parametrize("drafted", [False, True])
def test_the_next_chunk_is_read_ahead(watched, drafted, monkeypatch):
    """Each later chunk's rows twice, in the background and by its step; with a drafter, too."""
    model, table = watched
    monkeypatch.setattr(ReadAhead, "start", lambda self, wanted: self._read(wanted))  # at once: the order is known
    prompt = mx.array(manifest("nano")["sequences"]["A"][:23])
    drafter = SimpleNamespace(failure=None, observe=lambda *_: None)
    run = _Run(model, drafter, None, None, []) if drafted else model
    list(generate_step(prompt, run, max_tokens=0, prompt_cache=model.make_cache(), prefill_step_size=9))
    assert [ids.shape[1] for ids in table.calls] == [9, 9, 5, 9, 5]  # ahead, chunk, ahead, chunk, chunk
    for ahead, asked in ((0, 3), (2, 4)):
        np.testing.assert_array_equal(table.calls[ahead], table.calls[asked])


def test_errors_and_a_busy_reader(watched):
    """An error is left to the step that asks; while a reader is at work, none is added."""
    go, seen = threading.Event(), []

    class Slow:
        def rows(self, ids: np.ndarray) -> np.ndarray:
            seen.append(ids)
            go.wait(5)
            raise OSError("the disk is gone")

    ahead, ids = ReadAhead(), np.arange(3)
    ahead.start([(Slow(), ids), (Slow(), ids + 1)])
    ahead.start([(Slow(), ids + 9)])
    go.set()
    ahead._thread.join(5)
    assert [some.tolist() for some in seen] == [[0, 1, 2], [1, 2, 3]]
    ahead.start([(Slow(), ids + 9)])
    ahead._thread.join(5)
    assert len(seen) == 3


def test_a_model_without_tables(monkeypatch):
    from mlx_ds4.random_model import cut_config, random_model

    model = random_model(cut_config(size="tiny"), "q2")
    monkeypatch.setattr(model._read_ahead, "start", lambda _: pytest.fail("nothing can be read"))
    model.announce(np.arange(5), 2)
