"""The server side of the ``tcp`` plane: requests in, answers out."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import trio

    from dynamo_trio.plane.abc import Acceptor
    from dynamo_trio.plane.tcp.settings import TcpSettings


@attrs.define(eq=False)
class TcpServerSide:
    """Its tasks live in ``nursery``, and end when that is cancelled."""

    settings: TcpSettings
    nursery: trio.Nursery
    has_silent_peers: bool = False

    @asynccontextmanager
    async def serve(self, path: str, acceptor: Acceptor) -> AsyncIterator[str]:
        yield f"{path}, not served yet"

    async def settle(self) -> None:
        raise NotImplementedError

    async def say_farewell(self) -> None:
        """Give what is finished a moment to leave."""
