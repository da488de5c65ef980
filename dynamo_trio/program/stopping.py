"""What a program tells a person, or a log, while it stops."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from dynamo_trio.console import InFlight, StopLine

if TYPE_CHECKING:
    from dynamo_trio.console import Terminal
    from dynamo_trio.lifecycle import Admission, Lifecycle

logger = logging.getLogger("dynamo_trio.lifecycle")

#: How often the line at the bottom of a terminal is renewed, in seconds.
DRAW_EVERY = 1.0
#: Seconds after which a log is first told what is left; then after twice as long, and so on.
LOG_FIRST = 1.0


async def tell_stop(
    lifecycle: Lifecycle, terminal: Terminal | None = None, *, color: bool = True
) -> None:
    """Tell what a stop waits for, from its beginning until this is cancelled.

    On a terminal it is one line, at the bottom, renewed every second. Elsewhere it is a line
    of the log after 1, 2, 4, 8, ... seconds: whoever reads a log wants to know what holds the
    process, but not every second.
    """
    await lifecycle.wait_stop_requested()
    if terminal is None or not terminal.is_terminal:
        await _log(lifecycle)
    else:
        await _draw(lifecycle, terminal, color)


async def _draw(lifecycle: Lifecycle, terminal: Terminal, color: bool) -> None:
    began = trio.current_time()
    try:
        while True:
            line = stop_line(lifecycle, color=color)
            # Without a request it may all be over in a moment.
            shown = line.running or (trio.current_time() > began and line.is_worth_a_line)
            terminal.set_status(line if shown else None)
            await trio.sleep(DRAW_EVERY)
    finally:
        terminal.set_status(None)


async def _log(lifecycle: Lifecycle) -> None:
    after = LOG_FIRST
    began = trio.current_time()
    while True:
        await trio.sleep_until(began + after)
        line = stop_line(lifecycle)
        logger.info("still stopping after %g s, %s: %s", after, line.phase, line.words)
        after *= 2


def stop_line(lifecycle: Lifecycle, *, color: bool = True) -> StopLine:
    """How far the stop is now."""
    # A request of the front has another one at an endpoint behind it: it is told of once.
    inside = lifecycle.http.admissions() or lifecycle.work.admissions()
    steps = (stage.name for stage in lifecycle.report().steps if stage.ending is None)
    return StopLine(
        lifecycle.phase.label,
        lifecycle.until_cut() if inside else lifecycle.remaining(),
        tuple(map(_in_flight, inside)),
        tuple(steps),
        color,
    )


def _in_flight(admission: Admission) -> InFlight:
    age = trio.current_time() - admission.admitted_at
    return InFlight(admission.label, age, admission.prospects.needs())
