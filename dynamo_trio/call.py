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
      delivery                 until all of it has left this process; a cut may recall the end

The generator is driven and closed by one task only. A handler that pushes (:mod:`.push`) has
the same place: it is awaited within the soft scope, while its items come from elsewhere.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.errors import (
    DynamoException,
    EngineShutdown,
    LocalProtocolError,
    RequestCut,
    Unknown,
)
from dynamo_trio.lifecycle import Admission, CutReason, Outcome
from dynamo_trio.plane.abc import AcceptedCall, Outbox
from dynamo_trio.push import Output, Pushed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_trio.context import Context
    from dynamo_trio.metrics.component import CallRecord
    from dynamo_trio.request_stream import RequestStream
    from dynamo_trio.tracing import Span
    from dynamo_trio.wire.dynamo.codec import Codec

logger = logging.getLogger("dynamo_trio.endpoint")

#: A started handler.
Work = AsyncGenerator[Any, None] | Pushed

#: A handler whose items are always ready must let other tasks run.
ITEMS_PER_CHECKPOINT = 64


def farewell(admission: Admission, *, migrates: bool) -> DynamoException | None:
    """The error that ends a cut stream; None when nobody is left to read it.

    Peers migrate what ends in EngineShutdown. A request that cannot be continued elsewhere must
    not, once something was sent (``migrates`` is false then).
    """
    if admission.reason is CutReason.CLIENT_LEFT:
        return None
    if admission.confirmed or (admission.moved and admission.reason is CutReason.HANDOVER):
        return EngineShutdown("the worker hands this request over", planned=True)
    kind = EngineShutdown if migrates else RequestCut
    return kind("the worker is shutting down")


def _no_more_work() -> float:
    """The estimate of a request of which everything is there, and some is to be sent."""
    return 0.0


