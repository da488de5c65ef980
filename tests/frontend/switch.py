"""An ingress that knows nothing of HTTP."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@attrs.define(eq=False)
class Switch:
    """A TCP port before several others.

    Each new connection goes to the next one in turn.
    """

    ports: list[int]
    #: Where the connections went.
    taken: list[int] = attrs.field(factory=list)
    #: How many of them have ended, on both sides.
    ended: int = 0

    async def serve(self, client: trio.SocketStream) -> None:
        port = self.ports[len(self.taken) % len(self.ports)]
        self.taken.append(port)
        async with await trio.open_tcp_stream("127.0.0.1", port) as server, client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_copy, client, server)
                await _copy(server, client)
                nursery.cancel_scope.cancel()
        self.ended += 1


async def _copy(source: trio.SocketStream, target: trio.SocketStream) -> None:
    try:
        async for data in source:
            await target.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


@asynccontextmanager
async def open_switch(*ports: int) -> AsyncIterator[tuple[Switch, str]]:
    """A switch before these ports, and the base URL for an SDK."""
    switch = Switch(list(ports))
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, switch.serve, 0, host="127.0.0.1")
        listeners = await nursery.start(serve)
        yield switch, f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/v1"
        nursery.cancel_scope.cancel()
