"""Convert a model: a ds4 GGUF or the official release to a folder of MLX arrays, or the release to a GGUF.

python -m mlx_ds4.convert --gguf DeepSeek-V4.1-Flash-Q2.gguf --draft-model DSpark.gguf --mlx-path v41-q2
python -m mlx_ds4.convert --hf-path DeepSeek-V4.1-Flash --mlx-path v41-mxfp4 --experts packed
python -m mlx_ds4.convert --hf-path DeepSeek-V4.1-Flash --mlx-path v41-q4.gguf --to gguf --recipe q4
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mlx_ds4.checkpoint import model_weights
from mlx_ds4.command_line import UsageError
from mlx_ds4.sources import OfficialSource, open_source

from .engram_files import STORAGES, table_weights
from .mlx_folder import EXPERTS, FolderPlan, Options, convert_to_folder, free_space, plan_folder
from .mlx_plan import Item, item_bytes
from .recipe import RECIPES, plan
from .requantize import MODES, block_format, table
from .to_gguf import official_to_gguf
from .verify import verify_folder

PROGRAM = "mlx_ds4.convert"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    first, examples = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=first, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", metavar="FILE", help="a ds4 GGUF file, or the first of its raw pieces")
    source.add_argument("--hf-path", metavar="DIR", help="a folder of the official release")
    add("--mlx-path", required=True, metavar="PATH", help="the folder to write (with --to gguf: the file)")
    add("--draft-model", metavar="PATH", help="a DSpark GGUF or an official folder whose drafter to take along")
    add("--experts", choices=EXPERTS, help="stacked in shards, or packed: one aligned record an expert (stacked)")
    add("--engram", choices=STORAGES, help="leave the Engram tables in the source, copy or clone them (reference)")
    add("-q", "--quantize", action="store_true", help="round the matrices of a float model to a block format")
    add("--q-mode", choices=sorted({mode for mode, _, _ in MODES}), help="with -q: the kind of blocks (affine)")
    add("--q-bits", type=int, metavar="N", help="with -q: bits of a weight (affine: 4, or 8, 2)")
    add("--q-group-size", type=int, metavar="N", help="with -q: columns under one scale (32; 16 for 2 bits)")
    add("--to", choices=("mlx", "gguf"), default="mlx", help="what to write (mlx)")
    add("--recipe", choices=tuple(RECIPES), help="types of the GGUF, with --to gguf")
    add("--imatrix", metavar="FILE", help="importance of columns for --to gguf")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--resume", action="store_true", help="go on with a conversion that was cut short")
    what.add_argument("--overwrite", action="store_true", help="replace a conversion that is there")
    what.add_argument("--dry-run", action="store_true", help="print the plan with its sizes and write nothing")
    what.add_argument("--verify", action="store_true", help="compare an existing folder with its source")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0, or 1 when --verify finds a fault, 2 after a one-line error, 130 when interrupted."""
    args = make_parser().parse_args(argv)
    try:
        if not args.quantize and (args.q_mode, args.q_bits, args.q_group_size) != (None, None, None):
            raise UsageError("--q-mode, --q-bits and --q-group-size need -q: without it values are kept as they are")
        return _to_gguf(args) if args.to == "gguf" else _to_folder(args)
    except KeyboardInterrupt:
        return _complain(f"interrupted{_again(args)}", 130)
    except OSError as error:
        full = f": make room{_again(args)}" if error.errno in _FULL else ""
        return _complain(f"{error.filename or args.mlx_path}: {error.strerror or error}{full}", 2)
    except ValueError as error:
        return _complain(str(error), 2)


def _again(args: argparse.Namespace) -> str:
    return "" if args.to == "gguf" else "; --resume goes on"


def _complain(text: str, code: int) -> int:
    print(f"{PROGRAM}: {' '.join(text.splitlines())}", file=sys.stderr)
    return code


# ---- to a folder -------------------------------------------------------------------------------------


