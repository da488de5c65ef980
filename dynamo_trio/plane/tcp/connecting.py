"""Getting connections, accepted or dialled; what both sides of the ``tcp`` plane share."""

from __future__ import annotations

import contextvars
import errno
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.errors import ConfigError, PortInUse
from dynamo_trio.plane.tcp.tls import greet

if TYPE_CHECKING:
    import ssl

    from dynamo_trio.plane.tcp.settings import TcpSettings
    from dynamo_trio.wire.dynamo.addresses import HostPort

logger = logging.getLogger("dynamo_trio.plane.tcp")

BACKLOG = 1024
#: What accept(2) says when the machine or the process has no room for one more.
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
#: Seconds until accepting or dialling is tried again then, and between two log lines about it.
RETRY_ACCEPT, COMPLAIN_EVERY = 0.1, 10.0
#: Connections to one address that may be under way at once. Peers name addresses, also such as
#: never answer, and must not take all descriptors by it.
MAX_DIALS = 64
#: Threads in which names are looked up. A name comes from a peer, and its server may hang: the
#: threads in which everything else reads its files must not wait for it.
LOOKUPS = 8
#: Connections of one listener on which nothing of use was said yet.
MAX_LOBBY = 512
#: Seconds without data until the kernel asks a peer whether it is still there, seconds between
#: two questions, and unanswered questions until it is taken for dead.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


