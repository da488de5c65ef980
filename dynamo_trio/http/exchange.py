"""One request and its response, and what hypercorn lacks around ``receive`` and ``send``.

What the exchange mends around ``receive`` and ``send``:

* *Answers before the request's end* (:mod:`dynamo_trio.http.early`). hypercorn queues ten body
  messages for the app and then blocks, and with it all that comes on the connection: once an
  answer has begun, nobody is to wait for an app that takes no more of its request.
* *Responses that break off.* A handler that fails in the middle of an HTTP/2 response would
  leave its client waiting for ever, and one of HTTP/1.0 looks whole when the connection is
  closed: that stream, or that connection, is reset. (HTTP/1.1 misses its last chunk.)
* *Sends that outlive their connection.* On HTTP/2 the end of a response waits in hypercorn
  until the client's window has taken it, also when nobody is there to open the window; and
  the app's sends are shielded. So these shields are known to the connection
  (:func:`shielded`), which lifts them when it ends.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.http.early import SOON, bear_late_data, closing, stop_upload
from dynamo_trio.http.resetting import reset_stream
from dynamo_trio.http.spoken import SpokenHttp1

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynamo_trio.http.asgi import Headers, Message, Scope, Send
    from dynamo_trio.http.connection import Connection
    from dynamo_trio.http.engine import Inbox

logger = logging.getLogger("dynamo_trio.http")

#: Where the app finds its :class:`Exchange` in ``scope["extensions"]``.
EXTENSION = "dynamo_trio.connection"


@attrs.define(eq=False)
class Exchange:
    """One request and its response, on our own server."""

    connection: Connection
    scope: Scope
    _inbox: Inbox
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
    #: An early answer waits for a moment for the rest of the request.
    waits_for_body: bool = True
    #: The answer began before the request was read to its end.
    answered_early: bool = False
    #: Since when it waits for the client to take something, by Trio's clock; None: it does not.
    blocked_since: float | None = None
    #: Of a session that is idle: since when, and what ends it in good order when others want its
    #: place. It is asked once.
    idle_since: float = math.inf
    on_crowd: Callable[[], object] | None = None
    http2: bool = attrs.field(init=False)
    #: Does ``on_lost`` hear of every departure? On HTTP/2 only ``receive`` does.
    notices_disconnects: bool = attrs.field(init=False)
    #: hypercorn's own object for the request; what it gives as ``send`` is its method.
    engine_stream: object = attrs.field(init=False)
    #: On HTTP/2: the number of the stream, and the body bytes that were handed over for it.
    _stream: int | None = None
    _handed: int = 0
    #: The waits that are under way -> the deadline that each has from now on.
    _waits: dict[trio.CancelScope, Callable[[], float]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.http2 = self.scope["http_version"] not in ("1.0", "1.1")
        self.notices_disconnects = self.scope["type"] == "http" and not self.http2
        self.engine_stream = getattr(self._send, "__self__", None)
        if self.scope["type"] == "http" and self.http2:
            self._stream = getattr(self.engine_stream, "stream_id", None)
        if self._stream is not None:
            self.connection.guard.count_stream(self._stream, self.progressed)
        if self.scope["type"] == "websocket":
            self.body_read = True  # there is none
        if self.http2:
            bear_late_data(self._send)

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
        if self.on_lost:
            self.on_lost = [callback for callback in self.on_lost if callback != on_disconnect]

    def abort(self, reason: str) -> None:
        """Reset it: the only honest end of a response that cannot be completed.

        On HTTP/2 that is the stream alone; else the connection.
        """
        if self._stream is None:
            self.connection.abort(reason)
        elif not self.lost:
            logger.info("stream %d of %s was reset: %s", self._stream, self.connection, reason)
            self.disconnected = True
            self.connection.guard.forget_stream(self._stream)
            self.tell_lost()
            self.connection.start_soon(partial(reset_stream, self._send))

    def hurry(self, moment: float) -> None:
        """What is still sent for it has to leave by ``moment``, by Trio's clock."""
        if not self.http2:  # there others send on the same connection
            self.connection.guard.hurry(moment)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The block waits for the client to take something. May be nested."""
        outer, self.blocked_since = self.blocked_since, trio.current_time()
        try:
            yield
        finally:
            self.blocked_since = outer

    @contextmanager
    def renewed(self, scope: trio.CancelScope, deadline: Callable[[], float]) -> Iterator[None]:
        """Whatever the client takes while the block runs gives ``scope`` a new deadline."""
        self._waits[scope] = deadline
        try:
            yield
        finally:
            del self._waits[scope]

    def progressed(self) -> None:
        """The client has taken something."""
        if self.blocked_since is not None:
            self.blocked_since = trio.current_time()
        for scope, deadline in self._waits.items():
            scope.deadline = deadline()

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

    @property
    def plain(self) -> bool:
        """Does a send wait for nothing but the guard, which bounds and shields that by itself?

        So it is on HTTP/1.1 once the request was read to its end.
        """
        return self.body_read and self.notices_disconnects

    def cork(self) -> None:
        """Hold back what is sent from now on. Only where it is :attr:`plain`."""
        self.connection.guard.cork()

    def uncork(self) -> None:
        """What was held back leaves together with what is sent next."""
        self.connection.guard.uncork()

    def take_held(self) -> bytes:
        """What was held back, to be sent by the caller."""
        return self.connection.guard.take_held()

    def begin_chunked(self, headers: Headers) -> bytes | None:
        """The head of an answer with status 200 in chunks, to be sent by the caller.

        None: nothing was done, and it is to be made by :meth:`send`. Only where it is
        :attr:`plain`.
        """
        if self._ambiguous or self.answered_early or self.connection.reserve:
            return None  # its connection is to be closed behind it
        engine = self._http1
        head = None if engine is None else engine.begin_chunked(self.engine_stream, headers)
        self.started = self.started or head is not None
        return head

    async def end_chunked(self) -> bool:
        """The end of it has left, with no checkpoint since. False: :meth:`send` is to be told."""
        engine = self._http1
        if engine is None:
            return False
        self._response_ends()
        return await engine.end_chunked(self.engine_stream)

    @property
    def _http1(self) -> SpokenHttp1 | None:
        """The protocol engine, if it is one of HTTP/1."""
        engine = getattr(getattr(self.engine_stream, "send", None), "__self__", None)
        return engine if isinstance(engine, SpokenHttp1) else None

    def whole_body(self) -> bytes | None:
        """The request's body, if all of it is there and nothing of it was received."""
        body = self._inbox.whole_body()
        if body is not None:
            self._body_ends()
        return body

    async def receive(self) -> Message:
        """ASGI's ``receive``."""
        message = await self._inbox.receive()
        if message["type"] == "http.disconnect":
            self.disconnected = True
            self.left_early = self.left_early or not self.complete
        elif message["type"] == "http.request" and not message.get("more_body", False):
            self._body_ends()
        return message

    async def send(self, message: Message) -> None:
        """ASGI's ``send``."""
        if message["type"] == "http.response.start":
            if not self.body_read:
                await self._begin_early()
            self.started = True
            if not self.http2 and (
                self._ambiguous or self.answered_early or self.connection.reserve
            ):
                message = closing(message)
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._response_ends()
        await self._send(message)
        if self._stream is not None:
            await self._await_sent(message)

    def _response_ends(self) -> None:
        self.complete = True
        self.on_lost.clear()
        self.connection.guard.finish()

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
        names = [name for name, _ in self.scope["headers"]]
        return b"transfer-encoding" in names and b"content-length" in names

    def _body_ends(self) -> None:
        self.body_read = True
        if self.notices_disconnects:
            self.connection.guard.hold()

    async def _await_sent(self, message: Message) -> None:
        assert self._stream is not None
        guard = self.connection.guard
        if not self.complete:
            self._handed += len(message.get("body", b""))
            await guard.wait_sent(self._stream, self._handed - self.connection.limits.h2_unsent)
        elif self.answered_early:
            await guard.wait_sent(self._stream, math.inf)
            # Some clients (httpx) take a reset ill that comes between a head and its body.
            self.connection.start_soon(partial(self._stop_upload, self._stream))

    async def _begin_early(self) -> None:
        """An answer begins, and the request was not read to its end."""
        if self.waits_for_body:
            with trio.move_on_after(SOON):
                await self._discard_body()
        if not self.body_read and not self.lost:
            self.answered_early = True
            self.connection.guard.unread = not self.http2
            self._inbox.discard_body()

    async def _stop_upload(self, stream: int) -> None:
        if not self.waits_for_body:  # else it has waited before its answer
            await trio.sleep(SOON)
        await stop_upload(self._send, stream)

    async def _discard_body(self) -> None:
        while not (self.body_read or self.disconnected):
            await self.receive()


@contextmanager
def shielded(
    exchange: Exchange | None, deadline: float, renew: Callable[[], float] | None = None
) -> Iterator[trio.CancelScope]:
    """A wait for the client that only its deadline and the connection's end cut short.

    A cancellation from outside must not tear a send: hypercorn's state would be lost with it.

    Args:
        renew: the deadline that it has once the client has taken something meanwhile.
    """
    with trio.CancelScope(deadline=deadline, shield=True) as scope:
        if exchange is None:
            yield scope
            return
        with exchange.connection.shield(scope), exchange.blocked():
            if renew is None:
                yield scope
                return
            with exchange.renewed(scope, renew):
                yield scope


def exchange_of(scope: Scope) -> Exchange | None:
    """The exchange behind a scope; None under a foreign ASGI server."""
    exchange = scope.get("extensions", {}).get(EXTENSION)
    return exchange if isinstance(exchange, Exchange) else None