def _to_folder(args: argparse.Namespace) -> int:
    if args.recipe or args.imatrix:
        raise UsageError("--recipe and --imatrix need --to gguf: values are kept as they are in an MLX folder")
    source = args.gguf or args.hf_path
    if args.hf_path and not Path(args.hf_path).is_dir():
        raise UsageError(f"{args.hf_path}: is no folder; name a GGUF file with --gguf")
    if args.gguf and Path(args.gguf).is_dir():
        raise UsageError(f"{args.gguf}: is a folder; name it with --hf-path")
    if args.verify:
        if args.experts or args.engram or args.quantize:
            raise UsageError("--verify compares what is there: leave --experts, --engram and -q out")
        with _bar("Comparing") as progress:
            faults = verify_folder(args.mlx_path, source, draft_model=args.draft_model, progress=progress)
        for fault in faults:
            print(fault)
        print(f"{len(faults)} faults" if faults else f"{args.mlx_path} holds what {source} holds")
        return 1 if faults else 0
    quantize = block_format(args.q_mode or "affine", args.q_bits, args.q_group_size) if args.quantize else None
    options = Options(args.experts or "stacked", args.engram or "reference", quantize=quantize)
    if args.quantize or args.dry_run:
        planned = plan_folder(source, options, args.draft_model)
        lines = folder_lines(planned, Path(args.mlx_path)) if args.dry_run else ()
        for line in (*(table(planned.stored, planned.items) if quantize else ()), *lines):
            print(line)
    if args.dry_run:
        return 0
    with _bar("Converting", resumed=args.resume) as progress:
        convert_to_folder(
            source, args.mlx_path, options, draft_model=args.draft_model, resume=args.resume, overwrite=args.overwrite,
            progress=progress,
        )  # fmt: skip
    print(f"wrote {args.mlx_path}")
    return 0


def folder_lines(planned: FolderPlan, folder: Path) -> Iterator[str]:
    """The plan as text: parts with bytes and formats, the files, the tables, the room on the disk."""
    source, options = planned.source, planned.options
    parts: dict[str, list[Item]] = {}
    for item in planned.items:
        parts.setdefault(item.weight.group, []).append(item)
    yield f"{source.path} ({source.kind}, {source.config.num_hidden_layers} layers)"
    for group, items in parts.items():
        yield _row(group, item_bytes(items), _formats(items))
    yield _row("weights", item_bytes(planned.items), f"experts {options.experts}")
    if planned.drafter_source:
        origin = "" if planned.drafter_source.path == source.path else f"; {planned.drafter_source.path}"
        yield _row("drafter", item_bytes(planned.drafter), _formats(planned.drafter) + origin)
    tables = sum(source.nbytes(weight) for weight in table_weights(source))
    yield _row("Engram tables", tables, f"{len(table_weights(source))} tables, {options.engram}")
    yield _row("to write", planned.nbytes, f"{len(planned.files)} files")
    yield _row("free", free_space(folder), "")


def _formats(items: Iterable[Item]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(item.format for item in items).items())


def _row(name: str, size: int, rest: str) -> str:
    return f"  {name:<28}{size:>20,}  {rest}".rstrip()


# ---- to a GGUF ---------------------------------------------------------------------------------------


def _to_gguf(args: argparse.Namespace) -> int:
    if not args.hf_path or not args.recipe:
        raise UsageError("--to gguf needs --hf-path, a folder of the official release, and --recipe")
    if args.resume or args.verify or args.experts or args.engram or args.quantize or args.draft_model:
        raise UsageError(
            "--to gguf writes one file in one go by its recipe: leave --resume, --verify, --experts, --engram, "
            "--draft-model, -q"
        )
    path = Path(args.mlx_path)
    if args.dry_run:
        source = open_source(args.hf_path)
        if not isinstance(source, OfficialSource):
            raise UsageError(f"{args.hf_path}: is a converted folder, expected one of the official release")
        groups = plan(model_weights(source.config), RECIPES[args.recipe])
        print(f"{source.path} -> {path} ({RECIPES[args.recipe].text})")
        for group, size in groups.items():
            print(_row(group, size, ""))
        print(_row("to write", sum(groups.values()), "and the header"))
        print(_row("free", free_space(path), ""))
        return 0
    if path.is_dir() or (path.exists() and not args.overwrite):
        raise UsageError(f"{path}: exists: choose another --mlx-path, or replace a file with --overwrite")
    with _bar("Encoding") as progress:
        official_to_gguf(args.hf_path, path, args.recipe, imatrix=args.imatrix, progress=progress)
    print(f"wrote {path}")
    return 0


@contextlib.contextmanager
def _bar(label: str, *, resumed: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A progress callback that draws bytes, rate and time left on a terminal's standard error.

    With `resumed` the bytes of the first call are those of an earlier run, which say nothing about the rate.
    """
    from tqdm import tqdm

    bar = tqdm(desc=label, unit="B", unit_scale=True, leave=False, disable=None, file=sys.stderr)

    def progress(done: int, total: int, name: str) -> None:
        if resumed and bar.total is None:
            bar.n = bar.initial = bar.last_print_n = done
        bar.total = total
        bar.set_postfix_str(name[-40:], refresh=False)
        bar.update(done - bar.n)

    try:
        yield progress
    finally:
        bar.close()
