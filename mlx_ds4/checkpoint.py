"""The complete list of tensors a checkpoint must hold, and the strict comparison with what a file holds.

`model_weights` derives every trained tensor from the config, once; `official_tensors` and `gguf_tensors`
say under which names, types and shapes the two sources store them. `compare` reports everything that is
missing, unexpected, misshapen or of a wrong type in one error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mlx_ds4.config import ModelConfig

# `general.name` of a GGUF made from a model that is not the released one.
SYNTHETIC_NAME = "synthetic"
TILE = 32  # rows and columns under one scale of an FP8 tile, columns under one scale of an FP4 row


class CheckpointError(ValueError):
    """A checkpoint whose tensors are not those that its config asks for."""


@dataclass(frozen=True)
class Weight:
    """One trained tensor.

    `name` is the parameter's (the official name; experts stacked as [E, out, in]); `gguf` its GGUF name;
    `storage` how the release stores it: F32, BF16, FP8 (32x32 tiles), FP4 (rows of packed pairs, one
    tensor an expert) or ROWS (an Engram table, [rows, D] codes with D/32 scales a row); `role` decides
    which GGUF types it may have (`ROLES`).
    """

    name: str
    gguf: str
    shape: tuple[int, ...]
    storage: str
    role: str

    @property
    def group(self) -> str:
        """The part of the model it counts to in a plan of bytes."""
        return ROLES[self.role][0]


_FLOATS = ("F16", "BF16", "F32")
_MATRIX = ("Q8_0", "Q4_K", *_FLOATS)
_EXPERT = ("IQ2_XXS", "Q2_K", "Q4_K", "MXFP4", "Q8_0", *_FLOATS)
_VECTOR = ("F32", "BF16", "F16")

# role -> (group, GGUF types a loader accepts)
ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "embedding": ("token embedding", ("F16", "BF16", "F32", "Q8_0")),
    "head": ("output head", _MATRIX),
    "norm": ("layer norms", _VECTOR),
    "mixing": ("hyper-connections", _FLOATS),
    "mixing_vector": ("hyper-connections", _VECTOR),
    "attention": ("attention", _MATRIX),
    "attention_vector": ("attention", _VECTOR),
    "compressor": ("compressor and index keys", ("Q8_0", *_FLOATS)),
    "compressor_vector": ("compressor and index keys", _VECTOR),
    "indexer": ("indexer queries", ("Q8_0", *_FLOATS)),
    "router": ("router", _VECTOR),
    "router_vector": ("router", _VECTOR),
    "shared_expert": ("shared experts", _MATRIX),
    "expert_gate": ("routed experts", _EXPERT),
    "expert_up": ("routed experts", _EXPERT),
    "expert_down": ("routed experts", _EXPERT),
    "engram": ("Engram projections", ("Q8_0", *_FLOATS)),
    "engram_vector": ("Engram projections", _VECTOR),
    "engram_table": ("Engram tables", ("I8",)),
    "drafter": ("drafter", _MATRIX),
    "drafter_vector": ("drafter", _VECTOR),
}


def model_weights(config: ModelConfig) -> list[Weight]:
    """Every trained tensor of the text model in the order of a ds4 GGUF: Engram tables last."""
    hidden, vocab = config.hidden_size, config.vocab_size
    out = [
        Weight("embed.weight", "token_embd.weight", (vocab, hidden), "BF16", "embedding"),
        Weight("norm.weight", "output_norm.weight", (hidden,), "BF16", "norm"),
        Weight("head.weight", "output.weight", (vocab, hidden), "BF16", "head"),
    ]
    for layer in range(config.num_hidden_layers):
        out += _layer_weights(config, layer)
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        out.append(
            Weight(
                f"layers.{layer}.engram.embed.weight",
                f"blk.{layer}.engram_embd.weight",
                (rows, config.engram_head_dim),
                "ROWS",
                "engram_table",
            )
        )
    return out


def drafter_weights(stages: ModelConfig, taps: int) -> list[Weight]:
    """Every trained tensor of a drafter whose stages are the layers of `stages` (`dspark.stage_config`) and that
    reads `taps` layers of its model. GGUF names are those of ds4; the unused image bias is left out."""
    hidden, vocab, rank = stages.hidden_size, stages.vocab_size, stages.dspark_markov_rank
    last = f"mtp.{stages.num_hidden_layers - 1}"
    out = []
    for stage in range(stages.num_hidden_layers):
        for w in _layer_weights(stages, stage):
            names = (w.name.replace("layers.", "mtp.", 1), w.gguf.replace("blk.", "mtp.", 1))
            if not w.name.endswith(".bias_vl"):
                out.append(Weight(*names, w.shape, w.storage, w.role))

    def add(name: str, shape: tuple[int, ...], storage: str, role: str, gguf: str | None = None) -> None:
        out.append(Weight(name, gguf or name, shape, storage, role))

    add("mtp.0.main_proj.weight", (hidden, taps * hidden), "FP8", "drafter")
    add("mtp.0.main_norm.weight", (hidden,), "BF16", "drafter_vector")
    add(f"{last}.norm.weight", (hidden,), "BF16", "drafter_vector")
    for part, w in (("embed", "markov_w1"), ("head", "markov_w2")):
        add(f"{last}.markov_head.{part}.weight", (vocab, rank), "BF16", "drafter", f"{last}.markov_head.{w}.weight")
    add(f"{last}.confidence_head.proj.weight", (1, hidden + rank), "BF16", "drafter")
    return out


def _layer_weights(config: ModelConfig, layer: int) -> list[Weight]:
    c, out = config, []
    hidden, streams, head, heads = c.hidden_size, c.hc_mult, c.head_dim, c.num_attention_heads
    experts, width = c.n_routed_experts, c.moe_intermediate_size

    def add(name: str, gguf: str, shape: tuple[int, ...], storage: str, role: str) -> None:
        out.append(Weight(f"layers.{layer}.{name}", f"blk.{layer}.{gguf}", shape, storage, role))

    mixes = (2 + streams) * streams
    for site in ("attn", "ffn"):
        add(f"hc_{site}_fn", f"hc_{site}_fn.weight", (mixes, streams * hidden), "F32", "mixing")
        add(f"hc_{site}_base", f"hc_{site}_base.weight", (mixes,), "F32", "mixing_vector")
        add(f"hc_{site}_scale", f"hc_{site}_scale.weight", (3,), "F32", "mixing_vector")
        add(f"{site}_norm.weight", f"{site}_norm.weight", (hidden,), "BF16", "norm")

    q_rank, o_rank, groups = c.q_lora_rank, c.o_lora_rank * c.o_groups, c.o_groups
    add("attn.attn_sink", "attn_sinks.weight", (heads,), "F32", "attention_vector")
    add("attn.wq_a.weight", "attn_q_a.weight", (q_rank, hidden), "FP8", "attention")
    add("attn.wq_b.weight", "attn_q_b.weight", (heads * head, q_rank), "FP8", "attention")
    add("attn.q_norm.weight", "attn_q_a_norm.weight", (q_rank,), "BF16", "attention_vector")
    add("attn.wkv.weight", "attn_kv.weight", (head, hidden), "FP8", "attention")
    add("attn.kv_norm.weight", "attn_kv_a_norm.weight", (head,), "BF16", "attention_vector")
    add("attn.wo_a.weight", "attn_output_a.weight", (o_rank, heads * head // groups), "FP8", "attention")
    add("attn.wo_b.weight", "attn_output_b.weight", (hidden, o_rank), "FP8", "attention")

    if c.owns_kv(layer):
        index = c.index_head_dim
        add("attn.compressor.wkv.weight", "attn_compressor_kv.weight", (head, hidden), "BF16", "compressor")
        if c.ratio(layer) > 1:
            add("attn.compressor.wgate.weight", "attn_compressor_gate.weight", (head, hidden), "BF16", "compressor")
        add("attn.compressor.norm.weight", "attn_compressor_norm.weight", (head,), "BF16", "compressor_vector")
        add("attn.indexer.wk.weight", "indexer.attn_k.weight", (index, head), "BF16", "compressor")
        add("attn.indexer.k_norm.weight", "indexer.k_norm.weight", (index,), "BF16", "compressor_vector")
    if c.owns_index(layer):
        rows = c.index_n_heads * c.index_head_dim
        add("attn.indexer.wq_b.weight", "indexer.attn_q_b.weight", (rows, q_rank), "FP8", "indexer")
        add("attn.indexer.weights_proj.weight", "indexer.proj.weight", (c.index_n_heads, hidden), "BF16", "indexer")

    add("ffn.gate.weight", "ffn_gate_inp.weight", (experts, hidden), "BF16", "router")
    add("ffn.gate.bias", "exp_probs_b.bias", (experts,), "F32", "router_vector")
    add("ffn.gate.bias_vl", "exp_probs_b_vl.bias", (experts,), "F32", "router_vector")
    for ours, theirs, shape in (
        ("w1", "gate", (width, hidden)),
        ("w3", "up", (width, hidden)),
        ("w2", "down", (hidden, width)),
    ):
        add(f"ffn.shared_experts.{ours}.weight", f"ffn_{theirs}_shexp.weight", shape, "FP8", "shared_expert")
        add(f"ffn.experts.{ours}.weight", f"ffn_{theirs}_exps.weight", (experts, *shape), "FP4", f"expert_{theirs}")

    if layer in c.engram_layer_ids:
        rows, columns = (streams + 1) * hidden, c.engram_columns * c.engram_head_dim
        add("engram.q_weight", "engram_q_norm.weight", (streams, hidden), "BF16", "engram_vector")
        add("engram.k_weight", "engram_k_norm.weight", (streams, hidden), "BF16", "engram_vector")
        add("engram.wkv.weight", "engram_kv.weight", (rows, columns), "FP8", "engram")
    return out


# ---- what the two sources store ----------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Shape and accepted types of one stored tensor."""

    shape: tuple[int, ...]
    types: tuple[str, ...]


