"""Engram: hashed n-gram memories, added to the residual streams before a block.

Row numbers depend on token ids alone and are computed on the host with int64 (products exceed 2^53); the table rows
come from a row source that reads them by offset, so the tables never enter memory (architecture notes 9).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels.engram import engram_embedding, engram_update

from .linear import Linear
from .module import Module
from .step import Step

# The filler of positions that do not count: before the start of the sequence, or not text.
DEAD = -1


class RowSource(Protocol):
    """Reads table records: int64 row numbers [..] -> uint8 [.., D + D/32] (codes, then scales)."""

    def rows(self, ids: np.ndarray) -> np.ndarray: ...


class ReadAhead:
    """Reads rows in the background and drops them: when a step asks for them, the system has them in memory."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, wanted: Sequence[tuple[RowSource, np.ndarray]]) -> None:
        """Begins with these rows of these tables, unless an earlier call is still at work."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read, args=(wanted,), name="engram", daemon=True)
            self._thread.start()

    @staticmethod
    def _read(wanted: Sequence[tuple[RowSource, np.ndarray]]) -> None:
        for table, numbers in wanted:
            with contextlib.suppress(Exception):  # the step that asks for them will say it
                table.rows(numbers)


@dataclass(frozen=True)
class EngramHash:
    """The hash of one table: multipliers int64 [n-gram size], primes int64 [columns], order-major."""

    multipliers: np.ndarray
    primes: np.ndarray
    pad_id: int

    def row_numbers(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Table rows int64 [B, count, columns] of the last `count` positions of mapped ids [B, n].

        For n-gram order n: X = t0 m0 xor t1 m1 .. xor t(n-1) m(n-1), t_s the id s positions back; row = X mod prime +
        the sum of the primes of earlier columns. A DEAD id, and every older one, counts as the pad id.
        """
        size = len(self.multipliers)
        heads = len(self.primes) // (size - 1)
        short = count + size - 1 - ids.shape[1]
        if short > 0:
            ids = np.concatenate([np.full((ids.shape[0], short), DEAD), ids], axis=1)
        dead = np.zeros((ids.shape[0], count), dtype=bool)
        rows, mixed = [], None
        for back in range(size):
            last = ids.shape[1] - back
            t = ids[:, last - count : last]
            dead = dead | (t == DEAD)
            product = np.where(dead, self.pad_id, t) * self.multipliers[back]
            mixed = product if mixed is None else mixed ^ product
            if back:
                columns = slice((back - 1) * heads, back * heads)
                rows.append(mixed[..., None] % self.primes[columns] + self._offsets[columns])
        return np.concatenate(rows, axis=-1)

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        """Where each column's rows begin in the table."""
        return np.concatenate([[0], np.cumsum(self.primes)[:-1]])


def engram_constants(config: ModelConfig) -> list[EngramHash]:
    """The hash of each Engram layer, derived from the config.

    Multipliers come from NumPy's PCG64 seeded with 10007 * layer; primes are the next unused ones from
    `engram_vocab_size` on, over all layers and orders (architecture notes 9.2, 9.3).
    """
    size, heads = config.engram_max_ngram_size, config.engram_n_heads
    if not config.engram_layer_ids:
        return []
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    used: set[int] = set()
    hashes = []
    for layer in config.engram_layer_ids:
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=size, dtype=np.int64)
        primes = []
        for _ in range(size - 1):
            candidate = config.engram_vocab_size - 1
            for _ in range(heads):
                candidate = _next_prime(candidate, used)
                primes.append(candidate)
        hashes.append(EngramHash(2 * draws + 1, np.array(primes, dtype=np.int64), config.engram_pad_token_id))
    return hashes


def _next_prime(after: int, used: set[int]) -> int:
    number = after + 1
    while number in used or not _is_prime(number):
        number += 1
    used.add(number)
    return number


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    factors = np.arange(2, int(number**0.5) + 1)
    return bool((number % factors != 0).all())


class Engram(Module):
    """Adds the gated value of the looked-up rows to every residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self._eps = c.rms_norm_eps
        self.wkv = Linear(c.engram_columns * c.engram_head_dim, (c.hc_mult + 1) * c.hidden_size, trained=True)
        self.q_weight = mx.ones((c.hc_mult, c.hidden_size))
        self.k_weight = mx.ones((c.hc_mult, c.hidden_size))

    def __call__(self, h: mx.array, records: mx.array, step: Step) -> mx.array:
        """h [B, L, M, C], records uint8 [B, L, columns, D + D/32] -> bfloat16 [B, L, M, C]."""
        embedding = engram_embedding(records)
        kv = self.wkv(embedding)
        step.note("engram.e", embedding)
        step.note("engram.kv", kv)
        return engram_update(h, kv, self.q_weight, self.k_weight, eps=self._eps)
