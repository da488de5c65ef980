"""The engine as a service of the process: open while there may be requests, closed after them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from dynamo_trio.engines import Engine, open_engine
from dynamo_trio.errors import EngineHung, EngineShutdown, LoadError
from dynamo_trio.worker.monitor import monitor_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.engines import Host, Limits, StepCore
    from dynamo_trio.lifecycle import Lifecycle


def _nothing(_share: float) -> None:
    """Progress that nobody watches."""


async def hold_engine(
    lifecycle: Lifecycle,
    core: StepCore,
    *,
    host: Host | None = None,
    limits: Limits | None = None,
    interval: float = 2.0,
    progress: Callable[[float], None] = _nothing,
    task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load ``core``, and close it when the lifecycle has stopped, which is after the last request.

    To be started under ``lifecycle.supervise`` in a nursery outside the endpoint. When the
    engine dies or hangs, in a request or in one of the health checks that it gets every
    ``interval`` seconds (0: none), the process begins to stop in that instant: new requests
    are refused and the registration is on its way out before the streams hear of it, and they
    can still say farewell while the engine is closed.

    Raises:
        StartupError: loading failed.
        EngineDead, EngineHung: closing failed.
    """
    loading = True
    told: list[EngineShutdown] = []

    def fail(cause: EngineShutdown) -> None:
        told.append(cause)
        lifecycle.fail(cause)

    try:
        async with open_engine(
            core,
            host=host,
            limits=limits,
            close_scope=partial(lifecycle.cleanup, name="engine_close"),
            recall_scope=partial(lifecycle.cleanup, name="engine_recall"),
            progress=progress,
            on_failed=fail,
        ) as engine:
            loading = False
            task_status.started(engine)
            await monitor_engine(lifecycle, engine, interval)
            await lifecycle.wait_stopped()
    except EngineHung as exc:
        if not loading:
            raise
        raise LoadError("the load of the model hangs and cannot be ended (EngineHung)") from exc
    except BaseExceptionGroup as group:
        news = group.split(EngineShutdown)[1] if told else group
        if news is not None:
            raise news from None
