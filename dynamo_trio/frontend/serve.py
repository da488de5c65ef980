"""The frontend on its port."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from dynamo_trio.console import bound_to
from dynamo_trio.frontend.app import App
from dynamo_trio.http.server import open_listeners, serve_http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import trio

    from dynamo_trio.context import Cleanup
    from dynamo_trio.frontend.state import Frontend
    from dynamo_trio.http.server import HttpServer

logger = logging.getLogger("dynamo_trio.frontend")

#: Seconds that the answers have which no drain waits for, when everything else has ended.
LAST_ANSWERS = 1.0


@asynccontextmanager
async def open_front(
    frontend: Frontend,
    services: trio.Nursery,
    host: str,
    port: int,
    cleanup: Cleanup | None = None,
) -> AsyncIterator[int]:
    """Serve, and let what is still being answered when the block is over be answered.

    Yields the port. It is listened on until ``services`` ends. ``cleanup``, given a limit, is
    what those last answers leave in; by default the lifecycle's.

    Raises:
        PortInUse, ConfigError: it cannot be listened on.
    """
    server, bound = await serve_frontend(frontend, services, host, port)
    async with answering(frontend, server, services, cleanup or frontend.lifecycle.cleanup):
        yield bound


@asynccontextmanager
async def answering(
    frontend: Frontend, server: HttpServer, services: trio.Nursery, cleanup: Cleanup
) -> AsyncIterator[None]:
    """What the front owes to calls that no drain waits for; ``server`` runs in ``services``."""
    services.start_soon(_turn_away, frontend, server)
    try:
        yield
    finally:
        with cleanup(LAST_ANSWERS):
            await frontend.calls.wait_answered()
            await server.close_idle()


async def _turn_away(frontend: Frontend, server: HttpServer) -> None:
    await frontend.lifecycle.wait_stop_requested()
    server.retire()
    frontend.calls.refuse_uploads()


async def serve_frontend(
    frontend: Frontend, services: trio.Nursery, host: str, port: int
) -> tuple[HttpServer, int]:
    """Serve until ``services`` ends; returns the server and its port once that is listened on.

    Raises:
        PortInUse, ConfigError: it cannot be.
    """
    lifecycle = frontend.lifecycle
    listeners = await open_listeners(host, port)
    bound: int = listeners[0].socket.getsockname()[1]
    services.start_soon(lifecycle.supervise, frontend.stalls.run, name="silent workers")
    if frontend.keys is not None:
        services.start_soon(lifecycle.supervise, frontend.keys.follow, name="API keys")
    serve = partial(serve_http, App(frontend), listeners, limits=frontend.limits, tls=frontend.tls)
    server: HttpServer = await services.start(lifecycle.supervise, serve)
    lifecycle.on_abort(partial(server.abort_all, "the process stops"))
    logger.info("listening on %s", bound_to(host, bound, tls=frontend.tls is not None))
    return server, bound
