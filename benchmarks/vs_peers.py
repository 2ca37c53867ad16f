"""This project and mlx-lm's V4.1 model, one after the other in one process: decode and prefill at the same real sizes.

    python -m benchmarks.vs_peers [--layers 8] [--contexts 2048,8192] [--rows 1,6] [--only ours|peer] [--toy]
    python -m benchmarks.vs_peers --read FILE ..
    python -m benchmarks.vs_peers --bundle .gpu/peers

Both have the same layers of the release, cut to 8, without Engram (mlx-lm has none), and random weights: ours in a
recipe of ds4 files, mlx-lm's as it loads the release (projections mxfp8, experts mxfp4, the rest bfloat16 and float32).
One JSON line a figure as soon as it is there, mlx-lm's first, which has few kernels to compile; the ratio follows our
line. Decode is timed as each library does it, one step ahead; passes of several rows wait for their tokens. Contexts up
to 8,192 are prefilled; of longer ones all but two chunks are random state. `--only` measures
one side; `--read` prints the ratios of lines that were written before, also by two runs.

Memory: 62 GB for mlx-lm, then 34 GB for ours (q2). TF32 is as the environment says; by default MLX has it on.

mlx-lm need not be installed: only `_version.py` and seven files of `models/` are imported, never its `__init__`, and
they need nothing beyond mlx. `--bundle FOLDER` copies them out of an installed mlx-lm; where there is none, FOLDER must
be on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import time
import types
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_ds4.bench_timing import decode_seconds, prefill_seconds, random_tokens
from mlx_ds4.config import ModelConfig
from mlx_ds4.custom_kernels._random_planes import DeviceDraws, device_planes
from mlx_ds4.machine import machine
from mlx_ds4.random_model import cut_config, fill_cache, random_model

LONGEST_PREFILL = 8192
WARM_UP = 4
_OF_ONE_SIDE = ("system", "weights", "built_s", "ms", "ms_per_layer", "tps", "tps_x_layers", "peak_bytes")


# ---- mlx-lm ------------------------------------------------------------------------------------------


def peer_module() -> types.ModuleType:
    """mlx_lm.models.deepseek_v41 without mlx_lm's own start, which imports transformers."""
    if "mlx_lm" not in sys.modules:
        spec = importlib.util.find_spec("mlx_lm")
        if spec is None:
            raise SystemExit("mlx_lm is not on the path: install mlx-lm 0.32.2, or see --bundle in the docstring")
        package = types.ModuleType("mlx_lm")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["mlx_lm"] = package
    return importlib.import_module("mlx_lm.models.deepseek_v41")


def peer_version() -> str:
    return importlib.import_module("mlx_lm._version").__version__


def bundle(folder: Path) -> None:
    """Copies the files that the peer's model imports."""
    peer_module(), peer_version()
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.") and getattr(module, "__file__", None):
            tail = Path(*name.split(".")) / "__init__.py" if hasattr(module, "__path__") else Path(*name.split("."))
            target = (folder / tail).with_suffix(".py")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(module.__file__, target)
            print(target)


def peer_model(config: ModelConfig) -> nn.Module:
    """mlx-lm's model of `config`, every array random in the type that it has after loading the release."""
    scaling = {
        "type": "yarn",
        "factor": config.rope_factor,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "original_max_position_embeddings": config.rope_original_length,
    }
    module = peer_module()
    model = module.Model(module.ModelArgs.from_dict(config.to_dict() | {"rope_scaling": scaling}))
    nn.quantize(model, class_predicate=_quantization)  # shapes only: nothing of this is ever computed
    filled = [
        (name, value)
        for owner, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
        for name, value in _filled(owner, layer)
    ]
    drawn = {name for name, _ in filled}
    for number, (name, like) in enumerate(tree_flatten(model.parameters())):
        if name not in drawn:
            filled.append((name, _floats(name, like.shape, number)))
    model.update(tree_unflatten(filled))
    mx.eval(model.parameters())
    mx.clear_cache()
    return model.eval()


def _quantization(path: str, layer: nn.Module) -> bool | dict[str, Any]:
    """What the release stores as FP4 and FP8; the compressor, router, embedding and head are bfloat16 there."""
    if "switch_mlp" in path and path.endswith("_proj"):
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    ends = ("q_a_proj", "q_b_proj", "self_attn.kv_proj", "o_a_proj", "o_b_proj")
    trained = path.endswith(ends) or ("shared_experts" in path and path.endswith("_proj"))
    return {"group_size": 32, "bits": 8, "mode": "mxfp8"} if trained else False


