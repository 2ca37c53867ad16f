"""Parsing of finished and of streaming turns: goldens for the strict rules, properties for the tolerant ones."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_ds4.tool_calls import CallError, Event, ParseError, StreamingParser, format_call, format_calls, parse

CASES = json.loads((Path(__file__).parent.parent / "golden" / "chat" / "parse.json").read_text(encoding="utf-8"))
EOS = "<｜end▁of▁sentence｜>"
OPEN, CLOSE = "\n\n<｜DSML｜ calls>\n", "</｜DSML｜ calls>"


def found(parsed) -> dict:
    calls = [{"name": call.name, "arguments": call.arguments} for call in parsed.tool_calls]
    return {"content": parsed.content, "reasoning": parsed.reasoning, "tool_calls": calls}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_cases(case):
    """Strict as published; where strict succeeds, tolerant gives the same; where it fails, nothing is lost."""
    tolerant = parse(case["text"], case["thinking_mode"])
    if case.get("error"):
        with pytest.raises(ParseError) as caught:
            parse(case["text"], case["thinking_mode"], strict=True)
        assert "\n" not in str(caught.value)
    else:
        assert found(parse(case["text"], case["thinking_mode"], strict=True)) == case["result"]
        assert found(tolerant) == case["result"]


def test_d04_two_calls():
    text = (
        "\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        '<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Rio</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">5</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        "</｜DSML｜ calls>"
    )
    parsed = parse(text)
    assert [call.name for call in parsed.tool_calls] == ["get_weather"] * 2
    assert [json.loads(call.arguments) for call in parsed.tool_calls] == [
        {"city": "Oslo", "days": 3},
        {"city": "Rio", "days": 5},
    ]
    assert (parsed.content, parsed.reasoning, parsed.finish_reason) == ("", "", "tool_calls")
    assert all(call.complete for call in parsed.tool_calls)
    assert format_calls((call.name, call.arguments) for call in parsed.tool_calls) == text


CALL = format_call("f", {"a": "x", "n": 1})
RELAXED = {
    "no space after the mark": (OPEN + CALL + CLOSE).replace("｜DSML｜ ", "｜DSML｜"),
    "CRLF": (OPEN + CALL + CLOSE).replace("\n", "\r\n"),
    "older outer tag": (OPEN + CALL + CLOSE).replace("calls>", "function_calls>"),
    "no newlines": (OPEN + CALL + CLOSE).replace("\n", ""),
    "single newline before": (OPEN + CALL + CLOSE)[1:],
    "indented": OPEN + (CALL + CLOSE).replace("\n<", "\n    <"),
    "attributes reversed": (OPEN + CALL + CLOSE).replace('name="a" string="true"', "string='true' name='a'"),
    "no flags": (OPEN + CALL + CLOSE).replace(' string="true"', "").replace(' string="false"', ""),
    "no outer tag": "\n\n" + CALL,
    "no closing outer tag": OPEN + CALL,
    "no closing call tag": OPEN + CALL.replace("</｜DSML｜ invoke>\n", "") + CLOSE,
    "no closing parameter tags": OPEN + CALL.replace("</｜DSML｜ parameter>", "") + CLOSE,
    "end token instead of tags": OPEN + CALL.removesuffix("</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n") + EOS,
    "closing tag twice": OPEN + CALL.replace("</｜DSML｜ parameter>", "</｜DSML｜ parameter>" * 2) + CLOSE,
    "first of two values": OPEN
    + CALL.replace(
        "<｜DSML｜ par", '<｜DSML｜ parameter name="a" string="true">y</｜DSML｜ parameter>\n<｜DSML｜ par', 1
    )
    + CLOSE,
    "JSON object as body": OPEN + '<｜DSML｜ invoke name="f">\n{"a": "x", "n": 1}\n</｜DSML｜ invoke>\n' + CLOSE,
}


@pytest.mark.parametrize("text", RELAXED.values(), ids=RELAXED.keys())
def test_tolerated_forms(text):
    parsed = parse("Hm." + text)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [("f", {"a": "x", "n": 1})]
    assert parsed.content.rstrip("\n") == "Hm."  # a newline after a call without the outer tag is content


@pytest.mark.parametrize(
    ("value", "flag", "expected"),
    [
        ("3", "true", "3"),
        ("3", "false", 3),
        (" [1, 2]\n", "false", [1, 2]),
        ("Oslo", "false", "Oslo"),
        ("NaN", "false", "NaN"),
        ("{'a': 1}", "false", "{'a': 1}"),
        ('"quoted"', "false", "quoted"),
        ('"quoted"', "true", '"quoted"'),
        ("", "true", ""),
        ("", "false", ""),
        ("null", "false", None),
        ("<b>&amp;</b> < think", "true", "<b>&amp;</b> < think"),
        ("a <think> b </think>", "true", "a <think> b </think>"),
        ("  \n keep \n", "true", "  \n keep \n"),
        ("[" * 100_000, "false", "[" * 100_000),
        ("9" * 5000, "false", "9" * 5000),
    ],
    ids=str,
)
def test_values(value, flag, expected):
    text = (
        f'{OPEN}<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="k" string="{flag}">{value}</｜DSML｜ parameter>\n'
    )
    (call,) = parse(text + "</｜DSML｜ invoke>\n" + CLOSE).tool_calls
    assert json.loads(call.arguments) == {"k": expected}


def test_unfinished_reasoning_executes_nothing():
    text = "let me" + OPEN + CALL + CLOSE
    parsed = parse(text, "thinking")
    assert (parsed.reasoning, parsed.content, parsed.tool_calls, parsed.finish_reason) == (text, "", (), "stop")
    finished = parse(text + "</think>ok", "thinking")
    assert (finished.reasoning, finished.content, finished.tool_calls) == (text, "ok", ())


def test_a_think_mark_in_content_suspends_calls():
    parsed = parse("see <think> now" + OPEN + CALL + CLOSE)
    assert parsed.content == "see <think> now" + OPEN + CALL + CLOSE
    assert parsed.tool_calls == ()
    assert len(parse("see <think> now</think>" + OPEN + CALL + CLOSE).tool_calls) == 1


def test_marks_at_the_start_are_understood_in_both_modes():
    for mode, text in (("chat", "<think>r</think>c"), ("thinking", "<think>r</think>c"), ("thinking", "r</think>c")):
        parsed = parse(text + EOS, mode)
        assert (parsed.reasoning, parsed.content) == ("r", "c")
    assert parse("</think>c").content == "c"
    assert parse("<think>r" + OPEN + CALL).tool_calls == ()


@pytest.mark.parametrize(
    "text",
    [
        OPEN + "I would call it like this.\n" + CLOSE,
        OPEN + CLOSE,
        OPEN,
        OPEN + '<｜DSML｜ invoke name="f">\nnot a parameter\n</｜DSML｜ invoke>\n' + CLOSE,
        OPEN + '<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="k" string="true">cut',
        OPEN + '<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter na',
        OPEN + '<｜DSML｜ invoke name="f',
        OPEN + "<｜DSML｜ invoke>\n</｜DSML｜ invoke>\n" + CLOSE,
        "a < b <｜DSML <｜DSML｜ what> </｜DSML｜ parameter> <｜end▁of▁sentence｜> more",
        "<｜DSML｜ " + "x" * 5000 + ">",
    ],
)
def test_what_is_no_call_is_content_unchanged(text):
    assert found(parse("Hm." + text)) == {"content": "Hm." + text, "reasoning": "", "tool_calls": []}


def test_a_cut_call_after_a_whole_one_is_content():
    cut = '<｜DSML｜ invoke name="g">\n<｜DSML｜ parameter name="k" string="true">half'
    parsed = parse(OPEN + CALL + cut)
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert parsed.content == cut


def test_calls_that_lack_their_closing_tag_say_so():
    parsed = parse(OPEN + CALL + '<｜DSML｜ invoke name="g">\n')
    assert [(call.name, call.complete) for call in parsed.tool_calls] == [("f", True), ("g", False)]


def test_text_after_and_between_calls_is_content():
    parsed = parse("a" + OPEN + CALL + "note " + CALL + CLOSE + "b" + OPEN + CALL + CLOSE + "c")
    assert (parsed.content, len(parsed.tool_calls)) == ("anote bc", 3)


def test_namespaces():
    parsed = parse(OPEN + format_call("a::b::c", {}) + format_call("plain", {}) + CLOSE)
    assert [(call.name, call.namespace) for call in parsed.tool_calls] == [("a::b::c", "a::b"), ("plain", None)]


# ---- properties

PIECES = [
    "<think>",
    "</think>",
    EOS,
    OPEN,
    "<｜DSML｜ calls>",
    CLOSE,
    CALL,
    '<｜DSML｜ invoke name="f">',
    '<｜DSML｜invoke name="g>h<i">\n',
    "</｜DSML｜ invoke>\n",
    '<｜DSML｜ parameter name="k" string="true">',
    '<｜DSML｜ parameter name="k" string="false">',
    "</｜DSML｜ parameter>\n",
    "<｜DSML｜ ",
    '<｜DSML｜ invoke name="',
    "｜DSML｜",
    "<",
    ">",
    '"',
    "\n",
    "\r\n",
    "\r",
    " ",
    "text",
    "3",
    "{",
    "é🧪",
]
TEXTS = st.one_of(
    st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(PIECES), st.text(max_size=3)), max_size=14).map("".join)
)
MODES = st.sampled_from(["chat", "thinking"])


def merged(events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        if out and event.call is None and out[-1].call is None and out[-1].kind == event.kind:
            out[-1] = Event(event.kind, out[-1].text + event.text)
        else:
            out.append(event)
    return out


def events_of(pieces: list[str], mode: str) -> list[Event]:
    parser = StreamingParser(mode)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


@settings(max_examples=250, deadline=None)
@given(text=TEXTS, mode=MODES, cuts=st.lists(st.integers(0, 400), max_size=8))
@example(text="a\n\n\r\n<｜DSML｜ calls>x", mode="chat", cuts=[1, 2, 3, 4, 5, 6])
@example(text=OPEN + "\n x\n\n" + OPEN + CALL, mode="chat", cuts=[22, 23, 25, 26])
def test_every_way_of_cutting_gives_the_same_events(text, mode, cuts):
    whole = events_of([text], mode)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert merged(events_of(pieces, mode)) == merged(whole)
    assert merged(events_of(list(text), mode)) == merged(whole)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, mode=MODES)
def test_no_text_is_ever_lost(text, mode):
    events = events_of([text], mode)
    assert "".join(event.text for event in events) == text
    for event in events:
        if event.call is not None:
            assert isinstance(json.loads(event.call.arguments), dict)
        if event.kind == "markup":  # only frames, marks and white space may be invisible
            rest = event.text
            for mark in ("<think>", "</think>", EOS, "<｜DSML｜ calls>", CLOSE):
                rest = rest.replace(mark, "")
            assert rest.strip() == ""


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, mode=MODES)
def test_tolerant_agrees_wherever_strict_succeeds(text, mode):
    for candidate in (text, text + EOS, "r</think>" + text + EOS, "c" + OPEN + text + CLOSE):
        try:
            strict = parse(candidate, mode, strict=True)
        except ParseError:
            continue
        assert parse(candidate, mode) == strict


ARGUMENTS = st.dictionaries(
    st.text(st.characters(exclude_characters='"\n｜', exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_characters="｜", exclude_categories=["Cs"]), max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(["f", "ns::g", "h i"]), ARGUMENTS), min_size=1, max_size=3))
def test_written_calls_are_read_back(calls):
    text = "see" + format_calls(calls) + EOS
    for parsed in (parse(text), parse(text, strict=True)):
        assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls
        assert parsed.content == "see"


# ---- streaming


def test_text_is_passed_on_at_once():
    parser = StreamingParser("thinking")
    assert [event.text for event in parser.feed("so ")] == ["so "]
    assert parser.feed("far</thi") == [Event("reasoning", "far")]
    assert parser.feed("nk>Yes") == [Event("markup", "</think>"), Event("content", "Yes")]
    assert parser.feed(", 1 < 2") == [Event("content", ", 1 < 2")]
    assert parser.feed("\n\n<") == []
    assert parser.feed("b>") == [Event("content", "\n\n<b>")]
    assert parser.feed(OPEN + CALL[:-10]) == []
    events = parser.feed(CALL[-10:])
    assert [event.kind for event in events] == ["markup", "tool_call", "markup"]
    assert parser.finish() == []


def test_long_values_cost_linear_time():
    text = OPEN + format_call("f", {"code": "if (a < b) <x> {\n" * 20_000}) + CLOSE
    pieces = [text[i : i + 6] for i in range(0, len(text), 6)]
    start = time.perf_counter()
    events = events_of(pieces, "chat")
    assert [event.call.name for event in events if event.call] == ["f"]
    many = OPEN + CALL * 2_000 + CLOSE
    assert len(parse(many).tool_calls) == 2_000
    assert time.perf_counter() - start < 20


# ---- writing


def test_arguments_of_any_kind_are_written():
    def parameters(arguments):
        return json.loads(parse(OPEN + format_call("f", arguments)).tool_calls[0].arguments)

    assert parameters(None) == {}
    assert parameters('{"a": 1}') == {"a": 1}
    assert parameters(json.dumps(json.dumps({"a": "b"}))) == {"a": "b"}
    assert parameters("nothing like JSON") == {"arguments": "nothing like JSON"}
    assert parameters("[1, 2]") == {"arguments": "[1, 2]"}
    assert parameters([1, 2]) == {"arguments": "[1, 2]"}
    assert parameters('{"a": NaN}') == {"arguments": '{"a": NaN}'}
    assert parameters("[" * 100_000) == {"arguments": "[" * 100_000}
    with pytest.raises(CallError, match="JSON"):
        format_call("f", {"a": float("inf")})
    with pytest.raises(CallError, match="JSON"):
        format_call("f", {"a": object()})


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="thinking"):
        StreamingParser("deep")
