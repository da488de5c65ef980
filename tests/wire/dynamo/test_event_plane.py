"""Messages of the event plane, block hashes and the query for a cache: vectors, garbage."""

from __future__ import annotations

import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import (
    InvalidArgument,
    LocalProtocolError,
    MessageTooLarge,
    RemoteProtocolError,
)
from dynamo_trio.wire.dynamo.block_hash import (
    chain_hash,
    chain_hashes,
    tokens_hash,
    tokens_hashes,
)
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK
from dynamo_trio.wire.dynamo.events import (
    MAX_EVENT,
    MAX_TOPIC,
    EventMessage,
    decode_event,
    encode_event,
)
from dynamo_trio.wire.dynamo.keys import MAX_ID
from dynamo_trio.wire.dynamo.kv_events import (
    Block,
    Cleared,
    KvMetrics,
    Removed,
    RouterEvent,
    Stored,
    UnknownChange,
    decode_kv_events,
    decode_kv_metrics,
    encode_kv_events,
    encode_kv_metrics,
)
from dynamo_trio.wire.dynamo.kv_query import (
    Error,
    Events,
    InvalidRange,
    TooNew,
    TreeDump,
    TreeDumpFailed,
    decode_answer,
    decode_query,
    encode_answer,
    query_endpoint,
)
from tests.wire.dynamo.wire_vectors import raw, vector

if TYPE_CHECKING:
    from collections.abc import Callable

u64 = st.integers(0, MAX_ID)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
codecs = st.sampled_from([MSGPACK, JSON])
CODECS = pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda codec: codec.name)

blocks = st.lists(st.builds(Block, u64, u64), max_size=3).map(tuple)
changes = st.one_of(
    st.builds(Stored, u64 | st.none(), u64 | st.none(), blocks),
    st.builds(Removed, st.lists(u64, max_size=3).map(tuple)),
    st.just(Cleared()),
)
events = st.builds(RouterEvent.of, u64, u64, changes, st.integers(0, 9))
several = st.lists(events, max_size=3).map(tuple)
answers = st.one_of(
    st.builds(TreeDump, events=several, last_event_id=u64),
    st.builds(Events, events=several, last_event_id=u64),
    st.builds(TreeDumpFailed, last_event_id=u64, message=text),
    st.builds(TooNew, requested_start=u64 | st.none(), requested_end=u64, newest_available=u64),
    st.builds(InvalidRange, start_id=u64, end_id=u64),
    st.builds(Error, text),
)
messages = st.builds(
    EventMessage,
    publisher_id=u64,
    sequence=u64,
    published_at=u64,
    topic=text,
    payload=st.binary(max_size=20),
)

# --- envelopes ---------------------------------------------------------------------------

ENVELOPES = [
    "40_zmq_active_sequences_events",
    "40_zmq_forward_pass_metrics",
    "40_zmq_kv_events",
    "40_zmq_kv_metrics",
]


def frames_of(name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in vector(name)["frames_hex"]]


@pytest.mark.parametrize("name", ENVELOPES)
def test_captured_envelopes(name: str) -> None:
    decoded = vector(name)["decoded"]
    event = decode_event(frames_of(name))
    told = msgspec.structs.asdict(event)
    payload = told.pop("payload")
    assert told == {key: decoded["envelope"][key] for key in told}
    assert msgspec.msgpack.decode(payload) == decoded["payload"]
    assert encode_event(event) == frames_of(name)


@given(messages)
def test_any_envelope_comes_back(event: EventMessage) -> None:
    assert decode_event(encode_event(event)) == event


def envelope(**changed: Any) -> bytes:
    fields = {"publisher_id": 1, "sequence": 2, "published_at": 3, "topic": "t", "payload": b"p"}
    body = MSGPACK.encode({k: v for k, v in {**fields, **changed}.items() if v is not None})
    return struct.pack(">BI", 1, len(body)) + body


