"""Hosts by themselves: how one call is watched."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dynamo_trio.engines import Host, InlineHost, ThreadHost
from dynamo_trio.engines.hosts import Call
from dynamo_trio.errors import EngineHung

if TYPE_CHECKING:
    from dynamo_trio.engines.hosts import Done


async def run(host: Host, fn: object, limit: float = 10, interrupt: object = None) -> Done[object]:
    return await host.run(
        fn,  # type: ignore[arg-type]  # any callable
        limit=limit,
        patience=0.2,
        cancel_patience=10,
        interrupt=interrupt or (lambda: None),  # type: ignore[arg-type]  # any callable
        owed_seconds=lambda: 0.0,
    )


@pytest.fixture(params=[InlineHost, ThreadHost])
def host(request: pytest.FixtureRequest) -> Host:
    made: Host = request.param()
    return made


async def test_the_result_comes_back(host: Host) -> None:
    done = await run(host, lambda: 42)
    assert (done.result.unwrap(), done.overdue) == (42, False)
    assert not host.inflight


async def test_an_exception_is_a_result_too(host: Host) -> None:
    done = await run(host, lambda: [][0])
    with pytest.raises(IndexError):
        done.result.unwrap()


async def test_every_call_is_a_checkpoint(host: Host) -> None:
    with trio.testing.assert_checkpoints():
        await run(host, lambda: None)


async def test_two_calls_at_once_are_a_mistake(host: Host) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, host, lambda: None)
        await trio.lowlevel.checkpoint()
        if host.inflight:
            with pytest.raises(AssertionError, match="one call at a time"):
                await run(host, lambda: None)


async def test_a_cancelled_caller_waits_until_the_thread_has_left() -> None:
    host = ThreadHost()
    go = threading.Event()
    left = threading.Event()
    entered = threading.Event()

    def call() -> None:
        entered.set()
        go.wait()
        left.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run, host, call, interrupt=go.set))
        await trio.to_thread.run_sync(entered.wait)
        nursery.cancel_scope.cancel()
    assert left.is_set()
    assert not host.inflight
    assert not host.poisoned


async def test_a_caller_cancelled_beforehand_does_not_enter_the_core() -> None:
    host = ThreadHost()
    entered = threading.Event()
    with trio.CancelScope() as scope:
        scope.cancel()
        await run(host, entered.set)
    assert scope.cancelled_caught
    await trio.sleep(0.05)
    assert not entered.is_set()
    assert not host.inflight


async def test_a_limit_of_nothing_is_a_hang_of_a_core_that_was_never_entered() -> None:
    host = ThreadHost()
    with pytest.raises(EngineHung, match="no time to begin"):
        await run(host, lambda: None, limit=0)
    assert not host.poisoned
    assert (await run(host, lambda: 42)).result.unwrap() == 42


async def test_progress_reaches_the_loop_from_the_thread() -> None:
    host = ThreadHost()
    seen: list[tuple[float, int]] = []
    report = host.relay(lambda value: seen.append((value, threading.get_ident())))
    await run(host, lambda: report(0.5))
    await trio.testing.wait_all_tasks_blocked()
    assert seen == [(0.5, threading.get_ident())]


def test_a_call_that_ends_after_the_loop_is_left_alone() -> None:
    async def begin() -> Call[int]:
        call = Call(lambda: 42, lambda: 0.0)
        call.abandon()
        return call

    call = trio.run(begin)
    call()
    assert call.result is not None
    assert call.result.unwrap() == 42


async def test_a_call_that_never_comes_back_poisons_its_host() -> None:
    host = ThreadHost()
    go = threading.Event()
    try:
        with pytest.raises(EngineHung, match="did not come back"):
            await run(host, go.wait, limit=0.05)
        assert host.poisoned
        assert host.inflight
        with pytest.raises(AssertionError):
            await run(host, lambda: None)
    finally:
        go.set()
