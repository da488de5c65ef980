"""What of a WebSocket cannot be said in ASGI.

Theory of operation
-------------------
hypercorn gives the app whole messages, and says that the client has left. A
:class:`WebSocketWatch` stands between wsproto, which reads the frames, and hypercorn, and adds

* *room*: what all clients have sent of messages that nobody has taken yet is bounded together.
  Half a message is held until its other half comes, which may be never;
* *pings*: a machine that loses its network says nothing, and to a client that listens nothing is
  said either. So a silent one is asked now and then, and is gone if it does not answer;
* *how it left*: the code of the client's Close frame, which hypercorn keeps to itself;
* *why it was closed*: what breaks the protocol is answered by a Close frame that says so.

None of this happens on a foreign server, which has its own ways.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio
from hypercorn.protocol.ws_stream import FrameTooLargeError, WebsocketBuffer, WSStream
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping

from dynamo_trio.http.exchange import exchange_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wsproto.connection import Connection
    from wsproto.events import Event

    from dynamo_trio.http.asgi import Scope
    from dynamo_trio.http.exchange import Exchange

KIB = 1024
MIB = 1024 * KIB


@attrs.define(eq=False)
class FrameRoom:
    """For what all clients together have sent of messages that nobody has taken yet."""

    #: Bytes, but for the first ``free`` of each client.
    most: int = 256 * MIB
    free: int = 64 * KIB
    taken: int = 0


@contextmanager
def watched(scope: Scope, room: FrameRoom) -> Iterator[WebSocketWatch | None]:
    """Watch a WebSocket while the block runs; to be entered before the upgrade is accepted.

    Also leaves the client's offer to compress (RFC 7692) unanswered. Most clients offer it, and
    hypercorn takes every offer. It would cost a quarter of a megabyte for each connection, the
    compressor's time for each token, and let a few bytes of a client become a thousand times as
    many here.
    """
    exchange = exchange_of(scope)
    stream = None if exchange is None else exchange.engine_stream
    if exchange is None or not isinstance(stream, WSStream):
        yield None
        return
    watch = WebSocketWatch(exchange, stream, room)
    watch.begin()
    try:
        yield watch
    finally:
        watch.end()


@attrs.define(eq=False)
class WebSocketWatch:
    """Of one WebSocket on our own server."""

    _exchange: Exchange
    _stream: WSStream
    _room: FrameRoom
    #: Of the Close frame by which the client has ended it (RFC 6455, 7.4); None: it has sent none.
    code: int | None = None
    #: When the client was last heard of, by Trio's clock.
    heard_at: float = attrs.field(factory=trio.current_time)
    #: Messages that wait for the app, and the bytes of these and of what is still incomplete.
    _waiting: int = 0
    _held: int = 0
    #: Those of ``_held`` that count in ``_room``.
    _counted: int = 0

    def begin(self) -> None:
        handshake, accept = self._stream.handshake, self._stream.handshake.accept
        handshake.extensions = None

        def accept_and_watch(*args: Any) -> Any:
            status, headers, connection = accept(*args)
            self._watch(connection)
            return status, headers, connection

        handshake.accept = accept_and_watch  # type: ignore[method-assign,assignment]  # our way in
        limit = self._exchange.connection.limits.ws_message_bytes
        self._stream.buffer = _CountedBuffer(limit, self)

    def end(self) -> None:
        """Give the room back, whatever was not taken."""
        self._stream.buffer.clear()
        self._hold(-self._held)

    def message_taken(self, size: int) -> None:
        """The app has taken a message."""
        self._waiting -= 1
        self._hold(-min(size, self._held))

    async def keep_asking(self) -> None:
        """Ask a client that is silent whether it is there, until cancelled."""
        limits = self._exchange.connection.limits
        while True:
            await trio.sleep_until(self.heard_at + limits.ping_time)
            # While the app lets messages wait, the answer, too, would wait behind them.
            asked_at = trio.current_time()
            if asked_at >= self.heard_at + limits.ping_time and not self._waiting:
                await self._stream._send_wsproto_event(Ping())
                await trio.sleep(limits.write_time)
                if self.heard_at < asked_at and not self._waiting:
                    self._exchange.abort("the client does not answer a ping")
            elif self._waiting:
                await trio.sleep(limits.ping_time)

    # --- what goes on -----------------------------------------------------------------------

    def count(self, data: str | bytes) -> None:
        """More of a message has come.

        Raises:
            FrameTooLargeError: there is no room for it.
        """
        size = weight(data)
        more = max(0, self._held + size - self._room.free) - self._counted
        if more > 0 and self._room.taken + more > self._room.most:
            raise FrameTooLargeError
        self._hold(size)

    def message_whole(self) -> None:
        self._waiting += 1

    def _hold(self, more: int) -> None:
        self._held += more
        counted = max(0, self._held - self._room.free)
        self._room.taken += counted - self._counted
        self._counted = counted

    def _watch(self, connection: Connection) -> None:
        events = connection.events

        def watched_events() -> Iterator[Event]:
            self.heard_at = trio.current_time()
            for event in events():
                if isinstance(event, CloseConnection):
                    self._closes(connection, event)
                yield event

        connection.events = watched_events  # type: ignore[method-assign,assignment]  # our way in

    def _closes(self, connection: Connection, event: CloseConnection) -> None:
        if connection.state is ConnectionState.OPEN:
            # No frame of the client's, but what wsproto says of one that breaks the protocol.
            # So it is answered: hypercorn answers what the other side has begun.
            connection._state = ConnectionState.REMOTE_CLOSING
        else:
            self.code = event.code


def weight(data: str | bytes) -> int:
    """Bytes of memory, about."""
    return len(data) if isinstance(data, bytes | bytearray) or data.isascii() else 4 * len(data)


class _CountedBuffer(WebsocketBuffer):
    """A message on its way."""

    def __init__(self, max_length: int, watch: WebSocketWatch) -> None:
        super().__init__(max_length)
        self._watch = watch

    def extend(self, event: Message[Any]) -> None:
        try:
            self._watch.count(event.data)
            super().extend(event)
        except FrameTooLargeError:
            self.clear()  # the client may never take notice
            raise

    def to_message(self) -> dict[str, Any]:
        self._watch.message_whole()
        return super().to_message()
