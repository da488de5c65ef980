"""The frontend on its port."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from dynamo_trio.console import bound_to
from dynamo_trio.frontend.app import App
from dynamo_trio.http.server import open_listeners, serve_http

if TYPE_CHECKING:
    import trio

    from dynamo_trio.frontend.state import Frontend

logger = logging.getLogger("dynamo_trio.frontend")


async def serve_frontend(frontend: Frontend, services: trio.Nursery, host: str, port: int) -> int:
    """Serve until ``services`` ends; returns the port once it is listened on.

    Raises:
        PortInUse, ConfigError: it cannot be.
    """
    lifecycle = frontend.lifecycle
    listeners = await open_listeners(host, port)
    bound: int = listeners[0].socket.getsockname()[1]
    serve = partial(serve_http, App(frontend), listeners, limits=frontend.limits)
    server = await services.start(lifecycle.supervise, serve)
    lifecycle.on_abort(partial(server.abort_all, "the process stops"))
    logger.info("listening on %s", bound_to(host, bound))
    return bound
