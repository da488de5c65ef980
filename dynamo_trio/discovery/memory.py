"""Discovery inside one process (``DYN_DISCOVERY_BACKEND=mem``)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import trio

from dynamo_trio.discovery.abc import Change, Discovery, Put, R, Removed, Watch
from dynamo_trio.discovery.changes import Changes
from dynamo_trio.discovery.records import random_instance_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dynamo_trio.discovery.records import Record


@attrs.define(eq=False)
class _MemoryWatch(Watch[R]):
    _snapshot: dict[str, R]
    changes: Changes[Change[R]] = attrs.field(factory=Changes)

    @property
    def snapshot(self) -> Mapping[str, R]:
        return self._snapshot

    async def next_change(self) -> Change[R]:
        return await self.changes.next()


@attrs.define(eq=False)
class MemoryDiscovery(Discovery):
    """A store that lives and dies with the object. Changes are visible at once."""

    shared: ClassVar[bool] = False
    _records: dict[type, dict[str, Any]] = attrs.field(factory=dict)
    _watches: dict[type, list[_MemoryWatch[Any]]] = attrs.field(factory=dict)

    def assign_instance_id(self) -> int:
        return random_instance_id()

    async def register(self, record: Record) -> None:
        await trio.lowlevel.checkpoint()
        self._bucket(type(record))[record.key] = record
        self._tell(type(record), Put[Any](record))

    async def unregister(self, record: Record) -> None:
        await trio.lowlevel.checkpoint()
        gone = self._bucket(type(record)).pop(record.key, None)
        if gone is not None:
            self._tell(type(record), Removed[Any](gone))

    @asynccontextmanager
    async def watch(self, kind: type[R]) -> AsyncIterator[Watch[R]]:
        watch = _MemoryWatch[R](dict(self._bucket(kind)))
        watches = self._watches.setdefault(kind, [])
        watches.append(watch)
        try:
            yield watch
        finally:
            watches.remove(watch)

    def _bucket(self, kind: type) -> dict[str, Any]:
        return self._records.setdefault(kind, {})

    def _tell(self, kind: type, change: Change[Any]) -> None:
        for watch in self._watches.get(kind, []):
            watch.changes.push((change,))
