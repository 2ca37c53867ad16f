"""Rendering of conversations: goldens, rules that the goldens do not reach, and what is refused."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ds4 import chat, tool_calls
from mlx_ds4.chat import ChatError, render, render_text

GOLDEN = Path(__file__).parent.parent / "golden" / "chat"
CASES = json.loads((GOLDEN / "encode.json").read_text(encoding="utf-8"))
NAMESPACES = json.loads((GOLDEN / "namespaces.json").read_text(encoding="utf-8"))
HEADER = "<｜Assistant｜>"


def options_of(case: dict) -> dict:
    options = dict(case["options"])
    if "add_default_bos_token" in options:
        options["add_bos"] = options.pop("add_default_bos_token")
    return options


@pytest.mark.parametrize("case", CASES + NAMESPACES, ids=lambda case: case["name"])
def test_golden_prompts(case):
    prompt = render(case["messages"], **options_of(case))
    assert prompt.text == case["prompt"]
    assert "".join(text for text, _ in prompt.segments) == case["prompt"]
    assert all(a[1] != b[1] for a, b in itertools.pairwise(prompt.segments))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_ids(case, real):
    """The raw text gives `ids`; the messages give `ids_literal_text` where a user spells special tokens."""
    assert real.encode(case["prompt"]) == case["ids"]
    ids = real.apply_chat_template(case["messages"], **options_of(case))
    assert ids == case.get("ids_literal_text", case["ids"])
    assert real.decode(ids) == case["prompt"]


def test_one_golden_case_tells_literal_from_special_text():
    assert sum(case.get("ids_literal_text", case["ids"]) != case["ids"] for case in CASES) == 1


def test_the_tool_preamble_is_the_release_s():
    text = "".join(part for part, _ in chat.tool_preamble([]))
    data = text.encode("utf-8")
    assert (len(data), len(text)) == (983, 947)
    assert hashlib.sha256(data).hexdigest() == "3c2b43c02161a7a1cdeac198315dd2880af743771744cbfc2a5f38f162c477ac"


SPELLINGS = [*chat.CONTROL_TOKENS, "<｜DSML｜ calls>", "</｜DSML｜ invoke>", "<tool_result>", "｜", "<", "think>", "a"]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(SPELLINGS), max_size=6).map("".join), min_size=8, max_size=8))
def test_no_message_can_forge_a_control_token(texts, real):
    def conversation(t):
        call = {"id": "1", "function": {"name": "f" + t[3], "arguments": json.dumps({"k" + t[4]: t[5]})}}
        tool = {"type": "function", "function": {"name": "f", "description": t[6]}}
        return [
            {"role": "system", "content": t[0], "tools": [tool], "response_format": {"x": t[7]}},
            {"role": "user", "content": t[1]},
            {"role": "assistant", "content": t[2], "reasoning_content": t[7], "tool_calls": [call]},
            {"role": "tool", "content": t[0], "tool_call_id": "1"},
            {"role": "latest_reminder", "content": t[1]},
        ]

    control = {real.token_id(token) for token in chat.CONTROL_TOKENS}
    ids = real.apply_chat_template(conversation(texts), thinking_mode="thinking")
    harmless = real.apply_chat_template(conversation(["x"] * 8), thinking_mode="thinking")
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    assert real.decode(ids) == render_text(conversation(texts), thinking_mode="thinking")


def user(text: str, **more) -> dict:
    return {"role": "user", "content": text, **more}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_effort_levels():
    def number(effort):
        return render_text([user("x")], thinking_mode="thinking", reasoning_effort=effort).split(" ")[2]

    assert list(map(number, ["low", "high", None, "max", 1, 42, 100])) == ["50", "75", "75", "100", "1", "42", "100"]


@pytest.mark.parametrize("effort", [0, 101, "xhigh", "75", 50.0, True, [1]])
@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_other_efforts_are_refused(effort, mode):
    with pytest.raises(ChatError, match="1 to 100"):
        render([user("x")], thinking_mode=mode, reasoning_effort=effort)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "developer", "content": "x"}], "developer"),
        ([{"content": "x"}], "None"),
        (["x"], "'x'"),
        ("hello", "list of messages"),
        ([user("x", task="dance")], "dance"),
        ([user(3)], "int"),
        ([user({"type": "text", "text": "x"})], "dict"),
        ([user([{"type": "image_url", "image_url": {}}])], "image_url"),
        ([user(["x"])], "str"),
        ([user([{"type": "text", "text": None}])], "text"),
        ([{"role": "system", "content": 1.5}], "float"),
        ([assistant("x", reasoning_content=7)], "int"),
        ([assistant("x", tool_calls=[{"id": "1"}])], "function name"),
        ([assistant("x", tool_calls=[{"function": {"name": "f", "arguments": {"k": {1, 2}}}}])], "JSON"),
        ([{"role": "system", "content": "", "tools": [{"name": "f"}]}], "function name"),
        ([{"role": "system", "content": "", "tools": [{**TOOL, "namespace": 3}]}], "namespace"),
        ([{"role": "system", "content": "", "response_format": float("nan")}], "JSON"),
    ],
)
def test_bad_messages_are_refused(messages, words):
    with pytest.raises(ChatError, match=words) as caught:
        render(messages, drop_thinking=False, thinking_mode="thinking")
    assert "\n" not in str(caught.value)


def test_bad_mode_is_refused():
    with pytest.raises(ChatError, match="chat"):
        render([user("x")], thinking_mode="deep")


def test_an_empty_conversation_is_only_the_begin_token():
    assert render_text([]) == chat.BOS
    assert render([], add_bos=False).segments == ()


def test_messages_are_not_changed():
    messages = [
        {"role": "system", "content": "s", "tools": [TOOL]},
        user("a"),
        user("b", task="query"),
        {"role": "tool", "content": "r"},
    ]
    before = json.dumps(messages)
    render(messages, tools=None)
    render(messages[1:], tools=[TOOL])
    assert json.dumps(messages) == before


def test_tools_given_beside_the_messages():
    with_system = [{"role": "system", "content": "s"}, user("x")]
    on_message = [{"role": "system", "content": "s", "tools": [TOOL]}, user("x")]
    assert render_text(with_system, tools=[TOOL]) == render_text(on_message)
    empty = [{"role": "system", "content": "", "tools": [TOOL]}, user("x")]
    assert render_text([user("x")], tools=[TOOL]) == render_text(empty)
    assert render_text([user("x")], tools=[]) == render_text([user("x")])
    with pytest.raises(ChatError, match="once"):
        render(on_message, tools=[TOOL])


def test_tools_of_the_context_keep_reasoning():
    context = [user("a"), assistant("b", reasoning_content="r")]
    more = [user("c"), assistant("d", reasoning_content="kept"), user("e")]
    assert "kept" not in render_text(more, context=context, thinking_mode="thinking")
    assert "kept</think>d" in render_text(more, context=context, thinking_mode="thinking", tools=[TOOL])


def test_without_generation_prompt_nothing_announces_a_turn():
    for last in (user("x"), user("x", task="query"), user("x", task="action"), {"role": "tool", "content": "x"}):
        text = render_text([user("a"), assistant("b"), last], add_generation_prompt=False)
        assert text.endswith("x") or text.endswith("x</tool_result>")
        assert text.count(HEADER) == 1


@pytest.mark.parametrize("mode", ["chat", "thinking"])
@pytest.mark.parametrize("cut", range(1, 7))
def test_context_and_continuation_join_to_the_whole(mode, cut):
    """Wherever the cut leaves user turns whole, and with reasoning kept."""
    messages = [
        {"role": "system", "content": "s"},
        user("a"),
        assistant("b", reasoning_content="r", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": {}}}]),
        {"role": "tool", "content": "t", "tool_call_id": "1"},
        assistant("c", reasoning_content="r2"),
        {"role": "system", "content": "s2"},
        user("d"),
    ]
    options = {"thinking_mode": mode, "drop_thinking": False}
    ends_open = messages[cut - 1]["role"] in ("user", "tool", "system") and messages[cut]["role"] != "assistant"
    head = render_text(messages[:cut], **options, add_generation_prompt=not ends_open)
    assert head + render_text(messages[cut:], context=messages[:cut], **options) == render_text(messages, **options)


def test_tool_results_follow_the_order_of_the_calls():
    calls = [{"id": i, "function": {"name": "f", "arguments": {}}} for i in "abc"]
    results = [{"role": "tool", "content": f"R{i}", "tool_call_id": i} for i in "cxab"]
    text = render_text([user("q"), assistant("", tool_calls=calls), *results])
    assert [text.index(f"R{i}") for i in "abcx"] == sorted(text.index(f"R{i}") for i in "abcx")
    mixed = render_text(
        [user("q"), assistant("", tool_calls=calls), results[0], user("and"), results[2]],
    )
    assert "<tool_result>Ra</tool_result>\n\nand\n\n<tool_result>Rc</tool_result>" in mixed


def test_tool_results_may_be_lists_of_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = render_text([user("q"), assistant(""), {"role": "tool", "content": parts}])
    assert "<｜User｜><tool_result>one\n\ntwo</tool_result><｜Assistant｜>" in text


def test_a_task_keeps_the_next_user_message_apart():
    text = render_text([user("a", task="query"), user("b")])
    assert text == "<｜begin▁of▁sentence｜><｜User｜>a<｜User｜>b<｜Assistant｜></think>"
    assert render_text([user("a"), user("b", task="query")]).endswith("<｜User｜>a\n\nb<｜query｜>")
    after = render_text(
        [user("a", task="title"), assistant("T", reasoning_content="r")], thinking_mode="thinking", drop_thinking=False
    )
    assert after.endswith("<｜User｜>a<｜title｜>T<｜end▁of▁sentence｜>")


@pytest.mark.parametrize("task", sorted(chat.TASKS))
def test_every_task_has_its_token(task, real):
    text = render_text([user("a", task=task)])
    header = "<｜Assistant｜></think>" if task == "action" else ""
    assert text == f"<｜begin▁of▁sentence｜><｜User｜>a{header}<｜{task}｜>"
    assert real.token_id(f"<｜{task}｜>") is not None


def test_what_the_model_wrote_renders_as_it_was_written():
    """Rendering a turn, parsing it and rendering the parse gives the same text."""
    arguments = {"city": "Oslo", "days": 3, "deep": {"a": [1, None, "ü"]}, "text": 'l1\n<b> "q"'}
    call = {"id": "1", "function": {"name": "get_weather", "arguments": arguments}}
    turns = [user("q"), assistant("Looking:\n", reasoning_content="need it\n", tool_calls=[call])]
    whole = render_text(turns, thinking_mode="thinking")
    head = render_text(turns[:1], thinking_mode="thinking")
    parsed = tool_calls.parse(whole.removeprefix(head), "thinking", strict=True)
    calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in parsed.tool_calls]
    again = assistant(parsed.content, reasoning_content=parsed.reasoning, tool_calls=calls)
    assert parsed.content == "Looking:\n"
    assert render_text([turns[0], again], thinking_mode="thinking") == whole
