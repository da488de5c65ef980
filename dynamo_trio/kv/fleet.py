"""The caches and the load of all workers behind one endpoint, as they tell of them.

Discovery says which publishers there are. For each there is a task, which begins when all
records of it are there and ends when one goes or changes; what it knew goes with it.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.discovery import EventChannel, EventSource, Put
from dynamo_trio.kv.cache import CacheFollower
from dynamo_trio.kv.cache import FollowSettings as FollowSettings
from dynamo_trio.kv.loads import LoadFollower
from dynamo_trio.wire.dynamo.events import KV_EVENTS, KV_METRICS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dynamo_trio.discovery import Watch
    from dynamo_trio.runtime import DistributedRuntime, Endpoint
    from dynamo_trio.wire.dynamo.kv_events import KvMetrics
    from dynamo_trio.wire.names import EndpointId

logger = logging.getLogger("dynamo_trio.kv")


@attrs.frozen
class CacheId:
    """One cache of the fleet."""

    worker_id: int  # instance id
    dp_rank: int = 0


@attrs.define(eq=False)
class _Follow:
    """A running task, and the records that it was started for."""

    records: tuple[EventChannel, EventSource | None]
    follower: CacheFollower | LoadFollower
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self) -> None:
        with self.scope:
            await self.follower.run()


@attrs.define(eq=False)
class KvFleet:
    """What is known of the workers of one endpoint. Got from :func:`follow_fleet`."""

    endpoint: EndpointId
    _runtime: DistributedRuntime
    _nursery: trio.Nursery
    _settings: FollowSettings
    _channels: dict[str, EventChannel] = attrs.field(factory=dict)
    _sources: dict[str, EventSource] = attrs.field(factory=dict)
    # Invariant: one for each channel that is followed, by key.
    _follows: dict[str, _Follow] = attrs.field(factory=dict)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    # --- what is known -------------------------------------------------------------------

    @property
    def caches(self) -> dict[CacheId, CacheFollower]:
        """Every cache that is followed, whether anything is known of it yet or not."""
        found = (follow.follower for follow in self._follows.values())
        return {
            CacheId(f.source.worker_id, f.source.dp_rank): f
            for f in found
            if isinstance(f, CacheFollower)
        }

    @property
    def loads(self) -> dict[CacheId, KvMetrics]:
        """The last word of each worker on its load."""
        loads: dict[CacheId, KvMetrics] = {}
        for follow in self._follows.values():
            if isinstance(follow.follower, LoadFollower):
                told = follow.follower.loads
                loads |= {CacheId(*cache): load for cache, load in told.items()}
        return loads

    def overlaps(self, tokens_hashes: Sequence[int]) -> dict[CacheId, int]:
        """How many blocks of a prompt, from its beginning, each cache has.

        ``tokens_hashes``: those of the prompt's full blocks, as
        :func:`~dynamo_trio.wire.dynamo.block_hash.tokens_hashes` makes them. A cache of which
        nothing is known is left out; one with a gap is as it was before the gap.
        """
        return {
            cache: follower.view.overlap(tokens_hashes)
            for cache, follower in self.caches.items()
            if follower.view.last_event_id is not None
        }

    async def wait_changed(self) -> None:
        """Wait until a cache or a load changes, or a worker comes or goes.

        It may wake without anything to see; that a worker tells the same again is no change.
        """
        await self._changed.park()

    def note_change(self) -> None:
        """Wake who waits."""
        self._changed.unpark_all()

    # --- who is followed -----------------------------------------------------------------

    def put(self, record: EventChannel | EventSource) -> None:
        """A record came or changed."""
        if record.endpoint != self.endpoint:
            return
        if isinstance(record, EventChannel):
            self._channels[record.key] = record
        else:
            self._sources[record.key] = record
        self._settle(record.key)

    def drop(self, record: EventChannel | EventSource) -> None:
        """A record has gone."""
        (self._channels if isinstance(record, EventChannel) else self._sources).pop(
            record.key, None
        )
        self._settle(record.key)

    def _settle(self, key: str) -> None:
        channel, source = self._channels.get(key), self._sources.get(key)
        running = self._follows.get(key)
        if running is not None:
            if running.records == (channel, source):
                return
            running.scope.cancel("its records have changed")
            del self._follows[key]
        if channel is not None and (follower := self._follower(channel, source)) is not None:
            self._follows[key] = follow = _Follow((channel, source), follower)
            self._nursery.start_soon(follow.run)
        self.note_change()

    def _follower(
        self, channel: EventChannel, source: EventSource | None
    ) -> CacheFollower | LoadFollower | None:
        if channel.topic == KV_METRICS:
            return LoadFollower(self._runtime.events, channel, self.note_change)
        if channel.topic == KV_EVENTS and source is not None:
            return CacheFollower(self._runtime, source, channel, self._settings, self.note_change)
        return None


@asynccontextmanager
async def follow_fleet(
    endpoint: Endpoint, settings: FollowSettings | None = None
) -> AsyncIterator[KvFleet]:
    """Listen to all workers behind ``endpoint`` while the block runs."""
    runtime = endpoint.runtime
    async with (
        runtime.discovery.watch(EventChannel) as channels,
        runtime.discovery.watch(EventSource) as sources,
        trio.open_nursery() as nursery,
    ):
        fleet = KvFleet(endpoint.id, runtime, nursery, settings or FollowSettings())
        for channel in channels.snapshot.values():
            fleet.put(channel)
        for source in sources.snapshot.values():
            fleet.put(source)
        nursery.start_soon(_watch, fleet, channels)
        nursery.start_soon(_watch, fleet, sources)
        yield fleet
        nursery.cancel_scope.cancel("the fleet is no longer followed")


async def _watch(fleet: KvFleet, watch: Watch[Any]) -> None:
    while True:
        change = await watch.next_change()
        if isinstance(change, Put):
            fleet.put(change.record)
        else:
            fleet.drop(change.record)
