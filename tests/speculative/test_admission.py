"""The admission controller on replayed costs and acceptance: never much worse than serial, good where drafts are."""

from __future__ import annotations

import statistics

import pytest

from mlx_ds4.admission import REASONING_RUN, WARM_UP, Admission
from tests.speculative.simulate import BLOCK, MACHINES, TEXTS, Trace, always, replay

SEEDS = range(5)


@pytest.mark.parametrize("honest", [True, False], ids=["honest", "blind"])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", TEXTS)
def test_never_much_worse_than_serial(text, machine, honest):
    """2 % and a few steps, also with noisy clocks and with confidences that say nothing."""
    for length in (128, 512, 2000):
        for seed in SEEDS:
            outcome = replay(Trace(text, length, seed, honest=honest), MACHINES[machine], noise=seed)
            steps_lost = (outcome.time - outcome.serial) / MACHINES[machine].rows[0]
            assert steps_lost < 0.022 * length + 8


def test_good_drafts_are_used():
    """Most of what drafting at every step would gain, and a gain where that would lose."""
    for text, machine, honest, floor in (
        ("code", "flat", True, 0.95),
        ("code", "shared", True, 0.95),
        ("chat", "flat", True, 0.95),
        ("code", "flat", False, 0.9),
        ("prose", "flat", True, 1.0),
    ):
        traces = [Trace(text, 2000, seed, honest=honest) for seed in SEEDS]
        ours = statistics.mean(replay(trace, MACHINES[machine], noise=1).speed for trace in traces)
        naive = statistics.mean(always(trace, MACHINES[machine]) for trace in traces)
        assert ours > floor * naive and ours > 1.1, (text, machine)
    chat = [Trace("chat", 2000, seed, honest=True) for seed in SEEDS]
    assert statistics.mean(always(trace, MACHINES["shared"]) for trace in chat) < 0.8
    assert statistics.mean(replay(trace, MACHINES["shared"], noise=1).speed for trace in chat) > 0.98


def test_it_backs_off_and_returns_by_itself():
    """Hopeless, then good, then hopeless: attempts become rare, then frequent, then rare."""
    parts = [Trace("hopeless", 1000, 1, honest=False), Trace("code", 1000, 2, honest=False)]
    whole = Trace("hopeless", 0, 0, honest=False)
    for part in (parts[0], parts[1], parts[0]):
        whole.right += part.right
        whole.confidence += part.confidence
    decisions = replay(whole, MACHINES["flat"]).decisions
    attempts = [
        sum(start <= at < start + 1000 for at, what, _ in decisions if what == "verify") for start in (0, 1000, 2000)
    ]
    assert attempts[1] > 3 * attempts[0] and attempts[1] > 3 * attempts[2]
    assert all(any(start <= at < start + 250 for at, *_ in decisions) for start in range(0, 3000, 250))


def test_the_same_measurements_give_the_same_decisions():
    trace = Trace("chat", 600, 3, honest=True)
    assert replay(trace, MACHINES["shared"], noise=7) == replay(trace, MACHINES["shared"], noise=7)
    assert replay(trace, MACHINES["shared"], noise=7) != replay(trace, MACHINES["shared"], noise=8)


def ready(step: float = 0.03) -> Admission:
    policy = Admission(BLOCK)
    assert policy.serial_run(False) == WARM_UP
    for _ in range(WARM_UP):
        policy.record_serial(step)
    return policy


def cycle(policy: Admission, confidence: float, seconds: float, accepted: int) -> int:
    drafts = policy.admit([confidence] * BLOCK, 0.01)
    if drafts:
        policy.record_cycle(seconds, drafts, min(accepted, drafts))
    return drafts


def test_steps_by_hand():
    policy = ready()
    assert policy.serial_run(False) == 0 and policy.serial_run(True) == REASONING_RUN
    assert policy.credit == pytest.approx(1 + WARM_UP * 0.02)
    assert cycle(policy, 0.0, 5.0, 5) == BLOCK  # the first pass compiles: at most a step a row is charged
    assert policy.credit == pytest.approx(1 + WARM_UP * 0.02)
    assert cycle(policy, -9.0, 0.09, 5) == BLOCK  # the second probe, whatever the confidence
    assert policy.credit == pytest.approx(1.32 + 6 - 10 / 3) and policy.serial_run(False) == 0
    before = policy.credit
    assert policy.admit([-9.0] * BLOCK, 0.015) == 0  # declined: half a step for the proposal
    assert policy.credit == pytest.approx(before - 0.5)


def test_losses_are_repaid_before_the_next_attempt():
    policy = ready()
    cycle(policy, 0.0, 0.09, 0)
    assert policy.credit == pytest.approx(1.32 + 1 - 10 / 3)
    run = policy.serial_run(False)
    assert run == 51  # 1.01 steps at a fiftieth a token
    for _ in range(run - 1):
        policy.record_serial(0.03)
    assert policy.serial_run(False) == 1
    policy.record_serial(0.03)
    assert policy.serial_run(False) == 0


def test_width_follows_confidence_and_cost():
    """Confident throughout: the whole block. Confident of two: no more than three rows, once their cost is known."""
    policy = ready()
    for _ in range(12):
        cycle(policy, 4.0, 0.09, 5)
    assert policy.admit([4.0] * BLOCK, 0.01) == BLOCK
    assert policy.admit([4.0, 4.0, -9.0, -9.0, -9.0], 0.01) == 2
    assert policy.admit([-9.0, 4.0, 4.0, 4.0, 4.0], 0.01) == 0


def test_useless_confidence_is_corrected():
    """Drafts that are always right under confidences that say never: after the probes they are verified again."""
    policy = ready()
    widths = [cycle(policy, -6.0, 0.05, 5) for _ in range(40)]
    assert widths[:2] == [BLOCK, BLOCK] and widths[2:8] == [0] * 6 and widths[-10:] == [BLOCK] * 10


def test_kernels_that_are_compiled_on_the_way():
    """The first pass of each number of rows takes seconds: good drafts are used at once all the same, and bad ones cost
    no more than a step a row each time."""
    for right, floor in ((5, 3.0), (0, 0.95)):
        policy, known, tokens, seconds = ready(), set(), 0, 0.0
        for turn in range(400):
            while run := policy.serial_run(False):
                for _ in range(run):
                    policy.record_serial(0.03)
                tokens, seconds = tokens + run, seconds + 0.03 * run
            confidence = [4.0 - (turn % 5 + 1 <= i) * 8 for i in range(BLOCK)]  # so that every length has its turn
            drafts = policy.admit(confidence, 0.005)
            seconds += 0.005
            if drafts:
                compiled = 0.0 if drafts in known else 2.0
                policy.record_cycle(0.045 + compiled, drafts, min(drafts, right))
                known.add(drafts)
                tokens, seconds = tokens + 1 + min(drafts, right), seconds + 0.045
        assert len(known) > 1 and tokens * 0.03 / seconds > floor
