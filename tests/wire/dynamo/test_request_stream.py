"""Requests that stream in: what the real frontend and a real worker said, and what may go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.annotated import read_item
from dynamo_trio.wire.dynamo.call_home import ClientEnd, WorkerEnd
from dynamo_trio.wire.dynamo.call_home_states import Accepted, Handshake, Item, Stop
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec
from dynamo_trio.wire.dynamo.control import (
    REQUEST,
    ControlMessage,
    ReplyTo,
    decode_payload,
    encode_payload,
)
from dynamo_trio.wire.dynamo.items_in import Closing, CutOff, ItemReceiver, ItemSender
from dynamo_trio.wire.dynamo.request_frame import FrameReader, encode_frame
from tests.wire.dynamo.wire_vectors import cut, drain, feed, raw, vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.wire.dynamo.items_in import InEvent

FRAMES = [("70", MSGPACK), ("71", JSON)]
STREAMS = [("73", MSGPACK), ("74", JSON)]
ANSWERS = [("75", MSGPACK), ("76", JSON)]


def places_of(name: str) -> tuple[ReplyTo, ReplyTo]:
    """Where the answer goes, and where the items come from."""
    control, body = decode_payload(only(FrameReader(), name).payload)
    items_from = control.items_from()
    assert items_from is not None
    assert body == b""
    return control.reply_to(), items_from


def only(reader: Any, name: str) -> Any:
    [event] = drain(reader, raw(name))
    return event


@pytest.mark.parametrize(("name", "codec"), FRAMES)
def test_a_request_that_streams_in(name: str, codec: Codec) -> None:
    frame = only(FrameReader(), name)
    control, _ = decode_payload(frame.payload)
    reply_to, items_from = places_of(name)
    assert msgspec.to_builtins(control) == vector(name)["decoded"]["control"]
    assert control.body_codec() is codec
    assert reply_to.address == items_from.address == HostPort("127.0.0.1", 8133)
    assert reply_to.request_id == items_from.request_id == control.id
    assert reply_to.subject != items_from.subject
    assert ControlMessage.for_request(reply_to, codec, items_from) == control
    assert encode_payload(control, b"") == frame.payload
    assert encode_frame(frame) == raw(name)


def test_the_handshake() -> None:
    _, items_from = places_of("70")
    assert ItemReceiver().greet(items_from.subject) == raw("72")
    client = ClientEnd()
    client.receive_data(raw("72"))
    assert client.next_event() == Handshake(items_from.subject, REQUEST)


@pytest.mark.parametrize(("name", "codec"), STREAMS)
def test_the_items(name: str, codec: Codec) -> None:
    *items, word = drain(ItemReceiver(), raw(name))
    assert word is Closing.STOP
    decoded = vector(name)["decoded"]
    read = codec.decoder(dict, "item")
    assert [read(item.data) for item in items] == decoded[:-1]
    sender = ItemSender()
    assert b"".join(sender.send(event) for event in (*items, word)) == raw(name)


@pytest.mark.parametrize(("name", "codec"), ANSWERS)
def test_the_answer_is_an_answer_like_any_other(name: str, codec: Codec) -> None:
    client = ClientEnd()
    client.receive_data(raw(name))
    events: list[Any] = []
    while (event := client.next_event()) is not None:
        events.append(event)
        if isinstance(event, Handshake):
            client.accept(codec)
    assert [type(event) for event in events] == [Handshake, Accepted, Item, Item]
    read = codec.decoder(dict, "item")
    values = [read(read_item(codec, item.data) or b"") for item in events[2:]]
    assert values == [item["data"]["data"] for item in vector(name)["decoded"][2:]]
    worker = WorkerEnd(codec)
    assert b"".join(worker.send(event) for event in events) == raw(name)
    assert client.send(Stop()) == ItemSender().send(Closing.STOP)


# --- every order of events, cut anywhere -----------------------------------------------------

items = st.binary(min_size=1, max_size=50).map(Item)


@given(st.data(), st.lists(items, max_size=8), st.sampled_from([*Closing, None]))
def test_events_depend_on_the_bytes_alone(
    data: Any, sent: list[Item], word: Closing | None
) -> None:
    sender = ItemSender()
    events: list[InEvent] = [*sent, *([] if word is None else [word])]
    stream = b"".join(sender.send(event) for event in events if not isinstance(event, CutOff))
    receiver = ItemReceiver()
    found = feed(receiver, data.draw(cut(stream)))
    found += drain(receiver, b"")
    assert found == [*events, *([CutOff()] if word is None else [])]
    assert receiver.closed


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_a_broken_rule_and_nothing_else(garbage: bytes) -> None:
    receiver = ItemReceiver(limit=1000)
    try:
        events = drain(receiver, garbage) + drain(receiver, b"")
    except RemoteProtocolError:
        assert not receiver.closed
    else:
        assert receiver.closed
        assert isinstance(events[-1], CutOff | Closing)


def test_an_end_inside_an_item_is_told_apart() -> None:
    receiver = ItemReceiver()
    assert drain(receiver, ItemSender().send(Item(b"abc"))[:-1]) == []
    assert drain(receiver, b"") == [CutOff(inside=True)]


@pytest.mark.parametrize(
    "message",
    [
        two_part.encode(header=b'"go"'),
        two_part.encode(header=b'"stop"', data=b"x"),
        two_part.encode(),
    ],
)
def test_neither_an_item_nor_a_word(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        drain(ItemReceiver(), message)


def test_nothing_follows_the_closing_word() -> None:
    sender, receiver = ItemSender(), ItemReceiver()
    assert drain(receiver, sender.send(Closing.COMPLETE)) == [Closing.COMPLETE]
    assert drain(receiver, b"more") == []
    for event in (Item(b"x"), Closing.KILL):
        with pytest.raises(LocalProtocolError):
            sender.send(event)


def test_an_item_that_is_too_large_is_refused_by_its_announcement() -> None:
    with pytest.raises(RemoteProtocolError):
        drain(ItemReceiver(limit=100), ItemSender().send(Item(b"x" * 200))[:30])


# --- control messages that cannot be -----------------------------------------------------------

PLACE = ReplyTo(HostPort("127.0.0.1", 1), "subject", "id")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: msgspec.structs.replace(m, request_stream_connection_info=msgspec.UNSET),
        lambda m: msgspec.structs.replace(m, request_stream_connection_info=PLACE.info()),
        lambda m: msgspec.structs.replace(
            m, request_stream_connection_info=ReplyTo(PLACE.address, "s", "other").info(REQUEST)
        ),
    ],
    ids=["no place", "place of an answer", "another id"],
)
def test_a_request_that_does_not_say_where_it_streams_in_from(
    change: Callable[[ControlMessage], ControlMessage],
) -> None:
    control = change(ControlMessage.for_request(PLACE, JSON, PLACE))
    with pytest.raises(RemoteProtocolError):
        control.items_from()


def test_an_ordinary_request_streams_in_from_nowhere() -> None:
    assert ControlMessage.for_request(PLACE, JSON).items_from() is None
