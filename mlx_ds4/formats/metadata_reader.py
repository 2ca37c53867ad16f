"""Typed, checked access to the metadata of a GGUF file."""

from __future__ import annotations

import json
import math
import os
from typing import Any, NoReturn

import numpy as np

from mlx_ds4.formats.gguf import FormatError, GGUFFile

_MAX_CONFIG = 1 << 20  # the real one has 7 kB; JSON of nothing but brackets takes 30 times its size


class MetadataReader:
    """Hands out metadata values of the expected type and collects warnings.

    Without `strict` any integer width passes for `u32`, and a whole number may be stored as a float.
    Errors are FormatErrors that name the file, the key, what was found and what was expected.
    """

    def __init__(self, gguf: GGUFFile, *, strict: bool = False) -> None:
        self.gguf, self.strict = gguf, strict
        self.warnings: list[str] = []

    def fail(self, text: str) -> NoReturn:
        raise FormatError(f"{os.path.basename(self.gguf.path)}: {text}")

    def value(self, key: str, stored: str) -> Any:
        """The value of a required key; `stored` is the type that ds4 writes, such as "u32" or "[string]".

        Numbers are finite and not negative, and whole where `stored` is u32.
        """
        if key not in self.gguf.metadata:
            self.fail(f"{key} is missing, expected a value of type {stored}: the file is no complete V4.1 model")
        value, found = self.gguf.metadata[key], self.gguf.value_types[key]
        family = _family(stored)
        if found != stored and (self.strict or _family(found) != family):
            self.fail(f"{key} has type {found}, expected {stored}: the file was not written by ds4's tools")
        if family == "[int]" and len(value) and int(value.min()) < 0:
            self.fail(f"{key} holds {int(value.min())}, expected numbers from 0 on: the file is damaged")
        if family == "number" and not (math.isfinite(value) and value >= 0):
            self.fail(f"{key} is {value}, expected a finite number from 0 on: the file is damaged")
        if stored == "u32":
            if value != int(value):
                self.fail(f"{key} is {value}, expected a whole number: the file is damaged")
            return int(value)
        return value

    def config(self) -> dict[str, Any]:
        """The text part of the official configuration, stored as JSON in `deepseek41.config`; {} without it."""
        raw = self.gguf.metadata.get("deepseek41.config", "{}")
        try:
            whole = json.loads(raw) if len(raw) <= _MAX_CONFIG else None
        except (TypeError, ValueError, RecursionError):
            whole = None
        text = whole.get("text_config", whole) if isinstance(whole, dict) else None
        if not isinstance(text, dict):
            self.fail(f"deepseek41.config is {raw!r:.60}, expected a JSON object: the file is damaged")
        return text


def _family(stored: str) -> str:
    if stored in ("string", "bool", "[string]", "[bool]"):
        return stored
    if stored.startswith("["):
        return "[float]" if stored[1] == "f" else "[int]"
    return "number"


def is_whole(values: Any) -> bool:
    """Whether a metadata value is an array of integers."""
    return isinstance(values, np.ndarray) and values.dtype.kind in "iu"
