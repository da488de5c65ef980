"""The plane that speaks Dynamo's ``tcp``: its two sides under one name."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import attrs
import trio

from dynamo_trio.context import plain_cleanup
from dynamo_trio.plane.abc import (
    Acceptor,
    ClientStream,
    Connections,
    ItemSink,
    RequestHead,
    RequestPlane,
    Traffic,
)
from dynamo_trio.plane.net.tls import dialer_context, listener_context
from dynamo_trio.plane.tcp.client_side import TcpClientSide
from dynamo_trio.plane.tcp.server_side import TcpServerSide
from dynamo_trio.plane.tcp.settings import TcpSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.context import Cleanup


@attrs.define(eq=False)
class TcpPlane(RequestPlane):
    """Byte for byte Dynamo 1.5.1. Made by :func:`open_tcp_plane`.

    Neither side listens before it is needed: the server side binds at the first ``serve``, the
    client side at the first ``open_stream``, or when it is told to.
    """

    name: ClassVar[str] = "tcp"
    server: TcpServerSide
    client: TcpClientSide

    def serve(
        self, path: str, acceptor: Acceptor, *, annotated: bool = True
    ) -> AbstractAsyncContextManager[str]:
        """Serve ``path``; yields ``HOST:PORT/PATH``, as it stands in a discovery record.

        Raises:
            ConfigError, PortInUse: the plane cannot listen there.
        """
        return self.server.serve(path, acceptor, annotated=annotated)

    def open_stream(
        self, address: str, head: RequestHead, payload: bytes, sink: ItemSink
    ) -> AbstractAsyncContextManager[ClientStream]:
        return self.client.open_stream(address, head, payload, sink)

    async def listen_for_answers(self) -> None:
        """Let the client side listen now, so that what it cannot do is known at the start.

        Raises:
            ConfigError, PortInUse: it cannot listen there.
        """
        await self.client.listen_for_answers()

    def instance_gone(self, address: str) -> None:
        self.client.instance_gone(address)

    async def settle(self) -> None:
        await self.server.settle()

    @property
    def connections(self) -> Connections:
        return Connections(self.client.connections, self.server.connections)

    @property
    def traffic(self) -> Traffic:
        return self.client.traffic

    @property
    def has_silent_peers(self) -> bool:
        return self.server.has_silent_peers


@asynccontextmanager
async def open_tcp_plane(
    settings: TcpSettings | None = None, *, close_scope: Cleanup = plain_cleanup
) -> AsyncIterator[TcpPlane]:
    """The ``tcp`` plane of a process.

    When the block is left, answers that are finished have ``farewell_time`` seconds to leave;
    then every connection is closed. ``close_scope``, given that limit, is what this runs in: a
    program gives ``lifecycle.cleanup``, which a stop's hard end caps.

    Raises:
        ConfigError, FileUnusable: the TLS settings cannot be used.
    """
    settings = settings or TcpSettings()
    listener_context(settings.tls), dialer_context(settings.tls)  # raise here, not in a group
    async with trio.open_nursery() as nursery:
        server = TcpServerSide(settings, nursery)
        yield TcpPlane(server, TcpClientSide(settings, nursery))
        with close_scope(settings.farewell_time):
            await server.say_farewell()
        nursery.cancel_scope.cancel("the tcp plane is closed")
