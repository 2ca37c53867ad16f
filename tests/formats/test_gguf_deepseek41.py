"""The deepseek41 dialect: the released header in full, and every way in which metadata can be wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from mlx_ds4.formats.deepseek41 import check_metadata
from mlx_ds4.formats.gguf import FormatError, GGUFFile
from mlx_ds4.formats.sidecar import check_sidecar
from tests.formats import build_gguf as b

P = "deepseek41."
ENGRAM = P + "engram."


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse file with the released model's whole header: 340 GiB apparent, a few MB real."""
    records = [(key, *item) for key, item in b.released_records().items()]
    raw, _, size = b.header(records, b.released_entries(), 16384)
    path = tmp_path_factory.mktemp("released") / "DeepSeek-V4.1-Flash-Q2.gguf"
    path.write_bytes(raw)
    try:
        os.truncate(path, size)
    except OSError as error:
        pytest.skip(f"this file system cannot hold a sparse file of {size} bytes: {error}")
    return path


def test_released_header_parses_at_its_published_offsets(released: Path) -> None:
    best = np.inf
    for _ in range(3):
        start = time.thread_time()  # not wall time: the machine may be busy with other tests
        gguf = GGUFFile(released)
        best = min(best, time.thread_time() - start)
    assert best < 0.5
    start = time.thread_time()
    assert check_metadata(gguf, strict=True) == []
    assert time.thread_time() - start < 1
    assert check_metadata(gguf) == []
    assert len(gguf.metadata) == 67 and len(gguf.tensors) == 1046
    assert gguf.size == 365_713_686_528 and gguf.data_start == 5_832_704
    assert gguf.tensors["blk.1.engram_embd.weight"].offset == 162_955_640_832
    assert gguf.tensors["blk.14.engram_embd.weight"].offset == 264_333_279_232
    assert gguf.tensors["blk.0.ffn_down_exps.weight"].nbytes == 1_486_356_480
    assert len(gguf.metadata["tokenizer.ggml.tokens"]) == 129280
    assert gguf.metadata["tokenizer.ggml.tokens"][128804] == "<｜Assistant｜>"
    assert gguf.metadata[ENGRAM + "token_map"].dtype == np.uint32
    assert len(gguf.fingerprint()) == 64


def test_rows_beyond_4_gib_and_100_gib(released: Path, tmp_path: Path) -> None:
    # The last row of a table lies behind byte 2^36: any 32-bit arithmetic on rows or offsets shows.
    gguf = GGUFFile(released)
    table = gguf.tensors["blk.14.engram_embd.weight"]
    rows = np.array([384_016_681, 0, 16_300_000, 384_016_681])
    with open(released, "r+b") as file:
        for mark, row in enumerate(np.unique(rows).tolist(), 1):
            file.seek(table.offset + 264 * row)
            file.write(bytes([mark]) * 264)
    gguf = GGUFFile(released)
    assert gguf.read_rows("blk.14.engram_embd.weight", rows)[:, [0, 263]].tolist() == [[3, 3], [1, 1], [2, 2], [3, 3]]
    assert gguf.read("blk.14.engram_embd.weight", table.nbytes - 264).tolist() == [3] * 264


@pytest.mark.parametrize(
    ("key", "wrong", "fragment"),
    [
        ("hidden_size", 4096, "hidden_size is 4096, expected 5120"),
        ("rms_norm_eps", 1e-6, "expected 1e-20"),
        ("rope_theta", 10000.0, "rope_theta has type f32, expected u32"),
        ("kv_source_layer_ids", [2, 8, 14, 21], "expected [2, 8, 14, 20]"),
        ("engram.pad_id", 3, "pad_id is 3, expected 2"),
    ],
)
def test_strict_asks_for_the_released_numbers(tmp_path: Path, key: str, wrong: object, fragment: str) -> None:
    # A vocabulary is not reached: the fault lies before it.
    records = {**b.tiny_records(), **b.scalars(b.RELEASED)}
    records["general.alignment"] = ("u32", 16384)
    for name, kind, value in (
        ("engram.encoding", "string", "e4m3_e8m0_32_row264"),
        ("engram.layer_ids", "[u32]", [1, 14]),
        ("engram.rows", "[u32]", [384006168, 384016682]),
        ("engram.compressed_vocab_size", "u32", 99092),
    ):
        records[P + name] = (kind, value)
    path = tmp_path / "x.gguf"
    path.write_bytes(b.build([(k, *v) for k, v in records.items()], [("token_embd.weight", (8,), "F32", b"")], 16384))
    with pytest.raises(FormatError) as before:
        check_metadata(GGUFFile(path), strict=True)
    assert fragment not in str(before.value)
    kind = b._KIND_OF[type(wrong)]
    records[P + key] = (kind, wrong)
    path.write_bytes(b.build([(k, *v) for k, v in records.items()], [("token_embd.weight", (8,), "F32", b"")], 16384))
    with pytest.raises(FormatError) as error:
        check_metadata(GGUFFile(path), strict=True)
    assert fragment in str(error.value)


