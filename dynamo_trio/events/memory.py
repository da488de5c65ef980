"""Events inside one process, for programs that run whole in one, and for tests."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.events.abc import EventPlane

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PREFIX = "mem://"


@attrs.define(eq=False)
class _Listener:
    topic: bytes
    room: int
    messages: deque[list[bytes]] = attrs.field(factory=deque)
    lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def offer(self, frames: list[bytes]) -> None:
        if frames[0].startswith(self.topic) and len(self.messages) < self.room:
            self.messages.append(frames)
            self.lot.unpark()

    async def receive(self) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        while not self.messages:
            await self.lot.park()
        return self.messages.popleft()


@attrs.frozen(eq=False)
class _Place:
    address: str
    listeners: list[_Listener]

    def send(self, frames: Sequence[bytes]) -> None:
        for listener in self.listeners:
            listener.offer([*frames])


@attrs.define(eq=False)
class MemoryEvents(EventPlane):
    """Share it between the runtimes that are to hear each other."""

    #: Messages that may wait for each subscriber.
    room: int = 1000
    #: Address -> who listens there, or waits for somebody to come and tell.
    _listeners: dict[str, list[_Listener]] = attrs.field(factory=dict)
    _numbers: Iterator[int] = attrs.field(factory=lambda: count(1))

    @contextmanager
    def open_outlet(self) -> Iterator[_Place]:
        address = f"{_PREFIX}{next(self._numbers)}"
        yield _Place(address, self._listeners.setdefault(address, []))

    @contextmanager
    def open_inlet(self, address: str, topic: str) -> Iterator[_Listener]:
        if not address.startswith(_PREFIX):
            raise ValueError(f"no address of events: {address[:256]!r}")
        listener = _Listener(topic.encode(), self.room)
        listeners = self._listeners.setdefault(address, [])
        listeners.append(listener)
        try:
            yield listener
        finally:
            listeners.remove(listener)
