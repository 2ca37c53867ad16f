"""CUDA-only bodies of products, as C++ on the CPU, against the references: every format, one row, a few and many."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.custom_kernels import (
    _dense_few_cuda,
    _expand_cuda,
    _expert_tile_cuda,
    _kernel,
    _quant_cuda,
    _quant_group_cuda,
    expert_matmul,
    hyper_connection,
    quant_matmul,
    sparse_attention,
)
from mlx_ds4.custom_kernels._case import compare
from mlx_ds4.custom_kernels._kernel import Kernel, all_kernels, watch_launches
from mlx_ds4.custom_kernels._random_planes import random_planes
from mlx_ds4.custom_kernels._switches import use_kernels
from tests.cuda_host import COMPILER, launch, run, run_all

pytestmark = pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the bodies: install it to run them")
FORMATS = ("Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4", "FP8")


def rows_of(count: int, width: int, seed: int = 0) -> mx.array:
    x = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    return mx.array(x).astype(mx.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
def test_dense_product(on_cpu, format):
    """31 weight rows (a partial tile); results within float32 summation error, rows alone equal rows together."""
    planes = random_planes(np.random.default_rng(1), format, 32 if format == "FP8" else 31, 768)
    x = rows_of(11, 768)
    want = quant_matmul.quant_matmul_ref(x, format, planes, out_dtype=mx.float32)
    dense = functools.partial(_quant_cuda.dense, format=format, planes=planes, groups=1, out_dtype=mx.float32)
    many, few = run(lambda: dense(x)), run(lambda: dense(x[:3]))
    fault, error = compare(many, want, 1e-5)
    assert fault is None, (fault, error)
    assert mx.array_equal(few, many[:3])
    assert mx.array_equal(run(lambda: dense(x[1:2])), many[1:2])


@pytest.mark.parametrize("width", [512, 768])
def test_halves_of_words(on_cpu, width):
    """IQ2_XXS reads scales of two bytes four at a time: rows of two and of three, at a word and in its middle."""
    planes = random_planes(np.random.default_rng(1), "IQ2_XXS", 31, width)
    x, launches = rows_of(3, width), []
    with watch_launches(launches.append):
        _quant_cuda.dense(x, "IQ2_XXS", planes, groups=1, out_dtype=mx.float32)
    (item,) = launches
    want = quant_matmul.quant_matmul_ref(x, "IQ2_XXS", planes, out_dtype=mx.float32)
    for at in (0, 2):
        assert compare(launch(item.kernel, item.inputs, item.call, at)[0], want, 1e-5)[0] is None


@pytest.mark.parametrize("width", [512, 768, 2304])
def test_halves_of_words_of_experts(on_cpu, width):
    """The same of gate and up: experts and rows at a word and in its middle, a short tile, warps without steps."""
    rng = np.random.default_rng(15)
    gate, up = (random_planes(rng, "IQ2_XXS", 3, 19, width) for _ in range(2))
    x, chosen = rows_of(6, width), mx.array([[0, 1], [2, 1], [1, 0], [1, 2], [2, 1], [1, 0]], dtype=mx.int32)
    launches = []
    with watch_launches(launches.append):
        _quant_cuda.gate_up_few(x, "IQ2_XXS", gate, up, chosen, mx.ones((6, 2)), 10.0)
    (item,) = launches
    want = expert_matmul.expert_swiglu_ref(x, ("IQ2_XXS", gate), ("IQ2_XXS", up), chosen, mx.ones((6, 2)), limit=10.0)
    first, second = (launch(item.kernel, item.inputs, item.call, at)[0] for at in (0, 2))
    assert compare(first, want, 2e-3)[0] is None and mx.array_equal(first, second)


def test_grouped_product(on_cpu):
    planes = random_planes(np.random.default_rng(2), "Q8_0", 3 * 16, 128)
    x = rows_of(2, 3 * 128)
    want = quant_matmul.grouped_quant_matmul_ref(x, "Q8_0", planes, 3)
    got = run(lambda: _quant_cuda.dense(x, "Q8_0", planes, groups=3, out_dtype=mx.bfloat16))
    assert compare(got, want, 1e-5)[0] is None


@pytest.fixture
def small_blocks(monkeypatch):
    """Calls a function as on a card whose blocks have little shared memory: no body that asks for much has room."""

    def call(fn):
        with monkeypatch.context() as patch:
            patch.setattr(_kernel, "block_bytes", lambda: 99 << 10)
            return fn()

    return call


# Blocks at a time, weight rows of a group, width, groups: a team has one tile or several, or none; one, two, four and
# eight warps share a tile, of which an outermost one may have no output; rings of four, three and two steps.
FEW = [(1, 31, 768, 1), (2, 160, 256, 1), (4, 48, 2048, 2), (1, 80, 8192, 1)]
EVERY = [(3, 200, 1280, 1), (2, 96, 512, 3)]


@pytest.mark.parametrize(
    ("format", "blocks", "outputs", "width", "groups"),
    [*(("Q8_0", *shape) for shape in FEW), *((format, *shape) for format in FORMATS for shape in EVERY)],
)
def test_few_rows_in_shared_memory(on_cpu, monkeypatch, small_blocks, format, blocks, outputs, width, groups):
    """The bits of the body that reads x from memory, for one, six and eight rows."""
    if format == "FP8":
        outputs = -(-outputs // 32) * 32
    monkeypatch.setattr(_quant_cuda, "_DENSE_FEW_BLOCKS", blocks * groups)
    monkeypatch.setattr(_quant_cuda, "_DENSE_FEW_SPLIT", 1)
    monkeypatch.setattr(_quant_cuda, "_DENSE_FEW_UNEVEN", 9)
    monkeypatch.setattr(_quant_cuda, "_DENSE_FEW_FORMATS", FORMATS)
    planes = random_planes(np.random.default_rng(16), format, groups * outputs, width)
    x = rows_of(8, groups * width)
    dense = functools.partial(_quant_cuda.dense, format=format, planes=planes, groups=groups, out_dtype=mx.float32)
    want = small_blocks(lambda: run(lambda: dense(x)))
    assert not mx.any(mx.isnan(want))
    for rows in (slice(0, 8), slice(1, 7), slice(5, 6)):
        assert mx.array_equal(run(lambda rows=rows: dense(x[rows])), want[rows])


def test_where_few_rows_are_in_shared_memory(monkeypatch):
    """The real products of which each block has tiles, for 8 rows, too; not the head, whose warps have tiles of their
    own, nor 320 tiles on 132 multiprocessors, nor 9 rows, nor rows that leave no rings of two steps."""
    real, heads, uneven = (32768, 1280, 1), (129280, 5120, 1), (5120, 8192, 1)
    for N, K, groups in (real, (8192, 4096, 8)):
        for M in (1, 6, 8):
            template = dict(_quant_cuda._few_plan(M, "Q8_0", N, K, groups)[0])
            warp = template["STEPS"] * template["STEP_BYTES"] + _dense_few_cuda.SUMS_BYTES
            held = M * (2 * K + _dense_few_cuda.PADDING)
            assert template["STEPS"] >= 2
            assert template["S"] * template["TEAMS"] * warp + held <= _quant_cuda._dense_few.shared_memory
    assert _quant_cuda._few_plan(9, "Q8_0", *real) is None and _quant_cuda._few_plan(1, "MXFP4", *real) is None
    assert _quant_cuda._few_plan(1, "Q8_0", *heads) is None and _quant_cuda._few_plan(1, "Q8_0", *uneven) is None
    assert _quant_cuda._few_plan(8, "Q8_0", 132 * 16, 16384, 1) is None
    assert _quant_cuda._few_plan(4, "Q8_0", 132 * 16, 16384, 1)


def product_of(monkeypatch, x, format, planes, groups, dtype) -> tuple[str, mx.array]:
    """The kernel that the public operation launches on CUDA, and its result."""
    monkeypatch.setattr(quant_matmul, "backend", lambda: "cuda")
    launches = []
    with watch_launches(launches.append):
        quant_matmul._product(x, [(format, planes)], groups, [dtype])
    (item,) = launches
    return item.kernel.name, item.outputs[0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(128, 256, 256), (300, 288, 1280), (129, 160, 2304)])
def test_many_rows_have_the_bits_of_few(on_cpu, monkeypatch, format, rows, outputs, width):
    """One sum of two units; four of 3, 3, 2 and 2; eight of 3 and 2, and a last tile that overlaps another."""
    planes = random_planes(np.random.default_rng(11), format, outputs, width)
    x = rows_of(rows, width)
    name, got = product_of(monkeypatch, x, format, planes, 1, mx.float32)
    assert name == ("quant_matmul_mma" if format.endswith("_K") else "quant_matmul_tile")
    for some in (slice(0, 1), slice(64, 72), slice(rows - 100, rows)):
        few, want = product_of(monkeypatch, x[some], format, planes, 1, mx.float32)
        assert few in ("quant_matmul_mma", "quant_matmul_few_mma")
        assert mx.array_equal(got[some], want)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 131), (127, 131), (128, 127), (128, 131), (200, 136), (257, 300)])
def test_ragged_tiles(on_cpu, monkeypatch, small_blocks, rows, outputs, dtype):
    """Outputs that are no multiple of 8 are stored one by one; fewer than 128 of either take other kernels."""
    planes = random_planes(np.random.default_rng(12), "Q8_0", outputs, 512)
    x = rows_of(rows, 512)
    name, got = product_of(monkeypatch, x, "Q8_0", planes, 1, dtype)
    few = "quant_matmul_few_mma" if rows <= 8 else "quant_matmul_mma"
    assert name == ("quant_matmul_tile" if min(rows, outputs) >= 128 else few)
    want = small_blocks(lambda: run(lambda: _quant_cuda.dense(x, "Q8_0", planes, groups=1, out_dtype=dtype)))
    assert got.dtype == dtype and mx.array_equal(got, want)


@pytest.mark.parametrize(("groups", "rank"), [(2, 256), (3, 128), (3, 144)])
def test_groups_in_tiles(on_cpu, monkeypatch, groups, rank):
    """A group of 144 rows is no multiple of a tile."""
    planes = random_planes(np.random.default_rng(13), "Q8_0", groups * rank, 1024)
    x = rows_of(130, groups * 1024)
    name, got = product_of(monkeypatch, x, "Q8_0", planes, groups, mx.bfloat16)
    assert name == ("quant_matmul_mma" if rank % 128 else "quant_matmul_tile")
    assert mx.array_equal(got, run(lambda: _quant_cuda.dense(x, "Q8_0", planes, groups=groups, out_dtype=mx.bfloat16)))
    assert compare(got, quant_matmul.grouped_quant_matmul_ref(x, "Q8_0", planes, groups), 1e-5)[0] is None


GROUPS = [
    (("Q8_0", 31), ("Q8_0", 16), ("F16", 7), ("F32", 20), ("BF16", 3)),
    (("IQ2_XXS", 40), ("Q4_K", 17), ("F16", 6)),
    (("F32", 9), ("Q8_0", 2000)),
]


@pytest.mark.parametrize("kinds", GROUPS)
def test_matrices_of_different_formats_in_one_launch(on_cpu, kinds):
    """One, three and eight rows, the same bits; a quantized matrix has the bits of its own launch."""
    rng = np.random.default_rng(4)
    weights = [(format, random_planes(rng, format, rows, 1024)) for format, rows in kinds]
    dtypes = [mx.float32 if format in ("F16", "F32") else mx.bfloat16 for format, _ in kinds]
    x = rows_of(8, 1024)
    want = quant_matmul.quant_matmul_group_ref(x, weights, out_dtype=dtypes)
    got = run_all(lambda: _quant_group_cuda.together(x, weights, dtypes))
    for y, w, dtype, (format, planes) in zip(got, want, dtypes, weights, strict=True):
        assert compare(y, w, 1e-5)[0] is None
        if format in FORMATS:
            alone = run(lambda f=format, p=planes, d=dtype: _quant_cuda.dense(x, f, p, groups=1, out_dtype=d))
            assert mx.array_equal(y, alone)
    for rows in (slice(2, 3), slice(5, 8)):
        some = run_all(lambda rows=rows: _quant_group_cuda.together(x[rows], weights, dtypes))
        assert all(mx.array_equal(a, b[rows]) for a, b in zip(some, got, strict=True))


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
def test_float_rows_add_up_as_the_portable_text(on_cpu, format):
    """On CUDA a float matrix alone is multiplied by the translated text: the same order of sums, with 40 octets."""
    weight = (format, random_planes(np.random.default_rng(5), format, 5, 320))
    x = rows_of(3, 320)
    got = run_all(lambda: _quant_group_cuda.together(x, [weight, weight], [mx.float32] * 2))[1]
    exact = np.array(x.astype(mx.float32), np.float64) @ np.array(weight[1]["codes"].astype(mx.float32), np.float64).T
    lanes = [0.0] * 32
    assert np.abs(np.array(got) - exact).max() <= 1e-6
    w, v = (np.array(a.astype(mx.float32)) for a in (weight[1]["codes"], x))
    for octet in range(40):  # row 1 of x times row 4 of the weight, fused sums in float64 and then rounded
        dot = np.float32(w[4, 8 * octet] * v[1, 8 * octet])
        for i in range(1, 8):
            dot = np.float32(np.float64(w[4, 8 * octet + i]) * np.float64(v[1, 8 * octet + i]) + np.float64(dot))
        lanes[octet % 32] = np.float32(lanes[octet % 32] + dot)
    for step in (16, 8, 4, 2, 1):
        lanes = [np.float32(lanes[i] + lanes[i ^ step]) for i in range(32)]
    assert got[1, 4].item() == lanes[0]


@pytest.mark.parametrize("formats", [("IQ2_XXS", "Q2_K"), ("MXFP4", "MXFP4")])
@pytest.mark.parametrize("rows", [1, 4, 13])
def test_experts(on_cpu, monkeypatch, formats, rows):
    """Few rows (bit masks of pairs) and many (pairs sorted by expert) against the reference, and with one another."""
    rng = np.random.default_rng(3)
    E, K, F, C = 5, 3, 256, 256
    gate, up = (random_planes(rng, formats[0], E, F, C) for _ in range(2))
    planes = random_planes(rng, formats[1], E, C, F)
    x, shared = rows_of(rows, C), (rows_of(rows, 640, 1), ("Q8_0", random_planes(rng, "Q8_0", C, 640)))
    chosen = mx.array(np.sort(np.argsort(rng.random((rows, E)), axis=1)[:, :K], axis=1).astype(np.int32))
    weights = mx.array(rng.random((rows, K), dtype=np.float32))
    order = mx.array(np.argsort(np.array(chosen).reshape(-1), kind="stable").astype(np.int32))
    counts = np.bincount(np.array(chosen).reshape(-1), minlength=E)
    plan = (order, mx.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)))

    def product(x, format, planes):
        return run(lambda: _quant_cuda.dense(x, format, planes, groups=1, out_dtype=mx.bfloat16))

    def both(few: bool):
        inputs = (x, formats[0], gate, up, chosen, weights, 10.0)
        if few:
            a = run(lambda: _quant_cuda.gate_up_few(*inputs))
            return a, run(lambda: _quant_cuda.down_few(a, formats[1], planes, chosen, shared))
        a = run(lambda: _expert_tile_cuda.gate_up(*inputs, *plan))
        y = run(lambda: _expert_tile_cuda.down(a, formats[1], planes, *plan))
        return a, expert_matmul._sum(y, shared, product)

    reference = expert_matmul.expert_swiglu_ref(x, (formats[0], gate), (formats[0], up), chosen, weights, limit=10.0)
    many = both(few=False)
    assert compare(many[0], reference, 2e-3)[0] is None
    want = expert_matmul.expert_down_ref(many[0], (formats[1], planes), chosen, shared)
    assert compare(many[1], want, 2e-3)[0] is None
    if rows > 8:
        monkeypatch.setattr(_kernel, "block_bytes", lambda: 99 << 10)  # of a card whose blocks have less: fewer pairs
        assert _expert_tile_cuda._gate_up_small.has_room and not _expert_tile_cuda._gate_up.has_room
        for got, same in zip(both(few=False), many, strict=True):
            assert mx.array_equal(got, same)
    else:
        for got, same in zip(both(few=True), many, strict=True):
            assert mx.array_equal(got, same)
        monkeypatch.setattr(_quant_cuda, "SMS", 1)  # a block then makes several tiles
        assert mx.array_equal(both(few=True)[0], many[0])
        ready = product(shared[0], *shared[1])  # for a weight that tensor cores do not take
        for held in (_quant_cuda._DOWN_HELD, 128):  # bytes for activations: for all, for the sums of one row alone
            monkeypatch.setattr(_quant_cuda, "_DOWN_HELD", held)
            added = run(lambda: _quant_cuda.down_few(many[0], formats[1], planes, chosen, ready))
            assert mx.array_equal(added, many[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "part", "outputs"), [(9, 256, 160), (110, 512, 32), (9, 1024, 16)])
def test_many_rows_of_experts_have_the_bits_of_few(on_cpu, format, rows, part, outputs):
    """110 rows: one expert has them all, in three parts, one none, one a single row; sums of different lengths. A block
    has 128 weight rows, so the last ones of 160 and most of 32 have none of their own. Most of a sum cancels, so that
    another order of adding up shows in bfloat16."""
    rng = np.random.default_rng(14)
    E = 6

    def weight() -> dict[str, mx.array]:
        ends, middle = (random_planes(rng, format, E, outputs, columns) for columns in (part, 256))
        return {name: mx.concatenate([plane, middle[name], plane], axis=-1) for name, plane in ends.items()}

    def activations(count: int, seed: int) -> mx.array:
        ends = 4096 * rows_of(count, part, seed)
        return mx.concatenate([ends, rows_of(count, 256, seed + 1), -ends], axis=-1)

    gate, up, down = weight(), weight(), weight()
    x, a = activations(rows, 0), activations(2 * rows, 2).reshape(rows, 2, -1)
    chosen = np.stack([np.full(rows, 2), rng.choice([0, 1, 3], rows)], axis=1).astype(np.int32)
    chosen[5, 1] = 5
    weights = mx.array(rng.random((rows, 2), dtype=np.float32))
    order, starts = expert_matmul._plan(mx.array(chosen), E)[:2]
    swiglu = run(lambda: _expert_tile_cuda.gate_up(x, format, gate, up, chosen, weights, 10.0, order, starts))
    y = run(lambda: _expert_tile_cuda.down(a, format, down, order, starts))
    assert not mx.any(mx.isnan(swiglu)) and not mx.any(mx.isnan(y))
    for i in range(0, rows, 8):
        some = slice(i, i + 8)
        c = mx.array(chosen[some])
        few = run(lambda s=some, c=c: _quant_cuda.gate_up_few(x[s], format, gate, up, c, weights[s], 10.0))
        assert mx.array_equal(swiglu[some], few)
        few = run(lambda s=some, c=c: _quant_cuda.down_few(a[s], format, down, c, None))
        assert mx.array_equal(y[some].astype(mx.float32).sum(1).astype(mx.bfloat16), few)


@pytest.mark.parametrize("format", FORMATS)
def test_tiles_of_one_block(on_cpu, monkeypatch, format):
    """Warps that go through many tiles, with activations of all pairs of an expert in shared memory, of two or of none,
    have the bits of those with one tile. Three units of columns, in halves of two and one, or six."""
    rng = np.random.default_rng(15)
    planes, rows = random_planes(rng, format, 2, 160, 768), 5
    a, chosen = rows_of(2 * rows, 768).reshape(rows, 2, 768), mx.array(np.tile(np.int32([0, 1]), (rows, 1)))
    want = run(lambda: _quant_cuda.down_few(a, format, planes, chosen, None))
    assert compare(want, expert_matmul.expert_down_ref(a, (format, planes), chosen, None), 2e-3)[0] is None
    monkeypatch.setattr(_quant_cuda, "SMS", 1)
    grid = 4096 * (format == "IQ2_XXS")
    for held in (_quant_cuda._DOWN_HELD, 2 * 1900 + grid, 304 + grid):  # the last: for sums of Q2_K alone
        monkeypatch.setattr(_quant_cuda, "_DOWN_HELD", held)
        assert mx.array_equal(run(lambda: _quant_cuda.down_few(a, format, planes, chosen, None)), want)


def test_sums_of_a_row_find_room():
    """Otherwise another text takes over: the sums of a row of Q2_K are 96 bytes for 256 columns."""
    for width, fits in ((768, True), (38656, True), (39168, False)):
        a = mx.zeros((1, 2, width), dtype=mx.bfloat16)
        assert _quant_cuda.takes_down(a, "Q2_K") == fits and _quant_cuda.takes_down(a, "Q8_0")


@pytest.mark.parametrize("formats", [("Q8_0", "Q8_0", "F32"), ("IQ2_XXS", "MXFP4", "Q8_0"), ("FP8", "FP8", "F16")])
def test_first_half_of_the_feed_forward_part(on_cpu, formats):
    """Same bits as the products alone and the SwiGLU of the portable text; one row alone as among eight."""
    rng = np.random.default_rng(6)
    C, F, E = 1024, 64, 24
    gate, up, router = ((f, random_planes(rng, f, n, C)) for f, n in zip(formats, (F, F, E), strict=True))
    x, r = rows_of(8, C), rows_of(8, C, 1)
    half = functools.partial(_quant_group_cuda.shared_swiglu, gate=gate, up=up, router=router, limit=0.5)
    logits, a = run_all(lambda: half(x, router_x=r))
    g, u = (run(lambda w=w: _quant_cuda.dense(x, *w, groups=1, out_dtype=mx.bfloat16)) for w in (gate, up))
    g, u = mx.minimum(g.astype(mx.float32), 0.5), mx.clip(u.astype(mx.float32), -0.5, 0.5)
    assert (
        compare(a, (g * (1 / (1 + mx.exp(-g))) * u).astype(mx.bfloat16), 0.0)[0] is None
    )  # the exponential's last bit
    want = run_all(lambda: _quant_group_cuda.together(r, [router, router], [mx.float32] * 2))[0]
    assert mx.array_equal(logits, want)
    assert compare(logits, quant_matmul.quant_matmul_ref(r, *router, out_dtype=mx.float32), 1e-5)[0] is None
    alone = run_all(lambda: half(x[5:6], router_x=r[5:6]))
    assert mx.array_equal(alone[0], logits[5:6]) and mx.array_equal(alone[1], a[5:6])


def streams_of(rows: int, M: int, C: int) -> tuple[mx.array, mx.array]:
    """h, and the coefficients that expand a result into it."""
    mix = np.random.default_rng(7).standard_normal((rows, M + M * M), dtype=np.float32)
    return rows_of(rows * M, C, 8).reshape(rows, M, C), mx.array(mix)


def expanded(y: mx.array, h: mx.array, mix: mx.array) -> mx.array:
    """As `expand`'s kernel makes it, in fused products and sums: they fit into float64, rounded to float32 each."""
    M = h.shape[-2]
    y, h = (np.array(array.astype(mx.float32), np.float64) for array in (y, h))
    post, comb = (np.array(array, np.float64) for array in hyper_connection.unmix(mix, M))
    out = []
    for k in range(M):
        sum_ = comb[:, 0, k, None] * h[:, 0]
        for j in range(1, M):
            sum_ = sum_.astype(np.float32) + comb[:, j, k, None] * h[:, j]
        out.append((sum_.astype(np.float32) + post[:, k, None] * y).astype(np.float32))
    return mx.array(np.stack(out, axis=1)).astype(mx.bfloat16)