def _filled(path: str, layer: nn.Module) -> Iterator[tuple[str, mx.array]]:
    """Random arrays of a quantized layer, in pieces that the device can draw."""
    mode = getattr(layer, "mode", None)
    if mode is None:
        return
    *lead, words = layer.weight.shape
    seed = zlib.crc32(path.encode())
    if mode == "mxfp4":
        planes = device_planes(seed, "MXFP4", *lead, words * 8)
        codes, scales = planes["codes"], planes["scales"]
    else:
        draws = DeviceDraws(seed)
        codes = draws.integers((*lead, words * 4), 0, 256)
        codes = mx.where((codes & 127) == 127, codes ^ 1, codes)  # the two NaNs
        scales = draws.integers(layer.scales.shape, 112, 118)
    codes = codes.view(mx.uint32)
    assert codes.shape == layer.weight.shape and scales.shape == layer.scales.shape, path
    mx.eval(codes, scales)
    mx.clear_cache()
    yield f"{path}.weight", codes
    yield f"{path}.scales", scales


def _floats(name: str, shape: tuple[int, ...], seed: int) -> mx.array:
    value = 0.02 * mx.random.normal(shape, key=mx.random.key(seed))
    if "norm" in name or name.endswith(".scale"):
        value = value + 1
    kept = ("attn_hc.", "ffn_hc.", "sinks", "e_score_correction_bias")
    return value if any(part in name for part in kept) else value.astype(mx.bfloat16)


class Peer:
    """mlx-lm under the names of `Ours`."""

    def __init__(self, config: ModelConfig, recipe: str):
        self.config = config
        self.model = peer_model(config)
        self.name = f"mlx-lm {peer_version()}"
        self.weights = "projections mxfp8, experts mxfp4"
        self.cache = self.model.make_cache()

    def prefill(self, tokens: mx.array, chunk: int) -> list[tuple[int, float]]:
        times = []
        for start in range(0, tokens.size, chunk):
            part = tokens[None, start : start + chunk]
            begin = time.perf_counter()
            hidden = self.model.model(part, self.cache)[:, -1:]  # every layer whole, no head, as for ours
            mx.eval(hidden, _arrays(self.cache))
            mx.clear_cache()
            times.append((part.size, time.perf_counter() - begin))
        return times

    def fill(self, length: int) -> None:
        c = self.config
        self.cache = self.model.make_cache()
        for index, layer in enumerate(self.cache):
            layer.offset = length
            layer.window = _normal(c.sliding_window, c.head_dim, mx.bfloat16)
            if c.owns_kv(index):
                entries = length // c.ratio(index)
                layer.compress_kv = _normal(entries, c.head_dim, mx.bfloat16)
                layer.index_k = _normal(entries, c.index_head_dim, mx.bfloat16)
                if c.ratio(index) > 1:
                    open_rows = length % c.ratio(index)
                    layer.pending_kv = _normal(open_rows, c.head_dim, mx.float32)
                    layer.pending_gate = _normal(open_rows, c.head_dim, mx.float32)
        mx.eval(_arrays(self.cache))

    def decode(self, rows: int, steps: int) -> float:
        """As mlx_lm.generate_step: the next step starts before the token of the last one is read."""
        cache = [copy.copy(layer) for layer in self.cache]  # steps replace arrays, they change none

        def step(tokens: mx.array) -> mx.array:
            logits = self.model(tokens[None], cache=cache)
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            chosen = mx.argmax(logits[0], axis=-1)
            mx.async_eval(chosen)
            return chosen

        times, tokens = [], step(random_tokens(self.config, rows))
        for _ in range(steps + WARM_UP):
            start = time.perf_counter()
            if rows == 1:
                following = step(tokens)
                tokens.item()
                tokens = following
            else:
                tokens = step(mx.array(tokens.tolist()))
                tokens.tolist()
            times.append(time.perf_counter() - start)
        return statistics.median(times[WARM_UP:])


def _arrays(cache: list) -> list[mx.array]:
    return [part for layer in cache for part in layer.state if part is not None]


