"""Messages to the exact prompt of DeepSeek V4.1.

Messages are dicts with `role` (system, user, assistant, tool, latest_reminder) and `content` (a string, None, or a
list of text parts), in OpenAI's form. Read besides them:

    system      `tools` (schemas), `response_format` (a JSON schema)
    assistant   `reasoning_content`, `tool_calls`, `wo_eos` (true: an unfinished turn, no end token)
    tool        `tool_call_id`
    user, assistant   `task` (a key of TASKS): the task's token follows the message in place of the usual header

A prompt is a list of segments, because what a message says must never act as control: in a control segment special
spellings are tokens, in a literal segment they are ordinary text. No tokenizer and no tensor is needed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_ds4.dsml import BOS, DSML, END_THINK, EOS, THINK, CallError, Segments, calls_segments, to_json

SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
CONTROL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML, *TASKS.values())
EFFORTS = {"low": 50, "high": 75, "max": 100}
ROLES = ("system", "user", "assistant", "tool", "latest_reminder")

Message = Mapping[str, Any]


class ChatError(ValueError):
    """Messages or options that cannot be rendered."""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: `segments` of (text, is_control), neighbours of one kind joined, none empty."""

    segments: tuple[tuple[str, bool], ...]

    @cached_property
    def text(self) -> str:
        """The prompt as one string."""
        return "".join(text for text, _ in self.segments)


def render(
    messages: Sequence[Message],
    *,
    thinking_mode: str = "chat",
    reasoning_effort: str | int | None = None,
    drop_thinking: bool = True,
    context: Sequence[Message] | None = None,
    add_bos: bool = True,
    add_generation_prompt: bool = True,
    tools: Sequence[Message] | None = None,
) -> Prompt:
    """Renders a conversation.

    thinking_mode: "chat" or "thinking".
    reasoning_effort: low, high (the default), max or 1..100; it shows only in thinking mode.
    drop_thinking: in thinking mode leave out the reasoning of turns before the last user message. Off by itself
        as soon as any message carries tools.
    context: messages whose prompt stands already; they are taken into account, not rendered, and no BOS is written.
    add_generation_prompt: end with the header of the next assistant turn (or the task's token). A conversation that
        ends with an assistant turn never gets one.
    tools: schemas for the first system message, which is created (empty) if the conversation has none.

    Raises ChatError for unknown roles, tasks, efforts, modes and kinds of content.
    """
    if thinking_mode not in ("chat", "thinking"):
        raise ChatError(f"Found thinking mode {thinking_mode!r}; expected 'chat' or 'thinking'.")
    effort = _effort(reasoning_effort)
    before = _checked(context or ())
    new = _checked(messages)
    if tools:
        _attach_tools(before or new, tools)
    before = _merge(before)
    turns = before + _merge(new)
    _order_tool_results(turns)
    thinking = thinking_mode == "thinking"
    keep_all = not drop_thinking or any(turn.get("tools") for turn in turns)
    out: Segments = [(BOS, True)] if add_bos and not before else []
    writer = _Writer(turns, thinking, keep_all, effort)
    try:
        for index in range(len(before), len(turns)):
            out += writer.turn(index)
            if add_generation_prompt or index + 1 < len(turns):
                out += writer.after(index)
    except CallError as error:
        raise ChatError(str(error)) from None
    return Prompt(_joined(out))


def render_text(messages: Sequence[Message], **options: Any) -> str:
    """The text of `render(messages, **options)`."""
    return render(messages, **options).text


# ------------------------------------------------------------------------------------------- preparation


