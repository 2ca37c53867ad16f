"""How likely a model finds a text: sums of negative log-likelihoods over windows of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_ds4.model.model import Model


@dataclass(frozen=True)
class Window:
    """Tokens start .. end - 1 are read, those from `first` on are scored."""

    start: int
    first: int
    end: int


def windows(count: int, sequence_length: int, stride: int) -> Iterator[Window]:
    """Windows of `sequence_length` tokens, each `stride` further than the last, that score every token once.

    All but the first score their last `stride` tokens, so these have at least sequence_length - stride tokens of
    context. Raises ValueError unless 1 <= stride <= sequence_length.
    """
    if not 1 <= stride <= sequence_length:
        raise ValueError(
            f"the stride is {stride} and the sequence length {sequence_length}, expected 1 <= stride <= length."
        )
    end = 0
    while end < count:
        first = end
        end = min(count, sequence_length if end == 0 else end + stride)
        yield Window(max(0, end - sequence_length), first, end)


def perplexity(losses: Sequence[float]) -> float:
    """exp of the mean of -ln p, one or more of them."""
    return math.exp(math.fsum(losses) / len(losses))


def negative_log_likelihood(
    model: Model,
    ids: Sequence[int],
    *,
    begin: int,
    sequence_length: int,
    stride: int | None = None,
    chunk: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """-ln p of every token of `ids`, each given the tokens before it in its window and the token `begin` in front.

    stride: as in `windows`; None means the sequence length, windows side by side. A window runs through the model in
    pieces of `chunk` rows, so logits of more rows never exist at once. `progress(scored, total)` is called after each
    piece. Raises ValueError for no tokens and for lengths that do not fit.
    """
    if not ids:
        raise ValueError("the text has no tokens; give some text.")
    limit = model.config.max_position_embeddings
    if sequence_length > limit:
        raise ValueError(f"the sequence length is {sequence_length}, the model's context ends at {limit}.")
    out: list[float] = []
    for window in windows(len(ids), sequence_length, sequence_length if stride is None else stride):
        cache = model.make_cache()
        inputs = [begin, *ids[window.start : window.end - 1]]
        for start in range(0, len(inputs), chunk):
            part = inputs[start : start + chunk]
            at = window.start + start  # the token that the first row of this piece predicts
            skipped = max(0, window.first - at)
            if skipped >= len(part):  # context only
                model(mx.array([part]), cache, last_only=True)
                mx.eval([layer.state for layer in cache])
                continue
            logits = model(mx.array([part]), cache)[0, skipped:]
            targets = mx.array(ids[at + skipped : at + len(part)])[:, None]
            losses = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, targets, axis=-1)[:, 0]
            out += losses.tolist()
            if progress:
                progress(len(out), len(ids))
    return out
