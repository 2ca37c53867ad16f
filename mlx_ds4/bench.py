"""`python -m mlx_ds4.bench`: the speed of prefill and decode at growing context lengths.

    python -m mlx_ds4.bench --model DeepSeek-V4.1-Flash-Q2.gguf --frontiers 2048,8192,32768 --output m3-q2
    python -m mlx_ds4.bench --synthetic full --layers 8 --rows 1,6

Frontiers are cumulative: the prompt grows from one to the next, and decoding is measured on a copy of the cache there.
One JSON line a figure on standard output; `--output NAME` also writes NAME.csv, NAME.json and NAME.svg. Prompts are
random ids. Exit codes: 0, 1 if measuring fails, 2 if it cannot be started, 130 after Ctrl+C, which keeps what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlx_ds4.api import load, shipped_model
from mlx_ds4.bench_report import write_report
from mlx_ds4.bench_timing import decode_seconds, host_seconds, prefill_seconds, random_tokens, warm
from mlx_ds4.cache import PREFILL_MODES, REWIND
from mlx_ds4.command_line import Parser, UsageError
from mlx_ds4.convert.source_files import model_fingerprint
from mlx_ds4.loader import describe
from mlx_ds4.machine import free_memory, machine
from mlx_ds4.memory import chunk_size
from mlx_ds4.random_model import cut_config, fill_cache, random_model

_RESERVE = 256  # positions that decoding takes behind the last frontier, at most


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = Parser(prog="mlx_ds4.bench", description="Measure prefill and decode speed.", allow_abbrev=False)
    add = parser.add_argument
    add("--model", metavar="PATH", help="a ds4 GGUF file or a model folder (default: the small model in the package)")
    add("--synthetic", choices=("full", "tiny"), help="random weights in the release's sizes, or small ones")
    add("--layers", type=int, metavar="N", help="layers of a synthetic model (all)")
    add("--share", type=int, metavar="N", help="layers from N on use the weights of earlier ones again")
    add("--recipe", choices=("q2", "q4", "mxfp4"), default="q2", help="formats of a synthetic model (q2)")
    add("--engram", action="store_true", help="give a synthetic model its Engram layers, with tables in memory")
    add("--frontiers", type=_numbers, default=[2048, 8192, 32768], metavar="N,N,..",
        help="context lengths to measure at (2048,8192,32768)")  # fmt: skip
    add("--rows", type=_numbers, default=[1], metavar="N,N,..", help=f"rows of a decode step, 1 to {REWIND} (1)")
    add("--steps", type=int, default=16, metavar="N", help="decode steps that are timed (16)")
    add("--prefill-step-size", type=int, metavar="N", help="prompt tokens per pass (8192, or what memory allows)")
    add("--prefill-mode", choices=PREFILL_MODES, default="exact",
        help="replay runs the later layers over the prompt's end only, that of every frontier (exact)")  # fmt: skip
    add("--fill", choices=("prefill", "random"), default="prefill",
        help="fill the cache with the prompt, or with random state: decode figures only (prefill)")  # fmt: skip
    add("--commit", metavar="ID", help="the commit to write into the lines, where git is not at hand")
    add("--output", metavar="NAME", help="write NAME.csv, NAME.json and NAME.svg")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        args = make_parser().parse_args(argv)
        _check(args)
        model, about = _open(args)
    except KeyboardInterrupt:
        return _complain("interrupted.", 130)
    except OSError as error:
        return _complain(f"{error.filename or 'input'} cannot be read: {error.strerror}.", 2)
    except (ValueError, RuntimeError) as error:
        return _complain(str(error), 2)
    records: list[dict[str, Any]] = []
    code = 0
    try:
        for record in measure(model, args):
            records.append(record)
            tqdm.write(json.dumps(record | about), file=sys.stdout)
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = _complain(f"interrupted after {len(records)} figures.", 130)
    except (ValueError, RuntimeError, MemoryError) as error:
        code = _complain(f"{error} (after {len(records)} figures)", 1)
    if args.output and records:
        try:
            for path in write_report(Path(args.output), about, records):
                print(f"wrote {path}", file=sys.stderr)
        except OSError as error:
            return _complain(f"{error.filename or args.output} cannot be written: {error.strerror}.", 1)
    return code


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before a model is loaded."""
    if args.model and args.synthetic:
        raise UsageError("--model contradicts --synthetic; choose one.")
    wanted = [name for name in ("layers", "share", "engram") if getattr(args, name)]
    if wanted and not args.synthetic:
        raise UsageError(f"--{wanted[0]} needs --synthetic.")
    if any(b <= a for a, b in zip([0, *args.frontiers], args.frontiers, strict=False)):
        raise UsageError(f"--frontiers is {args.frontiers}, expected growing numbers from 1 on.")
    if not all(1 <= rows <= REWIND for rows in args.rows):
        raise UsageError(f"--rows is {args.rows}, expected numbers from 1 to {REWIND}.")
    for name, most in (("steps", _RESERVE // 2), ("share", 10**6), ("prefill_step_size", 10**6)):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"--{name.replace('_', '-')} is {value}, expected 1 to {most}.")
    if args.fill == "random" and args.prefill_mode != "exact":
        raise UsageError("--fill random contradicts --prefill-mode: there is no prefill; leave one out.")
    if args.output:
        folder = Path(args.output).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError(f"--output cannot be written: {folder} is no folder that allows it.")


def _open(args: argparse.Namespace):
    """The model, and what every figure says about it."""
    path = Path(args.model or shipped_model())
    if args.synthetic:
        config = cut_config(args.layers, size=args.synthetic, engram=args.engram)
    else:
        config = describe(path).config
    longest = config.max_position_embeddings - _RESERVE
    if args.frontiers[-1] > longest:
        raise UsageError(f"--frontiers reaches {args.frontiers[-1]}, but this model can be measured up to {longest}.")
    with _bar("Weights", "B") as bar:
        progress = _to(bar)
        if args.synthetic:
            model = random_model(config, args.recipe, share=args.share, progress=progress)
            shared = f", {args.share} of them with weights of their own" if args.share else ""
            tables = ", Engram in memory" if config.engram_layer_ids else ""
            name = f"synthetic {args.synthetic} {args.recipe}, {config.num_hidden_layers} layers{shared}{tables}"
            about = {"model": name, "fingerprint": "random"}
        else:
            model, _ = load(path, progress=progress)
            about = {"model": path.name, "fingerprint": model_fingerprint(path)}
    about |= {"layers": model.config.num_hidden_layers, "fill": args.fill, "prefill_mode": args.prefill_mode}
    about |= machine()
    return model, about | ({"commit": args.commit} if args.commit else {})


def measure(model, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of every frontier, one record for each number of rows; keys as in `bench_report.COLUMNS`."""
    layers, last = model.config.num_hidden_layers, args.frontiers[-1]
    chunk = args.prefill_step_size or chunk_size(model.config, last, last, free_memory())
    warm(model, chunk=min(chunk, args.frontiers[0]), rows=args.rows, prefill_mode=args.prefill_mode)
    cache = model.make_cache(args.prefill_mode)
    with _bar("Context", "tok") as bar:
        bar.total = args.frontiers[-1]
        for frontier in args.frontiers:
            mx.reset_peak_memory()
            common: dict[str, Any] = {"context": frontier}
            if args.fill == "random":
                cache = model.make_cache()
                fill_cache(cache, frontier)
                bar.update(frontier - bar.n)
            else:
                common |= _prefill(model, cache, frontier, chunk, bar)
            host = host_seconds(model, cache.copy()) * 1e3
            for rows in args.rows:
                seconds = decode_seconds(model, cache.copy(), rows=rows, steps=args.steps)
                yield common | {
                    "rows": rows,
                    "decode_ms": round(seconds * 1e3, 3),
                    "decode_ms_per_layer": round(seconds * 1e3 / layers, 4),
                    "decode_tps": round(1 / seconds, 2),
                    "host_ms": round(host, 3),
                    "cache_bytes": cache.nbytes,
                    "peak_bytes": mx.get_peak_memory(),
                }


def _prefill(model, cache, frontier: int, chunk: int, bar: tqdm) -> dict[str, Any]:
    before = cache.offset
    tokens = random_tokens(model.config, frontier - before, seed=before)
    chunks = prefill_seconds(
        model, cache, tokens, chunk=chunk, progress=lambda done, _: bar.update(before + done - bar.n)
    )
    full = [chunk / seconds for count, seconds in chunks if count == chunk]
    total, seconds = (sum(values) for values in zip(*chunks, strict=True))
    chunk_tps = statistics.median(full) if full else total / seconds
    return {
        "prefill_tokens": total,
        "prefill_step_size": chunk,
        "prefill_tps": round(total / seconds, 1),
        "prefill_chunk_tps": round(chunk_tps, 1),
        "prefill_tps_x_layers": round(chunk_tps * model.config.num_hidden_layers, 1),
    }


def _bar(label: str, unit: str) -> tqdm:
    return tqdm(desc=label, unit=unit, unit_scale=True, leave=False, disable=None, file=sys.stderr)


def _to(bar: tqdm):
    def progress(done: int, total: int, *_: object) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return progress


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r:.60}, expected whole numbers separated by commas") from None


def _complain(message: str, code: int) -> int:
    print(f"mlx_ds4.bench: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
