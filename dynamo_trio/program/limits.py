"""From the configuration to the limits of a stop, and what the log says of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import attrs

from dynamo_trio.lifecycle import DrainPolicy, GraceMode, Timetable

if TYPE_CHECKING:
    from dynamo_trio.config import Config
    from dynamo_trio.lifecycle import Lifecycle

logger = logging.getLogger("dynamo_trio")

#: What was said last of the limits of each.
_told: WeakKeyDictionary[Lifecycle, str] = WeakKeyDictionary()


def common_timetable(config: Config) -> Timetable:
    """What holds for every program; each adds its own phases. No program has callbacks."""
    return Timetable(
        grace=0.0,
        grace_mode=GraceMode(config.grace_mode),
        drain=config.drain,
        drain_policy=DrainPolicy(config.drain_policy),
        hook=config.callback_limit,
        hooks=0,
        fatal=config.fatal_limit,
        killed_after=config.termination_grace,
        fast_exit=config.fast_exit,
        fast_unregister=config.fast_unregister,
    )


def worker_timetable(config: Config) -> Timetable:
    """The limits of the stop of a process that serves endpoints."""
    return attrs.evolve(common_timetable(config), grace=config.grace, total=config.worker_budget)


def tell_timetable(lifecycle: Lifecycle) -> None:
    """Log how long a stop may take; once, and once more where the program has changed it."""
    text = lifecycle.timetable.describe()
    before, _told[lifecycle] = _told.get(lifecycle), text
    if text != before:
        changed = "" if before is None else ", as the program has changed it"
        logger.info("shutdown timetable%s: %s", changed, text)
