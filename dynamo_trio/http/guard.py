"""A stream that cannot be held for ever by the client at its other end.

Theory of operation
-------------------
hypercorn, the protocol engine, is given a :class:`GuardedStream` in place of the
socket stream. The guard adds what hypercorn lacks:

* *Writing.* What the socket takes at once is a plain call. A send that has to wait is
  shielded, since hypercorn's state would be lost with one that is torn; so ``send_all``
  carries its own deadline inside that shield: a client that takes nothing for
  ``write_time`` is reset. Whatever it does take moves the deadline, and those of the waits
  above that depend on it (:mod:`dynamo_trio.http.patience`). The head of an answer may be
  held back for a moment (:meth:`GuardedStream.cork`), to leave together with what follows.
* *Reading.* One task per connection (:meth:`GuardedStream.pump`) reads the socket all
  the time, whatever hypercorn does. hypercorn stops reading as soon as it holds one
  byte behind the running request, and then sees no FIN. The pump sees it, and
  ``on_lost`` is called in that very moment, with no watcher per request.
  While a response runs (:meth:`hold`) the bytes that come are kept in a read-ahead;
  hypercorn gets them when the response is over (:meth:`release`).
* *Waiting for a request.* A connection may be silent for ``idle_time``; but a head must be
  complete within ``head_time`` of its first byte, however its bytes trickle in. (hypercorn's
  own timer does not run on an HTTP/2 connection until its first request is over.)
* *HTTP/2 windows.* hypercorn takes any amount for a stream whose window is shut. The guard
  counts the DATA that leaves for each stream (:meth:`wait_sent`), so that back-pressure
  reaches the response, and a window that stays shut its deadline.
* *Closing.* Behind an answer that was given before the request was read to its end,
  ``aclose`` reads away what still comes for a moment: a close with unread bytes makes
  the kernel send a reset, which can destroy the answer on its way.

A client that half-closes has left: an HTTP client that still wants its answer has no
reason to say that it will never send again.
"""

from __future__ import annotations

import math
import socket as stdlib_socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from dynamo_trio.http.frames import EARNING_BYTES, NO_ERROR, goaway

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynamo_trio.http.limits import HttpLimits

CHUNK = 64 * 1024
#: Each piece has the whole of ``write_time``; within it, whatever the client takes renews that.
SEND_PIECE = 16 * 1024
#: After so many bytes that went at once, others get their turn; a send counts as some of them.
TURN, AT_LEAST = 64 * 1024, 1024
#: Why most clients are reset.
TAKES_NOTHING = "the client takes nothing"
#: Seconds that a client has to go, of those that are asked to.
PARTING = 0.2
H2_PREFACE = b"PRI * HTTP/2.0"
#: SO_LINGER, on, 0 seconds: closing sends a reset and frees the socket at once.
RESET = struct.pack("ii", 1, 0)


class Carrier(Protocol):
    """What a guard goes around: a socket stream, or one that passes for it."""

    @property
    def socket(self) -> trio.socket.SocketType: ...
    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray: ...
    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...
    async def send_eof(self) -> None: ...


