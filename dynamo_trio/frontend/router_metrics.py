"""What requests look like to the part that routes them (``dynamo_component_router_*``).

Dynamo's router is a component with metrics of its own, inside of a frontend as well. Here it is
part of the frontend; what it can tell without KV routing is told under Dynamo's names, for each
component that is routed to. ``worker_id`` is there, too, the process that routes.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.metrics import buckets
from dynamo_trio.metrics.counters import CounterFamily
from dynamo_trio.metrics.histograms import HistogramFamily

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from dynamo_trio.discovery import EndpointId
    from dynamo_trio.frontend.record import RequestRecord
    from dynamo_trio.metrics.counters import Count
    from dynamo_trio.metrics.histograms import Distribution

_PREFIX = "dynamo_component_router"
_LABELS = ("dynamo_namespace", "dynamo_component", "router_id", "worker_id")


@attrs.frozen(eq=False)
class _Series:
    """Of one component."""

    started: Count
    ended: Count
    input: Distribution
    ttft: Distribution
    output: Distribution
    itl: Distribution


class RouterMetrics:
    """Times are seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        number = secrets.randbits(63)
        self._ids = (str(number), f"{number:x}")
        #: Namespace and component -> what is counted; so many as the families have series.
        self._series: dict[tuple[str, str], _Series] = {}
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
        self._of(endpoint).started.value += 1

    def ended(self, record: RequestRecord) -> None:
        """A request has ended; it counts if it was with a worker."""
        if record.routed is None:
            return
        series = self._of(record.routed)
        series.ended.value += 1
        series.input.observe(record.prompt_tokens or 0)
        if record.ttft is not None:
            series.ttft.observe(record.ttft)
            series.output.observe(record.token_count)
        if (gap := record.mean_gap) is not None:
            series.itl.observe(gap)

    def _of(self, endpoint: EndpointId) -> _Series:
        found = self._series.get((endpoint.namespace, endpoint.component))
        if found is None:
            labels = (endpoint.namespace, endpoint.component, *self._ids)
            measured = (self._input, self._ttft, self._output, self._itl)
            found = self._series[labels[:2]] = _Series(
                self._started.labels(*labels),
                self._ended.labels(*labels),
                *[family.labels(*labels) for family in measured],
            )
        return found
