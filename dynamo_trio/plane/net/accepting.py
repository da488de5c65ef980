"""Listening, and taking connections: what the planes' listeners share."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from dynamo_trio.console.seldom import Seldom
from dynamo_trio.errors import ConfigError, PortInUse
from dynamo_trio.plane.net.sockets import COMPLAIN_EVERY, NO_ROOM, RETRY_ACCEPT, keep_alive

logger = logging.getLogger("dynamo_trio.plane.net")

BACKLOG = 1024
#: Connections of one listener on which nothing of use was said yet.
MAX_LOBBY = 512


async def open_listener(
    host: str, port: int, setting: str, host_setting: str | None = None
) -> trio.SocketListener:
    """Listen on one address; ``setting`` is the variable that named it, without HOST or PORT.

    ``host_setting``: the whole name of the other variable, if it does not begin alike.

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
            f"cannot listen on {host!r} ({host_setting or setting + 'HOST'}): must be an address"
            " of this machine, or one of its network interfaces"
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
    listener: trio.SocketListener,
    serve: Serve,
    nursery: trio.Nursery,
    *,
    on_no_room: Callable[[], object] = lambda: None,
) -> None:
    """Accept until cancelled; each connection becomes a task in ``nursery``, and is closed there.

    Having no room for one more is told, and waited out. What ``serve`` raises ends its own
    connection, and is logged: it is our mistake, since a peer's fault is no exception there.
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
                on_no_room()
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
