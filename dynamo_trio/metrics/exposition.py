"""Metrics in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

_CREATED = "_created"


class _AsDynamo(Collector):
    """A registry without the ``_created`` series, which Dynamo's metrics do not have.

    prometheus_client can leave them out by itself, but only for the whole process: that is for
    the program to say whose library this is.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if s.name != metric.name + _CREATED]
            yield metric


def expose(registry: CollectorRegistry) -> bytes:
    """Everything in a registry, in Prometheus' text format 0.0.4."""
    return generate_latest(_AsDynamo(registry))
