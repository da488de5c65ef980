"""One WebSocket: ASGI's messages as calls, and a limit for each wait for the client."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.http.connection import exchange_of, shielded
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.websocket import weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.http.asgi import Headers, Message, Receive, Scope, Send
    from dynamo_trio.http.websocket import WebSocketWatch


@attrs.frozen
class Close:
    """How a session ends: the code (RFC 6455, 7.4) and reason of its Close frame."""

    code: int
    reason: str = ""


#: The client has gone: there is nobody to send a Close frame to.
LEFT = Close(1005)
#: The service restarts: go on elsewhere.
RESTART = 1012
#: There is no room now; to try again makes sense.
LATER = 1013
#: Codes by which a client ends a session in good order, or none at all (RFC 6455, 7.4.1).
IN_ORDER = (1000, 1001, 1005)
#: No Close frame has come.
BROKEN_OFF = 1006


@attrs.define(eq=False)
class RealtimeSocket:
    """One reader and one writer may use it at once. Runs on any ASGI server."""

    scope: Scope
    _receive: Receive
    _send: Send
    limits: HttpLimits = attrs.field(factory=HttpLimits)
    #: On our own server.
    _watch: WebSocketWatch | None = None
    #: How the client has left, once it has: the code of its Close frame.
    left_with: int | None = None
    #: The client is gone, or was given up, or the Close frame was sent. Invariant: never unset.
    gone: bool = False
    #: When the last frame must have left, by Trio's clock; finite once the session was cut.
    _last_moment: float = math.inf
    #: The shielded send that is under way, if one is.
    _limit: trio.CancelScope | None = None

    async def accept(self, headers: Headers, subprotocol: str | None = None) -> None:
        """Answer the upgrade with 101."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self.gone = True
            return
        accept = {"type": "websocket.accept", "headers": headers}
        await self._send_bounded({**accept, "subprotocol": subprotocol})

    async def receive(self) -> str | bytes | None:
        """The next frame, whole: text or binary; None when the client has left."""
        if self.gone:
            await trio.lowlevel.checkpoint()
            return None
        message = await self._receive()
        if message["type"] != "websocket.receive":
            self.gone = True
            self.left_with = self._code_of(message)
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        frame = data if text is None else text
        if self._watch is not None:
            self._watch.message_taken(weight(frame))
        return frame

    @property
    def left_in_order(self) -> bool:
        """Has the client closed it? Not so if its connection broke off, or if it broke a rule."""
        if self._watch is not None:  # which knows before :meth:`receive` says so
            return self._watch.code in IN_ORDER
        return self.left_with in IN_ORDER

    def _code_of(self, message: Message) -> int:
        if self._watch is None:
            return int(message.get("code") or 1005)
        return BROKEN_OFF if self._watch.code is None else self._watch.code

    async def keep_asking(self) -> None:
        """Ask a client that is silent whether it is there, until cancelled."""
        if self._watch is None:
            await trio.sleep_forever()
        else:
            await self._watch.keep_asking()

    def idle(self, on_crowd: Callable[[], object] | None) -> None:
        """It is idle from now on, and this ends it when others want its place; None: it is busy."""
        exchange = exchange_of(self.scope)
        if exchange is not None:
            exchange.idle_since, exchange.on_crowd = trio.current_time(), on_crowd

    async def send(self, text: str) -> bool:
        """Send a text frame. False: the client is gone, or took nothing for ``write_time``.

        A cancellation does not tear it; :meth:`hurry` shortens it.
        """
        return await self._send_bounded({"type": "websocket.send", "text": text})

    async def close(self, close: Close) -> None:
        """Send the Close frame, unless the client is gone."""
        reason = close.reason.encode()[:120].decode(errors="ignore")  # 123 bytes is the most
        await self._send_bounded({"type": "websocket.close", "code": close.code, "reason": reason})
        self.gone = True

    def hurry(self) -> None:
        """The session was cut: what is still to be sent gets the time of a farewell."""
        self._last_moment = min(self._last_moment, trio.current_time() + self.limits.farewell_time)
        if (exchange := exchange_of(self.scope)) is not None:
            exchange.hurry(self._last_moment)
        if self._limit is not None:
            self._limit.deadline = min(self._limit.deadline, self._last_moment)

    async def _send_bounded(self, message: Message) -> bool:
        if self.gone:
            await trio.lowlevel.checkpoint()
            return False
        exchange = exchange_of(self.scope)
        deadline = min(trio.current_time() + self.limits.write_time, self._last_moment)
        with shielded(exchange, deadline) as self._limit:
            try:
                await self._send(message)
            except OSError:  # how some ASGI servers say that the client has left
                self.gone = True
        if self._limit.cancelled_caught:
            self.gone = True
            if exchange is not None and not exchange.lost:
                exchange.abort("the client takes nothing")
        self._limit = None
        return not self.gone
