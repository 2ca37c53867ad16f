"""The tool-call syntax: canonical writing, and recognising its marks in a text that may still be growing.

A call is written as

    <｜DSML｜ invoke name="NAME">
    <｜DSML｜ parameter name="KEY" string="true">VALUE</｜DSML｜ parameter>
    </｜DSML｜ invoke>

with `string="true"` for a string (written raw, nothing is escaped) and `string="false"` for any other value
(written as JSON). One or more calls stand inside `<｜DSML｜ calls>` ... `</｜DSML｜ calls>`, which a blank line
separates from the content before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
CALLS_OPEN = f"\n\n<{DSML} calls"

Segments = list[tuple[str, bool]]  # (text, whether special spellings in it are meant)


class CallError(ValueError):
    """A tool call that cannot be written."""


# --------------------------------------------------------------------------------------------- writing


def to_json(value: Any) -> str:
    """Returns `value` as one line of JSON, non-ASCII kept. Raises CallError for what JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CallError(f"Found a value that JSON cannot hold ({error}); pass plain JSON data.") from None


def is_json(text: str) -> bool:
    """True when `text` is one JSON value that Python can read; NaN and Infinity are not JSON."""
    try:
        _load(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_json_object(text: str) -> bool:
    """True when `text` is one JSON object."""
    return text.lstrip()[:1] == "{" and is_json(text)


def _load(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def as_parameters(arguments: Any) -> dict[str, Any]:
    """The parameters of a call as a mapping.

    `arguments` is a mapping, None (no parameters), or JSON text of an object, possibly encoded twice. Anything
    else becomes one string parameter named `arguments`, so that nothing a client sent is lost.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return {str(key): value for key, value in arguments.items()}
    value = arguments
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = _load(value)
            except (ValueError, RecursionError):
                break
    if isinstance(value, dict):
        return value
    return {"arguments": arguments if isinstance(arguments, str) else to_json(arguments)}


def call_segments(name: str, arguments: Any) -> Segments:
    """One call as segments: the frame is control text, the name, keys and values are literal text."""
    out: Segments = [(f'<{DSML} invoke name="', True), (name, False), ('">\n', True)]
    for key, value in as_parameters(arguments).items():
        is_string = isinstance(value, str)
        out += [
            (f'<{DSML} parameter name="', True),
            (key, False),
            (f'" string="{"true" if is_string else "false"}">', True),
            (value if is_string else to_json(value), False),
            (f"</{DSML} parameter>\n", True),
        ]
    return [*out, (f"</{DSML} invoke>\n", True)]


def calls_segments(calls: Iterable[tuple[str, Any]]) -> Segments:
    """The whole block of `(name, arguments)` calls, beginning with its blank line."""
    out: Segments = [(f"{CALLS_OPEN}>\n", True)]
    for name, arguments in calls:
        out += call_segments(name, arguments)
    return [*out, (f"</{DSML} calls>", True)]


def format_call(name: str, arguments: Any) -> str:
    """One call in canonical writing, ending with a newline; see `as_parameters` for `arguments`."""
    return "".join(text for text, _ in call_segments(name, arguments))


def format_calls(calls: Iterable[tuple[str, Any]]) -> str:
    """`(name, arguments)` calls as the block that follows an assistant's content, blank line included."""
    return "".join(text for text, _ in calls_segments(calls))


# --------------------------------------------------------------------------------------------- reading


class Mark(NamedTuple):
    """A recognised mark: `kind` is eos, think, calls, invoke or parameter, with a slash before closing ones."""

    kind: str
    end: int
    attributes: dict[str, str]


class Wait:
    """More text is needed before it is known whether a mark stands here."""


WAIT = Wait()
_WORDS = ((THINK, "think"), (END_THINK, "/think"), (EOS, "eos"))
_STARTS = (f"<{DSML}", f"</{DSML}")
# Attribute values may hold < and >; outside quotes both end the attempt. No input can backtrack here: at every
# character only one branch applies.
_INSIDE = rf'</?{DSML}((?:[^<>"]|"[^"]*")*)'
_TAG = re.compile(_INSIDE + ">")
_UNFINISHED_TAG = re.compile(_INSIDE + r'(?:"[^"]*)?')
_TAG_LIMIT = 1024  # a longer "tag" is ordinary text, so that a stream never waits for ever
_BODY = re.compile(
    r"""\s*(calls|tool_calls|function_calls|invoke|parameter)"""
    r"""((?:\s+[A-Za-z_]+\s*=\s*(?:"[^"]*"|'[^']*'))*)\s*"""
)
_ATTRIBUTE = re.compile(r"""([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")


def mark_at(text: str, start: int, final: bool) -> Mark | Wait | None:
    """The mark at `text[start]`, a `<`; None when there is none; WAIT when more text could still make one.

    Tolerant: the space after the DSML mark, white space inside a tag and the order of attributes are free, and
    older names of the outer tag count. The answer depends on the text alone, never on how it was
    cut: WAIT turns into what the whole text would have given. `final` says that no text follows.
    """
    for word, kind in _WORDS:
        if text.startswith(word, start):
            end = start + len(word)
            if kind != "eos":
                return Mark(kind, end, {})
            if end < len(text):  # the end token ends; in the middle it is ordinary text
                return None
            return Mark(kind, end, {}) if final else WAIT
        if not final and word.startswith(text[start : start + len(word)]):
            return WAIT
    head = text[start : start + len(_STARTS[1])]
    if not head.startswith(_STARTS):
        return WAIT if not final and any(s.startswith(head) for s in _STARTS) else None
    limit = min(len(text), start + _TAG_LIMIT)
    if match := _TAG.match(text, start, limit):
        return _interpret(text[start + 1] == "/", match)
    if not final and limit == len(text) and _UNFINISHED_TAG.fullmatch(text, start, limit):
        return WAIT
    return None


def _interpret(closing: bool, match: re.Match[str]) -> Mark | None:
    body = _BODY.fullmatch(match[1])
    if body is None:
        return None
    name = "calls" if body[1].endswith("calls") else body[1]
    if closing:
        return None if body[2] else Mark("/" + name, match.end(), {})
    attributes = {key: double or single for key, double, single in _ATTRIBUTE.findall(body[2])}
    if name != "calls" and not attributes.get("name"):
        return None
    return Mark(name, match.end(), attributes)


def argument_json(value: str, flag: str | None) -> str:
    """One parameter's value as JSON text: raw text for `string="true"`, else JSON if it is JSON, else raw text."""
    if flag != "true" and is_json(value):
        return value.strip()
    return json.dumps(value, ensure_ascii=False)


def arguments_json(parameters: Mapping[str, str]) -> str:
    """The JSON object of parameters whose values are JSON texts already."""
    inside = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in parameters.items())
    return "{" + inside + "}"
