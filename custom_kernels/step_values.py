"""What follows from the position where a step starts: bounds, window slots, rotary tables, and zeros to count in; and
numbers of the host that many launches read: where a cache's recent rows begin, and the tokens of a few rows.

CUDA alone launches this. There MLX keeps arrays of the host in managed memory, whose pages a launch fetches when it
first reads them, 50 to 250 us a step, and counting in such a page takes 0.1 us each time. Up to eight bytes are read
where they lie, over the bus by every block, so numbers travel in pairs to this one launch.

A word of the result for each row of `spec`: (kind, a, b, c) as `Kind` says. Integers are exact; cosines and sines are
those of numpy's float64 functions, rounded to float32, or their neighbours where two libraries differ in the last place
of a float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import IntEnum

import mlx.core as mx
import numpy as np

from ._case import Case
from ._kernel import Kernel
from ._switches import backend, enabled
from .rope import host_rope_table

_THREADS = 256


class Kind(IntEnum):
    """What a word is; s is the start, the first number."""

    ZERO = 0
    NUMBER = 1  # the a-th number
    VISIBLE = 2  # (s + a + 1) // b
    SLOT = 3  # of row a, column b: p = max(s + a - WIDTH + 1, 0) + b as p % SLOTS, or -1 beyond s + a
    COS = 4  # of the a-th position, frequency b; c: 0, plain; 1, compressed; beyond, multiples of c from s // c on
    SIN = 5


# Numbers of a launch: the start, where the recent rows of either compression ratio begin and end, and 8 tokens.
_PAIRS = 7


_SOURCE = """
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= spec_shape[0]) return;
    const int kind = spec[4 * i], a = spec[4 * i + 1], b = spec[4 * i + 2], c = spec[4 * i + 3], s = pair0[0];
    int word = 0;
    if (kind == 1) {
      const int pair = a / 2;
      const int* const low = pair < 2 ? (pair < 1 ? pair0 : pair1) : (pair < 3 ? pair2 : pair3);
      const int* const high = pair < 6 ? (pair < 5 ? pair4 : pair5) : pair6;
      word = (pair < 4 ? low : high)[a % 2];
    }
    if (kind == 2) word = (s + a + 1) / b;
    if (kind == 3) {
      const int p = max(s + a - WIDTH + 1, 0) + b;
      word = p <= s + a ? p % SLOTS : -1;
    }
    if (kind >= 4) {
      const int position = c <= 1 ? s + a : (s / c + a) * c;
      const double phase = (float)position * (c > 0 ? compressed : plain)[b];  // a float32 product
      word = __float_as_int((float)(kind == 4 ? cos(phase) : sin(phase)));
    }
    words[i] = word;
"""
_kernel = Kernel(
    "step_values",
    [*[f"pair{i}" for i in range(_PAIRS)], "spec", "plain", "compressed"],
    ["words"],
    None,
    cuda_source=_SOURCE,
    exact=False,
    family="step_values",
)


def launches() -> bool:
    """Whether the device makes the values of a step: on CUDA."""
    return backend() == "cuda" and enabled("step_values")


def in_pairs(numbers: Sequence[int]) -> list[mx.array]:
    """The numbers as int32 arrays of two, the last perhaps of one: what `step_values` takes."""
    return [mx.array(numbers[i : i + 2], dtype=mx.int32) for i in range(0, len(numbers), 2)]


def step_values(
    pairs: Sequence[mx.array],
    spec: mx.array,
    plain: mx.array,
    compressed: mx.array,
    *,
    width: int,
    slots: int,
) -> mx.array:
    """pairs: up to 14 numbers `in_pairs`, of which the first is the start, 0 or more; spec int32 [n, 4]; frequencies
    float32 [P] of plain layers and of compressed ones -> int32 [n], in which float32 values lie as their bits. Only
    where `launches()`."""
    count = spec.shape[0]
    assert all(pair.dtype == mx.int32 and pair.size <= 2 for pair in pairs)
    return _kernel(
        inputs=[*pairs, *[pairs[0]] * (_PAIRS - len(pairs)), spec, plain, compressed],
        template=[("WIDTH", width), ("SLOTS", slots)],
        grid=(-(-count // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(count,)],
        output_dtypes=[mx.int32],
    )[0]


def step_values_ref(
    pairs: Sequence[mx.array],
    spec: mx.array,
    plain: mx.array,
    compressed: mx.array,
    *,
    width: int,
    slots: int,
) -> mx.array:
    numbers, rows = [number for pair in pairs for number in pair.tolist()], np.array(spec).tolist()
    s = numbers[0]
    frequencies = [np.array(plain), np.array(compressed)]

    def word(kind: int, a: int, b: int, c: int) -> int:
        if kind == Kind.NUMBER:
            return numbers[a]
        if kind == Kind.VISIBLE:
            return (s + a + 1) // b
        if kind == Kind.SLOT:
            p = max(s + a - width + 1, 0) + b
            return p % slots if p <= s + a else -1
        if kind in (Kind.COS, Kind.SIN):
            position = np.array([s + a if c <= 1 else (s // c + a) * c])
            table = host_rope_table(position, frequencies[c > 0][b : b + 1])
            return int(table[kind == Kind.SIN][0, 0].view(np.int32))
        return 0

    return mx.array([word(*row) for row in rows], dtype=mx.int32)


def cases() -> list[Case]:
    def case(start: int, rows: int) -> Case:
        spec = [(Kind.ZERO, 0, 0, 0), *((Kind.NUMBER, number, 0, 0) for number in range(1 + rows))]
        spec += [(Kind.VISIBLE, row, ratio, 0) for ratio in (1, 2, 7) for row in range(rows)]
        spec += [(Kind.SLOT, row, column, 0) for row in range(rows) for column in range(9)]
        integers = len(spec)
        turns = [(kind, ratio) for kind in (Kind.COS, Kind.SIN) for ratio in (0, 1, 2)]
        spec += [(kind, row, pair, ratio) for kind, ratio in turns for row in range(rows) for pair in range(16)]

        def inputs(rng: np.random.Generator) -> list[mx.array]:
            plain, compressed = (1 / base ** (np.arange(16, dtype=np.float32) / 16) for base in (1e4, 1.6e5))
            numbers = [start, *rng.integers(0, 1 << 24, rows).tolist()]
            spec_rows = mx.array(spec, dtype=mx.int32)
            return [spec_rows, mx.array(plain), mx.array(compressed), *in_pairs(numbers)]

        def run(op, spec: mx.array, plain: mx.array, compressed: mx.array, *pairs: mx.array):
            words = op(pairs, spec, plain, compressed, width=9, slots=17)
            return [words[:integers].astype(mx.float32), words[integers:].view(mx.float32)]

        return Case(
            f"step_values/{rows}_from_{start}",
            functools.partial(run, step_values),
            functools.partial(run, step_values_ref),
            inputs,
            tolerance=1.2e-7,
            bytes=20 * len(spec),
            large=True,  # CUDA's alone: there is no text to emulate
        )

    return [case(0, 1), case(5, 6), case(70_001, 3), case(1_048_570, 13)]
