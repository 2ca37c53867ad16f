"""Cache rows kept as FP4 codes and scales (`_packed.py`) against bfloat16 rows, which is what the model keeps.

    python -m benchmarks.packed_rows [--parts bytes,lossless,attention,scores] [--toy]

* bytes: of a token of context in both forms, from the config: a row for every `ratio` tokens in each layer that owns a
  cache. The windows, of a fixed size, are not in it.
* lossless: rows that the model's fake quantization made, packed and unpacked, have the same bits. Without this no time
  is taken.
* attention, of 1, 6 and 512 rows with full lists: `sparse_attention` over bfloat16 rows, and over the listed rows
  unpacked into a small bfloat16 array just before; that unpacking alone. Layers that share a selection could share it.
* scores: `index_scores` over bfloat16 keys; over packed ones (on CUDA unpacked in registers); over all keys unpacked
  just before. Rows are limited to what the model scores at a time.

Contexts are those of ratio 1: an entry for each token. A time is the median of chains of dependent calls. Calls of a
chain take other lists in turn, and other keys where an array is small; even so a chain's listed rows at decode, and 8k
keys, stay in a large second cache. Both forms must give the same bits ("equal"), else there is no time. Memory: a few
GB. One JSON line a figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import numpy as np

from benchmarks._packed import Packed, pack, packed_scores, row_bytes, same_bits, unpack
from benchmarks.long_context import CHAIN, chained
from mlx_ds4.config import ModelConfig
from mlx_ds4.convert.official_config import released_config
from mlx_ds4.convert.synthetic import tiny_config
from mlx_ds4.custom_kernels.fake_quant import KINDS, fake_quant_fp4, fake_quant_fp4_e4m3
from mlx_ds4.custom_kernels.index_score import index_scores
from mlx_ds4.custom_kernels.rope import rope_frequencies, rope_table
from mlx_ds4.custom_kernels.sparse_attention import sparse_attention
from mlx_ds4.machine import machine
from mlx_ds4.memory import TILE_SCORES

PARTS = ("bytes", "lossless", "attention", "scores")
FULL = {"entries": (8192, 131_072, 1 << 20), "rows": (1, 6, 512)}
TOY = {"entries": (300,), "rows": (1, 6)}
ENOUGH = 1 << 28  # bytes of bfloat16 keys in a chain, beyond any second cache
ROWS_KIND, KEYS_KIND = "fp4_e4m3", "fp4"
_ROUND = {ROWS_KIND: fake_quant_fp4_e4m3, KEYS_KIND: fake_quant_fp4}


def token_bytes(config: ModelConfig, *, packed: bool) -> dict[str, Fraction]:
    """Bytes that a token of context adds to the compressed rows and to the index keys of all owners."""
    c = config
    owners = [layer for layer in range(c.num_hidden_layers) if c.owns_kv(layer)]
    rows_a_token = sum((Fraction(1, c.ratio(layer)) for layer in owners), Fraction(0))
    parts = {"compressed rows": (c.head_dim, ROWS_KIND), "index keys": (c.index_head_dim, KEYS_KIND)}
    return {
        name: rows_a_token * (row_bytes(width, kind) if packed else 2 * width) for name, (width, kind) in parts.items()
    }


def bytes_lines(config: ModelConfig) -> Iterator[dict[str, Any]]:
    for packed in (False, True):
        parts = {name: float(value) for name, value in token_bytes(config, packed=packed).items()}
        yield {"figure": "bytes a token", "form": "packed" if packed else "bf16", **parts,
               "total": sum(parts.values())}  # fmt: skip


def hostile(width: int, kind: str) -> mx.array:
    """Rows bfloat16 [1, n, width] as the cache stores them, of values that are hard to keep: zeros of both signs, the
    largest code, the smallest scale and blocks below it, every code, magnitudes at either end, small beside large."""
    rng = np.random.default_rng(0)
    # From subnormal scales to the largest: of e4m3 (2^-9 to 448), and of powers of two in bfloat16.
    low, high = (-13, 13) if kind == ROWS_KIND else (-135, 126)
    smallest = 2.0**-9 if kind == ROWS_KIND else 2.0**-126
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    with np.errstate(under="ignore"):
        rows = [
            np.zeros(width),
            -np.zeros(width),
            np.full(width, 3.3e38),  # beyond the largest code of any scale: e4m3 stops there, powers of two at infinity
            *[np.resize(np.concatenate([codes, -codes]), width) * 2.0**e for e in (low, low + 4, 0, high - 2)],
            *[rng.standard_normal(width) * 2.0**e for e in range(low, high)],
            *[np.full(width, smallest * i / 2) for i in range(1, 97)],  # not always with the largest code in use
            *(rng.standard_normal((64, width)) * 2.0 ** rng.integers(low, high, (64, width))),
        ]
        values = np.stack(rows).astype(np.float32)
    return _ROUND[kind](mx.array(values)[None])


def lossless_lines(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Raises ValueError when a row does not come back."""
    for width, kind in ((config.head_dim, ROWS_KIND), (config.index_head_dim, KEYS_KIND)):
        normal = _ROUND[kind](mx.random.normal((1, 4096, width)))
        stored = mx.concatenate([hostile(width, kind), normal], axis=1)
        packed = pack(stored, kind)
        if fault := not_kept(stored, packed):
            raise ValueError(f"{kind}: {fault}; do not keep rows in this form.")
        yield {"figure": "lossless", "kind": kind, "rows": stored.shape[1], "bytes": packed.nbytes,
               "bf16_bytes": stored.nbytes}  # fmt: skip