def check(tmp_path: Path, records: dict | None = None, entries: list | None = None) -> list[str]:
    path = tmp_path / "x.gguf"
    path.write_bytes(b.tiny_file(records, entries))
    with GGUFFile(path) as gguf:
        return check_metadata(gguf)


def test_a_tiny_model_is_valid(tmp_path: Path) -> None:
    assert check(tmp_path) == []


def test_no_engram_no_tokenizer_and_other_widths_are_structurally_valid(tmp_path: Path) -> None:
    records = {k: v for k, v in b.tiny_records().items() if not k.startswith((ENGRAM, "tokenizer."))}
    records[P + "compress_ratios"] = ("[i32]", [0, 2, 2, 1])
    records[P + "hidden_size"] = ("u64", 64)
    records[P + "rope_theta"] = ("f32", 10000.0)
    assert check(tmp_path, records, b.tiny_entries()[:2]) == [
        "the file holds no tokenizer, only token ids can be used with it"
    ]


def _tokens(*changes: tuple[int, str]) -> tuple[str, list[str]]:
    tokens = list(b.tiny_records()["tokenizer.ggml.tokens"][1])
    for index, token in changes:
        tokens[index] = token
    return "[string]", tokens


BIG = (2**63 - 1) // 200 + 1
WRONG = [
    # 35: Engram tables and their encoding
    (ENGRAM + "encoding", ("string", "conversion_underway"), "conversion_underway: an in-place conversion"),
    (ENGRAM + "encoding", ("string", "lloyd4_e5m3_32_r136"), "'lloyd4_e5m3_32_r136', expected e4m3_e8m0_32_row<N>"),
    (ENGRAM + "encoding", ("string", "e4m3_e8m0_32_row67"), "N = D + D/32"),
    (ENGRAM + "encoding", ("string", "e4m3_e8m0_32_row99"), "rows of 96 values, expected 64"),
    (ENGRAM + "layer_ids", ("[u32]", [1, 0]), "expected increasing layer numbers"),
    (ENGRAM + "layer_ids", ("[u32]", [0, 2]), "blk.2.engram_embd.weight is missing"),
    (ENGRAM + "layer_ids", ("[u32]", [0]), "rows has 2 entries, expected 1"),
    # 36: rows and primes
    (ENGRAM + "rows", ("[u32]", [630, 835]), "expected the sums of the primes [630, 834]"),
    (ENGRAM + "primes", ("[u32]", [1, *b.PRIMES[1:]]), "below 2 or a repeated one"),
    (ENGRAM + "primes", ("[u32]", [101, *b.PRIMES[1:]]), "below 2 or a repeated one"),
    (ENGRAM + "primes", ("[u32]", b.PRIMES[:-1]), "primes has 11 entries, expected 12"),
    (ENGRAM + "primes", ("[u32]", []), "primes has 0 entries, expected 12"),
    # 37: token map
    (ENGRAM + "token_map", ("[u32]", [200] + [0] * 263), "token_map reaches 200, expected 199"),
    (ENGRAM + "token_map", ("[u32]", [0] * 263), "token_map has 263 entries, expected 264"),
    (ENGRAM + "token_map", ("[f32]", [0.0] * 264), "token_map has type [f32], expected [u32]"),
    (ENGRAM + "token_map", ("[string]", ["0"] * 264), "token_map has type [string], expected [u32]"),
    (ENGRAM + "pad_id", ("u32", 200), "pad_id is 200, expected less than 200"),
    (ENGRAM + "compressed_vocab_size", ("u32", 0), "expected less than 0"),
    # 38: multipliers
    (ENGRAM + "multipliers", ("[u64]", [2, 5, 7, 9, 11, 13, 15, 17]), "even number or one above"),
    (ENGRAM + "multipliers", ("[u64]", [BIG + (BIG + 1) % 2, 5, 7, 9, 11, 13, 15, 17]), "even number or one above"),
    (ENGRAM + "multipliers", ("[u64]", [3] * 7), "multipliers has 7 entries, expected 8"),
    # 39: vocabulary
    ("tokenizer.ggml.tokens", ("[string]", ["a"]), "tokens has 1 entries, expected vocab_size 264"),
    ("tokenizer.ggml.tokens", _tokens((5, "<bos>")), "holds '<bos>' twice"),
    ("tokenizer.ggml.tokens", _tokens((262, "\udcff")), "token 262 of tokenizer.ggml.tokens is not UTF-8"),
    ("tokenizer.ggml.token_type", ("[i32]", [1] * 263), "token_type has 263 entries, expected vocab_size 264"),
    ("tokenizer.ggml.token_type", ("[i32]", [9] * 264), "token_type holds 9"),
    ("tokenizer.ggml.merges", ("[string]", ["ab"]), "merge 0 of tokenizer.ggml.merges is 'ab', expected two parts"),
    ("tokenizer.ggml.merges", ("[string]", ["a b", "a b c"]), "merge 1 of tokenizer.ggml.merges is 'a b c'"),
    ("tokenizer.ggml.merges", ("[string]", [" a"]), "merge 0 of tokenizer.ggml.merges is ' a'"),
    ("tokenizer.ggml.merges", ("[string]", ["a c"]), "expected parts and join to be tokens"),
    ("tokenizer.ggml.model", ("string", "bert"), "tokenizer.ggml.model is 'bert'"),
    ("tokenizer.ggml.pre", ("string", "default"), "expected 'joyai-llm'"),
    # 40: special tokens
    ("tokenizer.ggml.bos_token_id", ("u32", 264), "bos_token_id is 264, expected a token below 264"),
    ("tokenizer.ggml.eos_token_id", ("i32", -1), "eos_token_id is -1, expected a finite number from 0"),
    # 41: missing, wrong type, wrong value
    (P + "hidden_size", None, "deepseek41.hidden_size is missing"),
    (P + "hidden_size", ("string", "64"), "hidden_size has type string, expected u32"),
    (P + "hidden_size", ("f32", 64.5), "hidden_size is 64.5, expected a whole number"),
    (P + "hidden_size", ("u32", 0), "hidden_size is 0, expected a positive number"),
    (P + "hc_eps", ("f32", float("nan")), "hc_eps is nan"),
    (P + "norm_topk_prob", ("bool", False), "norm_topk_prob is False, expected True"),
    (P + "scoring_func", ("string", "softmax"), "scoring_func is 'softmax', expected 'sqrtsoftplus'"),
    (P + "config", ("string", "{"), "expected a JSON object"),
    (P + "config", ("string", "[" * 100_000), "expected a JSON object"),
    # 42: layers
    (P + "compress_ratios", ("[u32]", [0, 2, 2]), "compress_ratios has 3 entries, expected 4"),
    (P + "compress_ratios", ("[u32]", [0, 2, 2, 128]), "compress_ratios holds 128"),
    (P + "kv_source_layer_ids", ("[u32]", [3, 1]), "expected increasing layer numbers below 4"),
    (P + "index_source_layer_ids", ("[u32]", [1, 4]), "expected increasing layer numbers below 4"),
    (P + "candidate_source_layer_id", ("u32", 4), "candidate_source_layer_id is 4"),
    (P + "num_hidden_layers", ("u32", 2**32 - 1), "expected 4294967295, one per layer"),
    # 45: signed where unsigned is meant
    (P + "compress_ratios", ("[i32]", [0, 2, 2, -1]), "compress_ratios holds -1"),
    # 48: other kinds of files and dialects
    ("general.architecture", ("string", "llama"), "'llama', expected 'deepseek41'"),
    ("general.architecture", ("string", "deepseek4"), "DeepSeek V4 model"),
    ("general.architecture", ("u32", 4), "general.architecture is missing or no string"),
    ("general.architecture", ("string", "deepseek4-dspark"), "DSpark drafter"),
    ("general.architecture", ("string", "dflash"), "DSpark drafter"),
    ("general.architecture", ("string", "deepseek4-vision"), "vision encoder"),
    (P + "block_count", ("u32", 40), "llama.cpp's V4.1 names"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "item", "fragment"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)])
