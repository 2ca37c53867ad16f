"""Kernels run their CUDA bodies as C++ in the tests that ask for it."""

from __future__ import annotations

import pytest

from mlx_ds4.custom_kernels._kernel import Kernel
from tests.cuda_host import launch


@pytest.fixture
def on_cpu(monkeypatch):
    """Launches run their CUDA body here, where no device is; those of portable text, in the emulator."""
    otherwise = Kernel._launch

    def _launch(self, inputs, call):
        return launch(self, inputs, call) if self.cuda_source else otherwise(self, inputs, call)

    monkeypatch.setattr(Kernel, "_launch", _launch)
