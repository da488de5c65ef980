"""One connection to a worker, on which many requests are under way.

Theory of operation
-------------------
Requests wait in a queue that one task writes from, so whoever gives up while waiting never
leaves half a frame behind. An acknowledgement has no name on it: it belongs to the oldest
frame that has none, also when nobody waits for that one any more.

One deadline watches the connection. While a frame has no acknowledgement it is the oldest
one's; then the worker hangs, and every request on the connection fails, since their
acknowledgements could only come behind it. Without such a frame it ends an idle connection.

A worker may close an idle connection at any moment, also just when a request is sent. So a
request that fails together with its connection is marked ``stale`` if it may never have been
seen: it was not the first, and nothing was acknowledged since it was queued.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import (
    CannotConnect,
    ConnectionTimeout,
    DynamoException,
    RemoteProtocolError,
)
from dynamo_trio.wire.dynamo.ack import Ack
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.request_plane import RequestClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.plane.tcp.settings import TcpSettings
    from dynamo_trio.wire.dynamo.request_frame import RequestFrame

    #: Opens a connection, within its own limit, or raises OSError.
    Dial = Callable[[], Awaitable[trio.abc.Stream]]

logger = logging.getLogger("dynamo_trio.plane.tcp")

#: Bytes of frames that are written in one go.
BATCH = 64 * 1024
#: Bytes waiting to be written above which the next request had better go elsewhere.
CROWDED = 256 * 1024
#: Bytes a second at which a large frame must at least get away, beside the time for its ack.
SLOWEST_UPLOAD = 2**20


@attrs.define(eq=False)
class Sending:
    """A request on its way to its acknowledgement."""

    frame: RequestFrame
    #: Not the first on its connection, and how many acknowledgements had come before it.
    _follows: bool
    _acks_before: int
    stale: bool = False
    abandoned: bool = False
    _ack: Ack | None = None
    _error: DynamoException | None = None
    _done: trio.Event = attrs.field(factory=trio.Event)

    async def wait(self) -> Ack:
        """The acknowledgement. Whoever stops waiting has abandoned the request.

        Raises:
            DynamoException: there will be none.
        """
        try:
            await self._done.wait()
        finally:
            self.abandoned = True
        if self._error is not None:
            raise self._error
        assert self._ack is not None
        return self._ack

    def acknowledge(self, ack: Ack) -> None:
        self._ack = ack
        self._done.set()

    def fail(self, error: DynamoException) -> None:
        self._error = error
        self._done.set()

    def lose(self, error: DynamoException, acks: int) -> None:
        """Its connection ended."""
        self.stale = self._follows and acks == self._acks_before
        self.fail(error)


@attrs.define(eq=False)
class RequestConnection:
    """One connection; :meth:`run` is its task, and makes it. ``peer`` names it in messages."""

    _dial: Dial
    _settings: TcpSettings
    peer: str
    _client: RequestClient = attrs.field(init=False)
    _queue: deque[Sending] = attrs.field(factory=deque)
    #: Written and not acknowledged, and when each must have been. Oldest first.
    _owed: deque[tuple[Sending, float]] = attrs.field(factory=deque)
    _queued_bytes: int = 0
    _acks: int = 0
    #: Invariant: False until the first request is queued.
    _used: bool = False
    closed: bool = False
    _watch: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _more: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self._client = RequestClient(limit=self._settings.max_message)

    @property
    def outstanding(self) -> int:
        """Requests without an acknowledgement."""
        return len(self._queue) + len(self._owed)

    @property
    def is_crowded(self) -> bool:
        """Should the next request go elsewhere?"""
        full = self.outstanding >= self._settings.channel_buffer
        return full or self._queued_bytes > CROWDED

    def put(self, frame: RequestFrame) -> Sending:
        """Queue a request. The connection must not be closed."""
        sending = Sending(frame, self._used, self._acks)
        self._used = True
        self._queue.append(sending)
        self._queued_bytes += len(frame.payload)
        self._more.unpark()
        return sending

    def close(self) -> None:
        """Close it as soon as possible; what is outstanding fails."""
        self.closed = True
        self._watch.cancel("nobody needs the connection")

    async def run(self) -> None:
        """Connect, and carry requests until the connection ends, hangs, idles or is closed."""
        error: DynamoException = CannotConnect("the request plane was closed")
        try:
            transport = await self._dial()
            try:
                error = await self._carry(transport)
            finally:
                await trio.aclose_forcefully(transport)
        except OSError as exc:
            logger.info("no connection to %s: %s", self.peer, exc)
            error = CannotConnect("the worker cannot be reached")
        finally:
            self._end(error)

    def _end(self, error: DynamoException) -> None:
        self.closed = True
        for sending in (*(owed for owed, _ in self._owed), *self._queue):
            sending.lose(error, self._acks)
        self._owed.clear()
        self._queue.clear()

    async def _carry(self, transport: trio.abc.Stream) -> DynamoException:
        """Returns what its end means to the requests that are outstanding."""
        error: DynamoException = CannotConnect("the worker closed the connection")
        with self._watch:
            self._set_deadline()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, transport)
                try:
                    await self._read(transport)
                except RemoteProtocolError as exc:
                    logger.warning("worker at %s: %s", self.peer, exc)
                    error = exc
                nursery.cancel_scope.cancel("the worker closed the connection")
        if self._watch.cancelled_caught and self.outstanding and not self.closed:
            logger.warning("the worker at %s acknowledges nothing", self.peer)
            error = ConnectionTimeout("the worker did not acknowledge the request in time")
        return error

    def _set_deadline(self) -> None:
        """Of the oldest frame that is owed an acknowledgement, or of being idle."""
        if self._owed:
            self._watch.deadline = self._owed[0][1]
        elif self._queue:
            self._watch.deadline = math.inf  # the writer is about to take it
        else:
            self._watch.deadline = trio.current_time() + self._settings.host_idle

    # --- out ------------------------------------------------------------------------------

    async def _write(self, transport: trio.abc.Stream) -> None:
        try:
            while True:
                while not self._queue:
                    await self._more.park()
                if data := self._take():
                    await transport.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader gets what the worker has still said, and then the end

    def _take(self) -> bytes:
        """Frames of the queue as bytes, each now owed an acknowledgement."""
        parts: list[bytes] = []
        size = 0
        while self._queue and size < BATCH:
            sending = self._queue.popleft()
            self._queued_bytes -= len(sending.frame.payload)
            if not sending.abandoned:
                parts += self._encode(sending)
                size += len(sending.frame.payload)
        self._set_deadline()
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def _encode(self, sending: Sending) -> list[bytes]:
        try:
            data = self._client.send(sending.frame)
        except DynamoException as exc:  # the request's own fault
            sending.fail(exc)
            return []
        limit = self._settings.ack_time + len(data) / SLOWEST_UPLOAD
        self._owed.append((sending, trio.current_time() + limit))
        return [data]

    # --- in -------------------------------------------------------------------------------

    async def _read(self, transport: trio.abc.Stream) -> None:
        while True:
            self._client.receive_data(await _receive(transport))
            while (event := self._client.next_event()) is not None:
                if isinstance(event, Closed):
                    return
                self._acks += 1
                sending, _ = self._owed.popleft()
                sending.acknowledge(event)
            self._set_deadline()


async def _receive(transport: trio.abc.Stream) -> bytes | bytearray:
    try:
        return await transport.receive_some()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return b""
