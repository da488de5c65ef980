"""Discovery through a directory that all processes share (``DYN_DISCOVERY_BACKEND=file``).

Theory of operation
-------------------
The layout is Dynamo 1.5.1's: one directory for each bucket, one file for each key, its name
the key with all but letters and digits escaped. A file is written under a temporary name
and renamed, so readers see it whole or not at all. It lives as long as its time stamp is
fresh: its owner touches it every third of the time-to-live.

One task, :meth:`FileStore.tend`, does it all in rounds of at most a second, in this order:
own files are touched or looked for (one that is missing is lost), then, every third of the
time-to-live, files that nobody touches are deleted. So a process that was frozen touches its
own files before it judges anybody else's.

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

from dynamo_trio.discovery import files
from dynamo_trio.discovery.backoff import Backoff
from dynamo_trio.discovery.file_view import Expiry, Rounds
from dynamo_trio.discovery.file_watch import open_file_watch
from dynamo_trio.discovery.records import random_instance_id
from dynamo_trio.discovery.store import Store, StoreKey, StoreWatch
from dynamo_trio.discovery.stored import open_stored_discovery
from dynamo_trio.errors import FileUnusable, StoreUnavailable
from dynamo_trio.wire.dynamo.keys import file_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dynamo_trio.discovery.abc import Discovery

T = TypeVar("T")

logger = logging.getLogger("dynamo_trio.discovery")

#: Own files are looked for so often, in seconds.
CHECK_EVERY = 1.0
#: Names of deleted files in one line of the log.
MAX_TOLD = 8
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
class _OwnFile:
    path: Path
    #: Set by whoever wants it no more; seen by a thread that is still writing it.
    withdrawn: bool = False

    def write(self, value: bytes, wall: float) -> None:
        files.write(self.path, value, wall)
        if self.withdrawn:
            files.remove(self.path)


@attrs.define(eq=False)
class FileStore(Store):
    """Made by :func:`open_file_store`."""

    _settings: FileSettings
    #: Seconds since the epoch: what time stamps are compared with.
    _wall: Callable[[], float] = time.time
    _run: Runner = in_thread
    _instance_id: int = attrs.field(factory=random_instance_id)
    #: Invariant: exactly the files that this process touches.
    _owned: dict[StoreKey, _OwnFile] = attrs.field(factory=dict)
    _lost: set[StoreKey] = attrs.field(factory=set)
    _something_lost: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: One for every bucket that was ever used here.
    _expiry: dict[str, Expiry] = attrs.field(factory=dict)
    _rounds: Rounds = attrs.field(factory=lambda: Rounds(CHECK_EVERY))
    #: When own files are touched and others judged next, on the Trio clock.
    _due: float = -math.inf
    _trouble: Backoff = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._trouble = Backoff(f"the files in {self._settings.root} cannot be kept alive")

    @property
    def instance_id(self) -> int:
        return self._instance_id

    def _directory(self, bucket: str) -> Path:
        self._expiry.setdefault(bucket, Expiry(self._settings.ttl))
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
        own = _OwnFile(self._path(at))
        try:
            await self._io(partial(own.write, value, self._wall()))
        except BaseException:
            own.withdrawn = True
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
            await self._round()
            next_check = trio.current_time() + CHECK_EVERY
            await trio.sleep_until(min(next_check, self._due))

    async def _round(self) -> None:
        now = trio.current_time()
        if self._rounds.begin(now, self._wall()):
            self._forget()
            self._due = now
        if now < self._due:
            await self._check(files.is_there)
            return
        self._due = now + self._settings.touch_every
        await self._check(partial(files.touch, now=self._wall()))
        for bucket, expiry in list(self._expiry.items()):
            await self._expire(bucket, expiry)

    def _forget(self) -> None:
        for expiry in self._expiry.values():
            expiry.forget()

    async def _check(self, keep: Callable[[Path], bool]) -> None:
        """Look after own files; note those that are gone."""
        owned = dict(self._owned)
        try:
            gone = await self._io(lambda: [at for at, own in owned.items() if not keep(own.path)])
        except StoreUnavailable as exc:  # not lost: nobody knows
            self._trouble.failed(exc)
            return
        self._trouble.worked()
        # Those that were written or deleted meanwhile are another matter.
        gone = [at for at in gone if self._owned.get(at) is owned[at]]
        for at in gone:
            del self._owned[at]
        self._lost.update(gone)
        self._something_lost.unpark_all()

    async def _expire(self, bucket: str, expiry: Expiry) -> None:
        """Delete the files that nobody keeps alive."""
        directory = self._settings.root / bucket
        own = {own.path.name for at, own in self._owned.items() if at.bucket == bucket}
        try:
            times = await self._io(partial(files.times, directory))
        except StoreUnavailable:  # whoever watches it says so
            expiry.forget()
            return
        old = expiry.judge({n: time for n, time in times.items() if n not in own}, self._wall())
        if old:
            gone = await self._io(partial(files.remove_older, directory, old))
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
    settings: FileSettings, *, wall: Callable[[], float] = time.time, run: Runner = in_thread
) -> AsyncIterator[FileStore]:
    """A store in a directory, which is made if need be. Leaving deletes what is still owned.

    ``wall`` and ``run`` are for tests: the clock of the time stamps, and who runs what blocks.

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
            try:
                yield store
            finally:
                nursery.cancel_scope.cancel("the store is closed")
    finally:
        with trio.move_on_after(FAREWELL, shield=True):
            await run(store.delete_owned)


@asynccontextmanager
async def open_file_discovery(settings: FileSettings) -> AsyncIterator[Discovery]:
    """Discovery through a shared directory. Leaving withdraws every registration.

    Raises:
        FileUnusable: the directory cannot be made.
    """
    async with open_file_store(settings) as store, open_stored_discovery(store) as discovery:
        yield discovery
