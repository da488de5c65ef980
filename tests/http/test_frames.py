"""The gate before HTTP/2: nothing is lost in it, and whoever sends too much is found out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hyperframe.frame as frames
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.http.frames import (
    CONTROL_BURST,
    CONTROL_RATE,
    PIECE_COST,
    PREFACE,
    Budget,
    FrameGate,
    SentAway,
    goaway,
)

if TYPE_CHECKING:
    from trio.testing import MockClock

PING = frames.PingFrame(0, b"12345678").serialize()
SETTINGS = frames.SettingsFrame(0).serialize()
PRIORITY = frames.PriorityFrame(1).serialize()
WINDOW = frames.WindowUpdateFrame(0, 1).serialize()
EMPTY = frames.DataFrame(1).serialize()
HEADERS = frames.HeadersFrame(1, b"x" * 20, flags=["END_HEADERS"]).serialize()
RESET = frames.RstStreamFrame(1, 8).serialize()
UNKNOWN = (3).to_bytes(3) + b"\x42" + bytes(5) + b"abc"
DATA = frames.DataFrame(1, b"d" * 16_000).serialize()
BYTE = frames.DataFrame(1, b"d").serialize()


def gate(streams: int = 4) -> FrameGate:
    one = FrameGate(streams)
    assert list(one.pieces(PREFACE)) == [PREFACE]
    return one


async def test_what_was_read_comes_through_in_pieces_however_it_was_cut(
    autojump_clock: MockClock,
) -> None:
    said = PREFACE + SETTINGS + 3 * HEADERS + 5 * DATA + 40 * PING + 30 * WINDOW + 100 * BYTE
    for step in (1, 7, 9, 100, 5000, len(said)):
        one = FrameGate(4)
        read = [said[at : at + step] for at in range(0, len(said), step)]
        pieces = [piece for data in read for piece in one.pieces(data)]
        assert b"".join(pieces) == said
        assert max(piece.count(PING) for piece in pieces) <= PIECE_COST
    assert len(pieces) > 180 / PIECE_COST


@pytest.mark.parametrize("kind", [PING, SETTINGS, PRIORITY, WINDOW, EMPTY, UNKNOWN])
async def test_control_frames_have_a_burst_and_then_a_rate(
    autojump_clock: MockClock, kind: bytes
) -> None:
    one = gate()
    assert b"".join(one.pieces(kind * CONTROL_BURST)) == kind * CONTROL_BURST
    for _ in range(20):
        await trio.sleep(1.01)
        list(one.pieces(kind * CONTROL_RATE))
    with pytest.raises(SentAway, match="control frames"):
        list(one.pieces(kind * (CONTROL_BURST + 1)))


async def test_what_is_sent_to_a_client_and_its_requests_earn_it_frames(
    autojump_clock: MockClock,
) -> None:
    one = gate()
    for _ in range(10_000):  # opens the windows of stream and connection for each token
        one.earn(1)
        list(one.pieces(2 * WINDOW))
    for _ in range(1000):
        list(one.pieces(HEADERS + PING))
    with pytest.raises(SentAway):
        list(one.pieces(3 * CONTROL_BURST * PING))


async def test_requests_that_are_taken_back_have_a_budget(autojump_clock: MockClock) -> None:
    one = gate(streams=100)
    for _ in range(200):
        list(one.pieces(HEADERS + RESET))
    with pytest.raises(SentAway, match="takes back"):
        list(one.pieces(HEADERS + RESET))


@given(st.lists(st.integers(0, 300), max_size=30))
def test_nobody_has_more_than_was_earned(steps: list[int]) -> None:
    clock = [0.0]
    budget = Budget(100, 10, clock=lambda: clock[0])
    spent = earned = 0
    for step in steps:
        match step % 3:
            case 0:
                clock[0] += step / 100
            case 1:
                budget.earn(step)
                earned += step
            case _:
                spent += sum(budget.spend() for _ in range(step))
        assert spent <= 2 * 100 + earned + 10 * clock[0]


def test_goaway_is_what_others_read() -> None:
    data = goaway(0xB, 7)
    frame, length = frames.Frame.parse_frame_header(memoryview(data[:9]))
    frame.parse_body(memoryview(data[9:]))
    assert isinstance(frame, frames.GoAwayFrame)
    assert (length, frame.last_stream_id, frame.error_code) == (8, 7, 0xB)