def _normal(rows: int, width: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((1, rows, width)).astype(dtype)


# ---- this project ------------------------------------------------------------------------------------


class Ours:
    NAME = "mlx_ds4"

    def __init__(self, config: ModelConfig, recipe: str):
        self.config = config
        self.model = random_model(config, recipe)
        self.name, self.weights = self.NAME, recipe
        self.cache = self.model.make_cache()

    def prefill(self, tokens: mx.array, chunk: int) -> list[tuple[int, float]]:
        return prefill_seconds(self.model, self.cache, tokens, chunk=chunk)

    def fill(self, length: int) -> None:
        self.cache = self.model.make_cache()
        fill_cache(self.cache, length)

    def decode(self, rows: int, steps: int) -> float:
        return decode_seconds(self.model, self.cache.copy(), rows=rows, steps=steps, warm_up=WARM_UP)


def figures(
    side: Ours | Peer, contexts: list[int], rows: list[int], steps: int, chunk: int
) -> Iterator[dict[str, Any]]:
    """Decode at each context and the prefill of the last chunk before it, over growing contexts."""
    layers = side.config.num_hidden_layers
    tokens = random_tokens(side.config, min(contexts[-1], LONGEST_PREFILL))
    side.prefill(tokens[:chunk], chunk)  # compiles
    side.cache = side.model.make_cache()
    done = 0
    for context in contexts:
        mx.reset_peak_memory()
        try:
            if context > LONGEST_PREFILL:
                done = context - 2 * chunk
                side.fill(done)
                side.prefill(tokens[: 2 * chunk], chunk)  # compiles what only long contexts need
                side.fill(done)
            count, seconds = side.prefill(tokens[: context - done], chunk)[-1]
            rate = count / seconds
            yield {"figure": "prefill", "context": context, "rows": count, "tps": round(rate, 1),
                   "tps_x_layers": round(rate * layers, 1), "peak_bytes": mx.get_peak_memory()}  # fmt: skip
        except RuntimeError as error:  # memory: a result, too
            if context <= LONGEST_PREFILL:
                raise
            yield {"figure": "prefill", "context": context, "rows": chunk, "failed": str(error)[:200]}
            side.fill(context)
        done = context
        mx.reset_peak_memory()
        for count in rows:
            ms = side.decode(count, steps) * 1e3
            yield {"figure": "decode", "context": context, "rows": count, "ms": round(ms, 3),
                   "ms_per_layer": round(ms / layers, 4), "peak_bytes": mx.get_peak_memory()}  # fmt: skip


def compared(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines, and behind a figure that both systems have by then their ratio."""
    seen: dict[tuple, dict[bool, float]] = {}
    for line in lines:
        yield line
        if "failed" in line:
            continue
        both = seen.setdefault(tuple(line[key] for key in ("figure", "context", "rows", "layers")), {})
        both[line["system"] == Ours.NAME] = line["ms"] if line["figure"] == "decode" else 1 / line["tps"]
        if len(both) == 2:
            kept = {key: value for key, value in line.items() if key not in _OF_ONE_SIDE}
            yield {"system": "ratio", "times_faster": round(both[False] / both[True], 2)} | kept


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of the systems that `options` ask for."""
    contexts, rows = ([int(word) for word in text.split(",")] for text in (options.contexts, options.rows))
    config, chunk, steps = cut_config(options.layers if not options.toy else None), 2048, options.steps
    if options.toy:
        config, contexts, chunk, steps = cut_config(size="tiny"), [64, 256, 9000], 64, 2
    config = dataclasses.replace(config, num_nextn_predict_layers=0)
    about = machine() | ({"commit": options.commit} if options.commit else {})
    about |= {"layers": config.num_hidden_layers, "tf32": os.environ.get("MLX_ENABLE_TF32", "1") != "0"}
    for make in [make for name, make in {"peer": Peer, "ours": Ours}.items() if options.only in (None, name)]:
        start = time.perf_counter()
        side = make(config, options.recipe)
        built = round(time.perf_counter() - start, 1)
        for line in figures(side, contexts, rows, steps, chunk):
            yield {"system": side.name, "weights": side.weights, **line, "built_s": built} | about
        del side
        gc.collect()
        mx.clear_cache()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--contexts", default="2048,8192", help="growing, those beyond 8192 behind random state")
    parser.add_argument("--rows", default="1,6")
    parser.add_argument("--recipe", default="q2", choices=("q2", "q4", "mxfp4"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--toy", action="store_true", help="a tiny model and contexts of 64 and 256: a try on a CPU")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="only copy the files of mlx-lm that are needed")
    parser.add_argument("--only", choices=("ours", "peer"), help="one side")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="only print the ratios of written lines")
    parser.add_argument("--commit", help="commit to write into the lines, where git is not at hand")
    options = parser.parse_args(arguments)
    if options.bundle:
        bundle(options.bundle)
        return 0
    lines = compared(measured(options))
    if options.read:
        written = [json.loads(line) for path in options.read for line in path.read_text().splitlines()]
        lines = (line for line in compared(line for line in written if line["system"] != "ratio")
                 if line["system"] == "ratio")  # fmt: skip
    for line in lines:
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
