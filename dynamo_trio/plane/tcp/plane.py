"""The plane that speaks Dynamo's ``tcp``: its two sides under one name."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import attrs
import trio

from dynamo_trio.plane.abc import Acceptor, ClientStream, ItemSink, RequestHead, RequestPlane
from dynamo_trio.plane.tcp.client_side import TcpClientSide
from dynamo_trio.plane.tcp.server_side import TcpServerSide
from dynamo_trio.plane.tcp.settings import TcpSettings
from dynamo_trio.plane.tcp.tls import dialer_context, listener_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager


@attrs.define(eq=False)
class TcpPlane(RequestPlane):
    """Byte for byte Dynamo 1.5.1. Made by :func:`open_tcp_plane`.

    Neither side listens before it is needed: the server side binds at the first ``serve``, the
    client side at the first ``open_stream``, or when it is told to.
    """

    name: ClassVar[str] = "tcp"
    server: TcpServerSide
    client: TcpClientSide

    def serve(self, path: str, acceptor: Acceptor) -> AbstractAsyncContextManager[str]:
        """Serve ``path``; yields ``HOST:PORT/PATH``, as it stands in a discovery record.

        Raises:
            ConfigError, PortInUse: the plane cannot listen there.
        """
        return self.server.serve(path, acceptor)

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
    def has_silent_peers(self) -> bool:
        return self.server.has_silent_peers


@asynccontextmanager
async def open_tcp_plane(settings: TcpSettings | None = None) -> AsyncIterator[TcpPlane]:
    """The ``tcp`` plane of a process.

    When the block is left, answers that are finished have ``farewell_time`` seconds to leave;
    then every connection is closed.

    Raises:
        ConfigError, FileUnusable: the TLS settings cannot be used.
    """
    settings = settings or TcpSettings()
    listener_context(settings.tls), dialer_context(settings.tls)  # raise here, not in a group
    async with trio.open_nursery() as nursery:
        server = TcpServerSide(settings, nursery)
        yield TcpPlane(server, TcpClientSide(settings, nursery))
        await server.say_farewell()
        nursery.cancel_scope.cancel("the tcp plane is closed")
