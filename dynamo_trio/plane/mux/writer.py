"""The writer of a mux connection: all that leaves over it.

Theory of operation
-------------------
It sleeps until somebody has said something to the wire and called :meth:`Writer.wake`. It runs
when the task that spoke yields, so all that an engine's step said leaves as one frame, by one
system call that does not wait; only what the socket does not take at once is waited for.

What waits to be sent is bounded: streams by their credit, and all together by the high-water
mark, above which whoever produces items is held back (``congested``) until the low-water mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import trio

from dynamo_trio.plane.mux.kernel import write_now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_trio.plane.mux.settings import MuxSettings
    from dynamo_trio.wire.mux.connection import MuxConnection

#: Bytes that are sent at once. What is said later leaves before the rest of a long message, but
#: behind a piece.
WRITE_PIECE: Final = 64 * 1024
#: All that a stream can raise means the same: the peer is gone.
GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)


@attrs.define(eq=False)
class Writer:
    """:meth:`run` is its task."""

    _stream: trio.abc.Stream
    _wire: MuxConnection
    _settings: MuxSettings
    #: Told which streams have ended by what was sent; when all is sent; when production may go on;
    #: when the peer is gone, and when it takes nothing. After those two nothing is sent any more.
    _on_ends: Callable[[Sequence[int]], None] = attrs.field(kw_only=True)
    _on_sent: Callable[[], None] = attrs.field(kw_only=True)
    _on_flow: Callable[[], None] = attrs.field(kw_only=True)
    _on_gone: Callable[[BaseException], None] = attrs.field(kw_only=True)
    _on_stalled: Callable[[], None] = attrs.field(kw_only=True)
    #: Invariant: from the high-water mark until the low-water mark.
    congested: bool = False
    #: A plain socket, to be written past its stream.
    _socket: trio.socket.SocketType | None = attrs.field(init=False, default=None)
    _waits: bool = False
    _work: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: Where one waits until something has been sent.
    sent: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        if isinstance(self._stream, trio.SocketStream):
            self._socket = self._stream.socket

    def wake(self) -> None:
        """Something was said to the wire. Costs next to nothing if it is known already."""
        if self._waits:
            self._waits = False
            self._work.unpark()

    def look(self) -> None:
        """As :meth:`wake`, if there is something to send, and see whether that is too much."""
        if self._wire.wants_to_send:
            self.wake()
            if not self.congested and self._wire.backlog >= self._settings.high_water:
                self.congested = True

    async def run(self) -> None:
        """Send, until the peer takes no more."""
        wire = self._wire
        while True:
            while wire.wants_to_send:
                data = wire.data_to_send(WRITE_PIECE)
                if data and not await self._send(data):
                    self.sent.unpark_all()
                    return
                if wire.ends:
                    self._on_ends(wire.ends)
                self.sent.unpark_all()
                if self.congested and wire.backlog <= self._settings.low_water:
                    self.congested = False
                    self._on_flow()
            self._on_sent()
            self._waits = True
            await self._work.park()

    async def _send(self, data: bytes) -> bool:
        """False: the peer takes no more."""
        try:
            if self._socket is not None and (sent := write_now(self._socket, data)):
                if sent == len(data):
                    if sent >= WRITE_PIECE:
                        await trio.lowlevel.checkpoint()
                    return True
                data = data[sent:]
            with trio.move_on_after(self._settings.stall_time) as stalled:
                await self._stream.send_all(data)
        except GONE as exc:
            self._on_gone(exc)
            return False
        if stalled.cancelled_caught:
            self._on_stalled()
            return False
        return True
