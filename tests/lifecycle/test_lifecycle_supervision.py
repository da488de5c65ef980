"""Services: a failure stops the process gracefully, a cancellation passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio.lifecycle import Phase

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.lifecycle.conftest import Running


async def service(how: str, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
    if how == "early":
        raise OSError("port in use")
    if how == "early_group":
        raise ExceptionGroup("start", [OSError("port in use")])
    task_status.started(7)
    await trio.sleep(1)
    if how == "raise":
        raise OSError("the disk is gone")
    if how == "group":
        raise ExceptionGroup("two", [OSError("a"), ValueError("b")])
    if how == "mixed":
        raise BaseExceptionGroup("mixed", [OSError("a"), KeyboardInterrupt()])


@pytest.mark.parametrize("how", ["raise", "group"])
async def test_a_service_that_fails_stops_the_process(
    running: Running, how: str, autojump_clock: MockClock
) -> None:
    async with running() as world:
        world.work.start_soon(world.lifecycle.supervise, service, how)
        world.request(3)
        await world.lifecycle.wait_stop_requested()
        assert world.now == 1
    assert world.now == 3  # the request was not harmed
    assert world.lifecycle.exit_code() == 1
    [error] = world.lifecycle.errors
    assert isinstance(error, OSError if how == "raise" else ExceptionGroup)


async def test_a_service_may_end(running: Running, autojump_clock: MockClock) -> None:
    async with running() as world:
        await world.lifecycle.supervise(service, "end")
        assert world.lifecycle.phase is Phase.SERVING
        world.lifecycle.request_stop("SIGTERM")
    assert world.lifecycle.exit_code() == 0


async def test_a_started_service_is_supervised_too(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running() as world:
        assert await world.work.start(world.lifecycle.supervise, service, "raise") == 7
        await world.lifecycle.wait_stop_requested()
    assert world.lifecycle.exit_code() == 1


@pytest.mark.parametrize("how", ["early", "early_group"])
async def test_a_service_that_cannot_start_fails_its_starter(
    running: Running, how: str, autojump_clock: MockClock
) -> None:
    async with running() as world:
        with pytest.raises((OSError, ExceptionGroup)):
            await world.work.start(world.lifecycle.supervise, service, how)
        assert not world.lifecycle.stopping
        world.lifecycle.request_stop("SIGTERM")
    assert world.lifecycle.exit_code() == 0


async def test_a_cancellation_passes(running: Running, autojump_clock: MockClock) -> None:
    async with running() as world:
        with trio.move_on_after(0.5) as scope:
            await world.lifecycle.supervise(service, "raise")
        assert scope.cancelled_caught
        assert not world.lifecycle.errors
        world.lifecycle.request_stop("SIGTERM")


async def test_what_is_no_exception_passes_and_the_rest_counts(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running() as world:
        with pytest.raises(BaseExceptionGroup) as caught:
            await world.lifecycle.supervise(service, "mixed")
        assert caught.group_contains(KeyboardInterrupt)
        assert not caught.group_contains(OSError)
        assert world.lifecycle.exit_code() == 1


async def test_a_group_of_cancellations_passes(running: Running, autojump_clock: MockClock) -> None:
    async def nested() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)

    async with running() as world:
        with trio.move_on_after(0.5):
            await world.lifecycle.supervise(nested)
        assert not world.lifecycle.errors
        world.lifecycle.request_stop("SIGTERM")
