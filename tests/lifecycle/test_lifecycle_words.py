"""What the log and the report say of a stop, where that is easily said wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from dynamo_trio.lifecycle import Timetable

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.lifecycle.conftest import Running


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dynamo_trio.lifecycle")


async def test_no_time_is_no_negative_time(
    running: Running, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with running(Timetable(total=0)) as world:
        world.lifecycle.on_unregister(trio.sleep_forever)
        await trio.sleep(1 / 3)
        world.lifecycle.request_stop("SIGTERM", age=0.1)
    assert "unregister was ended by its limit of 0 s; 0 requests left" in caplog.messages


@pytest.mark.parametrize(("ago", "seconds"), [(10, 0.0), (5, 0.0), (4, 1.0)])
async def test_a_grace_period_that_a_drain_has_waited_out_is_over(
    running: Running,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
    ago: float,
    seconds: float,
) -> None:
    async with running(Timetable(grace=5), grace_over=trio.sleep_forever) as world:
        world.lifecycle.withdrawn_at = trio.current_time() - ago
        world.lifecycle.request_stop("SIGTERM")
    assert world.outcomes()["grace"] == ("timed_out" if seconds else "completed")
    assert world.seconds()["grace"] == seconds
    why = "the drain before the stop has lasted for the grace period"
    assert (why in caplog.messages) == (seconds == 0)


@pytest.mark.parametrize(
    ("cause", "how"),
    [("SIGTERM", "only unregistering, then leaving"), ("SIGINT", "stopping gracefully")],
)
async def test_a_fast_exit_is_not_called_graceful(
    running: Running,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
    cause: str,
    how: str,
) -> None:
    async with running(Timetable(fast_exit=True)) as world:
        world.lifecycle.request_stop(cause)
    assert caplog.messages[0] == f"{cause}: {how}; nothing is in flight"


async def test_who_is_not_waited_for_is_not_cut_in_silence(
    running: Running, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=1)) as world:
        world.request(100, graceful=False)
        world.request(10)
        world.lifecycle.request_stop("SIGTERM")
    told = [line for line in caplog.messages if line.startswith("cut")]
    assert told == ["cut (endpoint_closed): 1 request of 1 endpoint in flight: work 100"]
