"""Speculative decoding: the drafter guesses, one pass of the model judges the guesses, the rest is taken back.

Every token is drawn by the request's own sampler from the model's own logits, in the order of serial decoding; a draft
counts where it equals the token drawn there. So the text is that of decoding without a drafter, greedy or sampled
with the same seed, whatever the drafter says: a draft only lets one pass serve several tokens. For a fixed draft d
this is speculative sampling by the book: d is taken with its probability P(d) after all filters, and otherwise
the draw that was made, which is distributed as P without d, is the next token; it is never drawn again.
A `Sampler` also lends the drafter its coming noise, so that the draft guesses the very draw.

The cache is rewound exactly (`Cache.trim`), the drafter's rings take only positions that stay.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_ds4.admission import Admission
from mlx_ds4.generation import cache_of_mode, generate_step, token_limit, whole_call, with_history
from mlx_ds4.model.dspark import Proposal
from mlx_ds4.sampling import LogitsProcessor, Sampler, check_logits


class SpeculativeDrafter(Protocol):
    """What this file needs of a drafter; `model.dspark.Drafter` is one."""

    block_size: int
    failure: str | None

    def observe(self, cache, taps: Sequence[mx.array]) -> None: ...

    def propose(self, model, cache, anchor: int, sample: Callable | None) -> Proposal: ...


@dataclass
class DraftCounts:
    """What drafting did in one request: proposals made and declined, drafts verified and accepted by position.

    A verification that the end of the text cuts short is not counted: nobody knows how it would have gone on.
    """

    proposals: int = 0
    declined: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, verified: int, accepted: int) -> None:
        """Counts one verification."""
        for counts, number in ((self.verified, verified), (self.accepted, accepted)):
            counts += [0] * (verified - len(counts))
            for i in range(number):
                counts[i] += 1

    def __str__(self) -> str:
        cycles = self.verified[0] if self.verified else 0
        places = " ".join(f"{a}/{v}" for a, v in zip(self.accepted, self.verified, strict=True))
        mean = sum(self.accepted) / cycles if cycles else 0.0
        return f"{self.proposals} proposals, {self.declined} declined, {mean:.2f} drafts accepted per verification" + (
            f" (by position {places})" if places else ""
        )


def speculative_step(
    prompt: mx.array,
    model,
    drafter: SpeculativeDrafter,
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prompt_cache=None,
    prefill_mode: str = "exact",
    num_draft_tokens: int | None = None,
    admission: Admission | None = None,
    reasoning: tuple[int, int] | None = None,
    counts: DraftCounts | None = None,
    **kwargs,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Yields (token, logprobs float32 [V], whether it was drafted), the tokens of `generate_step` with these arguments.

    At most `num_draft_tokens` of a proposal are verified (default: all of its block). `admission` decides when to draft
    (default: a fresh `Admission`), `counts` is updated as generation goes on. `reasoning` holds the ids that open and
    close the model's reasoning, which is decoded serially. Other arguments, and the errors, are `generate_step`'s.

    While the generator is suspended the cache may be up to a block ahead of what was yielded. Closing it takes
    that back: then the cache holds the prompt and the tokens yielded, except the last one where nothing had fed it.

    A drafter that raises or gives numbers that are not finite is left alone from then on (`drafter.failure`), with
    one warning, and generation continues serially.
    """
    if num_draft_tokens is not None and (not isinstance(num_draft_tokens, int) or num_draft_tokens < 1):
        raise ValueError(f"num_draft_tokens is {num_draft_tokens!r}, but must be a positive integer.")
    cache = cache_of_mode(model, prompt_cache, prefill_mode)
    limit = token_limit(model, cache, prompt.size, max_tokens)
    run = _Run(model, drafter, cache, sampler, logits_processors or [])
    first = run.serial(prompt, min(limit, 1), logits_processors, **kwargs)
    width = min(num_draft_tokens or drafter.block_size, drafter.block_size)
    admission = admission or Admission(drafter.block_size)
    return _tokens(run, first, prompt, limit, width, admission, reasoning, counts or DraftCounts())


def _tokens(run, first, prompt, limit, width, admission, reasoning, counts):
    said = prompt.tolist()
    done = 0

    def note(token: int) -> None:
        nonlocal done, thinking
        done += 1
        said.append(token)
        if reasoning and token in reasoning:
            thinking = token == reasoning[0]

    marks = [token for token in said if reasoning and token in reasoning]
    thinking = bool(marks) and marks[-1] == reasoning[0]
    for token, logprobs in first:
        note(token)
        yield token, logprobs, False
    while done < limit:
        room = limit - done - 1  # drafts that could still be of use
        serial = admission.serial_run(thinking) if room and run.drafter.failure is None else room + 1
        if not serial:
            start = time.perf_counter()
            proposal = run.propose(said[-1])
            if proposal is None:
                continue
            drafts = proposal.tokens[: min(width, room)]
            admitted = admission.admit(proposal.confidence[: len(drafts)], time.perf_counter() - start)
            counts.proposals += 1
            counts.declined += not admitted
            serial = 0 if admitted else 1
        if serial:
            start = time.perf_counter()
            history = [with_history(said[:-1], process) for process in run.processors]
            for token, logprobs in run.serial(mx.array(said[-1:]), min(serial, room + 1), history):
                admission.record_serial(time.perf_counter() - start)
                note(token)
                yield token, logprobs, False
                start = time.perf_counter()
            continue
        drafts = drafts[:admitted]
        accepted, seconds = 0, 0.0
        start = time.perf_counter()
        with contextlib.closing(run.verify(said, drafts)) as tokens:
            for token, logprobs, drafted in tokens:
                seconds += time.perf_counter() - start
                accepted += drafted
                note(token)
                yield token, logprobs, drafted
                start = time.perf_counter()
        admission.record_cycle(seconds + time.perf_counter() - start, len(drafts), accepted)
        counts.add(len(drafts), accepted)


