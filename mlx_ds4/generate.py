"""`python -m mlx_ds4.generate`: a prompt in, text (or token ids, or JSON) out.

Flags are mlx_lm's where it has one, and ds4's spelling is accepted beside it. Exit codes: 0, 1 if generation
fails, 2 if the request cannot be started (flags, files, settings), 130 after Ctrl+C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from mlx_ds4 import chat
from mlx_ds4.api import GenerationResponse, load, shipped_model, stream_generate, summary
from mlx_ds4.cache import PREFILL_MODES
from mlx_ds4.command_line import Parser, UsageError
from mlx_ds4.custom_kernels._switches import backend
from mlx_ds4.drafter_files import find_drafter, load_drafter
from mlx_ds4.inspect_file import inspect_file
from mlx_ds4.sampling import make_sampler
from mlx_ds4.stop_strings import StopStrings

_MAX_PROMPT_BYTES = 64 << 20


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = Parser(prog="mlx_ds4.generate", description="Generate text with DeepSeek V4.1 Flash.", allow_abbrev=False)
    add = parser.add_argument
    add("--model", metavar="PATH", help="a ds4 GGUF file or a model folder (default: the small model in the package)")
    add("--inspect", metavar="PATH", help="print metadata and tensor table of a GGUF file or folder, and stop")

    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", "-p", default="hello", help="the message, as it is ('-' reads standard input)")
    source.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with the message")
    source.add_argument("--prompt-tokens", metavar="IDS", help="token ids, '1 2 3' or '1,2,3', or @FILE with them")
    add("--system-prompt", "--system", "-sys", metavar="TEXT", help="the system message")
    add("--ignore-chat-template", action="store_true", help="the prompt is raw text; special tokens may be spelled out")
    add("--think", action="store_true", help="let the model reason before it answers")
    add("--think-level", type=_integer(1, 100), metavar="N", help="reasoning effort 1 to 100 (75); implies --think")
    add("--nothink", action="store_true", help="answer at once (the default)")

    add("--max-tokens", "-m", "--tokens", "-n", type=_integer(-1), default=100, metavar="N",
        help="tokens to generate at most (100); 0 only runs the prompt, -1 is no limit")  # fmt: skip
    add("--temp", type=float, default=0.0, help="temperature; 0 takes the likeliest token (0)")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens with this share; 0 and 1 are off (1)")
    add("--min-p", type=float, default=0.0, help="keep tokens at least this likely, relative to the best; 0 is off (0)")
    add("--top-k", type=int, default=0, help="keep this many tokens; 0 is off (0)")
    add("--seed", type=int, help="makes sampled text repeatable")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--prefill-step-size", type=_integer(1), metavar="N",
        help="prompt tokens per pass (8192, or what memory allows)")  # fmt: skip
    add("--prefill-mode", choices=PREFILL_MODES, default="exact",
        help="replay runs the later layers over the prompt's end only: sooner, approximate (exact)")  # fmt: skip

    add("--dspark", action=argparse.BooleanOptionalAction,
        help="draft tokens with the DSpark drafter beside the model; the text stays the same (off)")  # fmt: skip
    add("--draft-model", metavar="FILE", help="a DSpark GGUF or an official folder with the drafter; implies --dspark")
    add("--num-draft-tokens", type=_integer(1), metavar="N", help="drafts to verify in a pass at most (all)")

    add("--output", choices=("text", "tokens", "json"), default="text", help="what to print (text)")
    add("--verbose", type=_boolean, default=True, metavar="BOOL", help="also print rates and settings (true)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        args = make_parser().parse_args(argv)
        if args.inspect is None:
            return _generate(args)
        for line in inspect_file(args.inspect):
            print(line)
        return 0
    except KeyboardInterrupt:
        return _complain("interrupted.", 130)
    except BrokenPipeError:
        # The reader is gone (`| head`); Python would complain once more while closing standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"{error.filename or 'input'} cannot be read: {error.strerror}.", 2)
    except (ValueError, RuntimeError) as error:
        return _complain(str(error), 2)


def _generate(args: argparse.Namespace) -> int:
    # What can be refused is refused before the model is loaded.
    sampler = make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k, seed=args.seed)
    StopStrings(args.stop)
    if args.nothink and (args.think or args.think_level):
        raise UsageError("--nothink contradicts --think and --think-level; choose one.")
    if args.dspark is False and args.draft_model:
        raise UsageError("--no-dspark contradicts --draft-model; choose one.")
    if args.num_draft_tokens and not (args.dspark or args.draft_model):
        raise UsageError("--num-draft-tokens needs --dspark or --draft-model.")
    drafting = {}
    prompt = _prompt(args)
    show = args.verbose or sys.stderr.isatty()
    with _bar("Loading", "B", show) as progress:
        model, tokenizer = load(args.model, progress=progress)
    if args.dspark or args.draft_model:
        file = args.draft_model or find_drafter(args.model or shipped_model())
        with _bar("Drafter", "B", show) as progress:
            drafting["draft_model"] = load_drafter(model, file, progress=progress)
        drafting["num_draft_tokens"] = args.num_draft_tokens
    ids = _encode(args, tokenizer, prompt)
    if show and backend() == "cuda":
        print("MLX compiles the kernels for this card first, which takes a minute or two.", file=sys.stderr)
    if args.verbose:
        settings = ", ".join(f"{name} {getattr(args, name)}" for name in ("temp", "top_p", "min_p", "top_k", "seed"))
        print(f"{args.model or 'The model of this package'}; {settings}", file=sys.stderr)
    with _bar("Prompt", "tok", show) as progress:
        responses = stream_generate(
            model,
            tokenizer,
            ids,
            args.max_tokens,
            stop=args.stop,
            sampler=sampler,
            prefill_step_size=args.prefill_step_size,
            prefill_mode=args.prefill_mode,
            prompt_progress_callback=progress,
            **drafting,
        )
        try:
            return _print_responses(args, responses, tokenizer.detokenizer)
        except (ValueError, RuntimeError) as error:
            return _complain(str(error), 1)


def _prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt's text, or ids for --prompt-tokens."""
    if args.prompt_tokens is not None:
        text = args.prompt_tokens
        text = _read_file(text[1:]) if text.startswith("@") else text
        words = re.split(r"[,\s]+", text.strip())
        wrong = [word for word in words if not re.fullmatch(r"[0-9]{1,10}", word)]
        if wrong:
            raise UsageError(f"--prompt-tokens holds {wrong[0]!r:.40}, which is no token id; separate ids by commas.")
        return [int(word) for word in words]
    if args.prompt_file is not None:
        return _read_file(args.prompt_file)
    return _text(sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1), "standard input") if args.prompt == "-" else args.prompt


