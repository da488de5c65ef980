"""One client connection, and the requests on it.

Theory of operation
-------------------
A :class:`Connection` is one nursery: the guard's pump, and hypercorn's ``TCPServer``
with the app tasks inside. Whatever goes wrong in it ends in it.

hypercorn is neither subclassed nor reached into: it is handed a closure over the
connection as its application, and the closure (:func:`call_app`) wraps each
request in an :class:`Exchange`, which the app finds in the scope's extensions under
:data:`EXTENSION`. Without the extension the app is under a foreign ASGI server and does
with ``receive`` and ``send`` alone.

What the exchange mends around ``receive`` and ``send``:

* *Answers before the request's end.* hypercorn queues ten body messages for the app and
  then blocks, and the end of the response wants to queue one more: an early answer to a
  long upload would wait for itself. On HTTP/2 it is worse: a DATA frame behind an early
  answer is a ``KeyError`` that ends the whole connection. So before the head of a response
  leaves, the rest of the body is read away: on HTTP/1.1 for a moment (the connection is
  closed afterwards), on HTTP/2 for longer.
* *Responses that break off.* A handler that fails in the middle of an HTTP/2 response would
  leave its client waiting for ever, and one of HTTP/1.0 looks whole when the connection is
  closed: those connections are reset. (HTTP/1.1 misses its last chunk.)
* *Sends that outlive their connection.* On HTTP/2 the end of a response waits in hypercorn
  until the client's window has taken it, also when nobody is there to open the window; and
  the app's sends are shielded. So these shields are known to the connection
  (:func:`shielded`), which lifts them when it ends.
"""

from __future__ import annotations

import itertools
import logging
import math
import traceback
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import attrs
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.tcp_server import TCPServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from hypercorn.config import Config
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import ASGIFramework

    from dynamo_trio.http.asgi import App, Message, Receive, Scope, Send
    from dynamo_trio.http.guard import GuardedStream
    from dynamo_trio.http.limits import HttpLimits

logger = logging.getLogger("dynamo_trio.http")

#: Where the app finds its :class:`Exchange` in ``scope["extensions"]``.
EXTENSION = "dynamo_trio.connection"

_numbers = itertools.count(1)


@attrs.define(eq=False)
class Exchange:
    """One request and its response, on our own server."""

    connection: Connection
    scope: Scope
    _receive: Receive
    _send: Send
    #: Called synchronously, once, when the client has left or the connection was aborted;
    #: never after the response's end was handed to hypercorn.
    on_lost: list[Callable[[], object]] = attrs.field(factory=list)
    #: The app, or we for it, has seen the end of the request's body.
    body_read: bool = False
    started: bool = False
    complete: bool = False
    #: ``receive`` has said that the client left.
    disconnected: bool = False
    #: The client left before the end of the response was handed to hypercorn.
    left_early: bool = False
    #: On HTTP/2: the number of the stream, and the body bytes that were handed over for it.
    _stream: int | None = None
    _handed: int = 0

    def __attrs_post_init__(self) -> None:
        if self.scope["type"] == "http" and self.http2:
            # What hypercorn gives as ``send`` is a method of the stream.
            self._stream = getattr(getattr(self._send, "__self__", None), "stream_id", None)
        if self._stream is not None:
            self.connection.guard.count_stream(self._stream)

    @property
    def http2(self) -> bool:
        return self.scope["http_version"] not in ("1.0", "1.1")

    @property
    def notices_disconnects(self) -> bool:
        """Does ``on_lost`` hear of every departure? On HTTP/2 only ``receive`` does."""
        return self.scope["type"] == "http" and not self.http2

    @property
    def lost(self) -> bool:
        return self.disconnected or self.connection.guard.lost

    def begin_response(self, on_disconnect: Callable[[], object]) -> bool:
        """Ask to be told, synchronously, when the client leaves.

        To be called when the request's body has been read. If the client has left
        already, ``on_disconnect`` is called from here.

        Returns:
            False where the connection alone cannot tell (HTTP/2, WebSocket): there the
            caller has to watch ``receive`` too.
        """
        if self.lost:
            on_disconnect()
        else:
            self.on_lost.append(on_disconnect)
        return self.notices_disconnects

    def end_response(self, on_disconnect: Callable[[], object]) -> None:
        """Stop telling ``on_disconnect``."""
        self.on_lost = [callback for callback in self.on_lost if callback != on_disconnect]

    def abort(self, reason: str) -> None:
        """Reset the connection: the only honest end of a response that cannot be completed."""
        self.connection.abort(reason)

    def raw_socket(self) -> trio.socket.SocketType | None:
        """The socket, where body bytes may be written past hypercorn; else None.

        They may on HTTP/1.1 without TLS in the answer to anything but HEAD, if that answer
        has status 200 and no content-length: then its body is chunked, and h11's
        chunked writer keeps no state between two chunks.
        """
        plain = self.scope["http_version"] == "1.1" and self.scope["scheme"] == "http"
        if not plain or self.scope["method"] == "HEAD" or not self.connection.guard.has_descriptor:
            return None
        return self.connection.guard.socket

    async def receive(self) -> Message:
        """ASGI's ``receive``."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.disconnected = True
            self.left_early = self.left_early or not self.complete
        elif message["type"] == "http.request" and not message.get("more_body", False):
            self._body_ends()
        return message

    async def send(self, message: Message) -> None:
        """ASGI's ``send``."""
        if message["type"] == "http.response.start":
            await self._finish_body()
            self.started = True
            if self._ambiguous:
                closing = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": closing}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
            self.on_lost.clear()
        await self._send(message)
        if self._stream is not None and not self.complete:
            self._handed += len(message.get("body", b""))
            allowed = self._handed - self.connection.limits.h2_unsent
            await self.connection.guard.wait_sent(self._stream, allowed)

    def tell_lost(self) -> None:
        """Pass on that the client left. Called by the connection."""
        self.left_early = self.left_early or not self.complete
        callbacks, self.on_lost = self.on_lost, []
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """The app has returned."""
        self.on_lost.clear()
        if self._stream is not None:
            self.connection.guard.forget_stream(self._stream)
        broken_off = self.started and not self.complete and not self.lost
        if broken_off and self.scope["http_version"] != "1.1":
            self.abort("a response broke off")

    @property
    def _ambiguous(self) -> bool:
        # With two lengths, a proxy before us may see another end of the request than we do:
        # what follows on the connection must not be taken for a request (RFC 9112, 6.1).
        names = {name for name, _ in self.scope["headers"]}
        return not self.http2 and {b"content-length", b"transfer-encoding"} <= names

    def _body_ends(self) -> None:
        self.body_read = True
        if self.notices_disconnects:
            self.connection.guard.hold()

    async def _finish_body(self) -> None:
        limits = self.connection.limits
        with trio.move_on_after(limits.write_time / 2 if self.http2 else limits.linger_time):
            await self._discard_body()
        if not self.body_read and not self.lost:
            self.connection.guard.unread = True
            self.connection.start_soon(self._discard_body)

    async def _discard_body(self) -> None:
        while not (self.body_read or self.disconnected):
            await self.receive()


