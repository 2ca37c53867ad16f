"""Block-quantized products: exact decoding, float64 errors, independence of rows, bytes, offsets, edges."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import _kernel, _octet, quant_matmul
from mlx_ds4.custom_kernels._count import count_launches
from mlx_ds4.custom_kernels._kernel import Kernel, emulator_missing
from mlx_ds4.custom_kernels._random_planes import BYTES, random_planes
from mlx_ds4.custom_kernels._switches import disable, use_kernels
from mlx_ds4.custom_kernels.quant_matmul import (
    grouped_quant_matmul,
    grouped_quant_matmul_ref,
    quant_matmul_group,
    quant_matmul_group_ref,
    quant_matmul_ref,
)
from mlx_ds4.formats import planes as block_planes
from mlx_ds4.model.linear import BlockWeight, GroupedLinear, Linear, apply_together
from tests.kernels import mutants

product = quant_matmul.quant_matmul
needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]
FORMATS = ["Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4", "FP8"]


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def planes_of(format: str, *shape: int, seed: int = 0) -> dict[str, mx.array]:
    return random_planes(np.random.default_rng(seed), format, *shape)


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item()


def emulate(**options):
    """Without the checks, which the declared cases go through."""
    return use_kernels("emulate", checked=False, **options)


def test_iq2_codewords_are_those_of_gguf():
    words = np.array(_octet.iq2_words(), dtype="<u4").view(np.uint8).reshape(256, 8)
    np.testing.assert_array_equal(words, np.array(block_planes._table("iq2")))


@needs_emulator
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_decoded_exactly(format):
    """x is the identity: what comes out is the weight, bit for bit (a zero's sign aside)."""
    planes = planes_of(format, 40, 512)
    want = block_planes.dequantize(format, planes).T
    some = mx.array([0, 9, 45, 100, 203, 262, 388, 511])
    with emulate():
        assert mx.array_equal(product(mx.eye(512)[some], format, planes, out_dtype=mx.float32), want[some])
        assert mx.array_equal(product(mx.eye(512), format, planes, out_dtype=mx.float32), want)


@needs_emulator
def test_the_ends_of_the_scales():
    """Scale bytes 1 to 240 are exact; above, the power is infinite. NaN codes of e4m3 stay NaN."""
    x = mx.eye(64)[:8]
    codes = mx.full((40, 32), 0x12, dtype=mx.uint8)  # 1.0 and 0.5
    scales = np.full((40, 2), 127, dtype=np.uint8)
    scales[:, 0] = [*range(1, 20), *range(221, 241), 241]
    fp8 = {"codes": mx.full((32, 64), 0x7F, dtype=mx.uint8), "scales": mx.full((1, 2), 127, dtype=mx.uint8)}
    planes = {"codes": codes, "scales": mx.array(scales)}
    with emulate():
        got = product(x, "MXFP4", planes, out_dtype=mx.float32)
        assert mx.isnan(product(x, "FP8", fp8)).all()
        assert mx.isinf(product(mx.ones((1, 64)), "MXFP4", planes, out_dtype=mx.float32)[0, 39])
    want = block_planes.dequantize("MXFP4", planes).T[:8]
    normal_ones = mx.abs(want) >= 2.0**-126  # Apple's GPUs flush the others
    assert normal_ones[:, 1:39].all()
    assert mx.array_equal(mx.where(normal_ones, got, 0)[:, :39], mx.where(normal_ones, want, 0)[:, :39])


@needs_emulator
@pytest.mark.parametrize("rows", [1, 6, 9])
@pytest.mark.parametrize("format", ["Q8_0", "MXFP4"])
def test_error_against_mlx(format, rows):
    """At most twice the error of MLX's own product of the same numbers, against float64; for tiles, which add column
    after column as every matrix product does, of its float32 product of the dequantized weight."""
    x, planes = normal(1, rows, 2304), planes_of(format, 64, 2304)
    weight = block_planes.dequantize(format, planes)
    if rows > quant_matmul.MOST_ROWS:
        theirs = x @ weight.T
    elif format == "Q8_0":  # scale * code = scale * (code + 128) - 128 * scale
        words = (planes["codes"].astype(mx.int32) + 128).astype(mx.uint8).view(mx.uint32)
        scales = planes["scales"].astype(mx.float32)
        theirs = mx.quantized_matmul(x, words, scales, -128 * scales, group_size=32, bits=8)
    else:
        theirs = mx.quantized_matmul(x, planes["codes"].view(mx.uint32), planes["scales"], mode="mxfp4")
    with emulate():
        ours = product(x, format, planes, out_dtype=mx.float32)
    exact = np.array(x, np.float64) @ np.array(weight, np.float64).T
    errors = [np.abs(np.array(y, np.float64) - exact) for y in (ours, theirs)]
    assert errors[0].max() <= 2 * errors[1].max() and errors[0].mean() <= 2 * errors[1].mean()


@needs_emulator
@pytest.mark.parametrize(
    ("format", "widths"),
    [("Q8_0", (32, 64, 96)), ("Q4_K", (256,)), ("Q2_K", (2304,)), ("IQ2_XXS", (256, 2304)), ("MXFP4", (64, 96))],
)
def test_ragged_shapes(format, widths):
    with emulate():
        for width in widths:
            for outputs in (1, 31, 33):
                x, planes = normal(2, 2, width, dtype=mx.bfloat16), planes_of(format, outputs, width)
                got = product(x, format, planes, out_dtype=mx.float32)
                want = quant_matmul_ref(x, format, planes, out_dtype=mx.float32)
                assert mx.abs(got - want).max() <= 3e-6 * mx.abs(want).max() + 1e-7


@needs_emulator
@pytest.mark.parametrize(("format", "counts"), [("Q4_K", range(1, 9)), ("IQ2_XXS", (1, 6)), ("Q8_0", (1, 5))])
def test_a_row_does_not_depend_on_its_neighbours(format, counts, monkeypatch):
    """The same bits alone and among up to eight rows, and however many weight rows a simdgroup takes."""
    x, planes = normal(3, 8, 768), planes_of(format, 35, 768)
    x[3] = 0
    with emulate():
        alone = mx.concatenate([product(x[i : i + 1], format, planes, out_dtype=mx.float32) for i in range(8)])
        for count in counts:
            some = mx.arange(8 - count, 8)
            assert same_bits(product(x[some], format, planes, out_dtype=mx.float32), alone[some])
        monkeypatch.setattr(quant_matmul, "rows_per_simdgroup", lambda outputs, most: most)
        assert same_bits(product(x[:1], format, planes, out_dtype=mx.float32), alone[:1])
        assert same_bits(product(x[:5], format, planes, out_dtype=mx.float32), alone[:5])
        tiles = product(mx.concatenate([x, x]), format, planes, out_dtype=mx.float32)
        assert same_bits(tiles[:8], tiles[8:])
    assert mx.all(alone[3] == 0) and mx.all(tiles[3] == 0)
    assert not mx.all(alone[2] == 0)


@pytest.mark.parametrize("mode", MODES)
def test_several_weights_equal_one_by_one(mode):
    """Seven matrices of four formats and two result dtypes: five in one launch, then two."""
    x = normal(4, 2, 3, 256, dtype=mx.bfloat16)
    kinds = [("Q8_0", 5), ("F16", 9), ("Q8_0", 70), ("Q4_K", 3), ("F32", 8), ("Q8_0", 33), ("Q8_0", 4)]
    weights = [(f, planes_of(f, n, 256, seed=n)) for f, n in kinds]
    dtypes = [mx.float32 if f in ("F16", "F32") else mx.bfloat16 for f, _ in kinds]
    with use_kernels(mode), count_launches() as launches:
        got = quant_matmul_group(x, weights, out_dtype=dtypes)
        wanted = [product(x, *weight, out_dtype=dtype) for weight, dtype in zip(weights, dtypes, strict=True)]
    assert [(y.shape, y.dtype) for y in got] == [
        ((2, 3, n), dtype) for (_, n), dtype in zip(kinds, dtypes, strict=True)
    ]
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
    if mode == "reference":
        reference = quant_matmul_group_ref(x, weights, out_dtype=dtypes)
        assert all(same_bits(a, b) for a, b in zip(got, reference, strict=True))
    else:
        assert launches == {"quant_rows_5": 1, "quant_rows_2": 1, "quant_rows": 7}
    with pytest.raises(ValueError, match="1 output dtypes for 7 weights"):
        quant_matmul_group(x, weights, out_dtype=[mx.float32])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 10])
