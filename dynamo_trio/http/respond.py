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

import math
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from dynamo_trio.errors import Cancelled, ClientTooSlow, InvalidArgument, PayloadTooLarge
from dynamo_trio.http.exchange import exchange_of, shielded
from dynamo_trio.http.guard import TAKES_NOTHING
from dynamo_trio.http.limits import HttpLimits
from dynamo_trio.http.sinks import PIECE, BodySink, SinkOutcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from dynamo_trio.http.asgi import Headers, Message, Receive, Scope, Send
    from dynamo_trio.http.bodies import BodyHold
    from dynamo_trio.http.exchange import Exchange

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
    detach: Callable[[], object] | None = None,
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
    sink.end_by(admission.scope.deadline)
    try:
        with admission.scope:
            await work()
        if detach is not None:
            detach()
        if not sink.started:
            return None
        return await sink.end(None if sink.outcome else farewell())
    finally:
        if detach is not None:
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
    admission: SoftAdmission | None = None,
) -> bool:
    """Answer with a whole JSON body.

    Args:
        close: tell the client to use another connection (HTTP/1 only; HTTP/2 forbids it), and
            wait for no more of its request.
        admission: once it is cut, the answer has ``farewell_time`` to leave.

    Returns:
        False if the client left, or was given up because it took nothing.
    """
    head: Headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), *headers]
    if close:
        say_close(scope, head)
    return await _send_whole(scope, send, status, head, body, limits, admission)


def say_close(scope: Scope, head: Headers) -> None:
    """Have an answer tell its client to use another connection; wait for no more of its request."""
    if scope["http_version"] in ("1.0", "1.1"):
        head.append((b"connection", b"close"))
    if (exchange := exchange_of(scope)) is not None:
        exchange.waits_for_body = False


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


async def send_empty(
    scope: Scope, send: Send, status: int, headers: Headers, *, limits: HttpLimits | None = None
) -> bool:
    """Answer with a status that has no body (204). Returns as :func:`send_json` does."""
    return await _send_whole(scope, send, status, headers, b"", limits)


async def _send_whole(
    scope: Scope,
    send: Send,
    status: int,
    head: Headers,
    body: bytes,
    limits: HttpLimits | None,
    admission: SoftAdmission | None = None,
) -> bool:
    exchange = exchange_of(scope)
    pace = _Pace(limits or (exchange.connection.limits if exchange else HttpLimits()), exchange)
    with nullcontext() if admission is None else pace.kept_by(admission):
        return await _send_parts(send, status, head, body, pace)


async def _send_parts(send: Send, status: int, head: Headers, body: bytes, pace: _Pace) -> bool:
    start = {"type": "http.response.start", "status": status, "headers": head}
    if pace.exchange is not None and pace.exchange.plain:
        return await _send_plainly(pace.exchange, send, start, body)
    if not await _send_bounded(send, start, pace):
        return False
    for at in range(0, len(body) or 1, PIECE):
        last = at + PIECE >= len(body)
        message = {
            "type": "http.response.body",
            "body": body[at : at + PIECE],
            "more_body": not last,
        }
        if not await _send_bounded(send, message, pace):
            return False
    return pace.exchange is None or not pace.exchange.left_early


async def _send_plainly(exchange: Exchange, send: Send, start: Message, body: bytes) -> bool:
    """Send all of it at once: the guard goes by what the client takes of it."""
    exchange.cork()
    try:
        await send(start)
    finally:
        exchange.uncork()
    with exchange.blocked():
        await send({"type": "http.response.body", "body": body, "more_body": False})
    return not (exchange.left_early or exchange.connection.guard.was_reset)


