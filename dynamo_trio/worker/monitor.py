"""Is the engine still well? Asked now and then, for as long as it may have requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from dynamo_trio.errors import EngineClosed
from dynamo_trio.lifecycle import Phase

if TYPE_CHECKING:
    from dynamo_trio.engines import Engine
    from dynamo_trio.lifecycle import Lifecycle

logger = logging.getLogger("dynamo_trio.worker")


async def monitor_engine(lifecycle: Lifecycle, engine: Engine, interval: float) -> None:
    """Check the engine every ``interval`` seconds until a stop waits for nobody; 0: never.

    A stop that has begun lets requests end for minutes. They, and it, would wait in vain for
    an engine that hangs: so it is watched until the last of them is gone, or cut.

    Raises:
        EngineDead, EngineHung: in a group; the engine has ended.
    """
    if not interval:
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_check, engine, interval, name="engine monitor")
        await lifecycle.wait_phase(Phase.STOPPING)
        nursery.cancel_scope.cancel("nobody waits for the engine")
    logger.debug("nobody waits for the engine any more: it is no longer checked")


async def _check(engine: Engine, interval: float) -> None:
    try:
        while True:
            await trio.sleep(interval)
            await engine.check()
    except EngineClosed:
        return  # who closes an engine does not want it checked
