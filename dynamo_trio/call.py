"""One admitted request: its handler's task, and the end of its stream.

Theory of operation
-------------------
Each admitted request is one task in the endpoint's nursery. The order of its blocks is what
makes the cleanup right::

    admission                  counted from the acknowledgement to the farewell
      admission.scope          the soft scope: cancelled by a cut, encloses only the handler
        aclosing(generator)    closed here, in this task, never by the garbage collector
          async for item       no unshielded checkpoint in the body: an item that the
                               generator has given away cannot be lost to a cancel
      farewell                 outside the soft scope, so a cut request can still say why

The generator is driven and closed by one task only.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.errors import DynamoException, EngineShutdown, LocalProtocolError, Unknown
from dynamo_trio.lifecycle import Admission, CutReason, Outcome
from dynamo_trio.plane.abc import AcceptedCall, Outbox

if TYPE_CHECKING:
    from dynamo_trio.context import Context
    from dynamo_trio.metrics.component import CallRecord
    from dynamo_trio.wire.dynamo.codec import Codec

logger = logging.getLogger("dynamo_trio.endpoint")

#: A handler whose items are always ready must let other tasks run.
ITEMS_PER_CHECKPOINT = 64


def farewell(reason: CutReason) -> DynamoException | None:
    """The error that ends a cut stream; None when nobody is left to read it."""
    if reason is CutReason.CLIENT_LEFT:
        return None
    if reason is CutReason.HANDOVER:
        return EngineShutdown("the worker hands this request over", planned=True)
    return EngineShutdown("the worker is shutting down")


_OUTCOMES = {CutReason.CLIENT_LEFT: Outcome.CANCELLED, CutReason.HANDOVER: Outcome.HANDED_OVER}


@attrs.define(eq=False)
class Call(AcceptedCall):
    """One admitted request, from its acknowledgement to its farewell."""

    context: Context
    outbox: Outbox
    admission: Admission
    codec: Codec
    record: CallRecord
    #: Invariant: once True the handler has given everything, and a cut changes nothing.
    exhausted: bool = False

    def cancel(self) -> None:
        self.context.kill()
        self.admission.cut(CutReason.CLIENT_LEFT)

    def stop(self) -> None:
        self.context.stop_generating()

    async def run(self, start: Callable[[], Awaitable[AsyncGenerator[Any, None]]]) -> None:
        """Start the handler, drive it to its end and give the stream its last word.

        The last word is a plain call in ``finally``: it is said even when the whole
        nursery is being cancelled, and then it says that the work was lost.
        """
        error: DynamoException | None = EngineShutdown("the worker stopped")
        outcome = Outcome.LOST
        try:
            with self.admission.scope:
                await self._pump(await start())
            error, outcome = self._verdict()
        except* Exception as group:
            error, outcome = self._fault(group), Outcome.FAILED
        finally:
            self.outbox.finish(error)
            self.record.ended(outcome, error)
            self.admission.settle(outcome)

    async def _pump(self, generator: AsyncGenerator[Any, None]) -> None:
        if not isinstance(generator, AsyncGenerator):
            raise TypeError(f"the handler returned {generator!r}, no asynchronous generator")
        sent = 0
        async with _closing(generator):
            self.outbox.begin()
            self.record.begun()
            async for item in generator:
                payload = self.codec.encode(item)
                self.outbox.put(payload)
                self.record.item(len(payload))
                sent += 1
                await self._breathe(sent)
                if self.admission.reason is not None:
                    return
        self.exhausted = True

    async def _breathe(self, sent: int) -> None:
        """Wait for credit, or at least let others run; a cut wakes it, a cancel does not."""
        if sent % ITEMS_PER_CHECKPOINT and self.outbox.has_credit:
            return  # nearly every item: no scope, no checkpoint
        with trio.CancelScope(shield=True):
            if sent % ITEMS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            while not self.outbox.has_credit and self.admission.reason is None:
                await self.outbox.wait_credit()

    def _verdict(self) -> tuple[DynamoException | None, Outcome]:
        reason = self.admission.reason
        if self.exhausted or reason is None:
            return None, Outcome.FINISHED
        return farewell(reason), _OUTCOMES.get(reason, Outcome.CUT)

    def _fault(self, group: ExceptionGroup[Exception]) -> DynamoException:
        cause = group.exceptions[0]
        ours = isinstance(cause, LocalProtocolError)  # an item that no codec can spell
        if len(group.exceptions) == 1 and isinstance(cause, DynamoException) and not ours:
            return cause
        leaves = list(_leaves(group))
        logger.error(
            "request %s: the handler failed: %s",
            self.context.id(),
            "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves),
            exc_info=leaves[0] if len(leaves) == 1 else group,
        )
        return Unknown("the worker failed to serve the request")


def _leaves(error: Exception) -> Iterator[Exception]:
    """The exceptions in a group, and in groups within it."""
    if not isinstance(error, ExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from _leaves(inner)


@asynccontextmanager
async def _closing(generator: AsyncGenerator[Any, None]) -> AsyncIterator[None]:
    """``aclosing``, with the handler's own mistakes at the end logged as its fault."""
    try:
        async with aclosing(generator):
            yield
    except RuntimeError as exc:
        if "ignored GeneratorExit" not in str(exc):
            raise
        logger.error("a handler yielded after it had been told to end; its cleanup is broken")