@attrs.define(eq=False)
class _Pace:
    """How long the client of one whole answer is waited for."""

    _limits: HttpLimits
    exchange: Exchange | None
    #: By Trio's clock.
    _last_moment: float = math.inf
    #: Around the send that is under way.
    _sending: trio.CancelScope | None = None

    @contextmanager
    def kept_by(self, admission: SoftAdmission) -> Iterator[None]:
        """What ends the request leaves its answer the time of a farewell, and no more."""
        self._end_by(admission.scope.deadline)
        if admission.scope.cancel_called:
            self._hurry()
        admission.on_cut.append(self._hurry)
        try:
            yield
        finally:
            admission.on_cut.remove(self._hurry)

    @contextmanager
    def bounded(self) -> Iterator[trio.CancelScope]:
        """A send of a part."""
        with shielded(self.exchange, self._deadline(), self._deadline) as self._sending:
            yield self._sending

    def _deadline(self) -> float:
        """Of a wait for a client that took something just now."""
        return min(trio.current_time() + self._limits.write_time, self._last_moment)

    def _hurry(self) -> None:
        self._end_by(trio.current_time())

    def _end_by(self, moment: float) -> None:
        self._last_moment = min(self._last_moment, moment + self._limits.farewell_time)
        if self.exchange is not None and self._last_moment < math.inf:
            self.exchange.hurry(self._last_moment)
        if self._sending is not None:
            self._sending.deadline = min(self._sending.deadline, self._last_moment)


async def _send_bounded(send: Send, message: Message, pace: _Pace) -> bool:
    """An ASGI send that no cancellation can tear: hypercorn's state would be lost with it."""
    with pace.bounded() as limit:
        try:
            await send(message)
        except OSError:  # how some ASGI servers say that the client has left
            return False
    if limit.cancelled_caught and pace.exchange is not None and not pace.exchange.lost:
        pace.exchange.abort(TAKES_NOTHING)
    return not limit.cancelled_caught


async def read_body(
    scope: Scope, receive: Receive, limits: HttpLimits, hold: BodyHold | None = None
) -> bytes:
    """Read the request's body to its end, into ``hold`` if all of them together are bounded.

    Raises:
        UploadsFull: there is no room for it now.
        PayloadTooLarge: it is longer than ``body_bytes``.
        ClientTooSlow: it did not arrive within ``body_time``.
        Cancelled: the client left.
    """
    if (whole := body_at_hand(scope, limits, hold)) is not None:
        return whole
    body = bytearray()
    with trio.move_on_after(limits.body_time):
        while await _read_part(receive, body):
            if len(body) > limits.body_bytes:
                raise _too_large(limits)
            if hold is not None:
                hold.grow(len(body))
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
        return bytes(body)
    raise ClientTooSlow(f"the request body did not arrive within {limits.body_time:g} seconds")


def body_at_hand(scope: Scope, limits: HttpLimits, hold: BodyHold | None = None) -> bytes | None:
    """The request's body, if all of it is there and nothing has to be waited for.

    Raises:
        UploadsFull, PayloadTooLarge: as :func:`read_body`.
    """
    _check_length(scope, limits)
    exchange = exchange_of(scope)
    body = None if exchange is None else exchange.whole_body()
    if body is not None:
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
        if hold is not None:
            hold.grow(len(body))
    return body


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


@attrs.define(eq=False)
class watch_disconnect:
    """Call ``on_disconnect`` when the client leaves within the block.

    To be entered when the body has been read. On HTTP/1.1 of our own server this is a
    plain call from the connection; elsewhere a task watches ``receive``.
    """

    # A class, and no generator, since it is for every request.
    _scope: Scope
    _receive: Receive
    _on_disconnect: Callable[[], object]
    _exchange: Exchange | None = attrs.field(init=False, default=None)
    _watcher: AbstractAsyncContextManager[None] | None = attrs.field(init=False, default=None)

    async def __aenter__(self) -> None:
        self._exchange = exchange = exchange_of(self._scope)
        if exchange is None or not exchange.begin_response(self._on_disconnect):
            self._watcher = _receive_watcher(self._receive, self._on_disconnect)
            await self._watcher.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        done = None
        if self._watcher is not None:
            done = await self._watcher.__aexit__(kind, value, trace)
        if self._exchange is not None and (value is None or done):
            self._exchange.end_response(self._on_disconnect)
        return done


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
