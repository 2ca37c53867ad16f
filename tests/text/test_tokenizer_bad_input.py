"""Tokenizer files and GGUF records that are damaged or of another kind: refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mlx_ds4.tokenizer import Tokenizer, TokenizerError

NANO = Path(__file__).parent.parent / "golden" / "nano" / "model"


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    return Tokenizer.from_folder(NANO)


def small_records() -> dict:
    records = Tokenizer.from_folder(NANO).gguf_metadata()
    del records["tokenizer.huggingface.json"]
    return records


def changed(key: str, change) -> dict:
    records = small_records()
    value = change(records.get("tokenizer.ggml." + key))
    records["tokenizer.ggml." + key] = value
    return {name: item for name, item in records.items() if item is not None}


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("model", lambda _: "bert", "bert"),
        ("model", lambda _: None, "None"),
        ("pre", lambda _: "llama-bpe", "joyai-llm"),
        ("tokens", lambda _: None, "tokenizer.ggml.tokens"),
        ("tokens", lambda _: 3, "strings"),
        ("tokens", lambda v: [*v[:-1], 7], "strings"),
        ("tokens", lambda v: [*v[:-1], v[0]], "twice"),
        ("tokens", lambda v: v[:-1], "token types"),
        ("tokens", lambda v: [*v[:-1], "\udcff"], "refuses"),
        ("merges", lambda v: [*v, "he"], "merge 239"),
        ("merges", lambda v: [*v, "h e r"], "merge 239"),
        ("merges", lambda v: [*v, "zz zz"], "merge 239"),
        ("merges", lambda _: None, "merges"),
        ("token_type", lambda v: v[:-1], "token types"),
        ("token_type", lambda v: ["x", *v[1:]], "wrong type"),
        ("token_type", lambda _: 5, "wrong type"),
        ("eos_token_id", lambda _: 512, "below 512"),
        ("bos_token_id", lambda _: -1, "below 512"),
        ("eos_token_id", lambda _: "one", "wrong type"),
    ],
)
def test_bad_gguf_records_are_refused(key, change, words):
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.from_gguf_metadata(changed(key, change))
    assert "\n" not in str(caught.value)


def test_the_small_records_are_good():
    assert Tokenizer.from_gguf_metadata(small_records()).vocab_size == 512


def test_a_missing_byte_token_shows_when_it_is_needed():
    records = small_records()
    tokens = records["tokenizer.ggml.tokens"]
    tokens[tokens.index("#")] = "<｜no▁hash｜>"
    tokenizer = Tokenizer.from_gguf_metadata(records)
    assert tokenizer.decode(tokenizer.encode("plain é")) == "plain é"
    with pytest.raises(TokenizerError, match="35"):
        tokenizer.encode("a # b")


def test_half_surrogates_are_refused(nano):
    with pytest.raises(TokenizerError, match="character 2"):
        nano.encode("ab\ud83e")


def test_ids_outside_the_vocabulary(nano):
    for bad in (-1, 512):
        with pytest.raises(TokenizerError, match="0 to 511"):
            nano.id_to_bytes(bad)
    assert nano.decode([512, -1, 10**30]) == ""


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)


def edited(tmp_path: Path, edit) -> Path:
    data = json.loads((NANO / "tokenizer.json").read_text(encoding="utf-8"))
    edit(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.pop("model"), "lacks a part"),
        (lambda d: d["model"].update(type="WordPiece"), "byte-level BPE"),
        (lambda d: d["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda d: d["model"].update(ignore_merges=True), "ignore_merges"),
        (lambda d: d["model"].update(merges=[["h", "zz"]]), "refuses"),
        (lambda d: d["model"].update(merges=[["h"]]), "refuses"),
        (lambda d: d["model"]["vocab"].pop("he"), "id 259"),
        (lambda d: d["model"]["vocab"].update(new=1 << 40), "id 512"),
        (lambda d: d.update(normalizer={"type": "NFC"}), "normalizer"),
        (lambda d: d["added_tokens"][5].update(lstrip=True), "lstrip"),
        (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "ByteLevel"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="["), "refuses"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "add_prefix_space"),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused(edit, words, tmp_path):
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.from_folder(edited(tmp_path, edit))
    assert "\n" not in str(caught.value)


def test_damaged_bytes_never_do_worse_than_an_error(tmp_path):
    data = (NANO / "tokenizer.json").read_bytes()
    rng = random.Random(3)
    refused = 0
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        (tmp_path / "tokenizer.json").write_bytes(broken[: rng.choice([len(broken), rng.randrange(len(broken))])])
        try:
            Tokenizer.from_folder(tmp_path).encode("the <think> 12")
        except TokenizerError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("text", ["[1]", "{", '{"eos_token": "nowhere"}', '{"eos_token": [1]}', "[" * 100_000])
def test_a_bad_tokenizer_config_is_refused(text, tmp_path):
    edited(tmp_path, lambda d: None)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        Tokenizer.from_folder(tmp_path)
