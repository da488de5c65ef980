"""Ending one HTTP/2 stream, and leaving the others of its connection alone.

ASGI has no word for it, and hypercorn none of its own: an app that breaks off leaves its stream
open, and its client waiting. So this reaches into the protocol engine, past what it documents;
what it finds there is pinned by the tests of the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypercorn.protocol.h2 import H2Protocol

if TYPE_CHECKING:
    from hypercorn.protocol.http_stream import HTTPStream

    from dynamo_trio.http.asgi import Send


async def reset_stream(send: Send) -> None:
    """Send RST_STREAM (RFC 9113, 6.4) for the stream whose ``send`` hypercorn gave to the app.

    What lies in the engine for the stream is thrown away, and whoever waits for it goes on.
    """
    stream = cast("HTTPStream", getattr(send, "__self__", None))
    protocol = getattr(stream.send, "__self__", None)
    if not isinstance(protocol, H2Protocol):
        raise TypeError("not a stream of HTTP/2")
    try:
        protocol.connection.reset_stream(stream.stream_id, ErrorCodes.INTERNAL_ERROR)
    except ProtocolError:
        return  # it is over already
    if (buffer := protocol.stream_buffers.get(stream.stream_id)) is not None:
        await buffer.close()
    await protocol._window_updated(stream.stream_id)  # its sending task takes notice of the end
    await protocol._flush()
