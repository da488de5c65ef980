"""What workers tell of their load (``kv_metrics``), of whatever endpoint."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.discovery import EventChannel, Put
from dynamo_trio.errors import RemoteProtocolError
from dynamo_trio.kv.cache import listen
from dynamo_trio.wire.dynamo.events import KV_METRICS
from dynamo_trio.wire.dynamo.kv_events import KvMetrics, decode_kv_metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dynamo_trio.discovery import Change, Discovery, EndpointId, Watch
    from dynamo_trio.engines import Engine
    from dynamo_trio.events import EventPlane
    from dynamo_trio.wire.dynamo.events import EventMessage

logger = logging.getLogger("dynamo_trio.kv")

#: Caches that one publisher may tell of, at most: the data-parallel ranks of its worker.
MAX_RANKS = 1024


def load_of(engine: Engine, worker_id: int, dp_rank: int = 0) -> KvMetrics:
    """What an engine's last step left to do."""
    used = engine.stats.kv_blocks_used  # what only the cache holds, for prompts to come, is none
    return KvMetrics(
        worker_id=worker_id,
        dp_rank=dp_rank,
        kv_used_blocks=used,
        active_decode_blocks=used,
        active_prefill_tokens=engine.prompt_tokens,
    )


@attrs.define(eq=False)
class LoadFollower:
    """Follows what one publisher tells of its load. ``note_change`` is called when that changes."""

    _events: EventPlane
    channel: EventChannel
    _note_change: Callable[[], object] = bool
    #: Worker and rank -> its last word. Empty again when the publisher is no longer followed.
    loads: dict[tuple[int, int], KvMetrics] = attrs.field(factory=dict)

    async def run(self) -> None:
        """Listen until cancelled; whatever goes wrong is told to the log, and ends it."""
        try:
            with self._events.open_inlet(self.channel.address, self.channel.topic) as inlet:
                await listen(inlet, self.channel, self._take)
        except ValueError as exc:
            logger.warning("a worker's load cannot be listened to: %s", exc)
        except Exception:  # no socket left, say: nobody's request is to suffer from that
            logger.exception("a worker's load cannot be listened to")
        finally:
            self.loads.clear()

    def _take(self, message: EventMessage) -> None:
        load = decode_kv_metrics(message.payload)
        cache = load.worker_id, load.dp_rank
        if cache not in self.loads and len(self.loads) >= MAX_RANKS:
            raise RemoteProtocolError(f"the load of more than {MAX_RANKS} caches")
        if self.loads.get(cache) != load:  # it is told every second, for who comes late
            self.loads[cache] = load
            self._note_change()


@attrs.define(eq=False)
class _Following:
    follower: LoadFollower
    #: What it told is not known any more.
    _note_end: Callable[[], object]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self) -> None:
        try:
            with self.scope:
                await self.follower.run()
        finally:
            self._note_end()


@attrs.define(eq=False)
class FleetLoads:
    """The loads of all workers that discovery shows. Got from :func:`follow_loads`."""

    _events: EventPlane
    _nursery: trio.Nursery
    #: Called when :meth:`of` gives something else than before.
    _note_change: Callable[[], object] = bool
    # Invariant: one for each publisher in discovery, by key.
    _following: dict[str, _Following] = attrs.field(factory=dict)

    def of(self, endpoint: EndpointId) -> dict[int, dict[int, KvMetrics]]:
        """The last word of each worker of this endpoint: worker -> data-parallel rank -> load."""
        loads: dict[int, dict[int, KvMetrics]] = {}
        for following in self._following.values():
            follower = following.follower
            if follower.channel.endpoint == endpoint:
                for (worker, rank), load in follower.loads.items():
                    loads.setdefault(worker, {})[rank] = load
        return loads

    def apply(self, change: Change[EventChannel]) -> None:
        """A publisher is there, has changed, or is gone."""
        channel = change.record
        if channel.topic != KV_METRICS:
            return
        known = self._following.get(channel.key)
        if isinstance(change, Put) and known is not None and known.follower.channel == channel:
            return
        if known is not None:
            known.scope.cancel("its record has changed")
            del self._following[channel.key]
            self._note_change()
        if isinstance(change, Put):
            follower = LoadFollower(self._events, channel, self._note_change)
            following = _Following(follower, self._note_change)
            self._following[channel.key] = following
            self._nursery.start_soon(following.run)


@asynccontextmanager
async def follow_loads(
    discovery: Discovery, events: EventPlane, note_change: Callable[[], object] = bool
) -> AsyncIterator[FleetLoads]:
    """Listen to what all workers tell of their load while the block runs.

    ``note_change`` is called whenever what is known has changed.
    """
    async with discovery.watch(EventChannel) as watch, trio.open_nursery() as nursery:
        loads = FleetLoads(events, nursery, note_change)
        for channel in watch.snapshot.values():
            loads.apply(Put(channel))
        nursery.start_soon(_follow, loads, watch)
        yield loads
        nursery.cancel_scope.cancel("the loads are no longer followed")


async def _follow(loads: FleetLoads, watch: Watch[EventChannel]) -> None:
    while True:
        loads.apply(await watch.next_change())
