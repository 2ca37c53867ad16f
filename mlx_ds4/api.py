"""Where text and tensors meet: `load`, `stream_generate`, `generate`.

Names and fields follow mlx_lm, so that a program written for it needs a new import and little else. The
differences: `max_tokens=0` is legal (run the prompt, produce nothing), `stop` takes strings, and a
`PromptCache` may be given as `prompt_cache`.
"""

from __future__ import annotations

import functools
import operator
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import mlx.core as mx

from mlx_ds4 import chat
from mlx_ds4.generation import PromptCache, cache_of_mode, check_token_range, generate_step, token_limit, with_history
from mlx_ds4.loader import load_model
from mlx_ds4.model.model import Model
from mlx_ds4.sampling import LogitsProcessor
from mlx_ds4.speculative import DraftCounts, SpeculativeDrafter, speculative_step
from mlx_ds4.stop_strings import StopStrings
from mlx_ds4.tokenizer import Tokenizer


def load(
    path: str | os.PathLike | None = None,
    *,
    strict: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
    activation_rounding: bool | None = None,
) -> tuple[Model, Tokenizer]:
    """Loads a model: a ds4 GGUF file, a folder of the official release, or a converted folder.

    Without a path it loads the small model that the package ships. The other arguments, and two more for
    special cases, are those of `mlx_ds4.loader.load_model`. Returns (model, tokenizer); raises ValueError for
    what is not a complete DeepSeek V4.1 Flash or cannot be read.
    """
    return load_model(
        shipped_model() if path is None else path,
        strict=strict,
        progress=progress,
        activation_rounding=activation_rounding,
    )


def shipped_model() -> Path:
    """The model inside the package, a GGUF file with its drafter beside it; ValueError if the installation lacks it."""
    folder = Path(str(resources.files("mlx_ds4"))) / "data"
    found = sorted(path for path in folder.glob("*.gguf") if "dspark" not in path.name)
    if not found:
        raise ValueError(f"No model file lies in {folder}; name one, or reinstall the package.")
    return found[0]


@dataclass
class GenerationResponse:
    """One generated token, as `stream_generate` yields it.

    `text` is what this token adds (possibly nothing yet), `logprobs` float32 [V] the distribution before
    sampling filters. Rates are tokens per second: prompt tokens that were not cached over the time to the
    first token, and generated tokens after the first over the time since then (0 for one token).
    `peak_memory` is in GB (1e9 bytes). `finish_reason` is None except on the last response: "stop" (an
    end-of-text id or a stop string) or "length". With `max_tokens=0` there is a single response with `token`
    and `logprobs` None. `from_draft` tells tokens that the drafter had guessed, `drafts` counts its work so far.
    """

    text: str
    token: int | None
    logprobs: mx.array | None
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    cached_tokens: int = 0
    drafts: DraftCounts | None = None


def stream_generate(
    model,
    tokenizer,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    *,
    stop: str | Sequence[str] | None = None,
    prompt_cache=None,
    prefill_mode: str = "exact",
    logits_processors: list[LogitsProcessor] | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    draft_model: SpeculativeDrafter | None = None,
    **kwargs,
) -> Generator[GenerationResponse, None, None]:
    """Yields one `GenerationResponse` per generated token, the end-of-text token included.

    `prompt` is text or token ids. Text is encoded with special tokens recognised and one begin token in
    front, if it does not start with it; conversations come from `tokenizer.apply_chat_template`. Generation
    ends at an id of `tokenizer.eos_token_ids`, at `max_tokens` (-1: no limit but the model's longest
    context), or when the text contains one of the `stop` strings; neither that string nor a beginning of it
    is ever yielded.

    `prompt_cache` may be a `PromptCache`: then `prompt` is the whole context, the longest usable prefix is
    taken from the cache (`cached_tokens`), and the cache holds this exchange afterwards, also when the caller
    stops early. If the model fails, the cache is cleared; an interruption (KeyboardInterrupt, or a
    BaseException such as asyncio.CancelledError raised by the progress callback) keeps what was done. A plain
    `model.make_cache()` works as in mlx_lm: `prompt` continues what it holds. `prefill_mode` is explained at
    `generate_step`; a `PromptCache` of another mode starts afresh.

    `draft_model`, from `load_drafter`, makes generation speculative: the same tokens, sooner where its guesses are
    good. What the model reasons is decoded serially then. Remaining arguments are those of `generate_step`, with
    a drafter also those of `speculative_step` (`num_draft_tokens`).

    Raises ValueError at the call for what `generate_step` refuses and for empty stop strings.
    """
    ids = _prompt_ids(tokenizer, prompt)
    check_token_range(min(ids), max(ids), model.config.vocab_size)
    stops = StopStrings(stop)
    reused = prompt_cache if isinstance(prompt_cache, PromptCache) else None
    cached = 0
    if reused is not None:
        cached = reused.reuse(ids, prefill_mode)
        prompt_cache = reused.cache
        logits_processors = [with_history(ids[:cached], process) for process in logits_processors or []]
        prompt_progress_callback = _with_checkpoint(reused, ids, prompt_progress_callback)
    else:
        prompt_cache = cache_of_mode(model, prompt_cache, prefill_mode)
    limit = token_limit(model, prompt_cache, len(ids) - cached, max_tokens)
    drafts = None
    step: Callable = generate_step
    if draft_model is not None:
        drafts = kwargs["counts"] = DraftCounts()
        marks = [tokenizer.token_id(mark) for mark in (chat.THINK, chat.END_THINK)]
        step = functools.partial(speculative_step, drafter=draft_model, reasoning=None if None in marks else marks)
    steps = step(
        mx.array(ids[cached:]),
        model,
        max_tokens=limit,
        prompt_cache=prompt_cache,
        prefill_mode=prefill_mode,
        logits_processors=logits_processors,
        prompt_progress_callback=prompt_progress_callback,
        **kwargs,
    )
    return _stream(steps, tokenizer, ids, limit, stops, cached, reused, drafts)


