"""What a session still has to send: fed by calls that never wait, emptied by one task.

Consecutive pieces of one text are joined while they wait: a client that reads slowly gets
fewer and longer deltas, and a long backlog costs one frame.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.http.sinks import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.frontend.realtime.socket import RealtimeSocket


@attrs.define(eq=False)
class Delta:
    """A piece of text that waits; what follows at once is joined to it."""

    encode: Callable[[str], str]  # the text -> the frame
    pieces: list[str] = attrs.field(factory=list)


@attrs.define(eq=False)
class Outbox:
    """Frames in order. Invariant: only :meth:`run` takes them out."""

    _socket: RealtimeSocket
    #: Called synchronously when the source may go on; it was told by ``writable``.
    on_low_water: Callable[[], object] | None = None
    _frames: deque[str | Delta] = attrs.field(factory=deque)
    #: Invariant: the characters in ``_frames``, near enough.
    _size: int = 0
    #: Invariant: from the high-water mark until the low-water mark.
    _paused: bool = False
    _ended: bool = False
    #: There is something for :meth:`run` to do.
    _attention: Wake = attrs.field(factory=Wake)
    _room: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def writable(self) -> bool:
        """Should the source go on? If not, ``on_low_water`` will say when."""
        return not self._paused

    def put(self, frame: str) -> None:
        """Send this as soon as it goes. After the end it is dropped."""
        if not self._ended:
            self._frames.append(frame)
            self._grew(len(frame))

    def delta(self, encode: Callable[[str], str], text: str) -> None:
        """Send a piece of a text, encoded when its turn comes. ``encode`` names the text."""
        if self._ended:
            return
        last = self._frames[-1] if self._frames else None
        if not isinstance(last, Delta) or last.encode is not encode:
            last = Delta(encode)
            self._frames.append(last)
        last.pieces.append(text)
        self._grew(len(text))

    def end(self) -> None:
        """Nothing follows: :meth:`run` returns when all is sent."""
        self._ended = True
        self._attention.set()

    async def wait_room(self) -> None:
        """Wait until the client has taken enough of what is there."""
        while self._paused:
            await self._room.park()
        await trio.lowlevel.checkpoint()

    async def run(self) -> bool:
        """Send until the end. False: the client is gone."""
        while self._frames or not self._ended:
            if not self._frames:
                await self._attention.wait()
            elif not await self._socket.send(self._next()):
                self._drop()
                return False
        return True

    def _next(self) -> str:
        frame = self._frames.popleft()
        if isinstance(frame, str):
            self._shrank(len(frame))
            return frame
        text = "".join(frame.pieces)
        self._shrank(len(text))
        return frame.encode(text)

    def _grew(self, count: int) -> None:
        self._size += count
        self._paused = self._paused or self._size >= self._socket.limits.high_water
        self._attention.set()

    def _shrank(self, count: int) -> None:
        self._size -= count
        if self._paused and self._size <= self._socket.limits.low_water:
            self._paused = False
            self._room.unpark_all()
            if self.on_low_water is not None:
                self.on_low_water()

    def _drop(self) -> None:
        """Nobody reads any more; nobody must wait for it either."""
        self._ended = True
        self._frames.clear()
        self._size, self._paused = 0, False
        self._room.unpark_all()