@attrs.define(eq=False)
class GuardedStream:
    """Wraps ``stream``; hypercorn uses ``socket`` and the stream methods, and nothing else."""

    _stream: Carrier
    _limits: HttpLimits
    #: Called at most once: the client left, or the connection was closed or aborted.
    on_lost: Callable[[], object] = lambda: None
    why_lost: str | None = None
    was_reset: bool = False
    #: Called at most once, when the socket has been closed.
    on_closed: Callable[[], object] = lambda: None
    #: Called while a send is blocked, when the client has taken something.
    on_progress: Callable[[], object] = lambda: None
    #: Called when hypercorn has been told that the client left.
    on_drained: Callable[[], object] = lambda: None
    #: Invariant: hypercorn has taken every byte that it will ever get.
    drained: bool = False
    #: The request on the wire was answered before it was read to its end.
    unread: bool = False
    socket: trio.socket.SocketType = attrs.field(init=False)
    #: Invariant: once set, nothing more will ever be read from the socket.
    _ended: bool = False
    _closed: bool = False
    #: A response runs: what arrives stays here, and hypercorn sees nothing of it.
    _holding: bool = False
    #: And its end has been handed over: the client may know that before its request counts as
    #: over here, and send the next one.
    _finishing: bool = False
    #: An early answer has been given: what arrives is thrown away.
    _discarding: bool = False
    _ahead: bytearray = attrs.field(factory=bytearray)
    #: Something above has changed; everybody who waits looks again.
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    #: Invariant: finite exactly while no request runs.
    _deadline: float = math.inf
    #: When what is being sent must have left; finite from a cut to the end of its response.
    _last_moment: float = math.inf
    #: A request's head is on its way (HTTP/1.1).
    _in_head: bool = False
    #: No request runs, so the next bytes begin one.
    _expecting: bool = True
    #: HTTP/2 carries frames between requests; only its idle time bounds it.
    _http2: bool = False
    _reading: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    #: Around the send that waits for the client, if one does.
    _sending: trio.CancelScope | None = None
    #: Held by whoever waits for the client or for the send of another.
    _order: trio.Lock = attrs.field(factory=trio.Lock)
    #: What is sent is held back.
    _corked: bool = False
    #: To be sent before anything else.
    _held: bytes = b""
    #: Sent since another task last had its turn.
    _burst: int = 0
    #: Sends what the socket takes at once; None where the stream knows of no such thing.
    _push: Callable[[bytes], int] | None = None
    #: Body bytes that have left, for each HTTP/2 stream that is counted; infinite: its end, too.
    _sent_by_stream: dict[int, float] = attrs.field(factory=dict)
    #: Called when some of a counted stream's bytes have left.
    _on_sent: dict[int, Callable[[], object]] = attrs.field(factory=dict)

    #: The client of HTTP/2 was asked to go.
    parted: bool = False
    #: DATA frames of some size that have left since somebody asked.
    _earned: int = 0

    #: Trio's clock, looked up once.
    _now: Callable[[], float] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._now = trio.lowlevel.current_clock().current_time
        self.socket = self._stream.socket
        self._push = getattr(self._stream, "send_now", None)
        self._set_deadline(self._limits.idle_time)

    @property
    def lost(self) -> bool:
        """Has the client left, or has the connection been closed?"""
        return self._ended

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def http2(self) -> bool:
        """Has the client been seen to speak HTTP/2?"""
        return self._http2

    @property
    def has_descriptor(self) -> bool:
        """Is there an open socket of the kernel's behind it? (A memory stream has none.)"""
        return self.socket.fileno() >= 0

    # --- what hypercorn calls ---------------------------------------------------

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The next bytes that belong to hypercorn; ``b""`` once the client has left.

        Raises:
            trio.ClosedResourceError: the connection was closed on this side.
        """
        if self._readable():
            await trio.lowlevel.checkpoint()
        while not self._readable():
            await self._changed.park()
        if self._closed:
            raise trio.ClosedResourceError("the connection was closed")
        if self._holding or not self._ahead:
            return await self._say_drained()
        was_full = self._is_full()
        taken = bytes(self._ahead[: max_bytes or CHUNK])
        del self._ahead[: len(taken)]
        if was_full:
            self._changed.unpark_all()
        return taken

    async def send_all(self, data: bytes) -> None:
        """Send, unless the client takes nothing for ``write_time``: then abort.

        Raises:
            trio.BrokenResourceError: the client has gone, or was just found stuck.
            trio.ClosedResourceError: the connection was closed on this side.
        """
        if self._corked:
            self._held += data
            return
        if self._held:
            data, self._held = self._held + data, b""
        sent = 0 if self._order.locked() else self._send_now(data)
        if sent < len(data):
            await self._send_patiently(memoryview(data)[sent:])
        elif self._burst >= TURN:
            self._burst = 0
            await trio.lowlevel.cancel_shielded_checkpoint()
        if self._http2:
            self._count_sent(data)

    def cork(self) -> None:
        """Hold back what is sent, until :meth:`uncork`. Meanwhile no send waits."""
        self._corked = True

    def uncork(self) -> None:
        """What was held back leaves before what is sent next."""
        self._corked = False

    def take_held(self) -> bytes:
        """What was held back: the caller sends it, by itself. Uncorks."""
        held, self._held, self._corked = self._held, b"", False
        return held

    def progress(self) -> None:
        """The client has taken some of what a blocked send has for it."""
        if self._sending is not None:
            self._sending.deadline = self._send_by()
        self.on_progress()

    def hurry(self, moment: float) -> None:
        """What is sent has to leave by ``moment``, on Trio's clock, until the response is over.

        hypercorn sends under a shield: no deadline of a caller reaches what it waits for.
        """
        self._last_moment = min(self._last_moment, moment)
        if self._sending is not None:
            self._sending.deadline = min(self._sending.deadline, moment)

    def _send_by(self) -> float:
        return min(self._now() + self._limits.write_time, self._last_moment)

    async def send_eof(self) -> None:
        """Say that no more will be sent. Idempotent."""
        # Once closed there is no checkpoint, here and in aclose(): a Cancelled from it would
        # replace the exception for which hypercorn is closing.
        if not self._closed:
            await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close, after a moment for what the client still sends if that is needed."""
        try:
            if self._lingers():
                await self._linger()
        finally:
            self.close()

    # --- what the connection calls ----------------------------------------------

    def request_begun(self, *, http2: bool) -> None:
        """A head is complete."""
        self._http2 = self._http2 or http2
        self._expecting = self._in_head = False
        self._set_deadline(math.inf)
        self._set_holding(False)

    def hold(self) -> None:
        """The request was read to its end and its response runs."""
        self._set_holding(True)
        if len(self._ahead) > self._limits.read_ahead:
            self.abort("the client sends too far ahead")

    def finish(self) -> None:
        """The last of the response is being sent."""
        self._finishing = True

    def release(self) -> None:
        """No request runs any more; what was read ahead is the next one."""
        self._expecting, self._last_moment = True, math.inf
        self._set_deadline(self._limits.idle_time)
        if self._ahead:
            self._head_begins()
        self._set_holding(False)

    def count_stream(self, stream: int, on_sent: Callable[[], object]) -> None:
        """Begin to count the DATA that is sent on an HTTP/2 stream, and tell of it."""
        self._sent_by_stream[stream] = 0
        self._on_sent[stream] = on_sent

    def forget_stream(self, stream: int) -> None:
        """Count it no longer."""
        self._sent_by_stream.pop(stream, None)
        self._on_sent.pop(stream, None)
        self._changed.unpark_all()

    async def wait_sent(self, stream: int, size: float) -> None:
        """Wait until ``size`` bytes of the stream have left, or the connection is lost.

        An infinite size is had when the stream's end has left.
        """
        while not self._ended and self._sent_by_stream.get(stream, size) < size:
            await self._changed.park()

    async def say_goodbye(self) -> None:
        """Ask a client of HTTP/2 to open another connection; this one is closed soon."""
        if not self._ended and not self.parted:
            self.parted = True
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.send_all(goaway(NO_ERROR))
        if self._expecting:
            self._set_deadline(min(self._limits.idle_time, PARTING))

    def take_earned(self) -> int:
        """DATA frames of some size that have left since this was called last."""
        earned, self._earned = self._earned, 0
        return earned

    async def pump(self) -> None:
        """Read until the client has left or the connection is closed. One task per connection."""
        while not self._ended:
            if self._is_full():
                await self._changed.park()
            else:
                await self._read()

    def close(self) -> None:
        """Close at once; what the kernel has taken is still delivered. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self.was_reset:
            self._say_end()
        self.socket.close()
        self._end("the connection was closed")
        self.on_closed()

    def abort(self, reason: str) -> None:
        """Close at once with a reset; what was not delivered is thrown away. Idempotent."""
        if self._closed:
            return
        with suppress(OSError):
            self.socket.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_LINGER, RESET)
        self.was_reset = True
        self._end(reason)
        self.close()

    # --- the parts ----------------------------------------------------------------

    def _say_end(self) -> None:
        """What TLS has to say before a close."""

    async def _say_drained(self) -> bytes:
        # A request that was just handed over gets to its app meanwhile, and counts as running.
        await trio.lowlevel.checkpoint()
        self.drained = True
        self.on_drained()
        return b""

    def _readable(self) -> bool:
        return self._ended or bool(self._ahead and not self._holding)

    def _is_full(self) -> bool:
        # While a response runs there is no limit to wait at: one byte too many aborts.
        may_wait = self._finishing or not self._holding
        return may_wait and len(self._ahead) >= self._limits.read_ahead

    async def _read(self) -> None:
        """Read until there is no room, or nothing more to come, or the deadline has been."""
        with trio.CancelScope(deadline=self._deadline) as self._reading:
            while not (self._ended or self._is_full()):
                self._take(await self._receive())
        if self._reading.cancelled_caught and self._now() >= self._deadline:
            self._time_is_up()

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(CHUNK))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    def _time_is_up(self) -> None:
        if self._in_head:
            self.abort("the request's head did not arrive in time")
        else:
            self.close()

    def _take(self, data: bytes) -> None:
        if not data:
            self._end("the client left")
        elif not self._discarding:
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._http2 = self._http2 or (self._expecting and data.startswith(H2_PREFACE))
        self._ahead += data
        if self._expecting and not self._in_head:
            self._head_begins()
        too_far = len(self._ahead) > self._limits.read_ahead
        if too_far and self._holding and not self._finishing:
            self.abort("the client sends too far ahead")
        self._changed.unpark_all()

    def _head_begins(self) -> None:
        if not self._http2:
            self._in_head = True
            if not self._is_whole_head():
                self._set_deadline(self._limits.head_time)

    def _is_whole_head(self) -> bool:
        # Then hypercorn either begins the request or refuses it. (It lets empty lines pass.)
        return self._ahead[:1].isalpha() and b"\r\n\r\n" in self._ahead

    def _set_deadline(self, seconds: float) -> None:
        # A wait that ends too early looks here and goes on: to move its end costs more than that,
        # and the deadline is put off twice for each request.
        self._deadline = self._now() + seconds
        if self._deadline < self._reading.deadline:
            self._reading.deadline = self._deadline

    def _set_holding(self, holding: bool) -> None:
        self._holding, self._finishing = holding, False
        if self._ahead:  # else neither hypercorn nor the pump waits for this
            self._changed.unpark_all()

    def _send_now(self, data: bytes) -> int:
        self._burst += max(len(data), AT_LEAST)
        try:
            return self._push(data) if self._push is not None and data else 0
        except trio.BrokenResourceError:
            self._end("the client left")
            raise

    async def _send_patiently(self, view: memoryview) -> None:
        with trio.CancelScope(shield=True) as scope:
            async with self._order:
                await self._send_pieces(view, scope)
        if scope.cancelled_caught:
            self.abort(TAKES_NOTHING)
            raise trio.BrokenResourceError(TAKES_NOTHING)

    async def _send_pieces(self, view: memoryview, scope: trio.CancelScope) -> None:
        self._sending = scope
        try:
            for start in range(0, len(view), SEND_PIECE):
                scope.deadline = self._send_by()
                await self._send(view[start : start + SEND_PIECE])
        finally:
            self._sending = None

    async def _send(self, piece: memoryview) -> None:
        try:
            await self._stream.send_all(piece)
        except trio.BrokenResourceError:
            self._end("the client left")
            raise

    def _count_sent(self, frames: bytes) -> None:
        for stream, size in data_frames(frames):
            self._earned += size >= EARNING_BYTES
            if stream in self._sent_by_stream:
                # hypercorn sends an empty frame at the end, and at no other time.
                self._sent_by_stream[stream] += size or math.inf
                self._on_sent[stream]()
        self._changed.unpark_all()

    def _lingers(self) -> bool:
        # A head that is no HTTP was answered with a 400, wherever it may end.
        return not self._ended and (self.unread or self._in_head or bool(self._ahead))

    async def _linger(self) -> None:
        self._discarding = True
        self._ahead.clear()
        self._changed.unpark_all()
        with trio.move_on_after(self._limits.linger_time):
            while not self._ended:
                await self._changed.park()

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended, self.why_lost = True, reason
        self._changed.unpark_all()
        self.on_lost()


def data_frames(frames: bytes) -> Iterator[tuple[int, int]]:
    """Stream and payload size of each DATA frame in whole HTTP/2 frames (RFC 9113, 4.1)."""
    at = 0
    while at < len(frames):
        size, kind = int.from_bytes(frames[at : at + 3]), frames[at + 3]
        if kind == 0:
            yield int.from_bytes(frames[at + 5 : at + 9]) & 0x7FFFFFFF, size
        at += 9 + size
