"""What a frontend closes behind its last answer has one limit, all of it together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dynamo_trio.frontend.teardown import TEARDOWN, Teardown
from dynamo_trio.lifecycle import Lifecycle, Timetable

if TYPE_CHECKING:
    from trio.testing import MockClock


async def hang(teardown: Teardown, limit: float) -> float:
    """Close something that does not answer; returns how long that took."""
    began = trio.current_time()
    with teardown.cleanup(limit):
        await trio.Event().wait()
    return trio.current_time() - began


async def test_closing_has_one_limit_in_all_behind_a_stop(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(Timetable(http_drain=5.0))
    teardown = Teardown(lifecycle)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        lifecycle.request_stop("SIGTERM")
        await lifecycle.wait_stopped()
        stopped = trio.current_time()
        assert await hang(teardown, 0.25) == 0.25
        assert await hang(teardown, 2.0) == TEARDOWN - 0.25
        assert await hang(teardown, 2.0) == 0
        assert trio.current_time() == stopped + TEARDOWN


async def test_closing_is_shielded(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(Timetable(http_drain=5.0))
    with trio.CancelScope() as outer:
        outer.cancel()
        assert await hang(Teardown(lifecycle), 2.0) == 2.0  # no stop: each has its own limit
    assert not outer.cancelled_caught
