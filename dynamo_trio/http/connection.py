"""One client connection, and the requests on it.

Theory of operation
-------------------
A :class:`Connection` is one nursery: the guard's pump, and the :class:`Engine` with
hypercorn's protocols and the app tasks inside. Whatever goes wrong in it ends in it.

hypercorn is not subclassed, and reached into for one thing only
(:mod:`dynamo_trio.http.resetting`). The engine calls a closure over the
connection as its application, and the closure (:func:`call_app`) wraps each
request in an :class:`Exchange`, which the app finds in the scope's extensions under
:data:`EXTENSION`. Without the extension the app is under a foreign ASGI server and does
with ``receive`` and ``send`` alone.
"""

from __future__ import annotations

import itertools
import logging
import math
import traceback
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.http.bodies import FreeShare
from dynamo_trio.http.engine import Engine, Inbox
from dynamo_trio.http.exchange import EXTENSION
from dynamo_trio.http.exchange import Exchange as Exchange
from dynamo_trio.http.exchange import exchange_of as exchange_of
from dynamo_trio.http.exchange import shielded as shielded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from hypercorn.config import Config
    from hypercorn.trio.worker_context import WorkerContext

    from dynamo_trio.http.asgi import App, Scope, Send
    from dynamo_trio.http.guard import GuardedStream
    from dynamo_trio.http.limits import HttpLimits

logger = logging.getLogger("dynamo_trio.http")

#: Seconds after an answer in which a client of HTTP/2 is not asked to go elsewhere, lest it finds
#: both at once.
GOODBYE = 0.1

_numbers = itertools.count(1)


@attrs.define(eq=False)
class Connection:
    """A client connection. Invariant: idle exactly while ``exchanges`` is empty."""

    guard: GuardedStream
    limits: HttpLimits
    #: It came when there was no room for it (:attr:`HttpLimits.reserved_connections`).
    reserve: bool = False
    #: The client is asked to bring what is new elsewhere, as soon as nothing runs.
    retiring: bool = False
    number: int = attrs.field(factory=lambda: next(_numbers))
    exchanges: dict[Exchange, None] = attrs.field(factory=dict)
    free_share: FreeShare = attrs.field(factory=FreeShare)
    #: Requests that were begun on it.
    served: int = 0
    #: When it last became idle, by Trio's clock.
    idle_since: float = attrs.field(init=False)
    #: When the first of the requests that run now was begun.
    busy_since: float = -math.inf
    #: It is about to end what runs on it, because others want its place.
    asked_to_leave: bool = False
    #: Told what the protocol engine has against the client.
    on_fault: Callable[[str], object] = lambda complaint: None
    #: The shields of the sends that are under way.
    _shields: set[trio.CancelScope] = attrs.field(factory=set)
    _nursery: trio.Nursery | None = None
    #: Trio's clock, looked up once.
    _now: Callable[[], float] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._now = trio.lowlevel.current_clock().current_time
        self.idle_since = self._now()

    @property
    def idle(self) -> bool:
        """No request runs. One whose head is still incomplete does not count."""
        return not self.exchanges

    @property
    def uploading(self) -> bool:
        """Requests run, and none of them has been read to its end."""
        return bool(self.exchanges) and not any(item.body_read for item in self.exchanges)

    @property
    def stalled_since(self) -> float:
        """Since when no request on it gets on, for want of the client; infinite: one does."""
        return max(map(self._stuck_since, self.exchanges), default=math.inf)

    def _stuck_since(self, exchange: Exchange) -> float:
        if exchange.blocked_since is not None:
            return exchange.blocked_since
        return math.inf if exchange.body_read else self.busy_since

    @property
    def quiet_since(self) -> float:
        """Since when all that runs on it is idle and can be ended in good order; infinite: no."""
        quiet = (one.idle_since if one.on_crowd else math.inf for one in self.exchanges)
        return max(quiet, default=math.inf)

    def ask_to_leave(self) -> None:
        """End what runs on it in good order."""
        self.asked_to_leave = True
        for exchange in list(self.exchanges):
            if exchange.on_crowd is not None:
                exchange.on_crowd()

    def __str__(self) -> str:
        return f"connection {self.number} ({len(self.exchanges)} requests in flight)"

    async def run(self, app: App, config: Config, context: WorkerContext) -> None:
        """Serve the client until one side closes. Exceptions of hypercorn pass."""
        self.guard.on_lost = self._lost
        self.guard.on_closed = self._closed
        self.guard.on_drained = self._end_if_idle
        self.guard.on_progress = self._progressed
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._attend)
            await Engine(partial(call_app, self, app), config, context, self.guard).run()
            self._nursery.cancel_scope.cancel("hypercorn is done")

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        """Run a task as long as the connection lives."""
        assert self._nursery is not None
        self._nursery.start_soon(task)

    def retire(self) -> None:
        """See :meth:`HttpServer.retire`."""
        self.retiring = True
        if self.idle and self.guard.http2 and self._nursery is not None:
            self.start_soon(self._say_goodbye)

    async def _say_goodbye(self) -> None:
        # RFC 9113, 6.8 has it while streams run. But clients that are made of h2 (httpx) know
        # GOAWAY for nothing but the end of a connection, and break off what runs. Such a client
        # must not find it together with the end of an answer, either: then it keeps a connection
        # on which its next request fails. Found by itself, it says that the connection is old.
        await trio.sleep_until(self.idle_since + GOODBYE)
        if self.idle and trio.current_time() >= self.idle_since + GOODBYE:
            await self.guard.say_goodbye()

    def close(self) -> None:
        """Close at once, delivering what the kernel has taken."""
        self.guard.close()

    def abort(self, reason: str) -> None:
        """Close at once with a reset."""
        self.guard.abort(reason)

    async def _attend(self) -> None:
        # Not cancelled before hypercorn is done, unless the whole server ends: then a client
        # that hypercorn, under its shield, still waits for must be let go from here.
        try:
            await self.guard.pump()
            await trio.sleep_forever()
        finally:
            if self.idle:
                self.close()
            else:
                self.abort("the server has stopped")

    def begin(self, exchange: Exchange) -> None:
        """A request's head is complete."""
        self.served += 1
        if self.idle:
            self.busy_since = self._now()
        self.exchanges[exchange] = None
        self.guard.request_begun(http2=exchange.http2)

    def end(self, exchange: Exchange) -> None:
        """The app has returned."""
        del self.exchanges[exchange]
        exchange.close()
        if self.idle:
            self.idle_since = self._now()
            self.guard.release()
            if self.guard.lost:
                self._end_if_idle()
            elif self.retiring and self.guard.http2:
                self.start_soon(self._say_goodbye)

    @contextmanager
    def shield(self, scope: trio.CancelScope) -> Iterator[None]:
        """Cancel ``scope``, if the block still runs, when sending has become useless."""
        self._shields.add(scope)
        if self._unsendable():
            self._lift_shields()
        try:
            yield
        finally:
            self._shields.discard(scope)

    def _unsendable(self) -> bool:
        # On HTTP/1.1 one that has only half-closed may still read its answer, and a send to
        # one that is gone fails by itself.
        return self.guard.closed or (self.guard.lost and self.guard.http2)

    def _lift_shields(self) -> None:
        for scope in self._shields:
            scope.cancel(self.guard.why_lost or "the connection is closed")

    def _lost(self) -> None:
        for exchange in list(self.exchanges):
            exchange.tell_lost()
        if self._unsendable():
            self._lift_shields()
        if self.guard.http2:
            # hypercorn may be too busy with the dead streams to notice.
            self._end_if_idle()

    def _progressed(self) -> None:
        for exchange in self.exchanges:
            exchange.progressed()

    def _closed(self) -> None:
        self._lift_shields()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        # With the client gone and no app running, what is left in hypercorn waits for nothing
        # (its idle timer, a queue that nobody reads), and would do so for long or for ever.
        if self.idle and self._nursery is not None:
            self._nursery.cancel_scope.cancel(self.guard.why_lost or "the connection is closed")


