"""Serving an endpoint: which requests are let in, and what their handler is given.

A request is admitted synchronously, while the plane is still deciding on its
acknowledgement; so a refusal is a refusal, never a stream that dies young. Only then is
its payload read, in the request's own task: an invalid one ends its stream with that
error before the handler has begun. What follows is :class:`~dynamo_trio.call.Call`'s.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.call import Call, Work
from dynamo_trio.console.logs import request_id
from dynamo_trio.context import Context
from dynamo_trio.errors import Draining, InvalidArgument, Overloaded, RemoteProtocolError
from dynamo_trio.lifecycle import Gate, Lifecycle, Outcome, Prospects
from dynamo_trio.push import PushHandler
from dynamo_trio.request_stream import RequestStream
from dynamo_trio.tracing import tracer
from dynamo_trio.turns import Seat, Turns
from dynamo_trio.wire.deadline import time_left
from dynamo_trio.wire.dynamo.codec import Codec, per_codec
from dynamo_trio.wire.llm import PreprocessedRequest, read_request

if TYPE_CHECKING:
    from dynamo_trio.metrics.component import EndpointMetrics
    from dynamo_trio.plane.abc import Outbox, RequestHead
    from dynamo_trio.tracing import Span

#: What the span of a request in its worker is called, as Dynamo calls it.
SPAN = "handle_payload"

#: ``async def handler(request)`` or ``async def handler(request, context)``, a generator. Where
#: requests stream in, ``request`` is a :class:`~dynamo_trio.request_stream.RequestStream`.
Handler = Callable[..., AsyncGenerator[Any, None]]
#: What can be served.
AnyHandler = Handler | PushHandler

#: Longer payloads are read in a thread: it takes milliseconds and more.
READ_INLINE_BYTES = 256 * 1024


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


def reader_of(request_type: type) -> Callable[[Codec, bytes], Any]:
    """The function that reads a request in a codec; it raises RemoteProtocolError only."""
    if request_type is PreprocessedRequest:
        return read_request
    kind: Any = Any if request_type is object else request_type
    readers = per_codec(lambda codec: codec.decoder(kind, "request"))
    return lambda codec, payload: readers[codec.name](payload)


@attrs.define(eq=False)
class EndpointService:
    """The acceptor of one endpoint: turns requests into tasks of one nursery."""

    name: str
    handler: AnyHandler
    gate: Gate
    nursery: trio.Nursery
    lifecycle: Lifecycle
    metrics: EndpointMetrics
    graceful: bool = True
    request_type: type = object
    #: Its requests stream in: the handler gets an iterator over items of ``request_type``.
    streams_in: bool = False
    #: Who of the requests in here may work.
    turns: Turns = attrs.field(factory=Turns)
    #: Requests that are in here.
    running: int = 0
    _with_context: bool = attrs.field(init=False)
    _reader: Callable[[Codec, bytes], Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._with_context = isinstance(self.handler, PushHandler) or takes_context(self.handler)
        self._reader = reader_of(self.request_type)

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> Call:
        """Admit the request and start its task.

        Raises:
            Draining: the process takes no new work.
            Overloaded: there are as many requests in here as may be; some may wait.
        """
        try:
            call = self._admit(head, payload, outbox)
        except (Draining, Overloaded) as exc:
            self.metrics.work.refused(exc)
            raise
        self.metrics.work.arrived(head.sent_at_ns)
        return call

    def _admit(self, head: RequestHead, payload: bytes, outbox: Outbox) -> Call:
        self.turns.check(self.running)
        with ExitStack() as stack:
            label = f"{self.name} {head.request_id}"
            deadline = trio.current_time() + time_left(head.metadata)
            # What has streamed in is nowhere else.
            prospects = Prospects(movable=not head.streams_in, deadline=deadline)
            admitting = self.gate.admit(
                label, graceful=self.graceful, prospects=prospects, peer=outbox.peer
            )
            admission = stack.enter_context(admitting)
            span = tracer.get().begin(SPAN, head.headers, request_id=head.request_id)
            context = Context(
                *(head.request_id, head.metadata, self.lifecycle.cleanup, prospects),
                trace=span.context,
            )
            record = self.metrics.start(len(payload))
            call = Call(context, outbox, admission, head.codec, record)
            if self.streams_in and head.streams_in:
                call.input = RequestStream(partial(self._read, head.codec), outbox)
                context.link(call.input)
            admission.on_cut.append(outbox.wake)
            stack.callback(span.end)
            self._start(call, head, payload, stack, span)
            return call

    def _start(
        self, call: Call, head: RequestHead, payload: bytes, stack: ExitStack, span: Span
    ) -> None:
        kept = stack.pop_all()
        label = call.admission.label
        try:
            self.nursery.start_soon(self._run, call, head, payload, kept, span, name=label)
        except RuntimeError:  # the nursery is closed: teardown has overtaken the gate
            call.admission.settle(Outcome.LOST)
            call.record.ended(Outcome.LOST, None)
            kept.close()
            raise Draining("the worker is shutting down") from None
        self.running += 1

    async def _run(
        self, call: Call, head: RequestHead, payload: bytes, admitted: ExitStack, span: Span
    ) -> None:
        request_id.set(head.request_id)  # for every log line of this request's tasks
        span.enter()
        try:
            with admitted, self.turns.seat() as seat:
                await call.run(partial(self._work, call, head, payload, seat))
                call.tell(span)
        finally:
            self.running -= 1

    async def _work(self, call: Call, head: RequestHead, payload: bytes, seat: Seat) -> Work:
        """The handler, started with its request once it is its turn."""
        with self.metrics.work.waiting(self.turns.full):
            await seat.take()
        if head.streams_in is not self.streams_in:
            wanted = "requests that stream in" if self.streams_in else "single requests"
            raise InvalidArgument(f"{self.name} takes {wanted} only")
        if call.input is not None and payload:
            raise InvalidArgument("a request that streams in has items, and no payload")
        request = call.input or await self._read(call.codec, payload)
        if isinstance(self.handler, PushHandler):
            return self.handler.start(request, call.context)
        args = (request, call.context) if self._with_context else (request,)
        return self.handler(*args)

    async def _read(self, codec: Codec, payload: bytes) -> object:
        try:
            if len(payload) <= READ_INLINE_BYTES:
                return self._reader(codec, payload)
            return await trio.to_thread.run_sync(self._reader, codec, payload)
        except RemoteProtocolError as exc:
            raise InvalidArgument(f"the request is not what {self.name} expects: {exc}") from None
