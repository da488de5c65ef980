"""Counters that cost next to nothing to count with.

As :mod:`~dynamo_trio.metrics.histograms`: one thread feeds and reads them all, so there is no lock,
and the label values are not made into text, and checked, each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


@attrs.define(eq=False)
class Count:
    """The value of one series."""

    value: int = 0

    def inc(self) -> None:
        """One more."""
        self.value += 1


class CounterFamily(Collector):
    """One counter, with a :class:`Count` for each set of label values.

    ``name`` is without ``_total``.
    """

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._series: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The series with these label values; it is made when it is first asked for."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Count()
        return found

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        yield family
