"""Requests and acknowledgements: order, limits, refusals, and bytes cut anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio import errors
from dynamo_trio.wire.dynamo import two_part
from dynamo_trio.wire.dynamo.ack import (
    ACCEPTED,
    MAX_TEXT,
    Ack,
    AckReader,
    Verdict,
    classify,
    encode_ack,
    refusal,
    refused,
    unknown_endpoint,
)
from dynamo_trio.wire.dynamo.addresses import HostPort, TcpTarget
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, codec_named
from dynamo_trio.wire.dynamo.control import (
    ConnectionInfo,
    ControlMessage,
    ReplyTo,
    decode_payload,
    encode_payload,
)
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.request_frame import (
    MAX_HEADERS,
    MAX_PATH,
    FrameReader,
    RequestFrame,
    encode_frame,
)
from dynamo_trio.wire.dynamo.request_plane import RequestClient, RequestServer
from dynamo_trio.wire.dynamo.two_part import MAX_HEADER, MAX_MESSAGE, TwoPart, TwoPartReader
from tests.wire.dynamo.wire_vectors import cut, drain, feed

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
frames = st.builds(
    RequestFrame,
    path=text,
    payload=st.binary(max_size=60),
    headers=st.dictionaries(text, text, max_size=3),
)
acks = st.builds(Ack, text)
messages = st.builds(TwoPart, st.binary(max_size=20), st.binary(max_size=60))
FRAME = RequestFrame("p", b"xyz", {"a": "b"})


# --- any bytes, cut anywhere -------------------------------------------------------------


@given(st.lists(frames, max_size=4), st.data())
def test_any_frames_cut_anywhere_come_back(sent: list[RequestFrame], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, sent))
    assert feed(FrameReader(), data.draw(cut(stream))) == sent


@given(st.lists(acks, max_size=5), st.data())
def test_any_acknowledgements_cut_anywhere_come_back(sent: list[Ack], data: st.DataObject) -> None:
    stream = b"".join(map(encode_ack, sent))
    assert feed(AckReader(), data.draw(cut(stream))) == sent


@given(st.lists(messages, max_size=5), st.data())
def test_any_messages_cut_anywhere_come_back(sent: list[TwoPart], data: st.DataObject) -> None:
    encoded = [two_part.encode(message.header, message.data) for message in sent]
    assert feed(TwoPartReader(), data.draw(cut(b"".join(encoded)))) == sent
    assert [two_part.decode(message) for message in encoded] == sent


def behave(reader: Any, pieces: list[bytes]) -> list[Any]:
    """All that a reader says, its failure included."""
    events: list[Any] = []
    for piece in [*pieces, b""]:
        try:
            events += drain_into(reader, piece, events)
        except errors.RemoteProtocolError as exc:
            with pytest.raises(type(exc)):
                reader.next_event()
            reader.receive_data(b"more")
            assert reader.buffered == 0
            return [*events, str(exc)]
    return events


def drain_into(reader: Any, piece: bytes, events: list[Any]) -> list[Any]:
    """Take events one by one into ``events``, so that a failure does not lose them."""
    reader.receive_data(piece)
    while (event := reader.next_event()) is not None:
        events.append(event)
    assert reader.buffered <= (LIMIT if not isinstance(reader, AckReader) else 4 + MAX_TEXT)
    return []


LIMIT = 256
READERS = {
    "frame": lambda: FrameReader(limit=LIMIT),
    "server": lambda: RequestServer(limit=LIMIT),
    "two_part": lambda: TwoPartReader(limit=LIMIT, header_limit=32),
    "ack": AckReader,
}
#: Bytes that are likely to be lengths, so that garbage gets past the first two bytes.
garbage = st.lists(
    st.binary(max_size=40)
    | st.sampled_from([bytes(n) for n in (1, 2, 3, 4, 7, 8)])
    | st.sampled_from([b"\x00\x05", b"\x00\x00\x00\x07", b"\xff" * 4, b"\xff" * 8])
).map(b"".join)


@pytest.mark.parametrize("kind", READERS)
@given(stream=garbage, data=st.data())
def test_garbage_gives_the_same_however_it_is_cut_and_little_is_kept(
    kind: str, stream: bytes, data: st.DataObject
) -> None:
    said = behave(READERS[kind](), [stream] if stream else [])
    assert said
    assert isinstance(said[-1], Closed | str)
    assert behave(READERS[kind](), data.draw(cut(stream))) == said


@given(st.binary(max_size=80))
def test_a_payload_of_garbage_is_a_typed_error(payload: bytes) -> None:
    with pytest.raises(errors.RemoteProtocolError):
        decode_payload(payload)


@given(st.binary(max_size=80), st.binary(max_size=10))
def test_a_control_header_of_garbage_is_a_typed_error(header: bytes, body: bytes) -> None:
    with pytest.raises(errors.RemoteProtocolError):
        decode_payload(two_part.encode(header, body))


# --- limits ------------------------------------------------------------------------------


def endless(reader: Any, head: bytes) -> type[Exception]:
    """What a reader says to a head with nothing behind it, fed byte by byte."""
    with pytest.raises(errors.RemoteProtocolError) as caught:
        feed(reader, [head[i : i + 1] for i in range(len(head))])
    assert reader.buffered == 0
    return caught.type


def test_lengths_are_judged_before_anything_is_kept() -> None:
    too_long = (MAX_PATH + 1).to_bytes(2, "big")
    assert endless(FrameReader(), too_long) is errors.RemoteProtocolError
    headers = b"\x00\x01p" + (MAX_HEADERS + 1).to_bytes(2, "big")
    assert endless(FrameReader(), headers) is errors.RemoteProtocolError
    payload = b"\x00\x01p\x00\x00" + MAX_MESSAGE.to_bytes(4, "big")
    assert endless(FrameReader(), payload) is errors.MessageTooLarge
    assert endless(FrameReader(limit=20), b"\x00\x30") is errors.MessageTooLarge
    assert endless(AckReader(), (MAX_TEXT + 1).to_bytes(4, "big")) is errors.RemoteProtocolError
    header = (MAX_HEADER + 1).to_bytes(8, "big") + bytes(16)
    assert endless(TwoPartReader(), header) is errors.MessageTooLarge
    data = bytes(8) + MAX_MESSAGE.to_bytes(8, "big") + bytes(8)
    assert endless(TwoPartReader(), data) is errors.MessageTooLarge


def test_a_frame_at_the_limit_passes_and_one_above_it_does_not() -> None:
    size = len(encode_frame(FRAME))
    assert drain(FrameReader(limit=size), encode_frame(FRAME)) == [FRAME]
    with pytest.raises(errors.MessageTooLarge):
        drain(FrameReader(limit=size - 1), encode_frame(FRAME))
    encode_frame(FRAME, limit=size)
    with pytest.raises(errors.PayloadTooLarge):
        encode_frame(FRAME, limit=size - 1)


def test_the_real_limit_is_that_of_a_whole_frame() -> None:
    room = MAX_MESSAGE - len(encode_frame(RequestFrame("p", b"")))
    whole = encode_frame(RequestFrame("p", bytes(room)))
    assert len(whole) == MAX_MESSAGE
    [frame] = drain(FrameReader(), whole)
    assert len(frame.payload) == room


@pytest.mark.parametrize(
    "frame",
    [RequestFrame("p" * (MAX_PATH + 1), b""), RequestFrame("p", b"", {"h": "x" * MAX_HEADERS})],
)
def test_what_no_peer_of_ours_would_take_is_not_sent(frame: RequestFrame) -> None:
    with pytest.raises(errors.LocalProtocolError):
        encode_frame(frame)
    with pytest.raises(errors.LocalProtocolError):
        two_part.encode(bytes(MAX_HEADER + 1))


def test_a_path_is_utf_8() -> None:
    with pytest.raises(errors.RemoteProtocolError, match="UTF-8"):
        drain(FrameReader(), b"\x00\x01\xff\x00\x00\x00\x00\x00\x00")


@pytest.mark.parametrize("message", [b"", bytes(23), bytes(25), bytes(7) + b"\x01" + bytes(16)])
def test_a_payload_is_one_message_and_no_more(message: bytes) -> None:
    with pytest.raises(errors.RemoteProtocolError):
        two_part.decode(message)


def test_whole_frames_must_be_taken_before_more_is_received() -> None:
    reader = FrameReader(limit=20)
    reader.receive_data(encode_frame(FRAME) * 3)
    with pytest.raises(errors.LocalProtocolError):
        reader.receive_data(b"x")
    assert drain(FrameReader(), encode_frame(FRAME) * 3) == [FRAME] * 3


# --- both ends of a connection -----------------------------------------------------------


@given(st.lists(st.tuples(frames, acks), max_size=6))
def test_acknowledgements_keep_the_order_of_requests(pairs: list[tuple[RequestFrame, Ack]]) -> None:
    client, server = RequestClient(), RequestServer()
    data = b"".join(client.send(frame) for frame, _ in pairs)
    assert client.outstanding == len(pairs)
    assert data == b"" or drain(server, data) == [frame for frame, _ in pairs]
    answer = b"".join(server.send(ack) for _, ack in pairs)
    assert answer == b"" or drain(client, answer) == [ack for _, ack in pairs]
    assert client.outstanding == server.outstanding == 0


def test_an_acknowledgement_that_nobody_waits_for() -> None:
    client, server = RequestClient(), RequestServer()
    with pytest.raises(errors.LocalProtocolError):
        server.send(ACCEPTED)
    for _ in range(2):
        with pytest.raises(errors.RemoteProtocolError):
            drain(client, encode_ack(ACCEPTED))


def test_the_end_leaves_open_what_was_not_acknowledged() -> None:
    client = RequestClient()
    client.send(FRAME)
    client.send(FRAME)
    assert drain(client, encode_ack(ACCEPTED) + b"\x00") == [ACCEPTED]
    assert (client.outstanding, client.buffered) == (1, 1)
    assert drain(client, b"") == [Closed(inside=True)]


def test_a_frame_that_is_too_large_is_owed_one_refusal() -> None:
    server = RequestServer(limit=21)
    assert drain(server, encode_frame(FRAME)) == [FRAME]
    for _ in range(2):
        with pytest.raises(errors.MessageTooLarge) as caught:
            drain(server, encode_frame(RequestFrame("p", bytes(20))))
        assert server.outstanding == 2
    ours = server.send(ACCEPTED) + server.send(refusal(caught.value))
    [_, refused_ack] = drain(AckReader(), ours)
    assert classify(refused_ack) is Verdict.TOO_LARGE
    with pytest.raises(errors.LocalProtocolError):
        server.send(ACCEPTED)


def test_a_frame_above_the_workers_limit_is_not_sent() -> None:
    client = RequestClient(limit=10)
    with pytest.raises(errors.PayloadTooLarge):
        client.send(FRAME)
    assert client.outstanding == 0


# --- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "back"),
    [
        (errors.Draining("whatever"), "Server overloaded: draining", errors.Draining),
        (errors.Overloaded("8 of 8"), "Server overloaded: 8 of 8", errors.Overloaded),
        (errors.EngineDead("gone"), "Server overloaded: gone", errors.Overloaded),
        (errors.Overloaded("Server overloaded: x"), "Server overloaded: x", errors.Overloaded),
        (
            errors.MessageTooLarge(size=3, limit=2),
            "Server unavailable: Read error: message too large: 3 bytes (max: 2 bytes)",
            errors.PayloadTooLarge,
        ),
    ],
)
def test_what_we_refuse_makes_a_real_frontend_move(
    error: errors.DynamoException, text: str, back: type[errors.DynamoException]
) -> None:
    ack = refusal(error)
    assert ack.text == text
    assert type(refused(ack)) is back


@given(st.text(min_size=1))
def test_any_text_is_a_refusal_here(words: str) -> None:
    assert refused(Ack(words)) is not None
    [ack] = drain(AckReader(), encode_ack(Ack(words)))
    assert ack.text


def test_the_refusal_of_a_strange_path_is_known_again() -> None:
    assert classify(unknown_endpoint("0/generate")) is Verdict.UNKNOWN_ENDPOINT
    assert classify(Ack("Something new")) is Verdict.REFUSED
    found = refused(Ack("Something new"))
    assert isinstance(found, errors.CannotConnect)
    assert refused(ACCEPTED) is None


# --- the control header ------------------------------------------------------------------

REPLY_TO = ReplyTo(HostPort("::1", 8133), "subject", "id")
CONTROL = ControlMessage.for_request(REPLY_TO, MSGPACK)


@given(text, text, st.integers(1, 65535), st.binary(max_size=20), st.sampled_from([JSON, MSGPACK]))
def test_any_control_message_comes_back(
    subject: str, request_id: str, port: int, body: bytes, codec: Any
) -> None:
    reply_to = ReplyTo(HostPort("host", port), subject, request_id)
    payload = encode_payload(ControlMessage.for_request(reply_to, codec), body)
    control, found = decode_payload(payload)
    assert (control.reply_to(), control.body_codec(), found) == (reply_to, codec, body)


def changed(**fields: object) -> ControlMessage:
    """The control message with other fields, through its JSON."""
    plain: dict[str, Any] = JSON.decoder(dict[str, object], "plain")(JSON.encode(CONTROL))
    plain = {key: value for key, value in {**plain, **fields}.items() if value is not None}
    control, _ = decode_payload(two_part.encode(JSON.encode(plain)))
    return control


def test_no_codec_means_json() -> None:
    assert changed(payload_codec=None).body_codec() is JSON
    assert codec_named(None) is JSON


def test_what_may_be_there_is_kept() -> None:
    control = changed(metadata={"a": "b"}, frontend_send_ts_ns=2**63, unknown=1)
    assert (control.metadata, control.frontend_send_ts_ns) == ({"a": "b"}, 2**63)
    assert control.body_codec() is MSGPACK


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "another"},
        {"request_type": "many_in"},
        {"response_type": "single_out"},
        {"payload_codec": "xml"},
    ],
)
def test_what_cannot_be_served_can_still_be_answered(fields: dict[str, object]) -> None:
    control = changed(**fields)
    assert control.reply_to() == REPLY_TO
    with pytest.raises(errors.RemoteProtocolError):
        control.body_codec()


@pytest.mark.parametrize(
    "info",
    [
        ConnectionInfo(transport="nats", info=REPLY_TO.info().info),
        ConnectionInfo(transport="tcp_server", info="{"),
        ConnectionInfo(transport="tcp_server", info="{}"),
        ConnectionInfo(
            transport="tcp_server",
            info='{"address":"h","subject":"s","context":"c","stream_type":"response"}',
        ),
        ConnectionInfo(
            transport="tcp_server",
            info='{"address":"h:1","subject":"s","context":"c","stream_type":"request"}',
        ),
    ],
)
def test_a_request_that_says_not_where_to_answer(info: ConnectionInfo) -> None:
    control = changed(connection_info=info)
    with pytest.raises(errors.RemoteProtocolError):
        control.reply_to()


# --- addresses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8133", "127.0.0.1", 8133),
        ("::1:8133", "::1", 8133),
        ("[::1]:8133", "::1", 8133),
        ("fe80::1%eth0:1", "fe80::1%eth0", 1),
        ("worker-0.pool.svc:65535", "worker-0.pool.svc", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = HostPort.parse(text)
    assert address == HostPort(host, port)
    assert HostPort.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host: 1"),
        *("host:٣", "host:1e1", "[]:1", "h" * 600 + ":1"),
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(errors.RemoteProtocolError):
        HostPort.parse(text)


@pytest.mark.parametrize("text", ["::1:8131/a1/generate", "h:1/x/y/z", "h:1//"])
def test_a_target_is_split_at_the_first_slash(text: str) -> None:
    target = TcpTarget.parse(text)
    assert f"{target.address}/{target.path}" == str(target) == text


@pytest.mark.parametrize("text", ["h:1", "h:1/", "/x", "h/x:1", ""])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(errors.RemoteProtocolError):
        TcpTarget.parse(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_typed_error(text: str) -> None:
    try:
        target = TcpTarget.parse(text)
    except errors.RemoteProtocolError:
        return
    assert TcpTarget.parse(str(target)) == target


def test_a_refusal_tells_a_client_nothing_of_the_fleets_inside() -> None:
    for text in ("Unknown endpoint: 1f/generate", "Server overloaded: Unknown endpoint: 1f/x"):
        error = refused(Ack(text))
        assert isinstance(error, errors.CannotConnect)
        assert error.message == "the worker does not serve this endpoint any more"
    full = refused(Ack("Server overloaded: the worker is full"))
    assert full is not None
    assert full.message == "the worker is full"
