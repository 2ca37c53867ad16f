"""Prefill in chunks, decode one step ahead: token ids in, token ids out.

`generate_step` drives a model and its cache; `PromptCache` remembers which tokens a cache holds, so that the
next prompt starts from the longest prefix the two share. No text in this file: stop strings, end-of-text ids
and decoding belong to `api.py`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlx_ds4.machine import free_memory
from mlx_ds4.memory import chunk_size
from mlx_ds4.sampling import LogitsProcessor, check_logits


def generate_step(
    prompt: mx.array,
    model,
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prompt_cache=None,
    prefill_step_size: int | None = None,
    prefill_mode: str = "exact",
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Yields (token, logprobs float32 [V]) until `max_tokens` or the model's longest context is reached.

    prompt [n], integer ids, n >= 1, continues whatever `prompt_cache` (from `model.make_cache()`, updated in
    place) already holds; without one a fresh cache is used. `max_tokens` -1 means no limit of its own, 0 runs
    the prompt through the model and yields nothing. `sampler` takes log-probabilities [1, V] and returns one
    token (default: greedy, lowest index among equals); `logits_processors` take (tokens [k], logits [1, V]),
    where the tokens are the prompt given here and what followed. The callback gets (tokens done, tokens in
    all) before the first chunk and after each; at that moment the cache holds exactly the tokens done.

    The next step is started before a token is handed out, so the cache holds, whenever this generator is
    suspended or closed, the prompt and every token yielded. After the last of `max_tokens` tokens it lacks
    that one, which nobody had to feed.

    `prefill_step_size` counts the tokens of a chunk: by default 8,192, or what memory allows (`memory.chunk_size`);
    2,048 where the device does not tell its memory. `prefill_mode` "replay" runs the decoder layers of the model over
    the last `config.replay_rows` tokens of the prompt only, whatever the chunks: an approximation for prompts beyond
    that (`Model.__call__`). A cache of one mode serves no other.

    Ctrl+C acts between model calls: during the prefill the cache then
    holds the chunks done, during decoding the tokens yielded. `prompt_cache.offset` tells how many.

    Raises ValueError, at the call, for an empty or misshapen prompt, ids outside the vocabulary, a prompt
    beyond the longest context, settings outside their range, or a cache of another mode; and, while running,
    for logits that are no distribution, naming the position.
    """
    if prompt.ndim != 1 or prompt.size == 0 or not mx.issubdtype(prompt.dtype, mx.integer):
        raise ValueError(
            f"The prompt has shape {prompt.shape} and type {prompt.dtype}, but must be a non-empty vector of "
            "token ids; encode some text first."
        )
    if prefill_step_size is not None and (not isinstance(prefill_step_size, int) or prefill_step_size < 1):
        raise ValueError(f"prefill_step_size is {prefill_step_size!r}, but must be a positive integer.")
    check_token_range(prompt.min().item(), prompt.max().item(), model.config.vocab_size)
    cache = cache_of_mode(model, prompt_cache, prefill_mode)
    missing = cache.missing_rows(cache.offset, prompt.size)
    if missing:
        raise ValueError(
            "The cache ends inside a prompt of prefill_mode 'replay', whose last tokens the decoder layers lack; "
            f"go on with {missing} tokens more, or start a new cache."
        )
    limit = token_limit(model, cache, prompt.size, max_tokens)
    if prefill_step_size is None:
        prefill_step_size = chunk_size(model.config, prompt.size, cache.offset + prompt.size, free_memory())
    progress = prompt_progress_callback or (lambda done, total: None)
    sampled = sampler is None or hasattr(sampler, "lazy")  # nobody vouches for what another sampler returns
    sample = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
    sample = getattr(sample, "lazy", sample)  # the check that a Sampler would wait for is made here, a step later
    prompt = prompt.astype(mx.int32)
    return _steps(prompt, model, cache, limit, sample, sampled, logits_processors or [], prefill_step_size, progress)


def cache_of_mode(model, prompt_cache, prefill_mode: str):
    """The given cache, or a fresh one; ValueError for one that was made for another prefill mode."""
    if prompt_cache is None:
        return model.make_cache(prefill_mode)
    if prompt_cache.prefill_mode != prefill_mode:
        raise ValueError(
            f"The cache holds state of prefill_mode {prompt_cache.prefill_mode!r}, but {prefill_mode!r} is asked for, "
            "and the two do not mix; start a new cache."
        )
    return prompt_cache


def check_token_range(lowest: int, highest: int, vocab_size: int) -> None:
    """Raises ValueError unless both ids lie in [0, vocab_size)."""
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"The prompt holds the token id {lowest if lowest < 0 else highest}, but this model's ids are 0 "
            f"to {vocab_size - 1}; encode the text with the model's own tokenizer."
        )


def token_limit(model, cache, prompt_size: int, max_tokens: int) -> int:
    """How many tokens may follow a prompt: `max_tokens`, or less where the longest context ends first.

    Raises ValueError if `max_tokens` is below -1 or the prompt alone does not fit.
    """
    if not isinstance(max_tokens, int) or max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens!r}, but must be an integer, -1 (no limit) or above.")
    longest = model.config.max_position_embeddings
    room = longest - cache.offset - prompt_size
    if room < 0:
        raise ValueError(
            f"The context would hold {longest - room} tokens, but the model ends at {longest}; shorten the prompt."
        )
    # The last token is yielded without being fed, so one more than `room` can be had.
    return room + 1 if max_tokens == -1 else min(max_tokens, room + 1)


