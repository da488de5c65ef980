"""Which planes carry the requests of a process: metrics of our own, and Dynamo's of ``tcp``.

``role`` says as what the process has the connection or the request: as the ``client`` that asks,
or as the ``worker`` that is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from dynamo_trio.plane import Planes, Traffic

_LABELS = ("plane", "role")


class PlaneMetrics(Collector):
    """Read when Prometheus asks."""

    def __init__(self, planes: Planes) -> None:
        self._planes = planes

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "dynamo_trio_plane_requests", "Requests that a worker has taken on", labels=_LABELS
        )
        connections = GaugeMetricFamily(
            "dynamo_trio_plane_connections",
            "Connections on which requests travel, without those for the answers of tcp",
            labels=_LABELS,
        )
        for name, plane in self._planes.items():
            stand = plane.connections
            requests.add_metric([name, "client"], self._planes.sent[name])
            requests.add_metric([name, "worker"], self._planes.taken[name])
            connections.add_metric([name, "client"], stand.client)
            connections.add_metric([name, "worker"], stand.worker)
        yield requests
        yield connections
        if (tcp := self._planes.get("tcp")) is not None and tcp.traffic is not None:
            yield from _transport(tcp.traffic)


def _transport(traffic: Traffic) -> Iterator[Metric]:
    """Dynamo's own, of its own plane."""

    def counter(name: str, text: str, value: int) -> Metric:
        return CounterMetricFamily(f"dynamo_transport_tcp_{name}", text, value=value)

    yield counter("bytes_sent", "Bytes of requests that were sent", traffic.sent)
    yield counter("bytes_received", "Bytes that acknowledged them", traffic.received)
    yield counter("errors", "Requests that were not acknowledged", traffic.errors)
    yield counter(
        "accept_backoff", "How often there was no room for an answer's connection", traffic.backoffs
    )
