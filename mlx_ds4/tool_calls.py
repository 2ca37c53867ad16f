"""What the model wrote, taken apart into reasoning, content and tool calls.

Three readers share one syntax (`dsml.py`): `StreamingParser` for text that is still growing, `parse` for a whole
text (the same parser, fed once), and the strict mode of `parse`, which accepts only what the published parser
accepts. The tolerant readers never raise and never lose text: the texts of all events, joined, are the input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mlx_ds4.dsml import (
    BOS,
    CALLS_OPEN,
    DSML,
    END_THINK,
    EOS,
    THINK,
    CallError,
    Mark,
    Wait,
    argument_json,
    arguments_json,
    format_call,
    format_calls,
    is_json,
    is_json_object,
    mark_at,
)

__all__ = [
    "CallError",
    "Event",
    "ParseError",
    "Parsed",
    "StreamingParser",
    "ToolCall",
    "format_call",
    "format_calls",
    "parse",
]


class ParseError(ValueError):
    """The text is not a complete, well-formed assistant turn (strict mode only)."""


@dataclass(frozen=True)
class ToolCall:
    """One call: `name` as on the wire (`namespace::name` if it has one) and `arguments`, a JSON object as text.

    `complete` is False when the text ended, or the next tag came, before the call's own closing tag: its
    parameters are whole, but more could have followed.
    """

    name: str
    arguments: str
    complete: bool = True

    @property
    def namespace(self) -> str | None:
        """The part of the name before `::`, or None."""
        return self.name.rpartition("::")[0] or None


@dataclass(frozen=True)
class Event:
    """A piece of the text: `kind` is content, reasoning, tool_call (then `call` is set) or markup (no meaning)."""

    kind: str
    text: str
    call: ToolCall | None = None


@dataclass(frozen=True)
class Parsed:
    """An assistant turn. Everything that is not reasoning, a valid call or its frame is content."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]

    @property
    def finish_reason(self) -> str:
        """`tool_calls` when there are any, else `stop`; a caller that ran out of tokens says `length` itself."""
        return "tool_calls" if self.tool_calls else "stop"


def parse(text: str, thinking_mode: str = "chat", *, strict: bool = False) -> Parsed:
    """Takes a finished assistant turn apart; `text` begins right after the prompt's `<think>` or `</think>`.

    Tolerant by default: never raises, and unfinished reasoning is all reasoning, so a call inside it does not
    count. With `strict`, the rules of the published parser: ParseError unless reasoning (in thinking mode) ends,
    the text ends with the end token or a call block, and the block is in canonical writing.
    """
    if strict:
        return _parse_strict(text, thinking_mode)
    parser = StreamingParser(thinking_mode)
    events = parser.feed(text) + parser.finish()
    return Parsed(
        "".join(event.text for event in events if event.kind == "content"),
        "".join(event.text for event in events if event.kind == "reasoning"),
        tuple(event.call for event in events if event.call is not None),
    )


@dataclass
class _OpenCall:
    """A call being read: `raw` is all of its text, `stray` what stands between its parameters."""

    name: str
    raw: list[str]
    stray: list[str] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    key: str = ""
    flag: str | None = None
    value: list[str] = field(default_factory=list)

    def close_value(self, *, implied: bool) -> None:
        value = "".join(self.value)
        if implied:  # the newline before the next tag belongs to the layout
            value = re.sub(r"\r?\n\Z", "", value)
        self.parameters[self.key] = argument_json(value, self.flag)  # the last of equal names wins
        self.value = []

    def finish(self, complete: bool) -> ToolCall | None:
        stray = "".join(self.stray).strip()
        if not stray:
            return ToolCall(self.name, arguments_json(self.parameters), complete)
        if not self.parameters and is_json_object(stray):  # the arguments as one JSON object in place of parameters
            return ToolCall(self.name, stray, complete)
        return None


