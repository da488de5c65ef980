"""Tells what is in a KV cache, and answers who has missed something.

Theory of operation
-------------------
Every change of the cache gets a number and goes out at once, to whoever listens and has room
for it; what was told before is kept here, in bounds. A listener that comes late, or finds a
number missing, asks the *query endpoint*: it gets what it missed, or the whole cache. So
nobody is ever waited for.

Three records tell of it: the query endpoint's instance, the channel, and the source, which
says whose cache it is and where to ask. A listener needs all of them, so they come in this
order and go in the other. The instance leaves with the others of the process when its stop
begins; channel and source stay as long as the cache is told of.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.discovery import EventSource
from dynamo_trio.errors import InvalidArgument
from dynamo_trio.kv.channel import open_channel, random_publisher_id, registered
from dynamo_trio.wire.dynamo.events import KV_EVENTS
from dynamo_trio.wire.dynamo.keys import MAX_ID
from dynamo_trio.wire.dynamo.kv_events import Removed, Stored, encode_kv_events
from dynamo_trio.wire.dynamo.kv_log import KvLog
from dynamo_trio.wire.dynamo.kv_query import KvQuery, query_endpoint, spell_answer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.discovery import Instance
    from dynamo_trio.engines import KvEvent
    from dynamo_trio.kv.channel import Channel
    from dynamo_trio.runtime import Endpoint
    from dynamo_trio.wire.dynamo.kv_events import RouterEvent

#: Blocks of one event, and blocks and events of one message, at most.
EVENT_BLOCKS = 1024
MESSAGE_WEIGHT = 4096


@attrs.define(eq=False)
class KvPublisher:
    """Tells of one cache. Got from :func:`open_kv_publisher`."""

    _channel: Channel
    _log: KvLog

    @property
    def publisher_id(self) -> int:
        """Of this life of the cache."""
        return self._channel.publisher_id

    @property
    def blocks(self) -> int:
        """How many blocks the cache has, by all that was published."""
        return len(self._log.state)

    def publish(self, changes: Iterable[KvEvent]) -> None:
        """Tell what happened to the cache, in order. Never blocks; call it in the Trio thread.

        Raises:
            InvalidArgument: a hash is no unsigned 64-bit number, or there are more blocks than
                any cache has. Nothing of this call, or the changes before that one, were told.
        """
        pieces = [piece for change in changes for piece in _pieces(change)]
        batch: list[RouterEvent] = []
        weight = 0
        for piece in pieces:
            event = self._log.record(piece)
            if batch and weight + event.weight > MESSAGE_WEIGHT:
                self._send(batch)
                batch, weight = [], 0
            batch.append(event)
            weight += event.weight
        if batch:
            self._send(batch)

    def _send(self, events: list[RouterEvent]) -> None:
        self._channel.send(encode_kv_events(events))


def _pieces(change: KvEvent) -> Iterator[KvEvent]:
    """The same change in events of a bounded size."""
    if isinstance(change, Removed):
        _check(change.block_hashes)
        for at in range(0, len(change.block_hashes), EVENT_BLOCKS):
            yield Removed(change.block_hashes[at : at + EVENT_BLOCKS])
    elif isinstance(change, Stored):
        parent, blocks = change.parent_hash, change.blocks
        _check([] if parent is None else [parent])
        _check(number for block in blocks for number in (block.block_hash, block.tokens_hash))
        for at in range(0, len(blocks), EVENT_BLOCKS):
            yield Stored(parent, None, blocks[at : at + EVENT_BLOCKS])
            parent = blocks[min(at + EVENT_BLOCKS, len(blocks)) - 1].block_hash
    else:
        yield change


def _check(hashes: Iterable[int]) -> None:
    for number in hashes:
        if not 0 <= number <= MAX_ID:
            raise InvalidArgument(f"the hash of a KV block must have 64 bits, unsigned: {number}")


@asynccontextmanager
async def open_kv_publisher(endpoint: Endpoint, *, dp_rank: int = 0) -> AsyncIterator[KvPublisher]:
    """Tell of the cache of this process's worker behind ``endpoint`` while the block runs.

    Open it before the endpoint is served, and leave it when it no longer is. The model's card
    must say in its ``runtime_config`` that ``kv_event_publishing_enabled`` and
    ``enable_local_indexer`` are true, or no KV router listens. ``dp_rank``: the data-parallel
    rank within the worker; each has a publisher of its own.

    Raises:
        PortInUse: nothing can be published on this machine.
    """
    runtime, publisher_id = endpoint.runtime, random_publisher_id()
    log = KvLog(runtime.instance_id, dp_rank)
    async with (
        _answering(endpoint, publisher_id, log) as instance,
        open_channel(endpoint, KV_EVENTS, publisher_id) as channel,
        registered(
            runtime,
            EventSource(
                endpoint.id,
                KV_EVENTS,
                publisher_id,
                worker_id=runtime.instance_id,
                dp_rank=dp_rank,
                recovery=instance,
            ),
        ),
    ):
        yield KvPublisher(channel, log)


def _answering(
    endpoint: Endpoint, publisher_id: int, log: KvLog
) -> AbstractAsyncContextManager[Instance]:
    """Serve the query endpoint."""

    async def answer(query: KvQuery) -> AsyncGenerator[object, None]:
        yield spell_answer(log.answer(query))

    names = attrs.evolve(endpoint.id, name=query_endpoint(publisher_id))
    return endpoint.runtime.endpoint(str(names)).serving(
        answer, request_type=KvQuery, annotated=False, listed=False
    )
