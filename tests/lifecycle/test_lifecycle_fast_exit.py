"""The fast exit of a failover group: on SIGTERM alone, within its limit, and watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.testing

from dynamo_trio.lifecycle import Timetable

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.lifecycle.conftest import Running, World

FAST = Timetable(fast_exit=True, grace=3, drain=100)


async def stop_with_stuck_store(world: World, cause: str) -> None:
    world.lifecycle.on_unregister(trio.sleep_forever)
    world.request(50)
    world.lifecycle.request_stop(cause)
    await world.lifecycle.wait_stopped()


async def test_it_has_a_limit_of_its_own(running: Running, autojump_clock: MockClock) -> None:
    async with running(FAST) as world:
        overdue: list[float] = []
        world.lifecycle.on_overdue(overdue.append)
        await stop_with_stuck_store(world, "SIGTERM")
        assert world.now == 5
        assert world.lifecycle.leaves_fast
        assert world.outcomes()["unregister"] == "timed_out"
        assert overdue[-1] == 10  # the watchdog follows
        world.work.cancel_scope.cancel()


async def test_another_stop_is_as_ever(running: Running, autojump_clock: MockClock) -> None:
    async with running(FAST) as world:
        await stop_with_stuck_store(world, "SIGINT")
        assert world.now == 50  # the request is finished
        assert not world.lifecycle.leaves_fast
        assert world.seconds()["unregister"] == 2


async def test_sigint_during_it_does_not_make_it_longer(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(FAST) as world:
        world.lifecycle.on_unregister(trio.sleep_forever)
        world.request(50)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        world.lifecycle.escalate("SIGINT")
        await world.lifecycle.wait_stopped()
        assert world.now == 5
        assert world.lifecycle.leaves_fast
        world.work.cancel_scope.cancel()


async def test_a_fatal_error_during_it_is_told_by_the_code(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(FAST) as world:
        world.lifecycle.on_unregister(trio.sleep_forever)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        world.lifecycle.fail(ValueError("engine dead"))
        await world.lifecycle.wait_stopped()
        assert world.now == 5
        assert world.lifecycle.leaves_fast
        assert world.lifecycle.exit_code() == 1


def test_the_timetable_tells_of_it() -> None:
    assert FAST.describe().startswith("on SIGTERM only unregister <= 5 s; else unregister <= 2 s")
