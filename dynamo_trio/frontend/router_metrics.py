"""What requests look like to the part that routes them (``dynamo_component_router_*``).

Dynamo's router is a component with metrics of its own, inside of a frontend as well. Here it is
part of the frontend; what it can tell without KV routing is told under Dynamo's names, for each
component that is routed to. ``worker_id`` is there, too, the process that routes.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from dynamo_trio.metrics import buckets
from dynamo_trio.metrics.counters import CounterFamily
from dynamo_trio.metrics.histograms import HistogramFamily

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from dynamo_trio.discovery import EndpointId
    from dynamo_trio.frontend.record import RequestRecord

_PREFIX = "dynamo_component_router"
_LABELS = ("dynamo_namespace", "dynamo_component", "router_id", "worker_id")


class RouterMetrics:
    """Times are seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        number = secrets.randbits(63)
        self._ids = (str(number), f"{number:x}")
        self._started = CounterFamily(
            f"{_PREFIX}_requests_started", "Requests that were given to a worker", _LABELS,
            registry)  # fmt: skip
        self._ended = CounterFamily(
            f"{_PREFIX}_requests", "Requests that were given to a worker, and have ended", _LABELS,
            registry)  # fmt: skip

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> HistogramFamily:
            return HistogramFamily(f"{_PREFIX}_{name}", text, _LABELS, bounds, registry)

        self._ttft = histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token",
            buckets.TIME_TO_FIRST_TOKEN)  # fmt: skip
        self._itl = histogram(
            "inter_token_latency_seconds", "Seconds between two tokens, on average over an answer",
            buckets.INTER_TOKEN_LATENCY)  # fmt: skip
        self._input = histogram("input_sequence_tokens", "Tokens of a prompt", buckets.INPUT_TOKENS)
        self._output = histogram(
            "output_sequence_tokens", "Tokens of an answer", buckets.OUTPUT_TOKENS
        )

    def started(self, endpoint: EndpointId) -> None:
        """A request was given to a worker of this endpoint."""
        self._started.labels(*self._labels(endpoint)).inc()

    def ended(self, record: RequestRecord) -> None:
        """A request has ended; it counts if it was with a worker."""
        if record.routed is None:
            return
        labels = self._labels(record.routed)
        self._ended.labels(*labels).inc()
        self._input.labels(*labels).observe(record.prompt_tokens or 0)
        if record.ttft is not None:
            self._ttft.labels(*labels).observe(record.ttft)
            self._output.labels(*labels).observe(record.token_count)
        if (gap := record.mean_gap) is not None:
            self._itl.labels(*labels).observe(gap)

    def _labels(self, endpoint: EndpointId) -> tuple[str, ...]:
        return (endpoint.namespace, endpoint.component, *self._ids)
