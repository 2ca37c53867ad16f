"""What steers the kernels: the environment, and contexts for tests.

Two environment variables, both read once and at the first question, not at import:

* `MLX_DS4_KERNELS=auto|reference|emulate`: kernels where a GPU is the default device; never; or every kernel
  through the checking emulator of a source checkout, on the CPU.
* `MLX_DS4_DISABLE=topk,router`: families that use their reference whatever else is set. `compiled_step`, which is no
  family, makes the model run its steps without compiled graphs; `cuda_cache` leaves compiling CUDA kernels to MLX.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

MODES = ("auto", "reference", "emulate")
# What else can be disabled: parts that ask `enabled`.
_OTHERS = ("compiled_step", "cuda_cache")


class KernelError(ValueError):
    """A kernel was declared, called or switched in a way that cannot work; one sentence says what to do."""


@dataclass(frozen=True)
class _Settings:
    mode: str  # one of MODES, or "export": build graph nodes with Metal's text that are never run
    disabled: frozenset[str]
    launch_options: dict[str, Any] = field(default_factory=dict)  # handed to the emulator


_settings: _Settings | None = None  # None until the first question: nothing happens at import


def current() -> _Settings:
    """The settings in force, read from the environment at the first question."""
    global _settings
    if _settings is None:
        mode = os.environ.get("MLX_DS4_KERNELS") or "auto"
        names = [n.strip() for n in os.environ.get("MLX_DS4_DISABLE", "").split(",")]
        _settings = _Settings(
            _check_mode(mode, "MLX_DS4_KERNELS"), _check_names([n for n in names if n], "MLX_DS4_DISABLE")
        )
    return _settings


def reset_settings() -> None:
    """Forget what was read from the environment; the next question reads it again."""
    global _settings
    _settings = None


def _check_mode(mode: str, where: str) -> str:
    if mode not in MODES:
        raise KernelError(f"{where} is {mode!r}, expected one of {', '.join(MODES)}; correct or unset it.")
    return mode


def _check_names(names: Sequence[str], where: str) -> frozenset[str]:
    known = (*families(), *_OTHERS)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise KernelError(
            f"{where} names {', '.join(unknown)}, which is no kernel family; use names from {', '.join(known)}."
        )
    return frozenset(names)


@contextlib.contextmanager
def _settings_as(new: _Settings) -> Iterator[None]:
    global _settings
    old, _settings = _settings, new
    try:
        yield
    finally:
        _settings = old


def use_kernels(mode: str, **launch_options: Any) -> contextlib.AbstractContextManager[None]:
    """Within the context, behave as with MLX_DS4_KERNELS=mode. `launch_options` (order, checked, std, ...) go to
    the emulator's `launch` and are refused with another mode. Meant for tests: it switches all threads."""
    _check_mode(mode, "use_kernels")
    if launch_options and mode != "emulate":
        raise KernelError(f"use_kernels({mode!r}) got {sorted(launch_options)}, which only 'emulate' takes; drop them.")
    return _settings_as(_Settings(mode, current().disabled, launch_options))


def disable(*names: str) -> contextlib.AbstractContextManager[None]:
    """Within the context, these families use their references too (MLX_DS4_DISABLE stays in force)."""
    now = current()
    more = _check_names(names, "disable()")
    return _settings_as(_Settings(now.mode, now.disabled | more, now.launch_options))


def trace(fn: Callable[[], Any]) -> Any:
    """What `fn()` returns when each launch only builds MLX's Metal graph node, which no device is needed for. The
    arrays cannot be evaluated: they serve to count launches and to read the text that Metal would be given. The
    mode "reference" and disabled families stay in force."""
    results = []

    def once() -> mx.array:
        results.append(fn())
        return mx.array(0)  # the export itself is not wanted, and could not hold every primitive

    now = current()
    mode = now.mode if now.mode == "reference" else "export"
    with _settings_as(_Settings(mode, now.disabled)):
        mx.export_function(lambda _: None, once)
    return results[0]


@functools.cache
def _gpu() -> str | None:
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None


def backend() -> str | None:
    """Where a launch would go now: "metal", "cuda", "emulate", "export", or None (callers use references)."""
    mode = current().mode
    if mode == "auto":
        return _gpu() if mx.default_device() == mx.gpu else None
    return None if mode == "reference" else mode


def enabled(name: str) -> bool:
    """Whether the functions of this family should launch their kernels; False means: use the reference. Likewise for
    the other names that can be disabled."""
    return backend() is not None and name not in current().disabled


@functools.cache
def families() -> tuple[str, ...]:
    """Names of the kernel families: the modules of this folder, without importing them."""
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if not m.name.startswith("_"))
    )
