"""Every captured vector, read and written: our bytes are the real peers' bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dynamo_trio import errors
from dynamo_trio.wire.dynamo import ack, two_part
from dynamo_trio.wire.dynamo.ack import Ack, AckReader, Verdict, classify, encode_ack
from dynamo_trio.wire.dynamo.addresses import HostPort
from dynamo_trio.wire.dynamo.annotated import annotate, annotate_error, read_item
from dynamo_trio.wire.dynamo.call_home import ClientEnd, WorkerEnd
from dynamo_trio.wire.dynamo.call_home_states import (
    Accepted,
    CompleteFinal,
    Handshake,
    Item,
    Kill,
    Refused,
    Sentinel,
    Stop,
)
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK
from dynamo_trio.wire.dynamo.control import ControlMessage, ReplyTo, decode_payload, encode_payload
from dynamo_trio.wire.dynamo.keys import (
    EventKey,
    InstanceKey,
    endpoint_path,
    file_name,
    key_of_file,
)
from dynamo_trio.wire.dynamo.records import (
    EndpointFields,
    EndpointRecord,
    decode_endpoint,
    decode_event_channel,
    decode_event_source,
    decode_model,
    encode_record,
)
from dynamo_trio.wire.dynamo.request_frame import FrameReader, RequestFrame, encode_frame
from dynamo_trio.wire.llm import output_reader, read_request
from tests.wire.dynamo.wire_vectors import VECTORS, compact, drain, raw, vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.wire.dynamo.call_home_states import UpEvent

SUBJECT = "0617d59e-f13e-4bde-bcc4-1b321db57ce5"
REQUEST_ID = "2ddd79f3-f0f3-4ff8-80bd-d38c7793b5e5"
REPLY_TO = ReplyTo(HostPort("127.0.0.1", 8133), SUBJECT, REQUEST_ID)


def only(events: list[Any]) -> Any:
    [event] = events
    return event


# --- request plane -----------------------------------------------------------------------


def test_a_request_frame() -> None:
    frame = only(drain(FrameReader(), raw("01")))
    assert frame.path == endpoint_path(0x82AFB0CDAFC51877, "generate")
    assert frame.headers == vector("01")["decoded"]["headers"]
    assert len(frame.payload) == vector("01")["decoded"]["payload_len"]
    assert encode_frame(frame) == raw("01")


@pytest.mark.parametrize("name", ["01", "04"])
def test_the_payload_of_a_request_frame(name: str) -> None:
    frame = only(drain(FrameReader(), raw(name)))
    control, body = decode_payload(frame.payload)
    decoded = vector(name)["decoded"]
    assert JSON.encode(control) == compact(decoded.get("control") or decoded["two_part"]["header"])
    codec = control.body_codec()
    request = read_request(codec, body)
    assert msgspec.to_builtins(request) == decoded.get(
        "body", decoded.get("two_part", {}).get("data")
    )
    assert encode_payload(control, codec.encode(request)) == frame.payload


def test_a_request_in_json_comes_back_but_for_the_spaces_in_its_headers() -> None:
    frame = only(drain(FrameReader(), raw("04")))
    spaced = b'{"x-frontend-send-ts-ns": "'
    assert spaced in raw("04")
    assert only(drain(FrameReader(), encode_frame(frame))) == frame


def test_a_control_header() -> None:
    control = JSON.decoder(ControlMessage, "control message")(raw("02"))
    assert control.reply_to() == REPLY_TO
    assert control.body_codec() is MSGPACK
    assert ControlMessage.for_request(REPLY_TO, MSGPACK) == control
    assert JSON.encode(control) == raw("02")


def test_a_preprocessed_request() -> None:
    request = read_request(MSGPACK, raw("03"))
    assert msgspec.to_builtins(request) == vector("03")["decoded"]
    assert MSGPACK.encode(request) == raw("03")


@pytest.mark.parametrize(
    ("name", "verdict", "error"),
    [
        ("05", Verdict.ACCEPTED, None),
        ("06", Verdict.UNKNOWN_ENDPOINT, errors.CannotConnect),
        ("07", Verdict.UNAVAILABLE, errors.NoWorker),
        ("08", Verdict.OVERLOADED, errors.Overloaded),
        ("09", Verdict.TOO_LARGE, errors.PayloadTooLarge),
    ],
)
def test_acknowledgements(name: str, verdict: Verdict, error: type | None) -> None:
    found = only(drain(AckReader(), raw(name)))
    assert found == Ack(vector(name)["decoded"].get("text", ""))
    assert classify(found) is verdict
    assert type(ack.refused(found)) is (error or type(None))
    assert encode_ack(found) == raw(name)


def test_a_frame_that_is_too_large_is_refused_in_the_real_workers_words_behind_a_prefix() -> None:
    """The bare words would be taken for an acceptance by the real frontend."""
    head = b"\x00\x1b" + b"x" * 27 + b"\x00\x00" + b"\xff" * 4
    with pytest.raises(errors.MessageTooLarge) as caught:
        drain(FrameReader(), head)
    assert caught.value.size == 4294967330
    real = raw("09")[4:].decode()
    assert ack.refusal(caught.value).text == f"Server unavailable: {real}"
    assert ack.classify(Ack(real)) is ack.classify(ack.refusal(caught.value))


# --- the way back ------------------------------------------------------------------------


def read_up(frames: bytes) -> tuple[list[Any], ClientEnd]:
    client = ClientEnd()
    client.receive_data(frames)
    events: list[Any] = []
    while (event := client.next_event()) is not None:
        events.append(event)
        if isinstance(event, Handshake):
            client.accept(MSGPACK)
    return events, client


def item_of(name: str) -> bytes:
    """The item in one of the captured frames."""
    events, _ = read_up(raw("10") + raw("11") + raw(name))
    assert events[:2] == [Handshake(SUBJECT), Accepted()]
    [item] = events[2:]
    assert isinstance(item, Item)
    return item.data


STREAM: list[tuple[str, Callable[[], UpEvent]]] = [
    ("10", lambda: Handshake(SUBJECT)),
    ("11", Accepted),
    ("12", lambda: Item(item_of("12"))),
    ("13", lambda: Item(item_of("13"))),
    ("14", lambda: Item(item_of("14"))),
    ("15", CompleteFinal),
    ("16", Sentinel),
]


def test_a_whole_answer() -> None:
    expected = [event() for _, event in STREAM]
    events, client = read_up(raw("17"))
    assert events == expected
    assert client.ending() is None
    worker = WorkerEnd(MSGPACK)
    assert [worker.send(event) for event in expected] == [raw(name) for name, _ in STREAM]
    assert b"".join(raw(name) for name, _ in STREAM) == raw("17")


@pytest.mark.parametrize("name", ["12", "13", "14"])
def test_an_engines_output_lies_in_two_envelopes(name: str) -> None:
    value = read_item(MSGPACK, item_of(name))
    assert value is not None
    assert annotate(MSGPACK, value) == item_of(name)
    inner = vector(name)["decoded"]["data"]["data"]["data"]
    assert msgspec.msgpack.decode(value) == inner
    output = output_reader(MSGPACK)(value)
    assert msgspec.to_builtins(output) == {k: v for k, v in inner.items() if v is not None}
    # Ours is shorter, since it leaves nulls out; it says the same.
    assert output_reader(MSGPACK)(MSGPACK.encode(output)) == output


@pytest.mark.parametrize(
    ("name", "error", "kind"),
    [
        ("20", errors.EngineShutdown("engine shutting down"), errors.EngineShutdown),
        ("21", RuntimeError("boom"), errors.Unknown),
    ],
)
def test_an_error_as_an_item(name: str, error: Exception, kind: type[Exception]) -> None:
    item = annotate_error(MSGPACK, error)
    worker = WorkerEnd(MSGPACK)
    worker.send(Handshake(SUBJECT))
    worker.send(Accepted())
    assert worker.send(Item(item)) == raw(name)
    with pytest.raises(kind) as caught:
        read_item(MSGPACK, item_of(name))
    assert str(caught.value) == vector(name)["decoded"]["data"]["error"]["message"]


def test_a_refusal() -> None:
    refused = Refused.because(errors.InvalidArgument("boom"))
    worker = WorkerEnd(MSGPACK)
    worker.send(Handshake(SUBJECT))
    assert worker.send(refused) == raw("22")
    events, client = read_up(raw("10") + raw("22"))
    assert events == [Handshake(SUBJECT), refused]
    ending = client.ending()
    assert isinstance(ending, errors.InvalidArgument)
    assert ending.message == "boom"


@pytest.mark.parametrize(("name", "wish"), [("18", Kill()), ("19", Stop())])
def test_what_a_client_wishes(name: str, wish: Kill | Stop) -> None:
    assert ClientEnd().send(wish) == raw(name)
    assert drain(WorkerEnd(MSGPACK), raw(name)) == [wish]


# --- discovery ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", vector("30")["cases"], ids=lambda case: case["key"])
def test_file_names(case: dict[str, str]) -> None:
    assert file_name(case["key"]) == case["file"]
    assert key_of_file(case["file"]) == case["key"]


READERS: dict[str, Callable[[bytes], Any]] = {
    "v1/instances": decode_endpoint,
    "v1/mdc": decode_model,
    "v1/event_channels": decode_event_channel,
    "v1/event_sources": decode_event_source,
}
RECORDS = sorted(path.stem for path in VECTORS.glob("3[1-9]_*.json"))


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str) -> None:
    found = vector(name)
    record = READERS[found["bucket"]](compact(found["value"]))
    assert encode_record(record) == compact(found["value"])
    assert file_name(str(record.key)) == found["file_name"]
    assert type(record.key).parse(key_of_file(found["file_name"])) == record.key


def test_records_are_there() -> None:
    assert len(RECORDS) == 9


def test_an_instance_says_how_to_reach_it() -> None:
    record = decode_endpoint(compact(vector("31_instance_g")["value"]))
    target = record.tcp
    assert target is not None
    assert target.address == HostPort("127.0.0.1", 8131)
    assert target.path == endpoint_path(record.instance_id, "generate")
    assert record.codec is MSGPACK
    made = EndpointRecord.for_tcp(record.endpoint_id, record.instance_id, target, MSGPACK)
    assert encode_record(made) == encode_record(record).replace(b'"device_type":"cuda",', b"")


def test_a_card_says_which_model() -> None:
    record = decode_model(compact(vector("32")["value"]))
    card = record.card_json
    assert card.model_types == {"chat", "completions"}
    assert card.tokenizer
    file = card.tokenizer.hf_tokenizer_json
    assert file
    assert file.digest == "2c3df0a7e96ced3cf06bc914683eb485eafde3335a505650f9765258f2492961"
    assert isinstance(record.key, InstanceKey)


def test_a_realtime_card_names_no_files() -> None:
    card = decode_model(compact(vector("35")["value"])).card_json
    assert card.model_types == {"realtime"}
    assert (card.model_input, card.model_info, card.tokenizer) == ("Text", None, None)


def test_an_event_source_says_where_to_recover() -> None:
    record = decode_event_source(compact(vector("34")["value"]))
    assert isinstance(record.key, EventKey)
    assert record.metadata
    target = record.metadata.recovery_target
    assert type(target) is EndpointFields
    assert target.endpoint == f"worker_kv_query_source_{record.publisher_id:x}"


def test_every_vector_is_used() -> None:
    text = "".join(path.read_text() for path in VECTORS.parent.glob("test_*.py"))
    unused = [p.stem for p in VECTORS.glob("*.json") if f'"{p.stem[:2]}' not in text]
    assert [stem for stem in unused if stem not in RECORDS] == []


def test_a_two_part_message_may_carry_a_checksum() -> None:
    message = bytearray(raw("10"))
    message[16:24] = b"\xff" * 8
    assert two_part.decode(bytes(message)) == two_part.decode(raw("10"))


def test_a_frame_may_have_any_header() -> None:
    frame = b"\x00\x01p" + b"\x00\x03{]!" + b"\x00\x00\x00\x01x"
    assert only(drain(FrameReader(), frame)) == RequestFrame("p", b"x")
    assert only(drain(FrameReader(), b"\x00\x01p\x00\x00\x00\x00\x00\x00")) == RequestFrame(
        "p", b""
    )
