"""The span of an HTTP request, and what is told of it.

A session of ``/v1/realtime`` is a request, and each of its responses a span below it.

Only what is counted under an ``endpoint`` is recorded: a probe each second says nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamo_trio.console.logs import request_id
from dynamo_trio.tracing import Span, Tracer, Value, current, tracer
from dynamo_trio.wire.trace import TRACEPARENT, TRACESTATE, X_REQUEST_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_trio.frontend.record import RequestRecord
    from dynamo_trio.frontend.refusals import Attempt
    from dynamo_trio.http.asgi import Scope

#: As Dynamo calls it.
SPAN = "http-request"
#: One response of a session.
RESPONSE = "realtime-response"

_UNRECORDED = Tracer()
_TAKEN = {name.encode(): name for name in (TRACEPARENT, TRACESTATE)}


def begin_span(scope: Scope, x_request_id: str, endpoint: str) -> Span:
    """The span of a request that begins now. ``endpoint``: Dynamo's metric label, if any."""
    headers = {**_headers(scope), X_REQUEST_ID: x_request_id}
    found = tracer.get()
    if not (endpoint and found.records):
        return _UNRECORDED.begin(SPAN, headers)
    method = scope.get("method", "GET")  # that of a WebSocket's upgrade
    told = {"method": method, "uri": scope["path"][:200], "endpoint": endpoint}
    return found.begin(SPAN, headers, version=scope["http_version"], **told)


def _headers(scope: Scope) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in _TAKEN:  # what comes in several parts is one list; two parents are none
            text = value.decode("latin-1")
            key = _TAKEN[name]
            found[key] = f"{found[key]},{text}" if key in found else text
    return found


@contextmanager
def session_span(scope: Scope, session_id: str) -> Iterator[None]:
    """The current task serves a session of ``/v1/realtime`` while the block runs."""
    span = begin_span(scope, session_id, "realtime")
    span.enter()
    try:
        yield
    finally:
        span.end()


def begin_response(response_id: str, model: str) -> Span:
    """The span of a response that begins now, in the session of the current task."""
    session = current.get() or _UNRECORDED.begin(RESPONSE, {})
    return session.part(RESPONSE, model=model, request_id=response_id)


@contextmanager
def response_span(response_id: str, model: str) -> Iterator[Span]:
    """The current task serves a response while the block runs."""
    span = begin_response(response_id, model)
    span.enter()
    try:
        yield span
    finally:
        span.end()


def note_session(error_type: str = "", **known: Value) -> None:
    """Tell the current task's span, which is a session's, how that has ended."""
    span = current.get()
    if span is None or not tracer.get().records:
        return
    span.note(**known, **{"request.outcome": "error" if error_type else "success"})
    if error_type:
        span.note(error_type=error_type)
        span.fail(error_type)


def note_refusal(span: Span, attempt: Attempt, error_type: str) -> None:
    """Tell the span of a request that was never admitted what became of it."""
    if attempt.endpoint and tracer.get().records:
        span.note(
            request_id=request_id.get() or "",
            model=attempt.model,
            request_type=attempt.request_type,
            error_type=error_type,
            **{"request.outcome": "error"},
        )


def note_outcome(record: RequestRecord) -> None:
    """Tell the current task's span what became of its request, under Dynamo's names."""
    span = current.get()
    if span is None or not tracer.get().records:
        return
    span.note(
        request_id=request_id.get() or "",
        model=record.model,
        request_type=record.request_type,
    )
    if record.prompt_tokens is not None:  # else there is none yet, or only its worker knows it
        span.note(input_tokens=record.prompt_tokens, output_tokens=record.token_count)
    if record.ttft is not None:
        span.note(ttft_ms=round(record.ttft * 1e3, 3))
    if record.mean_gap is not None:
        span.note(avg_itl_ms=round(record.mean_gap * 1e3, 3))
    if record.instance is not None:
        span.note(worker_id=str(record.instance.instance_id))
    span.note(**{"request.outcome": "error" if record.error_type else "success"})
    if record.error_type:
        span.note(error_type=record.error_type)
        span.fail(record.error_type)
