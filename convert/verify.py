"""Comparing a converted folder with its checksums and with its source, array by array."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlx_ds4.converted import ConvertedSource
from mlx_ds4.drafter_files import drafter_settings, open_drafter
from mlx_ds4.formats.folder_layout import ENGRAM, MANIFEST
from mlx_ds4.sources import open_source

from .engram_files import table_spans
from .mlx_folder import FolderPlan, Options, plan_folder
from .mlx_plan import OutFile, plan_digest
from .mlx_writer import file_checksums

_MAX_MANIFEST = 64 << 20


def verify_folder(
    folder: str | os.PathLike,
    path: str | os.PathLike,
    *,
    draft_model: str | os.PathLike | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[str]:
    """What is wrong with a converted folder, one line a fault; an empty list when it holds what its source holds.

    Every array is read and hashed on both sides and compared with the manifest; `draft_model` is the one that the
    conversion was given. Raises ValueError when the folder is no finished conversion, was made from another kind of
    source or drafter, or one of them cannot be opened.
    """
    folder = Path(folder)
    opened = open_source(folder)
    if not isinstance(opened, ConvertedSource):
        raise ValueError(f"{folder}: is no converted folder: name the one that --mlx-path named")
    options, digest, noted = _read_manifest(folder / MANIFEST)
    plan = plan_folder(path, options, draft_model)
    sources = f"{path}" if draft_model is None else f"{path} and {draft_model}"
    if (opened.config, digest) != (plan.source.config, plan_digest(plan.files)):
        raise ValueError(
            f"{folder}: was not made from {sources}, or by another version: name its source (and its --draft-model), "
            "or convert again"
        )
    faults = _small_faults(opened, plan)
    total, read = 2 * plan.nbytes, 0

    def report(count: int, name: str) -> None:
        nonlocal read
        read += count
        if progress:
            progress(min(read, total), total, name)

    for file in plan.files:
        found = file_checksums(folder / file.name, file, lambda count, name=file.name: report(count, name))
        wanted = _source_checksums(file, report)
        for name in file.slots:
            if found[name] != wanted[name]:
                which = "the folder's bytes changed" if noted.get(name) == wanted[name] else "the source's bytes differ"
                faults.append(f"{name} in {file.name}: {which}")
            elif noted.get(name) != found[name]:
                faults.append(f"{name} in {MANIFEST}: has another checksum")
    report(total, "")
    return faults


def _read_manifest(path: Path) -> tuple[Options, str, dict[str, str]]:
    """Options, digest of the plan, and checksums by array name."""
    try:
        if path.stat().st_size > _MAX_MANIFEST:
            raise ValueError("it is too large")
        value = json.loads(path.read_bytes())
        sums = {name: entry["sha256"] for name, entry in value["tensors"].items()}
        return Options(**value["options"]), value["plan"], sums
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is missing or damaged ({error}): convert again") from None


def _source_checksums(file: OutFile, report: Callable[[int, str], None]) -> dict[str, str]:
    sums = {}
    for item in file.items:
        digests = {plane: hashlib.sha256() for plane in item.arrays}
        for piece in item.pieces():
            for plane, rows in piece.items():
                digests[plane].update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
                report(rows.nbytes, item.weight.name)
        sums.update({array.name: digests[plane].hexdigest() for plane, array in item.arrays.items()})
    return sums


def _small_faults(opened: ConvertedSource, plan: FolderPlan) -> list[str]:
    """Differences of what is no weight: vocabulary, the constants of Engram, the place of its tables."""
    faults = []
    ours, theirs = opened.tokenizer(), plan.source.tokenizer()
    if ours.gguf_metadata() != theirs.gguf_metadata():
        faults.append("the tokenizer: is another one than the source's")
    (a_map, a_hashes, _), (b_map, b_hashes, _) = opened.engram(ours), plan.source.engram(theirs)
    same = np.array_equal(a_map, b_map) and all(
        np.array_equal(a.primes, b.primes) and np.array_equal(a.multipliers, b.multipliers) and a.pad_id == b.pad_id
        for a, b in zip(a_hashes, b_hashes, strict=True)
    )
    if not same:
        faults.append(f"{ENGRAM}: the constants are others than the source's")
    if plan.drafter_source:
        own = drafter_settings(open_drafter(opened.path, opened.config).config)
        theirs = drafter_settings(plan.drafter_source.config)
        faults += [
            f"the drafter: its {name} is {own[name]}, the source's is {theirs[name]}"
            for name in own
            if own[name] != theirs[name]
        ]
    wanted = table_spans(plan.source, plan.options.engram, opened.path)
    for (weight, spans, _), want in zip(opened.tables(), wanted, strict=True):
        if [(s.offset, s.width, s.size, s.header_sha256) for s in spans] != [
            (s.offset, s.width, s.size, s.header_sha256) for s in want
        ]:
            faults.append(f"{weight.name}: points to another place than the source's table")
    return faults