@attrs.define(eq=False)
class Call(AcceptedCall):
    """One admitted request, from its acknowledgement to its farewell."""

    context: Context
    outbox: Outbox
    admission: Admission
    codec: Codec
    record: CallRecord
    #: What streams in, of a request that does.
    input: RequestStream[Any] | None = None
    #: Invariant: once True the handler has given everything, and a cut changes nothing.
    exhausted: bool = False
    # How it ended, as its stream was told; at first how it ends if nobody comes to say so.
    _error: DynamoException | None = attrs.field(
        init=False, factory=lambda: EngineShutdown("the worker stopped")
    )
    _outcome: Outcome = attrs.field(init=False, default=Outcome.LOST)
    _failed: bool = attrs.field(init=False, default=False)
    #: Invariant: set once; the last word was said, and waits to leave or has left.
    _said: bool = attrs.field(init=False, default=False)
    #: Invariant: set once; and it was counted.
    _over: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.admission.on_abort.append(self._abort)

    def cancel(self) -> None:
        # In this order: who waits for an item that streams in is cancelled, not told of an end.
        self.admission.cut(CutReason.CLIENT_LEFT)
        self.context.kill()

    def stop(self) -> None:
        self.context.stop_generating()

    def feed(self, payloads: Sequence[bytes]) -> None:
        if self.input is not None:
            self.record.received(sum(map(len, payloads)))
            self.input.feed(payloads)

    def finish_input(self, error: DynamoException | None) -> None:
        if self.input is not None:
            self.input.finish(error)

    async def run(self, start: Callable[[], Awaitable[Work]]) -> None:
        """Start the handler, drive it to its end and give the stream its last word.

        The last word is a plain call in ``finally``: it is said even when the whole
        nursery is being cancelled, and then it says that the work was lost. A handler that was
        cut and does not leave in time is not waited for: then it has been said before.

        Whatever the handler raises ends its own request only, and so do ``SystemExit``,
        ``GeneratorExit`` and the cancellation of another library's loop. A ``KeyboardInterrupt``
        passes: where nobody else handles SIGINT it is a Ctrl-C that has found this task running,
        and ends the program as it would anywhere else.
        """
        try:
            await self._answer(start)
            if self.outbox.delivered is None:
                await self._see_off()
        finally:
            self._end(self._became())

    async def _answer(self, start: Callable[[], Awaitable[Work]]) -> None:
        try:
            with self.admission.scope:
                await self._serve(await start())
            error, outcome = self._verdict()
        except* (trio.Cancelled, KeyboardInterrupt):
            raise
        except* BaseException as group:  # noqa: ASYNC103 - sys.exit() ends this request alone
            self._failed = self.admission.reason is None
            error, outcome = self._fault(group)
        self._say(error, outcome)

    async def _see_off(self) -> None:
        """Wait until all of it has left, or the client has; when cut, end what can be ended."""
        outbox = self.outbox
        if self._outcome is Outcome.FINISHED:
            self.admission.prospects.estimate = _no_more_work
        while outbox.delivered is None and self.admission.reason is None:
            await outbox.wait_delivered()
        if outbox.delivered is None and self._outcome is Outcome.FINISHED:
            self._recall()
        while outbox.delivered is None:
            await outbox.wait_delivered()

    def _recall(self) -> None:
        """It was cut: a client that takes no more is told so, and may have the rest elsewhere."""
        error = self._farewell()
        if error is not None and self.outbox.recall(error):
            self._error, self._outcome = error, self.admission.verdict()

    def _say(self, error: DynamoException | None, outcome: Outcome) -> None:
        if not self._said:
            self._said = True
            self._error, self._outcome = error, outcome
            self.outbox.finish(error)

    def _became(self) -> Outcome:
        """What became of it, if what has not left yet never does."""
        delivered, outcome = self.outbox.delivered, self._outcome
        if delivered or outcome not in (Outcome.FINISHED, Outcome.HANDED_OVER):
            return outcome
        if delivered is None:
            return Outcome.CUT
        return Outcome.CANCELLED if outcome is Outcome.FINISHED else outcome

    def tell(self, span: Span) -> None:
        """Let the span, and whoever looks for it in the log, know how it ended."""
        logger.debug("%s: %s", self.admission.label, self._outcome.value)
        span.note(**{"request.outcome": self._outcome.value})
        if self._outcome is Outcome.FAILED and self._error is not None:
            span.fail(self._error.reason)

    def _abort(self) -> None:
        """The time for its farewell is over: neither its handler is waited for, nor its client."""
        if self._said:
            self._end(self._became())
        else:
            self._say(*self._verdict())
            self._end(self._outcome)

    def _end(self, outcome: Outcome) -> None:
        if not self._over:
            self._over = True
            self.outbox.finish(self._error)
            self.record.ended(Outcome.FAILED if self._failed else outcome, self._error)
            self.admission.settle(outcome)

    async def _serve(self, work: Work) -> None:
        if isinstance(work, Pushed):
            await self._let_push(work)
        else:
            await self._pump(work)

    async def _let_push(self, work: Pushed) -> None:
        """The handler's items come from elsewhere; its task waits for the end of it all."""
        output = Output(self.outbox, self.codec, self.record, self.admission)
        self.outbox.begin()
        self.record.begun()
        try:
            await work.run(output)
            self.exhausted = self.admission.reason is None
        finally:
            self.exhausted = self.exhausted or output.complete
            output.close()

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
        if self.exhausted or self.admission.reason is None:
            return None, Outcome.FINISHED
        return self._farewell(), self.admission.verdict()

    def _farewell(self) -> DynamoException | None:
        return farewell(self.admission, migrates=self._may_be_migrated)

    @property
    def _may_be_migrated(self) -> bool:
        """May a peer do so, on an error that allows it? Nobody does with what streams in."""
        untouched = not self.record.touched or self.input is not None
        return untouched or self.admission.prospects.movable

    def _fault(
        self, group: BaseExceptionGroup[BaseException]
    ) -> tuple[DynamoException | None, Outcome]:
        cause = group.exceptions[0]
        if len(group.exceptions) == 1 and isinstance(cause, EngineShutdown):
            return self._engine_gone(cause)
        error = self._failure(group)
        if self.admission.reason is not None:  # it had to end: what goes wrong then is its cleanup
            return self._verdict()
        return error, Outcome.FAILED

    def _engine_gone(self, cause: EngineShutdown) -> tuple[DynamoException, Outcome]:
        """The engine died, or was closed, under the request: that is no failure of its handler.

        Its peer may go on elsewhere, as when the request is cut.
        """
        admission = self.admission
        if admission.reason is CutReason.CLIENT_LEFT:
            return cause, Outcome.CANCELLED
        if admission.move():
            return _planned(cause, planned=admission.confirmed), Outcome.HANDED_OVER
        return cause if self._may_be_migrated else RequestCut(cause.message), Outcome.CUT

    def _failure(self, group: BaseExceptionGroup[BaseException]) -> DynamoException:
        cause = group.exceptions[0]
        ours = isinstance(cause, LocalProtocolError)  # an item that no codec can spell
        if len(group.exceptions) == 1 and isinstance(cause, DynamoException) and not ours:
            return cause
        leaves = list(_leaves(group))
        logger.error(
            "request %s: the handler failed: %s",
            self.context.id(),
            "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in leaves),
            exc_info=None if self.outbox.is_repeat else leaves[0] if len(leaves) == 1 else group,
        )
        return Unknown("the worker failed to serve the request")


def _planned(error: EngineShutdown, *, planned: bool) -> EngineShutdown:
    """The same error for one request; whoever raised it may have raised it into others too."""
    error = copy.copy(error)
    error.planned = planned
    return error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, and in groups within it."""
    if not isinstance(error, BaseExceptionGroup):
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
