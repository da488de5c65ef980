"""The engine as a service of the process: open while there may be requests, closed after them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from dynamo_trio.engines import Engine, open_engine
from dynamo_trio.errors import EngineHung, LoadError

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
    progress: Callable[[float], None] = _nothing,
    task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load ``core``, and close it when the lifecycle has stopped, which is after the last request.

    To be started under ``lifecycle.supervise`` in a nursery outside the endpoint: when the
    engine dies, its streams hear of it, the process begins to stop, and the requests can
    still say farewell.

    Raises:
        StartupError: loading failed.
        EngineDead, EngineHung: in a group, after the streams were told.
    """
    loading = True
    try:
        async with open_engine(
            core,
            host=host,
            limits=limits,
            close_scope=partial(lifecycle.cleanup, name="engine_close"),
            recall_scope=partial(lifecycle.cleanup, name="engine_recall"),
            progress=progress,
        ) as engine:
            loading = False
            task_status.started(engine)
            await lifecycle.wait_stopped()
    except EngineHung as exc:
        if not loading:
            raise
        raise LoadError("the load of the model hangs and cannot be ended (EngineHung)") from exc
