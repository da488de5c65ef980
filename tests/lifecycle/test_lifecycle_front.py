"""The stop of a process with an HTTP front: the HTTP drain to its end, then the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from dynamo_trio.errors import Draining
from dynamo_trio.lifecycle import CutReason, Hooks, Outcome, Phase, Timetable

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.lifecycle.conftest import Running

FRONT = Timetable(http_drain=5)


async def test_an_idle_front_leaves_at_once(running: Running, autojump_clock: MockClock) -> None:
    async with running(FRONT) as world:
        world.lifecycle.request_stop("SIGTERM")
        assert world.lifecycle.phase is Phase.DRAINING
        assert not world.lifecycle.http.is_open
        assert world.lifecycle.work.is_open
    assert world.now == 0
    assert world.outcomes()["grace"] == "skipped"


async def test_the_http_drain_ends_with_the_last_response(
    running: Running, autojump_clock: MockClock
) -> None:
    order = []

    async def unregister() -> None:
        order.append(("unregister", world.now, world.lifecycle.http.count))
        await trio.sleep(1)

    async def drain() -> None:
        order.append(("drain", world.now, world.lifecycle.http.count))

    async with running(FRONT, hooks=Hooks(drain=drain)) as world:
        world.lifecycle.on_unregister(unregister)
        world.request(3, gate=world.lifecycle.http)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
    assert order == [("unregister", 3, 0), ("drain", 4, 0)]
    assert world.now == 4


async def test_an_admitted_response_may_still_open_work(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(FRONT) as world:
        world.request(3, gate=world.lifecycle.http)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(2)
        inner = world.request(1)
        with pytest.raises(Draining), world.lifecycle.http.admit("GET /v1/models 7"):
            raise AssertionError("admitted")
        await world.lifecycle.wait_phase(Phase.STOPPING)
        with pytest.raises(Draining), world.lifecycle.work.admit("generate 8"):
            raise AssertionError("admitted")
    assert inner.left == 3
    assert world.lifecycle.report().requests == {Outcome.FINISHED: 1}
    assert world.lifecycle.report().gates["work"] == {Outcome.FINISHED: 1}


async def test_at_its_limit_everybody_in_front_says_farewell(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(FRONT) as world:
        polite = world.request(100, gate=world.lifecycle.http, farewell=0.5)
        behind = world.request(7)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
    assert polite.admission is not None
    assert polite.admission.reason is CutReason.DRAIN_LIMIT
    assert polite.left == 5.5
    assert behind.left == 7  # the endpoints have a drain of their own
    assert world.outcomes()["http_drain"] == "timed_out"
    assert world.outcomes()["http_farewells"] == "completed"
    assert world.outcomes()["draining"] == "completed"


async def test_farewells_in_front_are_bounded(running: Running, autojump_clock: MockClock) -> None:
    async with running(FRONT) as world:
        world.request(100, gate=world.lifecycle.http, farewell=100)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_phase(Phase.STOPPING)
        assert world.now == 6
    assert world.outcomes()["http_farewells"] == "timed_out"
    assert world.now == 6  # aborted: nobody gets the time of a farewell twice
    assert world.lifecycle.report().requests == {Outcome.LOST: 1}


async def test_nothing_in_front_waits_for_who_is_not_graceful(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(FRONT) as world:
        world.request(100, gate=world.lifecycle.http, graceful=False, farewell=0.5)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == 0.5


@pytest.mark.parametrize(("when", "cut_behind"), [(0, 0.375), (2, 2.375), (5.25, 5.375), (7, 7)])
async def test_escalation_cuts_the_front_first(
    running: Running, when: float, cut_behind: float, autojump_clock: MockClock
) -> None:
    unregistered = []

    async def unregister() -> None:
        unregistered.append(world.now)

    async with running(FRONT) as world:
        world.lifecycle.on_unregister(unregister)
        world.request(100, gate=world.lifecycle.http, farewell=0.375)
        behind = world.request(100, farewell=0.25)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(when)
        world.lifecycle.escalate("SIGINT")
    assert behind.left == cut_behind + 0.25
    assert world.now == behind.left
    assert unregistered == [min(when, 5.375)]
    assert world.lifecycle.exit_code() == 0


async def test_a_slow_front_leaves_time_for_the_endpoints(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(FRONT) as world:
        world.request(100, gate=world.lifecycle.http, farewell=0.75)
        behind = world.request(100, farewell=0.25)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.escalate("SIGINT")
    assert behind.left == 0.75
    assert world.now == 0.75


async def test_a_fatal_error_in_front_refuses_work_too(
    running: Running, autojump_clock: MockClock
) -> None:
    unregistered = []

    async def unregister() -> None:
        unregistered.append(world.now)

    async with running(FRONT, hooks=Hooks(cleanup=unregister)) as world:
        world.lifecycle.on_unregister(unregister)
        world.request(3, gate=world.lifecycle.http)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.fail(ValueError("engine dead"))
        with pytest.raises(Draining), world.lifecycle.work.admit("generate 8"):
            raise AssertionError("admitted")
    assert unregistered == [0]  # at once, and the callback not at all
    assert world.now == 3
    assert world.lifecycle.exit_code() == 1


async def test_fast_exit_of_a_front(running: Running, autojump_clock: MockClock) -> None:
    async with running(Timetable(http_drain=5, fast_exit=True)) as world:
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == 0
    assert world.outcomes()["draining"] == "completed"


async def test_what_remains_is_known_from_the_request_on(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(FRONT) as world:
        world.request(100, gate=world.lifecycle.http, farewell=0.5)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        assert world.lifecycle.remaining() == 5  # no task has run in between
        await trio.sleep(2)
        assert world.lifecycle.remaining() == 3
        world.lifecycle.escalate("SIGINT")
        await trio.testing.wait_all_tasks_blocked()
        assert world.lifecycle.phase is Phase.STOPPING
        assert world.lifecycle.remaining() == 2 + 5  # the front's limit has no say any more


@pytest.mark.parametrize(
    ("fatal", "words"),
    [
        (False, "http_drain was ended by its limit of 5 s; 2 requests left"),
        (True, "drain_callback was ended by a fatal error; 0 requests left"),
    ],
)
async def test_a_step_that_is_ended_says_by_what(
    running: Running,
    fatal: bool,
    words: str,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    async with running(FRONT, hooks=Hooks(drain=trio.sleep_forever)) as world:
        for _ in range(0 if fatal else 2):
            world.request(100, gate=world.lifecycle.http)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(7)
        if fatal:
            world.lifecycle.fail(ValueError("engine dead"))
    assert words in caplog.messages


async def test_a_report_tells_the_time_and_the_steps_of_its_moment(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(FRONT, hooks=Hooks(drain=trio.sleep_forever)) as world:
        world.request(3, gate=world.lifecycle.http)
        await trio.testing.wait_all_tasks_blocked()
        assert world.lifecycle.snapshot().leftovers == ("http 3",)  # also before there is a stop
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(2)
        early = world.lifecycle.snapshot()
        assert early.seconds == 2
        assert early.leftovers == ("http 3",)  # and not the step that waits for it
        assert early.inside == {"http": 1, "work": 0}
        await trio.sleep(2)
        assert world.lifecycle.snapshot().leftovers == ("drain_callback",)
        world.lifecycle.escalate("SIGINT")
    await trio.sleep(1)
    assert world.lifecycle.report().seconds == 5
    assert world.lifecycle.report().leftovers == ()
