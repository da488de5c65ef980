"""Requests, outputs and records as typed values: round trips, 32-bit floats, garbage."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError
from dynamo_trio.wire.dynamo.annotated import annotate, read_item
from dynamo_trio.wire.dynamo.card import CheckedFile, format_model_types
from dynamo_trio.wire.dynamo.careful import MAX_OPEN
from dynamo_trio.wire.dynamo.codec import JSON, MSGPACK, Codec, codec_named
from dynamo_trio.wire.dynamo.keys import MAX_ID
from dynamo_trio.wire.dynamo.records import (
    EndpointRecord,
    decode_endpoint,
    decode_event_channel,
    decode_event_source,
    decode_model,
    encode_record,
)
from dynamo_trio.wire.llm import (
    CompletionUsage,
    FinishError,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    PromptTokensDetails,
    Routing,
    SamplingOptions,
    StopConditions,
    TopLogprob,
    output_reader,
    read_request,
    shortest_single,
)
from tests.wire.dynamo.wire_vectors import compact, vector

if TYPE_CHECKING:
    from collections.abc import Callable

CODECS = pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=lambda codec: codec.name)
codecs = st.sampled_from([MSGPACK, JSON])

u32 = st.integers(0, 2**32 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
singles = floats.map(shortest_single)
plain = st.dictionaries(text, st.none() | st.booleans() | u32 | text, max_size=2)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def unset(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just(msgspec.UNSET) | strategy


requests = st.builds(
    PreprocessedRequest,
    model=text,
    token_ids=st.lists(u32, max_size=4),
    stop_conditions=st.builds(
        StopConditions,
        max_tokens=maybe(u32),
        stop=maybe(st.lists(text, max_size=2)),
        stop_token_ids_hidden=maybe(st.lists(u32, max_size=2)),
        ignore_eos=maybe(st.booleans()),
    ),
    sampling_options=st.builds(
        SamplingOptions,
        temperature=maybe(singles),
        top_p=maybe(singles),
        top_k=maybe(st.integers(-1, 2**31 - 1)),
        seed=maybe(st.integers(-(2**63), 2**63 - 1)),
        guided_decoding=maybe(plain),
    ),
    output_options=st.builds(OutputOptions, logprobs=maybe(u32)),
    eos_token_ids=maybe(st.lists(u32, max_size=2)),
    annotations=st.lists(text, max_size=2),
    routing=st.builds(Routing, dp_rank=unset(u32), priority_jump=unset(floats)),
    router_config_override=maybe(plain),
    extra_args=unset(plain),
)
outputs = st.builds(
    LLMEngineOutput,
    token_ids=st.lists(u32, max_size=3),
    tokens=maybe(st.lists(maybe(text), max_size=2)),
    text=maybe(text),
    log_probs=maybe(st.lists(floats, max_size=2)),
    top_logprobs=maybe(
        st.lists(
            st.lists(
                st.builds(TopLogprob, rank=u32, token_id=u32, token=maybe(text), logprob=floats),
                max_size=2,
            ),
            max_size=2,
        )
    ),
    finish_reason=maybe(
        st.sampled_from(["stop", "length", "eos", "cancelled", "content_filter"])
        | st.builds(FinishError, text)
    ),
    stop_reason=maybe(text | u32),
    index=maybe(u32),
    completion_usage=maybe(
        st.builds(
            CompletionUsage,
            prompt_tokens=u32,
            completion_tokens=u32,
            total_tokens=u32,
            prompt_tokens_details=maybe(st.builds(PromptTokensDetails, cached_tokens=maybe(u32))),
        )
    ),
    engine_data=maybe(plain),
)


# --- round trips -------------------------------------------------------------------------


@given(codecs, requests)
def test_any_request_comes_back(codec: Codec, request: PreprocessedRequest) -> None:
    assert read_request(codec, codec.encode(request)) == request


@given(codecs, outputs)
def test_any_output_comes_back_through_its_envelope(codec: Codec, output: LLMEngineOutput) -> None:
    value = read_item(codec, annotate(codec, codec.encode(output)))
    assert value is not None
    assert output_reader(codec)(value) == output


@given(st.integers(0, MAX_ID), text, st.dictionaries(text, text, max_size=2))
def test_any_instance_comes_back(id: int, name: str, transport: dict[str, str]) -> None:
    record = EndpointRecord(
        component=name, endpoint=name, namespace=name, instance_id=id, transport=transport
    )
    assert decode_endpoint(encode_record(record)) == record


# --- floats of 32 bits -------------------------------------------------------------------


def single(value: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def test_a_temperature_arrives_as_it_was_written() -> None:
    # As a real frontend sends it: msgspec itself has no way to write a 32-bit float.
    body = MSGPACK.encode({"token_ids": [], "sampling_options": {"temperature": 1, "top_p": 0.5}})
    body = body.replace(b"\xabtemperature\x01", b"\xabtemperature\xca" + struct.pack(">f", 0.7))
    sampling = read_request(MSGPACK, body).sampling_options
    assert (sampling.temperature, sampling.top_p) == (0.7, 0.5)


@given(st.decimals(-100, 100, places=3).map(float))
def test_a_decimal_survives_the_way_through_32_bits(value: float) -> None:
    assert shortest_single(single(value)) == value


@given(st.floats(width=32))
def test_the_shortest_is_the_same_to_32_bits(value: float) -> None:
    short = shortest_single(value)
    assert short == value or single(short) == value or math.isnan(value)
    assert shortest_single(short) == short or math.isnan(value)


@pytest.mark.parametrize("value", [0.7, 1e300, -1e39, 0.0, math.inf, 1 / 3])
def test_what_needs_no_rounding_is_left_alone(value: float) -> None:
    assert shortest_single(value) == value


# --- what peers may leave out or add -------------------------------------------------------


@CODECS
def test_a_request_may_be_as_short_as_the_real_worker_takes_it(codec: Codec) -> None:
    body = {"token_ids": [1], "stop_conditions": {}, "sampling_options": {}, "new": [1]}
    assert read_request(codec, codec.encode(body)) == PreprocessedRequest(token_ids=[1])
    assert read_request(codec, codec.encode({"token_ids": [], "routing": None})).routing is None


@CODECS
def test_no_tokens_is_not_the_default_number_of_tokens(codec: Codec) -> None:
    body = codec.encode({"token_ids": [1], "stop_conditions": {"max_tokens": 0}})
    assert read_request(codec, body).stop_conditions.max_tokens == 0


@CODECS
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": None},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": [1.5]},
        {"token_ids": [], "stop_conditions": 1},
        {"token_ids": [], "sampling_options": {"temperature": "hot"}},
        [],
        None,
    ],
    ids=str,
)
def test_what_is_no_request(codec: Codec, body: object) -> None:
    with pytest.raises(RemoteProtocolError):
        read_request(codec, codec.encode(body))


@CODECS
@pytest.mark.parametrize(
    "output",
    [
        {},
        {"token_ids": None},
        {"token_ids": [], "finish_reason": "tool_calls"},
        {"token_ids": [], "finish_reason": "error"},
        {"token_ids": [], "finish_reason": {"why": "x"}},
        7,
    ],
    ids=str,
)
def test_what_is_no_output(codec: Codec, output: object) -> None:
    with pytest.raises(RemoteProtocolError):
        output_reader(codec)(codec.encode(output))


@CODECS
def test_the_smallest_item_is_small(codec: Codec) -> None:
    output = LLMEngineOutput(token_ids=[7])
    assert codec.encode(output) == codec.encode({"token_ids": [7]})
    failed = LLMEngineOutput(token_ids=[], finish_reason=FinishError("x"))
    assert codec.encode(failed) == codec.encode({"token_ids": [], "finish_reason": {"error": "x"}})


# --- garbage -----------------------------------------------------------------------------

DEEP = 100_000
BOMBS = {
    "json lists": (JSON, b'{"token_ids":[],"extra_args":{"x":' + b"[" * DEEP),
    "json maps": (JSON, b'{"token_ids":[],"extra_args":' + b'{"x":' * DEEP),
    "json unknown": (JSON, b'{"unknown":' + b"[" * DEEP),
    "json surrogate": (JSON, b'{"token_ids":[],"model":"\\ud800"}'),
    "json bytes": (JSON, b'{"token_ids":[],"model":"\xff"}'),
    "json digits": (JSON, b'{"token_ids":[' + b"9" * 5000 + b"]}"),
    "msgpack lists": (MSGPACK, b"\x81\xaaextra_args\x81\xa1x" + b"\x91" * DEEP),
    "msgpack unknown": (MSGPACK, b"\x81\xa1x" + b"\x91" * DEEP),
    "msgpack long list": (MSGPACK, b"\x81\xa9token_ids\xdd\xff\xff\xff\xff"),
    "msgpack long map": (MSGPACK, b"\x81\xaaextra_args\xdf\xff\xff\xff\xff"),
    "msgpack bytes": (MSGPACK, b"\x82\xa9token_ids\x90\xa5model\xa1\xff"),
    "msgpack keys": (MSGPACK, b"\x81\xaaextra_args\x81\x91\x01\x01"),
    "msgpack time": (MSGPACK, b"\x81\xa5model\xd6\xff\x00\x00\x00\x00"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_a_typed_error(name: str) -> None:
    codec, body = BOMBS[name]
    with pytest.raises(RemoteProtocolError):
        read_request(codec, body)


LARGE = [0] * MAX_OPEN


@CODECS
@given(request=requests, output=outputs)
@settings(max_examples=10)
def test_a_large_body_is_read_like_a_small_one(
    codec: Codec, request: PreprocessedRequest, output: LLMEngineOutput
) -> None:
    request = msgspec.structs.replace(request, token_ids=LARGE)
    assert read_request(codec, codec.encode(request)) == request
    output = msgspec.structs.replace(output, token_ids=LARGE)
    assert output_reader(codec)(codec.encode(output)) == output


@CODECS
@pytest.mark.parametrize(
    "fields",
    [{"extra_args": None}, {"sampling_options": {"guided_decoding": 1}}, {"agent_context": []}],
    ids=str,
)
def test_a_large_body_obeys_the_same_rules(codec: Codec, fields: dict[str, object]) -> None:
    for token_ids in ([0], LARGE):
        with pytest.raises(RemoteProtocolError):
            read_request(codec, codec.encode({"token_ids": token_ids, **fields}))


@CODECS
def test_a_large_body_cannot_grow(codec: Codec) -> None:
    open_value = codec.encode({"x": [[]] * MAX_OPEN})
    body = codec.encode({"token_ids": [7], "extra_args": {}})
    empty = codec.encode({})
    assert body.count(empty) == 1
    with pytest.raises(RemoteProtocolError, match="bytes in its 'extra_args'"):
        read_request(codec, body.replace(empty, open_value))
    strange = codec.encode({"token_ids": [7], "strange": {}}).replace(empty, open_value)
    assert read_request(codec, strange) == PreprocessedRequest(token_ids=[7])
    output = codec.encode({"token_ids": [7], "top_logprobs": [[]] * MAX_OPEN})
    with pytest.raises(RemoteProtocolError, match="bytes in its 'top_logprobs'"):
        output_reader(codec)(output)


@given(codecs, st.binary(max_size=60))
def test_garbage_is_a_typed_error(codec: Codec, body: bytes) -> None:
    for read in (lambda: read_request(codec, body), lambda: output_reader(codec)(body)):
        with pytest.raises(RemoteProtocolError):
            read()


@given(codecs, requests, st.data())
def test_one_wrong_byte_gives_a_request_or_a_typed_error(
    codec: Codec, request: PreprocessedRequest, data: st.DataObject
) -> None:
    body = bytearray(codec.encode(request))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_request(codec, bytes(body))
    except RemoteProtocolError:
        return
    assert isinstance(found, PreprocessedRequest)


@pytest.mark.parametrize("value", ["\ud800", object(), {1: object()}])
@CODECS
def test_what_cannot_be_spelled_is_our_own_mistake(codec: Codec, value: object) -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode({"x": value})


def test_codecs_have_names() -> None:
    assert codec_named("msgpack") is MSGPACK
    assert codec_named("json") is codec_named(None) is JSON
    with pytest.raises(RemoteProtocolError):
        codec_named("xml")


# --- records -----------------------------------------------------------------------------

READERS: list[tuple[str, Callable[[bytes], object]]] = [
    ("31_instance_g", decode_endpoint),
    ("32", decode_model),
    ("33_event_channel_kv_e", decode_event_channel),
    ("34", decode_event_source),
]


@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_record_of_another_type_is_refused_and_strange_keys_are_not(
    name: str, read: Callable[[bytes], object]
) -> None:
    value = vector(name)["value"]
    assert read(compact({**value, "strange": {"x": [1]}})) == read(compact(value))
    for wrong in ({**value, "type": "Other"}, {"type": value["type"]}, [value], None):
        with pytest.raises(RemoteProtocolError):
            read(compact(wrong))


@pytest.mark.parametrize(("name", "read"), READERS)
@given(st.binary(max_size=60))
def test_a_record_of_garbage_is_a_typed_error(
    name: str, read: Callable[[bytes], object], value: bytes
) -> None:
    with pytest.raises(RemoteProtocolError):
        read(value)


@pytest.mark.parametrize("bad", [-1, 2**64, "1", 1.5])
def test_an_id_has_64_bits(bad: object) -> None:
    for name, read in READERS[:3]:
        with pytest.raises(RemoteProtocolError):
            read(compact({**vector(name)["value"], "instance_id": bad}))


NEEDED = (
    *("display_name", "slug", "kv_cache_block_size", "migration_limit", "model_type"),
    *("model_input", "model_info", "tokenizer"),
)


def card_without(*names: str, **fields: object) -> bytes:
    value = vector("32")["value"]
    card = {k: v for k, v in value["card_json"].items() if k not in names}
    return compact({**value, "card_json": {**card, **fields}})


@pytest.mark.parametrize("field", vector("32")["value"]["card_json"])
def test_a_card_needs_what_the_real_frontend_needs(field: str) -> None:
    if field in NEEDED:
        with pytest.raises(RemoteProtocolError):
            decode_model(card_without(field))
    else:
        record = decode_model(card_without(field))
        assert encode_record(record) == card_without(field)


@pytest.mark.parametrize("slug", ["", "Smol", "a b", "a/b", "a.b", "ä"])
def test_a_slug_is_plain(slug: str) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_model(card_without(slug=slug))


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ("Chat | Completions", {"chat", "completions"}),
        ("Chat", {"chat"}),
        ("Completions", {"completions"}),
    ],
)
def test_model_types(words: str, kinds: set[str]) -> None:
    assert decode_model(card_without(model_type=words)).card_json.model_types == kinds
    assert format_model_types(frozenset(kinds)) == words


@pytest.mark.parametrize("checksum", ["", "blake3:", "sha256:" + "0" * 64, "blake3:" + "G" * 64])
def test_what_is_no_checksum(checksum: str) -> None:
    with pytest.raises(RemoteProtocolError):
        _ = CheckedFile(path="/x", checksum=checksum).digest


def instance(**fields: object) -> EndpointRecord:
    value = {**vector("31_instance_g")["value"], **fields}
    return decode_endpoint(compact({k: v for k, v in value.items() if v is not None}))


def test_an_instance_may_say_little() -> None:
    record = instance(request_plane_codec=None, device_type=None, transport={"nats_tcp": "x"})
    assert record.codec is JSON
    assert record.tcp is None
    with pytest.raises(RemoteProtocolError):
        _ = instance(request_plane_codec="xml").codec
    with pytest.raises(RemoteProtocolError):
        _ = instance(transport={"tcp": "nowhere"}).tcp


def test_events_of_another_scope_have_no_key() -> None:
    for name, read in ((READERS[2][0], decode_event_channel), (READERS[3][0], decode_event_source)):
        value = {**vector(name)["value"], "scope": {"kind": "namespace", "name": "x"}}
        with pytest.raises(RemoteProtocolError, match="namespace"):
            _ = read(compact(value)).key