def _read_file(path: str) -> str:
    with open(path, "rb") as file:
        return _text(file.read(_MAX_PROMPT_BYTES + 1), path)


def _text(data: bytes, source: str) -> str:
    if len(data) > _MAX_PROMPT_BYTES:
        raise UsageError(f"{source} has more than {_MAX_PROMPT_BYTES >> 20} MiB, too much for any prompt.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 at byte {error.start}; convert it first.") from None


def _encode(args: argparse.Namespace, tokenizer, prompt: str | list[int]) -> list[int]:
    marks = (chat.USER, chat.ASSISTANT, chat.END_THINK)
    if isinstance(prompt, str) and not args.ignore_chat_template and all(map(tokenizer.token_id, marks)):
        system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
        return tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": prompt}],
            thinking_mode="thinking" if args.think or args.think_level else "chat",
            reasoning_effort=args.think_level,
        )
    if args.system_prompt is not None or args.think or args.think_level:
        raise UsageError(
            "--system-prompt and --think need the chat form, but this prompt is raw (--prompt-tokens, "
            "--ignore-chat-template, or a model without chat tokens); leave them out."
        )
    return tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt


def _print_responses(args: argparse.Namespace, responses: Iterator[GenerationResponse], detokenizer) -> int:
    text, tokens, response = "", [], None

    def out(piece: str) -> None:
        print(piece, end="", flush=True)

    if args.verbose and args.output == "text":
        print("=" * 10)
    interrupted = False
    try:
        for response in responses:
            text += response.text
            if response.token is not None:
                tokens.append(response.token)
            if args.output == "text":
                out(response.text)
            elif args.output == "tokens" and response.token is not None:
                out(f" {response.token}" if len(tokens) > 1 else str(response.token))
    except KeyboardInterrupt:
        interrupted = True
        for token in tokens:
            detokenizer.add_token(token)
        rest = detokenizer.text[len(text) :]  # what waited for a stop string
        text += rest
        if args.output == "text":
            out(rest)
    if args.output == "json":
        out(_json(text, tokens, response, interrupted))
    print(flush=True)
    if interrupted:
        return _complain(f"interrupted after {len(tokens)} tokens.", 130)
    if args.verbose and args.output == "text":
        print("=" * 10 + "\n" + summary(response))
    elif args.verbose:
        print(summary(response), file=sys.stderr)
    return 0


def _json(text: str, tokens: list[int], response: GenerationResponse | None, interrupted: bool) -> str:
    names = ("prompt_tokens", "cached_tokens", "generation_tokens", "prompt_tps", "generation_tps", "peak_memory")
    numbers = {name: getattr(response, name) for name in names} if response is not None else {}
    reason = "interrupted" if interrupted else response.finish_reason
    return json.dumps({"text": text, "tokens": tokens, "finish_reason": reason, **numbers}, ensure_ascii=False)


@contextlib.contextmanager
def _bar(label: str, unit: str, show: bool) -> Iterator[Callable[..., None]]:
    """A progress callback (done, total, ...) that draws on standard error; the bar goes when it is full."""
    from tqdm import tqdm

    bar = tqdm(desc=label, unit=unit, unit_scale=True, leave=False, disable=not show, file=sys.stderr)

    def progress(done: int, total: int, *_: object) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    try:
        yield progress
    finally:
        bar.close()


def _complain(message: str, code: int) -> int:
    print(f"mlx_ds4.generate: {message}", file=sys.stderr)
    return code


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if low <= (value := int(text)) and (high is None or value <= high):
                return value
        limits = f"{low} to {high}" if high is not None else f"{low} or above"
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer, {limits}")

    return parse


def _boolean(text: str) -> bool:
    try:
        return {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected true or false") from None


if __name__ == "__main__":
    sys.exit(main())
