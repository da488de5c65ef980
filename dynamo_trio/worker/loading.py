"""The engine from its settings to its first request."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from dynamo_trio.console import progress
from dynamo_trio.worker import assembly
from dynamo_trio.worker.hold import hold_engine

if TYPE_CHECKING:
    from dynamo_trio.engines import Engine
    from dynamo_trio.program.entry import Start
    from dynamo_trio.worker.assembly import Model


async def load_engine(start: Start, nursery: trio.Nursery, model: Model) -> Engine:
    """Load the engine; ``nursery`` holds it until the lifecycle has stopped.

    Raises:
        StartupError: it cannot be loaded.
    """
    core = await trio.to_thread.run_sync(assembly.build_core, start.config, model)
    limits = assembly.engine_limits(start.config, start.lifecycle.timetable.engine_close)
    with progress(start.terminal, f"loading {model.name}") as bar:
        hold = partial(hold_engine, start.lifecycle, core, limits=limits, progress=bar.update)
        engine: Engine = await nursery.start(start.lifecycle.supervise, hold)
    return engine
