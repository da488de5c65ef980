"""The socket below a connection, and what is asked of it past its stream."""

from __future__ import annotations

import os
import select
import socket
import sys
from contextlib import suppress
from typing import Final

import trio

#: Bytes that wait inside the kernel before its buffer counts as full: they delay a PING.
NOT_SENT: Final = 128 * 1024


def socket_below(stream: trio.abc.Stream) -> trio.socket.SocketType | None:
    """The socket that carries the stream, if one does."""
    if isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    return stream.socket if isinstance(stream, trio.SocketStream) else None


def write_now(sock: trio.socket.SocketType, data: bytes) -> int:
    """One write that does not wait; returns how much was taken."""
    try:
        # The descriptor is asked for each time: a closed socket says -1, while a number kept
        # from before may belong to somebody else by now.
        return os.write(sock.fileno(), data)
    except BlockingIOError:
        return 0


def read_now(sock: trio.socket.SocketType, limit: int) -> bytes | None:
    """One read that does not wait; ``b""`` at the end of the stream, None if nothing is there."""
    try:
        return os.read(sock.fileno(), limit)
    except BlockingIOError:
        return None


def is_readable(sock: trio.socket.SocketType) -> bool:
    """Does something lie there that was not read yet, be it the end of the stream?"""
    descriptor = sock.fileno()
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def bound_buffer(sock: trio.socket.SocketType) -> None:
    """A PING waits behind what the kernel has taken, so let it not take megabytes."""
    if sys.platform == "linux":
        with suppress(OSError):  # the peer has left already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT)
