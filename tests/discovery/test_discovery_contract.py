"""Every discovery backend keeps these promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.discovery import (
    Discovery,
    EndpointId,
    EventChannel,
    EventSource,
    Instance,
    ModelCard,
    Put,
    Removed,
    Watch,
)
from dynamo_trio.errors import InvalidArgument
from tests.discovery.backends import BACKENDS, GENERATE, Pair, card, channel, instance, source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dynamo_trio.discovery import Change

#: Far above what any backend needs to tell of a change, in seconds.
SOON = 10.0


@pytest.fixture(params=BACKENDS)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with BACKENDS[request.param](tmp_path) as pair:
        yield pair


@pytest.fixture
async def discovery(pair: Pair) -> Discovery:
    return pair[0]


@pytest.fixture
async def other(pair: Pair) -> Discovery:
    """Another process's handle on the same store."""
    return pair[1]


async def next_change(watch: Watch[Any]) -> Change[Any]:
    with trio.fail_after(SOON):
        return await watch.next_change()


async def wait_for(discovery: Discovery, *wanted: Instance) -> None:
    """Wait until a new watch shows these."""
    with trio.fail_after(SOON):
        while True:
            async with discovery.watch(Instance) as watch:
                if list(watch.snapshot.values()) == list(wanted):
                    return
            await trio.sleep(0.01)


async def test_a_watch_begins_with_what_is_there(discovery: Discovery) -> None:
    await discovery.register(instance(1))
    async with discovery.watch(Instance) as watch:
        assert dict(watch.snapshot) == {instance(1).key: instance(1)}


async def test_another_process_sees_each_change_once_and_in_order(
    discovery: Discovery, other: Discovery
) -> None:
    """Step by step: a backend may tell quick changes of one record as the last of them."""
    moved = instance(1, port=9001)
    async with other.watch(Instance) as watch:
        await discovery.register(instance(1))
        assert await next_change(watch) == Put(instance(1))
        await discovery.register(moved)
        assert await next_change(watch) == Put(moved)
        await discovery.unregister(moved)
        assert await next_change(watch) == Removed(moved)
        with trio.move_on_after(0.2) as nothing_more:
            await watch.next_change()
        assert nothing_more.cancelled_caught


async def test_quick_changes_end_with_the_last_of_them(
    discovery: Discovery, other: Discovery
) -> None:
    async with other.watch(Instance) as watch:
        for port in range(9000, 9010):
            await discovery.register(instance(1, port))
        seen = [await next_change(watch)]
        while seen[-1] != Put(instance(1, 9009)):
            seen.append(await next_change(watch))
    ports = [change.record.transports["tcp"] for change in seen]
    assert ports == sorted(set(ports))


async def test_the_snapshot_does_not_move_after_it_was_taken(discovery: Discovery) -> None:
    async with discovery.watch(Instance) as watch:
        await discovery.register(instance(1))
        assert await next_change(watch) == Put(instance(1))
        assert not watch.snapshot


async def test_a_watch_sees_only_its_own_kind(discovery: Discovery) -> None:
    async with discovery.watch(ModelCard) as watch:
        await discovery.register(instance(1))
        await discovery.register(card(1))
        with trio.fail_after(SOON):
            assert await watch.next_change() == Put(card(1))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (EventChannel, channel(2**53 - 1), channel(2**53 - 1, 5556)),
        (EventSource, source(2**53 - 1), source(2**53 - 1, 9001)),
    ],
)
async def test_where_events_are_is_told_as_instances_are(
    discovery: Discovery, other: Discovery, kind: Any, before: Any, after: Any
) -> None:
    await discovery.register(before)
    async with other.watch(kind) as watch:
        assert dict(watch.snapshot) == {before.key: before}
        await discovery.register(instance(1))
        await discovery.register(after)
        assert await next_change(watch) == Put(after)
        await discovery.unregister(after)
        assert await next_change(watch) == Removed(after)


async def test_topics_and_publishers_are_apart(discovery: Discovery, other: Discovery) -> None:
    """Names of topics may hold what would cut a key into pieces."""
    records = [
        EventChannel(GENERATE, topic, publisher, "tcp://127.0.0.1:1")
        for topic in ("kv-events", "kv_events", "a/b%2F.ü")
        for publisher in (1, 2)
    ]
    for record in records:
        await discovery.register(record)
    async with other.watch(EventChannel) as watch:
        found = list(watch.snapshot.values())
        with trio.fail_after(SOON):
            while len(found) < len(records):
                found.append((await watch.next_change()).record)
    assert set(found) == set(records)


async def test_withdrawing_what_is_not_there_is_not_an_error(discovery: Discovery) -> None:
    await discovery.unregister(instance(9))
    await discovery.register(instance(9))
    await discovery.unregister(instance(9))
    await discovery.unregister(instance(9))
    await wait_for(discovery)


async def test_a_waiting_watch_is_woken(discovery: Discovery) -> None:
    async with discovery.watch(Instance) as watch, trio.open_nursery() as nursery:
        nursery.start_soon(discovery.register, instance(7))
        assert await next_change(watch) == Put(instance(7))


async def test_two_watches_see_the_same(discovery: Discovery, other: Discovery) -> None:
    async with discovery.watch(Instance) as one, other.watch(Instance) as two:
        await discovery.register(instance(1))
        assert await next_change(one) == await next_change(two) == Put(instance(1))


async def test_a_change_is_not_lost_with_a_cancelled_wait(discovery: Discovery) -> None:
    async with discovery.watch(Instance) as watch:
        with trio.move_on_after(0.01):
            await watch.next_change()
        await discovery.register(instance(1))
        assert await next_change(watch) == Put(instance(1))


async def test_an_instance_can_have_all_of_its_64_bits(
    discovery: Discovery, other: Discovery
) -> None:
    largest = instance(2**64 - 1)
    await discovery.register(largest)
    await wait_for(other, largest)


async def test_an_instance_id_has_64_bits_and_is_never_0(discovery: Discovery) -> None:
    number = discovery.assign_instance_id()
    assert 0 < number < 2**64


@pytest.mark.parametrize("text", ["dyn://a.b.c", "a.b.c"])
def test_an_endpoint_name_has_three_parts(text: str) -> None:
    assert EndpointId.parse(text) == EndpointId("a", "b", "c")
    assert str(EndpointId.parse(text)) == "dyn://a.b.c"


@pytest.mark.parametrize("text", ["", "a", "a.b", "a.b.c.d", "a..c", "dyn://"])
def test_a_bad_endpoint_name_is_named_with_its_rule(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"namespace\.component\.endpoint"):
        EndpointId.parse(text)


def test_a_slug_has_only_what_dynamo_takes() -> None:
    assert ModelCard("Org/Smol LM 2", GENERATE, 1).slug == "org_smol_lm_2"
