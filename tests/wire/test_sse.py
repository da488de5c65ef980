"""The event stream parser against the grammar, and against every way to cut a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.wire.openai.sse import DONE, KEEP_ALIVE, Event, EventParser, EventTooLarge, frame


def test_framing_comes_back() -> None:
    parser = EventParser()
    events = parser.feed(frame(b'{"a":1}') + KEEP_ALIVE + DONE)
    assert events == [Event('{"a":1}'), Event("[DONE]")]
    assert [event.is_done for event in events] == [False, True]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [Event("a")]),
        (b"data:a\n\n", [Event("a")]),
        (b"data:  a\n\n", [Event(" a")]),
        (b"data: a\r\n\r\n", [Event("a")]),
        (b"data: a\r\rx", [Event("a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [Event("a")]),
        (b"data: a\ndata: b\n\n", [Event("a\nb")]),
        (b"data\n\n", [Event("")]),
        (b"event: error\ndata: x\n\ndata: y\n\n", [Event("x", "error"), Event("y")]),
        (b"event: nothing\n\ndata: y\n\n", [Event("y")]),
        (b": comment\nid: 7\nretry: 5\nfoo\n\n", []),
        (b"data: not yet\n", []),
        ("data: \u2028é\n\n".encode(), [Event("\u2028é")]),
        (b"data: \xff\n\n", [Event("\ufffd")]),
        (b"\n\n\n", []),
        (b"", []),
    ],
)
def test_the_grammar(stream: bytes, events: list[Event]) -> None:
    assert EventParser().feed(stream) == events


PIECES = st.sampled_from(
    [
        b"data: ",
        b"data:",
        b"event: x",
        b"\n",
        b"\r",
        b"\r\n",
        b":",
        b"a",
        "é".encode(),
        b"\xef\xbb\xbf",
    ]
)


@given(st.lists(PIECES).map(b"".join), st.data())
def test_cutting_a_stream_anywhere_changes_nothing(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    parser = EventParser()
    events: list[Event] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events += parser.feed(stream[begin:end])
    assert events == EventParser().feed(stream)


@given(st.lists(st.binary(max_size=20)))
def test_any_bytes_are_survived(pieces: list[bytes]) -> None:
    parser = EventParser()
    for piece in pieces:
        for event in parser.feed(piece):
            assert isinstance(event.data, str)


@pytest.mark.parametrize("endless", [b"x" * 11, b"data: 12345\n"])
def test_an_event_without_end_is_bounded(endless: bytes) -> None:
    parser = EventParser(limit=20)
    parser.feed(endless)
    with pytest.raises(EventTooLarge, match="20 bytes"):
        parser.feed(endless * 3)


def test_what_has_ended_does_not_count() -> None:
    parser = EventParser(limit=20)
    for _ in range(100):
        assert parser.feed(b"data: 1234567890\n\n") == [Event("1234567890")]
