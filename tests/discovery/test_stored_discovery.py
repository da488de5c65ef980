"""Discovery over any store: what is written and read, and how it heals. On a fake clock."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.discovery import (
    EndpointId,
    EventChannel,
    EventSource,
    Instance,
    ModelCard,
    Put,
    Record,
    Removed,
)
from dynamo_trio.discovery.backoff import LONGEST, TELL_EVERY
from dynamo_trio.discovery.spelling import read, spell, store_key
from dynamo_trio.discovery.store import StoreKey
from dynamo_trio.discovery.stored import QUIET, StoredDiscovery, open_stored_discovery
from dynamo_trio.errors import InvalidArgument, RemoteProtocolError, StoreUnavailable
from dynamo_trio.wire.dynamo.codec import JSON
from dynamo_trio.wire.dynamo.keys import key_of_file
from tests.discovery.backends import GENERATE, card, channel, instance, source
from tests.discovery.fake_store import FakeStore
from tests.wire.dynamo.wire_vectors import compact, vector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = store_key(instance(1))


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
async def discovery(store: FakeStore) -> AsyncIterator[StoredDiscovery]:
    async with open_stored_discovery(store) as discovery:
        yield discovery


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# --- spelling ----------------------------------------------------------------------------


def test_an_instance_is_spelled_as_dynamo_spells_it() -> None:
    spelled = vector("31_instance_generate")
    expected = {**spelled["value"]}
    del expected["device_type"]
    number = expected["instance_id"]
    ours = Instance(GENERATE, number, {"tcp": expected["transport"]["tcp"], "mem": "x"})
    assert store_key(ours) == StoreKey("v1/instances", f"dynamo/backend/generate/{number:x}")
    assert json.loads(spell(ours)) == expected


@pytest.mark.parametrize("name", ["31_instance_generate", "31_instance_worker_kv_query"])
def test_dynamos_instances_are_read(name: str) -> None:
    value = vector(name)["value"]
    endpoint = EndpointId(value["namespace"], value["component"], value["endpoint"])
    key = f"{endpoint.path}/{value['instance_id']:x}"
    found = read(Instance, key, compact(value))
    assert found == Instance(endpoint, value["instance_id"], value["transport"])


def test_an_instance_that_names_no_codec_wants_json() -> None:
    value = {**vector("31_instance_generate")["value"]}
    del value["request_plane_codec"]
    found = read(Instance, f"{GENERATE.path}/{value['instance_id']:x}", compact(value))
    assert found is not None
    assert found.codec is JSON


def test_dynamos_card_is_read_and_written_as_it_was() -> None:
    value = vector("32_model_card")["value"]
    key = f"{value['namespace']}/{value['component']}/{value['endpoint']}"
    found = read(ModelCard, f"{key}/{value['instance_id']:x}", compact(value))
    assert found is not None
    assert found.name == value["card_json"]["display_name"]
    assert found.context_length == value["card_json"]["context_length"]
    assert found.kv_cache_block_size == value["card_json"]["kv_cache_block_size"]
    assert found.model_type == {"chat", "completions"}
    assert json.loads(spell(found)) == value


@pytest.mark.parametrize("name", ["33_event_channel_kv_events", "33_event_channel_kv_metrics"])
def test_dynamos_event_channels_are_read_and_written(name: str) -> None:
    spelled = vector(name)
    key = key_of_file(spelled["file_name"])
    value = spelled["value"]
    found = read(EventChannel, key, compact(value))
    address = value["transport"]["config"]["endpoint"]
    assert found == EventChannel(GENERATE, value["topic"], value["instance_id"], address)
    assert store_key(found) == StoreKey("v1/event_channels", key)
    assert spell(found) == compact(value)


def test_dynamos_event_source_is_read_and_written() -> None:
    spelled = vector("34_event_source")
    key = key_of_file(spelled["file_name"])
    value = spelled["value"]
    found = read(EventSource, key, compact(value))
    assert found is not None
    target = value["metadata"]["recovery_target"]
    query = EndpointId("dynamo", "backend", target["endpoint"])
    recovery = Instance(query, target["instance_id"], target["transport"])
    worker = value["metadata"]["worker"]["worker_id"]
    assert found == EventSource(
        GENERATE, "kv-events", value["publisher_id"], worker, recovery=recovery
    )
    assert store_key(found) == StoreKey("v1/event_sources", key)
    del target["device_type"]
    assert spell(found) == compact(value)


def test_a_source_may_say_where_it_is_asked_over_mux() -> None:
    address = "127.0.0.1:9001/4d/q"
    recovery = attrs.evolve(instance(77), transports={"mux": address})
    record = attrs.evolve(source(1), recovery=recovery)
    assert read(EventSource, record.key, spell(record)) == record


CHANNEL = channel(5)
ZMQ = b'"kind":"Zmq","config":{"endpoint":"tcp://127.0.0.1:5555"}'
BROKER = b'"kind":"ZmqBroker","config":{"xsub_endpoints":["tcp://h:1"],"xpub_endpoints":[]}'


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (EventChannel, "namespace/dynamo/topic/kv-events/5", b"whatever"),
        (EventSource, "namespace/dynamo/component/backend/topic/kv-events/5", b"whatever"),
        (EventChannel, CHANNEL.key, spell(CHANNEL).replace(ZMQ, BROKER)),
        (EventSource, source(5).key, JSON.encode({**json.loads(spell(source(5))), "metadata": {}})),
    ],
    ids=["a namespace's", "a component's", "another transport", "another kind of source"],
)
def test_events_of_other_kinds_are_left_alone(kind: Any, key: str, value: bytes) -> None:
    assert read(kind, key, value) is None


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (EventChannel, "what/is/this", spell(CHANNEL)),
        (EventChannel, CHANNEL.key, spell(channel(6))),
        (EventChannel, CHANNEL.key, spell(CHANNEL).replace(ZMQ, b'"kind":"Zmq","config":{}')),
        (EventChannel, CHANNEL.key, spell(CHANNEL).replace(b'"endpoint"', b'"planet"')),
        (EventSource, source(5).key, spell(source(6))),
        (EventSource, source(5).key, spell(source(5)).replace(b"127.0.0.1:9000", b"nowhere")),
    ],
)
def test_unreadable_records_of_events(kind: Any, key: str, value: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read(kind, key, value)


@pytest.mark.parametrize("record", [instance(255), card(255), channel(255), source(255)])
def test_what_is_published_is_read_back_the_same(record: Record) -> None:
    kind: type = type(record)
    assert read(kind, record.key, spell(record)) == record


def test_a_card_of_an_adapter_is_left_alone() -> None:
    assert read(ModelCard, f"{card(1).key}/my-lora", b"whatever") is None


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Instance(GENERATE, 1, {"mem": "x"}), r"\['mem'\] none can be reached"),
        (Instance(EndpointId("a/b", "c", "d"), 1, {"tcp": "h:1/1/d"}), "no name may hold a '/'"),
        (ModelCard("smol", GENERATE, 1), "'smol' cannot be published"),
    ],
)
async def test_what_others_could_not_use_is_not_published(
    discovery: StoredDiscovery,
    store: FakeStore,
    record: Instance | ModelCard,
    reason: str,
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        await discovery.register(record)
    assert not store.values


# --- reading -----------------------------------------------------------------------------

UNREADABLE = {
    "not JSON": b'{"type":"Endp',
    "another kind of record": b'{"type":"Model"}',
    "no address": spell(instance(1)).replace(b"127.0.0.1:9000", b"nowhere"),
    "another instance's record": spell(instance(2)),
    "an unknown codec": spell(instance(1)).replace(b"msgpack", b"morse"),
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
async def test_an_unreadable_record_is_left_out_and_told_once(
    discovery: StoredDiscovery,
    store: FakeStore,
    value: bytes,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    store.write(HERE, value)
    async with discovery.watch(Instance) as watch:
        assert not watch.snapshot
        store.write(HERE, value)
        store.write(HERE, spell(instance(1)))
        assert await watch.next_change() == Put(instance(1))
    [told] = warnings(caplog)
    assert told.startswith(f"the record v1/instances/{instance(1).key} is left out: ")


async def test_a_record_that_becomes_unreadable_stays_as_it_was(
    discovery: StoredDiscovery,
    store: FakeStore,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    store.write(HERE, spell(instance(1)))
    async with discovery.watch(Instance) as watch:
        store.write(HERE, b"half")
        store.erase(HERE)
        assert await watch.next_change() == Removed(instance(1))
    assert len(warnings(caplog)) == 1


async def test_a_key_that_is_none_is_left_out(
    discovery: StoredDiscovery,
    store: FakeStore,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    store.write(StoreKey("v1/instances", "what/is/this"), spell(instance(1)))
    async with discovery.watch(Instance) as watch:
        assert not watch.snapshot
    assert len(warnings(caplog)) == 1


async def test_the_same_content_again_is_not_a_change(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    async with discovery.watch(Instance) as watch:
        store.write(HERE, spell(instance(1)))
        store.write(HERE, spell(instance(1)))
        store.erase(HERE)
        assert await watch.next_change() == Put(instance(1))
        assert await watch.next_change() == Removed(instance(1))


async def test_a_watch_is_opened_as_soon_as_the_store_is_there(
    discovery: StoredDiscovery,
    store: FakeStore,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    store.away = True

    async def come_back() -> None:
        await trio.sleep(20)
        store.away = False
        store.write(HERE, spell(instance(1)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_back)
        async with discovery.watch(Instance) as watch:
            assert 20 <= trio.current_time() <= 20 + LONGEST
            assert watch.snapshot
    told = warnings(caplog)
    assert 20 / (TELL_EVERY + LONGEST) <= len(told) <= 1 + 20 / TELL_EVERY
    assert "nobody answers" in told[0]


# --- quiet time and healing --------------------------------------------------------------


async def test_a_lost_instance_is_put_back_after_the_quiet_time(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    await trio.sleep(100)
    store.lose(HERE)
    await trio.sleep(QUIET - 0.01)
    assert not store.values
    await trio.sleep(0.02)
    assert store.values == {HERE: spell(instance(1))}
    assert [time for time, _ in store.log] == [0, 100 + QUIET]


@pytest.mark.parametrize("record", [card(1), channel(1), source(1)], ids=lambda r: type(r).__name__)
async def test_what_is_no_instance_is_put_back_at_once(
    discovery: StoredDiscovery, store: FakeStore, record: Record, autojump_clock: MockClock
) -> None:
    await discovery.register(record)
    await trio.sleep(100)
    store.lose(store_key(record))
    await trio.sleep(0.01)
    assert [time for time, _ in store.log] == [0, 100]


async def test_the_quiet_time_is_longer_than_frontends_remember_and_shorter_than_a_ttl() -> None:
    assert 5 < QUIET < 10


async def test_registering_after_unregistering_waits_for_the_quiet_time(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    await discovery.unregister(instance(1))
    await trio.sleep(2)
    await discovery.register(instance(1))
    assert trio.current_time() == QUIET
    assert store.values == {HERE: spell(instance(1))}


async def test_a_change_of_content_need_not_wait(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    await discovery.register(instance(1, 9001))
    assert trio.current_time() == 0
    assert store.values == {HERE: spell(instance(1, 9001))}


async def test_another_instance_need_not_wait(
    discovery: StoredDiscovery, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    await discovery.unregister(instance(1))
    await discovery.register(instance(2))
    assert trio.current_time() == 0


async def test_unregistering_during_the_quiet_time_is_prompt_and_final(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    store.lose(HERE)
    await trio.sleep(1)
    await discovery.unregister(instance(1))
    assert trio.current_time() == 1
    await trio.sleep(100)
    assert not store.values


async def test_a_loss_during_the_quiet_time_begins_it_again(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    store.lose(HERE)
    await trio.sleep(4)
    store.lose(HERE)
    await trio.sleep(100)
    assert [time for time, _ in store.log] == [0, 4 + QUIET]


async def test_a_loss_after_the_withdrawal_brings_nothing_back(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    await discovery.unregister(instance(1))
    store.lose(HERE, store_key(instance(5)))
    await trio.sleep(100)
    assert not store.values


# --- a store that is away ----------------------------------------------------------------


async def test_registering_waits_for_the_store_and_says_so(
    discovery: StoredDiscovery,
    store: FakeStore,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    store.away = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discovery.register, instance(1))
        await trio.sleep(30)
        assert store.attempts >= 30 / LONGEST
        store.away = False
    assert trio.current_time() <= 30 + LONGEST
    assert store.values
    assert len(warnings(caplog)) >= 30 / (TELL_EVERY + LONGEST)


async def test_unregistering_does_not_wait_for_the_store_but_is_made_up_for(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    store.away = True
    await discovery.unregister(instance(1))
    assert trio.current_time() == 0
    assert store.values
    await trio.sleep(30)
    store.away = False
    await trio.sleep(LONGEST)
    assert not store.values


async def test_whoever_must_know_is_told_what_was_not_withdrawn(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.wait_withdrawn()  # nothing was to be
    for number in (1, 2):
        await discovery.register(instance(number))
    await discovery.register(card(1))
    await discovery.wait_withdrawn()
    store.away = True
    for number in (1, 2):
        await discovery.unregister(instance(number))
    await trio.sleep(60)
    with pytest.raises(
        StoreUnavailable, match=r"v1/instances/\S+/1 may .*nobody answers \(and 1 m"
    ):
        await discovery.wait_withdrawn()
    assert trio.current_time() == 60
    assert not discovery.has_withdrawn
    store.away = False
    await trio.sleep(LONGEST)
    await discovery.wait_withdrawn()
    assert store.values.keys() == {store_key(card(1))}


async def test_a_withdrawal_that_somebody_left_is_waited_for(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    store.slow = 3.0
    with trio.move_on_after(0.5):
        await discovery.unregister(instance(1))
    await discovery.wait_withdrawn()
    assert trio.current_time() == 3.0
    assert not store.values


async def test_what_is_wanted_again_is_no_withdrawal_to_wait_for(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    store.slow = 3.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discovery.unregister, instance(1))
        await trio.sleep(1.0)
        nursery.start_soon(discovery.wait_withdrawn)
        await trio.sleep(1.0)
        nursery.start_soon(discovery.register, instance(1))
        await trio.lowlevel.checkpoint()
        await discovery.wait_withdrawn()
        assert trio.current_time() == 2.0


@pytest.mark.parametrize("slow", [0.0, 60.0], ids=["refuses", "hangs"])
async def test_only_the_first_unregistering_waits_for_a_store_that_is_away(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock, slow: float
) -> None:
    """A stop withdraws its instances, then its cards, then closes: each with a limit of its own."""
    await discovery.register(instance(1))
    await discovery.register(card(1))
    store.away, store.slow = True, slow
    with trio.move_on_after(2.0):
        await discovery.unregister(instance(1))
    first = trio.current_time()
    assert first == (2.0 if slow else 0.0)
    await discovery.unregister(instance(1))
    await discovery.unregister(card(1))
    assert trio.current_time() == first
    store.away, store.slow = False, 0.0
    await trio.sleep(60.0 + LONGEST)
    assert not store.values
    store.slow = 1.0
    await discovery.register(card(1))
    began = trio.current_time()
    await discovery.unregister(card(1))
    assert trio.current_time() == began + 1.0  # all is well again


async def test_unregistering_is_tried_at_once_however_long_the_store_was_away(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    await discovery.register(instance(2))
    store.away = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discovery.register, instance(1, 9001))
        await trio.sleep(30)
        store.away = False
        await discovery.unregister(instance(1))
    assert trio.current_time() == 30
    assert store.values.keys() == {store_key(instance(2))}


async def test_a_cancelled_registration_leaves_nothing_behind(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    store.slow = 1
    with trio.move_on_after(0.5):
        await discovery.register(instance(1))
    await trio.sleep(10)
    assert not store.values


async def test_a_cancelled_change_leaves_the_record_as_it_was(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    await discovery.register(instance(1))
    store.slow = 1
    with trio.move_on_after(0.5):
        await discovery.register(instance(1, 9001))
    await trio.sleep(10)
    assert store.values == {HERE: spell(instance(1))}


async def test_the_last_wish_wins(
    discovery: StoredDiscovery, store: FakeStore, autojump_clock: MockClock
) -> None:
    store.slow = 1
    async with trio.open_nursery() as nursery:
        for port in (9001, 9002, 9003):
            nursery.start_soon(discovery.register, instance(1, port))
            await wait_all_tasks_blocked()
    assert store.values == {HERE: spell(instance(1, 9003))}


def test_a_record_under_a_foreign_key_is_unreadable() -> None:
    with pytest.raises(RemoteProtocolError, match="stands the record of"):
        read(Instance, instance(2).key, spell(instance(1)))
