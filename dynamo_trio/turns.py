"""Who of an endpoint's requests may work now, who waits for that, and who is refused.

The two limits are Dynamo's (``DYN_ENGINE_REQUEST_LIMIT``, ``DYN_DYNAMO_REQUEST_QUEUE_LIMIT``).
Who waits has been taken on: a drain waits for it, and it is served in the order of arrival.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator


@attrs.define(eq=False)
class Turns:
    """The places of one endpoint."""

    #: Requests that may work at once.
    limit: float = math.inf
    #: Requests that may wait for that.
    queue: int = 0
    #: Invariant: at most ``limit``.
    _working: int = 0
    #: Invariant: nobody waits while there is a place.
    _waiting: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Would the next one have to wait?"""
        return self._working >= self.limit

    def check(self, inside: int) -> None:
        """Refuse a request if as many as this are inside already.

        Raises:
            Overloaded: there is no room.
        """
        if inside >= self.limit + self.queue:
            queue = f"; waiting: {self.queue}" if self.queue else ""
            raise Overloaded(f"the worker is full (requests at once: {self.limit:g}{queue})")

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """A place that is given back when the block is left, if it was taken."""
        seat = Seat(self)
        try:
            yield seat
        finally:
            if seat.taken:
                self._give_back()

    async def _take(self) -> None:
        if self.full:
            await self._waiting.park()  # a place is handed over, and never free in between
        else:
            self._working += 1

    def _give_back(self) -> None:
        if self._waiting:
            self._waiting.unpark()
        else:
            self._working -= 1


@attrs.define(eq=False)
class Seat:
    """The place of one request."""

    _turns: Turns
    taken: bool = False

    async def take(self) -> None:
        """Wait for it. Returns at once, without a checkpoint, where there is one."""
        await self._turns._take()
        self.taken = True
