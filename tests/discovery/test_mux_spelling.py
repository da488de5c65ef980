"""The key by which an instance announces the mux plane: ours alone, and in nobody's way."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from dynamo_trio.discovery import Instance
from dynamo_trio.discovery.spelling import read, spell
from dynamo_trio.errors import InvalidArgument, RemoteProtocolError
from dynamo_trio.wire.dynamo.records import decode_endpoint
from tests.discovery.backends import GENERATE

if TYPE_CHECKING:
    from collections.abc import Mapping

TCP, MUX = "127.0.0.1:9000/1/generate", "127.0.0.1:9001/1/generate"
BOTH = {"tcp": TCP, "mux": MUX}


def spelled(transports: Mapping[str, str], number: int = 1) -> dict[str, Any]:
    value = json.loads(spell(Instance(GENERATE, number, transports)))
    assert isinstance(value, dict)
    return value


def found(value: Mapping[str, Any], number: int = 1) -> Mapping[str, str]:
    """The transports of the instance in a record."""
    key = f"{GENERATE.path}/{number:x}"
    instance = read(Instance, key, json.dumps(value).encode())
    assert instance is not None
    return instance.transports


def test_it_stands_beside_the_transport_and_never_in_it() -> None:
    value = spelled(BOTH)
    assert value["transport"] == {"tcp": TCP}
    assert value["dynamo_trio_mux"] == MUX
    assert list(value)[-1] == "dynamo_trio_mux"


def test_without_mux_the_record_is_dynamos_own() -> None:
    assert "dynamo_trio_mux" not in spelled({"tcp": TCP})


def test_with_mux_alone_dynamo_finds_no_way_to_it() -> None:
    value = spelled({"mux": MUX})
    assert value["transport"] == {}
    assert found(value) == {"mux": MUX}


def test_with_neither_it_is_not_published() -> None:
    with pytest.raises(InvalidArgument, match=r"\['mem'\] none can be reached"):
        spelled({"mem": "x"})


@pytest.mark.parametrize("transports", [BOTH, {"tcp": TCP}, {"mux": MUX}])
def test_what_is_written_is_read(transports: Mapping[str, str]) -> None:
    assert found(spelled(transports)) == transports


def test_a_record_without_any_way_is_read_too() -> None:
    assert found(spelled({"tcp": TCP}) | {"transport": {}}) == {}


def test_mux_inside_the_transport_is_not_ours() -> None:
    assert found(spelled({"tcp": TCP}) | {"transport": BOTH}) == {"tcp": TCP}


def test_null_is_no_offer(caplog: pytest.LogCaptureFixture) -> None:
    assert found(spelled({"tcp": TCP}) | {"dynamo_trio_mux": None}) == {"tcp": TCP}
    assert caplog.messages == []


UNREADABLE = [7, {"tcp": TCP}, ["x"], "", "nowhere", "host:0/path", "host:99999/path", "host:1/"]


@pytest.mark.parametrize("value", UNREADABLE, ids=map(repr, UNREADABLE))
def test_an_unreadable_one_costs_the_record_nothing_and_is_told_once(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    number = 1000 + UNREADABLE.index(value)  # a process tells of each record once
    record = spelled(BOTH, number) | {"dynamo_trio_mux": value}
    for _ in range(3):
        assert found(record, number) == {"tcp": TCP}
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert f"the instance {GENERATE.path}/{number:x} is not asked over mux: " in told.getMessage()


def test_the_wire_says_what_is_wrong_with_it() -> None:
    record = decode_endpoint(json.dumps(spelled(BOTH) | {"dynamo_trio_mux": 7}).encode())
    with pytest.raises(RemoteProtocolError, match="unreadable dynamo_trio_mux"):
        record.mux  # noqa: B018 - reading it is the test
