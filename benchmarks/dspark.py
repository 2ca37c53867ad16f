"""What drafting costs, and what it brings.

    python -m benchmarks.dspark [--layers 40 --share 8] [--contexts 2048,8192] [--recipe q2] [--toy]
    python -m benchmarks.dspark --model FILE [--draft-model FILE] --prompt-file FILE [--max-tokens 256]

Without a model: real layer sizes, random weights. Milliseconds of a step of 1 to 6 rows, of a proposal, and how many
drafts a verification must accept to break even with serial decoding. Random rows choose experts independently, so six
rows read more here than six neighbours of a text do. Layers beyond `--share` use the weights of earlier ones again:
34 GB for q2, and 4 for the drafter.

With a model and its drafter: the same greedy text without drafts, with drafts as admission decides, and with a draft in
every cycle, taking turns, on each prompt: tokens/s, drafts accepted per verification, by position, and whether the
tokens are those of the text without. A prompt file holds one prompt, or several with lines of `---` between them. One
JSON line a figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx

from mlx_ds4.admission import Admission
from mlx_ds4.api import load, stream_generate
from mlx_ds4.bench_timing import decode_seconds, random_tokens, warm
from mlx_ds4.convert.source_files import model_fingerprint
from mlx_ds4.drafter_files import find_drafter, load_drafter
from mlx_ds4.machine import machine
from mlx_ds4.random_model import cut_config, fill_cache, random_drafter, random_model

REPEATS = 3  # of each text in each mode
MODES = ("off", "on", "always")


def costs(model, drafter, contexts: list[int], steps: int) -> Iterator[dict[str, Any]]:
    """Steps of every row count and proposals at each context."""
    most = drafter.block_size + 1
    warm(model, chunk=2 * drafter.config.sliding_window, rows=(1, most))
    for context in contexts:
        cache = model.make_cache()
        fill_cache(cache, context)
        ms = {}
        for rows in range(1, most + 1):
            ms[rows] = decode_seconds(model, cache.copy(), rows=rows, steps=steps) * 1e3
            yield {"figure": "step", "context": context, "rows": rows, "ms": round(ms[rows], 3),
                   "over_one_row": round(ms[rows] / ms[1], 3)}  # fmt: skip
        proposal = proposal_seconds(model, drafter, cache.copy(), steps) * 1e3
        yield {"figure": "proposal", "context": context, "ms": round(proposal, 3),
               "over_one_row": round(proposal / ms[1], 3)}  # fmt: skip
        yield {"figure": "cycle", "context": context, "ms": round(proposal + ms[most], 3),
               "accepted_to_break_even": round((proposal + ms[most]) / ms[1] - 1, 3)}  # fmt: skip


def proposal_seconds(model, drafter, cache, steps: int) -> float:
    """Median seconds of a proposal behind one new position, with a full ring; the device is idle before."""
    times = []
    for feed in [drafter.config.sliding_window] + [1] * (steps + 2):
        _, taps = model.forward(random_tokens(model.config, feed, seed=cache.offset)[None], cache, last_only=True)
        drafter.observe(cache, taps)
        mx.eval([layer.state for layer in cache])
        mx.synchronize()
        start = time.perf_counter()
        drafter.propose(model, cache, 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


class Always(Admission):
    """Drafts in every cycle and verifies whole proposals."""

    def serial_run(self, reasoning: bool) -> int:
        return 0

    def admit(self, confidence: Sequence[float], seconds: float) -> int:
        return len(confidence)

    def record_cycle(self, seconds: float, drafts: int, accepted: int) -> None:
        pass


def texts(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """End to end: what each prompt gives without drafts, with admitted ones, and with all."""
    model, tokenizer = load(args.model)
    drafter = load_drafter(model, args.draft_model or find_drafter(args.model))
    prompts = [text.strip("\n") for text in Path(args.prompt_file).read_text(encoding="utf-8").split("\n---\n")]

    def run(prompt: str, mode: str, count: int):
        """(tokens, tokens a second after the first, draft counts) of one greedy text."""
        drafting: dict[str, Any] = {"draft_model": drafter} if mode != "off" else {}
        if mode == "always":
            drafting["admission"] = Always(drafter.block_size)
        responses = list(stream_generate(model, tokenizer, prompt, count, **drafting))
        return [r.token for r in responses], responses[-1].generation_tps, responses[-1].drafts

    # Compiles what a text may need: passes of every number of rows, which admission would otherwise meet one by one.
    warm(model, chunk=2 * drafter.config.sliding_window, rows=range(1, drafter.block_size + 2))
    for mode in MODES:
        run(prompts[0], mode, min(24, args.max_tokens))
    for number, prompt in enumerate(prompts):
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(REPEATS):
            for mode in MODES:
                tokens, rate, counts = run(prompt, mode, args.max_tokens)
                rates[mode].append(rate)
                if mode == "off":
                    plain, off = tokens, statistics.median(rates["off"])
                    line = {"figure": "text", "prompt": number, "tokens": len(plain), "tps_off": round(off, 2)}
                    continue
                tps = statistics.median(rates[mode])
                cycles = counts.verified[0] if counts.verified else 0
                line |= {
                    f"equal_{mode}": tokens == plain,
                    f"tps_{mode}": round(tps, 2),
                    f"speedup_{mode}": round(tps / off, 3),
                    f"accepted_per_verify_{mode}": round(sum(counts.accepted) / cycles, 3) if cycles else None,
                    f"accepted_{mode}": counts.accepted,
                    f"verified_{mode}": counts.verified,
                }
                if mode == "on":
                    line |= {"proposals_on": counts.proposals, "declined_on": counts.declined}
        yield line | {"failure": drafter.failure}


def toy_config():
    """The tiny model with a drafter of two stages."""
    return dataclasses.replace(
        cut_config(size="tiny"),
        num_nextn_predict_layers=2,
        dspark_block_size=3,
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        dspark_target_layer_ids=(3, 4, 5),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model with a drafter, for the figures of texts")
    parser.add_argument("--draft-model", help="its drafter (default: the one beside it)")
    parser.add_argument("--prompt-file", help="UTF-8 text")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--contexts", default="2048,8192")
    parser.add_argument("--recipe", default="q2", choices=("q2", "q4", "mxfp4"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--toy", action="store_true", help="a tiny model: a try on a CPU")
    parser.add_argument("--commit", help="commit to write into the lines, where git is not at hand")
    args = parser.parse_args(arguments)
    if bool(args.model) != bool(args.prompt_file):
        parser.error("--model and --prompt-file go together")
    about = machine() | ({"commit": args.commit} if args.commit else {})
    if args.model:
        about |= {"model": Path(args.model).name, "fingerprint": model_fingerprint(args.model)}
        lines = texts(args)
    else:
        config = toy_config() if args.toy else cut_config(args.layers)
        model = random_model(config, args.recipe, share=None if args.toy else args.share)
        drafter = random_drafter(model, args.recipe)
        contexts = [64] if args.toy else [int(word) for word in args.contexts.split(",")]
        about |= {"recipe": args.recipe, "layers": config.num_hidden_layers}
        lines = costs(model, drafter, contexts, 2 if args.toy else args.steps)
    for line in lines:
        print(json.dumps(line | about), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
