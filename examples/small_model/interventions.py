"""Parts of a loaded model switched off, one at a time, and put back afterwards.

Every function is a context manager over a Model or a Drafter. They change what is computed, never a weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import mlx.core as mx
from mlx import nn

from mlx_ds4.custom_kernels import index_topk
from mlx_ds4.custom_kernels._rows import ring_ref
from mlx_ds4.custom_kernels._switches import disable
from mlx_ds4.custom_kernels.hyper_connection import coefficients
from mlx_ds4.custom_kernels.quant_matmul import quant_matmul_group
from mlx_ds4.custom_kernels.rms_norm import rms_norm
from mlx_ds4.custom_kernels.rope import rope
from mlx_ds4.model import attention, indexer, linear, moe
from mlx_ds4.model.dspark import Drafter
from mlx_ds4.model.model import Model


@contextlib.contextmanager
def engram_off(model: Model) -> Iterator[None]:
    """The Engram layers add nothing."""
    with _replaced([(layer, "engram", _NoEngram()) for layer in model.layers if "engram" in layer]):
        yield


@contextlib.contextmanager
def compressed_rows_off(model: Model) -> Iterator[None]:
    """No layer sees anything but its window."""
    with _replaced([(a, "indexer", _NoSelection(a.indexer)) for a in _index_sources(model)]):
        yield


@contextlib.contextmanager
def all_rows_selected(model: Model) -> Iterator[None]:
    """Every visible compressed row is selected: what selection costs."""
    with _changed_indexers(model, index_topk=1 << 30):
        yield


@contextlib.contextmanager
def candidates_off(model: Model) -> Iterator[None]:
    """Later index sources choose among all rows."""
    with _changed_indexers(model, candidate_topk_blocks=1 << 30):
        yield


@contextlib.contextmanager
def random_indexer(model: Model, seed: int = 0) -> Iterator[None]:
    """Rows are selected by chance among the visible ones (and, as before, within the candidate blocks)."""
    key = mx.random.key(seed)

    def index_scores(*inputs, **options):
        nonlocal key
        real = _index_scores(*inputs, **options)
        key, own = mx.random.split(key)
        return mx.where(real > -mx.inf, mx.random.uniform(shape=real.shape, key=own), real)

    _index_scores = index_topk.index_scores
    with mock.patch.object(index_topk, "index_scores", index_scores), disable("index_topk"):
        yield


@contextlib.contextmanager
def fake_quantization_off() -> Iterator[None]:
    """Cache entries, index vectors and the inputs of linear layers are not rounded to FP8 and FP4."""

    def cache_entry(x, cos, sin, kind, *, weight=None, eps=0.0, into=None, at=None):
        rows = rope(x if weight is None else rms_norm(x, weight, eps), cos, sin)
        return rows if into is None else ring_ref(into, rows, at, axis=1)

    def products_and_entry(x, weights, dtypes, q_weight, cos, sin, kind, kv_weight, eps, sums, *, into, at, counts):
        products = quant_matmul_group(x, weights, out_dtype=dtypes)
        rows = cache_entry(products[1], cos, sin, kind, weight=kv_weight, eps=eps, into=into, at=at)
        return products, rms_norm(products[0], q_weight, eps), rows, *coefficients(sums)

    with contextlib.ExitStack() as stack:
        for module in (attention, indexer):
            stack.enter_context(mock.patch.object(module, "cache_entry", cache_entry))
        stack.enter_context(mock.patch.object(linear, "products_and_entry", products_and_entry))
        for module in (linear, moe):
            stack.enter_context(mock.patch.object(module, "fake_quant_fp8", lambda x: x))
        yield


@contextlib.contextmanager
def stage_off(drafter: Drafter, stage: int) -> Iterator[None]:
    """The drafter passes one of its stages by."""
    before = drafter.mtp[stage]
    drafter.mtp[stage] = _Skipped(before)
    try:
        yield
    finally:
        drafter.mtp[stage] = before


@contextlib.contextmanager
def markov_off(drafter: Drafter) -> Iterator[None]:
    """The Markov head says nothing about the next token."""
    head = drafter.mtp[-1].markov_head
    with _replaced([(head, "head", _Silent(head.head))]):
        yield


# ---- what stands in ---------------------------------------------------------------------------------------


class _NoEngram(nn.Module):
    def __call__(self, h, records, step):
        return h


class _NoSelection(nn.Module):
    def __init__(self, real):
        super().__init__()
        for name, part in real.items():
            self[name] = part

    def scores_entries(self, step):
        return False

    def __call__(self, batch, keys, step, q=None, weights=None):
        step.selection = step.candidates = None


class _Skipped(nn.Module):
    def __init__(self, stage):
        super().__init__()
        for name, part in stage.items():
            self[name] = part

    def __call__(self, h, pre, step, cache, records=None):
        return h, pre


class _Silent(nn.Module):
    def __init__(self, head):
        super().__init__()
        self._vocab = head.weight.shape[0]

    def __call__(self, e):
        return mx.zeros((*e.shape[:-1], self._vocab))


def _index_sources(model: Model) -> list[nn.Module]:
    return [layer.attn for layer in model.layers if "indexer" in layer.attn]


@contextlib.contextmanager
def _changed_indexers(model: Model, **changes: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for attn in _index_sources(model):
            config = dataclasses.replace(attn.indexer._config, **changes)
            stack.enter_context(mock.patch.object(attn.indexer, "_config", config))
        yield


@contextlib.contextmanager
def _replaced(parts: list[tuple[nn.Module, str, nn.Module]]) -> Iterator[None]:
    before = [(owner, name, owner[name]) for owner, name, _ in parts]
    for owner, name, part in parts:
        owner[name] = part
    try:
        yield
    finally:
        for owner, name, part in before:
            owner[name] = part
