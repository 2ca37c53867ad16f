"""Models that many tests share; they are loaded once a session and never changed."""

from __future__ import annotations

import pytest

from mlx_ds4.loader import load_model
from tests.golden_tools import GOLDEN, widened


@pytest.fixture(scope="session")
def nano():
    """The ten-layer golden model, with Engram and every kind of layer."""
    return load_model(GOLDEN / "nano" / "model")[0]


@pytest.fixture(scope="session")
def nano_wide():
    """`nano` with float32 weights: the same bits in half the time (`test_steps.py` checks it)."""
    return widened(load_model(GOLDEN / "nano" / "model", activation_rounding=True)[0])


@pytest.fixture(scope="session")
def nano_k():
    """The two-layer golden model whose rows are whole 256-blocks."""
    return load_model(GOLDEN / "nano_k" / "model")[0]
