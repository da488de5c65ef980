"""A :class:`~dynamo_trio.discovery.store.Store` in etcd: one lease, and keys that hang on it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.context import plain_cleanup
from dynamo_trio.discovery.etcd import messages
from dynamo_trio.discovery.etcd.contact import Contact, logger
from dynamo_trio.discovery.etcd.follower import Follower
from dynamo_trio.discovery.etcd.gateway import ALREADY_EXISTS, NOT_FOUND, open_gateway
from dynamo_trio.discovery.etcd.lease import LeaseKeeper, Owned, first_lease, full_key
from dynamo_trio.discovery.store import Store, StoreKey
from dynamo_trio.errors import StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import httpx

    from dynamo_trio.context import Cleanup
    from dynamo_trio.discovery.etcd.gateway import Gateway
    from dynamo_trio.discovery.etcd.settings import EtcdSettings
    from dynamo_trio.discovery.store import StoreWatch


@asynccontextmanager
async def open_etcd_store(
    settings: EtcdSettings,
    transport: httpx.AsyncBaseTransport | None = None,
    *,
    buckets: Iterable[str] = (),
    close_scope: Cleanup = plain_cleanup,
) -> AsyncIterator[EtcdStore]:
    """A store for this process. At the end its lease is revoked, and with it all its keys.

    ``buckets``: those that must be readable, or there is no start. ``close_scope`` is what the
    revoke runs in, given its limit: a program gives ``lifecycle.cleanup``, which a stop's hard
    end caps.

    Raises:
        FileUnusable: a certificate or key cannot be used.
        StoreRefused: etcd will not have us: wrong password, no permission.
        StoreUnavailable: it did not answer within ``settings.start_time``.
    """
    async with open_gateway(settings, transport) as gateway:
        contact = Contact(settings)
        lease = await first_lease(gateway, contact, settings, buckets)
        keeper = LeaseKeeper(lease, Owned(), gateway, contact, settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            try:
                yield EtcdStore(gateway, contact, settings, keeper, nursery)
            finally:
                nursery.cancel_scope.cancel("the store is closed")
                with close_scope(settings.close_time) as scope:
                    await _revoke(gateway, lease)
                if scope.cancelled_caught:
                    _say_not_revoked(lease, "no answer in time")


async def _revoke(gateway: Gateway, lease: int) -> None:
    try:
        await gateway.ask(messages.revoke(lease))
    except StoreUnavailable as exc:
        _say_not_revoked(lease, exc)


def _say_not_revoked(lease: int, why: object) -> None:
    logger.warning("lease %x was not revoked, it runs out by itself: %s", lease, why)


@attrs.define(eq=False)
class EtcdStore(Store):
    """Keys of this process hang on one lease, whose id is the process's identity."""

    _gateway: Gateway
    _contact: Contact
    _settings: EtcdSettings
    _keeper: LeaseKeeper
    _nursery: trio.Nursery
    _followers: dict[str, Follower] = attrs.field(factory=dict)
    #: Keys that we wrote or tried to: they are ours whatever lease they hang on.
    _ours: set[StoreKey] = attrs.field(factory=set)
    #: bucket -> the revision of our own last change there
    _written: dict[str, int] = attrs.field(factory=dict)

    @property
    def instance_id(self) -> int:
        return self._keeper.id

    async def put(self, at: StoreKey, value: bytes) -> None:
        self._keeper.owned.begin_write(at)
        try:
            if at in self._ours:
                header = await self._overwrite(at, value)
            else:
                header = await self._create(at, value)
        except StoreRefused as exc:
            if exc.code == NOT_FOUND:  # the lease
                self._keeper.look_now()
            raise
        self._keeper.owned.add(at, header.revision)
        self._note(at, header)

    async def _create(self, at: StoreKey, value: bytes) -> messages.Header:
        """Write a key that must not be there, unless this is the echo of an earlier try."""
        lease = self._keeper.id
        created = await self._gateway.ask(messages.create(full_key(at), value, lease))
        if not created.succeeded:
            existing = created.existing
            if existing is not None and existing.lease != lease:
                raise StoreRefused(
                    f"{at.bucket}/{at.key} belongs to another process, lease {existing.lease:x}",
                    code=ALREADY_EXISTS,
                )
            return await self._overwrite(at, value)
        self._ours.add(at)
        return created.header

    async def _overwrite(self, at: StoreKey, value: bytes) -> messages.Header:
        self._ours.add(at)
        return (await self._gateway.ask(messages.put(full_key(at), value, self._keeper.id))).header

    async def delete(self, at: StoreKey) -> None:
        self._keeper.owned.drop(at)
        done = await self._gateway.ask(messages.delete(full_key(at)))
        if done.deleted:
            self._note(at, done.header)

    @asynccontextmanager
    async def watch(self, bucket: str) -> AsyncIterator[StoreWatch]:
        follower = self._follower(bucket)
        await follower.wait_filled()
        # What this process wrote it must see.
        await follower.wait_reached(self._written.get(bucket, 0))
        with follower.read() as watch:
            yield watch

    async def wait_lost(self) -> frozenset[StoreKey]:
        return await self._keeper.owned.wait_lost()

    def _follower(self, bucket: str) -> Follower:
        """The one that all readers of a bucket share; it runs until the store is closed."""
        if bucket not in self._followers:
            follower = Follower(bucket, self._gateway, self._contact, self._settings, self._keeper)
            self._followers[bucket] = follower
            self._nursery.start_soon(follower.run)
        return self._followers[bucket]

    def _note(self, at: StoreKey, header: messages.Header) -> None:
        self._written[at.bucket] = max(header.revision, self._written.get(at.bucket, 0))