def test_wrong_metadata_is_refused(tmp_path: Path, key: str, item: tuple | None, fragment: str) -> None:
    records = b.tiny_records()
    if item is None:
        del records[key]
    else:
        records[key] = item
    with pytest.raises(FormatError) as error:
        check(tmp_path, records)
    assert fragment in str(error.value)
    assert str(error.value).startswith("x.gguf: ") and "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_wrong_engram_tables_are_refused(tmp_path: Path) -> None:
    good = b.tiny_entries()
    for entries, fragment in (
        (good[:3], "the Engram table blk.1.engram_embd.weight is missing"),
        ([*good[:3], (good[3][0], (833, 66), "I8")], "is I8 [833, 66], expected I8 [834, 66]"),
        ([*good[:3], (good[3][0], (834, 64), "I8")], "is I8 [834, 64], expected I8 [834, 66]"),
        ([*good[:3], (good[3][0], (834, 66), "F16")], "is F16 [834, 66], expected I8"),
        ([*good, ("late.weight", (4,), "F32")], "'late.weight' lies behind an Engram table"),
        ([*good[:2], ("blk.0.engram_embed.weight", (4,), "F32"), *good[2:]], "mxxm-t's V4.1 dialect"),
        ([("mtp.0.main_proj.weight", (4,), "F32"), *good[1:]], "DSpark drafter"),
    ):
        with pytest.raises(FormatError) as error:
            check(tmp_path, entries=entries)
        assert fragment in str(error.value)


