"""From logits to a token: filters, temperature, seeded draws.

Everything here is a pure function of the logits, except that a `Sampler` carries its own random key: no
draw reads or writes MLX's global random state, so two requests never disturb each other. Names and the
meaning of 0 ("off") are mlx_lm's. The order is fixed, and also mlx_lm's:

    top-p, then min-p, then top-k, all on the distribution at temperature 1, then the temperature.

Ties follow the rule of the whole project, higher score first and then the lower index: greedy picks the
lowest index among equals, and top-p and top-k keep exactly as many tokens as they name.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

import mlx.core as mx

_NEG_INF = -math.inf
# Temperatures are clamped to what float32 can divide by; beyond it only the limits (argmax, uniform) remain.
_TEMP_RANGE = (1e-30, 1e30)


def filtered_probs(
    logits: mx.array,
    *,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
) -> mx.array:
    """The distribution that `make_sampler` with the same settings draws from.

    logits [..., V], any float dtype, raw or normalised (a constant per row changes nothing) -> float32
    [..., V], each row summing to 1. With `temp` 0 it is 1 at the greedy token and 0 elsewhere. -inf logits
    have probability 0. A row without any token (all -inf), with +inf or with NaN gives NaN, without raising:
    see `check_logits`. Settings outside their range raise ValueError.
    """
    settings = _checked(temp, top_p, min_p, min_tokens_to_keep, top_k)
    if settings[0] == 0:
        token = mx.argmax(logits, axis=-1, keepdims=True)
        one_hot = (mx.arange(logits.shape[-1]) == token).astype(mx.float32)
        return mx.where(mx.isnan(_from_top(logits)).any(axis=-1, keepdims=True), math.nan, one_hot)
    return mx.softmax(_log_weights(logits, *settings), axis=-1)


class Sampler:
    """Draws one token per row; made by `make_sampler`.

    Calling it takes logits or log-probabilities [B, V] and returns tokens [B] (uint32); it waits for the
    logits and raises ValueError, naming the row, if they are not a distribution. `lazy` is the same draw
    without that wait, for a loop that runs one step ahead and checks afterwards (`generate_step`).
    """

    def __init__(
        self,
        temp: float,
        top_p: float,
        min_p: float,
        min_tokens_to_keep: int,
        top_k: int,
        seed: int | None,
    ):
        self._settings = _checked(temp, top_p, min_p, min_tokens_to_keep, top_k)
        if seed is None:
            seed = secrets.randbits(64)
        elif not _is_int(seed) or not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed!r}, but must be an integer in [0, 2**64); choose another.")
        self._key = mx.random.key(seed)

    @property
    def greedy(self) -> bool:
        """Whether it takes the best token, so that draws do not depend on one another."""
        return self._settings[0] == 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        check_logits(logprobs)
        return self.lazy(logprobs)

    def lazy(self, logprobs: mx.array) -> mx.array:
        """Draws without looking at the values; for a row that is no distribution the token is arbitrary but
        inside the vocabulary."""
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        weights = _log_weights(logprobs, *self._settings)
        self._key, key = mx.random.split(self._key)
        noise = mx.random.gumbel(weights.shape, key=key)
        # A Gumbel draw may be -inf; a token that passed the filters must still beat one that did not.
        score = mx.where(weights == _NEG_INF, _NEG_INF, mx.maximum(weights + noise, -3e38))
        return mx.argmax(score, axis=-1)


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    seed: int | None = None,
) -> Sampler:
    """A sampler for `generate_step`: log-probabilities [B, V] -> tokens [B].

    `temp` 0 is greedy (lowest index among equals). `top_p` keeps the smallest set of best tokens that holds
    that share of the probability (0 and 1: off). `min_p` keeps tokens at least that likely relative to the
    best one (0: off; 1: only those as likely as the best), never fewer than `min_tokens_to_keep`. `top_k`
    keeps that many (0, or the vocabulary's size and more: off). At least one token always stays. The same
    `seed` gives the same draws; without one they start from the operating system's entropy.

    Raises ValueError for a setting outside its range.
    """
    return Sampler(temp, top_p, min_p, min_tokens_to_keep, top_k, seed)


def check_logits(logits: mx.array, *, where: str = "") -> None:
    """Raises ValueError if a row of logits [..., V] is no distribution: NaN, +inf, or -inf throughout.

    The message names `where` (for example the position in the sequence), or the row. Evaluates the logits.
    """
    bad = mx.isnan(_from_top(logits)).any(axis=-1).reshape(-1)
    if not mx.any(bad).item():
        return
    row = mx.argmax(bad).item()
    values = logits.reshape(-1, logits.shape[-1])[row]
    n_nan = mx.isnan(values).sum().item()
    n_inf = (values == math.inf).sum().item()
    found = f"{n_nan} NaN" if n_nan else f"{n_inf} +inf" if n_inf else "only -inf"
    raise ValueError(
        f"The logits at {where or f'row {row}'} hold {found} among {values.size} values, so no token can be "
        "chosen; check the weights and any logits processor or module you changed."
    )


LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def make_logits_processors(
    logit_bias: dict[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[LogitsProcessor]:
    """Functions (tokens [n], logits [B, V]) -> logits [B, V] for `generate_step`, applied in this order.

    `logit_bias` adds to the logits of the given token ids (-inf bans one). The penalties look at the last
    `..._context_size` tokens, prompt included: `repetition_penalty` divides positive and multiplies negative
    logits of tokens seen there, `presence_penalty` subtracts once, `frequency_penalty` subtracts once per
    occurrence. None and 0 are off. Raises ValueError for a setting outside its range.
    """
    processors: list[LogitsProcessor] = []
    if logit_bias:
        processors.append(_make_bias(logit_bias))

    def add(name: str, penalty: float | None, context: int, apply: Callable) -> None:
        if not _is_int(context) or context < 1:
            raise ValueError(f"{name}_context_size is {context!r}, but must be a positive integer.")
        if penalty is None or penalty == 0:
            return
        if not math.isfinite(penalty) or (name == "repetition" and penalty < 0):
            raise ValueError(f"{name}_penalty is {penalty!r}, but must be finite (repetition: positive).")

        def processor(tokens: mx.array, logits: mx.array) -> mx.array:
            if tokens.size == 0:
                return logits
            counts = mx.zeros(logits.shape[-1]).at[tokens[-context:]].add(1.0)
            return apply(logits, counts, penalty)

        processors.append(processor)

    add("repetition", repetition_penalty, repetition_context_size, _penalize_repetition)
    add("presence", presence_penalty, presence_context_size, lambda x, seen, p: x - p * (seen > 0))
    add("frequency", frequency_penalty, frequency_context_size, lambda x, seen, p: x - p * seen)
    return processors


def _penalize_repetition(logits: mx.array, counts: mx.array, penalty: float) -> mx.array:
    return mx.where(counts > 0, mx.where(logits < 0, logits * penalty, logits / penalty), logits)


def _make_bias(logit_bias: dict[int, float]) -> LogitsProcessor:
    if any(not _is_int(token) or token < 0 for token in logit_bias):
        raise ValueError(f"logit_bias has the keys {list(logit_bias)!r:.80}, but they must be token ids.")
    if any(math.isnan(value) or value == math.inf for value in logit_bias.values()):
        raise ValueError("logit_bias holds NaN or +inf, but values must be finite, or -inf to ban a token.")
    tokens, values = mx.array(list(logit_bias)), mx.array([float(v) for v in logit_bias.values()])
    highest = max(logit_bias)

    def bias(_: mx.array, logits: mx.array) -> mx.array:
        if highest >= logits.shape[-1]:
            raise ValueError(
                f"logit_bias names token {highest}, but the last one is {logits.shape[-1] - 1}; remove it."
            )
        return logits.at[:, tokens].add(values)

    return bias


def _log_weights(
    logits: mx.array, temp: float, top_p: float, min_p: float, min_tokens_to_keep: int, top_k: int
) -> mx.array:
    """Filtered logits over the temperature, float32 [..., V]: 0 for the best token, -inf for removed ones."""
    x = _from_top(logits)
    vocab = x.shape[-1]
    if 0 < top_p < 1:
        best_first = -mx.sort(-x, axis=-1)
        probs = mx.exp(best_first)
        mass_above = mx.cumsum(probs, axis=-1, inclusive=False)
        total = probs.sum(axis=-1, keepdims=True)
        keep = mx.maximum((mass_above < top_p * total).sum(axis=-1, keepdims=True), 1)
        x = _keep_best(x, mx.take_along_axis(best_first, keep - 1, axis=-1), keep)
    if min_p > 0:
        likely = x >= math.log(min_p)
        if min_tokens_to_keep > 1:
            likely = likely | (_top_k(x, min(min_tokens_to_keep, vocab)) > _NEG_INF)
        x = mx.where(likely, x, _NEG_INF)
    if 0 < top_k < vocab:
        x = _top_k(x, top_k)
    low, high = _TEMP_RANGE
    return x / min(max(temp, low), high)


def _from_top(logits: mx.array) -> mx.array:
    """Logits minus the row's maximum, float32; NaN somewhere in the row if it is no distribution."""
    x = logits.astype(mx.float32)
    return x - x.max(axis=-1, keepdims=True)


def _top_k(x: mx.array, k: int) -> mx.array:
    return _keep_best(x, -mx.partition(-x, k - 1, axis=-1)[..., k - 1 : k], k)


def _keep_best(x: mx.array, smallest: mx.array, count: mx.array | int) -> mx.array:
    """Keeps `count` tokens per row and sets the rest to -inf; `smallest` [..., 1] is the last kept value.

    Of several tokens with that value the lower indices stay: a sort by value alone would not say which.
    """
    above, level = x > smallest, x == smallest
    room = count - above.sum(axis=-1, keepdims=True)
    return mx.where(above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= room)), x, _NEG_INF)


def _checked(temp: float, top_p: float, min_p: float, min_tokens_to_keep: int, top_k: int) -> tuple:
    if not math.isfinite(temp) or temp < 0:
        raise ValueError(f"temp is {temp!r}, but must be a finite number, 0 (greedy) or above.")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value!r}, but must lie in [0, 1]; 0 turns it off.")
    if not _is_int(min_tokens_to_keep) or min_tokens_to_keep < 1:
        raise ValueError(f"min_tokens_to_keep is {min_tokens_to_keep!r}, but must be a positive integer.")
    if not _is_int(top_k) or top_k < 0:
        raise ValueError(f"top_k is {top_k!r}, but must be an integer, 0 (off) or above.")
    return temp, top_p, min_p, min_tokens_to_keep, top_k


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
