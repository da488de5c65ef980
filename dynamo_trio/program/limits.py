"""From the configuration to the limits of a stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.lifecycle import DrainPolicy, GraceMode, Timetable

if TYPE_CHECKING:
    from dynamo_trio.config import Config


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
    )


def worker_timetable(config: Config) -> Timetable:
    """The limits of the stop of a process that serves endpoints."""
    return attrs.evolve(common_timetable(config), grace=config.grace, total=config.worker_budget)
