"""A GGUF or an official folder as a folder of MLX arrays under the model's own names.

A conversion is a plan of files. A journal in the folder says which of them are complete, and stays until the last
is, so that a conversion that was cut short is refused by `load` and goes on from its last complete file. The same
source and options give the same bytes, however often it was cut short.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_ds4.checkpoint import CheckpointError, model_weights, other_part
from mlx_ds4.config import ModelConfig
from mlx_ds4.drafter_files import ConvertedDrafter, GGUFDrafter, ReleasedDrafter, drafter_settings, open_drafter
from mlx_ds4.formats.atomic_file import atomic_file
from mlx_ds4.formats.engram_spans import SpanRows, spans_to_json
from mlx_ds4.formats.folder_layout import ENGRAM, JOURNAL, MANIFEST, SECTION, VERSION
from mlx_ds4.formats.safetensors import write_safetensors
from mlx_ds4.model.engram import EngramHash
from mlx_ds4.sources import TEXT_FILES, ConvertibleSource, PieceSource, open_source, read_config_json
from mlx_ds4.tokenizer import Tokenizer

from .engram_files import STORAGES, clone_files, files_to_clone, table_files, table_spans, table_weights
from .mlx_plan import SHARD_BYTES, Item, OutFile, item_bytes, plan_digest, plan_files, plan_items
from .mlx_writer import file_checksums, write_file
from .official_config import official_config
from .requantize import MODES, requantize
from .source_files import SourceFile, check_unchanged, fingerprint, mark_files, marks_to_json

EXPERTS = ("stacked", "packed")
INDEX = "model.safetensors.index.json"
_RESERVE = 64 << 20  # bytes left free for the small files and the file system itself
_OURS = ("model-*.safetensors", "experts-*.bin", "engram-*", ENGRAM, INDEX, MANIFEST, *TEXT_FILES)
_PARTIAL = tuple(f".{name}.partial-*" for name in (*_OURS, JOURNAL))

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Options:
    """What a folder shall be; see `docs/convert.md`."""

    experts: str = "stacked"  # or "packed"
    engram: str = "reference"  # "copy", "clone"
    shard_bytes: int = SHARD_BYTES
    quantize: str | None = None  # block format for the matrices of a float model

    def __post_init__(self) -> None:
        known = self.experts in EXPERTS and self.engram in STORAGES and self.quantize in (None, *MODES.values())
        if not known or type(self.shard_bytes) is not int:
            raise ValueError(f"found {self}, expected experts of {EXPERTS}, engram of {STORAGES} and whole bytes")


@dataclass(frozen=True)
class FolderPlan:
    """An opened source, what it holds (`stored`), and the items and files that it becomes; the same of its drafter."""

    source: ConvertibleSource
    drafter_source: GGUFDrafter | ReleasedDrafter | None
    options: Options
    stored: list[Item]
    items: list[Item]
    drafter: list[Item]
    files: list[OutFile]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def plan_folder(path: str | os.PathLike, options: Options, draft_model: str | os.PathLike | None = None) -> FolderPlan:
    """Opens and checks a source and its drafter and plans their folder; errors as `open_source` and `open_drafter`.

    The drafter is the one in `draft_model`, else that of an official folder.
    """
    source = open_source(path)
    if source.kind == "mlx":
        raise ValueError(f"{path}: is a converted folder already: name the GGUF file or the official folder")
    if draft_model is None and source.kind == "official":
        draft_model = path if any(other_part(name) == "drafter" for name in source.folder.tensors) else None
    drafts = None if draft_model is None else open_drafter(draft_model, source.config)
    if isinstance(drafts, ConvertedDrafter):
        raise ValueError(
            f"{draft_model}: is a converted folder: name the DSpark GGUF or the official folder it is from"
        )
    stored = plan_items(source, model_weights(source.config))
    drafter = plan_items(drafts, drafts.weights) if drafts else []
    items = requantize(stored, options.quantize, path) if options.quantize else stored
    files = plan_files(items, drafter, packed=options.experts == "packed", shard_bytes=options.shard_bytes)
    if options.engram == "copy":
        files += table_files(source)
    return FolderPlan(source, drafts, options, stored, items, drafter, files)


def convert_to_folder(
    path: str | os.PathLike,
    folder: str | os.PathLike,
    options: Options | None = None,
    *,
    draft_model: str | os.PathLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Converts a GGUF file or an official folder; `load(folder)` then gives the same logits, bit for bit.

    `draft_model`, a DSpark GGUF or an official folder, gives the folder its drafter; without it that of an official
    source comes along. `load_drafter(model, folder)` gives the same drafts and confidences.

    Memory holds up to four pieces of 1 MiB (one row, if a row is longer; with `quantize` one expert) and small
    tensors. Every file takes its name when it is complete and on the disk, and `config.json` comes last. `resume`
    goes on with a conversion that was cut short (and begins one where there is none), `overwrite` starts again;
    without either a folder that is not empty is refused. `progress(done, total, name)` is called with bytes to write.

    Raises ValueError for sources as `open_source` and `open_drafter` do, for too little free space, a folder that is
    in use or holds other things, and a source that changed since the conversion began. A complete file is never
    removed by an error.
    """
    plan = plan_folder(path, options or Options(), draft_model)
    folder, source = Path(folder), plan.source
    tokenizer = source.tokenizer()
    engram = source.engram(tokenizer)
    marks = _marks(plan)
    job = {
        "format_version": VERSION,
        "plan": plan_digest(plan.files),
        "options": asdict(plan.options),
        "source": marks_to_json(marks),
    }
    done = _prepare(folder, plan, job, marks, resume=resume, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / JOURNAL, {**job, "done": done})
    if plan.options.engram == "clone":
        try:
            clone_files(files_to_clone(source), folder)
        except ValueError:
            if not done:
                _remove(folder, (*_OURS, JOURNAL))  # the clones of other files
            raise
    written = sum(file.size for file in plan.files if file.name in done)
    for file in plan.files:
        if file.name in done:
            continue

        def report(count: int, name: str) -> None:
            nonlocal written
            written += count
            if progress:
                progress(written, plan.nbytes, name)

        check_unchanged(marks)
        _check_space(folder, plan, done)
        done[file.name] = write_file(folder, file, report)
        check_unchanged(marks)
        _write_json(folder / JOURNAL, {**job, "done": done})
    _finish(folder, plan, job, done, marks, tokenizer, engram)


