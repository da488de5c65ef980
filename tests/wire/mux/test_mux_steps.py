"""A read that holds one step of the engine is taken by a shorter way, to the same end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.wire.mux import events, frames
from dynamo_trio.wire.mux.frames import encode, encode_tokens
from dynamo_trio.wire.mux.limits import MAX_TOKEN
from tests.wire.mux.mux_pair import FRAMES_OF, Pair, all_bytes, only, take_events


def talking() -> tuple[Pair, list[int]]:
    """Two streams with little credit, and one that has ended at the client."""
    pair = Pair()
    sids = [pair.open(credit=4) for _ in range(3)]
    pair.client.cancel(sids[2])
    pair.run()
    return pair, sids


def told(pair: Pair, data: bytes, *, shortly: bool) -> object:
    """What the client is told by these bytes, and how it stands afterwards."""
    client = pair.client
    try:
        event = client.receive_step(data) if shortly else None
        if event is None:
            client.receive_data(data)
            found = take_events(client)
        else:
            found = [event]
    except RemoteProtocolError as exc:
        return str(exc), all_bytes(client)
    # Errors are no values, and an event without content is as good as none.
    said = [repr(one) for one in found if one != events.TokensReceived({}, [])]
    rest = client.streams, client.trifles, client.receiving, all_bytes(client)
    return said, rest


@settings(max_examples=60)
@given(
    tokens=st.lists(st.tuples(st.integers(1, 4), st.integers(0, MAX_TOKEN)), max_size=8),
    finished=st.lists(st.integers(1, 4), max_size=3, unique=True),
)
def test_a_step_is_taken_alike_both_ways(
    tokens: list[tuple[int, int]], finished: list[int]
) -> None:
    flat = [number for pair in tokens for number in pair]
    data = encode_tokens(flat, finished)
    short, long = (talking()[0] for _ in range(2))
    assert told(short, data, shortly=True) == told(long, data, shortly=False)


@settings(max_examples=60)
@given(st.sampled_from([*FRAMES_OF.values()]).flatmap(lambda kind: kind), st.integers(0, 12))
def test_any_frame_is_taken_alike_both_ways(frame: frames.Frame, cut: int) -> None:
    data = encode(frame)
    for piece in (data, data[:cut], data + data[:cut]):
        short, long = (talking()[0] for _ in range(2))
        assert told(short, piece, shortly=True) == told(long, piece, shortly=False)


def test_a_step_is_taken_at_once() -> None:
    pair, (first, second, _) = talking()
    event = pair.client.receive_step(encode_tokens([first, 7, second, 8], []))
    assert event == events.TokensReceived({first: [7], second: [8]}, [])
    assert take_events(pair.client) == []
    assert not pair.client.receiving


def test_a_step_behind_half_a_frame_is_not() -> None:
    pair, (first, *_) = talking()
    data = encode_tokens([first, 7], [])
    pair.client.receive_data(data[:3])
    assert take_events(pair.client) == []
    assert pair.client.receive_step(data) is None
    pair.client.receive_data(data[3:])
    assert only(take_events(pair.client), events.TokensReceived).tokens == {first: [7]}


def test_within_a_message_in_parts_the_long_way_judges() -> None:
    pair, (first, second, _) = talking()
    pair.client.receive_data(encode(frames.Part(first, b"p" * 20)))
    assert take_events(pair.client) == []
    assert pair.client.receive_step(encode_tokens([second, 7], [])) is None


def test_after_a_broken_rule_nothing_is_taken() -> None:
    pair, (first, *_) = talking()
    data = encode_tokens([first, 7] * 5, [])
    with pytest.raises(RemoteProtocolError, match="without credit"):
        pair.client.receive_step(data)
    assert pair.client.receive_step(data) is None
    assert frames.GoAway.type.to_bytes() in all_bytes(pair.client)


def test_a_worker_takes_none() -> None:
    pair, (first, *_) = talking()
    assert pair.worker.receive_step(encode_tokens([first, 7], [])) is None
