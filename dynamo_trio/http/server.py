"""The HTTP server: an accept loop of our own around hypercorn as the protocol engine.

hypercorn's own server closes its listeners as soon as it is told to stop, lets one
connection's error end all others, and waits for ever for a client that stops reading.
Here the listener stays open while the process drains (``/health`` and ``/live`` are still
asked), each connection is contained in its own nursery, and every wait for a client has
a limit (:mod:`dynamo_trio.http.guard`).

The server knows no phases. Its caller refuses requests while it drains (in the app),
closes idle connections when a stop is final (:meth:`HttpServer.close_idle`), and ends it by
cancelling it: then idle connections are closed and busy ones reset.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import socket
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from dynamo_trio.console.seldom import Seldom, SeldomEach
from dynamo_trio.errors import ConfigError, PortInUse
from dynamo_trio.http.connection import Connection, engine_complaint
from dynamo_trio.http.frames import SentAway
from dynamo_trio.http.guard import Carrier, GuardedStream
from dynamo_trio.http.keepalive import keep_alive
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.patience import PatientStream
from dynamo_trio.http.tls import HandshakeFailed, TlsGuard, TlsStream

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from dynamo_trio.http.asgi import App

logger = logging.getLogger("dynamo_trio.http")

#: What accept(2) says when the machine or the process has no room for one more.
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
#: Seconds until accepting is tried again then, and between two log lines about it.
RETRY_ACCEPT, COMPLAIN_EVERY = 0.1, 10.0
#: Idle connections that are closed before others get their turn.
AT_ONCE = 32
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
    #: Connections that came to no agreement upon TLS.
    strangers: int


@attrs.define(eq=False)
class HttpServer:
    """The connections of :func:`serve_http`, and what may be done to them."""

    app: App
    limits: HttpLimits
    #: None: it speaks plainly.
    tls: ssl.SSLContext | None = None
    connections: set[Connection] = attrs.field(factory=set)
    #: Those of them that came when there was no room: they ask nothing but how the process is.
    reserve: set[Connection] = attrs.field(factory=set)
    accepted: int = 0
    reset: int = 0
    failed: int = 0
    strangers: int = 0
    #: Connections that were closed for what their clients did.
    sent_away: int = 0
    _config: Config = attrs.field(init=False)
    _context: WorkerContext = attrs.field(factory=lambda: WorkerContext(None))
    _cap: int = attrs.field(init=False)
    _room: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: What a connection of the reserve may take.
    _hasty: HttpLimits = attrs.field(init=False)
    #: Clients are asked to bring what is new elsewhere.
    _retiring: bool = False
    _complained_at: float = -math.inf
    _flood_seen: Seldom = attrs.field(factory=lambda: Seldom(COMPLAIN_EVERY))
    _fault_seen: Seldom = attrs.field(factory=lambda: Seldom(COMPLAIN_EVERY))
    #: By the reason.
    _reset_seen: SeldomEach = attrs.field(factory=SeldomEach)
    _stranger_seen: Seldom = attrs.field(factory=lambda: Seldom(COMPLAIN_EVERY))

    def __attrs_post_init__(self) -> None:
        self._config = hypercorn_config(self.limits)
        self._cap = self.limits.connection_cap()
        self._hasty = self.limits.hasty()
        if self._cap < self.limits.max_connections:
            text = "%d connections at once, not %d: the limit of file descriptors is %d (ulimit -n)"
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.warning(text, self._cap, self.limits.max_connections, soft)

    async def close_idle(self) -> int:
        """Close the connections on which no request runs, some at a time; returns how many.

        It costs a connection much more to be cancelled with the server than to be closed, and a
        crowd of them would hold up everybody else meanwhile.
        """
        closed = 0
        for connection in list(self.connections):
            if connection.idle and not connection.guard.closed:
                connection.close()
                closed += 1
                if not closed % AT_ONCE:
                    await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        return closed

    def retire(self) -> None:
        """Ask the clients of HTTP/2 to open new connections for what is new, as they become idle.

        Those of HTTP/1.1 are told by the app, with ``connection: close``.
        """
        self._retiring = True
        for connection in self.connections:
            connection.retire()

    def abort_all(self, reason: str) -> int:
        """Reset all that are left; returns how many."""
        left = list(self.connections)
        for connection in left:
            connection.abort(reason)
        return len(left)

    def statistics(self) -> ServerStatistics:
        busy = sum(not connection.idle for connection in self.connections)
        return ServerStatistics(
            *(len(self.connections), busy, self.accepted, self.reset, self.failed, self.strangers)
        )

    async def accept_from(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Accept until cancelled; each connection becomes a task in ``nursery``."""
        async with listener:
            while True:
                stream = await self._accept(listener)
                if stream is not None:
                    reserve = await self._make_room(stream)
                    nursery.start_soon(self._serve, self._take(stream, reserve=reserve))

    async def serve_stream(self, stream: Carrier) -> None:
        """Serve one connection to its end. Never raises an :class:`Exception`."""
        await self._serve(self._take(stream))

    def _take(self, stream: Carrier, *, reserve: bool = False) -> Connection:
        limits = self._hasty if reserve else self.limits
        connection = Connection(self._guard(stream, limits), limits, reserve=reserve)
        connection.retiring = self._retiring or reserve
        connection.on_fault = partial(self._tell_fault, connection)
        self.connections.add(connection)
        if reserve:
            self.reserve.add(connection)
        self.accepted += 1
        return connection

    def _guard(self, stream: Carrier, limits: HttpLimits) -> GuardedStream:
        if not isinstance(stream, trio.SocketStream):  # one in memory passes for it
            return self._around(stream, limits)
        keep_alive(stream, self.limits.write_time)
        patient = PatientStream(stream, self.limits.write_time)
        guard = self._around(patient, limits)
        patient.on_progress = guard.progress
        return guard

    def _around(self, carrier: Carrier, limits: HttpLimits) -> GuardedStream:
        if self.tls is None:
            return GuardedStream(carrier, limits)
        secret = TlsStream(carrier, self.tls)
        return TlsGuard(secret, limits, tls=secret)

    async def _serve(self, connection: Connection) -> None:
        try:
            if isinstance(connection.guard, TlsGuard):
                await connection.guard.shake_hands()
            await connection.run(self.app, self._config, self._context)
        except* SentAway as group:
            self.sent_away += 1
            text = "%s was closed: %s"
            self._flood_seen.log(logger, logging.INFO, text, connection, leaf_of(group))
        except* HandshakeFailed as group:
            self.strangers += 1
            text = "a client came to no agreement upon TLS: %s"
            self._stranger_seen.log(logger, logging.INFO, text, group.exceptions[0])
        except* Exception as group:
            self.failed += 1
            if complaint := engine_complaint(group):
                self._tell_fault(connection, complaint)
            else:
                logger.warning("%s ended in an error", connection, exc_info=group)
        finally:
            connection.close()
            self._forget(connection)

    def _tell_fault(self, connection: Connection, complaint: str) -> None:
        # Clients can bring this about at will, and at no cost.
        text = "%s takes no answer: %s"
        self._fault_seen.log(logger, logging.INFO, text, connection, complaint)

    def _forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.reserve.discard(connection)
        self.reset += connection.guard.was_reset
        self._room.unpark_all()
        # One that was never asked anything is of no interest: there may be crowds of those.
        why = connection.guard.why_lost or ""
        if connection.guard.was_reset and connection.served:
            self._reset_seen.log(why, logger, logging.INFO, "%s was reset: %s", connection, why)
        else:
            logger.debug("%s is over: %s", connection, why)

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

    async def _make_room(self, newcomer: trio.SocketStream) -> bool:
        """Wait until there is room. Returns whether that is in the reserve."""
        try:
            while len(self.connections) - len(self.reserve) >= self._cap and not self._evict():
                if self._has_reserve():
                    return True
                with trio.move_on_after(RETRY_ACCEPT):  # an upload may lose its grace meanwhile
                    await self._room.park()
        except trio.Cancelled:
            newcomer.socket.close()
            raise
        return False

    def _has_reserve(self) -> bool:
        if len(self.reserve) < self.limits.reserved_connections:
            return True
        idle = [one for one in self.reserve if one.idle and not one.guard.closed]
        if idle:
            min(idle, key=lambda connection: connection.idle_since).close()
        return bool(idle)

    def _evict(self) -> bool:
        """Close the one that has been idle, or uploading, or stalled for longest; if any is."""
        left = [c for c in self.connections - self.reserve if not c.guard.closed]
        if idle := [c for c in left if c.idle]:
            min(idle, key=lambda connection: connection.idle_since).close()
            return True
        # Or a crowd of half-sent requests, or of answers that nobody takes, would keep even
        # /live from being answered.
        now = trio.current_time()
        if uploading := [c for c in left if c.uploading and c.busy_since <= now - UPLOAD_GRACE]:
            min(uploading, key=lambda connection: connection.busy_since).close()
            return True
        worst = min(left, key=lambda connection: connection.stalled_since, default=None)
        if worst is not None and worst.stalled_since <= now - self.limits.stall_time:
            worst.abort("the client takes nothing, and others want its place")
            return True
        self._ask_to_leave(left, now - self.limits.quiet_time)
        return False  # it says farewell first

    def _ask_to_leave(self, left: Sequence[Connection], before: float) -> None:
        """Let the one whose sessions have been idle for longest go, one at a time."""
        if left and not any(connection.asked_to_leave for connection in left):
            quietest = min(left, key=lambda connection: connection.quiet_since)
            if quietest.quiet_since <= before:
                quietest.ask_to_leave()


def leaf_of(error: BaseException) -> BaseException:
    """The first that is no group, in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def serve_http(
    app: App,
    listeners: Sequence[trio.SocketListener],
    *,
    limits: HttpLimits | None = None,
    tls: ssl.SSLContext | None = None,
    task_status: trio.TaskStatus[HttpServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` on ``listeners`` until cancelled, and close the listeners then.

    With ``tls`` (:func:`dynamo_trio.http.tls.server_context`) they speak nothing but TLS.

    An :class:`Exception` in a connection ends that connection and is logged.
    """
    server = HttpServer(app, limits or HttpLimits(), tls)
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
