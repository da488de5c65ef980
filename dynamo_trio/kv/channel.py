"""One publisher of one topic: its place, its record, and the numbers of its messages."""

from __future__ import annotations

import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.discovery import EventChannel
from dynamo_trio.wire.dynamo.events import EventMessage, encode_event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo_trio.discovery import Record
    from dynamo_trio.events import Outlet
    from dynamo_trio.runtime import DistributedRuntime, Endpoint


def random_publisher_id() -> int:
    """An id for one life of one publisher: 53 random bits, never 0, as Dynamo's have."""
    return secrets.randbits(53) or 1


@attrs.define(eq=False)
class Channel:
    """Sends messages of one topic."""

    topic: str
    publisher_id: int
    _outlet: Outlet
    _sequence: int = 0

    def send(self, payload: bytes) -> None:
        """Tell everybody who listens. Never blocks."""
        message = EventMessage(
            publisher_id=self.publisher_id,
            sequence=self._sequence,
            published_at=time.time_ns() // 1_000_000,
            topic=self.topic,
            payload=payload,
        )
        self._sequence += 1
        self._outlet.send(encode_event(message))


@asynccontextmanager
async def open_channel(endpoint: Endpoint, topic: str, publisher_id: int) -> AsyncIterator[Channel]:
    """A channel that others can find while the block runs.

    Raises:
        PortInUse: nothing can be published on this machine.
    """
    runtime = endpoint.runtime
    with runtime.events.open_outlet() as outlet:
        record = EventChannel(endpoint.id, topic, publisher_id, outlet.address)
        async with registered(runtime, record):
            yield Channel(topic, publisher_id, outlet)


@asynccontextmanager
async def registered(runtime: DistributedRuntime, record: Record) -> AsyncIterator[None]:
    """Keep a record in the store while the block runs."""
    try:
        await runtime.discovery.register(record)
        yield
    finally:
        with runtime.lifecycle.cleanup(2.0):
            await runtime.discovery.unregister(record)
