"""The planes that there are, each ready for both roles, by the name that tests give them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from dynamo_trio.plane import MemoryPlane
from dynamo_trio.plane.mux import MuxSettings, open_mux_plane
from dynamo_trio.plane.tcp import TcpSettings, open_tcp_plane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def plane_of(kind: str) -> AsyncIterator[Any]:
    """The plane ``mem``, ``mux`` or ``tcp``, on loopback."""
    if kind == "mem":
        yield MemoryPlane()
    elif kind == "mux":
        async with open_mux_plane(MuxSettings(host="127.0.0.1")) as plane:
            yield plane
    else:
        settings = TcpSettings(rpc_host="127.0.0.1", response_host="lo")
        async with open_tcp_plane(settings) as tcp:
            yield tcp
