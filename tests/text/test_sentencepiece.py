"""SentencePiece vocabularies: a model trained here, read from its file and from GGUF records of type llama."""

from __future__ import annotations

import io
import random

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ds4 import sentencepiece_file
from mlx_ds4.tokenizer import Tokenizer, TokenizerError

SENTENCES = [
    "the keeper of the light counts every lamp along the shore",
    "a second lamp burns where the first one stood last night",
    "she wrote the number twelve in the small green book",
    "über alle Wellen zählt der Wärter seine Lampen",
    "num = count(lamps) + 12; return num",
] * 4
TEXTS = [
    "the lamp",
    "  two  spaces ",
    "",
    " ",
    "zählt 漢字 🧪 é",
    "tab\tand\nnewline\r\n",
    "a<sep>b <pad> </s>x",
    "\x00 null",
]


def train(**options) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{
            "sentence_iterator": iter(SENTENCES),
            "model_writer": out,
            "vocab_size": 330,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "user_defined_symbols": ["<sep>", "<think>"],
            "pad_id": 3,
            "minloglevel": 2,
            "hard_vocab_limit": False,
        }
        | options
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def model() -> bytes:
    return train()


@pytest.fixture(scope="module")
def library(model) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("sp")
    (path / "tokenizer.model").write_bytes(model)
    return path


@pytest.fixture(scope="module", params=["folder", "gguf"])
def ours(request, folder) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer if request.param == "folder" else Tokenizer.from_gguf_metadata(tokenizer.gguf_metadata())


def test_ids_are_the_library_s(ours, library):
    """The library matches user-defined symbols by itself and takes control symbols for text."""
    rng = random.Random(1)
    words = [*" ".join(SENTENCES).split(), "<sep>", "  ", "漢", "🧪", "\n", "é"]
    texts = TEXTS[:6] + ["a" + " ".join(rng.choice(words) for _ in range(rng.randint(1, 9))) for _ in range(300)]
    for text in texts:
        ids = library.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == library.decode(ids) == text
    assert ours.vocab_size == library.vocab_size()
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 3)
    assert any(library.is_byte(i) for i in ours.encode("漢"))


def test_special_spellings_count_only_when_allowed(ours, library):
    text = "one</s>two<sep>"
    ids = ours.encode(text)
    assert ids.count(2) == 1 and ids[-1] == library.piece_to_id("<sep>")
    literal = ours.encode(text, allow_special=False)
    assert not {library.piece_to_id(piece) for piece in ("<s>", "</s>", "<sep>", "<think>", "<pad>")} & set(literal)
    assert ours.decode(ids) == ours.decode(literal) == text


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(ours, text):
    assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode(text, allow_special=False)) == text
    assert ours.decode(ours.encode(text, add_special_tokens=True)) == "<s>" + text


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer, out = tokenizer.detokenizer, ""
    for i in ids:
        detokenizer.add_token(i)
        out += detokenizer.last_segment
        assert detokenizer.text == out
    detokenizer.finalize()
    return out + detokenizer.last_segment


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(-2, 340), max_size=30))
def test_streaming_joins_to_decode_for_any_ids(ours, ids):
    assert joined(ours, ids) == ours.decode(ids)


def test_folder_survives_saving(ours, library, tmp_path):
    ours.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    saved = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in [*SENTENCES, *TEXTS[:5]]:
        assert again.encode(text) == ours.encode(text)
        assert saved.encode(text) == library.encode(text)
    assert again.get_vocab() == ours.get_vocab()
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (1, 2, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram", "vocab_size": 330},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
        {"byte_fallback": False, "vocab_size": 120},
    ],
    ids=["unigram", "nfkc", "no-prefix", "no-bytes"],
)
def test_other_models_encode_as_the_library_does(options, tmp_path):
    data = train(**options)
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    (tmp_path / "tokenizer.model").write_bytes(data)
    tokenizers = [Tokenizer.from_folder(tmp_path)]
    if "unigram" in options.values():
        with pytest.raises(TokenizerError, match="unigram"):
            tokenizers[0].gguf_metadata()
    else:
        tokenizers.append(Tokenizer.from_gguf_metadata(tokenizers[0].gguf_metadata()))
    for tokenizer in tokenizers:
        for text in [*SENTENCES[:5], "  two  spaces ", "ﬁ ½ 漢", "b<sep> a"]:
            ids = library.encode(text)
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == library.decode(ids)


def test_conversations_need_the_control_tokens(ours):
    with pytest.raises(TokenizerError, match="begin▁of▁sentence"):
        ours.apply_chat_template([{"role": "user", "content": "x"}])
    text = ours.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>x<｜Assistant｜></think>"


def test_damaged_models_never_do_worse_than_an_error(model, tmp_path):
    rng = random.Random(5)
    refused = 0
    for _ in range(200):
        broken = bytearray(model)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        data = bytes(broken[: rng.choice([len(broken), rng.randrange(len(broken))])])
        (tmp_path / "tokenizer.model").write_bytes(data)
        try:
            Tokenizer.from_folder(tmp_path).encode("the lamp <sep>")
        except TokenizerError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 60


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("scores", lambda v: v[:-1], "scores"),
        ("scores", lambda v: [float("nan"), *v[1:]], "score"),
        ("scores", lambda v: ["x", *v[1:]], "wrong type"),
        ("token_type", lambda v: [9, *v[1:]], "1 to 6"),
        ("token_type", lambda v: [1 if kind == 2 else kind for kind in v], "unknown"),
        ("tokens", lambda v: [piece.replace("<0x0A>", "<0xZZ>") for piece in v], "byte piece"),
        ("tokens", lambda v: [*v[:-1], v[-2]], "refuses"),
        ("tokens", lambda v: [*v[:-1], ""], "refuses"),
        ("precompiled_charsmap", lambda v: b"\x01\x02\x03", "refuses"),
    ],
)
def test_bad_gguf_records_are_refused(folder, key, change, words):
    records = Tokenizer.from_folder(folder).gguf_metadata()
    records["tokenizer.ggml." + key] = change(records.get("tokenizer.ggml." + key))
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.from_gguf_metadata(records)
    assert "\n" not in str(caught.value)


def test_the_wire_format_reads_what_it_writes():
    for value in (0, 1, 127, 128, 300, 1 << 31, (1 << 62) + 5):
        assert list(sentencepiece_file._fields(sentencepiece_file._number_field(9, value))) == [(9, value)]
    assert list(sentencepiece_file._fields(b"\x08" + b"\xff" * 9 + b"\x01")) == [(1, -1)]
    for bad in (b"\x08", b"\x0a\x05ab", b"\x08" + b"\xff" * 11, b"\x0b", b"\x0d\x00"):
        with pytest.raises(IndexError):
            list(sentencepiece_file._fields(bad))