@pytest.mark.parametrize(("rows", "M", "C"), [(19, 4, 40), (8, 2, 33), (37, 2, 1024), (17, 4, 129)])
def test_partial_sums_of_many_rows(on_cpu, rows, M, C):
    """A short last tile, short and empty parts; the bits of each row alone by the portable kernel."""
    rng = np.random.default_rng(11)
    h = rows_of(rows * M, C, 12).reshape(rows, M, C)
    fn = mx.array(rng.standard_normal((M * (M + 2), M * C), dtype=np.float32))
    got = run(lambda: hyper_connection._many_dots(h, fn))
    pre, weight = mx.zeros((rows, M)), mx.ones(C, dtype=mx.bfloat16)
    want = hyper_connection.site_ref(h, pre, fn, weight, norm_eps=1e-6)[1]
    fault, error = compare(got.sum(axis=1), want[:, 0], 1e-5)
    assert fault is None, (fault, error)
    launches = []
    with watch_launches(launches.append), use_kernels("emulate"):
        for row in (0, rows - 1):
            hyper_connection.site(h[row : row + 1], pre[:1], fn, weight, norm_eps=1e-6)
    for row, item in zip((0, rows - 1), launches, strict=True):
        assert mx.array_equal(item.outputs[1][0], got[row])


@pytest.mark.parametrize(("M", "C", "width"), [(4, 40, 128), (2, 72, 1024), (1, 16, 256), (4, 40, 2048), (4, 33, 4096)])
def test_projection_that_expands(on_cpu, M, C, width):
    """One, two, four and eight warps for 16 rows; one row alone as among three."""
    weight = ("Q8_0", random_planes(np.random.default_rng(9), "Q8_0", C, width))
    x, (h, mix) = rows_of(3, width), streams_of(3, M, C)
    got = run(lambda: _expand_cuda.project(x, weight, h, mix))
    y = run(lambda: _quant_cuda.dense(x, *weight, groups=1, out_dtype=mx.bfloat16))
    assert mx.array_equal(got, expanded(y, h, mix))
    assert mx.array_equal(run(lambda: _expand_cuda.project(x[1:2], weight, h[1:2], mix[1:2])), got[1:2])