def start_apart(nursery: trio.Nursery, task: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Start what outlives the request that needs it first, so that no log line names that one.

    Raises:
        RuntimeError: the nursery is closed.
    """
    contextvars.Context().run(nursery.start_soon, task, *args)


async def open_listener(host: str, port: int, setting: str) -> trio.SocketListener:
    """Listen on one address; ``setting`` is the variable that named it, without HOST or PORT.

    Raises:
        PortInUse: another process has the port, or it may not be bound.
        ConfigError: the host is unknown, or an address of another machine.
    """
    try:
        first, *others = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except (OSError, UnicodeError) as exc:  # UnicodeError: no name could look like that
        if isinstance(exc, OSError) and exc.errno in (errno.EADDRINUSE, errno.EACCES):
            why = os.strerror(exc.errno)
            raise PortInUse(f"cannot listen on {host}:{port} ({setting}PORT): {why}") from exc
        raise ConfigError(
            f"cannot listen on {host!r} ({setting}HOST): must be an address of this machine,"
            " or one of its network interfaces"
        ) from exc
    for other in others:
        await other.aclose()
    return first


#: Serves a connection; what is given with it is called when its peer has shown to be one of ours.
Serve = Callable[[trio.SocketStream, Callable[[], None]], Awaitable[None]]


@attrs.define(eq=False)
class Lobby:
    """The connections of one listener whose peers have yet to show what they are.

    A crowd that connects and says nothing of use must not take all descriptors of the process:
    when there are too many, the one that has waited for longest is closed.
    """

    #: Oldest first.
    _waiting: dict[trio.CancelScope, None] = attrs.field(factory=dict)
    _complaint: Seldom = attrs.field(factory=lambda: Seldom(COMPLAIN_EVERY))

    def enter(self, connection: trio.CancelScope) -> None:
        """It has come; cancelling the scope closes it."""
        self._waiting[connection] = None
        if len(self._waiting) > _room():
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.cancel("there are too many like it")
            self._complaint.log(
                logger,
                logging.WARNING,
                "over %d connections on which nothing of use was said; the oldest are closed",
                len(self._waiting),
            )

    def leave(self, connection: trio.CancelScope) -> None:
        """It has ended, or its peer is one of ours."""
        self._waiting.pop(connection, None)


def _room() -> int:
    """A share of the descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_LOBBY if soft == resource.RLIM_INFINITY else min(MAX_LOBBY, max(1, soft // 8))


async def accept_connections(
    listener: trio.SocketListener, serve: Serve, nursery: trio.Nursery
) -> None:
    """Accept until cancelled; each connection becomes a task in ``nursery``, and is closed there.

    Having no room for one more is waited out. What ``serve`` raises ends its own connection,
    and is logged: it is our mistake, since a peer's fault is no exception there.
    """
    complaint, lobby = Seldom(COMPLAIN_EVERY), Lobby()
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as exc:
                if exc.errno not in NO_ROOM:
                    raise
                why = os.strerror(exc.errno or 0)
                complaint.log(logger, logging.ERROR, "cannot accept connections: %s", why)
                await trio.sleep(RETRY_ACCEPT)
            else:
                nursery.start_soon(_contain, stream, serve, lobby)


async def _contain(stream: trio.SocketStream, serve: Serve, lobby: Lobby) -> None:
    with trio.CancelScope() as scope:
        try:
            lobby.enter(scope)
            keep_alive(stream)
            await serve(stream, partial(lobby.leave, scope))
        except* Exception as group:
            logger.error("a connection ended in a mistake of ours", exc_info=group)
        finally:
            lobby.leave(scope)
            stream.socket.close()


def peer_of(stream: trio.SocketStream) -> str:
    """Who is at the other end, for the log."""
    try:
        host, port, *_ = stream.socket.getpeername()
    except OSError:  # it has left already
        return "a peer that has left"
    return f"{host}:{port}"


async def dial(
    address: HostPort, context: ssl.SSLContext | None, settings: TcpSettings
) -> trio.abc.Stream:
    """Connect, within ``connect_time``, and shake hands if there is a context.

    Raises:
        OSError: nobody there, not in time, or no handshake.
    """
    with trio.move_on_after(settings.connect_time) as scope:
        async with _turn(address):
            stream = await _connect_once_there_is_room(address, settings.connect_time)
    if scope.cancelled_caught:
        raise ConnectionError(f"not connected within {settings.connect_time:g} s")
    keep_alive(stream)
    if context is None:
        return stream
    name = settings.tls.server_name or address.host
    try:
        return await greet(stream, context, name, settings.tls.handshake_time)
    except (ValueError, TypeError) as exc:  # no certificate could name such a host
        stream.socket.close()
        raise ConnectionError(f"no certificate names {name[:100]!r}") from exc
    except BaseException:
        stream.socket.close()
        raise


_dialled: trio.lowlevel.RunVar[dict[HostPort, trio.CapacityLimiter]] = trio.lowlevel.RunVar(
    "dialled"
)


@asynccontextmanager
async def _turn(address: HostPort) -> AsyncIterator[None]:
    """While the block runs this is one of the few that dial the address."""
    try:
        dialled = _dialled.get()
    except LookupError:
        _dialled.set(dialled := {})
    limiter = dialled.setdefault(address, trio.CapacityLimiter(MAX_DIALS))
    try:
        async with limiter:
            yield
    finally:
        use = limiter.statistics()
        if not use.borrowed_tokens and not use.tasks_waiting and dialled.get(address) is limiter:
            del dialled[address]


async def _connect_once_there_is_room(address: HostPort, limit: float) -> trio.SocketStream:
    """A crowd may have taken all descriptors; whoever is dialled has no other way to hear of us."""
    while True:
        try:
            return await _connect(address, limit)
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
        await trio.sleep(RETRY_ACCEPT)


async def _connect(address: HostPort, limit: float) -> trio.SocketStream:
    numeric = _family(address.host)
    if numeric is not None:  # as nearly every address is: no look-up, no choice
        return await _connect_to(numeric, (address.host, address.port), "")
    places = await _look_up(address)
    for family, place in places[:-1]:
        with trio.move_on_after(limit / len(places)), suppress(OSError):
            return await _connect_to(family, place, f" at {place[0]}")
    family, place = places[-1]
    return await _connect_to(family, place, f" at {place[0]}")


async def _connect_to(family: int, place: Any, where: str) -> trio.SocketStream:
    """``where``: what the error says of the place, if that is not known from the address."""
    raw = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await raw.connect(place)
    except OSError as exc:
        raw.close()
        raise OSError(exc.errno, os.strerror(exc.errno or 0) + where) from exc
    except BaseException:
        raw.close()
        raise
    return trio.SocketStream(raw)


_lookups: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("lookups")


async def _look_up(address: HostPort) -> list[tuple[int, Any]]:
    """The addresses behind a name, each with its family; there is at least one."""
    try:
        limiter = _lookups.get()
    except LookupError:
        _lookups.set(limiter := trio.CapacityLimiter(LOOKUPS))
    ask = partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM)
    try:
        found = await trio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=limiter)
    except ValueError as exc:  # no name could look like that; a UnicodeError is one too
        raise ConnectionError(f"no host is called {address.host[:100]!r}") from exc
    return [(family, place) for family, _, _, _, place in found]


def _family(host: str) -> socket.AddressFamily | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return family
    return None


def keep_alive(stream: trio.SocketStream) -> None:
    """Let the kernel notice a peer whose machine is gone, while nothing is said."""
    with suppress(OSError):  # the peer has left already, as whoever uses the stream will see
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            stream.setsockopt(socket.IPPROTO_TCP, option, value)
