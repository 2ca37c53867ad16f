"""`python -m mlx_ds4.perplexity`: how well models predict a text, side by side.

The text is cut into windows of `--sequence-length` tokens behind a begin token. Each window moves on by `--stride`
tokens and scores those that no window scored before. Perplexity is exp of the mean negative log-likelihood of a token;
bits per byte compare models of different vocabularies. Exit codes: 0, 2 for a request that cannot work, 130 after
Ctrl+C.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from mlx_ds4.api import load, shipped_model
from mlx_ds4.command_line import Parser
from mlx_ds4.scoring import negative_log_likelihood

_MOST_BYTES = 256 << 20


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = Parser(prog="mlx_ds4.perplexity", description="Perplexity of a text.", allow_abbrev=False)
    add = parser.add_argument
    add("file", metavar="FILE", help="a UTF-8 text, '-' reads standard input")
    add("--model", action="append", metavar="PATH",
        help="a model; several times to compare (default: the small model in the package)")  # fmt: skip
    add("--sequence-length", type=int, default=512, metavar="N", help="tokens of a window (512)")
    add("--stride", type=int, metavar="N", help="tokens by which a window moves on (the sequence length)")
    add("--max-tokens", type=int, metavar="N", help="use only the first tokens of the text")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        args = make_parser().parse_args(argv)
        text = _read(args.file)
        results = [measure(path, text, args) for path in args.model or [str(shipped_model())]]
    except KeyboardInterrupt:
        return _complain("interrupted.", 130)
    except OSError as error:
        return _complain(f"{error.filename or 'input'} cannot be read: {error.strerror}.", 2)
    except (ValueError, RuntimeError) as error:
        return _complain(str(error), 2)
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        print("\n".join(table(results)))
    return 0


def measure(path: str, text: str, args: argparse.Namespace) -> dict[str, Any]:
    """The result of one model as plain numbers."""
    from tqdm import tqdm

    model, tokenizer = load(path)
    ids = tokenizer.encode(text, allow_special=False)
    if args.max_tokens is not None:
        if args.max_tokens < 1:
            raise ValueError(f"--max-tokens is {args.max_tokens}, expected 1 or more.")
        ids = ids[: args.max_tokens]
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    with tqdm(total=len(ids), desc=path, unit="tok", leave=False, disable=not sys.stderr.isatty()) as bar:
        losses = negative_log_likelihood(
            model,
            ids,
            begin=begin,
            sequence_length=args.sequence_length,
            stride=args.stride,
            progress=lambda done, total: bar.update(done - bar.n),
        )
    total = math.fsum(losses)
    if not math.isfinite(total):
        raise RuntimeError(f"{path}: the logits are not finite; the file is damaged.")
    size = len(b"".join(map(tokenizer.id_to_bytes, ids)))
    return {
        "model": path,
        "tokens": len(losses),
        "bytes": size,
        "nats_per_token": total / len(losses),
        "perplexity": math.exp(total / len(losses)),
        "bits_per_byte": total / math.log(2) / size,
        "sequence_length": args.sequence_length,
        "stride": args.stride or args.sequence_length,
    }


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Lines with one model each; the last column compares bits per byte with the first model."""
    width = max(len("model"), *(len(r["model"]) for r in results))
    lines = [f"{'model':{width}}  {'tokens':>8}  {'perplexity':>10}  {'bits/byte':>9}  {'against first':>13}"]
    for r in results:
        change = r["bits_per_byte"] / results[0]["bits_per_byte"] - 1
        lines.append(
            f"{r['model']:{width}}  {r['tokens']:>8}  {r['perplexity']:>10.3f}  {r['bits_per_byte']:>9.4f}"
            f"  {change:>+13.2%}"
        )
    return lines


def _read(path: str) -> str:
    if path == "-":
        data = sys.stdin.buffer.read(_MOST_BYTES + 1)
    else:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} has more than {_MOST_BYTES >> 20} MiB; give a shorter text.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it first.") from None


def _complain(message: str, code: int) -> int:
    print(f"mlx_ds4.perplexity: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
