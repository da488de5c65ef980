"""The responses of a session whose worker speaks the events itself, as spans.

Between its worker and its client nothing is asked for one response alone, so a span is made of what
the worker says: ``response.created`` begins it, ``response.done`` ends it and has its tokens. To
the worker the session is one request; what it begins by itself is below that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from dynamo_trio.frontend.trace import begin_response
from dynamo_trio.tracing import tracer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_trio.tracing import Span

_CREATED, _DONE = "response.created", "response.done"
#: Responses of one session at once, as far as anybody records them: its worker may end none.
MOST = 16
#: Ids and words of a worker are cut there.
MOST_TEXT = 100


@attrs.define(eq=False)
class Overheard:
    """Of one session. Its methods are called in the session's task."""

    _model: str
    #: Does anybody want to know? Looked up once, since it is asked for every event.
    _records: bool = attrs.field(factory=lambda: tracer.get().records)
    #: The id of a response that runs -> its span.
    _running: dict[str, Span] = attrs.field(factory=dict)

    def heard(self, kind: str, event: Mapping[str, Any], worker: int) -> None:
        """The worker has said this; ``kind`` is its type."""
        if not self._records or kind not in (_CREATED, _DONE):
            return
        response = event.get("response")
        if not isinstance(response, dict) or not (name := _text(response.get("id"))):
            return
        if kind == _DONE:
            self._done(name, response)
        elif name not in self._running and len(self._running) < MOST:
            span = self._running[name] = begin_response(name, self._model)
            span.note(worker_id=str(worker), request_type="stream")

    def end(self, error_type: str) -> None:
        """What runs will not be done any more."""
        while self._running:
            _, span = self._running.popitem()
            _end(span, error_type)

    def _done(self, name: str, response: Mapping[str, Any]) -> None:
        span = self._running.pop(name, None)
        if span is None:
            return
        usage = response.get("usage")
        for key in ("input_tokens", "output_tokens"):
            count = usage.get(key) if isinstance(usage, dict) else None
            if isinstance(count, int):
                span.note(**{key: min(count, 2**53)})
        status = _text(response.get("status"))
        span.note(**{"response.status": status})
        _end(span, {"failed": "internal", "cancelled": "cancelled"}.get(status, ""))


def _end(span: Span, error_type: str) -> None:
    span.note(**{"request.outcome": "error" if error_type else "success"})
    if error_type:
        span.note(error_type=error_type)
        span.fail(error_type)
    span.end()


def _text(value: object) -> str:
    return value[:MOST_TEXT] if isinstance(value, str) else ""