def test_block_diagonal(rows, mode):
    """Each group equals a product of its own slice and its own rows."""
    groups, rank = 4, 6
    x, planes = normal(5, rows, groups * 64, dtype=mx.bfloat16), planes_of("Q8_0", groups * rank, 64)
    with use_kernels(mode):
        got = grouped_quant_matmul(x, "Q8_0", planes, groups)
        for g in range(groups):
            part = {name: plane[g * rank : (g + 1) * rank] for name, plane in planes.items()}
            y = product(x[:, g * 64 : (g + 1) * 64], "Q8_0", part)
            assert same_bits(got[:, g * rank : (g + 1) * rank], y)
    assert mx.allclose(got, grouped_quant_matmul_ref(x, "Q8_0", planes, groups), rtol=2.0**-7)


@needs_emulator
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_read_once(format):
    """Every byte of the planes is touched; codes are read as often for several rows as for one, and no oftener than
    packing asks for: a word of Q4_K serves two octets, one of Q2_K and IQ2_XXS four."""
    planes, reads = planes_of(format, 8, 512), []
    for rows in (1, 4):
        with use_kernels("emulate"):
            product(normal(6, rows, 512, dtype=mx.bfloat16), format, planes)
        buffers = _kernel.emulator().last_stats().buffers
        reads.append(buffers["codes0"].read)
        stored = [buffers[f"{name}0"] for name in planes]
        assert all(b.distinct_read == b.size for b in stored)
        assert sum(b.size for b in stored) == pytest.approx(BYTES[format] * 8 * 512, rel=0.01)
    assert reads[0] == reads[1] == buffers["codes0"].size * {"Q4_K": 2, "Q2_K": 4, "IQ2_XXS": 4}.get(format, 1)


