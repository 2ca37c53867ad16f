"""Text that every machine with Python has, a tokenizer trained on it, and both packed for training.

The source is the Python standard library (PSF licence): code, docstrings, tests, and the language reference in
`pydoc_data/topics.py`. So the same version of Python gives the same text. A file is held back when the hash of its
name says so, about one in forty, and a few are held back by name.

A prepared folder holds `tokens.npy`, `held.npy` (uint16 streams, an end token behind each document), `cut.npy` (uint16
[n, 512] windows whose text is cut between any two characters, half of them as a conversation in which the answer goes
on where the message stops), `token_map.npy`, `config.json`, `tokenizer.model`, `about.json`.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import itertools
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mlx_ds4 import chat
from mlx_ds4.engram_map import engram_token_map
from mlx_ds4.tokenizer import Tokenizer

from .shape import NOISE_TOKEN, small_config, with_tokens

CUT_LENGTH = 513
_HELD_BY_NAME = {"textwrap.py", "json/decoder.py", "bisect.py", "test/test_heapq.py"}
_MOST_CHARACTERS = 200_000  # of one file
_NOT = ("site-packages", "lib2to3/tests", "encodings/", "__pycache__", "idlelib/Icons", "pydoc_data/__init__")


def documents(wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, str]]:
    """(name, text) of every wanted file, in the order of names."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if not any(part in name for part in _NOT) and wanted(name) and (text := _read(path)):
            yield name, text
    topics = importlib.import_module("pydoc_data.topics").topics
    for name, text in sorted(topics.items()):
        if wanted(f"topic/{name}"):
            yield f"topic/{name}", text


def _read(path: Path) -> str:
    """The file's text, empty when it is no UTF-8, nearly empty, or mostly a table."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
    plain = sum(c.isascii() for c in text)
    digits = sum(c.isdigit() for c in text)
    fit = len(text) > 200 and plain > 0.98 * len(text) and digits < 0.15 * len(text)
    return text[:_MOST_CHARACTERS] if fit else ""


def is_held(name: str) -> bool:
    """Whether a file is held back from training."""
    return name in _HELD_BY_NAME or hashlib.sha256(name.encode()).digest()[0] % 40 == 7


def held_texts() -> dict[str, str]:
    """What was held back by name as "code", and the held topics of the language reference as "prose"."""
    found = list(documents(is_held))
    return {
        "code": "\n".join(text for name, text in found if name in _HELD_BY_NAME and name.endswith(".py")),
        "prose": "\n".join(text for name, text in found if name.startswith("topic/")),
    }


def train_tokenizer(texts: list[str], vocab_size: int) -> bytes:
    """A SentencePiece BPE with byte fallback that keeps every space; line ends are byte pieces. Ids 0, 1, 2 are begin,
    end and pad, 3 stands for unknown text, then come the tokens of conversations."""
    import sentencepiece

    control = [token for token in chat.CONTROL_TOKENS if token not in (chat.BOS, chat.EOS)]
    lines = [line for text in texts for line in text.split("\n") if line and len(line) < 400]
    keep = np.random.default_rng(0).permutation(len(lines))[:200_000]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([lines[i] for i in keep]),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        bos_id=0,
        eos_id=1,
        pad_id=2,
        unk_id=3,
        bos_piece=chat.BOS,
        eos_piece=chat.EOS,
        pad_piece="<｜▁pad▁｜>",
        control_symbols=control,
        minloglevel=1,
    )
    return model.getvalue()


def prepare(folder: Path, *, vocab_size: int = 2048, cut_windows: int = 2400, limit: int | None = None) -> dict:
    """Writes a prepared folder and returns what `about.json` says; `limit` takes only so many documents."""
    folder.mkdir(parents=True, exist_ok=True)
    found = list(itertools.islice(documents(), limit))
    trained = [text for name, text in found if not is_held(name)]
    (folder / "tokenizer.model").write_bytes(train_tokenizer(trained, vocab_size))
    tokenizer = Tokenizer.from_folder(folder)
    token_map = engram_token_map(tokenizer)
    config = with_tokens(small_config(), token_map, tokenizer.token_id(NOISE_TOKEN))
    streams: dict[bool, list[int]] = {False: [], True: []}
    for name, text in found:
        streams[is_held(name)] += [*tokenizer.encode(text, allow_special=False), tokenizer.eos_token_id]
    np.save(folder / "tokens.npy", np.array(streams[False], np.uint16))
    np.save(folder / "held.npy", np.array(streams[True], np.uint16))
    np.save(folder / "cut.npy", _cut_windows(tokenizer, trained, cut_windows))
    np.save(folder / "token_map.npy", token_map)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1))
    about = {
        "python": sys.version.split()[0],
        "documents": len(found),
        "held": sorted(name for name, _ in found if is_held(name)),
        "characters": sum(len(text) for _, text in found),
        "tokens": len(streams[False]),
        "held_tokens": len(streams[True]),
        "sha256": hashlib.sha256("".join(text for _, text in found).encode()).hexdigest(),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1))
    return about


def _cut_windows(tokenizer: Tokenizer, texts: list[str], count: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    sizes = np.array([len(text) for text in texts], np.float64)
    user, header = tokenizer.token_id(chat.USER), [tokenizer.token_id(t) for t in (chat.ASSISTANT, chat.END_THINK)]
    out = np.empty((count, CUT_LENGTH), np.uint16)
    for row in range(count):
        text = texts[rng.choice(len(texts), p=sizes / sizes.sum())]
        start = int(rng.integers(0, max(1, len(text) - 3000)))
        if rng.random() < 0.7:  # at the start of a line
            start = text.rfind("\n", 0, start) + 1
        cut = start + int(np.exp(rng.uniform(np.log(2), np.log(400))))
        first, rest = (
            tokenizer.encode(part, allow_special=False) for part in (text[start:cut], text[cut : cut + 4000])
        )
        ids = [0, user, *first, *header, *rest] if row % 2 else [0, *first, *rest]
        ids += [tokenizer.eos_token_id] * CUT_LENGTH  # a text that ends here
        out[row] = ids[:CUT_LENGTH]
    return out
