"""Files that accompany a V4.1 model: the DSpark drafter and the vision encoder."""

from __future__ import annotations

import os
from typing import Any

from mlx_ds4.formats.gguf import GGUFFile
from mlx_ds4.formats.gguf_header import show
from mlx_ds4.formats.metadata_reader import MetadataReader, is_whole

_DRAFTERS = {"deepseek41-dspark", "deepseek4-dspark", "dflash"}
_DRAFTER_KEYS = ("deepseek4.dspark.", "deepseek4.dspark_", "dspark.", "dflash.")
VISION_ARCHITECTURES = {"deepseek4-vision", "deepseek41-vision", "clip", "mmproj"}


def is_drafter(gguf: GGUFFile) -> bool:
    """Whether a file holds a drafter: by its architecture, or by `mtp.` stages without an embedding."""
    stages = any(name.startswith("mtp.") for name in gguf.tensors)
    return gguf.architecture in _DRAFTERS or (stages and "token_embd.weight" not in gguf.tensors)


def check_sidecar(target: GGUFFile, sidecar: GGUFFile) -> list[str]:
    """Checks that `sidecar`, a DSpark drafter or a vision file, belongs to the V4.1 model `target`.

    Returns warnings (another source revision); raises FormatError for files of another kind and for the
    drafter of another model: tapped layers that `target` lacks, or another number of experts.
    """
    reader = MetadataReader(sidecar)
    if is_drafter(sidecar):
        _check_drafter(reader, target)
    elif sidecar.architecture not in VISION_ARCHITECTURES:
        reader.fail(f"general.architecture is {show(sidecar.architecture)}, expected a drafter or a vision file")
    ours, theirs = (file.metadata.get("general.source.revision") for file in (target, sidecar))
    if ours != theirs:
        reader.warnings.append(
            f"{os.path.basename(sidecar.path)} was made from source revision {theirs}, the model from {ours}: "
            "they may not fit together"
        )
    return reader.warnings


def drafter_value(gguf: GGUFFile, *names: str) -> Any:
    """The first of the drafter's settings `names` that the metadata holds, in any of the dialects; else None."""
    keys = (f"{prefix}{name}" for name in names for prefix in _DRAFTER_KEYS)
    return next((gguf.metadata[key] for key in keys if key in gguf.metadata), None)


def check_drafter(gguf: GGUFFile) -> None:
    """Raises FormatError unless the file holds a V4.1 drafter, judged by its architecture, variant and tensor names."""
    reader = MetadataReader(gguf)
    if not is_drafter(gguf):
        reader.fail(f"general.architecture is {show(gguf.architecture)}, expected a DSpark drafter")
    variant = drafter_value(gguf, "checkpoint_variant")
    if variant is not None and variant != "v4.1-flash":
        reader.fail(f"dspark.checkpoint_variant is {variant!r:.60}, expected 'v4.1-flash': use a V4.1 drafter")
    if (variant is None and gguf.architecture == "deepseek4-dspark") or any("hc_head" in name for name in gguf.tensors):
        reader.fail(f"this is the drafter of DeepSeek V4 ({show(gguf.architecture)}), expected one of V4.1")


def _check_drafter(reader: MetadataReader, target: GGUFFile) -> None:
    check_drafter(reader.gguf)

    def lookup(name: str) -> Any:
        return drafter_value(reader.gguf, name)

    model = MetadataReader(target)
    layers = model.value("deepseek41.num_hidden_layers", "u32")
    taps = lookup("target_layer_ids")
    if taps is not None:
        ids = taps.tolist() if is_whole(taps) else []
        if not ids or ids != sorted(set(ids)) or ids[0] < 0:
            reader.fail(f"dspark.target_layer_ids is {taps!r:.60}, expected increasing layer numbers")
        if ids[-1] >= layers:
            reader.fail(
                f"dspark.target_layer_ids is {ids!r:.60}, expected layers below {layers}: this drafter belongs to "
                "another model (V4's taps are 40, 41, 42)"
            )
    wanted = model.config().get("dspark_n_routed_experts")
    experts = lookup("expert_count")
    if experts is None:
        stacked = (info.shape[0] for name, info in reader.gguf.tensors.items() if name.endswith("ffn_gate_exps.weight"))
        experts = next(stacked, None)
    if wanted is not None and experts is not None and experts != wanted:
        reader.fail(f"the drafter has {experts} experts per stage, expected {wanted}: it belongs to another model")
