"""Serving an endpoint: which requests are let in, and what their handler is given.

A request is admitted synchronously, while the plane is still deciding on its
acknowledgement; so a refusal is a refusal, never a stream that dies young. Only then is
its payload read, in the request's own task: an invalid one ends its stream with that
error before the handler has begun. What follows is :class:`~dynamo_trio.call.Call`'s.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from dynamo_trio.call import Call
from dynamo_trio.context import Context
from dynamo_trio.errors import Draining, InvalidArgument, Overloaded, RemoteProtocolError
from dynamo_trio.lifecycle import Gate, Lifecycle, Outcome
from dynamo_trio.wire.dynamo.codec import Codec, per_codec
from dynamo_trio.wire.llm import PreprocessedRequest, read_request

if TYPE_CHECKING:
    from dynamo_trio.metrics.component import EndpointMetrics
    from dynamo_trio.plane.abc import Outbox, RequestHead

#: ``async def handler(request)`` or ``async def handler(request, context)``, a generator.
Handler = Callable[..., AsyncGenerator[Any, None]]

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
    handler: Handler
    gate: Gate
    nursery: trio.Nursery
    lifecycle: Lifecycle
    metrics: EndpointMetrics
    graceful: bool = True
    request_type: type = object
    #: Requests that may be in here at once (``DYN_ENGINE_REQUEST_LIMIT``).
    request_limit: float = math.inf
    #: Requests that are in here.
    running: int = 0
    _with_context: bool = attrs.field(init=False)
    _reader: Callable[[Codec, bytes], Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._with_context = takes_context(self.handler)
        self._reader = reader_of(self.request_type)

    def accept(self, head: RequestHead, payload: bytes, outbox: Outbox) -> Call:
        """Admit the request and start its task.

        Raises:
            Draining: the process takes no new work.
            Overloaded: there are as many requests in here as may be.
        """
        try:
            call = self._admit(head, payload, outbox)
        except (Draining, Overloaded) as exc:
            self.metrics.work.refused(exc)
            raise
        self.metrics.work.arrived(head.sent_at_ns)
        return call

    def _admit(self, head: RequestHead, payload: bytes, outbox: Outbox) -> Call:
        if self.running >= self.request_limit:
            raise Overloaded(f"the worker is full (requests at once: {self.request_limit:g})")
        with ExitStack() as stack:
            label = f"{self.name} {head.request_id}"
            admission = stack.enter_context(self.gate.admit(label, graceful=self.graceful))
            context = Context(head.request_id, head.metadata, self.lifecycle.cleanup)
            record = self.metrics.start(len(payload))
            call = Call(context, outbox, admission, head.codec, record)
            admission.on_cut.append(outbox.wake)
            self._start(call, payload, stack)
            return call

    def _start(self, call: Call, payload: bytes, stack: ExitStack) -> None:
        kept = stack.pop_all()
        try:
            self.nursery.start_soon(self._run, call, payload, kept, name=call.admission.label)
        except RuntimeError:  # the nursery is closed: teardown has overtaken the gate
            call.admission.settle(Outcome.LOST)
            call.record.ended(Outcome.LOST, None)
            kept.close()
            raise Draining("the worker is shutting down") from None
        self.running += 1

    async def _run(self, call: Call, payload: bytes, admitted: ExitStack) -> None:
        try:
            with admitted:
                await call.run(partial(self._generator, call, payload))
        finally:
            self.running -= 1

    async def _generator(self, call: Call, payload: bytes) -> AsyncGenerator[Any, None]:
        """The handler, started with its request."""
        try:
            request = await self._read(call.codec, payload)
        except RemoteProtocolError as exc:
            raise InvalidArgument(f"the request is not what {self.name} expects: {exc}") from None
        args = (request, call.context) if self._with_context else (request,)
        return self.handler(*args)

    async def _read(self, codec: Codec, payload: bytes) -> object:
        if len(payload) <= READ_INLINE_BYTES:
            return self._reader(codec, payload)
        return await trio.to_thread.run_sync(self._reader, codec, payload)
