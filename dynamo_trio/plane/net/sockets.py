"""What accepted and dialled connections share."""

from __future__ import annotations

import contextvars
import errno
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import trio

#: What accept(2) says when the machine or the process has no room for one more.
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
#: Seconds until accepting or dialling is tried again then, and between two log lines about it.
RETRY_ACCEPT, COMPLAIN_EVERY = 0.1, 10.0
#: Seconds without data until the kernel asks a peer whether it is still there, seconds between
#: two questions, and unanswered questions until it is taken for dead.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


def start_apart(nursery: trio.Nursery, task: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Start what outlives the request that needs it first, so that no log line names that one.

    Raises:
        RuntimeError: the nursery is closed.
    """
    contextvars.Context().run(nursery.start_soon, task, *args)


def keep_alive(stream: trio.SocketStream) -> None:
    """Let the kernel notice a peer whose machine is gone, while nothing is said."""
    with suppress(OSError):  # the peer has left already, as whoever uses the stream will see
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            stream.setsockopt(socket.IPPROTO_TCP, option, value)
