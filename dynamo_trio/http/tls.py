"""TLS for the HTTP port: the context, the stream, and the guard around it.

Theory of operation
-------------------
The stream is made of an ``ssl.SSLObject`` between two memory buffers, and not of Trio's own
``SSLStream``, for the sake of the end of a connection: the guard reads at all times and closes
without waiting, and there a ``close_notify`` must still leave, or an answer that ends with its
connection would look cut to a careful client. Here that is one write that does not wait
(:meth:`TlsStream.say_end`).

* The reader never sends. What TLS wants to send for its own ends (an answer to a key update)
  lies in the buffer until the next send, as RFC 8446, 4.6.3 allows.
* A record leaves whole or the connection is reset: a send that is given up half-way breaks the
  stream, and the guard aborts it.
* The handshake comes before everything, and is bounded (``handshake_time``). One that fails
  concerns nobody but its client.
"""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import InvalidArgument
from dynamo_trio.http.guard import Carrier, GuardedStream
from dynamo_trio.http.phrases import PHRASES
from dynamo_trio.http.refused import refusal
from dynamo_trio.pem import load_identity

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = 64 * 1024
#: RFC 9113, 9.2.2: what HTTP/2 may be spoken over in TLS 1.2. TLS 1.3 has its own list.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
#: What is offered by ALPN (RFC 7301), the better first.
PROTOCOLS = ["h2", "http/1.1"]


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """What the HTTP port needs to speak TLS 1.2 and 1.3, HTTP/1.1 and HTTP/2 inside.

    Raises:
        FileUnusable: a file is missing, or not what it should be; names its variable.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(PROTOCOLS)
    load_identity(
        context, cert, key, cert_setting="DYN_TLS_CERT_PATH", key_setting="DYN_TLS_KEY_PATH"
    )
    return context


def speak_tls() -> bytes:
    """For who speaks HTTP to a port of TLS; the connection is closed behind it."""
    headers, body = refusal(InvalidArgument("This port speaks HTTPS, not HTTP."))
    first = b"HTTP/1.1 400 " + PHRASES[400]
    lines = [first, *(b": ".join(header) for header in headers), b"connection: close"]
    return b"\r\n".join([*lines, b"", body])


class HandshakeFailed(Exception):
    """There will be no TLS with this client. The text says why."""


@attrs.define(eq=False)
class TlsStream:
    """The server's end of TLS over ``carrier``. One reader and one writer at a time."""

    _carrier: Carrier
    _context: ssl.SSLContext
    _incoming: ssl.MemoryBIO = attrs.field(factory=ssl.MemoryBIO)
    _outgoing: ssl.MemoryBIO = attrs.field(factory=ssl.MemoryBIO)
    _tls: ssl.SSLObject = attrs.field(init=False)
    #: A record is on its way: nothing may be written between its bytes.
    _sending: bool = False
    #: Invariant: once set, nothing more is written.
    _finished: bool = False
    socket: trio.socket.SocketType = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.socket = self._carrier.socket
        self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    @property
    def protocol(self) -> str | None:
        """What was agreed upon by ALPN, if anything was."""
        return self._tls.selected_alpn_protocol()

    async def do_handshake(self) -> None:
        """Agree upon TLS. The caller bounds it, and closes the carrier if it fails.

        Raises:
            HandshakeFailed: the client does not speak TLS, does not trust us, or has left.
        """
        try:
            while not await self._handshake_step():
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise HandshakeFailed("the client left") from exc

    async def _handshake_step(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            await self._flush()
            await self._fetch()
            return False
        except ssl.SSLError as exc:
            await self._refuse(exc)
        await self._flush()
        return True

    async def _refuse(self, error: ssl.SSLError) -> None:
        """Tell the client, if there is something to tell, and raise."""
        if isinstance(error, ssl.SSLEOFError):
            raise HandshakeFailed("the client left") from error
        if error.reason == "HTTP_REQUEST":
            await self._carrier.send_all(speak_tls())
            raise HandshakeFailed("the client speaks HTTP, not HTTPS") from error
        await self._flush()  # an alert
        raise HandshakeFailed(error.reason or str(error)) from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The next bytes; ``b""`` once the client has ended, or broken, its side."""
        while True:
            try:
                return self._tls.read(max_bytes or CHUNK)
            except ssl.SSLWantReadError:
                await self._fetch()
            except ssl.SSLError as exc:
                if isinstance(exc, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                    return b""  # many clients say no close_notify
                raise trio.BrokenResourceError(f"no TLS: {exc.reason}") from exc

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send.

        Raises:
            trio.BrokenResourceError: the client has gone.
            trio.ClosedResourceError: the connection was closed on this side.
        """
        if self._finished:
            raise trio.ClosedResourceError("TLS was ended on this side")
        try:
            if data:
                self._tls.write(data)
        except ssl.SSLError as exc:
            raise trio.BrokenResourceError(f"no TLS: {exc.reason}") from exc
        await self._flush()

    async def send_eof(self) -> None:
        """Say that no more will be sent, and half-close."""
        self.say_end()
        await self._carrier.send_eof()

    def say_end(self) -> None:
        """Say ``close_notify``, if the socket takes it at once. Idempotent."""
        if self._finished or self._sending:
            return
        self._finished = True
        with suppress(ssl.SSLError):  # "want read": the client has not said it yet
            self._tls.unwrap()
        with suppress(OSError):
            os.write(self.socket.fileno(), self._outgoing.read())

    async def _fetch(self) -> None:
        data = await self._carrier.receive_some(CHUNK)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        if not self._outgoing.pending:
            await trio.lowlevel.checkpoint()
            return
        self._sending = True  # and stays so, should the send break off
        await self._carrier.send_all(self._outgoing.read())
        self._sending = False


@attrs.define(eq=False)
class TlsGuard(GuardedStream):
    """A guard that the engine takes for a stream of TLS: ``wss`` and ``https`` go by that."""

    _tls: TlsStream = attrs.field(kw_only=True)

    async def shake_hands(self) -> None:
        """To be called before anything else is done with it.

        Raises:
            HandshakeFailed: there is no TLS, or not in ``handshake_time``.
        """
        with trio.move_on_after(self._limits.handshake_time):
            await self._tls.do_handshake()
            self._set_deadline(self._limits.idle_time)
            return
        raise HandshakeFailed(f"it took over {self._limits.handshake_time:g} s")

    def selected_alpn_protocol(self) -> str | None:
        return self._tls.protocol

    def _say_end(self) -> None:
        self._tls.say_end()
