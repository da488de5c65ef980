"""Requests that are no good HTTP/2: each is the fault of its stream (RFC 9113, 8.1.1).

Theory of operation
-------------------
h2 takes some of them for the fault of the connection, which it ends with all that runs there: a
body that does not fit its ``content-length``, a header that is for one connection only
(``transfer-encoding``), a ``host`` that is not ``:authority``, and so on. Behind a proxy, which
puts the requests of many clients on one connection, one of them would end the others'.

So h2's streams are given a subclass (:class:`Stream`), in whose ``receive_headers`` and
``receive_data`` such a complaint arrives before the connection hears of it. A head becomes an event
of its own (:class:`MalformedRequest`), to be answered with 400; what comes too late for an answer
resets its stream. What h2 finds in the bytes below that (HPACK, frames, the order of frames) is
still a matter of the connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived, StreamReset, TrailersReceived
from h2.exceptions import InvalidBodyLengthError, ProtocolError, StreamClosedError
from h2.stream import H2Stream, StreamState

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(kw_only=True)
class MalformedRequest(RequestReceived):
    """Of a head that is no good. Comes in the place of what it is made of."""

    complaint: str


class Stream(H2Stream):
    """The server's end of one request."""

    def receive_headers(self, headers: Iterable[Any], end_stream: bool, *others: Any) -> Any:
        head = list(headers)
        begins = self.state_machine.state is StreamState.IDLE
        try:
            made = super().receive_headers(head, end_stream, *others)
            if end_stream and begins and self._expected_content_length:
                raise InvalidBodyLengthError(self._expected_content_length, 0)
        except ProtocolError as exc:
            if self.state_machine.state is StreamState.CLOSED:  # it is out of order
                raise
            if begins:
                told = MalformedRequest(stream_id=self.stream_id, headers=head, complaint=str(exc))
                return [], [told]
            trailers = TrailersReceived(stream_id=self.stream_id, headers=[])
            return self.reset_stream(ErrorCodes.PROTOCOL_ERROR), [trailers, self._was_reset()]
        return made

    def receive_data(self, *arguments: Any) -> Any:
        try:
            return super().receive_data(*arguments)
        except InvalidBodyLengthError:
            self.reset_stream(ErrorCodes.PROTOCOL_ERROR)
        # The connection gives the bytes back to its own window, and sends what resets the stream.
        closed = StreamClosedError(self.stream_id)
        closed.error_code, closed._events = ErrorCodes.PROTOCOL_ERROR, [self._was_reset()]
        raise closed

    def _was_reset(self) -> StreamReset:
        code = ErrorCodes.PROTOCOL_ERROR
        return StreamReset(stream_id=self.stream_id, error_code=code, remote_reset=False)


class Connection(H2Connection):
    """Its requests are :class:`Stream`."""

    def _begin_new_stream(self, *arguments: Any) -> H2Stream:
        stream = super()._begin_new_stream(*arguments)
        stream.__class__ = Stream  # h2 has no other way to say which it is to make
        return stream
