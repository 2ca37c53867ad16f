"""Kernels with a planted fault, and what the emulator or a case's check finds of it."""

from __future__ import annotations

import dataclasses

import pytest

from mlx_ds4.custom_kernels import _kernel
from mlx_ds4.custom_kernels._case import Case, check
from mlx_ds4.custom_kernels._kernel import Kernel, load_all
from mlx_ds4.custom_kernels._switches import use_kernels


def plant(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, old: str, new: str, *, part: str | None = None) -> None:
    """Replaces the first `old` in the kernel's source or header (`part` names one), in the family's module."""
    part = part or next((p for p in ("source", "header") if old in getattr(kernel, p)), "source")
    text = getattr(kernel, part)
    assert old in text, "the kernel changed: write the mutation anew"
    replace(monkeypatch, kernel, **{part: text.replace(old, new, 1)})


def replace(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, **texts: str) -> None:
    """Puts a kernel with these texts into the place of this one."""
    monkeypatch.setattr(_kernel, "_registry", dict(_kernel._registry))
    mutant = dataclasses.replace(kernel, name=f"{kernel.name}_mutant", **texts)
    assert (mutant.source, mutant.header) != (kernel.source, kernel.header)
    module = load_all()[kernel.family]
    attribute = next(a for a, value in vars(module).items() if value is kernel)
    monkeypatch.setattr(module, attribute, mutant)


def found(case: Case) -> str:
    """What is found when the case runs: a kind of EmulatorError, "wrong result", or ""."""
    try:
        with use_kernels("emulate"):
            return "wrong result" if check(case)[0] else ""
    except _kernel.emulator().EmulatorError as error:
        return error.kind
