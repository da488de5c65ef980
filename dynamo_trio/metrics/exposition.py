"""Metrics in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

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
            metric.samples = [
                _with_dynamos_bound(sample)
                for sample in metric.samples
                if sample.name != metric.name + _CREATED
            ]
            yield metric


def _with_dynamos_bound(sample: Sample) -> Sample:
    """A whole number is ``2`` in Dynamo's ``le``, not ``2.0``: queries ask for it as a text."""
    bound = sample.labels.get("le", "")
    if not bound.endswith(".0"):
        return sample
    return sample._replace(labels={**sample.labels, "le": bound[:-2]})


def expose(registry: CollectorRegistry) -> bytes:
    """Everything in a registry, in Prometheus' text format 0.0.4."""
    return generate_latest(_AsDynamo(registry))
