"""A request's deadline goes with it: from a cancel scope of its caller to every worker behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio import Context, open_runtime
from dynamo_trio.lifecycle import Outcome
from dynamo_trio.wire.deadline import DEADLINE_KEY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from trio.testing import MockClock

    from dynamo_trio.client import Client


async def tell(request: object, context: Context) -> AsyncGenerator[float, None]:
    """When the caller stops waiting, in seconds from the clock's beginning."""
    yield context.prospects.deadline


async def deadline_of(client: Client, context: Context | None = None) -> float:
    async with client.generate(None, context) as stream:
        [answer] = [item async for item in stream]
    return float(answer)


async def test_a_scope_around_the_call_is_its_deadline(autojump_clock: MockClock) -> None:
    async with open_runtime() as runtime:
        endpoint = runtime.endpoint("a.b.c")
        async with endpoint.serving(tell), endpoint.client() as client:
            await client.wait_for_instances()
            assert await deadline_of(client) == math.inf
            begun = trio.current_time()
            for waited in (0, 4):  # each attempt is told what is left of it
                await trio.sleep(waited)
                with trio.CancelScope(deadline=begun + 20), trio.CancelScope(deadline=begun + 50):
                    assert await deadline_of(client) == pytest.approx(begun + 20, abs=0.001)


async def test_it_is_passed_on_behind_a_worker(autojump_clock: MockClock) -> None:
    async with open_runtime() as runtime:
        inner, outer = runtime.endpoint("a.b.inner"), runtime.endpoint("a.b.outer")
        async with inner.serving(tell), inner.client() as behind:

            async def forward(request: object, context: Context) -> AsyncGenerator[float, None]:
                await trio.sleep(5)
                yield await deadline_of(behind, context)

            async with outer.serving(forward), outer.client() as client:
                await client.wait_for_instances()
                await behind.wait_for_instances()
                with trio.move_on_after(30):
                    expected = trio.current_time() + 30
                    assert await deadline_of(client) == pytest.approx(expected, abs=0.002)


async def test_what_cannot_be_read_is_no_deadline(autojump_clock: MockClock) -> None:
    async with open_runtime() as runtime:
        endpoint = runtime.endpoint("a.b.c")
        async with endpoint.serving(tell), endpoint.client() as client:
            await client.wait_for_instances()
            context = Context(metadata={DEADLINE_KEY: "tomorrow"})
            assert await deadline_of(client, context) == math.inf
            assert runtime.lifecycle.work.tally == {Outcome.FINISHED: 1}
