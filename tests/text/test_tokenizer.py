"""Byte-level BPE from GGUF arrays and from folders, against the `tokenizers` library on the package's own file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ds4.tokenizer import Tokenizer

NANO = Path(__file__).parent.parent / "golden" / "nano" / "model"
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFabcdef_0123456789",
    "0123456789",
    "٠١٢٣٤٥٦٧٨٩๑๒๓Ⅳ½²",
    " \t\n\r",
    "  \u00a0\u2003\u3000\u200b\ufeff",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "，。！？、「」《》“”…—·€£→∀≠©",
    "的一是在不了有和人这中大为上个国我以要他",
    "あいうえおかきくけこアイウエオカキクケコー",
    "가나다라마바사한국어",
    "абвгдежзийкЁЯЩ",
    "αβγδεζηθΣΩ",
    "אבגדהוזחط ابتثجحخ",
    "कखगघङचािीुू्",
    "กขฃคฅฆงจ่้",
    "éèüßñçøåÅĳﬁ",
    "e\u0301a\u0308o\u0302",
    "🧪👩‍🔬🇳🇴👍🏽😀🎉",
    "\x00\x01\x1b\x7f\u0378\U000e0041\U0010ffff",
]
PIECES = [
    "def main(args):\n    return args[0] + 1\n",
    "for (int i = 0; i < n; ++i) {\r\n\t\tx[i] *= 2;\r\n}",
    "SELECT * FROM t WHERE a>=10 AND b<>'x';",
    "https://example.org/a?b=c&d=%20#e",
    "rfid501.go",
    "3.14159e-10",
    "1,234,567",
    "don't I'll we've",
    '{"k": [1, 2.5, null, true]}',
    "漢字かな交じり文123",
    "\n\n\n",
    "    ",
    "<|EOT|",
    "<｜User",
    "</think",
    "｜DSML｜DSML｜",
]


def mixed_strings(count: int, added: list[str]) -> list[str]:
    rng = random.Random(20410)
    out = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 8)):
            kind = rng.random()
            if kind < 0.6:
                letters = rng.choice(ALPHABETS)
                parts.append("".join(rng.choice(letters) for _ in range(rng.randint(1, 9))))
            elif kind < 0.8:
                parts.append(rng.choice(PIECES))
            elif kind < 0.9:
                parts.append(rng.choice(added))
            else:
                parts.append(chr(rng.choice([rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x20000)])))
            if rng.random() < 0.4:
                parts.append(" ")
        out.append("".join(parts))
    return out


@pytest.fixture(scope="module")
def strings(package_json) -> list[str]:
    return mixed_strings(4000, [token["content"] for token in package_json["added_tokens"]])


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    return Tokenizer.from_folder(NANO)


def test_4000_strings_have_the_ids_of_the_reference(real, reference, strings):
    wrong = [text for text in strings if real.encode(text) != reference.encode(text).ids]
    assert wrong == []
    assert all(real.decode(real.encode(text)) == text for text in strings)


def test_without_special_spellings_only_ordinary_ids_appear(real, reference, strings):
    twin = tokenizers.Tokenizer(reference.model)
    twin.pre_tokenizer = reference.pre_tokenizer
    added = set(reference.get_added_tokens_decoder())
    met = 0
    for text in strings[:1500]:
        ids = real.encode(text, allow_special=False)
        assert ids == twin.encode(text).ids
        assert not added & set(ids)
        assert real.decode(ids) == text
        met += bool(added & set(real.encode(text)))
    assert met > 400  # the strings do hold special spellings


def test_every_token_is_the_reference_s(real, reference):
    assert real.vocab_size == 129_280
    assert real.get_vocab() == reference.get_vocab(with_added_tokens=True)
    for i in [0, 1, 2, 300, 127_999, 128_799, 128_821, 128_825, 129_264, 129_279]:
        assert real.id_to_token(i) == reference.id_to_token(i)
        assert real.token_id(reference.id_to_token(i)) == i
    assert (real.bos_token_id, real.eos_token_id, real.pad_token_id) == (0, 1, 2)
    assert (real.bos_token, real.eos_token) == ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
    assert real.eos_token_ids == {1}


def test_older_spellings_of_two_added_tokens_are_renamed(nano):
    records = Tokenizer.from_folder(NANO).gguf_metadata()
    del records["tokenizer.huggingface.json"]
    tokens = records["tokenizer.ggml.tokens"]
    system, image = tokens.index("<｜System｜>"), tokens.index("<｜deepseek_image｜>")
    tokens[system], tokens[image] = "<｜place▁holder▁no▁799｜>", "<｜image2｜>"
    old = Tokenizer.from_gguf_metadata(records)
    assert old.get_vocab() == nano.get_vocab()
    assert old.encode("<｜System｜>x") == [system, *nano.encode("x")]


def test_gguf_records_are_written_as_they_were_read(real, metadata):
    written = real.gguf_metadata()
    assert written.pop("tokenizer.ggml.padding_token_id") == 2
    assert written == metadata


def test_decode_of_random_ids_is_the_reference_s(real, reference):
    rng = np.random.default_rng(7)
    for _ in range(300):
        ids = rng.integers(0, real.vocab_size, rng.integers(1, 20)).tolist()
        assert real.decode(ids) == reference.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", [" Paris is", " "], ids=["D01-words", "D01-space"])
def test_d01_the_first_space_is_kept(real, text):
    ids = {" Paris is": [11111, 344], " ": [223]}[text]
    assert real.encode(text) == ids
    assert "".join(stream(real, ids)) == real.decode(ids) == text


def test_d02_a_character_split_over_tokens_appears_once_and_whole(real):
    text = "ok 🧪漢"
    ids = real.encode(text)
    assert len(ids) == 5
    assert real.decode(ids) == text
    assert stream(real, ids) == ["ok", " ", "", "🧪", "漢", ""]


def test_d03_digits_split_in_threes(real):
    assert real.encode("rfid501.go") == [35305, 329, 19097, 68082]
    assert [real.decode([i]) for i in real.encode("1234567")] == ["123", "456", "7"]


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer
    deltas = []
    for i in ids:
        detokenizer.add_token(i)
        deltas.append(detokenizer.last_segment)
        assert detokenizer.text == "".join(deltas)
    detokenizer.finalize()
    deltas.append(detokenizer.last_segment)
    assert detokenizer.last_segment == ""
    assert detokenizer.tokens == ids
    assert detokenizer.text == "".join(deltas)
    for delta in deltas:
        delta.encode("utf-8")
    return deltas


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(-5, 600), st.integers(97, 260)), max_size=40))
def test_streaming_joins_to_decode_for_any_ids(nano, ids):
    """Ids 97 to 258 are single bytes of characters; ids from 512 on, and negative ones, do not exist."""
    assert "".join(stream(nano, ids)) == nano.decode(ids)


def test_streaming_gives_each_character_with_the_token_that_completes_it(nano):
    text = "añ🧪b"
    ids = nano.encode(text)
    data = b""
    for i, delta in zip(ids, stream(nano, ids), strict=False):
        before, data = data, data + nano.id_to_bytes(i)
        assert delta == data.decode(errors="ignore")[len(before.decode(errors="ignore")) :]


def test_reset_starts_over(nano):
    detokenizer = nano.detokenizer
    detokenizer.add_token(nano.encode("🧪")[0])
    detokenizer.reset()
    detokenizer.add_token(nano.encode("a")[0])
    assert (detokenizer.text, detokenizer.last_segment, len(detokenizer.tokens)) == ("a", "a", 1)


def test_a_long_stream_costs_linear_time(nano):
    detokenizer, ids = nano.detokenizer, nano.encode("a b") * 30_000
    start = time.perf_counter()
    pieces = []
    for i in ids:
        detokenizer.add_token(i)
        pieces.append(detokenizer.last_segment)
    assert "".join(pieces) == detokenizer.text
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("text", ["漢" * 100_000, "a" * 100_000, " " * 100_000 + "x", "<" * 100_000, "<｜" * 50_000])
def test_long_runs_of_one_character_are_encoded_in_bounded_time(real, text):
    start = time.perf_counter()
    assert real.decode(real.encode(text)) == text
    assert time.perf_counter() - start < 10


def test_begin_token_is_added_once(nano):
    assert nano.encode("he", add_special_tokens=True) == [0, *nano.encode("he")]
    assert nano.encode("<｜begin▁of▁sentence｜>he", add_special_tokens=True) == [0, *nano.encode("he")]
    assert nano.encode("", add_special_tokens=True) == [0]
    assert nano.encode("") == []


def test_the_longest_special_spelling_wins_at_each_place():
    records = Tokenizer.from_folder(NANO).gguf_metadata()
    tokens = [*records["tokenizer.ggml.tokens"], "<think><x", "<think><xy>"]
    del records["tokenizer.huggingface.json"]
    records |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    tokenizer = Tokenizer.from_gguf_metadata(records)
    assert tokenizer.encode("<think><xy>")[0] == len(tokens) - 1
    assert tokenizer.encode("<think><xz")[0] == len(tokens) - 2
    assert tokenizer.encode("<think><zz")[0] == tokenizer.token_id("<think>")


@pytest.mark.parametrize("folder", ["nano", "nano_k"])
def test_folder_equals_the_library_and_survives_saving(folder, tmp_path, strings):
    source = NANO.parent.parent / folder / "model"
    reference = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    ours = Tokenizer.from_folder(source)
    ours.save(tmp_path / "new")
    again = Tokenizer.from_folder(tmp_path / "new")
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json"))
    carried = Tokenizer.from_gguf_metadata(json.loads(json.dumps(ours.gguf_metadata())))
    for text in strings[:500]:
        ids = reference.encode(text).ids
        assert ours.encode(text) == again.encode(text) == saved.encode(text).ids == carried.encode(text) == ids
    for tokenizer in (again, carried):
        assert tokenizer.get_vocab() == ours.get_vocab() == reference.get_vocab(with_added_tokens=True)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def test_mlx_lm_can_wrap_it(nano):
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    wrapper = TokenizerWrapper(nano)
    assert wrapper.eos_token_ids == {1}
    assert wrapper.bos_token == nano.bos_token
    assert wrapper.think_end == "</think>"
    detokenizer, ids = wrapper.detokenizer, nano.encode(" Paris 🧪 is")
    detokenizer.reset()
    for i in ids:
        detokenizer.add_token(i)
    detokenizer.finalize()
    assert detokenizer.text == " Paris 🧪 is"


def test_importing_the_module_loads_neither_library():
    code = "import sys, mlx_ds4.tokenizer; print([m for m in ('tokenizers', 'sentencepiece') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=NANO.parents[3])
    assert result.stdout.strip() == "[]", result.stderr
