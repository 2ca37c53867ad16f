"""A bench for the admission controller: replays cost models and acceptance traces, no model and no clock.

The traces are synthetic, drawn from seeds: acceptance by position as published for code, chat and prose, in
stretches (a copied passage, a new thought) because text is not uniform. The costs are milliseconds of a serial step,
a proposal and passes of 2 to 6 rows, as published for three machines (architecture notes 11.9) and one bad case.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from mlx_ds4.admission import Admission

BLOCK = 5
# Chance of each position, given the ones before it, in easy and in hard stretches; and the share of easy ones.
TEXTS = {
    "code": ((0.97, 0.96, 0.95, 0.94, 0.93), (0.70, 0.65, 0.60, 0.55, 0.50), 0.8),
    "chat": ((0.90, 0.87, 0.84, 0.80, 0.78), (0.55, 0.45, 0.40, 0.35, 0.30), 0.5),
    "prose": ((0.77, 0.75, 0.71, 0.66, 0.65), (0.45, 0.35, 0.30, 0.30, 0.30), 0.3),
    "hopeless": ((0.05, 0.05, 0.05, 0.05, 0.05), (0.0, 0.0, 0.0, 0.0, 0.0), 0.5),
}


@dataclass(frozen=True)
class Machine:
    """Costs in milliseconds; `rows[r]` is a pass of r rows, r = 1 a serial step."""

    draft: float
    rows: tuple[float, ...]


MACHINES = {
    "shared": Machine(11.0, (31.8, 48.0, 64.0, 80.0, 96.0, 112.0)),
    "flat": Machine(10.7, (105.0, 114.0, 122.0, 130.0, 138.0, 146.0)),
    "unshared": Machine(11.0, (31.8, 61.0, 90.0, 119.0, 148.0, 177.0)),
    "linear": Machine(8.0, (20.0, 40.0, 60.0, 80.0, 100.0, 120.0)),
}


class Trace:
    """For each position of a text the number of right drafts a proposal there has, and its confidences."""

    def __init__(self, text: str, length: int, seed: int, *, honest: bool):
        rng = random.Random(seed)
        easy, hard, share = TEXTS[text]
        self.right: list[int] = []
        self.confidence: list[list[float]] = []
        chances = easy
        for position in range(length):
            if position % 24 == 0:
                chances = easy if rng.random() < share else hard
            run = 0
            while run < BLOCK and rng.random() < chances[run]:
                run += 1
            self.right.append(run)
            logits = [math.log((p + 1e-3) / (1 - p + 1e-3)) + rng.gauss(0, 0.7) for p in chances]
            self.confidence.append(logits if honest else [rng.gauss(-3, 2) for _ in chances])


@dataclass
class Outcome:
    """Times in milliseconds, and what was done: (position, what, how many drafts)."""

    time: float
    serial: float
    decisions: list[tuple[int, str, int]]

    @property
    def speed(self) -> float:
        return self.serial / self.time


def replay(trace: Trace, machine: Machine, *, noise: int | None = None) -> Outcome:
    """Decodes the whole trace under the controller; with `noise` every measurement varies by up to a tenth."""
    rng = random.Random(noise)
    policy, at, total, decisions = Admission(BLOCK), 0, 0.0, []
    length = len(trace.right)

    def cost(ms: float) -> float:
        nonlocal total
        ms *= rng.uniform(0.9, 1.1) if noise is not None else 1.0
        total += ms
        return ms / 1000

    while at < length:
        run = policy.serial_run(False)
        if not run:
            admitted = policy.admit(trace.confidence[at], cost(machine.draft))
            decisions.append((at, "verify" if admitted else "decline", admitted))
            if admitted:
                accepted = min(trace.right[at], admitted)
                policy.record_cycle(cost(machine.rows[admitted]), admitted, accepted)
                at += accepted + 1
                continue
            run = 1
        for _ in range(min(run, length - at)):
            policy.record_serial(cost(machine.rows[0]))
            at += 1
    return Outcome(total, at * machine.rows[0], decisions)


def always(trace: Trace, machine: Machine) -> float:
    """Speed over serial of drafting at every step, for comparison."""
    at, total = 0, 0.0
    while at < len(trace.right):
        total += machine.draft + machine.rows[BLOCK]
        at += trace.right[at] + 1
    return at * machine.rows[0] / total
