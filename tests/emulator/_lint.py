"""What Metal's compiler refuses although clang's C++ accepts it, found in the tokens of a kernel's text.

The emulator compiles Metal as C++ with address spaces; most violations are then compile errors. These rules cover
the rest. They look at tokens, not at a syntax tree: enough for the plain style in which kernels are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"])*\"|[A-Za-z_]\w*|\d(?:[\w.]|'\d|(?<=[eE])[+-])*|\s+"
    r"|::|&&|\|\||->|<<=|>>=|<<|[-+*/&|^%!=<>]=|.",
    re.S,
)
_words = str.split
SPACES = {"device", "constant", "threadgroup", "thread"}
_QUALIFIERS = SPACES | set(_words("const volatile static constexpr inline struct typename metal :: signed"))
_BANNED = set(
    _words(
        "double new delete throw try catch virtual dynamic_cast typeid goto asm __asm__ thread_local std mutable "
        "co_await co_yield"
    )
)
_SCALARS = _words(
    "bool char uchar short ushort int uint long ulong half float bfloat void unsigned size_t ptrdiff_t int8_t "
    "uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t float16_t bfloat16_t atomic_uint atomic_int "
    "atomic_bool atomic_float"
)
_TYPES = {*_SCALARS, *(t + n for t in _SCALARS[:12] for n in "234")}


@dataclass(frozen=True)
class Finding:
    """`line` counts from 1 within the text that was given."""

    line: int
    message: str


class _Token(NamedTuple):
    text: str
    line: int
    braces: int  # how many are open around it
    parentheses: int


def _is_name(text: str) -> bool:
    return text[:1].isalpha() or text[:1] == "_"


def _tokens(text: str) -> list[_Token]:
    """Tokens without comments and blanks, without the parameter lists of templates, plus two empty ones at the end
    (and, by Python's negative indices, before the start) so that rules may look around."""
    out, line, braces, parentheses = [], 1, 0, 0
    template = -1  # open angle brackets of a template's parameter list; -1 outside
    for match in TOKEN.finditer(text):
        t = match.group()
        if not (t.isspace() or t.startswith(("//", "/*"))):
            if t == "template":
                template = 0
            elif template >= 0:
                template += t.count("<") - t.count(">")
                if template <= 0:
                    template = -1
                elif _is_name(t):
                    out.append(_Token(t, line, braces, 1))  # still there to name types, as a parameter would be
            else:
                braces += (t == "{") - (t == "}")
                parentheses += (t == "(") - (t == ")")
                out.append(_Token(t, line, braces, parentheses))
        line += t.count("\n")
    return [*out, _Token("", line, 0, 0), _Token("", line, 0, 0)]


def _declared_types(tokens: list[_Token]) -> set[str]:
    """Names of types, built in and declared in the text."""
    types = set(_TYPES)
    for i, (text, *_) in enumerate(tokens[:-2]):
        if text in ("struct", "class", "typename", "using", "enum", "union"):
            types.add(tokens[i + 1].text)
        if text == "typedef":
            end = next((j for j in range(i, len(tokens)) if tokens[j].text == ";"), i)
            types.add(tokens[end - 1].text)
    return types


def _qualifiers_around(tokens: list[_Token], i: int) -> tuple[set[str], int, int]:
    """The qualifiers before and behind the type at i, and the indices of what stands outside them."""
    found: set[str] = set()
    low, high = i - 1, i + 1
    while low >= 0 and tokens[low].text in _QUALIFIERS:
        found.add(tokens[low].text)
        low -= 1
    while tokens[high].text in _QUALIFIERS:
        found.add(tokens[high].text)
        high += 1
    return found, low, high


def _type_rules(tokens: list[_Token], types: set[str]) -> Iterator[Finding]:
    """Pointers, references, array parameters and program-scope variables need an address space."""
    for i, (text, line, braces, parentheses) in enumerate(tokens[:-2]):
        if text not in types:
            continue
        qualifiers, low, high = _qualifiers_around(tokens, i)
        spaces = qualifiers & SPACES
        behind, next_but_one = tokens[high].text, tokens[min(high + 1, len(tokens) - 1)].text
        if behind in ("*", "&", "&&") and (_is_name(next_but_one) or next_but_one in ("", ")", ",", ">")):
            if not spaces:
                yield Finding(line, f"pointer or reference to '{text}' without an address space")
        elif _is_name(behind) and not braces and next_but_one in ("=", ";", "["):
            before = tokens[low].text if low >= 0 else ""
            if parentheses and next_but_one == "[" and not spaces:
                yield Finding(line, f"array parameter '{behind}' without an address space")
            elif not parentheses and "constant" not in qualifiers and before not in ("using", "typedef", "enum"):
                yield Finding(line, f"program-scope variable '{behind}' outside the constant address space")


def _word_rules(tokens: list[_Token]) -> Iterator[Finding]:
    members = {t.text for i, t in enumerate(tokens) if tokens[i - 1].text not in (".", "->")}
    for i, (text, line, braces, _) in enumerate(tokens[:-2]):
        before, behind = tokens[i - 1].text, tokens[i + 1].text
        if text in _BANNED:
            yield Finding(line, f"'{text}' is not part of Metal")
        elif text == "long" and behind == "long":
            yield Finding(line, "'long long' is not part of Metal")
        elif text == "static" and braces:
            around = {t.text for t in tokens[max(0, i - 3) : i + 4]}
            if not around & {"constexpr", "METAL_FUNC"}:
                yield Finding(line, "static local variable")
        elif text == "[" and before in ("=", "(", ",", "return") and behind in ("]", "&", "="):
            yield Finding(line, "lambda")
        elif before == "." and re.fullmatch(r"lo|hi|even|odd|[sS][0-9a-fA-F]", text) and text not in members:
            yield Finding(line, f"'.{text}' is not a component of Metal's vectors")
        elif re.fullmatch(r"0[bB].*|\d.*'.*", text):
            yield Finding(line, f"literal {text}: neither binary nor with digit separators in every Metal version")


def _declares_variable(tokens: list[_Token], i: int) -> bool:
    """Whether the address space at i begins the declaration of a variable, rather than of a pointer or function."""
    for t in tokens[i + 1 :]:
        if t.text in ("*", "&", "("):
            return False
        if t.text in ("[", ";", "=", ",", ""):
            return True
    return False


def _space_rules(tokens: list[_Token], *, body: bool) -> Iterator[Finding]:
    """Threadgroup variables stand at the outermost level of the kernel, constant ones outside functions."""
    for i, (text, line, braces, _) in enumerate(tokens[:-2]):
        before = tokens[i - 1].text
        starts = before in ("", "{", "}", ";")
        if text == "threadgroup" and starts and _declares_variable(tokens, i) and not (body and braces == 0):
            yield Finding(line, "threadgroup variable outside the kernel's outermost scope")
        starts |= before in ("static", "constexpr", "const")
        if text == "constant" and starts and _declares_variable(tokens, i) and (body or braces):
            yield Finding(line, "variable in the constant address space inside a function")


def lint(header: str, body: str) -> tuple[list[Finding], list[Finding]]:
    """Findings in the header and in the body of a kernel, in the order of the lines."""
    in_header, in_body = _tokens(header), _tokens(body)
    types = _declared_types(in_header) | _declared_types(in_body)
    # A body stands within braces: nothing in it is at program scope.
    nested = [t._replace(braces=t.braces + 1) for t in in_body]
    found = (
        [*_type_rules(in_header, types), *_word_rules(in_header), *_space_rules(in_header, body=False)],
        [*_type_rules(nested, types), *_word_rules(nested), *_space_rules(in_body, body=True)],
    )
    return tuple(sorted(f, key=lambda x: x.line) for f in found)
