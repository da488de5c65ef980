"""Histograms that cost next to nothing to feed.

``prometheus_client`` takes a lock for each value, since threads may share its histograms. Here
one thread feeds and reads them all, and values may come for each token: a value is a search in a
short tuple and two additions.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

import attrs
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric


@attrs.define(eq=False)
class Distribution:
    """The values of one series, by the bucket that they fall into."""

    bounds: tuple[float, ...]  # ascending; one more bucket, to infinity, is behind the last
    counts: list[int] = attrs.field(init=False)
    total: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Note a value, or ``times`` values that are alike."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class HistogramFamily(Collector):
    """One histogram, with a :class:`Distribution` for each set of label values."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        bounds: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._series: dict[tuple[str, ...], Distribution] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Distribution:
        """The series with these label values; it is made when it is first asked for."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Distribution(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, series in self._series.items():
            buckets = list(zip(ends, accumulate(series.counts), strict=True))
            family.add_metric(values, buckets, series.total)
        yield family
