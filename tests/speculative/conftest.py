"""The golden model's drafter, loaded once."""

from __future__ import annotations

import pytest

from mlx_ds4.drafter_files import load_drafter
from tests.golden_tools import GOLDEN


@pytest.fixture(scope="session")
def nano(nano_wide):
    return nano_wide


@pytest.fixture(scope="session")
def drafter(nano):
    return load_drafter(nano, GOLDEN / "nano" / "model")
