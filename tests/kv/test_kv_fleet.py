"""Workers that tell of their caches, and a fleet that listens: on every event plane."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from trio.testing import MockClock

from dynamo_trio.discovery import EventChannel, EventSource, Instance, MemoryDiscovery
from dynamo_trio.engines import InlineHost, Request, open_engine
from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.errors import InvalidArgument
from dynamo_trio.events import MemoryEvents
from dynamo_trio.events.sockets import SocketSettings, ZmqEvents
from dynamo_trio.kv import (
    Block,
    Cleared,
    FollowSettings,
    KvFleet,
    KvPublisher,
    Removed,
    Stored,
    follow_fleet,
    open_kv_publisher,
    open_load_publisher,
    publish_engine,
)
from dynamo_trio.kv.fleet import CacheId
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.runtime import DistributedRuntime, Endpoint, open_runtime
from dynamo_trio.wire.dynamo.block_hash import chain_hashes, tokens_hashes
from dynamo_trio.wire.dynamo.kv_events import KvMetrics
from tests.events.lossy import LossyEvents

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from dynamo_trio.discovery.abc import R
    from dynamo_trio.engines import Engine

ENDPOINT = "ns.backend.generate"
SIZE = 4
FAST = FollowSettings(first_audit=0.2, audit=0.5, pause=0.02, longest_pause=0.1, answer_time=2)


@attrs.define(eq=False)
class Rig:
    """What several processes share, and the processes, in one."""

    events: LossyEvents
    discovery: MemoryDiscovery = attrs.field(factory=MemoryDiscovery)
    plane: MemoryPlane = attrs.field(factory=MemoryPlane)

    @asynccontextmanager
    async def process(self) -> AsyncIterator[DistributedRuntime]:
        async with open_runtime(
            discovery=self.discovery, planes=[self.plane], events=self.events
        ) as runtime:
            yield runtime

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[Endpoint]:
        async with self.process() as runtime:
            yield runtime.endpoint(ENDPOINT)

    @asynccontextmanager
    async def fleet(self, settings: FollowSettings = FAST) -> AsyncIterator[KvFleet]:
        async with self.endpoint() as endpoint, follow_fleet(endpoint, settings) as fleet:
            yield fleet

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[tuple[KvPublisher, CacheId]]:
        async with self.endpoint() as endpoint, open_kv_publisher(endpoint) as publisher:
            yield publisher, CacheId(endpoint.runtime.instance_id)


@pytest.fixture(params=["memory", "zmq"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(kind: str) -> MockClock:
    if kind == "memory":
        return MockClock(autojump_threshold=0)
    return MockClock(rate=1.0)  # as real time is: sockets take theirs


@pytest.fixture
def rig(kind: str, clock: MockClock) -> Rig:
    settings = SocketSettings(reconnect=(0.02, 0.1))
    zmq = ZmqEvents("127.0.0.1", "127.0.0.1", settings)
    return Rig(LossyEvents(MemoryEvents() if kind == "memory" else zmq))


def stored(tokens: Sequence[int], parent: int | None = None) -> Stored:
    hashes = tokens_hashes(tokens, SIZE)
    return Stored(parent, None, tuple(map(Block, chain_hashes(hashes, parent), hashes)))


def last(change: Stored) -> int:
    return change.blocks[-1].block_hash


async def until(fleet: KvFleet, condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():
            with trio.move_on_after(0.1):
                await fleet.wait_changed()


async def join(fleet: KvFleet, publisher: KvPublisher, cache: CacheId) -> None:
    """Wait until what is published is heard, not only asked for."""
    with trio.fail_after(20):
        while cache not in fleet.caches or not fleet.caches[cache].messages:
            publisher.publish([stored(range(1000, 1004))])
            await trio.sleep(0.02)


async def until_overlap(
    fleet: KvFleet, tokens: Sequence[int], expected: dict[CacheId, int]
) -> None:
    hashes = tokens_hashes(tokens, SIZE)
    await until(fleet, lambda: fleet.overlaps(hashes) == expected)


# --- what is told arrives ---------------------------------------------------------------------


async def test_overlap_follows_what_workers_tell(rig: Rig, clock: MockClock) -> None:
    async with rig.fleet() as fleet, rig.worker() as (one, a), rig.worker() as (two, b):
        await until_overlap(fleet, range(12), {a: 0, b: 0})
        first = stored(range(8))
        one.publish([first, stored(range(8, 12), last(first))])
        two.publish([first])
        await until_overlap(fleet, range(12), {a: 3, b: 2})
        one.publish([Removed((last(stored(range(8, 12), last(first))),))])
        two.publish([Cleared()])
        await until_overlap(fleet, range(12), {a: 2, b: 0})


async def test_who_comes_late_is_told_all(rig: Rig, clock: MockClock) -> None:
    async with rig.worker() as (publisher, cache):
        publisher.publish([stored(range(8))])
        async with rig.fleet() as fleet:
            await until_overlap(fleet, range(8), {cache: 2})
            publisher.publish([stored(range(20, 32))])
            await until_overlap(fleet, range(20, 32), {cache: 3})


async def test_a_worker_that_leaves_is_forgotten(rig: Rig, clock: MockClock) -> None:
    async with rig.fleet() as fleet:
        async with rig.worker() as (publisher, cache):
            publisher.publish([stored(range(8))])
            await until_overlap(fleet, range(8), {cache: 2})
        await until_overlap(fleet, range(8), {})
        assert fleet.caches == {}
        async with rig.worker() as (_, cache):
            await until_overlap(fleet, range(8), {cache: 0})


async def test_events_of_another_endpoint_are_not_heard(rig: Rig, clock: MockClock) -> None:
    async with rig.fleet() as fleet, rig.process() as other, rig.worker() as (_, cache):
        async with open_kv_publisher(other.endpoint("ns.backend.embed")):
            await until_overlap(fleet, range(8), {cache: 0})


async def test_a_cache_of_many_blocks_goes_in_bounded_messages(rig: Rig, clock: MockClock) -> None:
    async with rig.fleet() as fleet, rig.worker() as (publisher, cache):
        await until_overlap(fleet, range(4), {cache: 0})
        change = stored(range(40_000))
        publisher.publish([change])
        await until_overlap(fleet, range(40_000), {cache: 10_000})
        assert publisher.blocks == 10_000
        publisher.publish([Removed(tuple(b.block_hash for b in reversed(change.blocks[1:])))])
        await until_overlap(fleet, range(40_000), {cache: 1})
        assert max(rig.events.sizes) < 1_000_000


# --- what is lost is noticed and repaired -----------------------------------------------------


async def test_a_gap_is_repaired(rig: Rig, clock: MockClock) -> None:
    async with rig.fleet() as fleet, rig.worker() as (publisher, cache):
        await join(fleet, publisher, cache)
        await until_overlap(fleet, range(8), {cache: 0})
        follower = fleet.caches[cache]
        rig.events.lose = True
        publisher.publish([stored(range(8))])
        rig.events.lose = False
        publisher.publish([stored(range(50, 58))])
        await until_overlap(fleet, range(8), {cache: 2})
        await until_overlap(fleet, range(50, 58), {cache: 2})
        assert follower.gaps == 1


async def test_that_the_last_message_was_lost_is_found_out(rig: Rig, clock: MockClock) -> None:
    async with rig.fleet() as fleet, rig.worker() as (publisher, cache):
        await until_overlap(fleet, range(8), {cache: 0})
        publisher.publish([stored(range(4))])
        await until_overlap(fleet, range(8), {cache: 1})
        rig.events.lose = True
        publisher.publish([stored(range(8))])
        await until_overlap(fleet, range(8), {cache: 2})


async def test_every_other_message_is_lost(rig: Rig, clock: MockClock) -> None:
    async with rig.fleet() as fleet, rig.worker() as (publisher, cache):
        await until_overlap(fleet, range(8), {cache: 0})
        parent = None
        for number in range(60):
            rig.events.lose = number % 2 == 0
            change = stored(range(number * SIZE, (number + 1) * SIZE), parent)
            publisher.publish([change])
            parent = last(change)
            await trio.sleep(0.01)
        await until_overlap(fleet, range(60 * SIZE), {cache: 60})


async def test_a_worker_that_answers_nobody_is_known_once_it_does(
    rig: Rig, clock: MockClock
) -> None:
    async with rig.fleet() as fleet, rig.endpoint() as endpoint:
        async with AsyncExitStack() as stack:
            publisher = await stack.enter_async_context(open_kv_publisher(endpoint))
            publisher.publish([stored(range(8))])
            await until(fleet, lambda: len(fleet.caches) == 1)
            (source,) = await records(rig, EventSource)
            assert source.recovery is not None
            async with rig.process() as other:
                lost = attrs.evolve(source, recovery=attrs.evolve(source.recovery, transports={}))
                await other.discovery.register(lost)
                await trio.sleep(0.5)
                assert fleet.overlaps(tokens_hashes(range(8), SIZE)) == {}
                await other.discovery.unregister(lost)
                await other.discovery.register(source)
                await until_overlap(fleet, range(8), {CacheId(endpoint.runtime.instance_id): 2})


async def records(rig: Rig, kind: type[R]) -> list[R]:
    async with rig.discovery.watch(kind) as watch:
        return list(watch.snapshot.values())


# --- strangers --------------------------------------------------------------------------------


async def test_garbage_is_skipped_told_once_and_repaired(
    rig: Rig, clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dynamo_trio")
    async with rig.fleet() as fleet, rig.worker() as (publisher, cache):
        await join(fleet, publisher, cache)
        rig.events.garble = True
        publisher.publish([stored(range(4))])
        publisher.publish([stored(range(8))])
        rig.events.garble = False
        publisher.publish([stored(range(50, 54))])
        await until_overlap(fleet, range(8), {cache: 2})
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("dynamo_trio")]
    assert len(warnings) == 1
    assert f"publisher {publisher.publisher_id:x}" in warnings[0]


async def test_who_sends_only_garbage_is_given_up(
    rig: Rig, clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dynamo_trio")
    async with rig.fleet() as fleet, rig.worker() as (good, a), rig.worker() as (bad, b):
        await join(fleet, good, a)
        await join(fleet, bad, b)
        rig.events.garble = True
        for _ in range(300):
            bad.publish([stored(range(8))])
            await trio.lowlevel.checkpoint()
        rig.events.garble = False
        good.publish([stored(range(8))])
        await until_overlap(fleet, range(8), {a: 2})
    warnings = [r for r in caplog.records if r.name.startswith("dynamo_trio")]
    assert len(warnings) == 1


async def test_a_channel_at_no_address_harms_nobody(rig: Rig, clock: MockClock) -> None:
    async with rig.fleet() as fleet, rig.endpoint() as stranger:
        discovery = stranger.runtime.discovery
        await discovery.register(EventChannel(stranger.id, "kv-events", 7, "nowhere"))
        await discovery.register(EventChannel(stranger.id, "kv_metrics", 8, "nowhere"))
        await discovery.register(EventSource(stranger.id, "kv-events", 7, worker_id=1))
        async with rig.worker() as (publisher, cache):
            publisher.publish([stored(range(8))])
            await until_overlap(fleet, range(8), {cache: 2})


@pytest.mark.parametrize("number", [-1, 2**64])
async def test_hashes_are_checked_before_anything_is_told(
    rig: Rig, clock: MockClock, number: int
) -> None:
    async with rig.fleet() as fleet, rig.worker() as (publisher, cache):
        for wrong in (
            Removed((number,)),
            Stored(number, None, (Block(1, 1),)),
            Stored(None, None, (Block(1, 1), Block(number, 2))),
        ):
            with pytest.raises(InvalidArgument, match="64 bits"):
                publisher.publish([stored(range(8)), wrong])
        assert publisher.blocks == 0
        await until_overlap(fleet, range(8), {cache: 0})


# --- load -------------------------------------------------------------------------------------


async def test_the_load_is_told_when_it_changes_and_to_who_comes_late(
    rig: Rig, clock: MockClock
) -> None:
    async with rig.endpoint() as endpoint, open_load_publisher(endpoint, dp_rank=1) as load:
        cache = CacheId(endpoint.runtime.instance_id, 1)

        def said(**counts: int) -> dict[CacheId, KvMetrics]:
            return {cache: KvMetrics(worker_id=cache.worker_id, dp_rank=1, **counts)}

        load.update(kv_used_blocks=3)
        async with rig.fleet() as fleet:
            await until(fleet, lambda: fleet.loads == said(kv_used_blocks=3))
            load.update(kv_used_blocks=4, active_prefill_tokens=7)
            await until(
                fleet, lambda: fleet.loads == said(kv_used_blocks=4, active_prefill_tokens=7)
            )


async def test_the_same_load_again_is_no_change(autojump_clock: object) -> None:
    rig = Rig(LossyEvents(MemoryEvents()))
    async with rig.endpoint() as endpoint, open_load_publisher(endpoint) as load:
        async with rig.fleet() as fleet:
            load.update(kv_used_blocks=1)
            await until(fleet, lambda: bool(fleet.loads))
            told = len(rig.events.sizes)
            with trio.move_on_after(10) as waiting:
                await fleet.wait_changed()
            assert waiting.cancelled_caught
            assert len(rig.events.sizes) >= told + 5
            load.update(kv_used_blocks=2)
            with trio.fail_after(1):
                await fleet.wait_changed()


async def test_the_load_is_told_at_a_bounded_pace(autojump_clock: object) -> None:
    rig = Rig(LossyEvents(MemoryEvents()))
    async with rig.endpoint() as endpoint, open_load_publisher(endpoint) as load:
        began = trio.current_time()
        for number in range(500):
            load.update(kv_used_blocks=number)
            await trio.sleep(0.001)
        took = trio.current_time() - began
        assert 2 <= len(rig.events.sizes) <= took / 0.1 + 2


# --- an engine --------------------------------------------------------------------------------

SETTINGS = SimSettings(kv_block_tokens=SIZE, kv_blocks=64, itl_ms=20)


async def generate(engine: Engine, name: str, prompt: Sequence[int], tokens: int = 1) -> None:
    request = Request(request_id=name, token_ids=prompt, max_tokens=tokens, ignore_eos=True)
    async with engine.open(request) as deltas:
        async for _ in deltas:
            pass


async def test_an_engine_tells_of_its_cache_and_load(rig: Rig, clock: MockClock) -> None:
    async with (
        rig.fleet() as fleet,
        rig.endpoint() as endpoint,
        open_engine(SimCore(SETTINGS), host=InlineHost()) as engine,
        publish_engine(endpoint, engine),
    ):
        cache = CacheId(endpoint.runtime.instance_id)
        await generate(engine, "a", range(9))
        await until_overlap(fleet, range(8), {cache: 2})
        await until(fleet, lambda: cache in fleet.loads)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, engine, "b", range(20, 29), 150)
            await until(fleet, lambda: fleet.loads[cache].kv_used_blocks == 40)
            nursery.cancel_scope.cancel()
        await until(fleet, lambda: fleet.loads[cache].kv_used_blocks == 0)


async def test_an_engine_may_tell_its_load_alone(rig: Rig, clock: MockClock) -> None:
    async with (
        rig.fleet() as fleet,
        rig.endpoint() as endpoint,
        open_engine(SimCore(SETTINGS), host=InlineHost()) as engine,
        publish_engine(endpoint, engine, kv_events=False),
    ):
        await until(fleet, lambda: bool(fleet.loads))
        assert fleet.caches == {}


class Confused(SimCore):
    """Tells of blocks with names that are none."""

    def take_kv_events(self) -> list[Stored | Removed | Cleared]:
        events = super().take_kv_events()
        return [*events, Removed((-1,))] if events and self.confused else events

    confused = False


async def test_an_engine_that_tells_nonsense_lives_and_is_not_believed(
    rig: Rig, clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    core = Confused(SETTINGS)
    async with (
        rig.fleet() as fleet,
        rig.endpoint() as endpoint,
        open_engine(core, host=InlineHost()) as engine,
        publish_engine(endpoint, engine),
    ):
        cache = CacheId(endpoint.runtime.instance_id)
        await generate(engine, "a", range(9))
        await until_overlap(fleet, range(8), {cache: 2})
        core.confused = True
        await generate(engine, "b", range(20, 29))
        await generate(engine, "c", range(30, 39))
        await until_overlap(fleet, range(8), {cache: 0})
    assert [r.levelname for r in caplog.records if r.name == "dynamo_trio.kv"].count("ERROR") == 1


# --- records ----------------------------------------------------------------------------------


async def test_records_come_and_go_in_their_order(rig: Rig, clock: MockClock) -> None:
    async with rig.endpoint() as endpoint:
        async with open_kv_publisher(endpoint) as publisher:
            (channel,) = await records(rig, EventChannel)
            (source,) = await records(rig, EventSource)
            (instance,) = await records(rig, Instance)
            name = f"worker_kv_query_source_{publisher.publisher_id:x}"
            assert source.recovery == instance
            assert instance.endpoint == attrs.evolve(endpoint.id, name=name)
            assert channel.publisher_id == source.publisher_id == publisher.publisher_id < 2**53
            # A helper says nothing about whether the worker can be asked.
            assert endpoint.runtime.endpoint_states() == {}
            assert not endpoint.runtime.was_found
            await endpoint.runtime.unregister_all()
            assert await records(rig, Instance) == []
            assert await records(rig, EventSource) == [source]
        assert await records(rig, EventChannel) == []
        assert await records(rig, EventSource) == []
