"""Discovery through a directory that all processes share (``DYN_DISCOVERY_BACKEND=file``).

Theory of operation
-------------------
The layout is Dynamo 1.5.1's: one directory for each bucket, one file for each key, its name
the key with all but letters and digits escaped. A file is written under a temporary name
and renamed, so readers see it whole or not at all. It lives as long as its time stamp is
fresh: its owner touches it every third of the time-to-live.

One task, :meth:`FileStore.tend`, does it all in rounds of at most a second, in this order:
own files are touched or looked at (one that is missing, or that somebody else wrote to, is
lost), then, every third of the time-to-live, files that nobody touches are deleted. So a
process that was frozen touches its own files before it judges anybody else's.

Nobody is judged by a round in which the store was not known to take touches: it is full,
read-only, or hangs, and those who live cannot show it. So each round first touches own files
or, where there are none, one made for that; if it fails, or the round takes long, all that
was seen of others counts no more. While it fails it is tried again every second.

Every access is made in a thread, which is left alone if the caller is cancelled: a network
mount may hang for minutes.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import attrs
import trio

from dynamo_trio.context import plain_cleanup
from dynamo_trio.discovery import files
from dynamo_trio.discovery.backoff import TELL_EVERY, Backoff
from dynamo_trio.discovery.file_view import LATE, Expiry, Rounds
from dynamo_trio.discovery.file_watch import open_file_watch
from dynamo_trio.discovery.own_file import DELETED, OwnFile, inspect
from dynamo_trio.discovery.records import random_instance_id
from dynamo_trio.discovery.store import Store, StoreKey, StoreWatch
from dynamo_trio.discovery.stored import open_stored_discovery
from dynamo_trio.errors import FileUnusable, StoreUnavailable
from dynamo_trio.wire.dynamo.keys import file_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dynamo_trio.context import Cleanup
    from dynamo_trio.discovery.abc import Discovery

T = TypeVar("T")

logger = logging.getLogger("dynamo_trio.discovery")

#: Own files are looked for so often, in seconds.
CHECK_EVERY = 1.0
#: Names of deleted files in one line of the log.
MAX_TOLD = 8
#: How often the log hears that the store takes no touches, in seconds, of a process that has
#: nothing to touch. It may have been given a read-only directory on purpose.
TELL_EVERY_IDLE = 60.0
#: At the end own files are deleted within this, in seconds.
FAREWELL = 1.0


@attrs.frozen
class FileSettings:
    """Where the records are (``DYN_FILE_KV``), and how long one lives untouched (seconds)."""

    root: Path
    ttl: float = 10.0

    @property
    def touch_every(self) -> float:
        """Seconds between two touches of a file; the same rhythm as every Dynamo process."""
        return max(self.ttl / 3, 1.0)


class Runner(Protocol):
    """Runs what may block."""

    async def __call__(self, call: Callable[[], T], /) -> T: ...


async def in_thread(call: Callable[[], T], /) -> T:
    """Run what may block; if this is cancelled the thread is left to itself."""
    return await trio.to_thread.run_sync(call, abandon_on_cancel=True)


@attrs.define(eq=False)
class FileStore(Store):
    """Made by :func:`open_file_store`."""

    _settings: FileSettings
    #: Seconds since the epoch: what time stamps are compared with.
    _wall: Callable[[], float] = time.time
    _run: Runner = in_thread
    _instance_id: int = attrs.field(factory=random_instance_id)
    #: Invariant: exactly the files that this process touches.
    _owned: dict[StoreKey, OwnFile] = attrs.field(factory=dict)
    _lost: set[StoreKey] = attrs.field(factory=set)
    _something_lost: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: One for every bucket that was ever used here.
    _expiry: dict[str, Expiry] = attrs.field(factory=dict)
    _rounds: Rounds = attrs.field(factory=lambda: Rounds(CHECK_EVERY))
    #: When own files are touched and others judged next, on the Trio clock.
    _due: float = -math.inf
    #: When the round that is under way began, on the Trio clock.
    _round_began: float | None = None
    _trouble: Backoff = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        root = self._settings.root
        self._trouble = Backoff(
            f"cannot write to {root}; our records there grow old, and those of the dead stay",
            f"can write to {root} again",
        )

    @property
    def instance_id(self) -> int:
        return self._instance_id

    def _directory(self, bucket: str) -> Path:
        self._expiry.setdefault(bucket, Expiry())
        return self._settings.root / bucket

    def _path(self, at: StoreKey) -> Path:
        return self._directory(at.bucket) / file_name(at.key)

    async def _io(self, call: Callable[[], T]) -> T:
        try:
            return await self._run(call)
        except OSError as exc:
            raise StoreUnavailable(str(exc)) from exc

    # --- the interface --------------------------------------------------------------------

    async def put(self, at: StoreKey, value: bytes) -> None:
        own, before = OwnFile(self._path(at), value), self._owned.get(at)
        if before is not None:
            before.changing = True
        try:
            await self._io(partial(own.write, self._wall()))
        except BaseException:
            own.withdrawn = True
            if before is not None:
                before.changing = False
            raise
        self._owned[at] = own

    async def delete(self, at: StoreKey) -> None:
        self._owned.pop(at, None)
        await self._io(partial(files.remove, self._path(at)))

    @asynccontextmanager
    async def watch(self, bucket: str) -> AsyncIterator[StoreWatch]:
        directory = self._directory(bucket)
        await self._io(partial(directory.mkdir, parents=True, exist_ok=True))
        async with open_file_watch(directory, self._settings.ttl, self._io) as watch:
            yield watch

    async def wait_lost(self) -> frozenset[StoreKey]:
        await trio.lowlevel.checkpoint()
        while not self._lost:
            await self._something_lost.park()
        lost, self._lost = frozenset(self._lost), set()
        return lost

    # --- keeping alive --------------------------------------------------------------------

    async def tend(self) -> None:
        """Keep own files alive and delete those of the dead, for ever."""
        while True:
            self._round_began = trio.current_time()
            await self._round(self._round_began)
            self._round_began = None
            next_check = trio.current_time() + CHECK_EVERY
            await trio.sleep_until(min(next_check, self._due))

    async def tell_of_silence(self) -> None:
        """Tell the log of a store that does not answer, for ever."""
        while True:
            began = self._round_began
            if began is not None and trio.current_time() > began + LATE:
                self._failed(TimeoutError("it does not answer"), began)
            await trio.sleep(CHECK_EVERY)

    async def _round(self, now: float) -> None:
        if self._rounds.begin(now, self._wall()):
            self._doubt(now)
        if now < self._due:
            if await self._look_after(OwnFile.examine) is None:
                self._doubt(now + CHECK_EVERY)
            return
        self._due = now + self._settings.touch_every
        if not await self._touch():
            self._doubt(now + CHECK_EVERY)
            return
        for bucket, expiry in list(self._expiry.items()):
            await self._expire(bucket, expiry, now)

    def _doubt(self, due: float) -> None:
        """Others may have been unable to touch their files; what was seen counts no more.

        ``due``: when own files are touched next, on the Trio clock.
        """
        self._due = due
        for expiry in self._expiry.values():
            expiry.forget()

    def _failed(self, reason: Exception, since: float | None = None) -> None:
        self._trouble.tell_every = TELL_EVERY if self._owned else TELL_EVERY_IDLE
        self._trouble.failed(reason, since)

    async def _touch(self) -> bool:
        """Touch own files. True: the store is known to take touches."""
        touch = partial(OwnFile.touch, wall=self._wall())
        touched = await self._look_after(touch)
        if touched is None:
            return False
        directories = [self._settings.root / bucket for bucket in self._expiry]
        try:
            await self._io(partial(files.require_writable, directories))
            if not touched:
                await self._io(partial(files.probe, self._settings.root, directories))
        except StoreUnavailable as exc:
            self._failed(exc)
            return False
        self._trouble.worked()
        return True

    async def _look_after(self, look: Callable[[OwnFile], str | None]) -> int | None:
        """Look at own files, and note those that are gone.

        Returns how many are well; None: of some nobody knows.
        """
        owned = {at: own for at, own in self._owned.items() if not own.changing}
        found = await self._run(partial(inspect, owned, look))
        for at, reason in found.gone.items():
            # Those that were written or deleted meanwhile are another matter.
            if self._owned.get(at) is owned[at] and not owned[at].changing:
                self._lose(at, reason)
        if found.error is not None:
            self._failed(found.error)
            return None
        return found.well

    def _lose(self, at: StoreKey, reason: str) -> None:
        own = self._owned.pop(at)
        if reason is not DELETED:
            logger.warning("%s is our record no more: %s", own.path, reason)
        self._lost.add(at)
        self._something_lost.unpark_all()

    async def _expire(self, bucket: str, expiry: Expiry, began: float) -> None:
        """Delete the files that nobody keeps alive. ``began``: this round, on the Trio clock."""
        directory = self._settings.root / bucket
        own = {own.path.name for at, own in self._owned.items() if at.bucket == bucket}
        try:
            times = await self._io(partial(files.times, directory))
        except StoreUnavailable:  # whoever watches it says so
            expiry.forget()
            return
        left = began + LATE - trio.current_time()
        if left < 0:  # others may have had to wait as long, and longer
            expiry.forget()
            return
        dead = expiry.judge({name: time for name, time in times.items() if name not in own})
        if dead:
            until = time.monotonic() + left
            self._tell(
                bucket, await self._io(partial(files.remove_unchanged, directory, dead, until))
            )

    @staticmethod
    def _tell(bucket: str, gone: list[str]) -> None:
        if gone:
            shown = ", ".join(gone[:MAX_TOLD]) + (", ..." if len(gone) > MAX_TOLD else "")
            logger.info("deleted what nobody keeps alive in %s, %d: %s", bucket, len(gone), shown)

    def delete_owned(self) -> None:
        """Delete every own file; blocks. The last thing that is done with this object."""
        for own in self._owned.values():
            own.withdrawn = True
            with suppress(OSError):
                files.remove(own.path)


@asynccontextmanager
async def open_file_store(
    settings: FileSettings,
    *,
    wall: Callable[[], float] = time.time,
    run: Runner = in_thread,
    close_scope: Cleanup = plain_cleanup,
) -> AsyncIterator[FileStore]:
    """A store in a directory, which is made if need be. Leaving deletes what is still owned.

    ``wall`` and ``run`` are for tests: the clock of the time stamps, and who runs what blocks.
    ``close_scope`` is what the deleting runs in, given its limit: a program gives
    ``lifecycle.cleanup``, which a stop's hard end caps.

    Raises:
        FileUnusable: the directory cannot be made.
    """
    try:
        await run(partial(settings.root.mkdir, parents=True, exist_ok=True))
    except OSError as exc:
        raise FileUnusable(f"DYN_FILE_KV={settings.root} cannot be used: {exc}") from exc
    store = FileStore(settings, wall, run)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.tend)
            nursery.start_soon(store.tell_of_silence)
            try:
                yield store
            finally:
                nursery.cancel_scope.cancel("the store is closed")
    finally:
        with close_scope(FAREWELL):
            await run(store.delete_owned)


@asynccontextmanager
async def open_file_discovery(
    settings: FileSettings, *, close_scope: Cleanup = plain_cleanup
) -> AsyncIterator[Discovery]:
    """Discovery through a shared directory. Leaving withdraws every registration.

    ``close_scope``: as :func:`open_file_store`.

    Raises:
        FileUnusable: the directory cannot be made.
    """
    async with (
        open_file_store(settings, close_scope=close_scope) as store,
        open_stored_discovery(store) as discovery,
    ):
        yield discovery
