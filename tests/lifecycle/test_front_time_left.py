"""What a front tells of the time that remains: it never rises in one stop."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dynamo_trio.lifecycle import Hooks, Lifecycle, Timetable
from dynamo_trio.metrics.shutdown import FrontShutdownMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from tests.lifecycle.conftest import Running

FRONT = Timetable(http_drain=5)
#: How a stop that has begun goes on, 2 s later.
BEFALLS: dict[str, Callable[[Lifecycle], None]] = {
    "nothing": lambda lifecycle: None,
    "an escalation": lambda lifecycle: lifecycle.escalate("SIGINT"),
    "a fatal error": lambda lifecycle: lifecycle.fail(RuntimeError("a bug")),
}


def left(metrics: FrontShutdownMetrics) -> float:
    (sample,) = next(iter(metrics.collect())).samples
    return sample.value


async def watch(lifecycle: Lifecycle, seen: list[float]) -> None:
    metrics = FrontShutdownMetrics(lifecycle)
    while True:
        seen.append(left(metrics))
        await trio.sleep(0.125)


@pytest.mark.parametrize("befalls", BEFALLS)
@pytest.mark.parametrize("limits", [FRONT, Timetable(http_drain=5, total=40)], ids=["", "total"])
@pytest.mark.parametrize("needs", [0, 3, 100])
async def test_the_time_that_remains_never_rises(
    running: Running, autojump_clock: MockClock, needs: int, limits: Timetable, befalls: str
) -> None:
    seen: list[float] = []

    async def last_words() -> None:
        await trio.sleep(4)

    async with (
        running(limits, hooks=Hooks(drain=last_words)) as world,
        trio.open_nursery() as beside,
    ):
        beside.start_soon(watch, world.lifecycle, seen)
        if needs:
            world.request(needs, gate=world.lifecycle.http, farewell=0.5)
        world.request(20)  # an endpoint of the same process has its own drain
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(2)
        BEFALLS[befalls](world.lifecycle)
        await world.lifecycle.wait_stopped()
        beside.cancel_scope.cancel()
    finite = [seconds for seconds in seen if seconds < float("inf")]
    assert [pair for pair in pairwise(seen) if pair[1] > pair[0]] == []
    assert finite[-1] == 0
    assert max(finite) <= 5
    assert (max(finite) > 4) == bool(needs), "until the requests of the front are cut"
