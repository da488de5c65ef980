"""Discovery over any store that keeps bytes under keys.

Theory of operation
-------------------
For every record of this process there is a :class:`~.publication.Publication`: it holds
what shall stand under the record's key, and its task puts, deletes and tries again until it
does. So a record that was lost is put back by the same way by which it came.

A key that went may have been seen going. Real frontends (Dynamo 1.5.1) remember an instance
that left for 5 s, and fail requests that they send to it in that time; so an *instance* is
put back no sooner than :data:`QUIET` after its loss was noticed or it was withdrawn. Nobody
holds the absence of a card, or of where events are, against it: these are put back at once.

A reader takes what it can read. What it cannot is told to the log once and, if the key held
a readable record before, that one stays in the view: a store is away, half-written or in
the hands of a stranger more often than a worker is gone.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Generic

import attrs
import trio

from dynamo_trio.discovery.abc import Change, Discovery, Put, R, Removed, Watch
from dynamo_trio.discovery.backoff import Backoff
from dynamo_trio.discovery.publication import Publication
from dynamo_trio.discovery.records import Instance
from dynamo_trio.discovery.spelling import bucket_of, read, spell, store_key
from dynamo_trio.discovery.store import Store, StoreKey, StorePut, StoreWatch
from dynamo_trio.errors import RemoteProtocolError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dynamo_trio.discovery.records import Record

logger = logging.getLogger("dynamo_trio.discovery")

#: An instance that went is not put back sooner, in seconds. Dynamo 1.5.1's frontend: 5.
QUIET = 6.0


@attrs.define(eq=False)
class StoredDiscovery(Discovery):
    """Made by :func:`open_stored_discovery`. Registrations end with it."""

    _store: Store
    _nursery: trio.Nursery
    _quiet: float
    _publications: dict[StoreKey, Publication] = attrs.field(factory=dict)

    def assign_instance_id(self) -> int:
        return self._store.instance_id

    async def register(self, record: Record) -> None:
        """Publish a record. Waits as long as the store is away, and tells the log so.

        Raises:
            InvalidArgument: other processes could make nothing of it.
        """
        await self._publication(store_key(record)).publish(spell(record))

    async def unregister(self, record: Record) -> None:
        """Withdraw a record. If the store is away it is withdrawn as soon as it is back.

        Only the first to meet such a store waits for it: a stop must not wait once for each.
        """
        publication = self._publications.get(store_key(record))
        if publication is None:
            await trio.lowlevel.checkpoint()
        elif any(other.is_overdue for other in self._publications.values()):
            publication.want(None)
            await trio.lowlevel.checkpoint()
        else:
            with suppress(StoreUnavailable):  # the log was told, and it is tried on
                await publication.withdraw()

    @property
    def has_withdrawn(self) -> bool:
        return all(one.is_withdrawn_or_wanted for one in self._publications.values())

    async def wait_withdrawn(self) -> None:
        errors: list[StoreUnavailable] = []
        for one in list(self._publications.values()):
            try:
                await one.wait_withdrawn()
            except StoreUnavailable as exc:
                errors.append(exc)
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise StoreUnavailable(f"{errors[0]}{more}") from errors[0]

    @asynccontextmanager
    async def watch(self, kind: type[R]) -> AsyncIterator[Watch[R]]:
        async with AsyncExitStack() as stack:
            yield _StoredWatch(kind, await self._open(bucket_of(kind), stack))

    async def _open(self, bucket: str, stack: AsyncExitStack) -> StoreWatch:
        backoff = Backoff(
            f"cannot read {bucket} in the discovery store; trying again",
            f"can read {bucket} in the discovery store",
        )
        while True:
            try:
                watch = await stack.enter_async_context(self._store.watch(bucket))
            except StoreUnavailable as exc:
                await trio.sleep(backoff.failed(exc))
            else:
                backoff.worked()
                return watch

    def _publication(self, at: StoreKey) -> Publication:
        found = self._publications.get(at)
        if found is None:
            quiet = self._quiet if at.bucket == bucket_of(Instance) else 0.0
            found = self._publications[at] = Publication(self._store, at, quiet)
            self._nursery.start_soon(found.run)
        return found

    async def heal(self) -> None:
        """Put back what is lost, for ever."""
        while True:
            for at in await self._store.wait_lost():
                if at in self._publications:
                    self._publications[at].lost()


@attrs.define(eq=False)
class _StoredWatch(Watch[R]):
    _kind: type[R]
    _source: StoreWatch
    _snapshot: dict[str, R] = attrs.field(init=False)
    #: Invariant: exactly what the user was told, by key.
    _known: dict[str, R] = attrs.field(init=False)
    _reader: _Reader[R] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = _Reader(self._kind)
        pairs = self._source.snapshot.items()
        found = ((key, self._reader.read(key, value)) for key, value in pairs)
        self._known = {key: record for key, record in found if record is not None}
        self._snapshot = dict(self._known)

    @property
    def snapshot(self) -> Mapping[str, R]:
        return self._snapshot

    async def next_change(self) -> Change[R]:
        while True:
            change = await self._source.next_change()
            if isinstance(change, StorePut):
                told = self._put(change.key, change.value)
            else:
                told = self._remove(change.key)
            if told is not None:
                return told

    def _put(self, key: str, value: bytes) -> Change[R] | None:
        record = self._reader.read(key, value)
        if record is None or record == self._known.get(key):
            return None
        self._known[key] = record
        return Put(record)

    def _remove(self, key: str) -> Change[R] | None:
        self._reader.forget(key)
        gone = self._known.pop(key, None)
        return None if gone is None else Removed(gone)


@attrs.define(eq=False)
class _Reader(Generic[R]):
    """Reads values, and complains of each key once until it can be read again."""

    _kind: type[R]
    _complained: set[str] = attrs.field(factory=set)

    def read(self, key: str, value: bytes) -> R | None:
        try:
            record = read(self._kind, key, value)
        except RemoteProtocolError as exc:
            self._complain(key, exc)
            return None
        self._complained.discard(key)
        return record

    def forget(self, key: str) -> None:
        self._complained.discard(key)

    def _complain(self, key: str, reason: Exception) -> None:
        if key not in self._complained:
            self._complained.add(key)
            where = f"{bucket_of(self._kind)}/{key[:256]}"
            logger.warning("the record %s is left out: %s", where, reason)


@asynccontextmanager
async def open_stored_discovery(
    store: Store, *, quiet: float = QUIET
) -> AsyncIterator[StoredDiscovery]:
    """Discovery over ``store``, which outlives it and deletes what is still there.

    ``quiet``: an instance that went is not put back sooner, in seconds.
    """
    async with trio.open_nursery() as nursery:
        discovery = StoredDiscovery(store, nursery, quiet)
        nursery.start_soon(discovery.heal)
        try:
            yield discovery
        finally:
            nursery.cancel_scope.cancel("the discovery is closed")