class _Run:
    """One request's model, drafter, cache and sampler."""

    def __init__(self, model, drafter, cache, sampler, processors):
        self.config = model.config
        self.model, self.drafter, self.cache = model, drafter, cache
        self.sampler, self.processors = sampler, processors
        self.greedy = not processors and (sampler is None or getattr(sampler, "greedy", False))

    def __call__(self, tokens: mx.array, cache, last_only: bool = False, **options: int | bool) -> mx.array:
        """The model as `generate_step` drives it, with the taps of every pass that has some handed on."""
        logits, taps = self.model.forward(tokens, cache, last_only=last_only, **options)
        if logits.shape[1]:
            self._guarded(self.drafter.observe, cache, taps)
        return logits

    def announce(self, ids: np.ndarray, count: int) -> None:
        """`Model.announce`."""
        if announce := getattr(self.model, "announce", None):
            announce(ids, count)

    def serial(self, tokens, count, processors, **kwargs):
        return generate_step(
            tokens, self, max_tokens=count, sampler=self.sampler, logits_processors=processors,
            prompt_cache=self.cache, prefill_mode=self.cache.prefill_mode, **kwargs,
        )  # fmt: skip

    def propose(self, anchor: int) -> Proposal | None:
        """The next drafts, or None if the drafter has failed."""
        twin = copy.copy(self.sampler).lazy if isinstance(self.sampler, Sampler) else None
        return self._guarded(self.drafter.propose, self.model, self.cache, anchor, twin)

    def verify(self, said: list[int], drafts: list[int]) -> Generator[tuple[int, mx.array, bool], None, None]:
        """Feeds the last token and the drafts, yields the tokens that follow, and takes back what was not used.

        `said` grows while this runs: the caller adds what is yielded.
        """
        start, kept, taps = self.cache.offset, 1, []
        try:
            with whole_call():
                logits, taps = self.model.forward(np.array([[said[-1], *drafts]]), self.cache)
            mx.async_eval(logits, [layer.state for layer in self.cache])
            # Greedy tokens do not depend on those before them: the host waits for the device once, not for each.
            greedy = _greedy(logits[0], start) if self.greedy else None
            for row, draft in enumerate([*drafts, None]):
                token, logprobs = next(greedy) if greedy else self._draw(said, logits[:, row], start + row)
                kept += token == draft
                yield token, logprobs, token == draft
                if token != draft:
                    break
        finally:
            if self.cache.offset > start:  # else the model itself has failed
                self.cache.trim(self.cache.offset - start - kept)
                self._guarded(self.drafter.observe, self.cache, [tap[:, :kept] for tap in taps])

    def _draw(self, said: list[int], logits: mx.array, position: int) -> tuple[int, mx.array]:
        logits = logits.astype(mx.float32)
        for process in self.processors:
            logits = process(mx.array(said), logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sample = self.sampler or (lambda x: mx.argmax(x, axis=-1))
        token = getattr(sample, "lazy", sample)(logprobs).reshape(1)
        bad = mx.isnan(logprobs).any()
        mx.eval(token, logprobs, bad)
        if bad.item():
            check_logits(logits, where=f"position {position}")
        return token.item(), logprobs[0]

    def _guarded(self, action: Callable, *arguments):
        if self.drafter.failure is None:
            try:
                return action(*arguments)
            except Exception as error:
                self.drafter.failure = f"{type(error).__name__}: {error}"
                warnings.warn(
                    f"The drafter failed ({self.drafter.failure}), so generation goes on without it; "
                    "load it again to try once more.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return None


def _greedy(logits: mx.array, start: int) -> Iterator[tuple[int, mx.array]]:
    """Greedy tokens and logprobs of logits [L, V], whose first row follows the text at position `start`."""
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    # In pairs, which the host reads where they lie; more than eight bytes MLX moves first on CUDA.
    pairs = [mx.argmax(logprobs[row : row + 2], axis=-1) for row in range(0, len(logits), 2)]
    bad = mx.isnan(logprobs).any()
    mx.eval(pairs, logprobs, bad)
    for row, token in enumerate(token for pair in pairs for token in pair.tolist()):
        if bad.item():
            check_logits(logits[row : row + 1], where=f"position {start + row}")
        yield token, logprobs[row]
