"""Filters against a plain per-row reference and against mlx_lm's own; draws against the distribution they claim."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlx_ds4.sampling import check_logits, filtered_probs, make_logits_processors, make_sampler

INF = math.inf


def reference_probs(logits, temp=0.0, top_p=0.0, min_p=0.0, min_tokens_to_keep=1, top_k=0):
    """The definition, token by token, in float64."""
    logits = np.asarray(logits, dtype=np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temp == 0:
        return np.eye(len(logits))[order[0]]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    kept = list(order)
    if 0 < top_p < 1:
        mass, kept = 0.0, []
        for i in order:
            if kept and mass >= top_p:
                break
            kept.append(i)
            mass += p[i]
    if min_p > 0:
        kept = [i for n, i in enumerate(kept) if p[i] >= min_p * p.max() or n < min_tokens_to_keep]
    if top_k:
        kept = kept[:top_k]
    z = np.full(len(logits), -INF)
    z[kept] = logits[kept]
    z = np.where(z == -INF, -INF, (z - z.max()) / temp)
    e = np.exp(z)
    return e / e.sum()


ROWS = {
    "spread": [0.3, 2.1, -1.7, 0.9, 1.4, -0.2, 0.31, -3.0],
    "ties": [1.0, 2.0, 2.0, 2.0, 0.5, 1.0, 2.0, -1.0],
    "flat": [0.25] * 8,
    "banned": [-INF, 0.5, -INF, 1.5, 0.5, -INF, -2.0, -INF],
    "one left": [-INF, -INF, -INF, -INF, -INF, 3.0, -INF, -INF],
    "steep": [0.0, 80.0, 79.5, -200.0, 78.0, 10.0, 0.0, 79.5],
}
SETTINGS = [
    {},
    {"temp": 1.0},
    {"temp": 0.6},
    {"temp": 1.0, "top_p": 0.3},
    {"temp": 1.3, "top_p": 0.9},
    {"temp": 1.0, "top_p": 1e-300},
    {"temp": 1.0, "top_p": 1.0},
    {"temp": 0.7, "min_p": 0.25},
    {"temp": 1.0, "min_p": 1.0},
    {"temp": 1.0, "min_p": 1.0, "min_tokens_to_keep": 3},
    {"temp": 1.0, "min_p": 0.9, "min_tokens_to_keep": 100},
    {"temp": 1.0, "top_k": 1},
    {"temp": 1.0, "top_k": 3},
    {"temp": 1.0, "top_k": 8},
    {"temp": 1.0, "top_k": 1000},
    {"temp": 2.0, "top_p": 0.95, "min_p": 0.05, "top_k": 4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_filtered_probs_is_the_definition(name, settings):
    got = np.array(filtered_probs(mx.array([ROWS[name]]), **settings))[0]
    want = reference_probs(ROWS[name], **settings)
    assert (got > 0).tolist() == (want.astype(np.float32) > 0).tolist()
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


def test_rows_are_independent_and_constants_cancel():
    rows = mx.array(list(ROWS.values()))
    together = filtered_probs(rows, temp=0.8, top_p=0.9, min_p=0.02, top_k=5)
    for row, alone in zip(rows, together, strict=True):
        np.testing.assert_array_equal(
            np.array(filtered_probs(row, temp=0.8, top_p=0.9, min_p=0.02, top_k=5)), np.array(alone)
        )
    logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    shifted = filtered_probs(logprobs, temp=0.8, top_k=5)
    np.testing.assert_allclose(np.array(shifted), np.array(filtered_probs(rows, temp=0.8, top_k=5)), atol=1e-5)


def test_temperature_limits():
    row = ROWS["ties"]
    for temp in (5e-324, 1e-300, 1e-38):
        # The limit of a small temperature shares the mass among equals; greedy (0) takes the lowest index.
        assert np.array(filtered_probs(mx.array(row), temp=temp)).tolist() == [0, 0.25, 0.25, 0.25, 0, 0, 0.25, 0]
    banned = np.array(filtered_probs(mx.array(ROWS["banned"]), temp=1e308))
    np.testing.assert_allclose(banned, np.isfinite(ROWS["banned"]) / 4, atol=1e-7)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.35},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_p": 0.4, "min_tokens_to_keep": 7},
        {"top_k": 11},
        {"top_p": 0.8, "min_p": 0.05, "top_k": 9},
    ],
    ids=str,
)
def test_same_support_as_mlx_lm(settings, monkeypatch):
    """mlx_lm's own chain, with its final draw replaced by a look at what is left. No ties in these rows."""
    logits = mx.array(np.random.default_rng(5).permutation(400).reshape(4, 100) / 30.0).astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    monkeypatch.setattr(sample_utils, "categorical_sampling", lambda x, temp: mx.softmax(x / temp, axis=-1))
    want = np.array(sample_utils.make_sampler(temp=0.7, **settings)(logprobs))
    got = np.array(filtered_probs(logprobs, temp=0.7, **settings))
    assert ((got > 0) == (want > 0)).all()
    np.testing.assert_allclose(got, want, atol=1e-6)