def not_kept(stored: mx.array, packed: Packed) -> str:
    """What unpacking gives other bits than stored, or ""."""
    wrong = (unpack(packed).view(mx.uint16) != stored.view(mx.uint16)).any(axis=-1).sum().item()
    return f"{wrong} of {stored.shape[1]} rows have other bits after unpacking" if wrong else ""


def random_packed(entries: int, width: int, kind: str) -> Packed:
    """Any codes under any of a few scales are rows that fake quantization could have made."""
    codes = mx.random.randint(-(2**31), 2**31 - 1, (1, entries, width // 8), dtype=mx.int32).view(mx.uint32)
    low = {"fp4": 124, "fp4_e4m3": 44}[kind]  # around 2^-3
    scales = mx.random.randint(low, low + 4, (1, entries, width // KINDS[kind][1]), dtype=mx.int32)
    return Packed(codes, scales.astype(mx.uint8), kind)


def in_turn(fn: Callable[..., list[mx.array]], sets: Sequence[Sequence[mx.array]], first: mx.array) -> float:
    """Seconds of a call fn(first, *arrays), in a chain whose calls take the sets of arrays one after the other. The
    arrays wait for `first`, so that nothing of a call runs before the call ahead of it has ended."""
    count = itertools.count()
    size = len(sets[0])

    def call(first: mx.array, *rest: mx.array) -> list[mx.array]:
        at = next(count) % len(sets) * size
        return fn(first, *mx.depends(list(rest[at : at + size]), [first]))

    return chained(call, [first, *itertools.chain(*sets)])


def attention_lines(config: ModelConfig, sizes: dict[str, Sequence[int]]) -> Iterator[dict[str, Any]]:
    c = config
    H, D, W = c.num_attention_heads, c.head_dim, c.sliding_window
    sinks = mx.zeros((H,))
    frequencies = rope_frequencies(c.qk_rope_head_dim, 10000.0)
    rng = np.random.default_rng(0)
    for entries, L in itertools.product(sizes["entries"], sizes["rows"]):
        P = min(c.index_topk, entries)
        packed = random_packed(entries, D, ROWS_KIND)
        rows = unpack(packed)
        near = mx.random.normal((1, W + L - 1, D)).astype(mx.bfloat16)
        near_list = (mx.arange(L)[:, None] + mx.arange(W)).astype(mx.int32)[None]
        picked = mx.arange(L * P, dtype=mx.int32).reshape(1, L, P)
        turn = rope_table(np.arange(entries - L, entries), frequencies)
        q = mx.random.normal((1, L, H * D)).astype(mx.bfloat16)
        lists = [mx.array(np.sort(rng.integers(0, entries, (1, L, P)), axis=-1).astype(np.int32)) for _ in range(CHAIN)]
        mx.eval(packed.codes, packed.scales, rows, near, near_list, picked, *turn, q, lists)

        def attend(q, rows, index, near=near, near_list=near_list, turn=turn):
            sources = [(near, near_list), (rows, index)]
            return [sparse_attention(q, sources, sinks, scale=D**-0.5, turn=turn, turn_queries=True)]

        def pick(codes, scales, index):
            return unpack(Packed(codes, scales, ROWS_KIND), index.reshape(1, -1))

        def from_packed(q, codes, scales, index, attend=attend, pick=pick, picked=picked):
            return attend(q, pick(codes, scales, index), picked)

        def pick_alone(q, codes, scales, index, pick=pick):
            return [pick(codes, scales, index)]

        codes, scales = packed.codes, packed.scales
        want, got = attend(q, rows, lists[0])[0], from_packed(q, codes, scales, lists[0])[0]
        forms = {
            "bf16": (attend, [(rows, index) for index in lists], rows.nbytes),
            "packed": (from_packed, [(codes, scales, index) for index in lists], packed.nbytes),
            "unpacking alone": (pick_alone, [(codes, scales, index) for index in lists], packed.nbytes),
        }
        about = {"figure": "attention", "entries": entries, "rows": L, "listed": P, "equal": same_bits(want, got)}
        yield from timed(forms, q, about)


def scores_lines(config: ModelConfig, sizes: dict[str, Sequence[int]]) -> Iterator[dict[str, Any]]:
    c = config
    H, D = c.index_n_heads, c.index_head_dim
    options = {"factor": (H * D) ** -0.5}
    for entries, most in itertools.product(sizes["entries"], sizes["rows"]):
        L = max(1, min(most, TILE_SCORES // entries))
        visible = mx.array(np.arange(entries - L, entries, dtype=np.int32) + 1)
        q = fake_quant_fp4(mx.random.normal((1, L, H, D)))
        weights = mx.random.normal((1, L, H)).astype(mx.bfloat16)
        several = [random_packed(entries, D, KEYS_KIND) for _ in range(min(CHAIN, -(-ENOUGH // (2 * entries * D))))]
        keys = [unpack(packed) for packed in several]
        mx.eval(visible, q, weights, keys)

        def plain(q, keys, weights=weights, visible=visible):
            return [index_scores(q, weights, keys, visible, **options)]

        def from_packed(q, codes, scales, weights=weights, visible=visible):
            return [packed_scores(q, weights, Packed(codes, scales, KEYS_KIND), visible, **options)]

        def unpacked_first(q, codes, scales, plain=plain):
            return plain(q, unpack(Packed(codes, scales, KEYS_KIND)))

        parts = [(packed.codes, packed.scales) for packed in several]
        equal = mx.array_equal(plain(q, keys[0])[0], from_packed(q, *parts[0])[0]).item()
        forms = {
            "bf16": (plain, [(x,) for x in keys], keys[0].nbytes),
            "packed": (from_packed, parts, several[0].nbytes),
            "unpacked first": (unpacked_first, parts, several[0].nbytes + 2 * keys[0].nbytes),
        }
        yield from timed(forms, q, {"figure": "scores", "entries": entries, "rows": L, "equal": equal})


def timed(forms: dict[str, tuple], first: mx.array, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each form {name: (fn, sets of arrays, bytes of the cache array)}, with its share of bf16's time; one
    without times where the forms do not give equal results."""
    plain = None
    if not about["equal"]:
        yield about
        return
    for form, (fn, sets, size) in forms.items():
        seconds = in_turn(fn, sets, first)
        plain = plain or seconds
        yield about | {"form": form, "us": round(seconds * 1e6, 2), "over_bf16": round(seconds / plain, 3),
                       "bytes": size}  # fmt: skip
    mx.clear_cache()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--toy", action="store_true", help="a tiny model: a try on a CPU")
    parser.add_argument("--commit", help="commit to write into the lines, where git is not at hand")
    args = parser.parse_args(arguments)
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts is {args.parts}, expected some of {', '.join(PARTS)}")
    config = tiny_config() if args.toy else ModelConfig.from_dict(released_config())
    sizes = TOY if args.toy else FULL
    about = machine() | ({"commit": args.commit} if args.commit else {})
    makers = {
        "bytes": lambda: bytes_lines(config),
        "lossless": lambda: lossless_lines(config),
        "attention": lambda: attention_lines(config, sizes),
        "scores": lambda: scores_lines(config, sizes),
    }
    equal = True
    for part in PARTS:
        if part in parts:
            for line in makers[part]():
                equal &= line.get("equal", True)
                print(json.dumps(line | about), flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