@pytest.mark.parametrize("rows", [1, 6, 8])
def test_experts_that_expand(on_cpu, rows):
    rng = np.random.default_rng(10)
    E, K, F, C = 5, 2, 256, 40
    down, shared = ("Q2_K", random_planes(rng, "Q2_K", E, C, F)), ("Q8_0", random_planes(rng, "Q8_0", C, F))
    a, s, (h, mix) = rows_of(rows * K, F).reshape(rows, K, F), rows_of(rows, F, 1), streams_of(rows, 4, C)
    chosen = mx.array(np.sort(np.argsort(rng.random((rows, E)), axis=1)[:, :K], axis=1).astype(np.int32))
    got = run(lambda: _expand_cuda.experts(a, down, chosen, (s, shared), h, mix))
    y = run(lambda: _quant_cuda.down_few(a, *down, chosen, (s, shared)))
    assert mx.array_equal(got, expanded(y, h, mix))


def test_small_blocks_leave_the_large_bodies_alone(monkeypatch):
    """Cards of 99 KB a block (workstations, DGX Spark) multiply by bodies that fit; 163 KB suffice for all."""
    planes = random_planes(np.random.default_rng(0), "IQ2_XXS", 2, 256, 256)
    x, chosen = rows_of(2, 256), mx.zeros((2, 1), dtype=mx.int32)
    names = {}
    monkeypatch.setattr(expert_matmul, "backend", lambda: "cuda")
    monkeypatch.setattr(expert_matmul, "enabled", lambda family: True)
    monkeypatch.setattr(Kernel, "_launch", lambda self, inputs, call: [mx.zeros(call["output_shapes"][0])])
    for kilobytes in (99, 163, 227):
        monkeypatch.setattr(_kernel, "block_bytes", lambda kilobytes=kilobytes: kilobytes << 10)
        with watch_launches(lambda launch, kilobytes=kilobytes: names.setdefault(kilobytes, launch.kernel.name)):
            gate = ("IQ2_XXS", planes)
            expert_matmul.expert_swiglu(x, gate, gate, chosen, mx.ones((2, 1)), limit=10.0)
    assert names == {99: "expert_gate_up", 163: "expert_swiglu_few_wide_mma", 227: "expert_swiglu_few_wide_mma"}
    fits = {k.name for k in all_kernels() if k.shared_memory and k.has_room}
    large = {"quant_matmul_tile", "quant_matmul_few_mma", "sparse_attention_few"}
    assert large | set(names.values()) - {"expert_gate_up"} <= fits
    for kilobytes in (99, 163):
        monkeypatch.setattr(_kernel, "block_bytes", lambda kilobytes=kilobytes: kilobytes << 10)
        assert sparse_attention._few_kernel.has_room == (kilobytes == 163)