def _stream(steps, tokenizer, ids, limit, stops, cached, reused, drafts):
    detokenizer = tokenizer.detokenizer
    end_ids = set(tokenizer.eos_token_ids)
    produced: list[int] = []
    start = time.perf_counter()
    prompt_time = first = 0.0

    def response(text: str, logprobs: mx.array | None, reason: str | None, drafted: bool) -> GenerationResponse:
        later = time.perf_counter() - first
        return GenerationResponse(
            text=text,
            token=produced[-1] if produced else None,
            logprobs=logprobs,
            from_draft=drafted,
            prompt_tokens=len(ids),
            prompt_tps=(len(ids) - cached) / max(prompt_time, 1e-9),
            generation_tokens=len(produced),
            generation_tps=(len(produced) - 1) / max(later, 1e-9) if len(produced) > 1 else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            cached_tokens=cached,
            drafts=drafts,
        )

    try:
        for token, logprobs, *drafted in steps:
            produced.append(token)
            if len(produced) == 1:
                first = time.perf_counter()
                prompt_time = first - start
            ended = token in end_ids
            if not ended:
                detokenizer.add_token(token)
            last = ended or len(produced) == limit
            if last:
                detokenizer.finalize()
            text, stopped = stops.feed(detokenizer.last_segment)
            if last and not stopped:
                text += stops.flush()
            reason = "stop" if ended or stopped else "length" if last else None
            yield response(text, logprobs, reason, any(drafted))
            if reason:
                break
        if not produced:
            prompt_time = time.perf_counter() - start
            yield response("", None, "length", False)
    except Exception:
        if reused is not None:
            reused.clear()
        raise
    finally:
        steps.close()  # what was drafted and not used leaves the cache
        if reused is not None:
            reused.record(ids + produced)


def generate(model, tokenizer, prompt, verbose: bool = False, **kwargs) -> str:
    """The whole text of `stream_generate`, whose arguments it takes; with `verbose` it also prints the text
    as it comes and then the rates."""
    text = ""
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print("\n" + "=" * 10)
        print(summary(response))
    return text


def summary(response: GenerationResponse) -> str:
    """The closing lines for a finished generation, worded as mlx_lm's, and the cached tokens and drafts."""
    drafts = "" if response.drafts is None else f"\nDrafts: {response.drafts}"
    return (
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB\n"
        f"Cached: {response.cached_tokens} tokens{drafts}"
    )


def _prompt_ids(tokenizer, prompt: str | Sequence[int] | mx.array) -> list[int]:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=True)
    else:
        values = prompt.tolist() if isinstance(prompt, mx.array) else prompt
        try:
            ids = [operator.index(token) for token in values]
        except TypeError:
            raise ValueError("The prompt is neither text nor a flat list of integer token ids.") from None
    if not ids:
        raise ValueError("The prompt is empty; give some text or at least one token id.")
    return ids


def _with_checkpoint(cache: PromptCache, ids: list[int], progress: Callable | None) -> Callable[[int, int], None]:
    def callback(done: int, total: int) -> None:
        if done == total:
            cache.checkpoint(ids)
        if progress is not None:
            progress(done, total)

    return callback
