"""A store in memory that can be away, lose keys, and be scribbled on."""

from __future__ import annotations

import math
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.discovery.store import (
    Store,
    StoreChange,
    StoreKey,
    StorePut,
    StoreRemoved,
    StoreWatch,
)
from dynamo_trio.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping


@attrs.define(eq=False)
class _FakeWatch(StoreWatch):
    _snapshot: dict[str, bytes]
    send: trio.MemorySendChannel[StoreChange]
    receive: trio.MemoryReceiveChannel[StoreChange]

    @property
    def snapshot(self) -> Mapping[str, bytes]:
        return self._snapshot

    async def next_change(self) -> StoreChange:
        return await self.receive.receive()


@attrs.define(eq=False)
class FakeStore(Store):
    values: dict[StoreKey, bytes] = attrs.field(factory=dict)
    away: bool = False
    #: How long each call takes, in seconds.
    slow: float = 0.0
    #: (time, what) of everything that reached the store.
    log: list[tuple[float, str]] = attrs.field(factory=list)
    attempts: int = 0
    _watches: list[tuple[str, _FakeWatch]] = attrs.field(factory=list)
    _lost: deque[frozenset[StoreKey]] = attrs.field(factory=deque)
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def instance_id(self) -> int:
        return 0x1234

    async def put(self, at: StoreKey, value: bytes) -> None:
        await self._reach()
        self.log.append((trio.current_time(), f"put {at.key}"))
        self.write(at, value)

    async def delete(self, at: StoreKey) -> None:
        await self._reach()
        self.log.append((trio.current_time(), f"delete {at.key}"))
        self.erase(at)

    async def _reach(self) -> None:
        self.attempts += 1
        await trio.sleep(self.slow)
        if self.away:
            raise StoreUnavailable("nobody answers")

    @asynccontextmanager
    async def watch(self, bucket: str) -> AsyncIterator[StoreWatch]:
        await self._reach()
        found = {at.key: value for at, value in self.values.items() if at.bucket == bucket}
        watch = _FakeWatch(found, *trio.open_memory_channel[StoreChange](math.inf))
        self._watches.append((bucket, watch))
        yield watch

    async def wait_lost(self) -> frozenset[StoreKey]:
        while not self._lost:
            await self._lot.park()
        return self._lost.popleft()

    # --- what others do -------------------------------------------------------------------

    def write(self, at: StoreKey, value: bytes) -> None:
        self.values[at] = value
        self._tell(at.bucket, StorePut(at.key, value))

    def erase(self, at: StoreKey) -> None:
        if self.values.pop(at, None) is not None:
            self._tell(at.bucket, StoreRemoved(at.key))

    def lose(self, *keys: StoreKey) -> None:
        """Own keys go, and their owner is told."""
        for at in keys:
            self.erase(at)
        self._lost.append(frozenset(keys))
        self._lot.unpark_all()

    def _tell(self, bucket: str, change: StoreChange) -> None:
        for watched, watch in self._watches:
            if watched == bucket:
                watch.send.send_nowait(change)
