"""Where workers call home: one listener for the answers to all requests of this process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import CannotConnect, Disconnected, StartupError
from dynamo_trio.plane.net.accepting import accept_connections, open_listener, peer_of
from dynamo_trio.plane.net.hosts import listening_host
from dynamo_trio.plane.net.sockets import start_apart
from dynamo_trio.plane.net.tls import shake_hands
from dynamo_trio.plane.tcp.incoming import IncomingCall
from dynamo_trio.wire.dynamo.addresses import HostPort

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from dynamo_trio.plane.abc import Traffic
    from dynamo_trio.plane.tcp.settings import TcpSettings
    from dynamo_trio.plane.tcp.streams import StreamTable

logger = logging.getLogger("dynamo_trio.plane.tcp")

_SETTING = "DYN_TCP_RESPONSE_STREAM_"


@attrs.define(eq=False)
class CallHomeServer:
    """Listens from :meth:`listen` or from the first request on, in ``nursery``."""

    _streams: StreamTable
    _settings: TcpSettings
    _context: ssl.SSLContext | None
    _nursery: trio.Nursery
    _traffic: Traffic
    #: What workers are told; None: not listening yet.
    _address: HostPort | None = None
    _opening: trio.Lock = attrs.field(factory=trio.Lock)

    async def address(self) -> HostPort:
        """Where this listens.

        Raises:
            CannotConnect: it cannot listen; the log says why, and the next call tries again.
        """
        try:
            return await self.listen()
        except StartupError as exc:
            logger.error("no request can be sent: %s", exc)
            raise CannotConnect("this process cannot listen for answers") from exc

    async def listen(self) -> HostPort:
        """Listen, unless it does already; where it does.

        Raises:
            ConfigError, PortInUse: it cannot listen there.
            CannotConnect: the plane is closed.
        """
        async with self._opening:
            if self._address is None:
                self._address = await self._open()
                logger.info("answers are taken at %s", self._address)
            return self._address

    async def _open(self) -> HostPort:
        bound, told = listening_host(self._settings.response_host, f"{_SETTING}HOST")
        listener = await open_listener(bound, self._settings.response_port, _SETTING)
        port = listener.socket.getsockname()[1]
        try:
            start_apart(self._nursery, self._accept, listener)
        except RuntimeError:
            listener.socket.close()
            raise CannotConnect("the request plane is closed") from None
        return HostPort(told, port)

    async def _accept(self, listener: trio.SocketListener) -> None:
        try:
            await accept_connections(
                listener, self._serve, self._nursery, on_no_room=self._count_backoff
            )
        finally:
            self._streams.give_up(Disconnected("the request plane was closed"))

    def _count_backoff(self) -> None:
        self._traffic.backoffs += 1

    async def _serve(self, raw: trio.SocketStream, is_ours: Callable[[], None]) -> None:
        peer = peer_of(raw)
        try:
            transport = await self._secured(raw)
        except OSError as exc:
            logger.warning("a call home from %s is closed: %s", peer, exc)
            return
        caller = IncomingCall(transport, self._settings.max_message, is_ours, peer)
        await caller.run(self._streams, self._settings.handshake_time)

    async def _secured(self, raw: trio.SocketStream) -> trio.abc.Stream:
        if self._context is None:
            return raw
        return await shake_hands(raw, self._context, self._settings.tls.handshake_time)
