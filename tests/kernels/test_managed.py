"""Arrays of the host are asked for by address and size on CUDA, and left alone elsewhere."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import _managed


@pytest.mark.parametrize("where", ["cuda", "metal", None])
def test_send(where, monkeypatch):
    calls = []
    monkeypatch.setattr(_managed, "backend", lambda: where)
    monkeypatch.setattr(_managed, "_prefetch", lambda: lambda *call: calls.append(call))
    x = mx.array(np.arange(24 * 264, dtype=np.uint8).reshape(1, 24, 264))
    assert _managed.send(x) is x
    assert calls == ([(np.asarray(x).ctypes.data, 24 * 264, 0, 2)] if where == "cuda" else [])


def test_a_driver_without_the_function(monkeypatch):
    def missing(name):
        raise OSError(name)

    _managed._prefetch.cache_clear()
    monkeypatch.setattr(_managed.ctypes, "CDLL", missing)
    monkeypatch.setattr(_managed, "backend", lambda: "cuda")
    x = mx.array([1, 2, 3])
    assert _managed.send(x) is x
    _managed._prefetch.cache_clear()
