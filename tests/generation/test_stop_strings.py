"""Stop strings do not depend on where the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ds4.stop_strings import StopStrings


def whole(text, stops):
    """Character by character: the text before the first stop string to be complete, and whether one was."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def piecewise(pieces, stops):
    matcher, out = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        out += text
        if stopped:
            return out, True
    return out + matcher.flush(), False


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\n€", max_size=4), max_size=12),
    st.lists(st.text("ab\n€", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_gives_the_same(pieces, stops):
    assert piecewise(pieces, stops) == whole("".join(pieces), stops)


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_held_back_is_exactly_what_may_begin_a_stop_string(text, stops):
    matcher, out = StopStrings(stops), ""
    for end in range(1, len(text) + 1):
        piece, stopped = matcher.feed(text[end - 1])
        out += piece
        if stopped:
            break
        open_ends = [n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])]
        assert out == text[: end - max(open_ends)]


@pytest.mark.parametrize(
    ("pieces", "stops", "given_out", "stopped"),
    [
        (["Hel", "lo\n", "\nUser:", " x"], ["\n\nUser:"], ["Hel", "lo", ""], True),
        (["a\n", "\nUs", "e it"], ["\n\nUser:"], ["a", "", "\n\nUse it"], False),
        (["aaa", "ab"], "aab", ["a", "a"], True),
        (["xabcabd"], ["abd"], ["xabc"], True),
        (["abcd"], ["abcd", "bc"], ["a"], True),
        (["xabc"], ["abc", "bc"], ["x"], True),
        (["abc"], None, ["abc"], False),
        (["abc"], [], ["abc"], False),
    ],
)
def test_examples(pieces, stops, given_out, stopped):
    matcher = StopStrings(stops)
    results = [matcher.feed(piece) for piece in pieces[: len(given_out)]]
    assert [text for text, _ in results] == given_out
    assert results[-1][1] is stopped and not any(flag for _, flag in results[:-1])


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [3], [None]], ids=repr)
def test_useless_stop_strings_are_refused(stop):
    with pytest.raises(ValueError, match=r"^stop is"):
        StopStrings(stop)