def _effort(value: str | int | None) -> int:
    if value is None:
        return EFFORTS["high"]
    if isinstance(value, str) and value in EFFORTS:
        return EFFORTS[value]
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
        return value
    raise ChatError(f"Found reasoning effort {value!r}; expected low, high, max or an integer from 1 to 100.")


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Shallow copies of the messages, each with a known role and task."""
    if isinstance(messages, (str, bytes, Mapping)):
        raise ChatError(f"Found {type(messages).__name__} as the conversation; expected a list of messages.")
    out = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise ChatError(f"Found role {role!r} in message {index}; expected one of {', '.join(ROLES)}.")
        if message.get("task") is not None and message["task"] not in TASKS:
            raise ChatError(f"Found task {message['task']!r} in message {index}; expected one of {', '.join(TASKS)}.")
        out.append(dict(message))
    return out


def _attach_tools(turns: list[dict[str, Any]], tools: Sequence[Message]) -> None:
    if not turns or turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": ""})
    if turns[0].get("tools"):
        raise ChatError("Found tools both as an argument and on the first system message; pass them once.")
    turns[0]["tools"] = tools


def _text(content: Any, role: str) -> str:
    """Content as one string; text parts are joined by a blank line."""
    return "\n\n".join(_parts(content, role))


def _parts(content: Any, role: str) -> list[str]:
    if content is None:
        return [""]
    if isinstance(content, str):
        return [content]
    if not isinstance(content, (list, tuple)):
        raise ChatError(f"Found {type(content).__name__} as content of a {role} message; expected text or text parts.")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(f"Found a content part of type {kind!r} in a {role} message; this model reads text only.")
    return [part["text"] for part in content]


def _merge(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns user and tool messages into user turns with `blocks`; neighbours share one turn.

    A block is (tool call id or None, is_result, text). A user message does not join a turn that carries a task; a
    task on a later message becomes the turn's.
    """
    out: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role not in ("user", "tool"):
            out.append(message)
            continue
        last = out[-1] if out else None
        if last is None or last["role"] != "user" or (role == "user" and last.get("task") is not None):
            last = {"role": "user", "blocks": []}
            out.append(last)
        if role == "tool":
            text = _text(message.get("content"), role)
            last["blocks"].append((message.get("tool_call_id"), True, text))
        else:
            last["blocks"] += [(None, False, text) for text in _parts(message.get("content"), role)]
            last.update({key: message[key] for key in ("task", "tools") if message.get(key)})
    return out


def _order_tool_results(turns: list[dict[str, Any]]) -> None:
    """Puts the results inside each user turn into the order of the calls before it; unknown ids come last."""
    order: dict[Any, int] = {}
    for turn in turns:
        if turn["role"] == "assistant":
            order = {call.get("id"): n for n, call in enumerate(_calls_of(turn))}
        elif turn["role"] == "user":
            results = [block for block in turn["blocks"] if block[1]]
            results.sort(key=lambda block, order=order: order.get(block[0], len(order)))
            turn["blocks"] = [results.pop(0) if block[1] else block for block in turn["blocks"]]


def _calls_of(turn: Message) -> list[Message]:
    calls = turn.get("tool_calls") or []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError("Found a tool call without a function name; expected {'function': {'name', 'arguments'}}.")
    return calls


# ----------------------------------------------------------------------------------------------- writing


