"""The metrics of a process with endpoints, with Dynamo 1.5.1's names and labels.

``dynamo_component_*`` are told for each endpoint. Every request has one terminal outcome,
counted when its record ends; so whenever an endpoint is idle its ``inflight_requests`` is 0.
``dynamo_work_handler_*`` are told for the process (:mod:`dynamo_trio.metrics.work`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from dynamo_trio.errors import DynamoException, InvalidArgument, LocalProtocolError, ProtocolError
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.metrics.exposition import expose
from dynamo_trio.metrics.work import WorkMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from dynamo_trio.wire.names import EndpointId

_PREFIX = "dynamo_component"
_LABELS = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id")


def error_type(error: DynamoException) -> str:
    """The value of Dynamo's label ``error_type`` for what ended a request."""
    if isinstance(error, LocalProtocolError):
        return "serialization"
    if isinstance(error, ProtocolError):
        return "deserialization"
    return "invalid_message" if isinstance(error, InvalidArgument) else "generate"


@attrs.define(eq=False)
class ComponentMetrics:
    """All collectors of one process, in a registry of their own.

    ``worker_id`` is the instance id in hex.
    """

    worker_id: str
    registry: CollectorRegistry = attrs.field(factory=CollectorRegistry)
    work: WorkMetrics = attrs.field(init=False)
    #: When the process began, by time.monotonic(), as far as is known.
    began: float = attrs.field(factory=time.monotonic)
    _families: _Families = attrs.field(init=False, factory=lambda: _Families())

    def __attrs_post_init__(self) -> None:
        self.work = WorkMetrics(self.registry)
        self.registry.register(self._families)
        text = "Seconds since the process began"
        uptime = Gauge(f"{_PREFIX}_uptime_seconds", text, ["worker_id"], registry=self.registry)
        uptime.labels(self.worker_id).set_function(lambda: time.monotonic() - self.began)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4."""
        return expose(self.registry)

    def endpoint(
        self, endpoint: EndpointId, labels: Sequence[tuple[str, str]] = ()
    ) -> EndpointMetrics:
        """The metrics of one endpoint; ``labels`` are Dynamo's ``metrics_labels``."""
        family = self._families.of(tuple(name for name, _ in labels))
        own = (endpoint.namespace, endpoint.component, endpoint.name, self.worker_id)
        return EndpointMetrics.make(family, (*own, *(value for _, value in labels)), self.work)


class _Family:
    """The collectors of all endpoints that have the same extra labels."""

    def __init__(self, extra: tuple[str, ...]) -> None:
        self.registry = registry = CollectorRegistry()
        labels = [*_LABELS, *extra]
        self.requests = Counter(
            f"{_PREFIX}_requests",
            "Requests that the endpoint has taken on",
            labels,
            registry=registry,
        )
        self.request_bytes = Counter(
            f"{_PREFIX}_request_bytes",
            "Bytes of the requests that the endpoint has taken on",
            labels,
            registry=registry,
        )
        self.response_bytes = Counter(
            f"{_PREFIX}_response_bytes",
            "Bytes of the items that the endpoint has sent",
            labels,
            registry=registry,
        )
        self.cancellations = Counter(
            f"{_PREFIX}_cancellation",
            "Requests whose client left before the end",
            labels,
            registry=registry,
        )
        self.errors = Counter(
            f"{_PREFIX}_errors",
            "Requests that ended in an error",
            [*labels, "error_type"],
            registry=registry,
        )
        self.inflight = Gauge(
            f"{_PREFIX}_inflight_requests",
            "Requests that run in the endpoint now",
            labels,
            registry=registry,
        )
        self.duration = Histogram(
            f"{_PREFIX}_request_duration_seconds",
            "Seconds from a request's arrival to its end",
            labels,
            registry=registry,
        )


class _Families(Collector):
    """One metric has one set of labels in prometheus_client; here it may have several."""

    def __init__(self) -> None:
        self._by_labels: dict[tuple[str, ...], _Family] = {}

    def of(self, extra: tuple[str, ...]) -> _Family:
        if extra not in self._by_labels:
            self._by_labels[extra] = _Family(extra)
        return self._by_labels[extra]

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for family in self._by_labels.values():
            for metric in family.registry.collect():
                merged.setdefault(metric.name, metric)
                if merged[metric.name] is not metric:
                    merged[metric.name].samples.extend(metric.samples)
        return merged.values()


@attrs.define(eq=False, kw_only=True)
class EndpointMetrics:
    """The metrics of one endpoint. They exist, at 0, from the beginning."""

    requests: Counter
    request_bytes: Counter
    response_bytes: Counter
    cancellations: Counter
    inflight: Gauge
    duration: Histogram
    work: WorkMetrics
    _errors: Counter
    _labels: tuple[str, ...]
    #: Invariant: the records that were started and have not ended.
    _live: set[CallRecord] = attrs.field(factory=set)
    #: Bytes of items of those that have ended.
    _past: int = 0

    @classmethod
    def make(cls, family: _Family, labels: tuple[str, ...], work: WorkMetrics) -> EndpointMetrics:
        """The metrics with these label values."""
        return cls(
            requests=family.requests.labels(*labels),
            request_bytes=family.request_bytes.labels(*labels),
            response_bytes=family.response_bytes.labels(*labels),
            cancellations=family.cancellations.labels(*labels),
            inflight=family.inflight.labels(*labels),
            duration=family.duration.labels(*labels),
            work=work,
            errors=family.errors,
            labels=labels,
        )

    def start(self, request_bytes: int) -> CallRecord:
        """Count a request that was admitted. Its record must be ended."""
        self.requests.inc()
        self.request_bytes.inc(request_bytes)
        self.inflight.inc()
        record = CallRecord(self)
        self._live.add(record)
        return record

    def ended(self, record: CallRecord) -> None:
        """Forget a record of this endpoint."""
        self._live.discard(record)
        self._past += record.bytes

    def given(self) -> int:
        """Bytes of all items that were ever sent: it grows with each of them."""
        return self._past + sum(record.bytes for record in self._live)

    def failed(self, error: DynamoException) -> None:
        """Count a failure."""
        self._errors.labels(*self._labels, error_type(error)).inc()


@attrs.define(eq=False)
class CallRecord:
    """What is measured of one request."""

    _metrics: EndpointMetrics
    _began: float = attrs.field(factory=trio.current_time)
    #: Of the items that were sent.
    bytes: int = 0

    @property
    def touched(self) -> bool:
        """Was something of the answer sent?"""
        return self.bytes > 0

    def begun(self) -> None:
        """The request is valid, and its client is told so."""
        self._metrics.work.first_response.observe(self._age())

    def received(self, size: int) -> None:
        """Note ``size`` bytes of what streams in."""
        self._metrics.request_bytes.inc(size)

    def item(self, size: int) -> None:
        """Note an item of ``size`` bytes."""
        self.bytes += size

    def ended(self, outcome: Outcome, error: DynamoException | None) -> None:
        """Count the outcome; called once."""
        metrics = self._metrics
        metrics.ended(self)
        metrics.inflight.dec()
        metrics.duration.observe(self._age())
        metrics.response_bytes.inc(self.bytes)
        if outcome is Outcome.CANCELLED:
            metrics.cancellations.inc()
        elif outcome is Outcome.FAILED and error is not None:
            metrics.failed(error)

    def _age(self) -> float:
        return trio.current_time() - self._began