async def call_app(
    connection: Connection, app: App, scope: Scope, inbox: Inbox, send: Send
) -> None:
    """The application that the engine calls: ``app``, with an exchange around each request."""
    exchange = Exchange(connection, scope, inbox, send)
    extended = {**scope, "extensions": {**scope.get("extensions", {}), EXTENSION: exchange}}
    connection.begin(exchange)
    try:
        await app(extended, exchange.receive, exchange.send)
    except Exception as exc:
        if (complaint := engine_complaint(exc)) is None:
            raise
        # Most often a client that went on with what is no HTTP before it was answered, or went
        # on too far.
        connection.on_fault(complaint)
        connection.abort("the protocol engine failed")
    finally:
        connection.end(exchange)


#: What makes up the protocol engine. It is written for clients that keep to the rules, and says
#: in many ways that one does not.
_ENGINE = {"h11", "h2", "hpack", "hyperframe", "hypercorn", "priority", "wsproto"}


def engine_complaint(error: Exception) -> str | None:
    """What was raised inside the protocol engine, in a line; None if it was raised elsewhere."""
    if isinstance(error, ExceptionGroup):
        complaints = [engine_complaint(member) for member in error.exceptions]
        return None if None in complaints else "; ".join(filter(None, complaints))
    modules = [str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(error.__traceback__)]
    # It may have failed in a library of its own, but not in ours.
    deepest = next((r for r in map(_root, reversed(modules)) if r in {*_ENGINE, "dynamo_trio"}), "")
    return f"{type(error).__name__}: {error}"[:500] if deepest in _ENGINE else None


def _root(module: str) -> str:
    return module.partition(".")[0]
