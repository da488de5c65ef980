"""To notice a client whose machine or network is gone."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio

#: Seconds without data until the kernel asks a client whether it is still there, seconds between
#: two questions, and unanswered questions until it is taken for dead.
KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


def keep_alive(stream: trio.SocketStream, write_time: float) -> None:
    """Let the kernel find out about a client that is gone, however little is said to it.

    Where somebody waits for a client to take something, that ends after ``write_time``. The
    kernel waits twice as long, so it decides where nobody waits: what is small leaves at once, and
    may never arrive.
    """
    with suppress(OSError):  # the client has left already, as whoever reads will see
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            _set(stream, name, value)
        _set(stream, "TCP_USER_TIMEOUT", int(1000 * max(60.0, 2 * write_time)))


def _set(stream: trio.SocketStream, name: str, value: int) -> None:
    option = getattr(socket, name, None)
    if option is not None:  # Linux has them all
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
