"""Reading a request and answering it, in the only order that is right.

A route uses these helpers and never ``receive`` or ``send`` itself::

    body = await read_body(scope, receive, limits)
    with gate.admit(label) as admission:
        async with watch_disconnect(scope, receive, lambda: admission.cut(CLIENT_LEFT)):
            outcome = await stream_response(sink, admission, work, farewell=...)

The body is read *before* the request is admitted, so that a half-sent request never holds
up a drain.

The helpers work on our own server and under a foreign one; there disconnects are seen by
a task that watches ``receive``, and a client that takes nothing can only be left alone.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import trio

from dynamo_trio.errors import Cancelled, ClientTooSlow, InvalidArgument, PayloadTooLarge
from dynamo_trio.http.connection import exchange_of, shielded
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.sinks import PIECE, BodySink, SinkOutcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from dynamo_trio.http.asgi import Headers, Message, Receive, Scope, Send

JSON = b"application/json"


class SoftAdmission(Protocol):
    """What is needed of :class:`dynamo_trio.lifecycle.Admission`."""

    @property
    def scope(self) -> trio.CancelScope:
        """The soft scope, entered once, around waits only."""

    @property
    def on_cut(self) -> list[Callable[[], object]]:
        """Called synchronously by the first cut."""


async def stream_response(
    sink: BodySink,
    admission: SoftAdmission,
    work: Callable[[], Awaitable[object]],
    *,
    farewell: Callable[[], bytes | None],
    detach: Callable[[], object] = lambda: None,
) -> SinkOutcome | None:
    """Own one streamed response from its first wait to its last byte.

    Args:
        work: runs inside the soft scope. It waits for the worker, attaches the sink to the
            stream, calls ``sink.start`` and then ``sink.serve``. A soft cut ends it.
        detach: takes the sink away from its source; called with no checkpoint between the
            end of the soft scope and it, so that nothing is fed in between. Idempotent.
            (Where ``work`` holds the stream in a ``with`` block of its own, that is it.)
        farewell: the last words of a response that was cut; None for a client that left.
            Asked for only if the source has not said how the stream ended.

    Returns:
        How the response ended; None if not even its head was sent: then the caller still
        can, and must, answer. ``sink.complete`` tells if the client got all of it.
    """
    admission.on_cut.append(sink.hurry)
    try:
        with admission.scope:
            await work()
        detach()
        if not sink.started:
            return None
        return await sink.end(None if sink.outcome else farewell())
    finally:
        detach()
        sink.close()


async def send_json(
    scope: Scope,
    send: Send,
    status: int,
    body: bytes,
    headers: Iterable[tuple[bytes, bytes]] = (),
    *,
    close: bool = False,
    limits: HttpLimits | None = None,
) -> bool:
    """Answer with a whole JSON body.

    Args:
        close: tell the client to use another connection (HTTP/1 only; HTTP/2 forbids it).

    Returns:
        False if the client left, or was given up because it took nothing.
    """
    head: Headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), *headers]
    if close and scope["http_version"] in ("1.0", "1.1"):
        head.append((b"connection", b"close"))
    return await _send_whole(scope, send, status, head, body, limits)


async def send_bytes(
    scope: Scope,
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes,
    *,
    limits: HttpLimits | None = None,
) -> bool:
    """Answer with a whole body of any type (``/metrics``). Returns as :func:`send_json` does."""
    head: Headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    return await _send_whole(scope, send, status, head, body, limits)


async def _send_whole(
    scope: Scope, send: Send, status: int, head: Headers, body: bytes, limits: HttpLimits | None
) -> bool:
    start = {"type": "http.response.start", "status": status, "headers": head}
    if not await _send_bounded(scope, send, start, limits):
        return False
    for at in range(0, len(body) or 1, PIECE):
        last = at + PIECE >= len(body)
        message = {
            "type": "http.response.body",
            "body": body[at : at + PIECE],
            "more_body": not last,
        }
        if not await _send_bounded(scope, send, message, limits):
            return False
    exchange = exchange_of(scope)
    return exchange is None or not exchange.left_early


async def _send_bounded(
    scope: Scope, send: Send, message: Message, limits: HttpLimits | None
) -> bool:
    """An ASGI send that no cancellation can tear: hypercorn's state would be lost with it."""
    exchange = exchange_of(scope)
    limits = limits or (exchange.connection.limits if exchange else HttpLimits())
    with shielded(exchange, trio.current_time() + limits.write_time) as limit:
        try:
            await send(message)
        except OSError:  # how some ASGI servers say that the client has left
            return False
    if limit.cancelled_caught and exchange is not None and not exchange.lost:
        exchange.abort("the client takes nothing")
    return not limit.cancelled_caught


async def read_body(scope: Scope, receive: Receive, limits: HttpLimits) -> bytes:
    """Read the request's body to its end.

    Raises:
        PayloadTooLarge: it is longer than ``body_bytes``.
        ClientTooSlow: it did not arrive within ``body_time``.
        Cancelled: the client left.
    """
    _check_length(scope, limits)
    body = bytearray()
    with trio.move_on_after(limits.body_time):
        while await _read_part(receive, body):
            if len(body) > limits.body_bytes:
                raise _too_large(limits)
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
        return bytes(body)
    raise ClientTooSlow(f"the request body did not arrive within {limits.body_time:g} seconds")


async def _read_part(receive: Receive, body: bytearray) -> bool:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Cancelled("the client left before its request was complete")
    body += message.get("body", b"")
    return bool(message.get("more_body", False))


def _check_length(scope: Scope, limits: HttpLimits) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit():
                raise InvalidArgument("content-length is not a number")
            if int(value) > limits.body_bytes:
                raise _too_large(limits)


def _too_large(limits: HttpLimits) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is longer than {limits.body_bytes} bytes")


@asynccontextmanager
async def watch_disconnect(
    scope: Scope, receive: Receive, on_disconnect: Callable[[], object]
) -> AsyncIterator[None]:
    """Call ``on_disconnect`` when the client leaves within the block.

    To be entered when the body has been read. On HTTP/1.1 of our own server this is a
    plain call from the connection; elsewhere a task watches ``receive``.
    """
    exchange = exchange_of(scope)
    if exchange is None or not exchange.begin_response(on_disconnect):
        async with _receive_watcher(receive, on_disconnect):
            yield
    else:
        yield
    if exchange is not None:
        exchange.end_response(on_disconnect)


@asynccontextmanager
async def _receive_watcher(
    receive: Receive, on_disconnect: Callable[[], object]
) -> AsyncIterator[None]:
    # The nursery is nobody's business, so the block's own exception leaves it as it was,
    # not in a group.
    error: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, receive, on_disconnect)
        try:
            yield
        except Exception as exc:
            error = exc
        nursery.cancel_scope.cancel("the response is over")
    if error is not None:
        raise error


async def _watch(receive: Receive, on_disconnect: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect()
