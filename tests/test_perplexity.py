"""Scores of a text: windows that score each token once, sums that a plain pass confirms, and the command."""

from __future__ import annotations

import io
import json
import math

import mlx.core as mx
import pytest

from mlx_ds4 import perplexity
from mlx_ds4.api import load
from mlx_ds4.scoring import negative_log_likelihood, windows
from tests.golden_tools import GOLDEN

NANO = GOLDEN / "nano" / "model"
TEXT = "What is the memory of a model? One question and more answers, because words are read and written.\n" * 2


@pytest.fixture(scope="module")
def nano():
    return load(NANO)


@pytest.mark.parametrize("count, length, stride", [(10, 4, 4), (10, 4, 1), (11, 5, 3), (3, 8, 2), (1, 1, 1), (9, 9, 9)])
def test_windows_score_each_token_once(count, length, stride):
    found = list(windows(count, length, stride))
    assert [i for w in found for i in range(w.first, w.end)] == list(range(count))
    assert all(w.end - w.start == min(length, count) for w in found[1:])
    assert all(w.first - w.start >= length - stride for w in found[1:])


@pytest.mark.parametrize("length, stride", [(4, 5), (4, 0), (0, 0), (3, -1)])
def test_wrong_strides_are_refused(length, stride):
    with pytest.raises(ValueError, match="expected 1 <= stride <= length"):
        list(windows(10, length, stride))


def plain(model, ids, begin):
    """The definition: one row at a time, in one pass without a cache."""
    logits = model(mx.array([[begin, *ids[:-1]]]))[0]
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [-logp[i, token].item() for i, token in enumerate(ids)]


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_chunks_do_not_matter(nano, chunk):
    model, tokenizer = nano
    ids = tokenizer.encode(TEXT)[:40]
    seen = []
    losses = negative_log_likelihood(
        model, ids, begin=0, sequence_length=64, chunk=chunk, progress=lambda done, total: seen.append((done, total))
    )
    assert losses == pytest.approx(plain(model, ids, 0), abs=2e-5)
    assert seen[-1] == (40, 40) and len(seen) == -(-40 // chunk)


def test_a_stride_gives_context(nano):
    """Each window is its own sequence: the scores of its new tokens are those of a pass over the window alone."""
    model, tokenizer = nano
    ids = tokenizer.encode(TEXT)[:30]
    losses = negative_log_likelihood(model, ids, begin=0, sequence_length=12, stride=5, chunk=4)
    for window in windows(30, 12, 5):
        alone = plain(model, ids[window.start : window.end], 0)
        wanted = alone[window.first - window.start :]
        assert losses[window.first : window.end] == pytest.approx(wanted, abs=2e-5)


def test_the_command_compares_models(nano, tmp_path, capsys):
    model, tokenizer = nano
    file = tmp_path / "text"
    file.write_text(TEXT)
    args = [str(file), "--model", str(NANO), "--model", str(NANO), "--sequence-length", "50", "--max-tokens", "60"]
    assert perplexity.main([*args, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == second
    ids = tokenizer.encode(TEXT)[:60]
    expected = negative_log_likelihood(model, ids, begin=0, sequence_length=50)
    assert first["tokens"] == 60 and first["nats_per_token"] == pytest.approx(sum(expected) / 60)
    assert first["perplexity"] == pytest.approx(math.exp(first["nats_per_token"]))
    size = len(b"".join(tokenizer.id_to_bytes(i) for i in ids))
    assert first["bytes"] == size and first["bits_per_byte"] == pytest.approx(sum(expected) / math.log(2) / size)
    assert perplexity.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].endswith("+0.00%") and str(NANO) in lines[2]


def test_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT[:30].encode())))
    assert perplexity.main(["-", "--model", str(NANO), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["bytes"] == 30


@pytest.mark.parametrize(
    "args, text, words",
    [
        (["--stride", "9", "--sequence-length", "8"], b"some text", "expected 1 <= stride"),
        (["--sequence-length", "99999999"], b"some text", "context ends at"),
        (["--max-tokens", "0"], b"some text", "expected 1 or more"),
        ([], b"", "has no tokens"),
        ([], b"\xff\xfe", "not UTF-8 at byte 0"),
        (["--strides", "3"], b"x", "--help lists"),
        (["--model", "/nowhere/model"], b"some text", "/nowhere/model"),
    ],
)
def test_errors_are_one_line(args, text, words, tmp_path, capsys):
    file = tmp_path / "text"
    file.write_bytes(text)
    model = [] if "--model" in args else ["--model", str(NANO)]
    assert perplexity.main([str(file), *model, *args]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_a_missing_file_is_named(capsys):
    assert perplexity.main(["/nowhere/text", "--model", str(NANO)]) == 2
    assert "/nowhere/text" in capsys.readouterr().err