class _Writer:
    """Writes single turns of a prepared conversation as segments."""

    def __init__(self, turns: list[dict[str, Any]], thinking: bool, keep_all: bool, effort: int) -> None:
        self.turns, self.thinking, self.keep_all, self.effort = turns, thinking, keep_all, effort
        users = [n for n, turn in enumerate(turns) if turn["role"] == "user" or (n and turn["role"] == "system")]
        self.last_user = users[-1] if users else -1

    def turn(self, index: int) -> Segments:
        """One turn, without what announces the next one."""
        turn, out = self.turns[index], []
        role = turn["role"]
        if role == "system" or (index == 0 and self.thinking):
            out.append((SYSTEM, True))
        if index == 0 and self.thinking:
            line = (
                f"Reasoning Effort: {self.effort} (range 1-100, the higher the value, the more thorough the reasoning)"
            )
            out.append((line + "\n\n", True))
        if role == "user":
            out += [(USER, True), *_user_blocks(turn["blocks"])]
        elif role == "latest_reminder":
            out += [(REMINDER, True), (_text(turn.get("content"), role), False)]
        elif role == "system":
            out += _system(turn)
        else:
            out += self._assistant(index)
        return out

    def _assistant(self, index: int) -> Segments:
        turn, out = self.turns[index], []
        after_task = index > 0 and self.turns[index - 1].get("task") is not None
        if self.thinking and not after_task and (self.keep_all or index > self.last_user):
            out += [(_text(turn.get("reasoning_content"), "assistant"), False), (END_THINK, True)]
        out.append((_text(turn.get("content"), "assistant"), False))
        calls = [(_wire_name(call["function"], call), call["function"].get("arguments")) for call in _calls_of(turn)]
        if calls:
            out += calls_segments(calls)
        return out if turn.get("wo_eos") else [*out, (EOS, True)]

    def after(self, index: int) -> Segments:
        """What a turn is followed by when an assistant turn, a reminder or nothing comes next."""
        if index + 1 < len(self.turns) and self.turns[index + 1]["role"] not in ("assistant", "latest_reminder"):
            return []
        turn = self.turns[index]
        task = turn.get("task")
        if task is not None:
            header = ASSISTANT + (THINK if self.thinking else END_THINK) if task == "action" else ""
            return [(header + TASKS[task], True)]
        if turn["role"] == "user" or (turn["role"] == "system" and index > 0):
            thinks = self.thinking and (self.keep_all or index >= self.last_user)
            return [(ASSISTANT + (THINK if thinks else END_THINK), True)]
        return []


def _user_blocks(blocks: list[tuple[Any, bool, str]]) -> Segments:
    out: Segments = []
    for n, (_, is_result, text) in enumerate(blocks):
        out.append(("\n\n" if n else "", True))
        out += [("<tool_result>", True), (text, False), ("</tool_result>", True)] if is_result else [(text, False)]
    return out


def _system(turn: Message) -> Segments:
    out: Segments = [(_text(turn.get("content"), "system"), False)]
    if turn.get("tools"):
        out += [("\n\n", True), *tool_preamble(turn["tools"])]
    if turn.get("response_format") is not None:
        out += [
            ("\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n", True),
            (to_json(turn["response_format"]), False),
        ]
    return out


_PREAMBLE = f"""\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
_PREAMBLE_END = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def tool_preamble(tools: Sequence[Message]) -> Segments:
    """The text that explains the call syntax and lists the schemas, one JSON object a line."""
    schemas = "\n".join(to_json(_schema(tool)) for tool in tools)
    return [(_PREAMBLE, True), (schemas, False), (_PREAMBLE_END, True)]


def _schema(tool: Any) -> dict[str, Any]:
    """The inner function object; a namespace becomes part of its name, and its description comes first."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError("Found a tool without a function name; expected {'type': 'function', 'function': {...}}.")
    schema = {**function, "name": _wire_name(function, tool)}
    namespace = tool.get("namespace")
    about = namespace.get("description") if isinstance(namespace, Mapping) else None
    if about:
        schema["description"] = "\n".join([str(about), *filter(None, [function.get("description")])])
    return schema


def _wire_name(function: Message, owner: Message) -> str:
    """`namespace::name` when the tool or call has a namespace (a string, or an object with a name), else the name."""
    namespace = owner.get("namespace")
    if isinstance(namespace, Mapping):
        namespace = namespace.get("name")
    if namespace is None:
        return function["name"]
    if not isinstance(namespace, str):
        raise ChatError(f"Found a {type(namespace).__name__} as namespace of {function['name']!r}; expected its name.")
    return f"{namespace}::{function['name']}"


def _joined(segments: Segments) -> tuple[tuple[str, bool], ...]:
    out: list[list[Any]] = []
    for text, is_control in segments:
        if out and out[-1][1] == is_control:
            out[-1][0] += text
        elif text:
            out.append([text, is_control])
    return tuple((text, is_control) for text, is_control in out)
