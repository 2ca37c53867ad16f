"""Packed cache rows: their bytes, the same bits back from hostile rows, what is refused, the benchmark's toy run."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import _packed, packed_rows
from benchmarks._packed import Packed, pack, packed_scores, same_bits, unpack, unpack_ref
from benchmarks.packed_rows import hostile, not_kept, random_packed, token_bytes
from mlx_ds4.config import ModelConfig
from mlx_ds4.convert.official_config import released_config
from mlx_ds4.convert.synthetic import tiny_config
from mlx_ds4.custom_kernels import _index_score_cuda
from mlx_ds4.custom_kernels._kernel import emulator_missing, watch_launches
from mlx_ds4.custom_kernels._switches import trace, use_kernels
from mlx_ds4.custom_kernels.fake_quant import fake_quant_fp4_e4m3
from mlx_ds4.custom_kernels.index_score import index_scores
from tests.cuda_host import COMPILER, launch

needs_emulator = pytest.mark.skipif(emulator_missing() is not None, reason=str(emulator_missing()))
MODES = ["reference", pytest.param("emulate", marks=needs_emulator)]
KINDS = ("fp4", "fp4_e4m3")


def test_bytes_of_a_token():
    """Three owners of ratio 2 and one of ratio 1: 2.5 rows a token."""
    config = ModelConfig.from_dict(released_config())
    packed, plain = (token_bytes(config, packed=flag) for flag in (True, False))
    assert packed == {"compressed rows": 2.5 * 288, "index keys": 2.5 * 68} and sum(packed.values()) == 890
    assert plain == {"compressed rows": 2560, "index keys": 640} and sum(plain.values()) == 3200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "width"), [("fp4_e4m3", 64), ("fp4_e4m3", 512), ("fp4", 32), ("fp4", 128)])
def test_hostile_rows_come_back(mode, kind, width):
    stored = hostile(width, kind)
    size = np.array(stored.view(mx.uint16)).astype(int) & 0x7FFF
    with use_kernels(mode):
        packed = pack(stored, kind)
        assert same_bits(unpack(packed), stored) and not_kept(stored, packed) == ""
    assert packed.nbytes == stored.shape[1] * _packed.row_bytes(width, kind)
    scales = set(np.array(packed.scales).ravel().tolist())
    if kind == "fp4":
        assert {1, 2, 253} <= scales and size.max() == 0x7F80 and ((size > 0) & (size < 128)).any()
    else:
        assert {*range(1, 9), 126} <= scales and size.max() == 0x4528  # 6 * 448
    assert mx.any(stored.view(mx.uint16) == 0x8000)  # zeros with a sign


def test_a_peak_below_the_largest_code():
    """Of e4m3's second scale four units can be the peak; it is the third of the first scale's codes that is kept."""
    stored = fake_quant_fp4_e4m3(mx.full((1, 1, 16), 4.7 * 2.0**-8))
    assert mx.all(stored == 2.0**-6)
    assert pack(stored, "fp4_e4m3").scales.item() == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_under_every_scale(mode, kind):
    """Against the value as NumPy multiplies it, in float64."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scales = np.arange(1, 252 if kind == "fp4" else 127)
    if kind == "fp4":
        of_scale = 2.0 ** (scales - 127.0)
    else:
        of_scale = np.where(scales > 7, (8 + scales % 8) * 2.0 ** (scales // 8 - 10), scales * 2.0**-9)
    width, block = 32, _packed.KINDS[kind][1]
    words = np.array([0x76543210, 0xFEDCBA98, 0x01234567, 0x89ABCDEF], dtype=np.uint32)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    values = np.array([[(int(word) >> 4 * j) & 15 for j in order] for word in words]).ravel()
    want = np.where(values > 7, -e2m1[values & 7], e2m1[values & 7]) * of_scale[:, None]
    packed = Packed(
        mx.array(np.tile(words, (1, len(scales), 1))),
        mx.array(np.tile(scales[None, :, None], width // block).astype(np.uint8)),
        kind,
    )
    with use_kernels(mode, **({"checked": False} if mode == "emulate" else {})):
        got = np.array(unpack(packed).view(mx.uint16))[0]
    got = (got.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got, want.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got), np.broadcast_to(values > 7, got.shape))


@needs_emulator
@pytest.mark.parametrize("order", ["forward", "backward", "random"])
@pytest.mark.parametrize("kind", KINDS)
def test_listed_rows(order, kind):
    """Two batches, rows that no entry has, a tail that does not fill a threadgroup."""
    packed = Packed(*(mx.concatenate([part, part[:, ::-1]]) for part in random_packed(9, 96, kind)[:2]), kind)
    index = mx.array([[0, 8, -1, 3, 3, 9, 1 << 30], [8, 7, 6, 5, -5, 0, 1]], dtype=mx.int32)
    rows = unpack_ref(packed)
    want = mx.stack(
        [mx.where(((i >= 0) & (i < 9))[:, None], rows[b][mx.clip(i, 0, 8)], 0) for b, i in enumerate(index)]
    )
    with use_kernels("emulate", order=order):
        assert same_bits(unpack(packed, index), want)
        assert same_bits(unpack(packed), rows)
    assert same_bits(unpack_ref(packed, index), want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_scale_is_noticed(kind):
    stored = hostile(64, kind)
    packed = pack(stored, kind)
    scales = np.array(packed.scales)
    scales[0, 60, 1] += 1
    assert not_kept(stored, packed._replace(scales=mx.array(scales))).startswith("1 of ")


def test_no_time_for_rows_that_change(monkeypatch):
    """A kernel that reads the scale of the block beside it ends the benchmark with the figures so far."""

    def wrong(packed, index=None):
        return unpack_ref(packed._replace(scales=packed.scales[..., ::-1]), index)

    monkeypatch.setattr(packed_rows, "unpack", wrong)
    with pytest.raises(ValueError, match="other bits after unpacking; do not keep rows"):
        packed_rows.main(["--toy", "--parts", "lossless,scores"])


def test_forms_that_differ_get_no_times(monkeypatch, capsys):
    monkeypatch.setattr(packed_rows, "packed_scores", lambda *arrays, factor: index_scores(*wrong(arrays)))

    def wrong(arrays):
        q, weights, keys, visible = arrays
        return q, weights, unpack(keys), visible

    assert packed_rows.main(["--toy", "--parts", "scores"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found and all(line["equal"] is False and "us" not in line for line in found)


@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_are_refused(kind):
    rows = mx.random.normal((1, 3, 32)).astype(mx.bfloat16)
    with pytest.raises(ValueError, match=f"no result of fake quantization of kind '{kind}'"):
        pack(rows, kind)
    with pytest.raises(ValueError, match="no result"):
        pack(mx.full((1, 1, 32), float("nan"), dtype=mx.bfloat16), kind)


@pytest.mark.skipif(COMPILER is None, reason="clang++-19 compiles the bodies: install it to run them")
@pytest.mark.parametrize(("L", "S", "H", "D"), [(1, 131, 32, 128), (34, 33, 4, 32)])
def test_scores_on_cuda_have_the_bits_of_unpacked_keys(monkeypatch, L, S, H, D):
    """Both CUDA bodies as C++: zeros, an infinite key, subnormal ones and every magnitude between."""
    rng = np.random.default_rng(0)
    assert _packed._LOAD in _index_score_cuda.SOURCE
    worst = hostile(D, "fp4")
    stored = mx.concatenate([worst[:, :3], worst[:, 3 - S :]], axis=1)
    q = mx.array(rng.integers(-6, 7, (1, L, H, D)).astype(np.float32)).astype(mx.bfloat16)
    weights = mx.array(rng.standard_normal((1, L, H)).astype(np.float32)).astype(mx.bfloat16)
    visible = mx.array(np.maximum(S - np.arange(L)[::-1], 0).astype(np.int32))
    packed = pack(stored, "fp4")
    monkeypatch.setattr(_packed, "backend", lambda: "cuda")
    monkeypatch.setattr(
        "mlx_ds4.custom_kernels._kernel.Kernel._launch",
        lambda self, inputs, call: [
            mx.zeros(shape, dtype=dtype)
            for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ],
    )
    results = []
    for fn in (
        lambda: index_scores(q, weights, stored, visible, factor=0.1),
        lambda: packed_scores(q, weights, packed, visible, factor=0.1),
    ):
        launches = []
        with watch_launches(launches.append):
            trace(fn)
        (item,) = launches
        results.append(launch(item.kernel, item.inputs, item.call)[0])
    assert [item.kernel.name] == ["packed_rows_scores"]
    assert mx.array_equal(*(x.view(mx.uint32) for x in results))


@pytest.mark.slow
def test_toy_run(capsys):
    assert packed_rows.main(["--toy"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all({"device", "os", "mlx", "commit"} <= line.keys() for line in found)
    config = tiny_config()
    totals = [line["total"] for line in found if line["figure"] == "bytes a token"]
    assert totals == [1.5 * 2 * (config.head_dim + config.index_head_dim), 1.5 * (36 + 17)]
    assert [line["kind"] for line in found if line["figure"] == "lossless"] == ["fp4_e4m3", "fp4"]
    for figure, forms in (("attention", "unpacking alone"), ("scores", "unpacked first")):
        lines = [line for line in found if line["figure"] == figure]
        assert [(line["rows"], line["form"]) for line in lines] == [
            (rows, form) for rows in packed_rows.TOY["rows"] for form in ("bf16", "packed", forms)
        ]
        assert all(line["equal"] and line["us"] > 0 and line["over_bf16"] > 0 for line in lines)
    with pytest.raises(SystemExit):
        packed_rows.main(["--parts", "speed"])
