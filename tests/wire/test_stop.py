"""The stop-string scanner against a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamo_trio.wire.openai.stop import StopScanner


def scan(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = "".join([scanner.push(piece) for piece in pieces])
    if scanner.matched is None:
        text += scanner.flush()
    else:
        assert scanner.push("more") == ""
        assert scanner.flush() == ""
    return text, scanner.matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The match that ends first, the longer of two; by trying every end."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = st.lists(st.text("ab\n😀", min_size=1, max_size=5), min_size=1, max_size=4)


@given(STOPS, st.lists(st.text("ab\n😀", max_size=6), max_size=12))
@example(["aab"], ["a", "a", "a", "b"])
@example(["abc", "b"], ["ab", "c"])
@example(["ab", "bab"], ["ba", "b"])
@example(["a"], ["", "", "a"])
def test_any_split_equals_a_search_in_the_whole(stops: list[str], pieces: list[str]) -> None:
    assert scan(stops, pieces) == naive(stops, "".join(pieces))


@given(STOPS, st.lists(st.text("ab", max_size=3)))
def test_only_a_possible_beginning_is_held_back(stops: list[str], pieces: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = full = ""
    for piece in pieces:
        shown += scanner.push(piece)
        full += piece
        if scanner.matched is not None:
            return
        held = full.removeprefix(shown)
        assert shown + held == full
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stops_everything_passes() -> None:
    assert scan([], ["a", "b"]) == ("ab", None)


def test_an_empty_stop_string_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner(["a", ""])
