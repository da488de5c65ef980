"""Keys of the discovery store: escaping, parsing, and ids of 64 bits."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_trio.errors import LocalProtocolError, RemoteProtocolError
from dynamo_trio.wire.dynamo.keys import (
    MAX_ID,
    EventKey,
    InstanceKey,
    endpoint_path,
    escape_segment,
    file_name,
    format_id,
    key_of_file,
    parse_id,
    unescape_segment,
)
from dynamo_trio.wire.names import EndpointId

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = text.filter(lambda name: name != "" and "/" not in name)
endpoints = st.builds(EndpointId, names, names, names)
ids = st.integers(0, MAX_ID)


@given(text)
def test_any_key_comes_back_from_its_file_name(key: str) -> None:
    name = file_name(key)
    assert set(name) <= {*string.ascii_letters, *string.digits, "%"}
    assert key_of_file(name) == key


@given(text)
def test_any_segment_comes_back(name: str) -> None:
    escaped = escape_segment(name)
    assert set(escaped) <= {*string.ascii_letters, *string.digits, *"%_-"}
    assert unescape_segment(escaped) == name


def test_the_two_escapings_differ() -> None:
    assert escape_segment("kv-events_a.b/c") == "kv-events_a%2Eb%2Fc"
    assert file_name("kv-events_a.b/c") == "kv%2Devents%5Fa%2Eb%2Fc"
    assert file_name(escape_segment("a.b")) == "a%252Eb"
    assert key_of_file("a%2db") == "a-b"  # another writer's lower case


@pytest.mark.parametrize(
    "name", ["a-b", "a/b", "%", "%4", "%g0", "a%", "%FF", "ä", ".tmp_0123", "\0"]
)
def test_what_is_no_file_name_of_a_key(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        key_of_file(name)


@given(text)
def test_any_name_of_a_file_is_a_key_or_a_typed_error(name: str) -> None:
    try:
        key = key_of_file(name)
    except RemoteProtocolError:
        return
    assert key_of_file(file_name(key)) == key


@given(endpoints, ids, st.none() | names)
def test_any_instance_key_comes_back(endpoint: EndpointId, id: int, adapter: str | None) -> None:
    key = InstanceKey(endpoint, id, adapter)
    assert InstanceKey.parse(str(key)) == key


@given(st.builds(EndpointId, text, text, text), text, ids)
def test_any_event_key_comes_back(endpoint: EndpointId, topic: str, id: int) -> None:
    key = EventKey(endpoint, topic, id)
    assert EventKey.parse(str(key)) == key


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "a/b/c", "a/b/c/", "a//c/1", "a/b/c/1/", "a/b/c/1/d/e"),
        *("a/b/c/G", "a/b/c/0x1", "a/b/c/A1", "a/b/c/-1", "a/b/c/1 ", "a/b/c/" + "1" * 17),
    ],
)
def test_what_is_no_key_of_an_instance(key: str) -> None:
    with pytest.raises(RemoteProtocolError):
        InstanceKey.parse(key)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "namespace/a/component/b/endpoint/c/topic/t",
        "namespace/a/component/b/endpoint/c/topic/t/x",
        "namespace/a/component/b/topic/t/1",
        "namespace/a/component/b/endpoint/c/topic/t/1/2",
        "namespace/a.b/component/b/endpoint/c/topic/t/1",
        "component/a/namespace/b/endpoint/c/topic/t/1",
    ],
)
def test_what_is_no_key_of_events(key: str) -> None:
    with pytest.raises(RemoteProtocolError):
        EventKey.parse(key)


def test_ids_use_all_64_bits() -> None:
    assert format_id(MAX_ID) == "f" * 16
    assert parse_id("f" * 16) == MAX_ID
    assert endpoint_path(10, "generate") == "a/generate"
    for bad in (-1, MAX_ID + 1):
        with pytest.raises(LocalProtocolError):
            format_id(bad)
