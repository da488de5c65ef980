"""Changes on their way to one reader."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
import trio

from dynamo_trio.discovery.store import StoreChange, StoreWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

C = TypeVar("C")


@attrs.define(eq=False)
class Changes(Generic[C]):
    """What has happened since the reader last looked, in order."""

    _pending: deque[C] = attrs.field(factory=deque)
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def push(self, changes: Iterable[C]) -> None:
        """Tell the reader."""
        self._pending.extend(changes)
        self._lot.unpark_all()

    async def next(self) -> C:
        """Wait for the next one."""
        await trio.lowlevel.checkpoint()
        while not self._pending:
            await self._lot.park()
        return self._pending.popleft()


@attrs.define(eq=False)
class PushedWatch(StoreWatch):
    """A watch that is told of changes by whoever keeps the view."""

    _snapshot: Mapping[str, bytes]
    _changes: Changes[StoreChange] = attrs.field(factory=Changes)

    @property
    def snapshot(self) -> Mapping[str, bytes]:
        return self._snapshot

    async def next_change(self) -> StoreChange:
        return await self._changes.next()

    def push(self, changes: Iterable[StoreChange]) -> None:
        """Tell the reader."""
        self._changes.push(changes)
