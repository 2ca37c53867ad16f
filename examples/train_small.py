"""Trains the small V4.1 model: `prepare` on any machine, `train` where MLX has a GPU, then `export` and `plot`.

python -m examples.train_small prepare --data .train
python -m examples.train_small train --data .train --out .train/run --minutes 8
python -m examples.train_small export --data .train --run .train/run --out .train/small
python -m examples.train_small plot --run .train/run --out .train/loss.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """The command line; returns 2 after a one-line error for arguments that do not work."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_small", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    prepare = commands.add_parser("prepare", help="collect text, train the tokenizer, pack token ids")
    prepare.add_argument("--data", type=Path, required=True, metavar="DIR")
    prepare.add_argument("--vocab-size", type=int, default=2048)
    prepare.add_argument("--limit", type=int, help="take only so many documents, to try it out")

    train = commands.add_parser("train", help="train model and drafter for a given time")
    train.add_argument("--data", type=Path, required=True, metavar="DIR", help="a prepared folder")
    train.add_argument("--out", type=Path, required=True, metavar="DIR", help="for weights and log")
    train.add_argument("--minutes", type=float, default=8.0, help="of training, model and drafter together (8)")
    train.add_argument("--batch", type=int, default=32, help="sequences a step (32)")
    train.add_argument("--length", type=int, default=512, help="tokens of a sequence (512)")
    train.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest (0.002)")
    train.add_argument("--steps", type=int, help="end by steps instead of minutes, to try it out")
    train.add_argument(
        "--model", type=Path, metavar="RUN", help="only train a drafter, on the model of this finished run"
    )
    train.add_argument("--checkpoint", type=Path, metavar="FILE", help="save the state here every minute")
    train.add_argument("--resume", action="store_true", help="go on from --checkpoint")

    export = commands.add_parser("export", help="write the official folder and GGUF files")
    export.add_argument("--data", type=Path, required=True, metavar="DIR", help="the prepared folder")
    export.add_argument("--run", type=Path, required=True, metavar="DIR", help="what train wrote")
    export.add_argument("--out", type=Path, required=True, metavar="DIR")
    export.add_argument("--recipe", action="append", help="q2, q4, mxfp4, f16, .. (default: q2, q4, mxfp4 and f16)")
    export.add_argument("--calibration-windows", type=int, default=24, help="of 512 tokens for the imatrix (24)")

    plot = commands.add_parser("plot", help="loss curves as PNG (needs matplotlib)")
    plot.add_argument("--run", type=Path, required=True, metavar="DIR")
    plot.add_argument("--out", type=Path, required=True, metavar="FILE")

    args = parser.parse_args(argv)
    try:
        if args.command == "prepare":
            from .small_model.corpus import prepare as run_prepare

            print(json.dumps(run_prepare(args.data, vocab_size=args.vocab_size, limit=args.limit), indent=1))
        elif args.command == "train":
            from .small_model.train import Options
            from .small_model.train import train as run_train

            options = Options(
                minutes=args.minutes, batch=args.batch, length=args.length, learning_rate=args.learning_rate,
                steps=args.steps, checkpoint=args.checkpoint, resume=args.resume, model=args.model,
            )  # fmt: skip
            run_train(args.data, args.out, options)
        elif args.command == "export":
            from .small_model.export import export as run_export

            run_export(args.data, args.run, args.out, args.recipe, args.calibration_windows)
        else:
            from .small_model.plot import plot as run_plot

            run_plot(args.run, args.out)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; with --checkpoint, --resume goes on from here.", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
