"""SentencePiece vocabularies: from a `tokenizer.model`, or rebuilt from the arrays of a GGUF of type `llama`.

Encoding is done by `sentencepiece`. Its file is a protocol buffer, of which only the fields named below are read
and written, by hand, because the package's own reader needs another package.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from mlx_ds4.byte_bpe import TokenizerError, string_list

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
_KEY = "tokenizer.ggml."


class SentencePiece:
    """A SentencePiece vocabulary.

    pieces, scores, kinds: by id. Control and user-defined pieces are matched by `Tokenizer`, never by the package.
    first_space: a space is put before the first ordinary text, and taken off again in decoding. (The library alone
        would put it even before a user-defined piece that opens the text.)
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        kinds: Sequence[int],
        *,
        model_type: int = _BPE,
        first_space: bool = True,
        strip_spaces: bool = False,
        charsmap: bytes = b"",
        unknown: str = " \u2047 ",
    ) -> None:
        if not len(pieces) == len(scores) == len(kinds):
            found = f"{len(pieces)} pieces, {len(scores)} scores and {len(kinds)} types"
            raise TokenizerError(f"Found {found}; expected one of each for every token.")
        if not all(math.isfinite(score) for score in scores) or not set(kinds) <= set(range(1, 7)):
            raise TokenizerError("Found a score that is no number or a type outside 1 to 6; the file is damaged.")
        if kinds.count(UNKNOWN) != 1:
            raise TokenizerError(f"Found {kinds.count(UNKNOWN)} pieces for unknown text (type 2); expected one.")
        for piece, kind in zip(pieces, kinds, strict=True):
            if kind == BYTE and not _BYTE_PIECE.fullmatch(piece):
                raise TokenizerError(f"Found {piece!r:.60} as a byte piece; expected a spelling such as <0x0A>.")
        self.tokens, self.scores, self.kinds = list(pieces), list(scores), list(kinds)
        self.model_type, self.first_space, self.strip_spaces = model_type, first_space, strip_spaces
        self.charsmap, self.unknown = charsmap, unknown
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self._first = self._engine(first_space, strip_spaces)
        self._later = self._engine(False, False)

    def _engine(self, first_space: bool, strip_spaces: bool) -> Any:
        import sentencepiece

        kinds = [CONTROL if kind == USER_DEFINED else kind for kind in self.kinds]
        try:
            model = self._model(kinds, first_space, strip_spaces)
            return sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            line = " ".join(str(error).split())[:200]
            raise TokenizerError(f"Found a vocabulary that `sentencepiece` refuses: {line}.") from None

    def encode_plain(self, text: str, first: bool) -> list[int]:
        """Ids of text in which no spelling is special; `first` says that no other text stands before it."""
        return (self._first if first else self._later).encode(text)

    def piece_bytes(self, i: int) -> bytes:
        """The bytes of a piece: one byte, the mark for unknown text, or its spelling with real spaces."""
        piece, kind = self.tokens[i], self.kinds[i]
        if kind == BYTE:
            return bytes([int(piece[3:5], 16)])
        if kind == UNKNOWN:
            return self.unknown.encode("utf-8")
        return (piece if kind == CONTROL else piece.replace(_SPACE, " ")).encode("utf-8")

    def drops_space(self, i: int) -> bool:
        """Whether the piece loses its leading space when it is the first text."""
        return self.first_space and self.kinds[i] != BYTE and self.tokens[i].startswith(_SPACE)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Spelling -> id of the pieces that are matched as a whole."""
        return {self.tokens[i]: i for i, kind in enumerate(self.kinds) if kind in (CONTROL, USER_DEFINED)}

    def gguf_metadata(self) -> dict[str, Any]:
        """The `tokenizer.ggml.*` arrays; raises TokenizerError for a unigram model, which GGUF's `llama` is not."""
        if self.model_type != _BPE:
            raise TokenizerError("Found a unigram SentencePiece model; a GGUF of type llama holds BPE models only.")
        out = {
            _KEY + "model": "llama",
            _KEY + "tokens": list(self.tokens),
            _KEY + "scores": list(self.scores),
            _KEY + "token_type": list(self.kinds),
            _KEY + "add_space_prefix": self.first_space,
            _KEY + "remove_extra_whitespaces": self.strip_spaces,
        }
        if self.charsmap:
            out[_KEY + "precompiled_charsmap"] = self.charsmap
        return out

    def to_bytes(self) -> bytes:
        """The model as a `tokenizer.model` file."""
        return self._model(self.kinds, self.first_space, self.strip_spaces)

    def _model(self, kinds: Sequence[int], first_space: bool, strip_spaces: bool) -> bytes:
        out = bytearray()
        for piece, score, kind in zip(self.tokens, self.scores, kinds, strict=True):
            weight = b"\x15" + struct.pack("<f", score)  # field 2 of wire type 5
            out += _bytes_field(1, _bytes_field(1, piece.encode("utf-8")) + weight + _number_field(3, kind))
        trainer = _number_field(3, self.model_type) + _number_field(35, BYTE in kinds)
        out += _bytes_field(2, trainer + _bytes_field(44, self.unknown.encode("utf-8")))
        spaces = _number_field(3, first_space) + _number_field(4, strip_spaces)
        return bytes(out + _bytes_field(3, _bytes_field(2, self.charsmap) + spaces))


