"""Callbacks and ways out of discovery that do not end when they must."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.lifecycle import Hooks, Lifecycle, Phase, Timetable
from dynamo_trio.lifecycle.beside import UNWIND
from dynamo_trio.lifecycle.timetable import SLACK, TEARDOWN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from tests.lifecycle.conftest import Running

SECONDS = 5000.0
CALLBACKS = ("drain", "pre_shutdown", "cleanup")


async def deaf() -> None:
    """As a thread that cannot be abandoned, or a shield."""
    with trio.CancelScope(shield=True):
        await trio.sleep(SECONDS)


async def stubborn() -> None:
    """Takes no cancellation for an answer."""
    end = trio.current_time() + SECONDS
    while trio.current_time() < end:
        try:
            await trio.sleep_until(end)
        except BaseException:  # noqa: ASYNC103 - that is what is wrong with it
            with trio.CancelScope(shield=True):
                await trio.sleep(1)


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("hook", [deaf, stubborn])
async def test_the_stop_goes_on_without_a_callback_that_does_not_end(
    running: Running,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    name: str,
    hook: Callable[[], Awaitable[None]],
) -> None:
    called = []

    async def other() -> None:
        called.append(trio.current_time())

    chosen: dict[str, Any] = {one: hook if one == name else other for one in CALLBACKS}
    hooks = Hooks(**chosen)
    async with running(Timetable(grace=0.0, drain=60.0), hooks=hooks) as world:
        request = world.request(50)
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_stopped()
        assert (world.now, request.left) == (50, 50)
        assert len(called) == 2  # the other two
        assert world.lifecycle.report().leftovers == (f"{name}_callback",)
        assert world.outcomes()[f"{name}_callback"] == "unfinished"
    assert SECONDS <= world.now <= SECONDS + 1  # where run() has returned
    assert world.outcomes()[f"{name}_callback"] != "unfinished"
    assert f"{name}_callback cannot be cancelled; the stop goes on" in caplog.text


async def test_nobody_waits_for_it_at_the_limit_either(
    running: Running, autojump_clock: MockClock
) -> None:
    limits = Timetable(grace=0.0, drain=2.0, hook=3.0)
    async with running(limits, hooks=Hooks(cleanup=deaf)) as world:
        request = world.request(1000, farewell=0.5)
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_stopped()
        assert request.left == world.now == 3 + UNWIND + 2 + 0.5


@pytest.mark.parametrize("hurry", ["escalate", "fail"])
async def test_who_is_in_a_hurry_waits_a_moment(
    running: Running, autojump_clock: MockClock, hurry: str
) -> None:
    async with running(Timetable(grace=0.0), hooks=Hooks(drain=deaf, cleanup=deaf)) as world:
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(4)
        if hurry == "fail":
            world.lifecycle.fail(OSError("the engine"))
        else:
            world.lifecycle.escalate("SIGINT")
        await world.lifecycle.wait_stopped()
        assert world.now == 4 + UNWIND
        assert world.lifecycle.report().leftovers == ("drain_callback",)


async def test_the_unregistering_holds_nothing_up(
    running: Running, autojump_clock: MockClock
) -> None:
    withdrawn = []

    async def other() -> None:
        withdrawn.append(trio.current_time())

    async with running(Timetable(grace=5.0)) as world:
        world.lifecycle.on_unregister(deaf)
        world.lifecycle.on_unregister(other)
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_phase(Phase.DRAINING)
        assert world.now == 2 + UNWIND + 0.25
        await world.lifecycle.wait_stopped()
        assert withdrawn == [0.0]
        assert world.lifecycle.report().leftovers == ("unregister",)


async def test_a_run_that_is_cancelled_is_stopped_at_once(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(Timetable(grace=0.0), hooks=Hooks(drain=deaf))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        nursery.cancel_scope.cancel("the test is over")
        with trio.CancelScope(shield=True):
            await lifecycle.wait_stopped()
            assert trio.current_time() == 1 + UNWIND
    assert trio.current_time() == SECONDS


async def test_a_thread_that_cannot_be_abandoned(running: Running) -> None:
    release = threading.Event()

    async def hook() -> None:
        await trio.to_thread.run_sync(release.wait)

    limits = Timetable(grace=0.0, hook=0.05)
    async with running(limits, hooks=Hooks(pre_shutdown=hook)) as world:
        world.lifecycle.request_stop("SIGTERM")
        with trio.fail_after(30):
            await world.lifecycle.wait_stopped()
        assert world.lifecycle.report().leftovers == ("pre_shutdown_callback",)
        release.set()


# --- the watchdog ----------------------------------------------------------------------------


async def test_what_is_left_behind_does_not_hold_the_process_for_long(
    running: Running, autojump_clock: MockClock
) -> None:
    told: list[float] = []
    limits = Timetable(grace=0.0, engine_close=30.0)
    async with running(limits, hooks=Hooks(cleanup=deaf)) as world:
        world.lifecycle.on_overdue(told.append)
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_stopped()
    assert told == [limits.watchdog_limit, 30.0 + TEARDOWN + SLACK]
    assert limits.watchdog_limit > 900


@pytest.mark.parametrize(("total", "ends"), [(20.0, [25.0, 19.0]), (None, [13.0])])
async def test_the_watchdogs_limit_only_shrinks(
    running: Running, autojump_clock: MockClock, total: float | None, ends: list[float]
) -> None:
    told: list[float] = []
    limits = Timetable(grace=0.0, drain=3.0, hooks=0, engine_close=1.0, total=total)
    async with running(limits) as world:
        world.lifecycle.on_overdue(lambda seconds: told.append(world.now + seconds))
        world.request(1000)
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == 3
    assert told == ends


async def test_a_run_that_ends_without_a_stop_is_not_overdue(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(Timetable())
    told: list[float] = []
    lifecycle.on_overdue(told.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        await trio.sleep(1)
        nursery.cancel_scope.cancel("the program is over")
    assert (lifecycle.phase, told) == (Phase.STOPPED, [])