HEAD = [b"t", struct.pack(">Q", 1), struct.pack(">Q", 2)]
GARBAGE = {
    "no frames": [],
    "a frame too few": HEAD,
    "a frame too many": [*HEAD, envelope(), b""],
    "another topic": [b"u", *HEAD[1:], envelope()],
    "another publisher": [*HEAD, envelope(publisher_id=2)],
    "another sequence": [*HEAD, envelope(sequence=3)],
    "a short number": [HEAD[0], b"\x01", HEAD[2], envelope()],
    "another version": [*HEAD, b"\x02" + envelope()[1:]],
    "a wrong length": [*HEAD, envelope() + b"x"],
    "no head": [*HEAD, b"\x01\x00"],
    "no map": [*HEAD, struct.pack(">BI", 1, 1) + b"\xc0"],
    "no payload": [*HEAD, envelope(payload=None)],
    "a payload in words": [*HEAD, envelope(payload="words")],
    "an id below zero": [*HEAD, envelope(publisher_id=-1)],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_event(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_event(frames)


def test_the_test_of_garbage_begins_with_an_event() -> None:
    assert decode_event([*HEAD, envelope()]).payload == b"p"
    assert decode_event([*HEAD, envelope(published_at=None, new={"x": [1]})]).published_at == 0


@given(st.lists(st.binary(max_size=30), min_size=3, max_size=5))
def test_any_frames_are_an_event_or_none(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_event(frames)


@given(messages, st.data())
def test_a_spoilt_byte_spoils_no_more_than_the_event(event: EventMessage, data: Any) -> None:
    frames = encode_event(event)
    frame = bytearray(frames[3])
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_event([*frames[:3], bytes(frame)])
    except RemoteProtocolError:
        return
    assert (found.topic, found.sequence) == (event.topic, event.sequence)


def test_events_have_a_largest_size() -> None:
    large = EventMessage(publisher_id=1, sequence=1, topic="t", payload=b"x" * MAX_EVENT)
    with pytest.raises(LocalProtocolError):
        encode_event(large)
    with pytest.raises(LocalProtocolError):
        encode_event(msgspec.structs.replace(large, topic="t" * (MAX_TOPIC + 1), payload=b""))
    with pytest.raises(MessageTooLarge):
        decode_event([*HEAD, b"\x01" + b"\xff" * (MAX_EVENT + 5)])


# --- payloads ----------------------------------------------------------------------------


def payload_of(name: str) -> bytes:
    return decode_event(frames_of(name)).payload


def without_images(value: Any) -> Any:
    """What ours are short of: the field for images, when there are none."""
    if isinstance(value, list):
        return [without_images(item) for item in value]
    if isinstance(value, dict):
        return {k: without_images(v) for k, v in value.items() if k != "mm_extra_info"}
    return value


def test_captured_kv_events() -> None:
    decoded = vector("40_zmq_kv_events")["decoded"]["payload"]
    [event] = decode_kv_events(payload_of("40_zmq_kv_events"))
    assert (event.worker_id, event.dp_rank, event.event_id) == (7084621984258738440, 0, 3)
    hashes = vector("41")
    pairs = zip(hashes["block_hash"], hashes["tokens_hash"], strict=True)
    assert event.change == Stored(None, blocks=tuple(Block(*pair) for pair in pairs))
    assert msgspec.msgpack.decode(encode_kv_events([event])) == without_images(decoded)


def test_a_captured_removal() -> None:
    decoded = vector("44")["decoded"]
    [event] = decode_kv_events(MSGPACK.encode([decoded]))
    gone = decoded["event"]["data"]["removed"]["block_hashes"]
    assert event.change == Removed(tuple(gone))
    assert event == RouterEvent.of(decoded["worker_id"], 3, event.change)
    assert encode_kv_events([event]) == MSGPACK.encode([decoded])


def test_a_clear_is_a_bare_word() -> None:
    event = RouterEvent.of(1, 7, Cleared())
    data = msgspec.msgpack.decode(encode_kv_events([event]))[0]["event"]["data"]
    assert data == "cleared"


@given(st.lists(events, max_size=3))
def test_any_kv_events_come_back(made: list[RouterEvent]) -> None:
    assert decode_kv_events(encode_kv_events(made)) == made
    assert [event.weight for event in made] == [weight(event.change) for event in made]


def weight(change: object) -> int:
    match change:
        case Stored(blocks=held) | Removed(block_hashes=held):
            return 1 + len(held)
    return 1


STORED = {"stored": {"parent_hash": None, "blocks": [{"block_hash": 1, "tokens_hash": 2}]}}
IMAGE = {"mm_objects": [{"mm_hash": 9, "offsets": [[0, 4]]}]}


def read_one(data: object, **more: object) -> RouterEvent:
    event = {"event_id": 1, "data": data, "new": [[]]}
    [found] = decode_kv_events(MSGPACK.encode([{"worker_id": 1, "event": event, **more}]))
    return found


def test_other_publishers_write_more_or_less() -> None:
    plain = Stored(None, blocks=(Block(1, 2),))
    assert read_one(STORED).change == plain
    block = {"block_hash": 1, "tokens_hash": 2, "mm_extra_info": IMAGE}
    assert read_one({"stored": {"parent_hash": None, "blocks": [block]}}).change == plain
    assert read_one(STORED, session_id="s", state_source={}).change == plain
    assert read_one({"cleared": None}).change == Cleared()


@pytest.mark.parametrize(
    ("data", "more"),
    [
        ("melted", {}),
        ({"melted": {"hashes": [1]}}, {}),
        (STORED, {"storage_tier": "disk"}),
        (STORED, {"residency_domain": "cache_owner"}),
        ("cleared", {"residency_domain": "cache_owner"}),
    ],
)
def test_what_is_not_about_the_device_is_no_change(data: object, more: dict[str, Any]) -> None:
    assert read_one(data, **more).change == UnknownChange()


def test_a_clear_is_of_every_tier() -> None:
    assert read_one("cleared", storage_tier="disk").change == Cleared()


def test_captured_kv_metrics() -> None:
    metrics = decode_kv_metrics(payload_of("40_zmq_kv_metrics"))
    assert metrics == KvMetrics(worker_id=7084621984258738440, kv_used_blocks=5)
    assert encode_kv_metrics(metrics) == payload_of("40_zmq_kv_metrics")
    with pytest.raises(RemoteProtocolError):
        decode_kv_metrics(MSGPACK.encode({"worker_id": 1, "kv_used_blocks": -1}))


def test_a_number_that_nobody_reads_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError):
        encode_kv_events([RouterEvent.of(1, 1, Removed((2**64,)))])
    with pytest.raises(LocalProtocolError):
        encode_kv_metrics(KvMetrics(worker_id=2**64))


# --- block hashes ------------------------------------------------------------------------


def test_captured_block_hashes() -> None:
    found = vector("41")
    tokens, size = found["tokens"], found["block_size"]
    assert tokens_hashes(tokens, size) == found["tokens_hash"]
    assert chain_hashes(found["tokens_hash"]) == found["block_hash"]
    assert tokens_hash(tokens[:size]) == found["tokens_hash"][0]
    first, second = found["block_hash"][:2]
    assert chain_hash(first, found["tokens_hash"][1]) == second


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 6))
def test_only_full_blocks_have_names(tokens: list[int], size: int) -> None:
    hashes = tokens_hashes(tokens, size)
    whole = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    assert hashes == [tokens_hash(block) for block in whole]
    chained = chain_hashes(hashes)
    assert chained[1:] == chain_hashes(hashes[1:], chained[0] if chained else None)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token(token: int) -> None:
    with pytest.raises(InvalidArgument, match="unsigned 32-bit"):
        tokens_hashes([1, token], 2)


