"""The HTTP server: an accept loop of our own around hypercorn as the protocol engine.

hypercorn's own server closes its listeners as soon as it is told to stop, lets one
connection's error end all others, and waits for ever for a client that stops reading.
Here the listener stays open while the process drains (``/health`` and ``/live`` are still
asked), each connection is contained in its own nursery, and every wait for a client has
a limit (:mod:`dynamo_trio.http.guard`).

The server knows no phases. Its caller refuses requests while it drains (in the app),
may close idle connections when a stop is final, and ends it by cancelling it: then idle
connections are closed and busy ones reset.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
from typing import TYPE_CHECKING

import attrs
import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from dynamo_trio.errors import ConfigError, PortInUse
from dynamo_trio.http.connection import Connection, engine_complaint
from dynamo_trio.http.guard import GuardedStream
from dynamo_trio.http.limits import HttpLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.http.asgi import App

logger = logging.getLogger("dynamo_trio.http")

#: What accept(2) says when the machine or the process has no room for one more.
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
#: Seconds until accepting is tried again then, and between two log lines about it.
RETRY_ACCEPT, COMPLAIN_EVERY = 0.1, 10.0
#: At the cap, a request whose body is still incomplete after so many seconds may be evicted.
UPLOAD_GRACE = 1.0


async def open_listeners(
    host: str,
    port: int,
    *,
    backlog: int = HttpLimits().backlog,
    setting: str = "http",
) -> list[trio.SocketListener]:
    """Listen on ``host`` (a name or an address) and ``port`` (0: any free one).

    A name with several addresses gives a listener for each; with port 0 only one, since
    each would get a port of its own. ``setting`` is the word by which the settings of host and
    port are called, for messages.

    Raises:
        PortInUse: another process has the port, or it may not be bound.
        ConfigError: the host is unknown, or an address of another machine.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=backlog)
        while port == 0 and len(listeners) > 1:
            await listeners.pop().aclose()
        return listeners
    except (OSError, UnicodeError) as exc:  # UnicodeError: no name could look like that
        if (
            not isinstance(exc, OSError)
            or isinstance(exc, socket.gaierror)
            or exc.errno == errno.EADDRNOTAVAIL
        ):
            where = f"host {host!r} ({_names(setting, 'host')})"
            raise ConfigError(
                f"cannot listen on {where}: must be an address of this machine, or a name that has"
                " one"
            ) from exc
        shown = f"[{host}]" if ":" in host else host
        where = f"{shown}:{port} ({_names(setting, 'port')})"
        raise PortInUse(f"cannot listen on {where}: {_explain(exc)}") from exc


def _names(setting: str, what: str) -> str:
    return f"--{setting}-{what}, DYN_{setting.upper()}_{what.upper()}"


def _explain(exc: OSError) -> str:
    match exc.errno:
        case errno.EADDRINUSE:
            return "the port is in use by another process"
        case errno.EACCES:
            return "this user may not use that port"
        case code:
            return os.strerror(code) if code else str(exc)


@attrs.frozen
class ServerStatistics:
    """A snapshot of :class:`HttpServer`."""

    connections: int
    busy: int
    accepted: int
    #: Connections that were reset: the client took nothing, sent too slowly, or too much.
    reset: int
    #: Connections that ended in an exception of the protocol engine.
    failed: int


