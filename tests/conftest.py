"""Models that many tests share; they are loaded once a session and never changed."""

from __future__ import annotations

import pytest

from mlx_ds4.loader import load_model
from tests.golden_tools import GOLDEN


@pytest.fixture(scope="session")
def nano():
    """The ten-layer golden model, with Engram and every kind of layer."""
    return load_model(GOLDEN / "nano" / "model")[0]


@pytest.fixture(scope="session")
def nano_k():
    """The two-layer golden model whose rows are whole 256-blocks."""
    return load_model(GOLDEN / "nano_k" / "model")[0]