@attrs.define(eq=False)
class Connection:
    """A client connection. Invariant: idle exactly while ``exchanges`` is empty."""

    guard: GuardedStream
    limits: HttpLimits
    number: int = attrs.field(factory=lambda: next(_numbers))
    exchanges: dict[Exchange, None] = attrs.field(factory=dict)
    #: Requests that were begun on it.
    served: int = 0
    #: When it last became idle, by Trio's clock.
    idle_since: float = attrs.field(factory=trio.current_time)
    #: When the first of the requests that run now was begun.
    busy_since: float = -math.inf
    #: The shields of the sends that are under way.
    _shields: set[trio.CancelScope] = attrs.field(factory=set)
    _nursery: trio.Nursery | None = None

    @property
    def idle(self) -> bool:
        """No request runs. One whose head is still incomplete does not count."""
        return not self.exchanges

    @property
    def uploading(self) -> bool:
        """Requests run, and none of them has been read to its end."""
        return bool(self.exchanges) and not any(item.body_read for item in self.exchanges)

    def __str__(self) -> str:
        return f"connection {self.number} ({len(self.exchanges)} requests in flight)"

    async def run(self, app: App, config: Config, context: WorkerContext) -> None:
        """Serve the client until one side closes. Exceptions of hypercorn pass."""
        self.guard.on_lost = self._lost
        self.guard.on_closed = self._closed
        self.guard.on_drained = self._end_if_idle
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._attend)
            wrapped = ASGIWrapper(cast("ASGIFramework", partial(call_app, self, app)))
            stream = cast("trio.SSLStream[trio.SocketStream]", self.guard)
            await TCPServer(wrapped, config, context, {}, stream).run()
            self._nursery.cancel_scope.cancel("hypercorn is done")

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        """Run a task as long as the connection lives."""
        assert self._nursery is not None
        self._nursery.start_soon(task)

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
            self.busy_since = trio.current_time()
        self.exchanges[exchange] = None
        self.guard.request_begun(http2=exchange.http2)

    def end(self, exchange: Exchange) -> None:
        """The app has returned."""
        del self.exchanges[exchange]
        exchange.close()
        if self.idle:
            self.idle_since = trio.current_time()
            self.guard.release()
            if self.guard.lost:
                self._end_if_idle()

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

    def _closed(self) -> None:
        self._lift_shields()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        # With the client gone and no app running, what is left in hypercorn waits for nothing
        # (its idle timer, a queue that nobody reads), and would do so for long or for ever.
        if self.idle and self._nursery is not None:
            self._nursery.cancel_scope.cancel(self.guard.why_lost or "the connection is closed")


async def call_app(
    connection: Connection, app: App, scope: Scope, receive: Receive, send: Send
) -> None:
    """The application that hypercorn sees: ``app``, with an exchange around each request."""
    exchange = Exchange(connection, scope, receive, send)
    extended = {**scope, "extensions": {**scope.get("extensions", {}), EXTENSION: exchange}}
    connection.begin(exchange)
    try:
        await app(extended, exchange.receive, exchange.send)
    except Exception as exc:
        if (complaint := engine_complaint(exc)) is None:
            raise
        # Most often a client that went on with what is no HTTP before it was answered.
        logger.warning("%s takes no answer: %s", connection, complaint)
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


@contextmanager
def shielded(exchange: Exchange | None, deadline: float) -> Iterator[trio.CancelScope]:
    """A wait for the client that only its deadline and the connection's end cut short.

    A cancellation from outside must not tear a send: hypercorn's state would be lost with it.
    """
    with trio.CancelScope(deadline=deadline, shield=True) as scope:
        if exchange is None:
            yield scope
        else:
            with exchange.connection.shield(scope):
                yield scope


def exchange_of(scope: Scope) -> Exchange | None:
    """The exchange behind a scope; None under a foreign ASGI server."""
    exchange = scope.get("extensions", {}).get(EXTENSION)
    return exchange if isinstance(exchange, Exchange) else None
