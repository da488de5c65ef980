"""The answer's connection: what may follow what, and what each ending means."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio import errors
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.annotated import Annotated, annotate, annotate_error, read_item
from dynamo_trio.wire.dynamo.call_home import MAX_WISH, ClientEnd, WorkerEnd
from dynamo_trio.wire.dynamo.call_home_states import (
    DOWN,
    UP,
    Accepted,
    CompleteFinal,
    Handshake,
    Item,
    Kill,
    Phase,
    Refused,
    Sentinel,
    Stop,
    Wish,
    ending,
    refusal_error,
)
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.wire_errors import MAX_ERROR_TEXT, WireError, from_wire, to_wire
from tests.wire.dynamo.wire_vectors import cut, drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.wire.dynamo.call_home_states import UpEvent

CODECS = pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda codec: codec.name)
codecs = st.sampled_from([MSGPACK, JSON])

#: One event of each kind; the item is a value in either codec.
EVENTS: dict[type, UpEvent] = {
    type(event): event
    for event in (
        Handshake("s"),
        Accepted(),
        Refused("no"),
        Item(b"7"),
        CompleteFinal(),
        Sentinel(),
    )
}
#: A shortest way into each phase.
WAYS: dict[Phase, list[UpEvent]] = {
    Phase.CONNECTED: [],
    Phase.GREETED: [Handshake("s")],
    Phase.STREAMING: [Handshake("s"), Accepted()],
    Phase.COMPLETE: [Handshake("s"), Accepted(), CompleteFinal()],
    Phase.REFUSED: [Handshake("s"), Refused("no")],
    Phase.DONE: [Handshake("s"), Accepted(), CompleteFinal(), Sentinel()],
    Phase.CUT: [Handshake("s"), Accepted(), Sentinel()],
}


def spoken(events: Sequence[UpEvent], codec: Codec = JSON) -> bytes:
    """What a worker writes for these events."""
    worker = WorkerEnd(codec)
    return b"".join(worker.send(event) for event in events)


def forced(event: UpEvent) -> bytes:
    """What a worker would write for an event at the wrong time."""
    worker = WorkerEnd(JSON)
    worker.phase = next(phase for phase, moves in UP.items() if type(event) in moves)
    return worker.send(event)


def hear(client: ClientEnd, data: bytes, codec: Codec = JSON) -> list[Any]:
    client.receive_data(data)
    events: list[Any] = []
    while (event := client.next_event()) is not None:
        events.append(event)
        if isinstance(event, Handshake):
            client.accept(codec)
    return events


def arrived(phase: Phase) -> ClientEnd:
    client = ClientEnd()
    for event in WAYS[phase]:
        assert hear(client, forced(event)) == [event]
    assert client.phase is phase
    return client


# --- order -------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_both_ends_keep_to_one_table(phase: Phase, kind: type[UpEvent]) -> None:
    event, after = EVENTS[kind], UP[phase].get(kind)
    worker, client = WorkerEnd(JSON), arrived(phase)
    for said in WAYS[phase]:
        worker.send(said)
    if after is None:
        with pytest.raises(errors.LocalProtocolError):
            worker.send(event)
        assert worker.phase is phase
        with pytest.raises(errors.RemoteProtocolError):
            hear(client, forced(event))
        assert client.phase is phase
    else:
        assert hear(client, worker.send(event)) == [event]
        assert worker.phase is client.phase is after


@pytest.mark.parametrize("wish", Wish)
@pytest.mark.parametrize("event", [Stop(), Kill()], ids=repr)
def test_a_wish_only_grows(wish: Wish, event: Stop | Kill) -> None:
    client, worker = ClientEnd(), WorkerEnd(JSON)
    client.wish = worker.wish = wish
    after = DOWN[wish].get(type(event))
    if after is None:
        with pytest.raises(errors.LocalProtocolError):
            client.send(event)
        with pytest.raises(errors.RemoteProtocolError):
            drain(worker, ClientEnd().send(event))
    else:
        assert drain(worker, client.send(event)) == [event]
        assert client.wish is worker.wish is after


@pytest.mark.parametrize("phase", Phase)
def test_a_client_may_wish_at_any_time(phase: Phase) -> None:
    client = arrived(phase)
    assert drain(WorkerEnd(JSON), client.send(Stop()) + client.send(Kill()) + client.send(Kill()))


def test_a_stream_is_not_read_before_its_codec_is_known() -> None:
    client = ClientEnd()
    with pytest.raises(errors.LocalProtocolError):
        client.accept(JSON)
    client.receive_data(spoken(WAYS[Phase.STREAMING]))
    assert client.next_event() == Handshake("s")
    with pytest.raises(errors.LocalProtocolError):
        client.next_event()
    client.accept(JSON)
    assert client.next_event() == Accepted()


@CODECS
def test_the_last_item_and_the_end_may_come_as_one(codec: Codec) -> None:
    client = ClientEnd()
    hear(client, spoken(WAYS[Phase.STREAMING]), codec)
    both = two_part.encode(data=codec.encode({"data": 7, "complete_final": True}))
    assert hear(client, both) == [Item(codec.encode(7)), CompleteFinal()]
    assert client.phase is Phase.COMPLETE


@CODECS
@pytest.mark.parametrize(
    "content",
    [
        {"complete_final": False},
        {"data": None, "complete_final": False},
        {"data": {"data": 1}},
        {"data": 1, "complete_final": 0},
        {},
        [],
        None,
    ],
    ids=str,
)
def test_an_item_with_nothing_in_it_is_unreadable(codec: Codec, content: object) -> None:
    client = ClientEnd()
    hear(client, spoken(WAYS[Phase.STREAMING]), codec)
    with pytest.raises(errors.UnreadableItem) as caught:
        hear(client, two_part.encode(data=codec.encode(content)))
    assert not caught.value.migratable


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (Phase.CONNECTED, two_part.encode(b'{"subject":"s","stream_type":"other"}')),
        (Phase.CONNECTED, two_part.encode(b'{"subject":7,"stream_type":"response"}')),
        (Phase.CONNECTED, two_part.encode(b'{"subject":')),
        (Phase.CONNECTED, two_part.encode(b'"sentinel"')),
        (Phase.CONNECTED, two_part.encode(data=b'{"complete_final":true}')),
        (Phase.GREETED, two_part.encode(b'{"error":1}')),
        (Phase.GREETED, two_part.encode(b"{}")),
        (Phase.GREETED, two_part.encode(b'{"error":null,"typed_error":{}}')),
        (Phase.STREAMING, two_part.encode(b'{"error":null}')),
        (Phase.STREAMING, two_part.encode(b'"stop"')),
        (Phase.STREAMING, two_part.encode(b"x", b"y")),
        (Phase.STREAMING, two_part.encode()),
    ],
)
def test_what_no_worker_says(phase: Phase, message: bytes) -> None:
    client = arrived(phase)
    for _ in range(2):
        with pytest.raises(errors.RemoteProtocolError):
            hear(client, message)
        assert client.buffered == 0
    assert client.phase is phase


@pytest.mark.parametrize(
    "message",
    [
        two_part.encode(b'"sentinel"'),
        two_part.encode(b'"halt"'),
        two_part.encode(b"7"),
        two_part.encode(b"stop"),
        two_part.encode(b'"stop"', b"x"),
        two_part.encode(data=b'"stop"'),
        two_part.encode(),
        two_part.encode(b'"' + b"x" * MAX_WISH + b'"'),
    ],
)
def test_what_no_client_says(message: bytes) -> None:
    worker = WorkerEnd(JSON)
    for _ in range(2):
        with pytest.raises(errors.RemoteProtocolError):
            drain(worker, message)


def test_a_typed_error_alone_is_a_refusal() -> None:
    typed = two_part.encode(b'{"error":null,"typed_error":{"error_type":"Disconnected"}}')
    [refused] = hear(arrived(Phase.GREETED), typed)
    assert isinstance(refusal_error(refused), errors.Disconnected)


# --- endings -----------------------------------------------------------------------------


def test_the_end_of_the_bytes_is_told_once() -> None:
    client = arrived(Phase.STREAMING)
    assert hear(client, b"\x00") == []
    assert hear(client, b"") == [Closed(inside=True)]
    assert client.next_event() is None
    with pytest.raises(errors.LocalProtocolError):
        client.receive_data(b"x")
    assert hear(arrived(Phase.DONE), b"") == [Closed()]


@pytest.mark.parametrize(
    ("phase", "expected", "words"),
    [
        (Phase.CONNECTED, errors.Disconnected, "before the response stream was established"),
        (Phase.GREETED, errors.Disconnected, "before the response stream was established"),
        (Phase.STREAMING, errors.Disconnected, "Stream ended before generation completed"),
        (Phase.CUT, errors.Disconnected, "Stream ended before generation completed"),
        (Phase.REFUSED, errors.CannotConnect, "failed before response stream: no"),
        (Phase.COMPLETE, None, ""),
        (Phase.DONE, None, ""),
    ],
)
def test_every_ending_has_its_meaning(
    phase: Phase, expected: type[errors.DynamoException] | None, words: str
) -> None:
    found = arrived(phase).ending()
    assert type(found) is (expected or type(None))
    if found is not None:
        assert found.migratable
        assert words in str(found)


def test_a_refusal_without_words_is_one_still() -> None:
    assert isinstance(ending(Phase.REFUSED), errors.CannotConnect)


#: error_type on the wire -> what it is here, and whether the request may move.
TYPED: list[tuple[str | dict[str, str], type[errors.DynamoException], bool]] = [
    ("Disconnected", errors.Disconnected, True),
    ("ConnectionTimeout", errors.ConnectionTimeout, True),
    ("ResponseTimeout", errors.ConnectionTimeout, True),
    ("WorkerOverloaded", errors.Overloaded, True),
    ("CannotConnect", errors.CannotConnect, True),
    ({"Backend": "EngineShutdown"}, errors.EngineShutdown, True),
    ({"Backend": "StreamIncomplete"}, errors.StreamIncomplete, True),
    ("Unknown", errors.Unknown, False),
    ("Cancelled", errors.Cancelled, False),
    ({"Backend": "Cancelled"}, errors.Cancelled, False),
    ({"Backend": "Unknown"}, errors.Unknown, False),
    ({"Backend": "InvalidArgument"}, errors.InvalidArgument, False),
    ("InvalidArgument", errors.InvalidArgument, False),
    ("SomethingNew", errors.Unknown, False),
    ({"Backend": "SomethingNew"}, errors.Unknown, False),
    ({"Frontend": "Disconnected"}, errors.Unknown, False),
    ({}, errors.Unknown, False),
]


@CODECS
@pytest.mark.parametrize(("error_type", "kind", "migratable"), TYPED, ids=str)
def test_an_error_item_is_raised_as_what_it_is(
    codec: Codec,
    error_type: str | dict[str, str],
    kind: type[errors.DynamoException],
    migratable: bool,
) -> None:
    error = WireError(error_type=error_type, message="m")
    with pytest.raises(kind, match="m") as caught:
        read_item(codec, codec.encode(Annotated(event="error", error=error)))
    assert type(caught.value) is kind
    assert caught.value.migratable is migratable


@pytest.mark.parametrize(("error_type", "kind", "migratable"), TYPED, ids=str)
def test_a_typed_refusal(
    error_type: str | dict[str, str], kind: type[errors.DynamoException], migratable: bool
) -> None:
    found = refusal_error(Refused("t", WireError(error_type=error_type, message="m")))
    invalid = kind is errors.InvalidArgument
    assert type(found) is (kind if migratable or invalid else errors.CannotConnect)
    assert found.migratable is not invalid


SPELLED: list[tuple[BaseException, type[errors.DynamoException]]] = [
    (errors.ContextLengthExceeded("m"), errors.InvalidArgument),
    (errors.EngineHung("m"), errors.EngineShutdown),
    (errors.EngineShutdown("m", planned=True), errors.EngineShutdown),
    (errors.Draining("m"), errors.EngineShutdown),
    (errors.RemoteProtocolError("m"), errors.InvalidArgument),
    (errors.RequestCut("m"), errors.Unknown),
    (errors.LocalProtocolError("m"), errors.Unknown),
    (errors.StreamIncomplete("m"), errors.StreamIncomplete),
    (errors.Cancelled("m"), errors.Cancelled),
    (errors.Overloaded("m"), errors.Overloaded),
    (errors.CannotConnect("m"), errors.CannotConnect),
    (errors.Disconnected("m"), errors.Disconnected),
    (errors.ConnectionTimeout("m"), errors.ConnectionTimeout),
    (KeyError("m"), errors.Unknown),
    (KeyboardInterrupt("m"), errors.Unknown),
]


@pytest.mark.parametrize(("error", "expected"), SPELLED, ids=lambda value: repr(value))
def test_an_error_travels_as_the_nearest_that_is_known(
    error: BaseException, expected: type[errors.DynamoException]
) -> None:
    found = from_wire(to_wire(error))
    assert type(found) is expected
    assert "m" in str(found)


@CODECS
def test_any_text_of_an_error_can_travel(codec: Codec) -> None:
    error = errors.Unknown("\ud800" + "x" * MAX_ERROR_TEXT)
    with pytest.raises(errors.Unknown) as caught:
        read_item(codec, annotate_error(codec, error))
    assert len(str(caught.value)) == MAX_ERROR_TEXT
    data = spoken([Handshake("s"), Refused.because(error)], codec)
    assert hear(ClientEnd(), data, codec)[-1].text.endswith("xx")


@CODECS
def test_an_item_may_be_a_mere_comment(codec: Codec) -> None:
    assert read_item(codec, codec.encode({"event": "hello", "comment": ["x"]})) is None
    assert read_item(codec, codec.encode({"token_ids": [1]})) is None  # a level is missing
    assert read_item(codec, codec.encode({"data": None})) is None
    with pytest.raises(errors.Unknown, match="a; b"):
        read_item(codec, codec.encode({"event": "error", "comment": ["a", "b"]}))
    with pytest.raises(errors.UnreadableItem):
        read_item(codec, codec.encode([1]))


# --- any stream --------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
headers = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def answers(draw: Any) -> tuple[Codec, list[UpEvent]]:
    codec = draw(codecs)
    events: list[UpEvent] = [Handshake(draw(headers))]
    if draw(st.integers(0, 4)) == 0:
        events.append(Refused(draw(headers)))
    else:
        items = draw(st.lists(values.filter(lambda value: value is not None), max_size=5))
        events += [Accepted(), *(Item(codec.encode(value)) for value in items)]
        events += draw(st.sampled_from([[], [CompleteFinal()], [CompleteFinal(), Sentinel()]]))
    return codec, events


@given(answers(), st.data())
def test_any_answer_cut_anywhere_comes_back(
    answer: tuple[Codec, list[UpEvent]], data: st.DataObject
) -> None:
    codec, events = answer
    stream, client = spoken(events, codec), ClientEnd()
    pieces = data.draw(cut(stream))
    heard = list(itertools.chain.from_iterable(hear(client, piece, codec) for piece in pieces))
    assert heard == events
    assert client.buffered == 0
    whole = any(isinstance(event, CompleteFinal) for event in events)
    assert (client.ending() is None) is whole


@given(codecs, values)
def test_any_value_comes_back_out_of_its_envelopes(codec: Codec, value: object) -> None:
    payload = codec.encode(value)
    assert read_item(codec, annotate(codec, payload)) == (None if value is None else payload)


@given(answers(), st.data())
def test_one_wrong_byte_gives_events_or_a_typed_error(
    answer: tuple[Codec, list[UpEvent]], data: st.DataObject
) -> None:
    codec, events = answer
    stream = bytearray(spoken(events, codec))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] = data.draw(st.integers(0, 255))
    client = ClientEnd(limit=4096)
    try:
        for event in hear(client, bytes(stream), codec):
            if isinstance(event, Item):
                read_item(codec, event.data)
    except errors.DynamoException:
        pass  # a broken rule, or an error that the item now tells
    assert client.buffered <= len(stream)


# --- the plain form of an item -----------------------------------------------------------


@given(value=st.recursive(st.none() | st.integers(0, 2**63) | st.text(), st.lists, max_leaves=8))
def test_the_plain_form_is_read_as_any_other(value: Any) -> None:
    """The same map with its keys turned round, or one key more, is not of the plain form."""
    data = MSGPACK.encode(value)
    before, after = MSGPACK.data_item
    key = before[1:]
    plain = before + data + after
    turned = b"\x82" + after + key + data
    longer = b"\x83" + key + data + MSGPACK.encode("x") + data + after
    for spelled in (plain, turned, longer):
        client = arrived(Phase.STREAMING)
        client.accept(MSGPACK)
        message = two_part.encode(data=spelled)
        if value is None:
            with pytest.raises(errors.UnreadableItem):
                hear(client, message)
        else:
            assert hear(client, message) == [Item(data)]
    for item in (annotate(MSGPACK, data), MSGPACK.encode({"data": value, "id": "1"})):
        assert read_item(MSGPACK, item) == (None if value is None else data)


@pytest.mark.parametrize("phase", [p for p in Phase if Item not in UP[p]])
def test_the_plain_form_does_not_pass_the_table_by(phase: Phase) -> None:
    client = arrived(phase)
    if phase is not Phase.CONNECTED:
        client.accept(MSGPACK)
    before, after = MSGPACK.data_item
    with pytest.raises(errors.RemoteProtocolError):
        hear(client, two_part.encode(data=before + b"\x01" + after), MSGPACK)
