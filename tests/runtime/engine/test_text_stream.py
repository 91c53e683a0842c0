"""Stop strings are found wherever pieces are cut, and no part of one is ever shown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp_runtime.engine.text_stream import StopStrings, TextStream

TEXTS = st.text("ab<", max_size=12)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


def feed(stops: Sequence[str], pieces: Sequence[str], *, keep: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, keep=keep)
    shown = []
    for piece in pieces:
        text, stop = matcher.add(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


@given(TEXTS, STOPS)
def test_against_a_search_letter_by_letter(text: str, stops: list[str]) -> None:
    expected, found = text, None
    for end in range(len(text) + 1):
        met = sorted((stop for stop in stops if text[:end].endswith(stop)), key=len)
        if met:
            expected, found = text[: end - len(met[-1])], met[-1]
            break
    shown, stop = feed(stops, list(text))
    assert ("".join(shown), stop) == (expected, found)


@given(TEXTS, STOPS, st.sets(st.integers(0, 12)), st.booleans())
def test_cuts_do_not_matter(text: str, stops: list[str], cuts: set[int], keep: bool) -> None:
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    shown, stop = feed(stops, pieces, keep=keep)
    whole, expected = feed(stops, [text], keep=keep)
    assert ("".join(shown), stop) == ("".join(whole), expected)


def test_holds_back_only_what_may_become_a_stop_string() -> None:
    assert feed(["<end>"], ["a<", "en", "x<e", "nd>b"]) == (["a", "", "<enx", ""], "<end>")
    assert feed(["<end>"], ["a<e", "n"]) == (["a", "", "<en"], None)
    assert feed(["<end>"], ["a<end>b"], keep=True) == (["a<end>"], "<end>")


class Letters:
    """A decoder of one letter per id."""

    def add(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return "!"


@pytest.mark.parametrize("stop", [["b!"], ["x"], []])
def test_end_of_a_stream(stop: list[str]) -> None:
    stream = TextStream(Letters(), stop)
    stream.add(ord("a"))
    stream.add(ord("b"))
    text, met = stream.finish()
    assert stream.text == ("a" if met else "ab!")
    assert met == (stop[0] if stop == ["b!"] else None)
    assert text == ("" if met else "!")


def test_stops_are_ignored_before_min_tokens() -> None:
    stream = TextStream(Letters(), ["a"])
    assert stream.add(ord("a"), may_stop=False) == ("a", None)
    assert stream.add(ord("a")) == ("", "a")
