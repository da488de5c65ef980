"""An endpoint that works on some requests at once, lets some wait, and refuses the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing
from prometheus_client import generate_latest

from dynamo_trio.errors import Overloaded
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.runtime import open_runtime
from dynamo_trio.turns import Turns

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from trio.testing import MockClock

    from dynamo_trio.client import Client

NAME = "ns.comp.ep"


@attrs.define(eq=False)
class Desk:
    """A handler that notes who works, in order, and takes ten seconds for each."""

    begun: list[int] = attrs.field(factory=list)
    ended: list[int] = attrs.field(factory=list)

    async def work(self, request: int) -> AsyncGenerator[int, None]:
        self.begun.append(request)
        try:
            await trio.sleep(10)
            yield request
        finally:
            self.ended.append(request)


async def ask(client: Client, number: int, seen: dict[int, Any]) -> None:
    try:
        async with client.generate(number) as stream:
            seen[number] = [item async for item in stream]
    except Overloaded as exc:
        seen[number] = exc


def value(runtime: Any, name: str) -> float:
    lines = generate_latest(runtime.metrics.registry).decode().splitlines()
    (line,) = [x for x in lines if x.startswith(f"{name} ")]
    return float(line.split()[1])


async def test_some_work_some_wait_in_order_and_the_rest_is_refused(
    autojump_clock: MockClock,
) -> None:
    desk, seen = Desk(), dict[int, Any]()
    async with open_runtime(request_limit=2, queue_limit=3) as runtime:
        endpoint = runtime.endpoint(NAME)
        async with endpoint.serving(desk.work), endpoint.client() as client:
            await client.wait_for_instances()
            async with trio.open_nursery() as nursery:
                for number in range(7):
                    nursery.start_soon(ask, client, number, seen)
                    await trio.sleep(1)
                assert desk.begun == [0, 1]
                assert sorted(seen) == [5, 6]
                assert value(runtime, "dynamo_work_handler_pool_active_tasks") == 2
                assert value(runtime, "dynamo_work_handler_pool_capacity") == 2
                assert value(runtime, "dynamo_work_handler_queue_depth") == 3
                assert value(runtime, "dynamo_work_handler_queue_capacity") == 3
                assert value(runtime, "dynamo_request_queue") == 3
                assert value(runtime, "dynamo_engine_request") == 2
            assert desk.begun == [0, 1, 2, 3, 4]
            assert [seen[n] for n in range(5)] == [[n] for n in range(5)]
            assert trio.current_time() == 30
            assert "requests at once: 2; waiting: 3" in str(seen[5])
            assert value(runtime, "dynamo_rejection_request_total") == 2
            assert value(runtime, "dynamo_work_handler_queue_depth") == 0
            assert value(runtime, "dynamo_work_handler_permit_wait_seconds_count") == 5
            assert value(runtime, "dynamo_work_handler_permit_wait_seconds_sum") == 8 + 8 + 16
            assert runtime.lifecycle.work.tally == {Outcome.FINISHED: 5}


async def test_who_leaves_the_queue_makes_room_and_takes_no_turn(
    autojump_clock: MockClock,
) -> None:
    desk, seen = Desk(), dict[int, Any]()
    async with open_runtime(request_limit=1, queue_limit=1) as runtime:
        endpoint = runtime.endpoint(NAME)
        async with endpoint.serving(desk.work), endpoint.client() as client:
            await client.wait_for_instances()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, client, 0, seen)
                await trio.testing.wait_all_tasks_blocked()
                with trio.move_on_after(1):
                    await ask(client, 1, seen)
                await trio.testing.wait_all_tasks_blocked()
                assert value(runtime, "dynamo_work_handler_queue_depth") == 0
                nursery.start_soon(ask, client, 2, seen)
            assert desk.begun == [0, 2]
            assert seen == {0: [0], 2: [2]}
            tally = {Outcome.FINISHED: 2, Outcome.CANCELLED: 1}
            assert runtime.lifecycle.work.tally == tally


async def test_a_drain_waits_for_who_waits(autojump_clock: MockClock) -> None:
    desk, seen = Desk(), dict[int, Any]()
    async with open_runtime(request_limit=1, queue_limit=5) as runtime:
        endpoint = runtime.endpoint(NAME)
        async with endpoint.serving(desk.work), endpoint.client() as client:
            await client.wait_for_instances()
            async with trio.open_nursery() as nursery:
                for number in range(2):
                    nursery.start_soon(ask, client, number, seen)
                    await trio.testing.wait_all_tasks_blocked()
                runtime.shutdown()
            assert seen == {0: [0], 1: [1]}


async def test_a_place_is_handed_over_even_if_it_is_not_wanted_any_more(
    autojump_clock: MockClock,
) -> None:
    """Given back and cancelled in one moment: nobody's place is lost."""
    turns = Turns(1, 10)
    got: list[str] = []

    async def wait(name: str, scope: trio.CancelScope) -> None:
        with scope, turns.seat() as seat:
            await seat.take()
            got.append(name)

    scopes = {name: trio.CancelScope() for name in ("a", "b")}
    async with trio.open_nursery() as nursery:
        with turns.seat() as first:
            await first.take()
            for name, scope in scopes.items():
                nursery.start_soon(wait, name, scope)
                await trio.testing.wait_all_tasks_blocked()
        scopes["a"].cancel()
    assert got == ["a", "b"]
    assert not turns.full
    assert turns.waiting == 0


@pytest.mark.parametrize("queue", [0, 16])
def test_without_a_limit_nobody_waits_or_is_refused(queue: int) -> None:
    turns = Turns(queue=queue)
    turns.check(10**9)
    assert not turns.full
