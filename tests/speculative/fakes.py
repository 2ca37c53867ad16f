"""Drafters that know the text, guess, or lie, and a policy that always drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from mlx_ds4.model.dspark import Proposal
from tests.generation.fakes import EOS, FakeModel, ScriptedModel


class TapModel(FakeModel):
    """The fake model with the method that speculative decoding calls."""

    def forward(self, tokens, cache=None, *, last_only=False, sampled=False):
        return self(tokens, cache, last_only=last_only), []


class ScriptedTapModel(ScriptedModel, TapModel):
    pass


class FakeDrafter:
    """Drafts from `guess(anchor's position) -> five tokens`."""

    block_size = 5

    def __init__(self, guess: Callable[[int], Sequence[int]], confidence: float = 2.0):
        self.failure: str | None = None
        self.guess, self.confidence = guess, confidence
        self.observed, self.proposals = [], 0

    def observe(self, cache, taps):
        self.observed.append(cache.offset)

    def propose(self, model, cache, anchor, sample=None):
        self.proposals += 1
        return Proposal(list(self.guess(cache.offset)), [self.confidence] * self.block_size)


def drafters(truth: Sequence[int], *, vocab: int = 256, eos: int = EOS) -> dict[str, FakeDrafter]:
    """`truth` is the whole text by position, prompt included."""
    rng = random.Random(5)

    def right(offset: int, count: int) -> list[int]:
        known = list(truth[offset + 1 : offset + 1 + count])
        return known + [(t + 1) % vocab for t in truth[offset + 1 + count : offset + 6]] + [0] * (5 - len(known))

    return {
        "right": FakeDrafter(lambda offset: right(offset, 5)[:5]),
        "wrong": FakeDrafter(lambda offset: [(t + 1) % vocab for t in truth[offset + 1 : offset + 6]] or [0] * 5),
        "end": FakeDrafter(lambda offset: [eos] * 5),
        "random": FakeDrafter(lambda offset: [rng.randrange(vocab) for _ in range(5)]),
        "partly": FakeDrafter(lambda offset: right(offset, rng.randrange(6))[:5]),
    }


class Always:
    """Drafts at every opportunity and verifies everything, outside the reasoning."""

    def __init__(self):
        self.cycles = []

    def serial_run(self, reasoning):
        return 4 if reasoning else 0

    def admit(self, confidence, seconds):
        return len(confidence)

    def record_serial(self, seconds):
        pass

    def record_cycle(self, seconds, drafts, accepted):
        self.cycles.append((drafts, accepted))
