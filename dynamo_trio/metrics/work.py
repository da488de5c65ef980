"""How busy a process is, under the names that Dynamo 1.5.1 gives it (``dynamo_work_handler_*``).

The pool is as large as the limit of an endpoint (infinite without one, and then nobody waits in
the queue for a place in it).
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dynamo_trio.errors import DynamoException

_PREFIX = "dynamo_work_handler"
_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


@attrs.define(eq=False)
class WorkMetrics:
    """What is told for the whole process. Times are seconds."""

    _registry: CollectorRegistry
    #: From the request's arrival to the word that its answer begins.
    first_response: Histogram = attrs.field(init=False)
    _transit: Histogram = attrs.field(init=False)
    _permit_wait: Histogram = attrs.field(init=False)
    _overloaded: Counter = attrs.field(init=False)
    _refused: Counter = attrs.field(init=False)
    _waiting: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.first_response = self._histogram(
            "time_to_first_response_seconds",
            "Seconds from a request's arrival to the word that its answer begins",
        )
        self._transit = self._histogram(
            "network_transit_seconds",
            "Seconds that requests were on the way here, by the clocks of both ends",
        )
        self._permit_wait = self._histogram(
            "permit_wait_seconds", "Seconds that requests waited for their turn"
        )
        self._overloaded = Counter(
            "dynamo_rejection_request", "Requests refused for want of room", registry=self._registry
        )
        self._refused = Counter(
            f"{_PREFIX}_enqueue_rejected",
            "Requests refused because the process stops",
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, buckets=_SECONDS, registry=self._registry)

    def arrived(self, sent_at_ns: int | None) -> None:
        """A request was admitted that its client sent then, in nanoseconds since the epoch."""
        if sent_at_ns is not None:
            self._transit.observe(max(0.0, (time.time_ns() - sent_at_ns) / 1e9))

    @contextmanager
    def waiting(self, must_wait: bool) -> Iterator[None]:
        """A request waits for its turn within the block, if it must; leaves by an error if it
        has not got it."""
        began = trio.current_time()
        self._waiting += must_wait
        try:
            yield
        finally:
            self._waiting -= must_wait
        self._permit_wait.observe(trio.current_time() - began if must_wait else 0.0)

    def refused(self, error: DynamoException) -> None:
        """A request was refused."""
        counter = self._overloaded if error.reason == "overloaded" else self._refused
        counter.inc()

    def watch(self, running: Callable[[], float], limit: float, queue: int) -> None:
        """Show how many requests run and may run; read when Prometheus asks."""

        def gauge(name: str, text: str, read: Callable[[], float]) -> None:
            Gauge(f"dynamo_{name}", text, registry=self._registry).set_function(read)

        def waiting() -> int:
            return self._waiting

        def working() -> float:
            return running() - self._waiting

        gauge("work_handler_pool_active_tasks", "Requests that run in the process now", working)
        gauge("work_handler_pool_capacity", "Requests that an endpoint works on", lambda: limit)
        gauge("work_handler_queue_depth", "Requests that wait for their turn", waiting)
        gauge(
            "work_handler_queue_capacity",
            "Requests that may wait for their turn",
            lambda: queue if limit < math.inf else 0,
        )
        gauge("engine_request", "Requests that the engine has now", working)
        gauge("request_queue", "Requests that wait in front of the engine", waiting)
