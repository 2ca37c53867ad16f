"""The whole text model: embedding, layers, head, and the Engram lookups of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_ds4.cache import REWIND, Cache, LayerCache
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels._cuda_cache import together
from mlx_ds4.custom_kernels._switches import backend, enabled
from mlx_ds4.custom_kernels.hyper_connection import collapse_norm

from .compiled import CompiledSteps
from .engram import EngramHash, ReadAhead, RowSource
from .layer import Layer
from .linear import BlockWeight, Linear
from .module import Module
from .norm import RMSNorm
from .step import Step, as_array

# From this many new rows on, layers are evaluated one by one, so that only one layer's arrays live at a time. On CUDA
# the device would wait for the host at each end of a layer, so up to the second number of rows two layers' arrays live;
# more rows keep the device busy for longer, and need more memory (8,192 rows: 4 GB more for 6 % of the time).
_EAGER_ROWS, _AHEAD_ROWS = 32, 2048


class Embedding(Module):
    """Token rows, weight [vocab, C], dense or block-quantized; returns bfloat16."""

    def __init__(self, vocab: int, dims: int):
        super().__init__()
        self.weight = mx.zeros((vocab, dims), dtype=mx.bfloat16)

    def __call__(self, tokens: mx.array) -> mx.array:
        if isinstance(self.weight, BlockWeight):
            return self.weight.dequantize(tokens).astype(mx.bfloat16)
        return self.weight[tokens].astype(mx.bfloat16)


class Model(Module):
    """DeepSeek V4.1 text model.

    `model(tokens, cache)` computes float32 logits; `make_cache()` gives an empty cache; `layers` are plain
    modules, and `trace()` returns every intermediate array of a pass by name. Parameter names are those of
    the official checkpoint, except that routed experts are stacked.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, layer) for layer in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, out_dtype=mx.float32)
        self._token_map: np.ndarray | None = None
        self._engram: dict[int, tuple[EngramHash, RowSource]] = {}
        self._read_ahead = ReadAhead()
        self._steps = CompiledSteps(self)
        # Whether steps of up to 8 rows run as compiled graphs: None leaves it to the device.
        self.compiled: bool | None = None

    def set_engram(self, token_map: np.ndarray, hashes: Sequence[EngramHash], tables: Sequence[RowSource]) -> None:
        """Gives the Engram layers (in order) their hashes and table readers; token_map int [vocab]."""
        layers = self.config.engram_layer_ids
        if not len(layers) == len(hashes) == len(tables):
            raise ValueError(f"got {len(hashes)} hashes and {len(tables)} tables for {len(layers)} Engram layers")
        self._token_map = np.asarray(token_map, dtype=np.int64)
        self._engram = {layer: (h, table) for layer, h, table in zip(layers, hashes, tables, strict=True)}

    def tap(self, layers: Sequence[int]) -> None:
        """Makes `forward` return the taps of these layers, in their order; at first those of the config."""
        for index, layer in enumerate(self.layers):
            layer.tapped = index in layers

    def make_cache(self, prefill_mode: str = "exact") -> Cache:
        """An empty cache for one batch of sequences; with "replay" it also takes steps with `decoder_rows`."""
        return Cache(self.config, prefill_mode)

    def __call__(
        self,
        tokens: mx.array | np.ndarray,
        cache: Cache | None = None,
        *,
        last_only: bool = False,
        decoder_rows: int | None = None,
        sampled: bool = False,
    ) -> mx.array:
        """Logits float32 [B, L, vocab] of tokens [B, L] behind what the cache holds; the cache advances by L.

        `last_only` computes the last row alone, [B, 1, vocab], as prefill needs it. Without a cache the sequence starts
        here. Ids that the host has may come as a NumPy array; on CUDA an array of MLX would have to be fetched to check
        them. Any split of a sequence into calls gives the same logits. Raises ValueError for ids outside the
        vocabulary, an empty batch, or a sequence beyond `max_position_embeddings`.

        `sampled` says that the ids were chosen from logits of this vocabulary and need no check. Then a compiled step
        of a model without Engram does not wait for them, and the next step can be prepared while this one runs.

        `decoder_rows` r below L is the shortcut of prefill mode "replay", refused for caches of another: the decoder
        layers (`config.first_decoder_layer` and those behind it) run over the last r rows only, [B, r, vocab], and
        their windows begin there. All rows go through the layers before, and into the compressed rows of the
        first decoder layer. A step of all its rows continues the windows as they are.
        """
        return self.forward(tokens, cache, last_only=last_only, decoder_rows=decoder_rows, sampled=sampled)[0]

    def trace(self, tokens: mx.array, cache: Cache | None = None) -> dict[str, mx.array]:
        """Every noted intermediate array of one pass: `L3.attn.q`, `L3.h_out`, .., and `logits`."""
        trace: dict[str, mx.array] = {}
        trace["logits"] = self.forward(tokens, cache, trace=trace)[0]
        return trace

    def forward(
        self,
        tokens: mx.array | np.ndarray,
        cache: Cache | None = None,
        *,
        last_only: bool = False,
        decoder_rows: int | None = None,
        trace: dict[str, mx.array] | None = None,
        sampled: bool = False,
    ) -> tuple[mx.array, list[mx.array]]:
        """Logits as `__call__`, and the drafter's taps: bfloat16 [B, L, C] on entry to each tapped layer.

        With `decoder_rows` the taps have these rows; without a row there are no taps.
        """
        if cache is None:
            cache = self.make_cache("exact" if decoder_rows is None else "replay")
        length = self._check_size(tokens, cache)
        rows = _checked_rows(decoder_rows, length, cache)
        cut = rows < length or cache.decoder_start > max(0, cache.offset - self.config.sliding_window + 1)
        cache.begin(*tokens.shape)
        if trace is None and length <= REWIND and not cut and self._compiles():
            return self._steps(tokens, cache, last_only, sampled)
        ids = self.checked_ids(tokens)
        step = Step(self.config, cache.offset, length, trace)
        h, pre = self.start(as_array(tokens))
        mapped, records = self.fetch(ids, cache)
        if cut:
            h, pre, taps = self._run_cut(h, pre, step, cache, records, rows)
        else:
            (h, pre), taps = self.run_layers(0, len(self.layers), h, pre, step, cache, records), step.taps
        cache.advance(length, mapped, rows)
        return self.logits(h, pre, last_only), taps

    def start(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """The streams [B, L, M, C] that the first layer takes, and the coefficients [B, L, M] that collapse them."""
        h = self.embed(tokens)[:, :, None]
        h = mx.broadcast_to(h, (*h.shape[:2], self.config.hc_mult, h.shape[3]))
        return h, _first(*h.shape[:3])

    def run_layers(
        self,
        first: int,
        end: int,
        h: mx.array,
        pre: mx.array,
        step: Step,
        caches: Sequence[LayerCache],
        records: dict[int, mx.array],
    ) -> tuple[mx.array, mx.array]:
        """Layers first .. end - 1; `records` hold the table rows of Engram layers."""
        ahead, before = backend() == "cuda" and step.length <= _AHEAD_ROWS, []
        for index in range(first, end):
            step.layer = index
            with together():
                h, pre = self.layers[index](h, pre, step, caches[index], records.get(index))
            if step.length >= _EAGER_ROWS:
                made = [h, pre, caches[index].state]
                mx.async_eval(made)
                mx.eval(before if ahead else made)
                before = made
        return h, pre

    def _run_cut(
        self, h: mx.array, pre: mx.array, step: Step, cache: Cache, records: dict[int, mx.array], rows: int
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """All layers, those of the decoder over the last `rows` alone; the streams and taps of these rows."""
        first, skipped = self.config.first_decoder_layer, step.length - rows
        h, pre = self.run_layers(0, first, h, pre, step, cache, records)
        step.layer = first
        self.layers[first].publish(h, pre, step, cache[first], records.get(first))
        if step.length >= _EAGER_ROWS:
            mx.eval(cache[first].state)
        h, pre = h[:, skipped:], pre[:, skipped:]
        if rows == 0:
            return h, pre, []
        tail = step.tail(rows, seen_from=cache.decoder_start if skipped == 0 else step.start + skipped)
        tail_records = {layer: table[:, skipped:] for layer, table in records.items()}
        h, pre = self.run_layers(first, len(self.layers), h, pre, tail, cache, tail_records)
        return h, pre, [tap[:, skipped:] for tap in step.taps] + tail.taps

    def logits(self, h: mx.array, pre: mx.array, last_only: bool) -> mx.array:
        """Logits float32 from the streams behind the last layer."""
        if last_only:
            h, pre = h[:, -1:], pre[:, -1:]
        if h.size == 0:
            return mx.zeros((*h.shape[:2], self.config.vocab_size))
        return self.head(collapse_norm(h, pre, self.norm.weight, self.norm.eps))

    def _compiles(self) -> bool:
        if self.compiled is not None:
            return self.compiled
        return backend() in ("metal", "cuda") and enabled("compiled_step")

    def _check_size(self, tokens: mx.array | np.ndarray, cache: Cache) -> int:
        if tokens.ndim != 2 or tokens.size == 0:
            raise ValueError(f"tokens have shape {tokens.shape}, expected [batch, length] with at least one token")
        length = tokens.shape[1]
        if cache.offset + length > self.config.max_position_embeddings:
            raise ValueError(
                f"{cache.offset + length} tokens exceed the model's context of "
                f"{self.config.max_position_embeddings}: shorten the prompt or start a new cache"
            )
        if self.config.engram_layer_ids and self._token_map is None:
            raise ValueError("the Engram tables are not attached: load the model with load(), or call set_engram()")
        return length

    def checked_ids(self, tokens: mx.array | np.ndarray) -> np.ndarray:
        """The token ids, int64, on the host. Raises ValueError for one outside the vocabulary."""
        ids = np.array(tokens).astype(np.int64)
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.config.vocab_size)][0]
            raise ValueError(f"token id {bad} is outside the vocabulary, expected 0 to {self.config.vocab_size - 1}")
        return ids

    def fetch(self, ids: np.ndarray, cache: Cache) -> tuple[np.ndarray | None, dict[int, mx.array]]:
        """The mapped n-gram ids of a step, and its table records for every Engram layer: uint8
        [B, L, columns, D + D/32]."""
        mapped, read = self.reader(ids, cache)
        return mapped, {layer: read(layer) for layer in self._engram}

    def announce(self, ids: np.ndarray, count: int) -> None:
        """Says that the last `count` of these token ids [n] will follow those before them: their table records are
        read in the background, so that a later step with these tokens does not wait for the disk."""
        if self._token_map is not None:
            mapped = self._token_map[ids[-(count + self.config.engram_max_ngram_size - 1) :]][None]
            self._read_ahead.start(
                [(table, hash_.row_numbers(mapped, count)) for hash_, table in self._engram.values()]
            )

    def reader(self, ids: np.ndarray, cache: Cache) -> tuple[np.ndarray | None, Callable[[int], mx.array]]:
        """As `fetch`, with a function that reads the records of a layer when they are needed."""
        mapped = known = None
        if self._token_map is not None:
            mapped = self._token_map[ids]
            known = mapped if cache.history is None else np.concatenate([cache.history, mapped], axis=1)

        def read(layer: int) -> mx.array:
            hashing, table = self._engram[layer]
            return mx.array(table.rows(hashing.row_numbers(known, ids.shape[1])))

        return mapped, read


@functools.lru_cache(maxsize=16)
def _first(*shape: int) -> mx.array:
    """Coefficients [B, L, M] that take the first stream, made once: a step would wait for a new array of the host."""
    value = np.zeros(shape, dtype=np.float32)
    value[..., 0] = 1
    return mx.array(value)


def _checked_rows(decoder_rows: int | None, length: int, cache: Cache) -> int:
    """How many of a step's last rows run through the decoder layers."""
    if decoder_rows is None:
        return length
    if not 0 <= decoder_rows <= length:
        raise ValueError(f"decoder_rows is {decoder_rows}, expected 0 to the step's {length} rows")
    if decoder_rows < length and cache.prefill_mode != "replay":
        raise ValueError(
            f"decoder_rows is {decoder_rows} of {length}, but the cache holds {cache.prefill_mode} state: "
            "make one with make_cache('replay')"
        )
    return decoder_rows
