"""The status server on its port."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from dynamo_trio.http.server import open_listeners, serve_http
from dynamo_trio.plane.net.hosts import listening_host
from dynamo_trio.program.runtime import open_configured_runtime
from dynamo_trio.worker.callers import is_loopback
from dynamo_trio.worker.drain_api import DrainApi
from dynamo_trio.worker.status_app import LIMITS, StatusApp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import trio

    from dynamo_trio.config import Config
    from dynamo_trio.runtime import DistributedRuntime
    from dynamo_trio.worker.status import WorkerStatus

logger = logging.getLogger("dynamo_trio.worker")


async def serve_status(status: WorkerStatus, services: trio.Nursery, config: Config) -> None:
    """Serve until ``services`` ends, if the settings ask for it (``DYN_SYSTEM_PORT``).

    Raises:
        PortInUse, ConfigError: the port cannot be listened on.
    """
    if config.system_port < 0:
        return
    host, told = listening_host(config.system_host, "DYN_SYSTEM_HOST")
    listeners = await open_listeners(host, config.system_port, setting="system")
    port = listeners[0].socket.getsockname()[1]
    is_local = all(is_loopback(one.socket.getsockname()[0]) for one in listeners)
    drain = DrainApi(
        status,
        config.drain_api,
        is_local,
        config.system_host,
        # Whoever else asks must find room, however few descriptors there are.
        max(1, LIMITS.connection_cap() // 4),
    )
    app = StatusApp(status, config.system_health_path, config.system_live_path, drain=drain)
    serve = partial(serve_http, app, listeners, limits=app.limits)
    # No stop aborts its connections: it answers to the end of ``services``.
    await services.start(status.lifecycle.supervise, serve)
    logger.info("status server on %s", _authority(host, port))
    status.url = f"http://{_authority(told, port)}"


@asynccontextmanager
async def open_worker_runtime(
    config: Config, status: WorkerStatus
) -> AsyncIterator[DistributedRuntime]:
    """The runtime that the settings describe, of which ``status`` tells from now on.

    Raises:
        StartupError: the store cannot be reached, or the plane's settings cannot be used.
    """
    async with open_configured_runtime(config, status.lifecycle) as runtime:
        status.attach(runtime)
        yield runtime


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
