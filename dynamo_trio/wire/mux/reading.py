"""Frames out of bytes, and long messages out of their parts.

Theory of operation
-------------------
A frame is measured by its announced length before any of it is kept, so at most one frame
and the piece that came last are held. A message in parts is kept in one growing buffer (never
as a list of pieces, which could be one byte each), there is only one at a time, and its
stream's end does not free the place: its sender says DROP. What belongs to a stream that has
ended here meanwhile is counted and not kept.
"""

from __future__ import annotations

from typing import NoReturn

from attrs import define, field

from dynamo_trio.errors import MessageTooLarge, RemoteProtocolError
from dynamo_trio.wire.dynamo.receiver import Receiver, may_be_stranger, stranger
from dynamo_trio.wire.mux.frames import HEAD, Frame, decode
from dynamo_trio.wire.mux.limits import MAGIC, MAX_FRAME

#: Bytes of the length; HEAD is the length and the type, which is counted in it.
LENGTH = 4


class Ignored:
    """In place of a frame that nobody here knows, and that may be ignored."""


class FrameReader(Receiver[Frame | Ignored]):
    """Reads the magic and then frames."""

    def __init__(self) -> None:
        super().__init__(limit=LENGTH + MAX_FRAME)
        #: Has the magic come?
        self.greeted = False

    def _parse(self) -> Frame | Ignored | None:
        if not self.greeted and not self._greet():
            return None
        buffered = len(self._buffer)
        if buffered < HEAD.size:
            return None
        size, kind = HEAD.unpack_from(self._buffer)
        if not 0 < size <= MAX_FRAME:
            self._refuse(size)
        if buffered < LENGTH + size:
            return None
        frame = decode(kind, self._take(LENGTH + size)[HEAD.size :])
        return Ignored() if frame is None else frame

    def _greet(self) -> bool:
        begin = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(begin):
            if may_be_stranger(begin):
                return False
            raise stranger(begin) or RemoteProtocolError(
                f"the peer does not speak mux: it began with {begin!r}"
            )
        self.greeted = begin == MAGIC
        if self.greeted:
            del self._buffer[: len(MAGIC)]
        return self.greeted

    def _refuse(self, size: int) -> NoReturn:
        if size > MAX_FRAME:
            raise MessageTooLarge(f"a frame of {size} bytes (max: {MAX_FRAME} bytes)", size=size,
                                  limit=MAX_FRAME)  # fmt: skip
        raise RemoteProtocolError("the peer sent a frame without a type")


@define(eq=False)
class Assembly:
    """The message that arrives in parts."""

    sid: int
    limit: int
    #: Is it an OPEN, whose stream is not there before it is whole?
    opening: bool
    size: int = 0
    data: bytearray = field(factory=bytearray, repr=False)

    def opening_of(self, sid: int) -> bool:
        """Is it the OPEN of this stream?"""
        return self.opening and self.sid == sid

    def add(self, piece: bytes, *, keep: bool) -> None:
        """Take the next piece, which is only counted if its stream has ended.

        Raises:
            MessageTooLarge: the message is above the limit.
        """
        self.size += len(piece)
        if self.size > self.limit:
            raise MessageTooLarge(size=self.size, limit=self.limit)
        if keep:
            self.data += piece
        else:
            self.data = bytearray()
