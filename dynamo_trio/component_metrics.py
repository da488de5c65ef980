"""The metrics of a process with endpoints: Dynamo 1.5.1's ``dynamo_component_*``.

Every request has one terminal outcome, counted when its record ends; so whenever an
endpoint is idle its ``inflight_requests`` is 0.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dynamo_trio.errors import DynamoException, InvalidArgument, LocalProtocolError, ProtocolError
from dynamo_trio.lifecycle import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """All collectors of one process, in a registry of their own."""

    registry: CollectorRegistry = attrs.field(factory=CollectorRegistry)
    _began: float = attrs.field(factory=time.monotonic)
    #: Extra label names -> the collectors that have them: a collector's labels are fixed.
    _families: dict[tuple[str, ...], _Family] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        uptime = Gauge(f"{_PREFIX}_uptime_seconds", "Age of the process", registry=self.registry)
        uptime.set_function(lambda: time.monotonic() - self._began)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def endpoint(
        self, endpoint: EndpointId, instance_id: int, labels: Sequence[tuple[str, str]] = ()
    ) -> EndpointMetrics:
        """The metrics of one endpoint; ``labels`` are Dynamo's ``metrics_labels``."""
        names = tuple(name for name, _ in labels)
        if names not in self._families:
            self._families[names] = _Family.make(self.registry, names)
        own = (endpoint.namespace, endpoint.component, endpoint.name, f"{instance_id:x}")
        return EndpointMetrics(self._families[names], (*own, *(value for _, value in labels)))


@attrs.frozen
class _Family:
    requests: Counter
    request_bytes: Counter
    response_bytes: Counter
    cancellations: Counter
    errors: Counter
    inflight: Gauge
    duration: Histogram

    @classmethod
    def make(cls, registry: CollectorRegistry, extra: tuple[str, ...]) -> _Family:
        labels = [*_LABELS, *extra]
        return cls(
            Counter(f"{_PREFIX}_requests", "Requests taken", labels, registry=registry),
            Counter(f"{_PREFIX}_request_bytes", "Bytes of requests", labels, registry=registry),
            Counter(f"{_PREFIX}_response_bytes", "Bytes of items", labels, registry=registry),
            Counter(f"{_PREFIX}_cancellation", "Clients that left", labels, registry=registry),
            Counter(f"{_PREFIX}_errors", "Failed", [*labels, "error_type"], registry=registry),
            Gauge(f"{_PREFIX}_inflight_requests", "Running", labels, registry=registry),
            Histogram(f"{_PREFIX}_request_duration_seconds", "Whole", labels, registry=registry),
        )


@attrs.frozen(eq=False)
class EndpointMetrics:
    """The metrics of one endpoint."""

    _family: _Family
    _labels: tuple[str, ...]

    def start(self, request_bytes: int) -> CallRecord:
        """Count a request that was admitted. Its record must be ended."""
        family, labels = self._family, self._labels
        family.requests.labels(*labels).inc()
        family.request_bytes.labels(*labels).inc(request_bytes)
        family.inflight.labels(*labels).inc()
        return CallRecord(family, labels)


@attrs.define(eq=False)
class CallRecord:
    """What is measured of one request."""

    _family: _Family
    _labels: tuple[str, ...]
    _began: float = attrs.field(factory=trio.current_time)
    _bytes: int = 0

    def item(self, size: int) -> None:
        """Note an item of ``size`` bytes."""
        self._bytes += size

    def ended(self, outcome: Outcome, error: DynamoException | None) -> None:
        """Count the outcome; called once."""
        family, labels = self._family, self._labels
        family.inflight.labels(*labels).dec()
        family.duration.labels(*labels).observe(trio.current_time() - self._began)
        family.response_bytes.labels(*labels).inc(self._bytes)
        if outcome is Outcome.CANCELLED:
            family.cancellations.labels(*labels).inc()
        elif outcome is Outcome.FAILED and error is not None:
            family.errors.labels(*labels, error_type(error)).inc()