# --- the query ---------------------------------------------------------------------------


def test_a_captured_query() -> None:
    query = decode_query(MSGPACK, raw("42"))
    assert msgspec.to_builtins(query) == vector("42")["decoded"]
    assert MSGPACK.encode(query) == raw("42")
    assert query.is_recovery


@CODECS
@pytest.mark.parametrize("name", ["full dump", "from id", "too new", "invalid"])
def test_captured_answers(codec: Any, name: str) -> None:
    item = vector("43")["decoded"][name]["data"]
    answer = decode_answer(codec, codec.encode(item))
    assert type(answer).__name__ in item
    assert codec.decoder(dict, "item")(encode_answer(codec, answer)) == without_images(item)


@given(codecs, answers)
def test_any_answer_comes_back(codec: Any, answer: Any) -> None:
    assert decode_answer(codec, encode_answer(codec, answer)) == answer


@pytest.mark.parametrize(
    ("scope", "whole"),
    [("all", True), ({"domain": "worker"}, True), ({"domain": "cache_owner"}, False), ("x", False)],
)
def test_a_dump_may_be_of_a_part(scope: object, whole: bool) -> None:
    dump = {"TreeDump": {"events": [], "last_event_id": 1, "reset_scope": scope}}
    answer = decode_answer(JSON, JSON.encode(dump))
    assert isinstance(answer, TreeDump)
    assert answer.is_whole is whole


