"""Frames of a client that no worker has taken yet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from dynamo_trio.frontend.realtime.kept import Frame

#: Dynamo's bound. What the plane and the WebSocket hold comes on top.
MOST_FRAMES = 64
#: Frames of audio may be large: with so many bytes no further one is taken.
MOST_BYTES = 4 * 1024 * 1024


@attrs.define(eq=False)
class Inbox:
    """A bounded queue with one writer and one reader, who looks first and takes later."""

    _frames: deque[Frame] = attrs.field(factory=deque)
    _bytes: int = 0
    _ended: bool = False
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def has_room(self) -> bool:
        """For another frame."""
        return len(self._frames) < MOST_FRAMES and self._bytes < MOST_BYTES

    @property
    def waiting(self) -> bool:
        """Has no worker taken all of it yet?"""
        return bool(self._frames)

    async def wait_room(self) -> None:
        """Wait until another frame is taken."""
        while not self.has_room:
            await self._changed.park()

    def put(self, frame: Frame) -> None:
        """Add a frame. There must be room."""
        self._frames.append(frame)
        self._bytes += frame.size
        self._changed.unpark_all()

    def end(self) -> None:
        """No more come."""
        self._ended = True
        self._changed.unpark_all()

    async def first(self) -> Frame | None:
        """The frame whose turn it is, which stays; None behind the last."""
        while not self._frames and not self._ended:
            await self._changed.park()
        await trio.lowlevel.checkpoint()
        return self._frames[0] if self._frames else None

    def taken(self) -> None:
        """The first frame is on its way."""
        self._bytes -= self._frames.popleft().size
        self._changed.unpark_all()
