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
from dynamo_trio.plane.abc import Traffic
from dynamo_trio.wire.dynamo.receiver import Closed
from dynamo_trio.wire.dynamo.request_plane import RequestClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.plane.tcp.settings import TcpSettings
    from dynamo_trio.wire.dynamo.ack import Ack
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
    #: Nobody waits for it any more.
    abandoned: bool = False
    #: It failed, and the worker has most likely not seen it.
    stale: bool = False
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
        if self._ack is None:
            raise self._error or CannotConnect()
        return self._ack

    def acknowledge(self, ack: Ack) -> None:
        self._ack = ack
        self._done.set()

    def fail(self, error: DynamoException) -> None:
        self._error = error
        self._done.set()

    def may_be_stale(self, acks: int) -> bool:
        """May the worker have closed before it saw this? ``acks``: how many came in all."""
        return self._follows and acks == self._acks_before


@attrs.define(eq=False)
class Pipeline:
    """One connection; :meth:`run` is its task, and makes it. ``peer`` names it in the log."""

    _dial: Dial
    _settings: TcpSettings
    peer: str
    _traffic: Traffic = attrs.field(factory=Traffic)
    _client: RequestClient = attrs.field(init=False)
    _queue: deque[Sending] = attrs.field(factory=deque)
    #: Written and not acknowledged, and when each must have been. Oldest first.
    _owed: deque[tuple[Sending, float]] = attrs.field(factory=deque)
    #: Bytes of payloads in the queue, and of those that are just being written.
    _queued: int = 0
    _writing: int = 0
    _acks: int = 0
    _used: bool = False
    #: Invariant: once True no request is queued any more.
    closed: bool = False
    #: What the end of the connection means to a request that is outstanding.
    _error: DynamoException = attrs.field(
        factory=lambda: CannotConnect("the request plane was closed")
    )
    _ended_by_worker: bool = False
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
        return full or self._queued + self._writing > CROWDED

    def put(self, frame: RequestFrame) -> Sending:
        """Queue a request. The connection must not be closed."""
        sending = Sending(frame, self._used, self._acks)
        self._used = True
        self._queue.append(sending)
        self._queued += len(frame.payload)
        self._more.unpark()
        return sending

    def close(self) -> None:
        """Close it as soon as possible; what is outstanding fails."""
        self.closed = True
        self._watch.cancel("nobody needs the connection")

    async def run(self) -> None:
        """Connect, and carry requests until the connection ends, hangs, idles or is closed."""
        try:
            with self._watch:
                await self._connect_and_carry()
            if self._watch.cancelled_caught and self._owed and not self.closed:
                logger.warning("the worker at %s acknowledges nothing", self.peer)
                self._error = ConnectionTimeout("the worker did not acknowledge in time")
        except* Exception as group:
            logger.error("a connection ended in a mistake of ours", exc_info=group)
        finally:
            self._end()

    async def _connect_and_carry(self) -> None:
        try:
            transport = await self._dial()
        except OSError as exc:
            logger.info("no connection to the worker at %s: %s", self.peer, exc)
            self._error = CannotConnect("the worker cannot be reached")
            return
        try:
            await self._carry(transport)
        finally:
            await trio.aclose_forcefully(transport)

    async def _carry(self, transport: trio.abc.Stream) -> None:
        self._set_deadline()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, transport)
            try:
                await self._read(transport)
                self._ended_by_worker = True
                self._error = CannotConnect("the worker closed the connection")
            except RemoteProtocolError as exc:
                logger.warning("the worker at %s: %s", self.peer, exc)
                self._error = exc
            self.closed = True
            nursery.cancel_scope.cancel("the connection has ended")

    def _end(self) -> None:
        self.closed = True
        for sending in (*(owed for owed, _ in self._owed), *self._queue):
            sending.stale = self._ended_by_worker and sending.may_be_stale(self._acks)
            sending.fail(self._error)
            self._traffic.errors += not sending.stale  # else it is sent once more
        self._owed.clear()
        self._queue.clear()

    def _set_deadline(self) -> None:
        """That of the oldest frame that is owed an acknowledgement, or that of being idle."""
        if self._owed:
            self._watch.deadline = self._owed[0][1]
        elif self._queue or self._writing:
            self._watch.deadline = math.inf  # the writer sets it
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
                    self._traffic.sent += len(data)
                self._writing = 0
                self._set_deadline()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader hears what the worker has still said, and then the end

    def _take(self) -> bytes:
        """Frames of the queue as bytes, each now owed an acknowledgement."""
        parts: list[bytes] = []
        while self._queue and self._writing < BATCH:
            sending = self._queue.popleft()
            self._queued -= len(sending.frame.payload)
            if not sending.abandoned:
                self._writing += len(sending.frame.payload)
                parts += self._encode(sending)
        self._set_deadline()
        return parts[0] if len(parts) == 1 else b"".join(parts)

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
            data = await _receive(transport)
            self._traffic.received += len(data)
            self._client.receive_data(data)
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
