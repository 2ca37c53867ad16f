"""Parser of a GGUF v3 header that trusts nothing: every length is checked before anything is allocated.

Grammar (little endian): magic `GGUF`, u32 version, u64 tensor count, u64 record count; records of string
key, u32 type, value; tensors of string name, u32 rank, u64 dimensions (fastest first), u32 type, u64
offset; zero bytes up to the alignment, where the data begins. A string is a u64 length and UTF-8 bytes,
an array a u32 element type, a u64 count and the elements. Model keys are the business of others.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_ds4.formats.quant_blocks import TYPE_INFO

MAX_HEADER = 64 << 20
MAX_COUNT = 65_536  # records, and tensors
MAX_KEY = 65_535
MAX_NAME = 127
MAX_STRING = 4 << 20
MAX_STRINGS = 1 << 20  # elements of string arrays in one file: bounds what short strings cost as objects
MAX_DIMENSION = 1 << 40
MAX_ELEMENTS = 1 << 60

_WINDOW = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {  # value type -> name, struct letter
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"),
    6: ("f32", "f"), 7: ("bool", "B"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip
_NUMPY = {"B": "u1", "b": "i1", "H": "<u2", "h": "<i2", "I": "<u4", "i": "<i4", "f": "<f4", "Q": "<u8",
          "q": "<i8", "d": "<f8"}  # fmt: skip
_TYPE_NAMES = {number: name for name, (number, _, _) in TYPE_INFO.items()}
_RETIRED = {4, 5, 31, 32, 33, 36, 37, 38}
_NOT_GGUF = (
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file itself with `git lfs pull`"),
    (b"<", "a web page: the download was refused, download the file again"),
    (b"ggml", "an old GGML file: convert it to GGUF v3"),
    (b"lmgg", "an old GGML file: convert it to GGUF v3"),
    (b"tjgg", "an old GGJT file: convert it to GGUF v3"),
    (b"FUGG", "a big-endian GGUF file: convert it to little endian"),
    (b"PK", "a zip archive: unpack it first"),
)


class FormatError(ValueError):
    """A model file that is damaged, incomplete or of another kind; one sentence that says what to do."""


class TruncatedError(FormatError):
    """A file that ends before what its header promises."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is.

    `shape` is in NumPy order (slowest axis first) and counts elements; `offset` is the absolute byte of
    the payload, `nbytes` its length.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of the last axis."""
        _, elements, size = TYPE_INFO[self.type_name]
        return self.shape[-1] // elements * size


@dataclass(frozen=True)
class Header:
    """What `parse_header` found; `types` names the stored type of each metadata value, as "u32" or "[u32]"."""

    version: int
    alignment: int
    metadata: dict[str, Any]
    types: dict[str, str]
    tensors: dict[str, TensorInfo]
    data_start: int


def show(text: str) -> str:
    """A string of a file as it may stand in an error: quoted, escaped, at most about 60 characters."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


