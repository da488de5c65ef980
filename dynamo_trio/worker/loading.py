"""The engine from its settings to its first request."""

from __future__ import annotations

import logging
import signal
from functools import partial
from typing import TYPE_CHECKING

import trio

from dynamo_trio.console import progress
from dynamo_trio.worker import assembly
from dynamo_trio.worker.hold import hold_engine

if TYPE_CHECKING:
    from dynamo_trio.engines import Engine, StepCore
    from dynamo_trio.program.entry import Start
    from dynamo_trio.worker.assembly import Model

logger = logging.getLogger("dynamo_trio.worker")


async def load_engine(start: Start, nursery: trio.Nursery, model: Model) -> Engine:
    """Load the engine; ``nursery`` holds it until the lifecycle has stopped.

    Raises:
        StartupError: it cannot be loaded.
    """
    core = await trio.to_thread.run_sync(assembly.build_core, start.config, model)
    limits = assembly.engine_limits(start.config, start.lifecycle.timetable.engine_close)
    _let_fault_be_set_off(start, core)
    with progress(start.terminal, f"loading {model.name}") as bar:
        hold = partial(hold_engine, start.lifecycle, core, limits=limits, progress=bar.update)
        hold = partial(hold, interval=start.config.health_interval)
        engine: Engine = await nursery.start(start.lifecycle.supervise, hold)
    return engine


def _let_fault_be_set_off(start: Start, core: StepCore) -> None:
    """SIGUSR2 sets off the fault that a simulated engine was given."""
    if (fault := start.config.sim_fault) is None:
        return
    from dynamo_trio.engines.sim import SimCore

    if not isinstance(core, SimCore):
        return

    def set_off() -> None:
        logger.info("SIGUSR2: the fault of the simulated engine is set off: %s", fault)
        core.faults.set_off()

    start.on_signal(signal.SIGUSR2, set_off)
