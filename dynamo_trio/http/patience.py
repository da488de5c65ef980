"""Does a client that is slow still take anything?

A socket that is full says nothing until a good part of its buffer is free again, which a slow
reader may need minutes for. What the kernel still keeps for the client (Linux: ``SIOCOUTQ``,
bytes that are not acknowledged) falls with the first segment that it takes. So a blocked send
looks at that now and then, and only a client for which it has not fallen in all of
``write_time`` counts as stuck.

A receiver opens its window in steps, of a segment or a sixteenth of its buffer (RFC 9293,
3.8.6.2.2): who reads less than that in ``write_time`` cannot be told from one that reads nothing.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

#: How often a blocked send looks, within the time that it has.
LOOKS = 4
CHUNK = 64 * 1024


def kept_for(sock: trio.socket.SocketType) -> int | None:
    """Bytes that the other end has not acknowledged; None where nobody can say."""
    if sys.platform != "linux" or sock.fileno() < 0:
        return None
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return None


@attrs.define(eq=False)
class Patience:
    """Of one blocked send. Made when it begins."""

    _socket: trio.socket.SocketType
    #: Seconds that the client may take nothing.
    limit: float
    #: When it last took something, by Trio's clock.
    _since: float = attrs.field(factory=trio.current_time)
    _kept: int | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._kept = kept_for(self._socket)

    @property
    def next_look(self) -> float:
        """When to look again, by Trio's clock."""
        over = self._since + self.limit
        return min(over, trio.current_time() + self.limit / LOOKS)

    @property
    def is_over(self) -> bool:
        return trio.current_time() >= self._since + self.limit

    def look(self) -> bool:
        """Has the client taken something since the last look, or since the last send?"""
        before, self._kept = self._kept, kept_for(self._socket)
        if before is None or self._kept is None or self._kept >= before:
            return False
        self._since = trio.current_time()
        return True

    def sent(self) -> None:
        """The socket has taken more."""
        self._since, self._kept = trio.current_time(), kept_for(self._socket)


@attrs.define(eq=False)
class PatientStream:
    """A socket stream of which a blocked send tells that the client still takes something."""

    _stream: trio.SocketStream
    #: Given to each :class:`Patience`.
    _limit: float
    #: Called synchronously, while a send is blocked.
    on_progress: Callable[[], object] = lambda: None
    socket: trio.socket.SocketType = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.socket = self._stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As a socket stream does, but it waits first: who reads all the time finds nothing."""
        while True:
            try:
                await trio.lowlevel.wait_readable(self.socket)
                return os.read(self.socket.fileno(), max_bytes or CHUNK)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise trio.BrokenResourceError("the connection is lost") from exc

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send; one at a time. It has no end of its own: the caller cancels it.

        Raises:
            trio.BrokenResourceError: the client has gone.
            trio.ClosedResourceError: the connection was closed on this side.
        """
        try:
            with memoryview(data) as view:
                await self._push(view)
        except OSError as exc:
            raise trio.BrokenResourceError("the client has gone") from exc

    def send_now(self, data: bytes | memoryview) -> int:
        """Send what the socket takes at once; returns how much that is.

        Raises:
            trio.BrokenResourceError: the client has gone.
            trio.ClosedResourceError: the connection was closed on this side.
        """
        try:
            return self._send_now(data)
        except OSError as exc:
            raise trio.BrokenResourceError("the client has gone") from exc

    async def _push(self, view: memoryview) -> None:
        await trio.lowlevel.checkpoint()
        at = self._send_now(view)
        if at == len(view):
            return
        patience = Patience(self.socket, self._limit)
        while at < len(view):
            with trio.CancelScope(deadline=patience.next_look) as waited:
                at += await self.socket.send(view[at:])
            if not waited.cancelled_caught:
                patience.sent()
            if not waited.cancelled_caught or patience.look():
                self.on_progress()

    def _send_now(self, view: bytes | memoryview) -> int:
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError("the connection was closed")
        try:
            return os.write(self.socket.fileno(), view)
        except BlockingIOError:
            return 0
