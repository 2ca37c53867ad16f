"""Token-level translation of the portable subset of Metal to CUDA.

Metal's address-space words go away, threadgroup variables become `__shared__`, helper functions become device
functions; `_cuda_prelude.h` supplies the rest of Metal's names. The words cannot be macros: CUDA's own
`__device__` and `__constant__` are macros whose text contains them.

What has no counterpart raises PortableError, so that a kernel cannot be silently wrong on CUDA.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

_SPACES = ("device", "constant", "threadgroup", "thread")
_TOKEN = re.compile(
    r"""(?P<skip> //(?:\\\n|[^\n])* | /\*.*?\*/ | \s+ )
      | (?P<text> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' )
      | (?P<directive> \#(?:\\\n|//[^\n]*|/\*.*?\*/|[^\n])* )
      | (?P<word> [A-Za-z_]\w* )
      | (?P<number> \.?\d(?:[eEpP][+-]|[\w.])* )
      | (?P<sign> ->|::|. )""",
    re.S | re.X,
)
_HALF_LITERAL = re.compile(r"(?!0[xX])[\d.]+(?:[eE][+-]?\d+)?(?:h|H|bf|BF)")
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")

Token = tuple[str, str]  # kind, text


class PortableError(ValueError):
    """The kernel uses something of Metal that CUDA has no counterpart for."""


@functools.cache
def prelude() -> str:
    """Metal's names on CUDA: the text that comes before every translated header."""
    return Path(__file__).with_name("_cuda_prelude.h").read_text(encoding="utf-8")


def translate_header(header: str) -> str:
    """The prelude and the translation of a kernel's header. Raises PortableError."""
    return prelude() + "\n" + _translate(header, in_header=True)


def translate_functions(header: str) -> str:
    """The translation alone, for a CUDA text that gives Metal's names itself. Raises PortableError."""
    return _translate(header, in_header=True)


def translate_body(body: str) -> str:
    """The translation of a kernel's body. Raises PortableError."""
    return _translate(body, in_header=False)


def _translate(source: str, *, in_header: bool) -> str:
    tokens = _tokens(source)
    out: list[str] = []
    braces = parens = 0
    previous = ";"  # the last token that is neither space nor comment; the text starts a statement
    for i, (kind, text) in enumerate(tokens):
        if kind == "skip":
            out.append(text)
            continue
        if kind == "directive":
            out.append(_directive(text, in_header))
            continue
        if kind == "sign":
            braces += (text == "{") - (text == "}")
            parens += (text == "(") - (text == ")")
        elif kind == "number" and _HALF_LITERAL.fullmatch(text):
            raise PortableError(f"the literal {text} has no CUDA spelling; write half({text.rstrip('hHbBfF')}f).")
        elif kind == "word" and previous in (".", "->", "::"):
            if previous == "." and _SWIZZLE.fullmatch(text):
                raise PortableError(f"the swizzle .{text} has no CUDA spelling; take the components one by one.")
        elif kind == "word" and text in _SPACES:
            starts = previous in (";", "{", "}") and parens == 0
            text = _address_space(text, tokens, i, starts, parens, program_scope=in_header and braces == 0)
        elif text == "inline" and in_header:
            text = "__device__ inline"
        elif text == "using" and _is_using_metal(tokens, i):
            text = ""  # its min and max would meet CUDA's: bodies say metal::min
            for j, _ in islice(_meaningful(tokens, i), 4):
                tokens[j] = ("skip", "")
        out.append(text)
        previous = text if text else previous
    return "".join(out)


def _tokens(source: str) -> list[Token]:
    return [(m.lastgroup, m.group()) for m in _TOKEN.finditer(source)]


def _meaningful(tokens: list[Token], start: int) -> Iterator[tuple[int, str]]:
    for i in range(start, len(tokens)):
        if tokens[i][0] not in ("skip", "directive"):
            yield i, tokens[i][1]


def _is_using_metal(tokens: list[Token], start: int) -> bool:
    return [t for _, t in islice(_meaningful(tokens, start), 4)] == ["using", "namespace", "metal", ";"]


def _address_space(word: str, tokens: list[Token], at: int, starts: bool, parens: int, *, program_scope: bool) -> str:
    """What replaces an address-space word: `__shared__ ` for a threadgroup variable, otherwise nothing."""
    if word not in ("threadgroup", "constant"):
        return ""
    ends = _declarator_end(tokens, at + 1)
    if ends in ("*", "&") or parens:  # a pointer, a reference, or an array parameter, which is a pointer
        return ""
    if word == "constant":
        if program_scope and ends == "[":
            raise PortableError("a constant array has no CUDA spelling; declare it as MSL_TABLE(type, name, n).")
        return ""
    if ends == "=":
        raise PortableError("a threadgroup variable has an initialiser; assign it and put a barrier after it.")
    if not starts or not ends:
        raise PortableError("the word threadgroup must begin a declaration of its own to become __shared__.")
    return "__shared__"


def _declarator_end(tokens: list[Token], start: int) -> str:
    """The first of `* & [ = ; , )` after a declaration's type (outside its template arguments)."""
    angle = 0
    for _, text in _meaningful(tokens, start):
        angle += (text == "<") - (text == ">")
        if angle == 0 and text in ("*", "&", "[", "=", ";", ",", ")"):
            return text
    return ""


def _directive(text: str, in_header: bool) -> str:
    """A preprocessor line: Metal's includes and pragmas go, the text of a macro is translated."""
    if re.match(r"#\s*(include\s*<metal|import\s*<metal|pragma\s+METAL)", text):
        return ""
    if re.match(r"#\s*(include|import)\b", text):
        raise PortableError(f"{text.strip()} has no CUDA counterpart; put the helpers into the header.")
    macro = re.match(r"#\s*define\s+\w+(\([^)]*\))?", text)
    if not macro:
        return text
    # MSL_TABLE is the one macro that may speak of program-scope constants: the prelude has defined it by then.
    if re.match(r"#\s*define\s+MSL_TABLE\b", text):
        return text
    return macro.group() + _translate(text[macro.end() :], in_header=in_header)
