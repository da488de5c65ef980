"""To hear of a client that leaves while nothing of it is read."""

from __future__ import annotations

import select
import sys
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from dynamo_trio.http.connection import Exchange


async def wait_departed(exchange: Exchange | None) -> None:
    """Wait until the client has closed or reset its connection, whatever is unread before that.

    Back-pressure keeps the connection from being read to its end, where a client that leaves is
    noticed otherwise. The kernel knows of the end before: a second epoll asks for just that.
    Where there is none (on another system than Linux, in memory, under a foreign server) this
    waits for ever.
    """
    if exchange is None or sys.platform != "linux" or not exchange.connection.guard.has_descriptor:
        await trio.sleep_forever()
    with select.epoll() as ends:
        ends.register(exchange.connection.guard.socket.fileno(), select.EPOLLRDHUP)
        await trio.lowlevel.wait_readable(ends.fileno())