class _Cursor:
    """Forward reading through a window, so that a file of any size costs no more than its header."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self.read, self.limit = read, min(size, MAX_HEADER)
        self.whole = size <= MAX_HEADER
        self.buffer, self.base, self.index = b"", 0, 0

    @property
    def position(self) -> int:
        return self.base + self.index

    def fill(self, count: int, what: str) -> None:
        """Makes `count` bytes available from the current position."""
        if self.index + count <= len(self.buffer):
            return
        start = self.position
        if count > self.limit - start:
            needs = f"{what} at byte {start} needs {count} bytes but"
            if self.whole:
                raise TruncatedError(f"{needs} the file ends at byte {self.limit}: it is truncated or damaged")
            raise FormatError(f"{needs} headers may take at most {self.limit}: the file is damaged")
        self.buffer = self.read(start, min(max(count, _WINDOW), self.limit - start))
        self.base, self.index = start, 0

    def take(self, count: int, what: str) -> bytes:
        self.fill(count, what)
        out = self.buffer[self.index : self.index + count]
        self.index += count
        return out

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter), what))[0]

    def string(self, most: int, what: str) -> str:
        start = self.position
        length = self.number("Q", f"the length of {what}")
        if length > most:
            raise FormatError(
                f"{what} at byte {start} claims {length} bytes, at most {most} are allowed: the file is damaged"
            )
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise FormatError(f"{what} at byte {start} is not UTF-8: the file is damaged") from None


def parse_header(read: Callable[[int, int], bytes], size: int) -> Header:
    """Parses the header of a file of `size` bytes through `read(offset, count) -> bytes`.

    Payload is never read. Strings inside arrays that are not UTF-8 keep their bytes as surrogates
    (`surrogateescape`); anywhere else they are refused. Gaps between tensors are legal, overlaps are not.
    Raises FormatError, without the file's name, for everything that breaks the format or a limit above.
    """
    cursor = _Cursor(read, size)
    version, tensor_count, record_count = _preamble(cursor, size)
    metadata, types = _records(cursor, record_count)
    alignment = _alignment(metadata, types)
    found = [_tensor(cursor, number, alignment) for number in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_name, offset, nbytes in found:
        if name in tensors:
            raise FormatError(f"tensor {show(name)} occurs twice in the directory: the file is damaged")
        tensors[name] = TensorInfo(name, shape, type_name, data_start + offset, nbytes)
    _check_layout(tensors, data_start, size)
    return Header(version, alignment, metadata, types, tensors, data_start)


def _preamble(cursor: _Cursor, size: int) -> tuple[int, int, int]:
    if size == 0:
        raise FormatError("the file is empty, expected a GGUF file: download it again")
    head = cursor.read(0, min(size, 24))
    if head[:4] != b"GGUF":
        for magic, meaning in _NOT_GGUF:
            if head.lstrip()[: len(magic)] == magic:
                raise FormatError(f"the file is not GGUF but {meaning}")
        if head[8:9] == b"{":
            raise FormatError("the file is not GGUF but safetensors: pass the folder that holds it")
        if head[:1] in (b"{", b"["):
            raise FormatError("the file is not GGUF but JSON: is this an error message of a download?")
        raise FormatError(f"the file begins with {head[:4]!r}, expected b'GGUF': it is not a GGUF file")
    if size < 24:
        raise FormatError(f"the file has {size} bytes, a GGUF header has at least 24: download it again")
    cursor.take(4, "the magic")
    version = cursor.number("I", "the version")
    if version & 0xFFFF == 0 and version:
        raise FormatError("the file is big-endian GGUF, expected little endian: convert it")
    if version != 3:
        raise FormatError(f"GGUF version is {version}, expected 3: convert the file with current tools")
    counts = []
    for what in ("tensor", "metadata record"):
        count = cursor.number("Q", f"the {what} count")
        if not 1 <= count <= MAX_COUNT:
            raise FormatError(f"the {what} count is {count}, expected 1 to {MAX_COUNT}: the file is damaged")
        counts.append(count)
    return version, counts[0], counts[1]


def _records(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, str]]:
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    strings_left = MAX_STRINGS
    for number in range(count):
        start = cursor.position
        key = cursor.string(MAX_KEY, f"the key of metadata record {number}")
        if not key or not key.isprintable():
            raise FormatError(f"metadata key {show(key)} at byte {start} is not printable text: the file is damaged")
        if key in metadata:
            raise FormatError(f"metadata key {show(key)} occurs twice: the file is damaged")
        kind = cursor.number("I", f"the type of {show(key)}")
        if kind == _STRING:
            metadata[key], types[key] = cursor.string(MAX_STRING, f"the string {show(key)}"), "string"
        elif kind == _ARRAY:
            metadata[key], types[key] = _array(cursor, key, strings_left)
            if types[key] == "[string]":
                strings_left -= len(metadata[key])
        elif kind in _SCALARS:
            types[key], letter = _SCALARS[kind]
            value = cursor.number(letter, f"the value of {show(key)}")
            if types[key] == "bool":
                _check_bools(key, value)
                value = bool(value)
            metadata[key] = value
        else:
            raise FormatError(f"{show(key)} at byte {start} has unknown value type {kind}: the file is damaged")
    return metadata, types


def _array(cursor: _Cursor, key: str, strings_left: int) -> tuple[Any, str]:
    start = cursor.position
    what = f"the array {show(key)}"
    kind = cursor.number("I", f"the element type of {what}")
    if kind == _ARRAY:
        raise FormatError(f"{what} at byte {start} holds arrays, nested arrays are refused: the file is damaged")
    if kind != _STRING and kind not in _SCALARS:
        raise FormatError(f"{what} at byte {start} has unknown element type {kind}: the file is damaged")
    count = cursor.number("Q", f"the length of {what}")
    name, letter = ("string", "Q") if kind == _STRING else _SCALARS[kind]
    least = count * struct.calcsize("<" + letter)  # a string takes at least its length field
    if least > cursor.limit - cursor.position:
        raise FormatError(
            f"{what} at byte {start} claims {count} elements, at least {least} bytes, but only "
            f"{cursor.limit - cursor.position} bytes can follow: the file is truncated or damaged"
        )
    if kind == _STRING:
        if count > strings_left:
            raise FormatError(
                f"{what} at byte {start} claims {count} strings, at most {MAX_STRINGS} per file are allowed: "
                "the file is damaged"
            )
        return _strings(cursor, count, what), "[string]"
    values = np.frombuffer(cursor.take(least, what), _NUMPY[letter])
    if name == "bool":
        _check_bools(key, values)
        values = values.astype(bool)
    return values, f"[{name}]"


def _check_bools(key: str, values: Any) -> None:
    if np.max(values, initial=0) > 1:
        raise FormatError(f"the bool {show(key)} holds the byte {np.max(values)}, expected 0 or 1: the file is damaged")


def _strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    # A real vocabulary has a quarter of a million of them: local names and no calls in the usual case.
    out = []
    length_of = struct.Struct("<Q").unpack_from
    buffer, index, end = cursor.buffer, cursor.index, len(cursor.buffer)
    for number in range(count):
        if index + 8 > end:
            cursor.index = index
            cursor.fill(8, f"string {number} of {what}")
            buffer, index, end = cursor.buffer, cursor.index, len(cursor.buffer)
        (length,) = length_of(buffer, index)
        index += 8
        if index + length > end:
            cursor.index = index
            if length > MAX_STRING:
                raise FormatError(
                    f"string {number} of {what} at byte {cursor.position} claims {length} bytes, "
                    f"at most {MAX_STRING} are allowed: the file is damaged"
                )
            cursor.fill(length, f"string {number} of {what}")
            buffer, index, end = cursor.buffer, cursor.index, len(cursor.buffer)
        out.append(buffer[index : index + length].decode("utf-8", "surrogateescape"))
        index += length
    cursor.index = index
    return out


def _alignment(metadata: dict[str, Any], types: dict[str, str]) -> int:
    if "general.alignment" not in metadata:
        return 32
    kind, value = types["general.alignment"], metadata["general.alignment"]
    if kind != "u32":
        raise FormatError(f"general.alignment has type {kind}, expected u32: the file is damaged")
    if not 32 <= value <= 1 << 20 or value & (value - 1):
        raise FormatError(f"general.alignment is {value}, expected a power of two from 32 to 1048576")
    return value


def _tensor(cursor: _Cursor, number: int, alignment: int) -> tuple[str, tuple[int, ...], str, int, int]:
    """Name, shape, type, offset within the data and bytes of the next entry of the directory."""
    start = cursor.position
    name = cursor.string(MAX_NAME, f"the name of tensor {number}")
    if not name or not (name.isascii() and name.isprintable()) or "/" in name or "\\" in name:
        raise FormatError(
            f"the name of tensor {number} at byte {start} is {show(name)}, expected printable ASCII without slashes"
        )
    what = f"tensor {show(name)}"
    rank = cursor.number("I", f"the rank of {what}")
    if not 1 <= rank <= 4:
        raise FormatError(f"{what} at byte {start} has rank {rank}, expected 1 to 4: the file is damaged")
    dims = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, f"the shape of {what}"))
    elements = 1
    for dim in dims:
        elements *= dim
        if not 1 <= dim <= MAX_DIMENSION:
            raise FormatError(f"{what} has a dimension of {dim}, expected 1 to 2^40: the file is damaged")
    if elements >= MAX_ELEMENTS:
        raise FormatError(f"{what} has {elements} elements, expected fewer than 2^60: the file is damaged")
    kind = cursor.number("I", f"the type of {what}")
    if kind not in _TYPE_NAMES:
        adjective = "retired" if kind in _RETIRED else "unsupported"
        raise FormatError(f"{what} has the {adjective} type {kind}, expected one of {', '.join(TYPE_INFO)}")
    type_name = _TYPE_NAMES[kind]
    _, block, size = TYPE_INFO[type_name]
    if dims[0] % block:
        raise FormatError(f"{what} has rows of {dims[0]} elements, {type_name} needs a multiple of {block}")
    offset = cursor.number("Q", f"the offset of {what}")
    if offset >= 1 << 62:
        raise FormatError(f"{what} has the impossible offset {offset}, files end before 2^62: the file is damaged")
    if offset % alignment:
        raise FormatError(f"{what} has offset {offset}, expected a multiple of the alignment {alignment}")
    return name, dims[::-1], type_name, offset, elements // block * size


def _check_layout(tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(order):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(
                f"tensors {show(before.name)} and {show(after.name)} overlap at {after.offset}: the file is damaged"
            )
    last = order[-1]
    missing = last.offset + last.nbytes - size
    if missing > 0:
        # In order of offset, the first one that does not fit tells most.
        cut = next(tensor for tensor in order if tensor.offset + tensor.nbytes > size)
        where = "is cut off" if cut.offset < size else f"begins at byte {cut.offset}, past the end"
        raise TruncatedError(
            f"tensor {show(cut.name)} {where}: the file has {size} bytes but needs {size + missing}, "
            f"{missing} are missing: resume the download"
        )
