"""Where the bytes of one streamed response go.

Theory of operation
-------------------
A sink has two users. The *source* (the reader of a worker link, for all streams of that
link) calls :meth:`BodySink.feed` and :meth:`BodySink.finish`: they never await, raise or
spawn, so one slow or dead client cannot hold or break the others. The *owner* (the task
of the request) starts the response, drains what could not be sent at once, and ends it.
Only the owner awaits the socket.

* The first writer of ``outcome`` wins, whoever it is; how the response ends is read
  from it and from nothing else. (A cancel scope's ``cancelled_caught`` is true even if the
  stream finished in the very tick in which it was cut.)
* What is fed after the outcome, or after the sink is closed, is dropped and counted in
  ``late``. A sink that took it would write into the next response of the same connection.
* A response is ended with its terminator only if every byte before it has been
  handed over; else the connection is aborted. A client sees a whole response or a broken
  one, never one that looks whole.

Both kinds (:mod:`dynamo_trio.http.sinks`) keep what could not be sent, and tell the source
through ``writable`` and ``on_low_water`` when to pause.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio

from dynamo_trio.http.exchange import shielded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynamo_trio.http.asgi import Headers, Message, Send
    from dynamo_trio.http.exchange import Exchange
    from dynamo_trio.http.limits import HttpLimits

#: All that a write to a socket can raise means the same: nobody is there any more.
GONE_ERRORS = (OSError, ValueError, trio.ClosedResourceError, trio.BrokenResourceError)


#: What is left to be done with some data, at once or behind the same of other sinks: a plain call
#: that does not raise, and what it writes.
Rest: TypeAlias = "tuple[Callable[[bytes], object], bytes]"


class SinkOutcome(enum.StrEnum):
    """How a response ended."""

    STOP = "stop"  # the source had said everything
    ERROR = "error"  # the source's last words were an error
    CUT = "cut"  # ended from outside, with a farewell
    GONE = "gone"  # the client left, or nobody could say why it ended
    OVERFLOW = "overflow"  # the client reads slower than its source can be held back


@attrs.define(eq=False)
class Wake:
    """An event that one task waits for, again and again. Never loses a ``set``."""

    # No parking lot, since there are some of these for every request.
    _is_set: bool = False
    #: Who waits. Invariant: nobody while it is set.
    _waiter: trio.lowlevel.Task | None = None

    def set(self) -> None:
        self._is_set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)

    async def wait(self) -> None:
        """Wait for the next ``set``, or take the one that nobody has waited for.

        That one is taken at once: others get their turn when there is something to wait for.
        """
        if self._is_set:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not self._is_set:
            assert self._waiter is None, "only one task may wait"
            self._waiter = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up)
        self._is_set = False

    def _give_up(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED


@attrs.define(eq=False)
class BodySink(ABC):
    """One streamed response. Made by :func:`open_sink`."""

    _send: Send
    _limits: HttpLimits
    _exchange: Exchange | None = None
    #: Called synchronously when the source may send again; it was told by ``writable``.
    on_low_water: Callable[[], object] | None = None
    #: Invariant: written once.
    _outcome: SinkOutcome | None = None
    #: Set when there is something for the owner to do: drain, end, or leave.
    attention: Wake = attrs.field(factory=Wake)
    #: Items that came after the outcome, or after the sink was closed.
    late: int = 0
    #: Sends that the socket took only in part.
    partial: int = 0
    #: The head has left.
    started: bool = False
    #: Invariant: once set, nothing is written any more.
    _closed: bool = False
    #: Nothing can be sent any more: the client is gone or a send was given up half-way.
    _broken: bool = False
    #: When the farewell must have left, by Trio's clock; finite once the response was cut.
    _last_moment: float = math.inf
    _unsent: bytearray = attrs.field(factory=bytearray)
    #: Invariant: from the high-water mark until the low-water mark.
    _paused: bool = False
    #: The shielded wait that is under way, if one is.
    _limit: trio.CancelScope | None = None
    #: The terminator was handed over, behind every byte of the body.
    complete: bool = False
    #: Bytes of the body were thrown away, because nobody could be given them any more.
    _torn: bool = False

    def __attrs_post_init__(self) -> None:
        if self._exchange is not None:
            self._exchange.begin_response(self.client_left)

    # --- for the source: never awaits, never raises --------------------------------

    @property
    def outcome(self) -> SinkOutcome | None:
        """How it ended; None while it runs."""
        return self._outcome

    @property
    def writable(self) -> bool:
        """Should the source go on? If not, ``on_low_water`` will say when."""
        return not self._paused

    @property
    def handed_over(self) -> bool:
        """Has every byte of the body so far been taken from us?

        Then a client that has left may well have read all: some hang up at the last event
        that they know, without waiting for the terminator.
        """
        return not (self._torn or self._unsent or self.late)

    def feed(self, data: bytes) -> None:
        """Send ``data`` as soon as it goes. After the outcome it is dropped, and counted."""
        if self._outcome is not None or self._closed:
            self.late += 1
        elif data:
            self._put(data)

    def offer(self, head: bytes, text: bytes, tail: bytes) -> Rest | None:
        """As :meth:`feed`, for one piece; what is left to be done with it comes before anything
        else."""
        self.feed(b"%b%b%b" % (head, text, tail))
        return None

    def feed_last(self, data: bytes) -> None:
        """As :meth:`feed`, for what should come to the client together with the end."""
        self.feed(data)

    def finish(self, outcome: SinkOutcome) -> bool:
        """Say how it ended. False: that has been said already, and stands."""
        if self._outcome is not None:
            return False
        self._outcome = outcome
        self.attention.set()
        return True

    def client_left(self) -> None:
        """Nobody reads any more."""
        self._broken = True
        self._torn = self._torn or bool(self._unsent)
        self._unsent.clear()
        self.finish(SinkOutcome.GONE)
        self.attention.set()
        if self._limit is not None:
            self._limit.cancel("the client left")

    # --- for the owner ----------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Is there something to drain?"""
        return bool(self._unsent) and not self._broken

    def hurry(self) -> None:
        """The response was cut: a send that is under way gets the time of a farewell, no more."""
        self.end_by(trio.current_time())

    def end_by(self, moment: float) -> None:
        """The request ends at ``moment``, by Trio's clock: what is sent then gets the time of a
        farewell, no more."""
        self._last_moment = min(self._last_moment, moment + self._limits.farewell_time)
        if self._exchange is not None and self._last_moment < math.inf:
            self._exchange.hurry(self._last_moment)
        if self._limit is not None:
            self._limit.deadline = min(self._limit.deadline, self._last_moment)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head. Shielded, and bounded by ``write_time``."""
        head = {"type": "http.response.start", "status": status, "headers": headers}
        self.started = True  # even a head that breaks off excludes another one
        if await self._send_bounded(head):
            self._open()

    @abstractmethod
    async def drain(self) -> None:
        """Send what is unsent. Unless shielded by itself it may be cancelled without loss."""

    async def serve(self) -> None:
        """Drain until there is an outcome and nothing is left to send. After :meth:`start`."""
        assert self.started
        while self._outcome is None or self.pending:
            if self.pending:
                await self.drain()
            else:
                await self.attention.wait()

    async def end(self, farewell: bytes | None = None) -> SinkOutcome:
        """End the response, in ``farewell_time`` if it was cut. Exactly once.

        Args:
            farewell: the last words, if nobody has said how it ended; without them the
                client sees a broken response.
        """
        self._say_farewell(farewell)
        await self._drain_all()
        await self._terminate()
        assert self._outcome is not None
        return self._outcome

    def close(self) -> None:
        """Write nothing any more. Idempotent."""
        if self._exchange is not None and not self._closed:
            self._exchange.end_response(self.client_left)
        self._closed = True

    # --- the parts ----------------------------------------------------------------------

    @abstractmethod
    def _put(self, data: bytes) -> None:
        """Send or keep ``data``, which is not empty."""

    def _open(self) -> None:  # noqa: B027 - nothing to do unless a subclass has it
        """The head has left."""

    def _keep(self, data: bytes | memoryview) -> None:
        self._unsent += data
        if len(self._unsent) > self._limits.max_unsent:
            self._broken = True
            self.finish(SinkOutcome.OVERFLOW)
        self._paused = self._paused or len(self._unsent) >= self._limits.high_water
        self.attention.set()

    def _sent(self, count: int) -> None:
        del self._unsent[:count]
        if self._paused and len(self._unsent) <= self._limits.low_water:
            self._paused = False
            if self.on_low_water is not None:
                self.on_low_water()

    def _say_farewell(self, farewell: bytes | None) -> None:
        if self._outcome is not None:
            return
        self.hurry()
        if farewell is None:
            self.client_left()
        else:
            self.feed(farewell)
            self.finish(SinkOutcome.CUT)

    async def _drain_all(self) -> None:
        if self.pending:
            with self._bounded():
                while self.pending:
                    await self.drain()

    async def _terminate(self) -> None:
        whole = not self._broken and not self._unsent
        self.close()
        if whole:
            self.complete = await self._send_end()
        if not self.complete:
            self._abort()

    async def _send_end(self) -> bool:
        end = {"type": "http.response.body", "body": b"", "more_body": False}
        return await self._send_bounded(end)

    def _give_up(self) -> None:
        """The client takes nothing, or a send broke off: the connection is of no use any more."""
        self.client_left()
        self._abort()

    def _abort(self) -> None:
        if self._exchange is not None:
            self._exchange.abort(f"a response could not be completed ({self._outcome})")

    @contextmanager
    def _bounded(self) -> Iterator[trio.CancelScope]:
        """A shielded wait for the client; giving it up, or its connection's end, cut it short."""
        outer = self._limit
        with shielded(self._exchange, self._patience(), self._patience) as self._limit:
            try:
                yield self._limit
            finally:
                self._limit = outer

    def _patience(self) -> float:
        """The deadline of a wait for a client that took something just now."""
        return min(trio.current_time() + self._limits.write_time, self._last_moment)

    async def _send_bounded(self, message: Message) -> bool:
        with self._bounded() as limit:
            try:
                await self._send(message)
            except GONE_ERRORS:
                self.client_left()
        if limit.cancelled_caught:
            self._give_up()
        return not self._broken
