"""Spans: which piece of work a log line, or a request to somebody else, belongs to.

Theory of operation
-------------------
A piece of work begins a :class:`Span` with the headers of who asked for it, and enters it in its
own task. From then on the task's log lines carry the span's ids, and what is asked of others
carries its ``traceparent``. Without a tracer that is all there is to a span: two random numbers.

A piece of work may have parts (:meth:`Span.part`), each a span below it.

With OpenTelemetry's SDK spans are recorded, too, and exported; the ids are OpenTelemetry's then,
and the span is OpenTelemetry's current one, so that what a handler adds by itself is below it.
The tracer is a context variable: a program sets it before its first task, and all inherit it.
"""

from __future__ import annotations

import importlib.util
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from dynamo_trio.console.logs import trace
from dynamo_trio.errors import ConfigError
from dynamo_trio.wire.trace import TraceContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractContextManager

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

#: Seconds that a program's last spans have to leave.
FLUSH_LIMIT = 2.0

Value = str | int | float | bool


@attrs.define(eq=False)
class Span:
    """One piece of work. What it is told is forgotten, if nobody records it."""

    context: TraceContext

    def enter(self) -> None:
        """The current task, and those that it starts from now on, do this work."""
        trace.set(self.context)
        current.set(self)

    def note(self, **attributes: Value) -> None:
        """Add what is known of it."""

    def fail(self, reason: str) -> None:
        """It has failed."""

    def end(self) -> None:
        """It is over. Only the first call counts."""

    def part(self, name: str, **attributes: Value) -> Span:
        """A piece of this work begins, as a span of its own."""
        return Span(TraceContext.following(self.context.headers()))


class Tracer:
    """Begins spans. This one records none."""

    #: Does anybody want to know what a span is told?
    records: bool = False

    def begin(self, name: str, headers: Mapping[str, str], **attributes: Value) -> Span:
        """A span of work that was asked for with these headers."""
        return Span(TraceContext.following(headers))


_OFF: Final = Tracer()
#: The span of the current task's work.
current: ContextVar[Span | None] = ContextVar("dynamo_trio_span", default=None)
tracer: ContextVar[Tracer] = ContextVar("dynamo_trio_tracer", default=_OFF)


@attrs.define(eq=False)
class _OtelSpan(Span):
    _span: Any
    _tracer: Any

    def enter(self) -> None:
        from opentelemetry import context as otel
        from opentelemetry.trace import set_span_in_context

        super().enter()
        otel.attach(set_span_in_context(self._span))

    def note(self, **attributes: Value) -> None:
        self._span.set_attributes(attributes)

    def fail(self, reason: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, reason)

    def end(self) -> None:
        if self._span.is_recording():  # else the SDK would warn
            self._span.end()

    def part(self, name: str, **attributes: Value) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        told = attrs.evolve(self.context, parent_id=self.context.span_id)
        parent = set_span_in_context(self._span, Context())
        span = self._tracer.start_span(name, parent, attributes=attributes)
        return _OtelSpan(_made(told, span), span, self._tracer)


def _made(told: TraceContext, span: Any) -> TraceContext:
    """``told``, with the ids that OpenTelemetry has given to the span."""
    made = span.get_span_context()
    return attrs.evolve(
        told,
        trace_id=f"{made.trace_id:032x}",
        span_id=f"{made.span_id:016x}",
        flags=f"{made.trace_flags:02x}",
    )


class OtelTracer(Tracer):
    """Spans of OpenTelemetry, from a provider of its SDK."""

    records = True

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("dynamo_trio")

    def begin(self, name: str, headers: Mapping[str, str], **attributes: Value) -> Span:
        from opentelemetry.trace import SpanKind

        told = TraceContext.following(headers)
        span = self._tracer.start_span(
            name, _parent(told), kind=SpanKind.SERVER, attributes=attributes
        )
        return _OtelSpan(_made(told, span), span, self._tracer)


def _parent(told: TraceContext) -> Any:
    from opentelemetry import context as otel
    from opentelemetry import trace as api

    if not told.parent_id:
        return otel.Context()  # not what is current in this task: nobody asked for it there
    remote = api.SpanContext(
        int(told.trace_id, 16),
        int(told.parent_id, 16),
        is_remote=True,
        trace_flags=api.TraceFlags(int(told.flags, 16)),
        trace_state=api.TraceState.from_header([told.state] if told.state else []),
    )
    return api.set_span_in_context(api.NonRecordingSpan(remote), otel.Context())


# --- the export ---------------------------------------------------------------------------

_MISSING = (
    "OTEL_EXPORT_ENABLED: must be off, unless OpenTelemetry's SDK is there: pip install"
    " 'dynamo-trio[otel]' ({} is missing)"
)


@asynccontextmanager
async def exporting(
    endpoint: str,
    protocol: str,
    service: str,
    cleanup: Callable[[float], AbstractContextManager[object]],
) -> AsyncIterator[None]:
    """Record and export the spans of all tasks that are started in the block.

    Args:
        endpoint: where an OpenTelemetry collector listens.
        protocol: ``grpc`` or ``http/protobuf``.
        service: the name of this process, as the collector shows it.
        cleanup: the shield, with its limit, under which the last spans leave.

    Raises:
        ConfigError: the SDK, or its exporter of this protocol, is not installed.
    """
    provider = make_provider(make_exporter(endpoint, protocol), service)
    before = tracer.set(OtelTracer(provider))
    try:
        yield
    finally:
        tracer.reset(before)
        with cleanup(FLUSH_LIMIT):
            await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)


def make_provider(exporter: SpanExporter, service: str) -> TracerProvider:
    """A provider that exports from a thread of the SDK's, many spans at a time."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": service}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def make_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """The SDK's exporter of this protocol.

    Raises:
        ConfigError: the SDK, or that exporter, is not installed.
    """
    kind = "grpc" if protocol == "grpc" else "http"
    _require("opentelemetry.sdk.trace", f"opentelemetry.exporter.otlp.proto.{kind}")
    if kind == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    return trace_exporter.OTLPSpanExporter(endpoint)


def _require(*modules: str) -> None:
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(_MISSING.format(module))
