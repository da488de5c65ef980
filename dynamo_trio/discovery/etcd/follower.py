"""Follows one bucket through all outages, for all readers in this process.

Theory of operation
-------------------
All that is there is read first, and then watched from the revision of that reading, so
nothing can be missed between. Whenever the stream of changes breaks off, for whatever
reason (a member went away, history was compacted, an outage ended), the same is done from
the start, and the difference is told: revisions of an earlier stream are never trusted, for
the store may have lost its data since. The stream is also renewed at the end of each outage:
a connection that lies idle through one may be dead without a sign.

A store that restarted empty so quickly that no outage was seen is known by our own lease: if
that is gone, what is missing is in doubt as after an outage.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.discovery.changes import PushedWatch
from dynamo_trio.discovery.etcd import messages
from dynamo_trio.discovery.etcd.contact import Backoff, logger
from dynamo_trio.discovery.etcd.failures import told_apart
from dynamo_trio.discovery.etcd.gateway import refusal
from dynamo_trio.discovery.etcd.view import View
from dynamo_trio.errors import StoreGarbled, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynamo_trio.discovery.etcd.contact import Contact
    from dynamo_trio.discovery.etcd.gateway import Gateway, Lines
    from dynamo_trio.discovery.etcd.lease import LeaseKeeper
    from dynamo_trio.discovery.etcd.messages import Event, KeyValue, WatchLine, WatchNews
    from dynamo_trio.discovery.etcd.settings import EtcdSettings
    from dynamo_trio.discovery.store import StoreChange, StoreWatch


class _Compacted(StoreUnavailable):
    """The history that was asked for is gone: nothing is wrong, begin again."""


@attrs.define(eq=False)
class Follower:
    """One bucket, as far as it is known here."""

    bucket: str
    _gateway: Gateway
    _contact: Contact
    _settings: EtcdSettings
    _keeper: LeaseKeeper
    _view: View = attrs.field(init=False)
    _readers: list[PushedWatch] = attrs.field(factory=list)
    #: Whether the view was ever filled; the revision that it has reached; whether it still moves.
    _is_filled: bool = False
    _revision: int = 0
    _is_connected: bool = False
    #: How often following failed, and why it last did.
    _failures: int = 0
    _why: object = ""
    _moved: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _stream: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def __attrs_post_init__(self) -> None:
        self._view = View(self._settings.hold)

    # --- for readers ---------------------------------------------------------------------

    async def wait_filled(self) -> None:
        """Wait for a view to begin with.

        Raises:
            StoreUnavailable: the store cannot be read now, and never could.
        """
        before = self._failures
        while not self._is_filled:
            if self._failures > before:
                raise StoreUnavailable(str(self._why))
            await self._moved.park()

    async def wait_reached(self, revision: int) -> None:
        """Wait until the view shows this revision, unless the store lets us wait."""
        with trio.move_on_after(self._settings.answer_time):
            while self._is_connected and self._revision < revision:
                await self._moved.park()

    @contextmanager
    def read(self) -> Iterator[StoreWatch]:
        """The view as it is now, and all that becomes of it."""
        reader = PushedWatch(dict(self._view.known))
        self._readers.append(reader)
        try:
            yield reader
        finally:
            self._readers.remove(reader)

    def _tell(self, changes: list[StoreChange]) -> None:
        if changes:
            for reader in self._readers:
                reader.push(changes)

    # --- following -----------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the bucket, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._expire_in_time)
            nursery.start_soon(self._renew_after_outages)
            await self._follow_for_ever()

    async def _expire_in_time(self) -> None:
        while True:
            await trio.sleep(self._settings.pulse)
            if self._is_connected and not self._contact.is_away:
                self._tell(self._view.expire(self._contact.seconds_there))

    async def _renew_after_outages(self) -> None:
        while True:
            await self._contact.wait_back()
            self._stream.cancel("the store was away: read all of it again")

    async def _follow_for_ever(self) -> None:
        backoff = Backoff(min(1.0, self._settings.pulse))
        while True:
            began = trio.current_time()
            with trio.CancelScope() as self._stream:
                await self._follow_once()
            self._is_connected = False
            self._moved.unpark_all()
            if trio.current_time() - began > backoff.cap:
                backoff.reset()
            await trio.sleep(backoff.pause())

    async def _follow_once(self) -> None:
        """Until the stream breaks off."""
        try:
            await self._read_and_watch()
        except _Compacted:
            logger.info("etcd has compacted its history: %s is read again", self.bucket)
        except StoreUnavailable as exc:
            self._failures += 1
            self._why = exc
            self._contact.failed(self.bucket, exc)

    async def _read_and_watch(self) -> None:
        prefix = f"{self.bucket}/".encode()
        everything = await self._gateway.ask(messages.everything(prefix))
        self._contact.heard()
        there = dict(self._read_key(kv) for kv in everything.kvs)
        known = {key: value for key, value in there.items() if key is not None}
        if self._view.misses(known) and not await self._is_the_same(everything.header):
            self._contact.begin_doubt()
        self._compare(known, everything.header)
        call = messages.watch(prefix, everything.header.revision + 1)
        async with self._gateway.stream(call) as lines:
            await self._first_line(lines)
            self._is_connected = True
            self._contact.heard(self.bucket)
            while True:
                self._take(_news(await lines.next_line()))

    async def _first_line(self, lines: Lines[WatchLine]) -> None:
        """The line that says that the watch stands."""
        with told_apart(), trio.fail_after(self._settings.answer_time):
            news = _news(await lines.next_line())
        if not news.created:
            raise StoreGarbled("a watch that does not say that it was created")

    async def _is_the_same(self, header: messages.Header) -> bool:
        """The store has what it had before this process's last look at it."""
        return header.revision >= self._revision and await self._keeper.is_there()

    def _compare(self, known: Mapping[str, bytes], header: messages.Header) -> None:
        now, in_doubt = self._contact.seconds_there, self._contact.in_doubt
        self._tell(self._view.compare(known, now, in_doubt=in_doubt))
        self._is_filled = True
        self._revision = header.revision
        self._moved.unpark_all()

    def _take(self, news: WatchNews) -> None:
        """All changes in one line."""
        for event in news.events:
            self._tell(self._change(event))
            self._revision = max(self._revision, event.kv.mod_revision)
        self._moved.unpark_all()

    def _change(self, event: Event) -> list[StoreChange]:
        key, value = self._read_key(event.kv)
        if key is None:
            return []
        if event.type != "DELETE":
            return self._view.put(key, value)
        now, in_doubt = self._contact.seconds_there, self._contact.in_doubt
        return self._view.remove(key, now, in_doubt=in_doubt)

    def _read_key(self, kv: KeyValue) -> tuple[str | None, bytes]:
        """The key below the bucket; None for one that nobody here can have written."""
        try:
            return kv.key.decode().removeprefix(f"{self.bucket}/"), kv.value
        except UnicodeDecodeError:
            logger.warning("a key in etcd that is no text is passed over: %r", kv.key[:200])
            return None, b""


def _news(line: WatchLine) -> WatchNews:
    """What a line says.

    Raises:
        StoreUnavailable: that the watch is over.
    """
    if line.error is not None:
        raise refusal(line.error)
    if line.result is None:
        raise StoreGarbled("a line of a watch that says nothing")
    if line.result.compact_revision:
        raise _Compacted(f"up to revision {line.result.compact_revision}")
    if line.result.canceled:
        raise StoreUnavailable(f"the watch was cancelled: {line.result.cancel_reason[:1000]}")
    return line.result