def from_gguf(metadata: Mapping[str, Any]) -> SentencePiece:
    """From `tokenizer.ggml.tokens`, `scores` and `token_type` of a GGUF of type `llama`."""
    return SentencePiece(
        string_list(metadata, _KEY + "tokens"),
        [float(score) for score in metadata.get(_KEY + "scores", ())],
        [int(kind) for kind in metadata.get(_KEY + "token_type", ())],
        first_space=bool(metadata.get(_KEY + "add_space_prefix", True)),
        strip_spaces=bool(metadata.get(_KEY + "remove_extra_whitespaces", False)),
        charsmap=bytes(metadata.get(_KEY + "precompiled_charsmap", b"")),
    )


def from_bytes(data: bytes) -> tuple[SentencePiece, dict[str, int]]:
    """From the bytes of a `tokenizer.model`: the vocabulary, and the ids it names as bos, eos and pad."""
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(value))
                pieces.append(piece.get(1, b"").decode("utf-8"))
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                kinds.append(piece.get(3, NORMAL))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        if trainer.get(3, _UNIGRAM) not in (_UNIGRAM, _BPE) or trainer.get(24) or not normalizer.get(5, 1):
            raise TokenizerError("Found a word or character model or odd spaces; expected a BPE or unigram model.")
        model = SentencePiece(
            pieces,
            scores,
            kinds,
            model_type=trainer.get(3, _UNIGRAM),
            first_space=bool(normalizer.get(3, 1)),
            strip_spaces=bool(normalizer.get(4, 1)),
            charsmap=normalizer.get(2, b""),
            unknown=trainer.get(44, " \u2047 ".encode()).decode("utf-8"),
        )
        named = {"bos": trainer.get(41, 1), "eos": trainer.get(42, 2), "pad": trainer.get(43, -1)}
        return model, {name: i for name, i in named.items() if 0 <= i < len(pieces)}
    except (IndexError, TypeError, AttributeError, struct.error, UnicodeDecodeError):
        raise TokenizerError("Found a file that is no SentencePiece model or is cut off; copy it again.") from None


# The wire format: a tag (field number << 3 | wire type), then a varint (type 0), 8 bytes (1), a length and that
# many bytes (2), or 4 bytes (5).


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value if value < 1 << 63 else value - (1 << 64)
            continue
        length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}.get(kind), at)
        if length is None or at + length > len(data):
            raise IndexError
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number_field(number: int, value: int) -> bytes:
    return _write_varint(number << 3) + _write_varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _write_varint(number << 3 | 2) + _write_varint(len(value)) + value
