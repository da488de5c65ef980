"""Both ends of a request connection: frames one way, acknowledgements the other.

Theory of operation
-------------------
Requests are pipelined: a client may send many before the first is acknowledged. An
acknowledgement has no name on it, so its place in the order is all that joins it to its
request: the server must answer in the order in which frames came, and each side counts.

A frame that is too large still gets its refusal: :class:`RequestServer` raises
:class:`~dynamo_trio.errors.MessageTooLarge` and counts the frame as one that is owed an
answer. Whoever owns the connection sends the refusal in its turn and closes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_trio.errors import LocalProtocolError, MessageTooLarge
from dynamo_trio.wire.dynamo.ack import Ack, AckReader, encode_ack
from dynamo_trio.wire.dynamo.request_frame import FrameReader, RequestFrame, encode_frame
from dynamo_trio.wire.dynamo.two_part import MAX_MESSAGE

if TYPE_CHECKING:
    from dynamo_trio.wire.dynamo.receiver import Closed


class RequestServer:
    """A worker's end. ``limit``: bytes of the largest frame that it takes."""

    def __init__(self, *, limit: int = MAX_MESSAGE) -> None:
        self._reader = FrameReader(limit=limit)
        self._failed = False
        #: Requests that were read and not yet acknowledged.
        self.outstanding = 0

    @property
    def buffered(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return self._reader.buffered

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what arrived; ``b""`` for the end of the stream.

        Raises:
            LocalProtocolError: data after the end, or frames were left untaken.
        """
        self._reader.receive_data(data)

    def next_event(self) -> RequestFrame | Closed | None:
        """The next request, or None when more data is needed.

        Raises:
            MessageTooLarge: a frame above the limit; it is owed a refusal.
            RemoteProtocolError: the peer broke a rule in another way.
        """
        try:
            event = self._reader.next_event()
        except MessageTooLarge:
            self.outstanding += not self._failed
            self._failed = True
            raise
        self.outstanding += isinstance(event, RequestFrame)
        return event

    def send(self, ack: Ack) -> bytes:
        """The acknowledgement of the oldest request that has none.

        Raises:
            LocalProtocolError: every request has its acknowledgement.
        """
        if self.outstanding == 0:
            raise LocalProtocolError("an acknowledgement that no request waits for")
        self.outstanding -= 1
        return encode_ack(ack)


class RequestClient:
    """A client's end. ``limit``: bytes of the largest frame that the worker takes."""

    def __init__(self, *, limit: int = MAX_MESSAGE) -> None:
        self._reader = AckReader()
        self._limit = limit
        #: Requests that were sent and not yet acknowledged.
        self.outstanding = 0

    @property
    def buffered(self) -> int:
        """Bytes of an acknowledgement that is not whole yet."""
        return self._reader.buffered

    def send(self, frame: RequestFrame) -> bytes:
        """A request as bytes.

        Raises:
            PayloadTooLarge: the frame is above the limit.
            LocalProtocolError: path or headers are too long.
        """
        data = encode_frame(frame, limit=self._limit)
        self.outstanding += 1
        return data

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what arrived; ``b""`` for the end of the stream.

        Raises:
            LocalProtocolError: data after the end, or acknowledgements were left untaken.
        """
        self._reader.receive_data(data)

    def next_event(self) -> Ack | Closed | None:
        """The acknowledgement of the oldest request that has none, or None for more data.

        After ``Closed`` the requests that are still ``outstanding`` never get one.

        Raises:
            RemoteProtocolError: no acknowledgement, or one that no request waits for.
        """
        event = self._reader.next_event()
        if isinstance(event, Ack):
            self._count()
        return event

    def _count(self) -> None:
        if self.outstanding == 0:
            raise self._reader.fail("the peer acknowledged more requests than it was sent")
        self.outstanding -= 1