class StreamingParser:
    """Events from text that arrives in pieces; however it is cut, joined events of equal kind are the same.

    Text that could still become a mark is held back, at most about a thousand characters. A call is reported when
    it ends. Rules: in unfinished reasoning nothing is a call; a `<think>` in the middle of content stays content
    but calls do not count until `</think>`; a value ends at its closing tag or at the next tag; a call whose last
    value is cut off by the end of the text, or that holds stray text, is content, together with its frame.
    """

    def __init__(self, thinking_mode: str = "chat") -> None:
        if thinking_mode not in ("chat", "thinking"):
            raise ValueError(f"Found thinking mode {thinking_mode!r}; expected 'chat' or 'thinking'.")
        self._buffer = ""
        self._position = 0
        self._place = "reasoning" if thinking_mode == "thinking" else "content"
        self._blank = True  # only white space so far in this stretch of reasoning or content
        self._suspended = False  # inside a <think> in the middle of content
        self._frame = ""  # text before a first call, which is content should that call fail
        self._in_block = False
        self._stray = False  # ordinary text between two calls of a block
        self._call: _OpenCall | None = None
        self._events: list[Event] = []

    def feed(self, delta: str) -> list[Event]:
        """Takes more text and returns the events that are now certain, possibly none."""
        self._buffer += delta
        return self._run(final=False)

    def finish(self) -> list[Event]:
        """Ends the text and returns the remaining events."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Event]:
        mark: Mark | None
        while True:
            end, mark = self._next_mark(final)
            text = self._buffer[self._position : end]
            taken = self._on_text(text, mark, final)
            self._position += taken
            if mark is None:
                break
            self._position = mark.end
            self._on_mark(mark, text[taken:], self._buffer[end : mark.end])
        self._buffer = self._buffer[self._position :]
        self._position = 0
        if final:
            self._end_of_text()
        events, self._events = self._events, []
        return events

    def _next_mark(self, final: bool) -> tuple[int, Mark | None]:
        """Where the text that is certain ends, and the mark that stands there, if one does."""
        at = self._buffer.find("<", self._position)
        while at >= 0:
            mark = mark_at(self._buffer, at, final)
            if isinstance(mark, Wait):
                return at, None
            if mark is not None:
                return at, mark
            at = self._buffer.find("<", at + 1)
        return len(self._buffer), None

    # Text and marks, by place: reasoning, content, block (between calls), call (between parameters), value.

    def _on_text(self, text: str, mark: Mark | None, final: bool) -> int:
        """Handles ordinary text; returns how much of it was taken (newlines before a call are left)."""
        if self._place == "block" and self._frame:
            if not text.strip():
                self._frame += text
                return len(text)
            self._release_frame()
        if self._place == "content":
            kept = len(text)
            if mark is None and not final:
                kept = max(len(text.rstrip("\r\n")), len(text) - 4)
            elif mark is not None and mark.kind in ("calls", "invoke") and not self._suspended:
                kept = re.search(r"(?:\r?\n){0,2}\Z", text[-4:]).start() + max(len(text) - 4, 0)
            self._emit("content", text[:kept])
            return kept
        if self._place == "reasoning":
            self._emit("reasoning", text)
        elif self._place == "block":
            layout = 0 if self._stray else len(text) - len(text.lstrip())
            self._emit("markup", text[:layout])
            self._emit("content", text[layout:])
            self._stray = self._stray or layout < len(text)
        else:
            self._call.raw.append(text)
            (self._call.value if self._place == "value" else self._call.stray).append(text)
        return len(text)

    def _on_mark(self, mark: Mark, gap: str, raw: str) -> None:
        """Handles a mark; `raw` is its text, `gap` the newlines before it that belong to its layout."""
        getattr(self, "_mark_in_" + self._place)(mark, gap, raw)

    def _mark_in_reasoning(self, mark: Mark, gap: str, raw: str) -> None:
        if mark.kind == "/think":
            self._emit("markup", raw)
            self._place, self._blank = "content", True
        elif mark.kind == "eos" or (mark.kind == "think" and self._blank):
            self._emit("markup", raw)
        else:
            self._emit("reasoning", raw)

    def _mark_in_content(self, mark: Mark, gap: str, raw: str) -> None:
        if mark.kind == "eos":
            self._emit("markup", raw)
        elif mark.kind in ("think", "/think"):
            if self._blank and not self._suspended:
                self._emit("markup", raw)
                self._place = "reasoning" if mark.kind == "think" else "content"
            else:
                self._emit("content", raw)
                self._suspended = mark.kind == "think"
        elif mark.kind == "calls" and not self._suspended:
            self._frame, self._place, self._in_block, self._stray = gap + raw, "block", True, False
        elif mark.kind == "invoke" and not self._suspended:
            self._frame, self._in_block = gap, False
            self._open_call(mark, raw)
        else:
            self._emit("content", raw)

    def _mark_in_block(self, mark: Mark, gap: str, raw: str) -> None:
        if mark.kind == "invoke":
            self._open_call(mark, raw)
        elif mark.kind in ("calls", "/calls") and not self._frame:
            self._emit("markup", raw)
            self._place = "block" if mark.kind == "calls" else "content"
        else:  # not a block of calls after all, or one that ends without its closing tag
            self._release_frame()
            self._place = "content"
            self._mark_in_content(mark, gap, raw)
        self._stray = False

    def _mark_in_call(self, mark: Mark, gap: str, raw: str) -> None:
        call = self._call
        if mark.kind == "/invoke":
            call.raw.append(raw)
            self._close_call(complete=True)
        elif mark.kind in ("invoke", "/calls", "eos"):
            self._close_call(complete=False)
            self._on_mark(mark, gap, raw)
        else:
            call.raw.append(raw)
            if mark.kind == "parameter":
                call.key, call.flag = mark.attributes["name"], mark.attributes.get("string")
                self._place = "value"
            elif mark.kind != "/parameter":  # a second closing tag does no harm
                call.stray.append(raw)

    def _mark_in_value(self, mark: Mark, gap: str, raw: str) -> None:
        call = self._call
        if mark.kind in ("calls", "think", "/think"):
            call.raw.append(raw)
            call.value.append(raw)
            return
        call.close_value(implied=mark.kind != "/parameter")
        self._place = "call"
        self._mark_in_call(mark, gap, raw)

    def _end_of_text(self) -> None:
        if self._place == "call":
            self._close_call(complete=False)
        elif self._place == "value":
            self._drop_call()
        self._release_frame()

    def _open_call(self, mark: Mark, raw: str) -> None:
        self._call = _OpenCall(mark.attributes["name"], [raw])
        self._place = "call"

    def _close_call(self, *, complete: bool) -> None:
        call = self._call.finish(complete)
        if call is None:
            self._drop_call()
            return
        self._emit("markup", self._frame)
        self._events.append(Event("tool_call", "".join(self._call.raw), call))
        self._frame, self._call = "", None
        self._place, self._stray = ("block" if self._in_block else "content"), False

    def _drop_call(self) -> None:
        """A call that is not one: all of its text is content, and so is its frame if it would have been the first."""
        self._in_block = self._in_block and not self._frame
        self._frame += "".join(self._call.raw)
        self._release_frame()
        self._call = None
        self._place, self._stray = ("block" if self._in_block else "content"), False

    def _release_frame(self) -> None:
        if self._frame:
            self._emit("content", self._frame)
            self._frame, self._place = "", "content"

    def _emit(self, kind: str, text: str) -> None:
        if text:
            self._events.append(Event(kind, text))
            if kind != "markup" and not text.isspace():
                self._blank = False


# ---------------------------------------------------------------------------------------------- strict

_SPECIAL = (BOS, EOS, THINK, END_THINK, DSML)
_INVOKE = re.compile(rf'<{DSML} invoke name="([^"\n]*)">\n')
_PARAMETER = re.compile(
    rf'<{DSML} parameter name="([^"\n]*)" string="(true|false)">(.*?)</{DSML} parameter>\n', re.DOTALL
)


def _parse_strict(text: str, thinking_mode: str) -> Parsed:
    reasoning, rest = "", text
    if thinking_mode == "thinking":
        reasoning, mark, rest = text.partition(END_THINK)
        if not mark:
            raise ParseError(f"Found no {END_THINK}; in thinking mode the reasoning must end with it.")
    ends = [at for at in (rest.find(EOS), rest.find(CALLS_OPEN)) if at >= 0]
    if not ends:
        raise ParseError(f"Found no end of the content; expected {EOS} or a block of calls.")
    content, tail = rest[: min(ends)], rest[min(ends) :]
    for name, part in (("reasoning", reasoning), ("content", content)):
        for special in _SPECIAL:
            if special in part:
                raise ParseError(f"Found {special} inside the {name}, where it is not allowed.")
    calls: tuple[ToolCall, ...] = ()
    if not tail.startswith(EOS):
        calls, tail = _strict_calls(tail)
    if tail not in ("", EOS):
        raise ParseError(f"Found {tail[:40]!r} after the end of the turn; expected nothing but {EOS}.")
    return Parsed(content, reasoning, calls)


def _strict_calls(text: str) -> tuple[tuple[ToolCall, ...], str]:
    """The calls of a block and the text after it; a block may end early between two tags."""
    at, calls = len(CALLS_OPEN), []
    if not text.startswith(">\n", at):
        raise ParseError(f"Found {text[at : at + 20]!r} after the opening of the calls; expected '>' and a newline.")
    at += 2
    while match := _INVOKE.match(text, at):
        name, at, parameters = match[1], match.end(), {}
        while match := _PARAMETER.match(text, at):
            key, flag, value = match.groups()
            if key in parameters or DSML in value or (flag == "false" and not is_json(value)):
                raise ParseError(f"Found parameter {key!r} twice, with a tag inside, or with a value that is not JSON.")
            parameters[key] = argument_json(value, flag)
            at = match.end()
        close = f"</{DSML} invoke>\n"
        complete = text.startswith(close, at)
        calls.append(ToolCall(name, arguments_json(parameters), complete))
        if not complete:
            break
        at += len(close)
    close = f"</{DSML} calls>"
    if text.startswith(close, at) and calls:
        return tuple(calls), text[at + len(close) :]
    if at < len(text) or not calls:
        raise ParseError(f"Found {text[at : at + 40]!r} inside the calls; expected the next tag in canonical writing.")
    return tuple(calls), ""
