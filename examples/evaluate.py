"""What the small model can do with its context, as Markdown: perplexity by length, copies, and a needle by depth.

    python -m examples.evaluate [--model PATH] [--tokens 16384] [--out docs/small-model-evaluation.md]

The text is what training held back. Attention sees 32 tokens by itself; what lies further back comes through compressed
rows that the indexer chose, so copies and needles fail where one of these parts does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_ds4 import load
from mlx_ds4.api import shipped_model
from mlx_ds4.model.model import Model
from mlx_ds4.scoring import negative_log_likelihood, perplexity
from mlx_ds4.tokenizer import Tokenizer

from .small_model.corpus import held_texts
from .small_model.page import write_page

LENGTHS = (256, 1024, 4096, 16384)
DISTANCES = (16, 64, 256, 1024)
_CHUNK = 512
_WORDS = ["error", "value", "index", "token", "start", "string", "module", "result", "length", "object", "buffer"]


def copied(model: Model, tokenizer: Tokenizer, filler: Sequence[int], distance: int, *, seed: int = 0) -> float:
    """Share of the tokens of a quoted string that the model predicts at its second mention, `distance` tokens on.

    The string is eight words that no text holds together, so that nothing but the first mention tells it; the filler
    stands between both. The first tokens are given, for nothing says before them that the string comes again.
    """
    rng = np.random.default_rng(seed)
    string = "_".join(rng.permutation(_WORDS)[:8])
    first = tokenizer.encode(f'message = "{string}"\n', allow_special=False)
    head, quote = (tokenizer.encode(text, allow_special=False) for text in ('message = "', '"\n'))
    body = first[len(head) : len(first) - len(quote)]
    given = 2
    ids = [tokenizer.bos_token_id, *first, *filler[:distance], *head, *body]
    logits = _logits(model, ids, len(body))
    best = mx.argmax(logits, axis=-1).tolist()
    return sum(a == b for a, b in zip(best[given:-1], body[given + 1 :], strict=False)) / (len(body) - given - 1)


def needle(model: Model, tokenizer: Tokenizer, filler: Sequence[int], before: int, distance: int) -> float:
    """How much less surprised the model is by a constant's value if its definition stands in the context: nats a token.

    `before` tokens of filler, the definition, `distance` tokens of filler, then the name again. Against it the same
    context with another value in the definition; the mean over four values.
    """
    values = ("7391", "2846", "5167", "9028")
    gains = []
    for true, other in zip(values, values[1:] + values[:1], strict=True):
        losses = []
        for told in (true, other):
            text = tokenizer.encode(f"MAGIC_NUMBER = {told}\n", allow_special=False)
            ask = tokenizer.encode("MAGIC_NUMBER = ", allow_special=False)
            answer = tokenizer.encode(f"MAGIC_NUMBER = {true}", allow_special=False)[len(ask) :]
            ids = [*filler[:before], *text, *filler[before : before + distance], *ask, *answer]
            lost = negative_log_likelihood(model, ids, begin=tokenizer.bos_token_id, sequence_length=len(ids))
            losses.append(sum(lost[-len(answer) :]) / len(answer))
        gains.append(losses[1] - losses[0])
    return sum(gains) / len(gains)


def _logits(model: Model, ids: Sequence[int], last: int) -> mx.array:
    """Logits [last, V] of the last rows of one pass over `ids`."""
    cache = model.make_cache()
    cut = len(ids) - last
    for start in range(0, cut, _CHUNK):
        model(mx.array([ids[start : min(start + _CHUNK, cut)]]), cache, last_only=True)
        mx.eval([layer.state for layer in cache])
    return model(mx.array([ids[cut:]]), cache)[0]


def report(model: Model, tokenizer: Tokenizer, name: str, tokens: int, distances: Sequence[int]) -> str:
    """The whole page."""
    text = held_texts()["code"]
    ids = tokenizer.encode(text, allow_special=False)
    ids = (ids * -(-tokens // len(ids)))[:tokens]
    lengths = [n for n in LENGTHS if n <= tokens]
    bar = tqdm(total=len(lengths) + 2 * len(distances), leave=False, disable=not sys.stderr.isatty())
    lines = ["# What the small model does with its context", "", f"Made by `python -m examples.evaluate`: {name}.", ""]
    lines += ["| tokens in a window | perplexity of held code |", "| ---: | ---: |"]
    for length in lengths:
        losses = negative_log_likelihood(model, ids, begin=tokenizer.bos_token_id, sequence_length=length)
        lines.append(f"| {length:,} | {perplexity(losses):.2f} |")
        bar.update()
    lines += ["", "| tokens between | string copied | needle, nats a token |", "| ---: | ---: | ---: |"]
    for distance in distances:
        share = np.mean([copied(model, tokenizer, ids, distance, seed=seed) for seed in range(8)])
        gain = needle(model, tokenizer, ids, 64, distance)
        lines.append(f"| {distance:,} | {share:.0%} | {gain:+.2f} |")
        bar.update(2)
    bar.close()
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The command line; returns 2 after a one-line error."""
    parser = argparse.ArgumentParser(prog="python -m examples.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the small model in the package")
    parser.add_argument("--tokens", type=int, default=16384, help="of held code, repeated where it ends (16384)")
    parser.add_argument("--distance", type=int, action="append", help="tokens between (16, 64, 256 and 1024)")
    parser.add_argument("--out", type=Path, help="Markdown file to write (default: standard output)")
    args = parser.parse_args(argv)
    path = args.model or shipped_model()
    try:
        model, tokenizer = load(path)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    text = report(model, tokenizer, path.name, args.tokens, args.distance or DISTANCES)
    write_page(text, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
