"""What is known of a stop at each instant, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel
import trio.testing

from dynamo_trio.lifecycle import Admission, CutReason, Hooks, Lifecycle, Outcome, Timetable
from dynamo_trio.lifecycle import admission as admission_module
from dynamo_trio.lifecycle.record import MOST_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from tests.lifecycle.conftest import Running

MANY = 300


@pytest.fixture
def labels_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the label of a request was read."""
    reads = 0

    class Counting(Admission):
        def __getattribute__(self, name: str) -> object:
            nonlocal reads
            reads += name == "label"
            return super().__getattribute__(name)

    monkeypatch.setattr(admission_module, "Admission", Counting)
    return lambda: reads


async def test_what_a_request_costs_a_stop_does_not_depend_on_how_many_there_are(
    running: Running, autojump_clock: MockClock, labels_read: Callable[[], int]
) -> None:
    async with running(Timetable(grace=0.0, drain=1.0)) as world:
        for _ in range(MANY):
            world.request(1000)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_stopped()
        assert world.lifecycle.report().requests == {Outcome.CUT: MANY}
    assert labels_read() <= (MOST_NAMES + 5) * MANY


async def test_the_first_are_named_and_the_others_counted(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=0.0), hooks=Hooks(drain=trio.sleep_forever)) as world:
        for number in range(MANY):
            world.request(100 + number)
            await trio.lowlevel.checkpoint()
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        for report in (world.lifecycle.snapshot(), world.lifecycle.report()):
            assert report.leftovers[0] == "drain_callback"
            assert [name.split()[1] for name in report.leftovers[1:]] == [
                str(100 + number) for number in range(MOST_NAMES)
            ]
            assert report.more_leftovers == MANY - MOST_NAMES
            assert f'"and {MANY - MOST_NAMES + 1} more"' in report.to_json()
            assert report.at_exit().requests == {Outcome.LOST: MANY}
        world.lifecycle.escalate("SIGINT")
    assert world.lifecycle.report().leftovers == ()


async def test_who_is_spoken_for_is_counted_once(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(Timetable(), exit_code_on_loss=9)
    lifecycle.request_stop("SIGTERM")
    with lifecycle.work.admit("a 1") as first, lifecycle.work.admit("a 2") as second:
        second.on_abort.append(lambda: second.settle(Outcome.CUT))
        first.cut(CutReason.DRAIN_LIMIT)
        lifecycle.work.abort_all()
        report = lifecycle.snapshot()
        assert report.leftovers == ("a 1", "a 2")
        assert (report.requests, report.exit_code) == ({Outcome.CUT: 1}, 9)
        assert report.at_exit().requests == {Outcome.CUT: 1, Outcome.LOST: 1}
    assert lifecycle.report().requests == {Outcome.CUT: 2}
    assert report.requests == {Outcome.CUT: 1}
