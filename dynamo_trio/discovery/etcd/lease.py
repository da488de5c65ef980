"""Keeps the lease alive on which everything hangs that this process has written.

Theory of operation
-------------------
The id of the lease is the process's identity, so it must outlast the lease: when that is
lost (this process was frozen, the store restarted empty, somebody revoked it) it is granted
again under the same id. The keys that hung on it are gone then. A stranger may delete or
overwrite keys, even with our lease on them. All that shows in what etcd says of the keys, each
pulse (who wrote last is told by the revision), and is told through :class:`Owned`.

A key counts as lost only if it was owned before the question was asked, and was not
written again before the answer came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.discovery.etcd import messages
from dynamo_trio.discovery.etcd.contact import Backoff, logger
from dynamo_trio.discovery.etcd.gateway import FAILED_PRECONDITION, PERMISSION_DENIED
from dynamo_trio.errors import StoreGarbled, StoreRefused, StoreUnavailable
from dynamo_trio.wire.dynamo.keys import MAX_ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dynamo_trio.discovery.etcd.contact import Contact
    from dynamo_trio.discovery.etcd.gateway import Gateway
    from dynamo_trio.discovery.etcd.messages import KeyValue
    from dynamo_trio.discovery.etcd.settings import EtcdSettings
    from dynamo_trio.discovery.store import StoreKey

#: How the log's story of outages knows what is done here.
_PART = "lease"
#: Keys. etcd's own limit is 128, unless it is told another.
_AT_ONCE = 100


@attrs.frozen
class Write:
    """One of our own."""

    #: A later write has a higher one.
    number: int
    #: etcd's revision of it; None while that is not known.
    revision: int | None


@attrs.define(eq=False)
class Owned:
    """The keys that this process keeps, and those that it lost without knowing why."""

    #: key -> the write that made it ours
    _writes: dict[StoreKey, Write] = attrs.field(factory=dict)
    _count: int = 0
    #: Invariant: no key is both owned and lost.
    _lost: set[StoreKey] = attrs.field(factory=set)
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __contains__(self, at: StoreKey) -> bool:
        return at in self._writes

    def add(self, at: StoreKey, revision: int | None = None) -> None:
        """It was written."""
        self._count += 1
        self._writes[at] = Write(self._count, revision)
        self._lost.discard(at)

    def begin_write(self, at: StoreKey) -> None:
        """It is about to be: until :meth:`add` nobody knows with which revision it stands."""
        if at in self._writes:
            self.add(at)

    def drop(self, at: StoreKey) -> None:
        """It is not wanted any more."""
        self._writes.pop(at, None)
        self._lost.discard(at)

    def now(self) -> Mapping[StoreKey, Write]:
        """What is owned at this moment, to be given to :meth:`lose`."""
        return dict(self._writes)

    def lose(self, then: Mapping[StoreKey, Write]) -> None:
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


async def first_lease(
    gateway: Gateway, contact: Contact, settings: EtcdSettings, buckets: Iterable[str] = ()
) -> int:
    """An identity, from an etcd that may still be starting, and lets us read these buckets.

    Raises:
        StoreRefused: etcd will not have us.
        StoreUnavailable: it did not answer within ``settings.start_time``.
    """
    backoff = Backoff(settings.pulse)
    deadline = trio.current_time() + settings.start_time
    while True:
        try:
            await _be_let_in(gateway, settings, buckets)
            lease = await gateway.ask(messages.grant(0, settings.ttl))
            if not 0 < lease.id <= MAX_ID:
                raise StoreGarbled(f"etcd gave the lease {lease.id:x}, which can be no identity")
        except StoreRefused:
            raise
        except StoreUnavailable as exc:
            contact.failed(_PART, exc)
            if trio.current_time() >= deadline:
                raise
        else:
            contact.heard(_PART)
            return lease.id
        await trio.sleep(backoff.pause())


async def _be_let_in(gateway: Gateway, settings: EtcdSettings, buckets: Iterable[str]) -> None:
    """A lease is given to everybody, so it says nothing of passwords and permissions."""
    for bucket in buckets:
        try:
            await gateway.ask(messages.may_read(f"{bucket}/".encode()))
        except StoreRefused as exc:
            text = f"{bucket}/ cannot be read: {exc}{_advice(exc, settings.username)}"
            raise StoreRefused(text, code=exc.code) from exc


def _advice(exc: StoreRefused, user: str | None) -> str:
    if user is None:
        return "; it may want ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD, which are not set"
    if exc.code == PERMISSION_DENIED:
        return (
            f"; user {user!r} (ETCD_AUTH_USERNAME) needs permission to read, and a worker also"
            " to write, the keys from v1/ on"
        )
    return ""


@attrs.define(eq=False)
class LeaseKeeper:
    """The pulse of this process in the store."""

    id: int
    owned: Owned
    _gateway: Gateway
    _contact: Contact
    _settings: EtcdSettings
    _hurry: trio.Event = attrs.field(factory=trio.Event)

    async def is_there(self) -> bool:
        """Has the store our lease still?

        Raises:
            StoreUnavailable: it does not say.
        """
        return (await self._gateway.ask(messages.look_at(self.id))).ttl > 0

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
            self._contact.failed(_PART, exc)
            return backoff.pause()
        self._contact.heard(_PART)
        backoff.reset()
        return self._settings.pulse

    async def _refresh(self) -> None:
        then = self.owned.now()
        kept = await self._gateway.ask(messages.keep_alive(self.id))
        self._contact.heard()
        if kept.result is None or kept.result.ttl <= 0:
            self._contact.begin_doubt()  # etcd may have lost more than ours
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
        """Does everything stand as we wrote it?"""
        for some in _portions(self.owned.now()):
            looked = await self._gateway.ask(messages.look_at_keys(map(full_key, some)))
            found = looked.found
            pairs = some.items()
            gone = {
                at: write for at, write in pairs if not self._stands(write, found.get(full_key(at)))
            }
            if gone:
                logger.warning("no longer in etcd as we wrote them: %s", _names(gone))
                self.owned.lose(gone)

    def _stands(self, write: Write, found: KeyValue | None) -> bool:
        if found is None or found.lease != self.id:
            return False
        return write.revision in (None, found.mod_revision)


def full_key(at: StoreKey) -> bytes:
    """As etcd stores it."""
    return f"{at.bucket}/{at.key}".encode()


def _portions(keys: Mapping[StoreKey, Write]) -> Iterator[Mapping[StoreKey, Write]]:
    """As many as etcd looks at in one transaction."""
    pairs = list(keys.items())
    for first in range(0, len(pairs), _AT_ONCE):
        yield dict(pairs[first : first + _AT_ONCE])


def _names(keys: Mapping[StoreKey, Write]) -> str:
    return ", ".join(f"{at.bucket}/{at.key}" for at in keys)