def chi_square_passes(tokens, probs):
    """Pearson's test at about one in 30,000; bins below 5 expected are merged."""
    n = tokens.size
    expected, observed = probs * n, np.bincount(tokens, minlength=probs.size)
    assert observed[probs == 0].sum() == 0
    big = expected >= 5
    expected = np.append(expected[big], expected[~big].sum())
    observed = np.append(observed[big], observed[~big].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    degrees = expected.size - 1
    if degrees == 0:
        return True
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees)
    return statistic < degrees * (1 - spread + 4 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("settings", [s for s in SETTINGS if s.get("temp")], ids=str)
def test_draws_follow_filtered_probs(settings):
    for seed, row in enumerate(ROWS.values()):
        logits = mx.array([row])
        sampler = make_sampler(**settings, seed=seed)
        tokens = np.array(sampler(mx.broadcast_to(logits, (20_000, len(row)))))
        assert chi_square_passes(tokens, np.array(filtered_probs(logits, **settings))[0].astype(np.float64))


def test_the_chi_square_test_can_fail():
    row = mx.array([ROWS["spread"]])
    tokens = np.array(make_sampler(temp=1.05, seed=0)(mx.broadcast_to(row, (20_000, 8))))
    assert not chi_square_passes(tokens, reference_probs(ROWS["spread"], temp=1.0))


def test_successive_draws_follow_filtered_probs():
    logits, sampler = mx.array([ROWS["spread"]]), make_sampler(temp=0.9, top_k=5, seed=11)
    tokens = np.array([sampler.lazy(logits).item() for _ in range(3000)])
    assert chi_square_passes(tokens, reference_probs(ROWS["spread"], temp=0.9, top_k=5))
    pairs = tokens[:-1] * 8 + tokens[1:]
    p = reference_probs(ROWS["spread"], temp=0.9, top_k=5)
    assert chi_square_passes(pairs, np.outer(p, p).reshape(-1))


def test_draft_case_distribution():
    logits = mx.log(mx.array([0.5, 0.3, 0.2]))
    assert np.array(filtered_probs(logits, temp=1.0, top_p=0.49)).tolist() == [1, 0, 0]
    np.testing.assert_allclose(np.array(filtered_probs(logits, temp=1.0, min_p=0.5)), [5 / 8, 3 / 8, 0], atol=1e-6)


def test_greedy_takes_the_lowest_index():
    rows = np.random.default_rng(0).integers(0, 4, (50, 3000)).astype(np.float32)
    assert np.array(make_sampler()(mx.array(rows))).tolist() == rows.argmax(axis=1).tolist()


def test_seed_decides_and_global_state_is_untouched():
    logits = mx.zeros((64, 50))
    before = [np.array(s) for s in mx.random.state]
    first, second = make_sampler(temp=1.0, seed=7), make_sampler(temp=1.0, seed=7)
    draws = [np.array(first(logits)) for _ in range(3)]
    mx.random.normal((3,))  # someone else draws in between
    state = [np.array(s) for s in mx.random.state]
    assert [np.array(second(logits)).tolist() for _ in range(3)] == [d.tolist() for d in draws]
    assert all((a == np.array(b)).all() for a, b in zip(state, mx.random.state, strict=True))
    assert any((a != b).any() for a, b in zip(before, state, strict=True))
    assert draws[0].tolist() != draws[1].tolist()
    assert np.array(make_sampler(temp=1.0, seed=8)(logits)).tolist() != draws[0].tolist()
    unseeded = [np.array(make_sampler(temp=1.0)(logits)).tolist() for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    for edge in (0, 2**64 - 1):
        assert make_sampler(temp=1.0, seed=edge)(logits).shape == (64,)


def test_a_removed_token_cannot_win_by_noise(monkeypatch):
    monkeypatch.setattr(mx.random, "gumbel", lambda shape, key: mx.full(shape, -INF))
    assert make_sampler(temp=1.0, seed=0)(mx.array([[-INF, -INF, 0.0]])).item() == 2


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize(
    ("value", "found"), [(math.nan, "1 NaN among 5"), (INF, "1 +inf among 5"), (-INF, "only -inf among 5")]
)
def test_logits_that_are_no_distribution(temp, value, found):
    good = [0.0, 1.0, 2.0, 3.0, 4.0]
    bad = [-INF] * 5 if value == -INF else [0.0, value, 1.0, -INF, 2.0]
    rows = mx.array([good, good, bad, good])
    sampler = make_sampler(temp=temp, top_p=0.9, top_k=3, seed=1)
    with pytest.raises(ValueError, match="row 2") as error:
        sampler(rows)
    assert found in str(error.value)
    assert np.array(sampler.lazy(rows)).max() < 5
    with pytest.raises(ValueError, match="position 41"):
        check_logits(rows, where="position 41")
    probs = np.array(filtered_probs(rows, temp=temp, top_p=0.9, top_k=3))
    assert np.isnan(probs[2]).all() and np.isfinite(probs[[0, 1, 3]]).all()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temp": -0.1}, "temp"),
        ({"temp": math.nan}, "temp"),
        ({"temp": INF}, "temp"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings, named):
    with pytest.raises(ValueError, match=f"^{named} is"):
        make_sampler(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.3, "repetition_context_size": 2},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.4, "frequency_context_size": 3},
        {"logit_bias": {3: -2.5, 7: 4.0}},
        {"logit_bias": {1: -INF}, "repetition_penalty": 0.8, "presence_penalty": -0.2, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_processors_equal_mlx_lm(settings):
    logits = np.random.default_rng(2).normal(size=(1, 10)).astype(np.float32)
    tokens = mx.array([4, 7, 7, 2, 7, 4])
    mine, theirs = mx.array(logits), mx.array(logits)
    for process in make_logits_processors(**settings):
        mine = process(tokens, mine)
    for process in sample_utils.make_logits_processors(**settings):
        theirs = process(tokens, theirs)
    np.testing.assert_allclose(np.array(mine), np.array(theirs), atol=1e-6)
    assert (np.array(mine) != logits).any()


def test_processors_leave_their_input_alone():
    logits = mx.array([[1.0, -2.0, 3.0]])
    for process in make_logits_processors({0: 5.0}, repetition_penalty=2.0, presence_penalty=1.0):
        process(mx.array([0, 1]), logits)
        assert process(mx.array([], mx.int32), mx.array([[0.0, 0.0, 0.0]])).shape == (1, 3)
    assert logits.tolist() == [[1.0, -2.0, 3.0]]
    assert make_logits_processors(repetition_penalty=0.0, presence_penalty=None) == []


def test_processor_settings_out_of_range():
    for settings in (
        {"repetition_penalty": -1.0},
        {"presence_penalty": math.nan},
        {"frequency_penalty": 1.0, "frequency_context_size": 0},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {"a": 1.0}},
    ):
        with pytest.raises(ValueError, match=next(iter(settings)).split("_")[0]):
            make_logits_processors(**settings)
    (bias,) = make_logits_processors({10: 1.0})
    with pytest.raises(ValueError, match="token 10, but the last one is 9"):
        bias(mx.array([0]), mx.zeros((1, 10)))
