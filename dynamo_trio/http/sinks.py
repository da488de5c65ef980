"""The two kinds of sink: past the protocol engine, and through it.

:class:`RawSink` writes HTTP/1.1 chunks straight to the socket, one non-blocking send each.
It owns the socket from the moment in which the head was made, so that the head leaves
together with what was fed before it, and the last chunk together with the terminator; hypercorn
is told of the end when that has left, since it then goes on to the next request.
:class:`QueueSink` goes through ASGI's ``send`` and works everywhere. Both keep what could
not be sent, and tell the source through ``writable`` and ``on_low_water`` when to pause.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.http.body_sink import GONE_ERRORS
from dynamo_trio.http.body_sink import BodySink as BodySink
from dynamo_trio.http.body_sink import SinkOutcome as SinkOutcome
from dynamo_trio.http.body_sink import Wake as Wake
from dynamo_trio.http.connection import Exchange, exchange_of
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.patience import Patience

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Headers, Message, Scope, Send
    from dynamo_trio.http.body_sink import Rest

#: One ASGI message carries no more, so that a slow client is judged by its progress.
PIECE = 16 * 1024
#: The end of a body that is sent in chunks (RFC 9112, 7.1).
TERMINATOR = b"0\r\n\r\n"


@attrs.define(eq=False)
class RawSink(BodySink):
    """Writes HTTP/1.1 chunks past hypercorn. Only for what :meth:`Exchange.raw_socket` allows."""

    _socket: trio.socket.SocketType = attrs.field(kw_only=True)
    #: The head is made; from here on the socket is ours until the end.
    _opened: bool = False
    #: Nor did hypercorn make the head.
    _past: bool = False
    #: How much of the terminator is still among what is unsent.
    _tail: int = 0

    async def start(self, status: int, headers: Headers) -> None:
        if status != 200 or b"content-length" in [name.lower() for name, _ in headers]:
            raise ValueError("a raw response has status 200 and no content-length")
        if self._exchange is None or not self._exchange.plain:
            await super().start(status, headers)
            return
        self.started = True
        # Unless somebody between us and the exchange adds to the head.
        itself = self._send == self._exchange.send
        head = self._exchange.begin_chunked(headers) if itself else None
        self._past = head is not None
        if head is None:
            message = {"type": "http.response.start", "status": status, "headers": headers}
            head = await self._take_corked(self._exchange, message)
        if not self._broken:
            self._unsent[:0] = head
            self._open()

    async def _take_corked(self, exchange: Exchange, message: Message) -> bytes:
        """What hypercorn would send for it. Waits for nothing."""
        exchange.cork()
        try:
            await self._send(message)
        except GONE_ERRORS:
            self.client_left()
        finally:
            made = exchange.take_held()
        return made

    def _open(self) -> None:
        self._opened = True
        if self._outcome is None:  # else all of it leaves with the terminator
            self._write_unsent()

    def feed(self, data: bytes) -> None:
        """As :meth:`BodySink.feed`."""
        if (rest := self.offer(b"", data, b"")) is not None:
            self._write_frame(rest[1])

    def offer(self, head: bytes, text: bytes, tail: bytes) -> Rest | None:
        """As :meth:`BodySink.offer`. The way of nearly every token, so all of it is in one call."""
        size = len(head) + len(text) + len(tail)
        if not (self._opened and size) or self._unsent or self._outcome is not None or self._closed:
            super().feed(b"%b%b%b" % (head, text, tail))
            return None
        return self._write_frame, b"%x\r\n%b%b%b\r\n" % (size, head, text, tail)

    def _write_frame(self, frame: bytes) -> None:
        try:
            sent = os.write(self._socket.fileno(), frame)  # see _write
        except BlockingIOError:
            sent = 0
        except GONE_ERRORS:
            self.client_left()
            self._torn = True
            return
        if sent < len(frame):
            self.partial += 1
            self._keep(memoryview(frame)[sent:])

    def feed_last(self, data: bytes) -> None:
        """As :meth:`BodySink.feed`; the owner sends it, with the terminator if that follows."""
        if self._outcome is not None or self._closed:
            self.late += 1
        else:
            self._put(data)

    @property
    def handed_over(self) -> bool:
        """As :attr:`BodySink.handed_over`: the terminator is not of the body."""
        return not (self._torn or self.late) and len(self._unsent) <= self._tail

    def client_left(self) -> None:
        """Nobody reads any more."""
        if len(self._unsent) <= self._tail:
            self._unsent.clear()
        super().client_left()

    def _put(self, data: bytes) -> None:
        self._keep(b"%x\r\n%b\r\n" % (len(data), data))

    async def drain(self) -> None:
        """Send what is unsent. May be cancelled without loss."""
        self._write_unsent()
        if self.pending and not self._closed:
            await self._drain_patiently()

    async def serve(self) -> None:
        """As :meth:`BodySink.serve`; what is left at the end is sent by :meth:`end`."""
        assert self.started
        while self._outcome is None:
            if self.pending:
                await self.drain()
            else:
                await self.attention.wait()

    async def _drain_all(self) -> None:
        # Most often there is nothing but the last chunk, and all of it goes at once.
        if self._opened and self._exchange is not None and not self._broken:
            self._tail = len(TERMINATOR)
            self._unsent += TERMINATOR
            self._write_unsent()
        await super()._drain_all()

    async def _send_end(self) -> bool:
        if self._exchange is None or not self._tail:
            return await super()._send_end()
        # It has left, so this is for hypercorn's books alone.
        if self._past and await self._exchange.end_chunked():
            return not self._broken
        end = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._take_corked(self._exchange, end)
        return not self._broken

    async def _drain_patiently(self) -> None:
        patience = Patience(self._socket, self._limits.write_time)
        with nullcontext() if self._exchange is None else self._exchange.blocked():
            while self.pending and not self._closed:
                await self._drain_some(patience)

    async def _drain_some(self, patience: Patience) -> None:
        with trio.CancelScope(deadline=patience.next_look) as waited:
            await self._wait_writable()
        if not waited.cancelled_caught:
            self._write_unsent()
            patience.sent()
        if not waited.cancelled_caught or patience.look():
            if self._exchange is not None:
                self._exchange.progressed()
        elif patience.is_over:
            self._give_up()

    async def _wait_writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._socket)
        except GONE_ERRORS:
            self.client_left()

    def _write_unsent(self) -> None:
        while self._unsent and not self._broken:
            sent = self._write(self._unsent)
            self._sent(sent)
            if self._unsent and not self._broken:
                self.partial += 1
            if not sent:
                return

    def _write(self, data: bytes | bytearray) -> int:
        # The descriptor is asked for each time: a closed socket says -1, while a number kept
        # from before may belong to somebody else by now.
        try:
            return os.write(self._socket.fileno(), data)
        except BlockingIOError:
            return 0
        except GONE_ERRORS:
            self.client_left()
            return 0


@attrs.define(eq=False)
class QueueSink(BodySink):
    """Sends through ASGI: HTTP/2, TLS, foreign servers, HTTP/1.0."""

    def _put(self, data: bytes) -> None:
        self._keep(data)

    async def drain(self) -> None:
        """Send what is unsent, piece by piece; each is shielded and bounded."""
        while self.pending and self.started:
            piece = bytes(self._unsent[:PIECE])
            body = {"type": "http.response.body", "body": piece, "more_body": True}
            if await self._send_bounded(body):
                self._sent(len(piece))
            await trio.lowlevel.checkpoint_if_cancelled()


def open_sink(scope: Scope, send: Send, limits: HttpLimits | None = None) -> BodySink:
    """The sink for the response to ``scope``: raw where that is possible."""
    exchange = exchange_of(scope)
    if exchange is not None:
        limits = limits or exchange.connection.limits
        raw = exchange.raw_socket()
        if raw is not None:
            return RawSink(send, limits, exchange, socket=raw)
    return QueueSink(send, limits or HttpLimits(), exchange)
