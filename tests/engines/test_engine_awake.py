"""A process that stood still while its engine worked does not take the engine for hung."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.engines.awake import FROZEN, Allowance
from dynamo_trio.engines.health import Checkups
from dynamo_trio.engines.hosts import Done, InlineHost
from dynamo_trio.errors import EngineHung

LIMIT = 30.0
#: What the call takes while everybody is awake.
WORK = 6.0
#: Around the limit, and far from it.
FREEZES = [10.0, 24.5, 29.0, 29.999, 30.0, 30.5, 31.0, 100.0]
each_freeze = pytest.mark.parametrize("freeze", FREEZES)


async def a_call(host: InlineHost, owed: float) -> Done[str]:
    return await host.run(
        lambda: "done",
        limit=LIMIT,
        patience=0.0,
        cancel_patience=LIMIT,
        interrupt=lambda: None,
        owed_seconds=lambda: owed,
    )


@each_freeze
async def test_a_call_has_its_time_although_the_process_stood_still(
    mock_clock: MockClock, freeze: float
) -> None:
    done: list[Done[str]] = []

    async def call() -> None:
        done.append(await a_call(InlineHost(), freeze + WORK))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        mock_clock.jump(freeze)
        await wait_all_tasks_blocked()
        mock_clock.jump(WORK)
    assert done[0].result.unwrap() == "done"
    assert not done[0].overdue


@each_freeze
async def test_a_check_has_its_time_although_the_process_stood_still(
    mock_clock: MockClock, freeze: float
) -> None:
    checkups = Checkups(LIMIT)
    answered = checkups.ask()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(checkups.wait, answered)
        for passes in (1.0, freeze, WORK):
            await wait_all_tasks_blocked()
            mock_clock.jump(passes)
        await wait_all_tasks_blocked()
        checkups.answer()


async def test_who_is_awake_has_the_limit_and_no_more(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    with pytest.raises(EngineHung):
        await Checkups(LIMIT).wait(trio.Event())
    assert trio.current_time() - began == pytest.approx(LIMIT)
    with pytest.raises(EngineHung):
        await a_call(InlineHost(), 100.0)
    assert trio.current_time() - began == pytest.approx(2 * LIMIT)


@each_freeze
async def test_a_freeze_costs_a_third_of_the_limit_at_most(
    mock_clock: MockClock, freeze: float
) -> None:
    allowance = Allowance(LIMIT)
    spent = trio.Event()

    async def spend() -> None:
        while not allowance.spent:
            with allowance.spending():
                await trio.sleep_forever()
        spent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(spend)
        await wait_all_tasks_blocked()
        mock_clock.jump(freeze)
        awake = partial(mock_clock.jump, FROZEN)
        for second in range(round(LIMIT) + 10):
            await wait_all_tasks_blocked()
            assert not spent.is_set() or second >= LIMIT * 2 / 3 - FROZEN
            awake()
        await spent.wait()
