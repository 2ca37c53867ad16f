"""When to draft, and how many drafts to verify: decided from what drafting has cost and brought in this request.

All costs are counted in serial steps, whose time is the median of the last ones. A **credit** holds the loss down:
it starts with one step, every serial token adds a fiftieth, every attempt adds the tokens it gave and takes away the
time it cost, and it never grows above a small limit. Below zero there is no drafting until serial tokens have filled
the gap. So a text on which drafting never pays takes at most 2 % longer than serial decoding, plus one step and one
attempt; and drafting returns by itself, one attempt at a time, as soon as the gap is filled.

The first pass of a number of rows may have compiled kernels, seconds that say nothing about the text or the next pass:
one that took more than a step a row is charged no more than that, and its time is forgotten once another is known.

Of a proposal as many drafts are verified as bring the most: with p_i the chance that draft i is accepted after
those before it, k drafts are worth 1 + p_1 + p_1 p_2 + .. tokens and cost one pass of k + 1 rows. The chances are the
confidence head's, with a shift per position that follows what was really accepted. A proposal that promises less
than a serial step is declined: then only the drafter's time is lost.

No clock and no randomness here: the same measurements give the same decisions.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

WARM_UP = 16  # serial tokens before the first proposal, to know their cost
REASONING_RUN = 16  # serial tokens between two looks at whether the reasoning has ended
_LONGEST_RUN = 64
_INTEREST = 0.02  # credit of a serial token, and so the largest lasting loss
_FIRST_CREDIT, _LIMIT = 1.0, 6.0
_MEDIAN_OF = 9
_PROBES = 2  # proposals verified whole before anything is known about their worth
_PROBE_EVERY = 6  # declined proposals in a row after which one is verified all the same, to learn
_RATE = 1.0  # of the shifts, in logits


class Admission:
    """Decides for one request; `block_size` is the number of drafts in a proposal.

    The caller asks `serial_run` how many tokens to decode serially (0: propose), shows each proposal to `admit`
    (0: decline it) and reports every measurement with the `record_` methods.
    """

    def __init__(self, block_size: int):
        self.credit = _FIRST_CREDIT
        self._serial: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._verify: dict[int, deque[float]] = {}  # seconds of passes by their rows
        self._first: dict[int, float] = {}
        self._shift = [0.0] * block_size
        self._seen = self._cycles = self._declined = 0
        self._confidence: Sequence[float] = ()
        self._draft = 0.0

    def serial_run(self, reasoning: bool) -> int:
        """How many tokens to decode serially now; 0 asks for a proposal."""
        if reasoning:
            return REASONING_RUN
        if self._seen < WARM_UP:
            return WARM_UP - self._seen
        if self.credit < 0:
            return min(_LONGEST_RUN, math.ceil(-self.credit / _INTEREST))
        return 0

    def admit(self, confidence: Sequence[float], seconds: float) -> int:
        """How many drafts of a proposal to verify, 0 to decline it.

        `confidence` holds the logits of the drafts' acceptance, `seconds` what the proposal took.
        """
        self._confidence, self._draft = confidence, seconds
        if self._cycles < _PROBES or self._declined >= _PROBE_EVERY:
            return len(confidence)
        best, best_gain, survival, tokens = 0, 0.0, 1.0, 1.0
        for k in range(1, len(confidence) + 1):
            survival *= self._chance(k - 1)
            tokens += survival
            gain = tokens - self._rows_cost(k + 1)
            if gain > best_gain:
                best, best_gain = k, gain
        if best == 0:
            self._declined += 1
            self._pay(seconds / self._step)
        return best

    def record_serial(self, seconds: float) -> None:
        """One token decoded serially."""
        self._seen += 1
        self._serial.append(seconds)
        self._earn(_INTEREST)

    def record_cycle(self, seconds: float, drafts: int, accepted: int) -> None:
        """A verification of `drafts` of the last proposal, of which `accepted` were right."""
        for i in range(min(drafts, accepted + 1)):
            self._shift[i] += _RATE * ((i < accepted) - self._chance(i))
        self._cycles += 1
        self._declined = 0
        rows, steps = drafts + 1, (seconds + self._draft) / self._step
        first = rows not in self._first
        self._first.setdefault(rows, seconds)
        if first and steps > rows:
            steps = rows
        else:
            self._verify.setdefault(rows, deque(maxlen=_MEDIAN_OF)).append(seconds)
        self._pay(steps)
        self._earn(accepted + 1)

    @property
    def _step(self) -> float:
        """Seconds of a serial step."""
        return max(statistics.median(self._serial), 1e-9)

    def _chance(self, i: int) -> float:
        logit = max(-60.0, min(60.0, self._confidence[i] + self._shift[i]))
        return 1 / (1 + math.exp(-logit))

    def _rows_cost(self, rows: int) -> float:
        """Serial steps that a pass of `rows` rows takes: measured, or on the line to the widest pass known."""
        if rows in self._verify:
            return statistics.median(self._verify[rows]) / self._step
        widest = max(self._verify or self._first)
        seconds = statistics.median(self._verify[widest]) if self._verify else self._first[widest]
        return 1 + (seconds / self._step - 1) * (rows - 1) / (widest - 1)

    def _pay(self, steps: float) -> None:
        self.credit -= steps

    def _earn(self, steps: float) -> None:
        self.credit = min(_LIMIT, self.credit + steps)
