"""From the configuration to the limits of a process that is everything in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from dynamo_trio.program.limits import common_timetable

if TYPE_CHECKING:
    from dynamo_trio.config import Config
    from dynamo_trio.lifecycle import Timetable


def timetable(config: Config) -> Timetable:
    """The limits of a one-process stop. No grace: nobody else routes to it."""
    return attrs.evolve(
        common_timetable(config), http_drain=config.http_drain, total=config.standalone_budget
    )
