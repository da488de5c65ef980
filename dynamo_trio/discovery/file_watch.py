"""The task behind a watch of the file backend: when it looks, and what it then tells.

It looks when inotify says that something happened, and every two seconds in any case, because
inotify hears nothing of what other hosts do to a shared directory. Where there is no inotify
it looks ten times a second. What it sees is judged by :mod:`~dynamo_trio.discovery.file_view`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import attrs
import trio

from dynamo_trio.discovery import files
from dynamo_trio.discovery.backoff import Backoff
from dynamo_trio.discovery.changes import PushedWatch
from dynamo_trio.discovery.file_view import BucketView
from dynamo_trio.discovery.inotify import Inotify
from dynamo_trio.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dynamo_trio.discovery.store import StoreChange, StoreWatch

T = TypeVar("T")

#: How often is looked, in seconds: with inotify, and without it.
LOOK_EVERY, LOOK_EVERY_DEAF = 2.0, 0.1
#: News that come within this are looked at together, in seconds.
GATHER = 0.005
#: A file that is missing is looked for again after so long, in seconds.
LOOK_AGAIN = 0.05
#: Where inotify refuses it is asked again after so long, in seconds.
DEAF = 5.0


class FileAccess(Protocol):
    """Runs what may block, and raises StoreUnavailable for an OSError."""

    async def __call__(self, call: Callable[[], T], /) -> T: ...


@attrs.define(eq=False)
class _Follower:
    """Looks at one directory, again and again."""

    _directory: Path
    _view: BucketView
    _io: FileAccess
    _push: Callable[[list[StoreChange]], None]
    _trouble: Backoff
    _ears: Inotify | None = None
    #: The directory at the last look: device and inode.
    _identity: tuple[int, int] | None = None
    #: On the Trio clock.
    _deaf_until: float = 0.0

    async def follow(self) -> None:
        try:
            while True:
                await self._look()
                if not await self._listen():
                    await self._wait()
        finally:
            self._stop_listening()

    async def _look(self) -> None:
        try:
            look = await self._io(partial(files.look, self._directory, dict(self._view.files)))
        except StoreUnavailable as exc:
            self._trouble.failed(exc)
            self._lose()
            return
        self._trouble.worked()
        if look.identity != self._identity:
            self._stop_listening()
        self._identity = look.identity
        self._push(self._view.update(look, trio.current_time()))

    def _lose(self) -> None:
        """The directory is gone; should there be one again it is another one."""
        self._view.away()
        self._identity = None
        self._stop_listening()

    async def _listen(self) -> bool:
        """Begin to hear of news, if need be. True: look again, there may have been some before."""
        now = trio.current_time()
        if self._ears is not None or self._identity is None or now < self._deaf_until:
            return False
        try:
            self._ears = Inotify.open()
            await self._io(partial(self._ears.listen, self._directory))
        except (OSError, StoreUnavailable):
            self._stop_listening()
            self._deaf_until = now + DEAF
            return False
        return True

    def _stop_listening(self) -> None:
        if self._ears is not None:
            self._ears.close()
            self._ears = None

    async def _wait(self) -> None:
        """Wait until it is time to look."""
        if self._view.doubtful:
            await trio.sleep(LOOK_AGAIN)
        elif self._ears is None:
            await trio.sleep(LOOK_EVERY_DEAF)
        else:
            with trio.move_on_after(LOOK_EVERY):
                await trio.lowlevel.wait_readable(self._ears.fd)
                await trio.sleep(GATHER)
        if self._ears is not None and self._ears.drain():
            self._lose()


@asynccontextmanager
async def open_file_watch(directory: Path, ttl: float, io: FileAccess) -> AsyncIterator[StoreWatch]:
    """Watch one directory. ``ttl``: how long what an outage took may stay away, in seconds.

    Raises:
        StoreUnavailable: it cannot be read now.
    """
    view = BucketView(ttl)
    view.update(await io(partial(files.look, directory, {})), trio.current_time())
    watch = PushedWatch(view.values)
    trouble = Backoff(
        f"cannot read {directory}; the records last seen there stay in use, trying again",
        f"can read {directory} again",
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_Follower(directory, view, io, watch.push, trouble).follow)
        try:
            yield watch
        finally:
            nursery.cancel_scope.cancel("the watch is closed")
