"""Answers that leave before their request was read to its end: a 503, a 413, a 401.

Theory of operation
-------------------
The client is still sending, and may not look at its answer before it has sent everything.

* On HTTP/1.1 the answer says ``connection: close``, and the guard reads away for a moment what
  still comes. A body that is right behind its head is waited for, for :data:`SOON`: most clients
  send both in two pieces, and would lose their connection for nothing.
* On HTTP/2 the answer is followed by RST_STREAM(NO_ERROR), which asks the client to stop sending
  and to keep the answer (RFC 9113, 8.1); not before :data:`SOON`, since some clients (httpx) fail
  if it comes between the two pieces. What is on its way to the stream meanwhile is thrown
  away, and counts as received: hypercorn alone has forgotten a stream when it was answered, and
  ends the whole connection by a ``KeyError`` at the next DATA frame (:class:`Streams`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypercorn.protocol.h2 import H2Protocol

if TYPE_CHECKING:
    from dynamo_trio.http.asgi import Headers, Message, Send

#: Seconds that an answer waits for the end of a body which may be there any moment.
SOON = 0.1


class Answered:
    """Stands for every stream that hypercorn has forgotten."""

    idle = True

    async def handle(self, event: object) -> None:
        """It is of no interest any more."""


class Streams(dict[int, Any]):
    """hypercorn's table of the streams of one connection, as it should be."""

    def __missing__(self, number: int) -> Answered:
        return Answered()


def engine_of(send: Send) -> H2Protocol | None:
    """The protocol engine of an HTTP/2 connection, by the ``send`` of a request on it."""
    # What hypercorn gives to an app is a method of its stream, whose ``send`` is the engine's.
    stream = getattr(send, "__self__", None)
    engine = getattr(getattr(stream, "send", None), "__self__", None)
    return engine if isinstance(engine, H2Protocol) else None


def bear_late_data(send: Send) -> None:
    """Let no DATA frame behind an early answer end the connection. Idempotent."""
    engine = engine_of(send)
    if engine is not None and not isinstance(engine.streams, Streams):
        engine.streams = Streams(engine.streams)


async def stop_upload(send: Send, stream: int) -> None:
    """Tell the client of an HTTP/2 stream, whose answer has left, to send no more for it."""
    engine = engine_of(send)
    if engine is None:
        return
    try:
        if not engine.connection.streams[stream].closed:
            engine.connection.reset_stream(stream, ErrorCodes.NO_ERROR)
    except (KeyError, ProtocolError):
        return  # it is over already
    await engine._flush()


def closing(head: Message) -> Message:
    """The head of an HTTP/1 answer, behind which the connection is closed."""
    headers: Headers = list(head.get("headers", ()))
    if (b"connection", b"close") in headers:
        return head
    return {**head, "headers": [*headers, (b"connection", b"close")]}
