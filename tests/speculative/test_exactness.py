"""The distribution of what speculative decoding says, on a model whose true distribution is known."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.model.dspark import Proposal
from mlx_ds4.sampling import filtered_probs, make_sampler
from mlx_ds4.speculative import speculative_step
from tests.speculative.fakes import Always, FakeDrafter

TOKENS = 800


class Bigram:
    """Tokens 0 .. 2; the logits of a token's successor are a row of a table."""

    def __init__(self, probabilities):
        self.table = mx.log(mx.array(probabilities))
        self.config = SimpleNamespace(vocab_size=len(probabilities), max_position_embeddings=2 * TOKENS)

    def make_cache(self, prefill_mode="exact"):
        return _NoCache()

    def forward(self, tokens, cache=None, *, last_only=False, sampled=False):
        cache.offset += tokens.shape[1]
        logits = self.table[mx.array(tokens)]
        return (logits[:, -1:] if last_only else logits), []


class _NoCache:
    offset = 0
    prefill_mode = "exact"

    def missing_rows(self, kept, count):
        return 0

    def __iter__(self):
        return iter(())

    def trim(self, count):
        self.offset -= count


D10 = [0.5, 0.3, 0.2]
TABLE = [D10, [0.1, 0.2, 0.7], [0.34, 0.33, 0.33]]
FILTERS = [
    {"temp": 1.0},
    {"temp": 0.7},
    {"temp": 1.0, "top_p": 0.5},
    {"temp": 1.0, "top_k": 2},
    {"temp": 1.0, "min_p": 0.5},
]


class Coupled(FakeDrafter):
    """Drafts with the noise that it is lent, from a distribution of its own."""

    def propose(self, model, cache, anchor, sample=None):
        tokens, token = [], anchor
        for _ in range(5):
            token = sample(mx.log(0.5 * mx.exp(model.table[token]) + 1 / 6)[None]).item()
            tokens.append(token)
        return Proposal(tokens, [0.0] * 5)


def chi_square(counts: np.ndarray, chances: np.ndarray) -> None:
    """No impossible outcome, and the others as often as they should be: below the quantile at 0.9999 (Wilson and
    Hilferty's approximation). Every run is seeded, so a failure is a fault."""
    possible = chances >= 1e-9
    assert counts[~possible].sum() == 0 and counts.sum() > 100
    want = chances[possible] * counts.sum()
    freedom = int(possible.sum()) - 1
    if freedom:
        limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert ((counts[possible] - want) ** 2 / want).sum() < limit


@pytest.mark.parametrize("settings", FILTERS)
@pytest.mark.parametrize("drafter", ["zero", "coupled"])
def test_tokens_follow_the_models_distribution(drafter, settings):
    """What follows each token in a long text has the distribution of that token's row after the filters; a second
    draw after a rejection would give the draft "always 0" 0.75 instead of 0.5 (case D10 of the survey of peers)."""
    model, fake = Bigram(TABLE), FakeDrafter(lambda offset: [0] * 5) if drafter == "zero" else Coupled(None)
    steps = speculative_step(
        mx.array([0]), model, fake, max_tokens=TOKENS, sampler=make_sampler(**settings, seed=11), admission=Always()
    )
    tokens, flags = zip(*((token, flag) for token, _, flag in steps), strict=True)
    counts = np.zeros((3, 3))
    np.add.at(counts, ((0, *tokens[:-1]), tokens), 1)
    rows = np.array(filtered_probs(model.table, **settings))
    for row in range(3):
        if counts[row].sum():
            chi_square(counts[row], rows[row])
    if drafter == "coupled":  # sharing the noise guesses better than any fixed token could
        assert sum(flags) > 0.5 * TOKENS
    else:
        assert 0 < sum(flags) < TOKENS


@pytest.mark.parametrize("settings", FILTERS)
def test_one_row_many_times(settings):
    """200,000 draws of the shipped sampler against p, the accepted ones and the corrections together and apart:
    given a rejection the token is distributed as p without the draft, over the support fixed before."""
    draws = np.array(make_sampler(**settings, seed=4)(mx.broadcast_to(mx.log(mx.array(D10)), (200_000, 3))))
    p = np.array(filtered_probs(mx.log(mx.array(D10)), **settings))
    counts = np.bincount(draws, minlength=3)
    chi_square(counts, p)
    rest = np.where(np.arange(3) == 0, 0, p)
    if rest.sum():
        chi_square(np.where(np.arange(3) == 0, 0, counts), rest / rest.sum())
