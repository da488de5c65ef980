"""The plane between dynamo_trio's own peers: its two sides under one name."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import attrs
import trio

from dynamo_trio.context import plain_cleanup
from dynamo_trio.plane.abc import (
    Acceptor,
    Acknowledgements,
    ClientStream,
    Connections,
    ItemSink,
    RequestHead,
    RequestPlane,
)
from dynamo_trio.plane.mux.client_side import MuxClientSide
from dynamo_trio.plane.mux.server_side import MuxServerSide
from dynamo_trio.plane.mux.settings import MuxSettings
from dynamo_trio.plane.net.tls import dialer_context, listener_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from dynamo_trio.context import Cleanup


@attrs.define(eq=False)
class MuxPlane(RequestPlane):
    """One connection for each client process and worker. Made by :func:`open_mux_plane`.

    The server side listens from the first ``serve``. The client side connects to a worker when
    discovery has found it, or at its first request.
    """

    name: ClassVar[str] = "mux"
    server: MuxServerSide
    client: MuxClientSide

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

    # --- as a client --------------------------------------------------------------------------

    def instance_found(self, address: str) -> None:
        self.client.instance_found(address)

    def avoids(self, address: str) -> bool:
        return self.client.avoids(address)

    def instance_gone(self, address: str) -> None:
        self.client.instance_gone(address)

    # --- as a worker --------------------------------------------------------------------------

    def withdraw(self, *addresses: str) -> None:
        self.server.withdraw(*addresses)

    def restore(self, address: str) -> None:
        self.server.restore(address)

    async def wait_acknowledged(self) -> None:
        await self.server.wait_acknowledged()

    @property
    def acknowledgements(self) -> Acknowledgements:
        return self.server.acknowledgements

    @property
    def places(self) -> int:
        return self.server.places

    @property
    def connections(self) -> Connections:
        return Connections(self.client.connections, self.server.connections)


@asynccontextmanager
async def open_mux_plane(
    settings: MuxSettings | None = None, *, close_scope: Cleanup = plain_cleanup
) -> AsyncIterator[MuxPlane]:
    """The ``mux`` plane of a process.

    When the block is left, answers that are finished have ``farewell_time`` seconds to leave,
    and peers are told; then every connection is closed. ``close_scope``, given that limit, is
    what this runs in: a program gives ``lifecycle.cleanup``, which a stop's hard end caps.

    Raises:
        ConfigError, FileUnusable: the TLS settings cannot be used.
    """
    settings = settings or MuxSettings()
    listener_context(settings.tls), dialer_context(settings.tls)  # raise here, not in a group
    async with trio.open_nursery() as nursery:
        process = secrets.token_hex(8)
        server = MuxServerSide(settings, nursery, process=process)
        client = MuxClientSide(settings, nursery, process=process)
        yield MuxPlane(server, client)
        with close_scope(settings.farewell_time):
            async with trio.open_nursery() as farewells:
                farewells.start_soon(server.say_farewell)
                farewells.start_soon(client.say_farewell)
        nursery.cancel_scope.cancel("the mux plane is closed")