def _marks(plan: FolderPlan) -> list[SourceFile]:
    """The files of source and drafter; those of an official folder with both only once."""
    sources = filter(None, (plan.source, plan.drafter_source))
    return list(dict.fromkeys(mark for source in sources for mark in mark_files(source)))


def _origin(source: PieceSource, marks: Sequence[SourceFile]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Kind and fingerprint of a source, and its files, from the marks of all."""
    paths = {path.absolute() for path in source.files()}
    own = [mark for mark in marks if mark.path in paths]
    files = [{"name": mark.path.name, "size": mark.size, "header_sha256": mark.header_sha256} for mark in own]
    return {"kind": source.kind, "fingerprint": fingerprint(own)}, files


def _prepare(
    folder: Path, plan: FolderPlan, job: dict[str, Any], marks: list[SourceFile], *, resume: bool, overwrite: bool
) -> dict[str, dict[str, str]]:
    """Checks the folder and makes it ready to write into; returns the checksums of the files that are complete."""
    if any(folder.resolve() == mark.path.parent.resolve() for mark in marks):
        raise ValueError(f"{folder}: is the source's own folder: choose another --mlx-path")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file, expected a folder: choose another --mlx-path")
    unfinished = (folder / JOURNAL).is_file()
    if unfinished and not (resume or overwrite):
        raise ValueError(
            f"{folder}: holds an unfinished conversion: use --resume to go on or --overwrite to start again"
        )
    if unfinished and resume:
        return _resume(folder, plan, job)
    _remove(folder, _PARTIAL)
    if not folder.is_dir() or not any(folder.iterdir()):
        _check_space(folder, plan, ())
        return {}
    if not (_is_ours(folder / MANIFEST) or _is_ours(folder / JOURNAL)):
        raise ValueError(f"{folder}: holds other files, which are never removed: choose another --mlx-path")
    if not overwrite:
        raise ValueError(f"{folder}: is a finished conversion: use --overwrite to replace it")
    _check_space(folder, plan, (), freed=sum(path.stat().st_blocks * 512 for path in _found(folder, _OURS)))
    _write_json(folder / JOURNAL, {**job, "done": {}})  # from now on the folder is no model
    _remove(folder, _OURS)
    return {}


def _is_ours(path: Path) -> bool:
    """Whether a journal or manifest was written here, and not by another program that likes the name."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and {"format_version", "options", "plan", "source"} <= value.keys()


def _resume(folder: Path, plan: FolderPlan, job: dict[str, Any]) -> dict[str, dict[str, str]]:
    try:
        found = json.loads((folder / JOURNAL).read_bytes())
        done = found.pop("done")
        names = list(done)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{folder / JOURNAL}: is damaged: remove the folder and convert again") from None
    if found.get("source") != job["source"]:
        raise ValueError(f"{folder}: was begun from another source, or it has changed: start again with --overwrite")
    if found != job or names != [file.name for file in plan.files][: len(names)]:
        raise ValueError(f"{folder}: was begun with other options: use the same, or start again with --overwrite")
    for file in plan.files[: len(done)]:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            raise ValueError(f"{path}: was complete and is not any more: start again with --overwrite")
    for file in plan.files[: len(done)][-1:]:  # the one that a crash could have hurt
        if file_checksums(folder / file.name, file) != done[file.name]:
            raise ValueError(f"{folder / file.name}: does not have its checksum any more: start again with --overwrite")
    # With nothing done, --overwrite may have been cut short: what is there can be from the conversion before.
    _remove(folder, _PARTIAL if done else (*_PARTIAL, *_OURS))
    return done


def _found(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]


def _remove(folder: Path, patterns: Iterable[str]) -> None:
    for path in _found(folder, patterns):
        path.unlink()


def _check_space(folder: Path, plan: FolderPlan, done: Iterable[str], *, freed: int = 0) -> None:
    needed = sum(file.size for file in plan.files if file.name not in done) + _RESERVE
    free = free_space(folder) + freed
    if needed > free:
        raise ValueError(
            f"{folder}: {needed} bytes are still to be written but {free} are free: make room or choose another disk"
        )


def free_space(path: Path) -> int:
    """Bytes free on the disk on which `path` is, or will be."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _finish(
    folder: Path,
    plan: FolderPlan,
    job: dict[str, Any],
    done: dict[str, dict[str, str]],
    marks: list[SourceFile],
    tokenizer: Tokenizer,
    engram: tuple[np.ndarray, list[EngramHash], Any],
) -> None:
    """The small files, and the journal's end."""
    source, options = plan.source, plan.options
    _write_tokenizer(folder, source, tokenizer)
    tables = None
    if source.config.engram_layer_ids:
        _write_engram(folder / ENGRAM, source.config, *engram[:2])
        tables = []
        for weight, spans in zip(table_weights(source), table_spans(source, options.engram, folder), strict=True):
            rows = SpanRows(weight.name, folder, spans, weight.shape[0], None)
            tables.append({"weight": weight.name, "spans": spans_to_json(spans), "sample_sha256": rows.sample()})
    shards = {name: file.name for file in plan.files if file.header for name in file.slots}
    total = item_bytes((*plan.items, *plan.drafter))
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": shards})
    origin, files = _origin(source, marks)
    checksums = {name: {"file": file, "sha256": sums[name]} for file, sums in done.items() for name in sums}
    manifest = {key: job[key] for key in ("format_version", "options", "plan")}
    manifest["source"] = {**origin, "files": files}
    drafter = None
    if plan.drafter_source:
        origin_of_drafter, files = _origin(plan.drafter_source, marks)
        manifest["drafter"] = {**origin_of_drafter, "files": files}
        drafter = {
            "source": origin_of_drafter,
            "settings": drafter_settings(plan.drafter_source.config),
            "formats": {item.weight.name: item.format for item in plan.drafter},
        }
    _write_json(folder / MANIFEST, {**manifest, "tensors": checksums})
    section = {
        "format_version": VERSION,
        "source": origin,
        "activation_rounding": False if options.quantize else None,  # these blocks are none of training
        "experts": options.experts,
        "engram": None if tables is None else {"storage": options.engram, "tables": tables},
        "formats": {item.weight.name: item.format for item in plan.items},
        "drafter": drafter,
    }
    _write_json(folder / "config.json", {**_config(source), SECTION: section})
    (folder / JOURNAL).unlink()


def _config(source: ConvertibleSource) -> dict[str, Any]:
    """A config.json that reads as the source's config: the release's own, or one in its layout."""
    raw = read_config_json(source.path) if source.kind == "official" else official_config(source.config)
    if ModelConfig.from_dict(raw) != source.config:
        raise CheckpointError(f"{source.path}: its config does not survive being written: this is a defect, report it")
    return raw


def _write_tokenizer(folder: Path, source: ConvertibleSource, tokenizer: Tokenizer) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        origin = source.path
        if source.kind != "official":
            origin = Path(temporary)
            tokenizer.save(origin)
        for name in TEXT_FILES:
            if name != "config.json" and (origin / name).is_file():
                with atomic_file(folder / name) as file:
                    file.write((origin / name).read_bytes())


def _write_engram(path: Path, config: ModelConfig, token_map: np.ndarray, hashes: list[EngramHash]) -> None:
    arrays = {"token_map": token_map.astype("<i4")}
    for layer, hashing in zip(config.engram_layer_ids, hashes, strict=True):
        arrays[f"layers.{layer}.primes"] = hashing.primes.astype("<i8")
        arrays[f"layers.{layer}.multipliers"] = hashing.multipliers.astype("<i8")
    kinds = {"i4": "I32", "i8": "I64"}
    write_safetensors(
        path,
        [
            (name, kinds[a.dtype.str[1:]], a.shape, lambda a=a: [a.reshape(-1).view(np.uint8)])
            for name, a in arrays.items()
        ],
    )


def _write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False).encode())