@pytest.mark.parametrize(
    "kind", ["status", {"status": {"expected": {}}}, {"state_agent_recovery": {"x": [[]]}}]
)
def test_questions_to_state_agents_are_told_apart(kind: object) -> None:
    query = decode_query(JSON, JSON.encode({"worker_id": 1, "dp_rank": 0, "kind": kind}))
    assert not query.is_recovery
    assert not query.supports_tree_dump_failed


def test_where_a_publisher_is_asked() -> None:
    value = vector("34")["value"]
    target = value["metadata"]["recovery_target"]["endpoint"]
    assert query_endpoint(value["publisher_id"]) == target


NOT_ANSWERS = [
    {},
    {"Status": {}},
    {"Error": "a", "TooNew": {"requested_start": 1, "requested_end": 1, "newest_available": 1}},
    {"TreeDump": {"events": []}},
    {"Events": [1]},
    "TreeDump",
]


@CODECS
@pytest.mark.parametrize("value", NOT_ANSWERS, ids=str)
def test_what_is_no_answer(codec: Any, value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_answer(codec, codec.encode(value))


READERS: list[Callable[[bytes], object]] = [
    decode_kv_events,
    decode_kv_metrics,
    lambda data: decode_query(JSON, data),
    lambda data: decode_query(MSGPACK, data),
    lambda data: decode_answer(JSON, data),
    lambda data: decode_answer(MSGPACK, data),
]


@given(st.sampled_from(READERS), st.binary(max_size=40))
def test_garbage_is_refused_and_nothing_else(read: Any, data: bytes) -> None:
    try:
        found = read(data)
    except RemoteProtocolError:
        return
    assert found == []  # the one byte that is an empty list


@given(st.lists(events, min_size=1, max_size=2), st.data())
def test_spoilt_payloads_raise_nothing_else(made: list[RouterEvent], data: Any) -> None:
    payload = bytearray(encode_kv_events(made))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_kv_events(bytes(payload))
    except RemoteProtocolError:
        return
    assert [type(event.weight) for event in found] == [int] * len(found)


@pytest.mark.parametrize("read", READERS)
def test_nesting_has_a_limit(read: Any) -> None:
    for deep in (b"\x91" * 5000, b"[" * 5000, b'{"kind":' * 5000, b"\x81\xa4kind" * 5000):
        with pytest.raises(RemoteProtocolError):
            read(deep)


def test_what_is_not_known_is_not_built() -> None:
    """A large field of a stranger costs no memory beyond its bytes."""
    images = b"\xdd\x00\x10\x00\x00" + b"\x90" * 2**20
    event = MSGPACK.encode([{"worker_id": 1, "event": {"event_id": 1, "data": STORED}, "x": 0}])
    large = event.replace(b"\xa1x\x00", b"\xa1x" + images)
    assert len(large) > 2**20
    tracemalloc.start()
    try:
        decode_kv_events(large)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**19
