"""The frontend's metrics, with Dynamo 1.5.1's names and labels.

One request has one terminal outcome, counted when its record is closed, or at once if it is
refused; so whenever the frontend is idle ``started = success + error`` holds for each model.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynamo_trio.errors import (
    Cancelled,
    ConnectionTimeout,
    DynamoException,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
)
from dynamo_trio.metrics.exposition import expose

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = "dynamo_frontend"
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_SLOW = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)

_ERROR_TYPES: tuple[tuple[type[DynamoException], str], ...] = (
    (Cancelled, "cancelled"),
    (ModelNotFound, "not_found"),
    (InvalidArgument, "validation"),
    (Overloaded, "overload"),
    (ConnectionTimeout, "response_timeout"),
)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def error_type(exc: DynamoException) -> str:
    """The value of Dynamo's metric label ``error_type`` for this error."""
    for kind, name in _ERROR_TYPES:
        if isinstance(exc, kind):
            return name
    return "unavailable" if exc.status == 503 else "internal"


@attrs.define(eq=False)
class FrontendMetrics:
    """All collectors of one frontend, in a registry of their own."""

    registry: CollectorRegistry = attrs.field(factory=CollectorRegistry)
    started: Counter = attrs.field(init=False)
    finished: Counter = attrs.field(init=False)
    cancelled: Counter = attrs.field(init=False)
    rejected: Counter = attrs.field(init=False)
    active: Gauge = attrs.field(init=False)
    ttft: Histogram = attrs.field(init=False)
    itl: Histogram = attrs.field(init=False)
    duration: Histogram = attrs.field(init=False)
    prompt_tokens: Histogram = attrs.field(init=False)
    output_sequence: Histogram = attrs.field(init=False)
    output_tokens: Counter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        kind = ["model", "endpoint", "request_type"]
        self.started = self._counter(
            "requests_started", "Requests that were received, refused ones included", kind
        )
        self.finished = self._counter(
            "requests",
            "Requests that have ended, refused ones included",
            [*kind, "status", "error_type"],
        )
        self.cancelled = self._counter(
            "model_cancellation", "Requests whose client left before the end", kind
        )
        self.rejected = self._counter(
            "model_rejection",
            "Requests refused because every worker was full",
            ["model", "endpoint"],
        )
        self.active = Gauge(
            f"{_PREFIX}_active_requests", "Requests that run now", ["model"], registry=self.registry
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token",
            _SLOW,
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of an answer", _FAST
        )
        self.duration = self._histogram(
            "request_duration_seconds", "Seconds from a request's arrival to its end", _SLOW
        )
        self.prompt_tokens = self._histogram("input_sequence_tokens", "Tokens of a prompt", _TOKENS)
        self.output_sequence = self._histogram(
            "output_sequence_tokens", "Tokens of an answer", _TOKENS
        )
        self.output_tokens = self._counter("output_tokens", "Tokens sent to clients", ["model"])

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"{_PREFIX}_{name}_total", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"{_PREFIX}_{name}", text, ["model"], buckets=buckets, registry=self.registry
        )

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4."""
        return expose(self.registry)

    def refused(self, model: str, endpoint: str, request_type: str, error_type: str) -> None:
        """Count a request that was never admitted."""
        labels = (model, endpoint, request_type)
        self.started.labels(*labels).inc()
        self.finished.labels(*labels, "error", error_type).inc()

    @contextmanager
    def request(self, model: str, endpoint: str, request_type: str) -> Iterator[RequestRecord]:
        """Count one request from its admission to its one outcome."""
        record = RequestRecord(self, model, endpoint, request_type)
        self.started.labels(model, endpoint, request_type).inc()
        self.active.labels(model).inc()
        try:
            yield record
        finally:
            self.active.labels(model).dec()
            record.close()


@attrs.define(eq=False)
class RequestRecord:
    """What is measured of one request. Times are seconds on Trio's clock."""

    _metrics: FrontendMetrics
    model: str
    endpoint: str
    request_type: str  # "stream" or "unary"
    error_type: str = "internal"  # "" once the answer is complete
    _began: float = attrs.field(factory=trio.current_time)
    _last: float | None = None
    _tokens: int = 0

    @property
    def token_count(self) -> int:
        """Tokens that have arrived."""
        return self._tokens

    def age(self) -> float:
        """Seconds since the request was admitted."""
        return trio.current_time() - self._began

    def prompt(self, count: int) -> None:
        """Note the length of the prompt, in tokens."""
        self._metrics.prompt_tokens.labels(self.model).observe(count)

    def tokens(self, count: int) -> None:
        """Note that ``count`` tokens have just arrived."""
        if not count:
            return
        now = trio.current_time()
        if self._last is None:
            self._metrics.ttft.labels(self.model).observe(now - self._began)
        else:
            gap = (now - self._last) / count
            self._metrics.itl.labels(self.model).observe(gap)
        self._last = now
        self._tokens += count

    def close(self) -> None:
        """Count the outcome; called once, by the block that opened the record."""
        metrics, labels = self._metrics, (self.model, self.endpoint, self.request_type)
        status = "error" if self.error_type else "success"
        metrics.finished.labels(*labels, status, self.error_type).inc()
        if self.error_type == "cancelled":
            metrics.cancelled.labels(*labels).inc()
        if self.error_type == "overload":
            metrics.rejected.labels(self.model, self.endpoint).inc()
        metrics.duration.labels(self.model).observe(self.age())
        metrics.output_sequence.labels(self.model).observe(self._tokens)
        metrics.output_tokens.labels(self.model).inc(self._tokens)
