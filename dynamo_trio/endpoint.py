"""Serving an endpoint: admission, the handler's task, and the end of its stream.

Theory of operation
-------------------
A request is admitted synchronously, while the plane is still deciding on its
acknowledgement; so a refusal is a refusal, never a stream that dies young. Each
admitted request is one task in the endpoint's nursery. The order of its blocks
is what makes the cleanup right::

    admission                  counted from the acknowledgement to the farewell
      admission.scope          the soft scope: cancelled by a cut, encloses only the handler
        aclosing(generator)    closed here, in this task, never by the garbage collector
          async for item       no unshielded checkpoint in the body: an item that the
                               generator has given away cannot be lost to a cancel
      farewell                 outside the soft scope, so a cut request can still say why

The generator is driven and closed by one task only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import msgspec
import trio

from dynamo_trio.context import Context
from dynamo_trio.errors import (
    Draining,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    Unknown,
)
from dynamo_trio.lifecycle import Admission, CutReason, Gate, Lifecycle, Outcome
from dynamo_trio.plane.abc import AcceptedCall, Outbox, RequestHead

logger = logging.getLogger("dynamo_trio.endpoint")

#: ``async def handler(request)`` or ``async def handler(request, context)``, a generator.
Handler = Callable[..., AsyncGenerator[Any, None]]

#: A handler whose items are always ready must let other tasks run.
ITEMS_PER_CHECKPOINT = 64

encode = msgspec.msgpack.Encoder().encode


def takes_context(handler: Handler) -> bool:
    """Does the handler want ``(request, context)``? Decided by its signature, as Dynamo does.

    Raises:
        TypeError: it takes neither one nor two positional arguments, or it is a coroutine or
            a synchronous generator.
    """
    _check_kind(handler)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(handler).parameters.values()
    count = sum(1 for p in parameters if p.kind in kinds)
    if count not in (1, 2):
        raise TypeError(f"a handler takes (request) or (request, context), not {count} arguments")
    return count == 2


def _check_kind(handler: Handler) -> None:
    # A plain function may return an asynchronous generator: that shows at the first request.
    if inspect.iscoroutinefunction(handler) or inspect.isgeneratorfunction(handler):
        kind = "synchronous generator" if inspect.isgeneratorfunction(handler) else "coroutine"
        raise TypeError(
            f"the handler {handler.__qualname__} is a {kind}; it must be an asynchronous "
            "generator: 'async def' with 'yield'"
        )


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
    #: Invariant: once True the handler has given everything, and a cut changes nothing.
    exhausted: bool = False

    def cancel(self) -> None:
        self.context.kill()
        self.admission.cut(CutReason.CLIENT_LEFT)

    async def run(self, start: Callable[[], AsyncGenerator[Any, None]]) -> None:
        """Drive the handler to its end and give the stream its last word.

        The last word is a plain call in ``finally``: it is said even when the whole
        nursery is being cancelled, and then it says that the work was lost.
        """
        error: DynamoException | None = EngineShutdown("the worker stopped")
        outcome = Outcome.LOST
        try:
            with self.admission.scope:
                await self._pump(start())
            error, outcome = self._verdict()
        except* Exception as group:
            error, outcome = self._fault(group), Outcome.FAILED
        finally:
            self.outbox.finish(error)
            self.admission.settle(outcome)

    async def _pump(self, generator: AsyncGenerator[Any, None]) -> None:
        if not isinstance(generator, AsyncGenerator):
            raise TypeError(f"the handler returned {generator!r}, no asynchronous generator")
        sent = 0
        async with _closing(generator):
            async for item in generator:
                self.outbox.put(encode(item))
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
        if len(group.exceptions) == 1 and isinstance(cause, DynamoException):
            return cause
        logger.error("request %s: the handler failed", self.context.id, exc_info=group)
        return Unknown("the worker failed to serve the request")


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


@attrs.define(eq=False)
class EndpointService:
    """The acceptor of one endpoint: turns requests into tasks of one nursery."""

    name: str
    handler: Handler
    gate: Gate
    nursery: trio.Nursery
    lifecycle: Lifecycle
    graceful: bool = True
    request_type: type = object
    _with_context: bool = attrs.field(init=False)
    _decoder: msgspec.msgpack.Decoder[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._with_context = takes_context(self.handler)
        self._decoder = msgspec.msgpack.Decoder(
            Any if self.request_type is object else self.request_type
        )

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> Call:
        """Admit the request and start its task.

        Raises:
            Draining: the process takes no new work.
            InvalidArgument: the payload is not what the endpoint expects.
        """
        request = self._decode(payload)
        with ExitStack() as stack:
            label = f"{self.name} {head.request_id}"
            admission = stack.enter_context(self.gate.admit(label, graceful=self.graceful))
            context = Context(head.request_id, head.metadata, self.lifecycle.cleanup)
            call = Call(context, outbox, admission)
            admission.on_cut.append(outbox.wake)
            self._start(call, request, stack)
            return call

    def _start(self, call: Call, request: object, stack: ExitStack) -> None:
        args = (request, call.context) if self._with_context else (request,)
        kept = stack.pop_all()
        try:
            self.nursery.start_soon(self._run, call, args, kept, name=call.admission.label)
        except RuntimeError:  # the nursery is closed: teardown has overtaken the gate
            call.admission.settle(Outcome.LOST)
            kept.close()
            raise Draining("the worker is shutting down") from None

    async def _run(self, call: Call, args: tuple[object, ...], admitted: ExitStack) -> None:
        with admitted:
            await call.run(partial(self.handler, *args))

    def _decode(self, payload: bytes) -> object:
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as exc:
            raise InvalidArgument(f"the request is not what {self.name} expects: {exc}") from None
