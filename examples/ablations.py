"""What each part of the model is worth: parts switched off one at a time, as a Markdown table.

    python -m examples.ablations [--model PATH] [--draft-model PATH] [--out docs/ablations.md]

The text is what training held back. The model stays as it was trained, so a number says what the trained model loses
without a part, not what a model trained without it would reach. Drafts are counted over greedy continuations of held
text, all drafts verified.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from mlx_ds4 import load
from mlx_ds4.api import shipped_model
from mlx_ds4.checkpoint import CheckpointError
from mlx_ds4.drafter_files import find_drafter, load_drafter
from mlx_ds4.scoring import negative_log_likelihood, perplexity
from mlx_ds4.speculative import DraftCounts, speculative_step

from .small_model import interventions
from .small_model.corpus import held_texts
from .small_model.page import write_page

PARTS = (
    ("everything", lambda model: contextlib.nullcontext()),
    ("Engram off", interventions.engram_off),
    ("compressed rows off: the window alone", interventions.compressed_rows_off),
    ("indexer random", interventions.random_indexer),
    ("candidate blocks off", interventions.candidates_off),
    ("every compressed row selected", interventions.all_rows_selected),
    ("fake quantization off", lambda model: interventions.fake_quantization_off()),
)


class _Always:
    """Drafts at every opportunity and verifies every draft."""

    def serial_run(self, reasoning: bool) -> int:
        return 0

    def admit(self, confidence: Sequence[float], seconds: float) -> int:
        return len(confidence)

    def record_serial(self, seconds: float) -> None:
        pass

    def record_cycle(self, seconds: float, drafts: int, accepted: int) -> None:
        pass


def parts_table(model, ids: dict[str, list[int]], begin: int, length: int) -> Iterator[str]:
    """Lines of the first table: perplexity of each text under each intervention."""
    yield "| part | " + " | ".join(f"{kind}, perplexity | against all" for kind in ids) + " |"
    yield "| --- |" + " --- |" * (2 * len(ids))
    first: dict[str, float] = {}
    for name, switched in tqdm(PARTS, desc="parts", leave=False, disable=not sys.stderr.isatty()):
        cells = []
        for kind, tokens in ids.items():
            with switched(model):
                losses = negative_log_likelihood(model, tokens, begin=begin, sequence_length=length)
            value = perplexity(losses)
            first.setdefault(kind, value)
            cells.append(f"{value:.2f} | {value / first[kind] - 1:+.1%}")
        yield f"| {name} | " + " | ".join(cells) + " |"


def drafts_table(model, drafter, ids: dict[str, list[int]], begin: int, prompts: int, count: int) -> Iterator[str]:
    """Lines of the second table: tokens that a verification yields, the model's own one included."""
    stages = range(len(drafter.mtp))
    variants = [("all stages", contextlib.nullcontext), ("Markov head off", lambda: interventions.markov_off(drafter))]
    variants += [(f"stage {s} passed by", lambda s=s: interventions.stage_off(drafter, s)) for s in stages]
    yield "| drafter | " + " | ".join(f"{kind}, tokens a verification" for kind in ids) + " |"
    yield "| --- |" + " --- |" * len(ids)
    for name, switched in tqdm(variants, desc="drafts", leave=False, disable=not sys.stderr.isatty()):
        cells = []
        for tokens in ids.values():
            with switched():
                cells.append(f"{accepted_length(model, drafter, tokens, begin, prompts, count):.2f}")
        yield f"| {name} | " + " | ".join(cells) + " |"


def accepted_length(model, drafter, tokens: list[int], begin: int, prompts: int, count: int) -> float:
    """Mean tokens of a verification over greedy continuations of `prompts` places of the text, `count` tokens each."""
    counts, width = DraftCounts(), 96
    for place in range(prompts):
        start = place * max(1, (len(tokens) - width) // prompts)
        prompt = mx.array([begin, *tokens[start : start + width]])
        for _ in speculative_step(prompt, model, drafter=drafter, max_tokens=count, admission=_Always(), counts=counts):
            pass
    return 1 + sum(counts.accepted) / counts.verified[0] if counts.verified else float("nan")


def _drafter(model, path: Path, named: Path | None):
    """(the drafter, None), or (None, why none lies beside the model). Errors of `load_drafter`."""
    try:
        file = named or find_drafter(path)
    except CheckpointError as error:
        return None, error
    return load_drafter(model, file), None


def main(argv: list[str] | None = None) -> int:
    """The command line; returns 2 after a one-line error."""
    parser = argparse.ArgumentParser(prog="python -m examples.ablations", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the small model in the package")
    parser.add_argument("--draft-model", type=Path, help="default: the drafter beside the model, if there is one")
    parser.add_argument("--tokens", type=int, default=8192, help="of each text (8192)")
    parser.add_argument("--sequence-length", type=int, default=1024, help="tokens of a window (1024)")
    parser.add_argument("--prompts", type=int, default=12, help="continuations of each text for drafts (12)")
    parser.add_argument("--continue", type=int, default=64, dest="count", help="tokens of a continuation (64)")
    parser.add_argument("--out", type=Path, help="Markdown file to write (default: standard output)")
    args = parser.parse_args(argv)
    try:
        path = args.model or shipped_model()
        model, tokenizer = load(path)
        drafter, missing = _drafter(model, path, args.draft_model)  # a wrong file ends the command before the tables
        texts = held_texts()
        ids = {k: tokenizer.encode(text, allow_special=False)[: args.tokens] for k, text in texts.items()}
        begin = tokenizer.bos_token_id
        lines = [
            "# What each part is worth",
            "",
            f"Made by `python -m examples.ablations`: {path.name}, windows of {args.sequence_length} tokens, "
            + ", ".join(f"{len(v):,} tokens of {k}" for k, v in ids.items())
            + " that training held back. The model is as it was trained with all parts.",
            "",
            *parts_table(model, ids, begin, args.sequence_length),
            "",
        ]
        if drafter is None:
            lines.append(f"No drafts: {missing}.")
        else:
            lines += [
                f"Drafts: greedy continuations of {args.prompts} places of each text, {args.count} tokens each, every "
                "draft verified. A verification yields the accepted drafts and one token of the model's own, at most "
                f"{drafter.block_size + 1}.",
                "",
                *drafts_table(model, drafter, ids, begin, args.prompts, args.count),
            ]
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    write_page("\n".join(lines) + "\n", args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
