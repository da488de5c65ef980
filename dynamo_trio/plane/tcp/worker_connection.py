"""One client's connection to a worker: requests in, acknowledgements out, in their order.

The answers do not travel here (:mod:`dynamo_trio.plane.tcp.call_home`), so what happens to
this connection ends no request that was accepted. An idle connection may stay open for ever;
a frame that has begun must be whole in time, and so must an acknowledgement be taken.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

import attrs
import trio

from dynamo_trio.errors import MessageTooLarge, RemoteProtocolError
from dynamo_trio.plane.net.tls import explain
from dynamo_trio.wire.dynamo.ack import ACCEPTED, refusal
from dynamo_trio.wire.dynamo.request_frame import RequestFrame
from dynamo_trio.wire.dynamo.request_plane import RequestServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.plane.tcp.settings import TcpSettings
    from dynamo_trio.wire.dynamo.ack import Ack

logger = logging.getLogger("dynamo_trio.plane.tcp")

#: Bytes that are read at once.
PIECE: Final = 64 * 1024
#: Requests that are answered before other tasks get their turn.
BATCH: Final = 32
#: Seconds for which the rest of a message that is too large is read away, so that a reset does
#: not overtake its refusal.
READ_AWAY: Final = 1.0


@attrs.define(eq=False)
class WorkerConnection:
    """``answer`` decides on each request; it is called in the order in which they came."""

    _stream: trio.abc.Stream
    _answer: Callable[[RequestFrame], Ack]
    _settings: TcpSettings
    #: Called when a request of it was accepted.
    _on_accepted: Callable[[], object] = lambda: None
    #: Who it is, for the log.
    _peer: str = "an unknown peer"
    _wire: RequestServer = attrs.field(init=False)
    #: Its deadline is that of the frame or acknowledgement that is under way.
    _limit: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    #: Invariant: once set no frame is read any more; it says why, or is empty.
    _end: str | None = None
    #: A message was refused before all of it had come.
    _cut_short: bool = False

    def __attrs_post_init__(self) -> None:
        self._wire = RequestServer(limit=self._settings.max_message)

    async def run(self) -> None:
        """Serve until the client closes. A fault of the client ends it, and is logged."""
        with self._limit:
            try:
                await self._serve()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._end = ""  # whoever sent these requests hears of them elsewhere
        if self._limit.cancelled_caught:
            self._end = f"a frame or acknowledgement took over {self._settings.frame_time:g} s"
        if self._end:
            logger.warning("a request connection from %s is closed: %s", self._peer, self._end)

    async def _serve(self) -> None:
        while self._end is None:
            self._wire.receive_data(await self._stream.receive_some(PIECE))
            while acks := self._take():
                self._limit.deadline = trio.current_time() + self._settings.frame_time
                await self._stream.send_all(acks)
                self._limit.deadline = math.inf  # what follows belongs to another frame
            self._rearm()
        if self._cut_short:
            await self._read_away()

    def _take(self) -> bytes:
        """Answer requests that are there; empty when there is none."""
        acks: list[bytes] = []
        try:
            while self._end is None and len(acks) < BATCH:
                event = self._wire.next_event()
                if isinstance(event, RequestFrame):
                    acks.append(self._wire.send(self._decide(event)))
                elif event is None:
                    break
                else:
                    self._end = "it ended inside a frame" if event.inside else ""
        except MessageTooLarge as exc:
            self._end, self._cut_short = str(exc), True
            acks.append(self._wire.send(refusal(exc)))
        except RemoteProtocolError as exc:
            self._end = explain(exc)
        return b"".join(acks)

    def _decide(self, frame: RequestFrame) -> Ack:
        ack = self._answer(frame)
        if ack is ACCEPTED:
            self._on_accepted()
        return ack

    def _rearm(self) -> None:
        """A frame's time runs from its first byte, however many pieces it comes in."""
        if not self._wire.buffered:
            self._limit.deadline = math.inf
        elif self._limit.deadline == math.inf:
            self._limit.deadline = trio.current_time() + self._settings.frame_time

    async def _read_away(self) -> None:
        with trio.move_on_after(READ_AWAY):
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
            while await self._stream.receive_some(PIECE):
                pass