def _steps(prompt, model, cache, limit, sample, sampled, processors, step_size, progress):
    total, start = prompt.size, cache.offset
    tail = total - model.config.replay_rows if cache.prefill_mode == "replay" else 0
    history = prompt
    announce = getattr(model, "announce", None)
    done = 0
    progress(done, total)
    while done < total:
        chunk = prompt[done : done + step_size]
        # Chunks that lie in the tail, and those of exact mode, run through all layers whole.
        skipped = {"decoder_rows": max(0, done + chunk.size - tail)} if done < tail else {}
        if announce and done + chunk.size < total:  # the disk works on the next chunk while the device does on this one
            following = min(step_size, total - done - chunk.size)
            announce(np.array(prompt[: done + chunk.size + following]), following)
        with whole_call():
            logits = model(chunk[None], cache=cache, last_only=True, **skipped)
        done += chunk.size
        if done < total or limit == 0:
            mx.eval([layer.state for layer in cache])
            mx.clear_cache()
            progress(done, total)
    if limit == 0:
        return

    def choose(logits: mx.array) -> tuple[mx.array, ...]:
        logits = logits[:, -1, :].astype(mx.float32)  # [1, V]
        for process in processors:
            logits = process(history, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = (sample(logprobs).reshape(1), logprobs, mx.isnan(logprobs).any(), logits)
        # The state too: a part of it that no step happens to read would grow into a chain of pending work.
        mx.async_eval(chosen, [layer.state for layer in cache])
        return chosen

    fed_ahead = 0  # tokens in the cache that the caller has not seen
    try:
        token, logprobs, bad, logits = choose(logits)
        mx.eval(token)
        progress(total, total)
        for n in range(limit):
            if n + 1 < limit:
                if processors:
                    history = mx.concatenate([history, token.astype(history.dtype)])
                with whole_call():
                    next_logits = model(token[None], cache=cache, last_only=True, sampled=sampled)
                    fed_ahead = 1
                following = choose(next_logits)
            if bad.item():
                check_logits(logits, where=f"position {start + total + n - 1}")
            value = token.item()
            fed_ahead = 0
            yield value, logprobs[0]
            if n + 1 < limit:
                token, logprobs, bad, logits = following
            if n % 256 == 255:
                mx.clear_cache()
    except BaseException:
        if fed_ahead:
            cache.trim(fed_ahead)
        raise


def with_history(prefix: Sequence[int], process: LogitsProcessor) -> LogitsProcessor:
    """A processor that also sees the tokens before those of the call: a cache must not change its result."""
    before = mx.array(prefix, mx.int32)
    return lambda tokens, logits: process(mx.concatenate([before, tokens]), logits)


@contextlib.contextmanager
def whole_call() -> Iterator[None]:
    """Holds Ctrl+C back until the model call inside is complete.

    Half a call leaves the state of some layers a step ahead of the others, and no rewind can mend that. A
    second Ctrl+C does not wait; the cache is then unusable. Python runs signal handlers in the main thread
    only, so elsewhere there is nothing to hold back.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held = []

    def hold(number, frame):
        if held:
            handler(number, frame)
        held.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(held[0], None)


class PromptCache:
    """A model's cache that knows the ids of the tokens it holds, for prompts that share a beginning.

    `cache` is what `generate_step` takes: `reuse` prepares it for a prompt, `checkpoint` keeps its state at
    the end of the prompt, `record` notes what it holds afterwards. The checkpoint serves a repeated or
    shortened prompt, and a next turn that renders the last reply otherwise (without its reasoning, say). It
    costs the compressed rows a second time.
    """

    def __init__(self, model):
        self._model = model
        self.clear()

    def clear(self, prefill_mode: str = "exact") -> None:
        """Forgets everything: a fresh cache and no tokens."""
        self.cache = self._model.make_cache(prefill_mode)
        self.tokens: list[int] = []
        self._saved: tuple[list[int], object] | None = None

    def reuse(self, prompt: Sequence[int], prefill_mode: str = "exact") -> int:
        """Makes the cache hold the longest usable prefix of `prompt` and returns its length.

        That is what the prompt shares with the live state or with the checkpoint, if it can be rewound so
        far (`cache.rewindable`), and never the prompt's last token, whose logits are needed. If neither
        can, or they are of another prefill mode, the cache starts afresh and 0 is returned.
        """
        if self.cache.prefill_mode != prefill_mode:
            self.clear(prefill_mode)
        # Of two states that serve equally well, the one that can be rewound further afterwards.
        keep, _, saved = max((*_usable(tokens, cache, prompt), is_saved) for tokens, cache, is_saved in self._states())
        if keep == 0:
            self.clear(prefill_mode)
        elif saved:
            self.tokens, self.cache = list(self._saved[0]), self._saved[1].copy()
        self.cache.trim(len(self.tokens) - keep)
        del self.tokens[keep:]
        return keep

    def _states(self):
        yield self.tokens, self.cache, False
        if self._saved:
            yield *self._saved, True

    def checkpoint(self, tokens: Sequence[int]) -> None:
        """Keeps the present state, which holds the first `cache.offset` of `tokens`, beside the live one."""
        self._saved = (list(tokens[: self.cache.offset]), self.cache.copy())

    def record(self, tokens: Sequence[int]) -> None:
        """Notes that the cache holds the first `cache.offset` of `tokens`; if it holds more, clears it."""
        if self.cache.offset > len(tokens):
            self.clear()
        else:
            self.tokens = list(tokens[: self.cache.offset])


def _usable(held: Sequence[int], cache, prompt: Sequence[int]) -> tuple[int, int]:
    """How many tokens of the prompt a state can serve, and how much further it could be rewound then."""
    common = 0
    longest = min(len(held), len(prompt) - 1)
    while common < longest and held[common] == prompt[common]:
        common += 1
    spare = cache.rewindable - (len(held) - common)
    usable = spare >= 0 and not cache.missing_rows(common, len(prompt) - common)
    return (common, spare) if usable else (0, 0)
