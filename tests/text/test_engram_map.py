"""The token map of Engram against the released numbers and the golden model's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.engram_map import engram_token_map
from mlx_ds4.tokenizer import Tokenizer
from tests.golden_tools import GOLDEN


@pytest.fixture(scope="module")
def found(real) -> np.ndarray:
    return engram_token_map(real)


def test_the_released_map(found):
    expected = np.load(GOLDEN / "real" / "engram_token_map.npz")["token_map"]
    assert found.dtype == np.int32
    assert len(np.unique(found)) == found.max() + 1 == 99_092
    np.testing.assert_array_equal(found, expected)


def test_the_golden_model_s_map():
    expected = mx.load(str(GOLDEN / "nano" / "golden" / "engram.safetensors"))["token_map"]
    found = engram_token_map(Tokenizer.from_folder(GOLDEN / "nano" / "model"))
    np.testing.assert_array_equal(found, np.array(expected))
    assert found.max() + 1 < len(found)


def test_texts_that_agree_share_an_id(real, found):
    def ids(*spellings):
        return {int(found[real.token_id(spelling)]) for spelling in spellings}

    assert len(ids("a", "A", "Ġa", "ĠA")) == 1
    assert len(ids("Ġ", "ĠĠ", "Ċ", "ĉ")) == 1  # any white space is one space
    assert ids("Ġ").isdisjoint(ids("a"))
    assert len(ids("Ã©", "e", "É")) == 2  # é is e; a lone byte keeps its own spelling
