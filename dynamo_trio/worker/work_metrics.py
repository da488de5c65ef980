"""How busy a worker is, under the names that Dynamo 1.5.1 gives it (``dynamo_work_handler_*``).

Its requests wait in a queue for a place in a pool. Here a request is admitted or refused at
once: the queue has no places and is always empty, and the pool is as large as the limit of an
endpoint (infinite without one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Gauge

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.runtime import DistributedRuntime


def add_work_metrics(runtime: DistributedRuntime) -> None:
    """Add the gauges to the runtime's metrics; they are read when Prometheus asks."""
    registry, work = runtime.metrics.registry, runtime.lifecycle.work

    def gauge(name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(f"dynamo_{name}", text, registry=registry).set_function(read)

    gauge("work_handler_pool_active_tasks", "Requests running", lambda: work.count)
    gauge("work_handler_pool_capacity", "Requests at once", lambda: runtime.request_limit)
    gauge("work_handler_queue_depth", "Requests waiting to be admitted", lambda: 0)
    gauge("work_handler_queue_capacity", "Requests that may wait", lambda: 0)
    gauge("engine_request", "Requests in the engine", lambda: work.count)
    gauge("request_queue", "Requests in front of the engine", lambda: 0)
