"""The HTTP calls that are open, admitted or not: what a stop owes to those it does not wait for.

Theory of operation
-------------------
A drain waits for who is admitted, and for nobody else. Two kinds of calls are left:

* *Half-sent requests.* Their body is still on its way when the drain begins, and would be
  refused when it is there. They are refused at once, while their clients can go elsewhere
  (:meth:`OpenCalls.refuse_uploads`), and hold up no phase of the stop.
* *Answers that are on their way* when the phases of the stop are over: a refusal, also of what
  was half-sent, a probe's answer, the 503 of a request that was cut. They get a moment to leave
  (:meth:`OpenCalls.wait_answered`), or the end of the server would tear them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import Draining
from dynamo_trio.http.bodies import BodyRoom
from dynamo_trio.http.respond import body_at_hand, read_body

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from dynamo_trio.http.asgi import Receive, Scope
    from dynamo_trio.http.bodies import BodyHold
    from dynamo_trio.http.limits import HttpLimits


@attrs.define(eq=False)
class OpenCalls:
    """Those of one frontend."""

    #: Invariant: the tasks of the calls that run, but for those that wait for a body.
    _answering: set[trio.lowlevel.Task] = attrs.field(factory=set)
    #: Around each wait for a request's body.
    _uploads: set[trio.CancelScope] = attrs.field(factory=set)
    #: Invariant: once set, nobody waits for a body any more.
    _refusing: bool = False
    #: For the bodies that are being read.
    bodies: BodyRoom = attrs.field(factory=BodyRoom)
    #: For reading what they mean: one large body at a time. The decoder holds the GIL (a quarter
    #: of a second for 60 MiB), and several in a row would let nobody else have a turn.
    parsing: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    _answered: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def inside(self) -> AbstractContextManager[None]:
        """A call runs, in this task, for the time of the block."""
        return _Inside(self)

    async def read_body(
        self, scope: Scope, receive: Receive, limits: HttpLimits, hold: BodyHold | None = None
    ) -> bytes:
        """As :func:`dynamo_trio.http.respond.read_body`, until uploads are refused.

        Raises:
            Draining: they are.
        """
        if (body := body_at_hand(scope, limits, hold)) is not None:
            return body  # as nearly always: nothing is waited for
        with self._upload():
            return await read_body(scope, receive, limits, hold)
        raise Draining("The server is shutting down; the request was not complete.")

    def refuse_uploads(self) -> None:
        """Wait for no request's body any more."""
        self._refusing = True
        for upload in self._uploads:
            upload.cancel("the server takes no new requests")

    async def wait_answered(self) -> None:
        """Wait until nobody is being answered. Who is still sending is refused, and answered."""
        self.refuse_uploads()
        while self._answering or self._uploads:
            await self._answered.park()
        await trio.lowlevel.checkpoint()

    @contextmanager
    def _upload(self) -> Iterator[None]:
        with trio.CancelScope() as upload:
            self._uploads.add(upload)
            self._pass()
            try:
                if self._refusing:
                    upload.cancel("the server takes no new requests")
                yield
            finally:
                self._uploads.discard(upload)
                self._answering.add(trio.lowlevel.current_task())

    def _enter(self) -> None:
        self._answering.add(trio.lowlevel.current_task())

    def _pass(self) -> None:
        self._answering.discard(trio.lowlevel.current_task())
        if not self._answering:
            self._answered.unpark_all()


@attrs.frozen(eq=False)
class _Inside:
    """See :meth:`OpenCalls.inside`. A class, and no generator, since it is for every request."""

    _calls: OpenCalls

    def __enter__(self) -> None:
        self._calls._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._calls._pass()
