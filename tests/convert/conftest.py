"""Files made once a session from the golden models."""

from __future__ import annotations

import pytest

from mlx_ds4.convert.to_gguf import official_to_gguf
from tests.golden_tools import GOLDEN


@pytest.fixture(scope="session")
def nano_k_gguf(tmp_path_factory):
    """recipe -> GGUF of nano_k, whose expert rows are whole 256-blocks."""
    folder, made = tmp_path_factory.mktemp("nano_k"), {}

    def make(recipe: str):
        if recipe not in made:
            made[recipe] = folder / f"{recipe}.gguf"
            official_to_gguf(GOLDEN / "nano_k" / "model", made[recipe], recipe, alignment=64)
        return made[recipe]

    return make


@pytest.fixture(scope="session")
def nano_gguf(tmp_path_factory):
    """GGUF of nano, with Engram and float weights."""
    path = tmp_path_factory.mktemp("nano") / "f16.gguf"
    official_to_gguf(GOLDEN / "nano" / "model", path, "f16")
    return path