def test_trailing_bytes_and_missing_byte_tokens_are_warnings(tmp_path: Path) -> None:
    records = b.tiny_records()
    records["tokenizer.ggml.tokens"] = _tokens((10, "<other>"))
    path = tmp_path / "x.gguf"
    path.write_bytes(b.tiny_file(records) + bytes(100))
    warnings = check_metadata(GGUFFile(path))
    assert len(warnings) == 2
    assert warnings[0].startswith("1 of the 256 byte tokens are missing")
    assert "bytes follow the last tensor" in warnings[1]


def test_sidecars(tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    target.write_bytes(b.tiny_file())

    def sidecar(architecture: str, **extra: tuple) -> list[str]:
        records = {"general.architecture": ("string", architecture), "general.source.revision": ("string", "0" * 40)}
        records |= {key.replace("__", "."): item for key, item in extra.items()}
        path = tmp_path / "side.gguf"
        path.write_bytes(
            b.build([(k, *v) for k, v in records.items()], [("mtp.0.ffn_gate_exps.weight", (8, 4, 4), "F32", b"")])
        )
        with GGUFFile(target) as model, GGUFFile(path) as side:
            return check_sidecar(model, side)

    v41 = {"dspark__checkpoint_variant": ("string", "v4.1-flash")}
    assert sidecar("deepseek41-dspark", deepseek4__dspark__target_layer_ids=("[u32]", [1, 2, 3])) == []
    assert sidecar("deepseek4-dspark", **v41, dspark__target_layer_ids=("[i32]", [1, 2])) == []
    assert sidecar("deepseek4-vision") == []
    warnings = sidecar("deepseek41-dspark", general__source__revision=("string", "1" * 40))
    assert len(warnings) == 1 and "source revision 1111" in warnings[0]
    for architecture, extra, fragment in (
        ("deepseek4-dspark", {}, "drafter of DeepSeek V4"),
        ("deepseek4-dspark", {"dspark__checkpoint_variant": ("string", "v4-flash")}, "expected 'v4.1-flash'"),
        ("deepseek41-dspark", {"dspark__target_layer_ids": ("[u32]", [40, 41, 42])}, "belongs to another model"),
        ("deepseek41-dspark", {"dspark__target_layer_ids": ("[string]", ["1"])}, "expected increasing layer numbers"),
        ("deepseek41-dspark", {"dspark__target_layer_ids": ("[u32]", [2, 1])}, "expected increasing layer numbers"),
    ):
        with pytest.raises(FormatError) as error:
            sidecar(architecture, **extra)
        assert fragment in str(error.value)
    records = b.tiny_records()
    records[P + "config"] = ("string", '{"dspark_n_routed_experts": 128}')
    target.write_bytes(b.tiny_file(records))
    with pytest.raises(FormatError, match="8 experts per stage, expected 128"):
        sidecar("deepseek41-dspark")
    with GGUFFile(target) as model, pytest.raises(FormatError, match="expected a drafter or a vision file"):
        check_sidecar(model, model)