class Found(Protocol):
    """What a reader says about a tensor; `dtype` (safetensors) and `type_name` (GGUF) are both accepted."""

    shape: tuple[int, ...]


def scale_shape(weight: Weight) -> tuple[int, int]:
    """Shape of the E8M0 companion of an FP8, FP4 or ROWS tensor in the release (one expert's for FP4)."""
    rows, columns = weight.shape[-2:]
    return (_tiles(rows) if weight.storage == "FP8" else rows, _tiles(columns))


def _tiles(count: int) -> int:
    return -(-count // TILE)


def official_names(weight: Weight) -> list[str]:
    """The release's names of a weight: one an expert for stacked experts, else its own."""
    if weight.storage != "FP4":
        return [weight.name]
    before, after = weight.name.split(".experts.")
    return [f"{before}.experts.{expert}.{after}" for expert in range(weight.shape[0])]


def scale_name(name: str) -> str:
    """The release's name of the scales that belong to NAME.weight."""
    return name.removesuffix(".weight") + ".scale"


def official_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Every text-model tensor of the release's folder by name, scale companions included."""
    return official_parts(model_weights(config))


def official_parts(weights: Iterable[Weight]) -> dict[str, Expected]:
    """What the release's folder stores for the given weights, by name."""
    out = {}
    for weight in weights:
        for name in official_names(weight):
            if weight.storage in ("F32", "BF16"):
                out[name] = Expected(weight.shape, (weight.storage,))
                continue
            rows, columns = weight.shape[-2:]
            if weight.storage == "FP4":
                out[name] = Expected((rows, columns // 2), ("I8", "U8"))
            else:
                out[name] = Expected((rows, columns), ("F8_E4M3",))
            out[scale_name(name)] = Expected(scale_shape(weight), ("F8_E8M0",))
    return out


def gguf_shape(weight: Weight) -> tuple[int, ...]:
    """Shape of a weight in a GGUF, outermost axis first: Engram rows carry their scales behind the codes."""
    if weight.storage == "ROWS":
        rows, columns = weight.shape
        return (rows, columns + _tiles(columns))
    return weight.shape


def gguf_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Every tensor of a ds4 GGUF by name, with the types that this loader accepts."""
    return gguf_parts(model_weights(config))


def gguf_parts(weights: Iterable[Weight]) -> dict[str, Expected]:
    """What a GGUF stores for the given weights, by name."""
    return {w.gguf: Expected(gguf_shape(w), ROLES[w.role][1]) for w in weights}


def official_bytes(weight: Weight) -> int:
    """Payload bytes of a weight in the release, scales included."""
    elements = math.prod(weight.shape)
    if weight.storage in ("F32", "BF16"):
        return elements * (4 if weight.storage == "F32" else 2)
    scales = math.prod(scale_shape(weight)) * (weight.shape[0] if weight.storage == "FP4" else 1)
    return (elements // 2 if weight.storage == "FP4" else elements) + scales


# ---- comparison --------------------------------------------------------------------------------------

# Parts of the release that are no part of the text model; a text loader leaves them out.
_OTHER_PARTS = {"mtp.": "drafter", **dict.fromkeys(("vision.", "aligner.", "image_"), "vision encoder")}
_SHOWN = 20


def other_part(name: str) -> str | None:
    """'drafter' or 'vision encoder' for the release's tensors outside the text model, else None."""
    return next((part for prefix, part in _OTHER_PARTS.items() if name.startswith(prefix)), None)


def recognise_foreign(names: Iterable[str]) -> str | None:
    """What a folder is, in words, when its tensor names show that it is no V4.1 text release; else None."""
    names = set(names)
    if any(n.startswith("hc_head_") or n.endswith((".ape", ".tid2eid")) for n in names):
        return "a DeepSeek V4 checkpoint (it has the hc_head, ape or tid2eid tensors that V4.1 dropped)"
    if any(n.startswith(("model.layers.", "language_model.", "model.language_model.")) for n in names):
        return "a checkpoint converted to another program's tensor names"
    if any(n.startswith(("blk.", "token_embd.")) for n in names):
        return "a checkpoint with GGUF tensor names"
    parts = {other_part(n) for n in names}
    if names and None not in parts:
        return f"only the {' and the '.join(sorted(parts))} of a release"
    return None


def compare(
    expected: Mapping[str, Expected], found: Mapping[str, Found], *, where: str, allow_extra: bool = False
) -> None:
    """Raises CheckpointError listing all missing, unexpected, misshapen and wrongly typed tensors of `where`.

    Of each kind up to 20 names are shown, with the full count. The drafter's and the vision encoder's
    tensors are never unexpected; `allow_extra` accepts any other unknown name too, for files of a later
    revision.
    """
    problems = []
    missing = [name for name in expected if name not in found]
    extra = [] if allow_extra else [n for n in found if n not in expected and other_part(n) is None]
    shapes, types = [], []
    for name, want in expected.items():
        info = found.get(name)
        if info is None:
            continue
        kind = getattr(info, "type_name", None) or getattr(info, "dtype", None)
        if tuple(info.shape) != want.shape:
            shapes.append(f"{name} is {list(info.shape)} not {list(want.shape)}")
        if kind not in want.types:
            types.append(f"{name} is {kind} not {' or '.join(want.types)}")
    for title, entries in (
        ("missing", missing), ("unexpected", extra), ("of a wrong shape", shapes), ("of a wrong type", types),
    ):  # fmt: skip
        if entries:
            more = f", and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
            problems.append(f"{len(entries)} {title}: {', '.join(entries[:_SHOWN])}{more}")
    if problems:
        raise CheckpointError(
            f"{where}: the tensors do not fit the config ({'; '.join(problems)}): "
            "use a complete file of one release together with its own config"
        )