_OFFSETS = Kernel(
    "test_octet_offsets",
    ["rows", "sizes"],
    ["y"],
    """
    uint i = thread_position_in_grid.x;
    if (i < sizes[2])
        for (uint j = 0; j < 4u; j++) y[i * 4u + j] = octet_index(rows[i], sizes[0], sizes[1], j < 3u ? 1u << j : 32u);
    """,
    _octet.OCTET_HEADER,
    exact=True,
    family="test",
)


@needs_emulator
def test_offsets_of_the_largest_weights():
    """384 experts of 2304 x 5120, and a matrix of 101 GB of codes: the index arithmetic has 64 bits."""
    octets, last = 5120 // 8, 5120 // 8 - 1
    rows = [0, 384 * 2304 - 1, 2**31 + 5, 101_000_000_000 // 2560]
    with use_kernels("emulate"):
        got = _OFFSETS(
            inputs=[mx.array(rows, dtype=mx.uint64), mx.array([octets, last, len(rows)], dtype=mx.uint32)],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(len(rows), 4)],
            output_dtypes=[mx.uint64],
        )[0]
    want = [[row * (octets // part) + last // part for part in (1, 2, 4, 32)] for row in rows]
    assert got.tolist() == want and max(map(max, want)) > 2**32
    # Everything else that indexes a plane is a product with an `ul` literal or made from a `ulong` row.
    header = _octet.OCTET_HEADER
    for index in re.findall(r"(?:scales|supers|codes\))\[(.*?)\][;)\s]", header):
        assert "ul" in index or re.fullmatch(r"here|block32|block256|octet_index\(.*\)", index), index
    sources = _octet.ROWS_HEADER + quant_matmul._TILE_SOURCE
    assert "ulong(g) * ulong(outputs)" in sources and not re.search(r"(?<!\()\bg \* outputs", sources)


def tile_mutant(index: int, monkeypatch) -> None:
    """The tile kernel without its index-th barrier."""
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    kernel = quant_matmul._tile_kernel
    parts = kernel.header.split(barrier)
    assert len(parts) == 4
    header = barrier.join(parts[: index + 1]) + ";" + barrier.join(parts[index + 1 :])
    mutants.replace(monkeypatch, kernel, header=header)


@needs_emulator
@pytest.mark.parametrize("index", range(3))
def test_a_lost_barrier_is_noticed(index, monkeypatch):
    tile_mutant(index, monkeypatch)
    with use_kernels("emulate"), pytest.raises(_kernel.emulator().EmulatorError) as error:
        product(normal(7, 9, 64, dtype=mx.bfloat16), "Q8_0", planes_of("Q8_0", 64, 64))
    assert error.value.kind in ("race", "uninitialised")


@pytest.mark.parametrize("mode", MODES)
def test_empty(mode):
    planes = planes_of("Q8_0", 8, 64)
    with use_kernels(mode), count_launches() as launches:
        assert product(mx.zeros((2, 0, 64), mx.bfloat16), "Q8_0", planes).shape == (2, 0, 8)
        assert grouped_quant_matmul(mx.zeros((0, 128), mx.bfloat16), "Q8_0", planes, 2).shape == (0, 8)
        assert quant_matmul_group(mx.zeros((1, 64)), []) == []
    assert not launches


@pytest.mark.parametrize("mode", MODES)
def test_strided_input(mode):
    base, planes = normal(10, 64, 6, dtype=mx.bfloat16), planes_of("Q8_0", 9, 64)
    with use_kernels(mode):
        assert same_bits(product(base.T[::2], "Q8_0", planes), product(mx.contiguous(base.T[::2]), "Q8_0", planes))
        assert same_bits(product(base.T[1:3], "Q8_0", planes), product(base.T, "Q8_0", planes)[1:3])


@pytest.mark.parametrize("mode", MODES)
def test_disabled_small_and_other_dtypes(mode):
    """Weights too small for a kernel and a disabled family use the reference; float16 inputs are taken as float32."""
    tiny, planes = planes_of("MXFP4", 1, 32), planes_of("Q8_0", 8, 64)
    x = normal(8, 3, 64, dtype=mx.float16)
    with use_kernels(mode):
        with count_launches() as launches, disable("quant_matmul"):
            assert same_bits(product(x, "Q8_0", planes), quant_matmul_ref(x, "Q8_0", planes))
        assert same_bits(product(x[:, :32], "MXFP4", tiny), quant_matmul_ref(x[:, :32], "MXFP4", tiny))
        assert not launches
        got = product(x, "Q8_0", planes, out_dtype=mx.float16)
        assert got.dtype == mx.float16 and same_bits(
            got, product(x.astype(mx.float32), "Q8_0", planes, out_dtype=mx.float16)
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: product(mx.zeros((1, 32)), "Q8_0", p), "width 32, expected the weight's 64"),
        (lambda p: product(mx.zeros((1, 64)), "Q5_0", p), "format 'Q5_0', expected one of"),
        (lambda p: grouped_quant_matmul(mx.zeros((1, 192)), "Q8_0", p, 3), "multiples of 3 groups"),
        (lambda p: grouped_quant_matmul(mx.zeros((1, 256)), "Q8_0", p, 2), "width 128, expected the weight's 64"),
    ],
)
def test_wrong_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call(planes_of("Q8_0", 8, 64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("format", "trained"), [("Q8_0", False), ("MXFP4", True)])
def test_modules(format, trained, mode):
    """Layers launch the products, round their inputs once where training did, and share a launch."""
    layers = [Linear(64, n, trained=trained) for n in (16, 24)]
    for layer, n in zip(layers, (16, 24), strict=True):
        layer.weight = BlockWeight(format, planes_of(format, n, 64, seed=n))
    grouped = GroupedLinear(128, 4, 2)
    grouped.weight = BlockWeight("Q8_0", planes_of("Q8_0", 8, 64))
    x = normal(9, 2, 64, dtype=mx.bfloat16)
    with use_kernels(mode), count_launches() as launches:
        together = apply_together(x, *layers)
        block = grouped(x.reshape(1, 128))
    if mode == "emulate":
        assert launches == {"quant_rows_2": 1, "quant_rows": 1} | ({"fake_quant": 1} if trained else {})
    with use_kernels(mode):
        assert all(same_bits(a, layer(x)) for a, layer in zip(together, layers, strict=True))
    with use_kernels("reference"):
        assert all(mx.allclose(a, layer(x), rtol=2.0**-7) for a, layer in zip(together, layers, strict=True))
        assert mx.allclose(block, grouped(x.reshape(1, 128)), rtol=2.0**-7)
    layers[1].rounds_input = False  # no shared rounding any more
    layers.append(Linear(64, 3, out_dtype=mx.float32))
    layers[2].weight = normal(11, 3, 64)
    with use_kernels(mode), count_launches() as launches:
        together = apply_together(x, *layers)
        assert launches.total() == (0 if mode == "reference" else 3 if trained else 1)
        assert all(same_bits(a, layer(x)) for a, layer in zip(together, layers, strict=True))
    assert [y.dtype for y in together] == [mx.bfloat16, mx.bfloat16, mx.float32]