@attrs.define(eq=False)
class HttpServer:
    """The connections of :func:`serve_http`, and what may be done to them. All calls are sync."""

    app: App
    limits: HttpLimits
    connections: set[Connection] = attrs.field(factory=set)
    accepted: int = 0
    reset: int = 0
    failed: int = 0
    _config: Config = attrs.field(init=False)
    _context: WorkerContext = attrs.field(factory=lambda: WorkerContext(None))
    _cap: int = attrs.field(init=False)
    _room: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _complained_at: float = -math.inf

    def __attrs_post_init__(self) -> None:
        self._config = hypercorn_config(self.limits)
        self._cap = self.limits.connection_cap()

    def close_idle(self) -> int:
        """Close the connections on which no request runs; returns how many."""
        idle = [connection for connection in self.connections if connection.idle]
        for connection in idle:
            connection.close()
        return len(idle)

    def abort_all(self, reason: str) -> int:
        """Reset all that are left; returns how many."""
        left = list(self.connections)
        for connection in left:
            connection.abort(reason)
        return len(left)

    def statistics(self) -> ServerStatistics:
        busy = sum(not connection.idle for connection in self.connections)
        return ServerStatistics(len(self.connections), busy, self.accepted, self.reset, self.failed)

    async def accept_from(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Accept until cancelled; each connection becomes a task in ``nursery``."""
        async with listener:
            while True:
                stream = await self._accept(listener)
                if stream is not None:
                    await self._make_room(stream)
                    nursery.start_soon(self._serve, self._take(stream))

    async def serve_stream(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end. Never raises an :class:`Exception`."""
        await self._serve(self._take(stream))

    def _take(self, stream: trio.SocketStream) -> Connection:
        connection = Connection(GuardedStream(stream, self.limits), self.limits)
        self.connections.add(connection)
        self.accepted += 1
        return connection

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run(self.app, self._config, self._context)
        except* Exception as group:
            self.failed += 1
            complaint = engine_complaint(group)
            logger.warning(
                "%s ended in an error%s",
                *(connection, f": {complaint}" if complaint else ""),
                exc_info=None if complaint else group,
            )
        finally:
            connection.close()
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.reset += connection.guard.was_reset
        self._room.unpark_all()
        logger.debug("%s is over: %s", connection, connection.guard.why_lost)

    async def _accept(self, listener: trio.SocketListener) -> trio.SocketStream | None:
        try:
            return await listener.accept()
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
            self._complain(exc)
        self._evict()
        await trio.sleep(RETRY_ACCEPT)
        return None

    def _complain(self, exc: OSError) -> None:
        now = trio.current_time()
        if now - self._complained_at >= COMPLAIN_EVERY:
            self._complained_at = now
            logger.error("cannot accept connections: %s", os.strerror(exc.errno or 0))

    async def _make_room(self, newcomer: trio.SocketStream) -> None:
        try:
            while len(self.connections) >= self._cap and not self._evict():
                with trio.move_on_after(RETRY_ACCEPT):  # an upload may lose its grace meanwhile
                    await self._room.park()
        except trio.Cancelled:
            newcomer.socket.close()
            raise

    def _evict(self) -> bool:
        """Close the connection that has been idle, or else uploading, for longest; if any is."""
        left = [c for c in self.connections if not c.guard.closed]
        idle = [c for c in left if c.idle]
        # Or a crowd of half-sent requests would keep even /live from being answered.
        latest = trio.current_time() - UPLOAD_GRACE
        uploading = [c for c in left if c.uploading and c.busy_since <= latest]
        if idle:
            min(idle, key=lambda connection: connection.idle_since).close()
        elif uploading:
            min(uploading, key=lambda connection: connection.busy_since).close()
        return bool(idle or uploading)


async def serve_http(
    app: App,
    listeners: Sequence[trio.SocketListener],
    *,
    limits: HttpLimits | None = None,
    task_status: trio.TaskStatus[HttpServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` on ``listeners`` until cancelled, and close the listeners then.

    An :class:`Exception` in a connection ends that connection and is logged.
    """
    server = HttpServer(app, limits or HttpLimits())
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(server.accept_from, listener, nursery)
        task_status.started(server)


def hypercorn_config(limits: HttpLimits) -> Config:
    """What the protocol engine is told. Its timers are off where the guard has its own."""
    config = Config()
    config.accesslog = None
    config.errorlog = logger
    config.include_server_header = False
    config.keep_alive_timeout = math.inf
    # Past this number hypercorn closes an HTTP/2 connection under its running streams.
    config.keep_alive_max_requests = 2**31
    config.h11_max_incomplete_size = limits.head_bytes
    config.h2_max_concurrent_streams = limits.h2_streams
    config.h2_max_header_list_size = limits.head_bytes
    config.websocket_max_message_size = limits.ws_message_bytes
    return config
