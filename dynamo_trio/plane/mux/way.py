"""How one worker is reached: a connection to it that is made, kept, and made again.

Theory of operation
-------------------
A way is *wanted* while discovery has an instance behind it, or somebody uses it. While it is
wanted its task connects, carries, and connects again: at once when a connection is lost that has
stood for a while, else after a pause that grows, with some chance in it so that not all clients
of a worker come at the same moment. Whoever wants to send waits while a connection is being
made, unless the attempt before it failed: then there is none, at once, until there is one. A port
that swallows everything must not hold up requests that another plane can carry.

A worker that was given up for its silence stays avoided as long as its port can be connected
but says no hello: that is how a frozen process looks, for whom the kernel accepts. If the port
cannot even be connected, or somebody there answers anything at all, it may be only this port
that fails: then there is no connection, and another plane may be tried.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import attrs
import trio

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.errors import CannotConnect, NotConnected
from dynamo_trio.plane.mux.client_link import ClientLink
from dynamo_trio.plane.mux.complaints import WORKER_EVERY, Complaints
from dynamo_trio.plane.net.sockets import COMPLAIN_EVERY, start_apart
from dynamo_trio.plane.net.tls import HandshakeTimeout
from dynamo_trio.wire.mux.frames import GoAwayCode

if TYPE_CHECKING:
    from dynamo_trio.plane.mux.settings import MuxSettings
    from dynamo_trio.wire.dynamo.addresses import HostPort

logger = logging.getLogger("dynamo_trio.plane.mux")

#: Opens a connection, within its own limit, or raises OSError.
Dial = Callable[["HostPort"], Awaitable[trio.abc.Stream]]

#: Seconds that a connection must have stood for its loss to be followed by no pause.
SOUND_TIME: Final = 1.0
#: Seconds until a worker is tried again that speaks no version of ours.
HOPELESS_TIME: Final = 60.0


@attrs.define(eq=False)
class Way:
    """The way to one ``HOST:PORT``; :meth:`run` is its task."""

    address: HostPort
    _settings: MuxSettings
    _dial: Dial
    _nursery: trio.Nursery
    #: What tells this process from others.
    _process: str
    #: Paths of the instances that discovery has there.
    _known: set[str] = attrs.field(factory=set)
    _was_known: bool = False
    #: How many use it.
    _users: int = 0
    #: Invariant: set from the worker's HELLO until the end of the connection.
    _link: ClientLink | None = None
    #: Also before its HELLO.
    _making: ClientLink | None = None
    #: Why the last attempt failed; empty while there is a connection, or it may well be soon.
    _failure: str = ""
    #: What the log was told last.
    _told: str = ""
    #: The worker speaks no version that this process does.
    _hopeless: bool = False
    #: The last connection was given up since the worker was silent, and attempts since then were
    #: taken by the kernel there, and by nobody else.
    _gave_up: bool = False
    #: Invariant: once set, no connection is made any more.
    closed: bool = False
    _complaints: Complaints = attrs.field(factory=lambda: Complaints(WORKER_EVERY))
    _endings: Seldom = attrs.field(factory=lambda: Seldom(WORKER_EVERY))
    _beginnings: Seldom = attrs.field(factory=lambda: Seldom(COMPLAIN_EVERY))
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: Around an attempt to connect, or the pause before the next.
    _waiting: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _pauses: bool = False
    _idles: bool = False

    # --- what discovery says ------------------------------------------------------------------

    def found(self, path: str) -> None:
        """An instance is there. If it was not there before, it is tried at once."""
        if path not in self._known:
            self._known.add(path)
            self._was_known = True
            if self._pauses:
                self._waiting.cancel("there is a new instance")

    def gone(self, path: str) -> None:
        """An instance has left discovery."""
        self._known.discard(path)
        self._look_needed()

    # --- as its users see it ------------------------------------------------------------------

    def take_up(self) -> None:
        """Keep the connection until :meth:`put_down`."""
        self._users += 1

    def put_down(self) -> None:
        """It is not used any more, by this user."""
        self._users -= 1
        if not self._users:
            self._look_needed()

    async def ready(self) -> ClientLink:
        """The connection; waits while one is being made.

        Raises:
            NotConnected: there is none.
            CannotConnect: the worker is silent.
        """
        while self._link is None or self._link.over:
            if self._gave_up:
                raise CannotConnect("the worker does not answer")
            if self.closed or self._failure:
                raise NotConnected(f"the worker is not connected: {self._failure or 'closed'}")
            await self._changed.park()
        return self._link

    def avoids(self, path: str) -> bool:
        """Has the worker said that this path gets nothing new, or is it silent?"""
        if self._link is None or self._link.over:
            return self._gave_up
        return self._link.pulse.silent or path in self._link.draining

    @property
    def connected(self) -> bool:
        """Is there a connection?"""
        return self._link is not None and not self._link.over

    async def leave(self, text: str) -> None:
        """Say the last words, if there is somebody to hear them, and wait until it has ended."""
        self._close(text)
        while self._making is not None:
            await self._changed.park()

    # --- its life -----------------------------------------------------------------------------

    @property
    def _wanted(self) -> bool:
        return not self.closed and (bool(self._known) or self._users > 0)

    async def run(self) -> None:
        """Connect, as often as it takes, until nobody wants it any more."""
        pause = self._settings.retry_time
        try:
            while not self.closed:
                began = trio.current_time()
                stood = await self._connect_and_carry()
                if not self._wanted:
                    return
                if stood and trio.current_time() - began >= SOUND_TIME and not self._failure:
                    pause = self._settings.retry_time
                    continue
                self._failure = self._failure or "the connection was lost"
                self._changed.unpark_all()
                pause = await self._pause(pause)
        except* Exception as group:
            logger.error("a way to a worker ended in a mistake of ours", exc_info=group)
        finally:
            self.closed = True
            self._changed.unpark_all()

    async def _pause(self, pause: float) -> float:
        """Returns how long the next one is."""
        if self._hopeless:  # only another program at that address could help
            pause = HOPELESS_TIME
        with trio.CancelScope() as self._waiting:
            self._pauses = True
            await trio.sleep(pause * random.uniform(0.5, 1))
        self._pauses = False
        if self._waiting.cancelled_caught:
            self._failure = ""
            return self._settings.retry_time
        return min(2 * pause, self._settings.max_retry_time)

    async def _connect_and_carry(self) -> bool:
        """Returns whether a connection stood."""
        stream = await self._connect()
        if stream is None:
            return False
        link = self._making = ClientLink(
            stream,
            self._settings,
            f"the worker at {self.address}",
            on_established=self._is_established,
            own_process=self._process,
            complaints=self._complaints,
        )
        try:
            await link.run()
        finally:
            self._making = self._link = None
            self._changed.unpark_all()
        if link.established or not link.unanswered:
            self._gave_up = link.given_up
        self._explain(link)
        return link.established

    async def _connect(self) -> trio.abc.Stream | None:
        with trio.CancelScope() as self._waiting:
            try:
                stream = await self._dial(self.address)
            except OSError as exc:
                if not isinstance(exc, HandshakeTimeout):
                    self._gave_up = False
                self._fail(str(exc))
                return None
        if self._waiting.cancelled_caught:
            return None
        if self.closed:
            await trio.aclose_forcefully(stream)
            return None
        return stream

    def _is_established(self, link: ClientLink) -> None:
        self._link, self._gave_up, self._failure = link, False, ""
        self._told, self._hopeless = "", False
        text = "connected over mux to the worker at %s"
        self._beginnings.log(logger, logging.INFO, text, self.address)
        self._changed.unpark_all()

    def _explain(self, link: ClientLink) -> None:
        """Why it ended, unless it was this side that wanted it, or the log knows."""
        if self.closed:
            logger.debug("the connection to the worker at %s is closed", self.address)
        elif (words := link.gone_away) is not None:
            self._fail(
                f"it went away ({words.code}): {words.text}",
                hopeless=words.code == GoAwayCode.VERSION,
            )
        elif not link.established:
            self._fail(link.reason)
        else:
            level = logging.DEBUG if link.told else logging.INFO
            text = "the connection to the worker at %s has ended: %s"
            self._endings.log(logger, level, text, self.address, link.reason)

    def _fail(self, why: str, *, hopeless: bool = False) -> None:
        self._hopeless = hopeless
        level = logging.DEBUG if self._told == why else logging.INFO
        logger.log(level, "no mux connection to the worker at %s: %s", self.address, why)
        self._failure = self._told = why

    # --- its end ------------------------------------------------------------------------------

    def _look_needed(self) -> None:
        if self._wanted or self.closed:
            return
        if self._was_known or self._link is None:
            self._close("the worker is not needed any more")
        elif not self._idles:
            self._idles = True
            start_apart(self._nursery, self._idle)

    async def _idle(self) -> None:
        """Close it if nobody wants it for a while."""
        await trio.sleep(self._settings.idle_time)
        self._idles = False
        if not self._wanted:
            self._close("the worker is not needed any more")

    def _close(self, text: str) -> None:
        self.closed = True
        self._waiting.cancel(text)
        self._changed.unpark_all()
        if self._making is not None:
            self._making.leave(text)
