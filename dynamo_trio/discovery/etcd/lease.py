"""Keeps the lease alive on which everything hangs that this process has written.

Theory of operation
-------------------
The id of the lease is the process's identity, so it must outlast the lease: when that is
lost (this process was frozen, the store restarted empty, somebody revoked it) it is granted
again under the same id. The keys that hung on it are gone then; so are keys that a stranger
deleted. Both show in what etcd says of the lease, each pulse, and are told through
:class:`Owned`.

A key counts as lost only if it was owned before the question was asked, and was not
written again before the answer came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.discovery.etcd import messages
from dynamo_trio.discovery.etcd.contact import Backoff, logger
from dynamo_trio.discovery.etcd.gateway import FAILED_PRECONDITION
from dynamo_trio.errors import StoreGarbled, StoreRefused, StoreUnavailable
from dynamo_trio.wire.dynamo.keys import MAX_ID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.discovery.etcd.contact import Contact
    from dynamo_trio.discovery.etcd.gateway import Gateway
    from dynamo_trio.discovery.etcd.settings import EtcdSettings
    from dynamo_trio.discovery.store import StoreKey


@attrs.define(eq=False)
class Owned:
    """The keys that this process keeps, and those that it lost without knowing why."""

    #: key -> which write it was that made it ours; a later write has a higher number.
    _writes: dict[StoreKey, int] = attrs.field(factory=dict)
    _count: int = 0
    #: Invariant: no key is both owned and lost.
    _lost: set[StoreKey] = attrs.field(factory=set)
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __contains__(self, at: StoreKey) -> bool:
        return at in self._writes

    def add(self, at: StoreKey) -> None:
        """It was written."""
        self._count += 1
        self._writes[at] = self._count
        self._lost.discard(at)

    def drop(self, at: StoreKey) -> None:
        """It is not wanted any more."""
        self._writes.pop(at, None)
        self._lost.discard(at)

    def now(self) -> Mapping[StoreKey, int]:
        """What is owned at this moment, to be given to :meth:`lose`."""
        return dict(self._writes)

    def lose(self, then: Mapping[StoreKey, int]) -> None:
        """These are gone, unless they were written or dropped since."""
        lost = [at for at, write in then.items() if self._writes.get(at) == write]
        for at in lost:
            del self._writes[at]
        if lost:
            self._lost.update(lost)
            self._lot.unpark()

    async def wait_lost(self) -> frozenset[StoreKey]:
        """Wait for a loss. One caller is told of it."""
        await trio.lowlevel.checkpoint()
        while not self._lost:
            await self._lot.park()
        lost = frozenset(self._lost)
        self._lost.clear()
        return lost


async def first_lease(gateway: Gateway, contact: Contact, settings: EtcdSettings) -> int:
    """An identity, from an etcd that may still be starting.

    Raises:
        StoreRefused: etcd will not have us.
        StoreUnavailable: it did not answer within ``settings.start_time``.
    """
    backoff = Backoff(settings.pulse)
    deadline = trio.current_time() + settings.start_time
    while True:
        try:
            lease = await gateway.ask(messages.grant(0, settings.ttl))
            if not 0 < lease.id <= MAX_ID:
                raise StoreGarbled(f"etcd gave the lease {lease.id:x}, which can be no identity")
        except StoreRefused:
            raise
        except StoreUnavailable as exc:
            contact.failed(exc)
            if trio.current_time() >= deadline:
                raise
        else:
            contact.heard()
            return lease.id
        await trio.sleep(backoff.pause())


@attrs.define(eq=False)
class LeaseKeeper:
    """The pulse of this process in the store."""

    id: int
    owned: Owned
    _gateway: Gateway
    _contact: Contact
    _settings: EtcdSettings
    _hurry: trio.Event = attrs.field(factory=trio.Event)

    async def run(self) -> None:
        """Refresh the lease, for ever."""
        backoff = Backoff(min(1.0, self._settings.pulse))
        while True:
            pause = await self._pulse(backoff)
            with trio.move_on_after(pause):
                await self._hurry.wait()
            self._hurry = trio.Event()

    def look_now(self) -> None:
        """Something says that the lease is gone: do not wait for the next pulse."""
        self._hurry.set()

    async def _pulse(self, backoff: Backoff) -> float:
        """Refresh once; returns the pause after it."""
        try:
            await self._refresh()
        except StoreUnavailable as exc:
            self._contact.failed(exc)
            return backoff.pause()
        backoff.reset()
        return self._settings.pulse

    async def _refresh(self) -> None:
        then = self.owned.now()
        kept = await self._gateway.ask(messages.keep_alive(self.id))
        self._contact.heard()
        if kept.result is None or kept.result.ttl <= 0:
            await self._grant_again()
            self.owned.lose(then)
        elif then:
            await self._compare()

    async def _grant_again(self) -> None:
        logger.warning("the lease %x is gone: it is granted again, under the same id", self.id)
        try:
            await self._gateway.ask(messages.grant(self.id, self._settings.ttl))
        except StoreRefused as exc:
            if exc.code == FAILED_PRECONDITION:  # "lease already exists": it is just going
                raise StoreUnavailable(f"lease {self.id:x}: {exc}") from exc
            raise

    async def _compare(self) -> None:
        """Does everything hang on the lease that should?"""
        then = self.owned.now()
        lease = await self._gateway.ask(messages.look_at(self.id))
        if lease.ttl < 0:
            return self.look_now()
        there = frozenset(lease.keys)
        gone = {at: write for at, write in then.items() if full_key(at) not in there}
        if gone:
            logger.warning("gone from etcd, though not deleted by us: %s", _names(gone))
            self.owned.lose(gone)
        return None


def full_key(at: StoreKey) -> bytes:
    """As etcd stores it."""
    return f"{at.bucket}/{at.key}".encode()


def _names(keys: Mapping[StoreKey, int]) -> str:
    return ", ".join(f"{at.bucket}/{at.key}" for at in keys)
