"""A worker's stop, row by row, in virtual time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from dynamo_trio.errors import Draining
from dynamo_trio.lifecycle import (
    Admission,
    CutReason,
    DrainPolicy,
    GraceMode,
    Hooks,
    Lifecycle,
    Outcome,
    Peer,
    Phase,
    Prospects,
    Timetable,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from tests.lifecycle.conftest import Running, World


def sleeper(seconds: float) -> Callable[[], Awaitable[None]]:
    async def sleep() -> None:
        await trio.sleep(seconds)

    return sleep


async def broken() -> None:
    await trio.lowlevel.checkpoint()
    raise OSError("the registry is gone")


def hooks(**given: Any) -> Hooks:
    return Hooks(**given)


def phase(world: World) -> Phase:
    """A call, because a type checker takes a property for constant."""
    return world.lifecycle.phase


def refused(world: World) -> bool:
    try:
        with world.lifecycle.work.admit("generate 9"):
            return False
    except Draining:
        return True


# --- the order ---------------------------------------------------------------------------


async def test_the_order_of_a_stop(
    running: Running, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    events: list[tuple[float, str]] = []

    def note(name: str, seconds: float) -> Callable[[], Awaitable[None]]:
        async def job() -> None:
            shut = "shut" if refused(world) else "open"
            told = "told" if world.lifecycle.interrupted.is_set() else "untold"
            events.append((world.now, f"{name} {world.lifecycle.phase.label} {shut} {told}"))
            await trio.sleep(seconds)

        return job

    caplog.set_level(logging.INFO)
    given = hooks(
        drain=note("drain", 1), pre_shutdown=note("pre_shutdown", 1), cleanup=note("cleanup", 1)
    )
    async with running(hooks=given) as world:
        world.lifecycle.on_unregister(note("unregister", 1))
        world.request(20)
        await trio.sleep(10)
        world.lifecycle.request_stop("SIGTERM")
    assert events == [
        (10, "unregister grace open untold"),
        (16, "drain draining open untold"),
        (17, "pre_shutdown draining open untold"),
        (18, "cleanup draining shut told"),
    ]
    assert world.now == 20
    assert world.outcomes() == {
        "grace": "timed_out",
        "draining": "completed",
        "stopping": "completed",
        "unregister": "completed",
        "drain_callback": "completed",
        "pre_shutdown_callback": "completed",
        "cleanup_callback": "completed",
    }
    assert world.seconds()["grace"] == 6
    assert world.lifecycle.report().seconds == 10
    assert caplog.messages[0].startswith("SIGTERM: stopping gracefully; 1 request of 1 endpoint")
    assert [m for m in caplog.messages if m.startswith("phase")] == [
        "phase grace",
        "phase draining",
        "phase stopping",
        "phase stopped",
    ]


async def test_a_request_to_stop_holds_at_once(running: Running, autojump_clock: MockClock) -> None:
    async with running() as world:
        assert phase(world) is Phase.SERVING
        assert world.lifecycle.cause is None
        assert world.lifecycle.remaining() == float("inf")
        world.lifecycle.request_stop("SIGTERM")
        assert phase(world) is Phase.GRACE  # no task has run in between
        assert world.lifecycle.stopping
        await world.lifecycle.wait_stop_requested()
        await world.lifecycle.wait_phase(Phase.SERVING)
        await world.lifecycle.wait_phase(Phase.GRACE)


async def test_only_the_first_request_counts(running: Running, autojump_clock: MockClock) -> None:
    async with running() as world:
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(0.1)
        world.lifecycle.request_stop("runtime.shutdown()")
    assert world.lifecycle.cause == "SIGTERM"
    assert world.now == 0.25


# --- unregistering --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "ending", "seconds"),
    [(sleeper(0.5), "completed", 0.5), (sleeper(99), "timed_out", 2), (broken, "failed", 0)],
)
async def test_unregistering_is_bounded_and_never_fatal(
    running: Running,
    way: Callable[[], Awaitable[None]],
    ending: str,
    seconds: float,
    autojump_clock: MockClock,
) -> None:
    async with running() as world:
        world.lifecycle.on_unregister(way)
        world.lifecycle.request_stop("SIGTERM")
    assert world.outcomes()["unregister"] == ending
    assert world.seconds()["unregister"] == seconds
    assert world.now == seconds + 0.25
    assert world.lifecycle.exit_code() == 0


async def test_all_are_unregistered_at_once_and_one_failure_stops_no_other(
    running: Running, autojump_clock: MockClock
) -> None:
    done = []

    async def slow() -> None:
        await trio.sleep(1)
        done.append(trio.current_time())

    async with running() as world:
        for way in (slow, broken, slow):
            world.lifecycle.on_unregister(way)
        world.lifecycle.request_stop("SIGTERM")
    assert done == [1, 1]
    assert world.outcomes()["unregister"] == "failed"


# --- grace -------------------------------------------------------------------------------


async def test_an_idle_process_leaves_after_a_quarter_of_a_second(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running() as world:
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == 0.25
    assert world.outcomes()["grace"] == "completed"


async def test_grace_ends_with_the_last_request(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running() as world:
        world.request(1)
        world.request(2, graceful=False)
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == 2
    assert world.lifecycle.work.tally == {Outcome.FINISHED: 2}


async def test_requests_are_admitted_during_grace(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running() as world:
        world.request(1)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(0.9)
        late = world.request(2)
    assert late.left == pytest.approx(2.9)
    assert world.now == pytest.approx(2.9)


async def test_grace_waits_for_the_peers_to_acknowledge(
    running: Running, autojump_clock: MockClock
) -> None:
    acknowledged = trio.Event()
    async with running(grace_over=acknowledged.wait) as world:
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(3)
        assert world.lifecycle.phase is Phase.GRACE
        acknowledged.set()
    assert world.now == 3


async def test_a_peer_that_appears_late_brings_the_grace_period_back(
    running: Running, autojump_clock: MockClock
) -> None:
    asked = []

    async def peers() -> None:
        asked.append(trio.current_time())
        await trio.sleep_forever() if len(asked) > 1 else await trio.lowlevel.checkpoint()

    async with running(grace_over=peers) as world:
        world.request(1)
        world.lifecycle.request_stop("SIGTERM")
    assert asked == [0.25, 1]
    assert world.now == 5


async def test_peers_that_cannot_be_asked_get_all_of_the_grace_period(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(grace_over=broken) as world:
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == 5


@pytest.mark.parametrize(
    ("timetable", "seconds"),
    [
        (Timetable(grace_mode=GraceMode.FIXED), 5),
        (Timetable(grace_floor=1), 1),
        (Timetable(grace=0), 0),
        (Timetable(grace=0.1), 0.1),
        (Timetable(grace=0, grace_mode=GraceMode.FIXED), 0),
    ],
)
async def test_how_long_grace_lasts_for_an_idle_process(
    running: Running, timetable: Timetable, seconds: float, autojump_clock: MockClock
) -> None:
    async with running(timetable) as world:
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == seconds


# --- callbacks -------------------------------------------------------------------------------

NAMES = ["drain", "pre_shutdown", "cleanup"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("job", "ending", "seconds"),
    [(sleeper(3), "completed", 3), (sleeper(99), "timed_out", 30), (broken, "failed", 0)],
)
async def test_a_callback_is_bounded_and_never_fatal(
    running: Running,
    name: str,
    job: Callable[[], Awaitable[None]],
    ending: str,
    seconds: float,
    autojump_clock: MockClock,
) -> None:
    async with running(Timetable(grace=0), hooks=hooks(**{name: job})) as world:
        world.lifecycle.request_stop("SIGTERM")
    assert world.outcomes()[f"{name}_callback"] == ending
    assert world.now == seconds
    assert world.lifecycle.interrupted.is_set()
    assert world.lifecycle.exit_code() == 0


class Left(BaseException):
    """As ``asyncio.CancelledError`` is one."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "error",
    [
        SystemExit(7),
        KeyboardInterrupt(),
        GeneratorExit(),
        Left(),
        BaseExceptionGroup("both", [ValueError("bad"), SystemExit(3)]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_callback_cannot_leave_the_process(
    running: Running,
    name: str,
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    async def leave() -> None:
        await trio.sleep(1)
        raise error

    async with running(Timetable(grace=0), hooks=hooks(**{name: leave})) as world:
        request = world.request(3)
        world.lifecycle.request_stop("SIGTERM")
    assert request.left == 3
    assert world.outcomes()[f"{name}_callback"] == "failed"
    assert world.outcomes()["draining"] == "completed"
    assert world.lifecycle.exit_code() == 0
    [told] = [r for r in caplog.records if r.message.endswith("failed; the stop goes on")]
    assert told.exc_info is not None


async def test_a_callback_whose_sequence_is_cancelled_ends_with_it(
    autojump_clock: MockClock,
) -> None:
    lifecycle = Lifecycle(Timetable(grace=0), hooks=hooks(drain=trio.sleep_forever))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert trio.current_time() == 1
    assert [str(step.ending) for step in lifecycle.report().steps][-1] == "cancelled"


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(5)], ids=["error", "exit"])
async def test_a_shutdown_event_that_cannot_be_set_is_passed(
    running: Running,
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
) -> None:
    class Broken:
        def set(self) -> None:
            raise error

    given = hooks(shutdown_event=Broken(), cleanup=sleeper(1))
    async with running(Timetable(grace=0), hooks=given) as world:
        request = world.request(3)
        world.lifecycle.request_stop("SIGTERM")
    assert request.left == 3
    assert world.outcomes()["cleanup_callback"] == "completed"
    assert "shutdown_event.set() failed; the stop goes on" in caplog.text


async def test_a_callback_that_cannot_be_ended_is_told_of(
    running: Running, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def blocks() -> None:
        autojump_clock.jump(4)

    async def in_time() -> None:
        await trio.sleep(2)

    given = hooks(drain=blocks, cleanup=in_time)
    async with running(Timetable(grace=0, hook=2), hooks=given) as world:
        world.lifecycle.request_stop("SIGTERM")
    assert world.seconds()["drain_callback"] == 4
    [told] = [m for m in caplog.messages if "instead of at most" in m]
    assert told.startswith("drain_callback took 4.0 s instead of at most 2.0 s: it blocked")


async def test_cleanup_that_raises_while_its_limit_cancels_it(
    running: Running, autojump_clock: MockClock
) -> None:
    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise OSError("cannot clean up")

    async with running(Timetable(grace=0), hooks=hooks(drain=both)) as world:
        world.lifecycle.request_stop("SIGTERM")
    assert world.outcomes()["drain_callback"] == "failed"
    assert world.now == 30


async def test_cleanup_that_raises_while_an_escalation_cancels_it(
    running: Running, autojump_clock: MockClock
) -> None:
    async def both() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("cannot clean up")

    async with running(Timetable(grace=0), hooks=hooks(drain=both)) as world:
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        world.lifecycle.escalate("SIGINT")
    assert world.outcomes()["drain_callback"] == "failed"
    assert world.outcomes()["stopping"] == "completed"
    assert world.now == 1


# --- draining ---------------------------------------------------------------------------------


async def test_draining_ends_with_the_last_request(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=1)) as world:
        world.request(100)
        world.request(7)
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_phase(Phase.DRAINING)
        assert refused(world)
    assert world.now == 100
    assert world.lifecycle.report().requests == {Outcome.FINISHED: 2}


async def test_the_drain_limit_counts_from_the_end_of_the_callbacks(
    running: Running, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=1, drain=10), hooks=hooks(cleanup=sleeper(3))) as world:
        world.request(100, farewell=0.5)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(4.5)
        assert world.lifecycle.remaining() == pytest.approx(9.5)
    assert world.now == 14.5
    assert world.outcomes()["draining"] == "timed_out"
    assert world.lifecycle.report().requests == {Outcome.CUT: 1}
    assert "cut (drain_limit): 1 request of 1 endpoint in flight: work 100" in caplog.text


async def test_nothing_waits_for_a_request_that_is_not_graceful(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=1)) as world:
        request = world.request(100, graceful=False, farewell=0.4)
        world.lifecycle.request_stop("SIGTERM")
    assert request.admission is not None
    assert request.admission.reason is CutReason.ENDPOINT_CLOSED
    assert world.outcomes()["draining"] == "completed"
    assert world.seconds()["draining"] == 0
    assert world.now == pytest.approx(1.4)  # but nobody is left behind either


async def test_a_handler_that_raises_counts_as_ended(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=1)) as world:

        async def handler() -> None:
            try:
                with world.lifecycle.work.admit("generate 1"):
                    await trio.sleep(3)
                    raise ValueError("bad prompt")
            except ValueError:
                pass

        world.work.start_soon(handler)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == 3
    assert world.lifecycle.report().requests == {Outcome.FAILED: 1}


@pytest.mark.parametrize(
    ("policy", "places", "left", "handed", "unconfirmed"),
    [
        (DrainPolicy.FINISH, 0, [0.5, 11, 11], 0, 0),
        (DrainPolicy.FINISH, None, [0.5, 11, 11], 2, 2),  # at the limit, to who cannot say
        (DrainPolicy.MIGRATE, None, [0.5, 1, 1], 2, 2),
        (DrainPolicy.MIGRATE, 0, [0.5, 11, 11], 0, 0),
        (DrainPolicy.AUTO, 1, [0.5, 11, 1], 1, 0),  # the second has no estimate
        (DrainPolicy.AUTO, 2, [0.5, 11, 1], 2, 0),
        (DrainPolicy.AUTO, 0, [0.5, 11, 11], 0, 0),
    ],
)
async def test_the_policy_is_applied_at_the_interrupt(
    running: Running,
    policy: DrainPolicy,
    places: int | None,
    left: list[float],
    handed: int,
    unconfirmed: int,
    autojump_clock: MockClock,
) -> None:
    timetable, peer = Timetable(grace=1, drain=10, drain_policy=policy), Peer(places)
    async with running(timetable) as world:
        requests = [
            world.request(0.5, prospects=Prospects(estimate=lambda: 0.0), peer=peer),
            world.request(100, peer=peer),
            world.request(100, prospects=Prospects(estimate=lambda: 99.0), peer=peer),
        ]
        world.lifecycle.request_stop("SIGTERM")
    assert [request.left for request in requests] == left
    report = world.lifecycle.report()
    assert report.requests[Outcome.HANDED_OVER] == handed
    assert report.unconfirmed == unconfirmed


# --- stopping -----------------------------------------------------------------------------------


async def test_who_does_not_leave_is_aborted_after_the_farewells(
    running: Running, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=1, drain=10)) as world:
        polite = world.request(100, farewell=0.5)
        world.request(100, stubborn=True)
        world.lifecycle.request_stop("SIGTERM")
    assert polite.left == 11.5
    assert world.now == 12
    assert world.lifecycle.report().requests == {Outcome.CUT: 1, Outcome.LOST: 1}
    assert "the time for farewells is over; 1 request of" in caplog.text
    assert world.outcomes()["stopping"] == "completed"


async def test_stopped_comes_even_if_nothing_can_move_a_request(
    running: Running, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as elsewhere:
        async with running(Timetable(grace=0, drain=1)) as world:
            with world.lifecycle.work.admit("immovable 1"):
                world.lifecycle.request_stop("SIGTERM")
                await world.lifecycle.wait_stopped()
                assert world.now == 3
                assert world.outcomes()["stopping"] == "timed_out"
                assert world.lifecycle.report().leftovers == ("immovable 1",)
        elsewhere.cancel_scope.cancel()


async def test_the_client_of_who_does_not_leave_hears_its_end_all_the_same(
    autojump_clock: MockClock,
) -> None:
    lifecycle, told = Lifecycle(Timetable(grace=0, drain=1), exit_code_on_loss=3), []

    def speak(admission: Admission) -> None:
        told.append((trio.current_time(), admission.reason))
        admission.settle(admission.verdict())

    async def stuck() -> None:
        with lifecycle.work.admit("stuck 1", peer=Peer(None)) as admission:
            admission.on_abort.append(lambda: speak(admission))
            with trio.CancelScope(shield=True):
                await trio.sleep(60)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stuck)
        nursery.start_soon(lifecycle.run)
        await trio.testing.wait_all_tasks_blocked()
        lifecycle.on_abort(lambda: told.append((trio.current_time(), None)))
        lifecycle.request_stop("SIGTERM")
        await lifecycle.wait_stopped()
        assert trio.current_time() == 3
        assert lifecycle.report().leftovers == ("stuck 1",)
        assert lifecycle.report().requests == {Outcome.HANDED_OVER: 1}
        assert lifecycle.exit_code() == 0  # it stays there, but no work is lost
    assert told == [(2, CutReason.DRAIN_LIMIT), (2, None)]  # before connections are reset
    assert lifecycle.report().requests == {Outcome.HANDED_OVER: 1}


@pytest.mark.parametrize(("lost", "code"), [(False, 0), (True, 3)])
async def test_lost_work_has_its_own_exit_code(
    running: Running, lost: bool, code: int, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=1, drain=10), exit_code_on_loss=3) as world:
        world.request(100 if lost else 5)
        world.lifecycle.request_stop("SIGTERM")
    assert world.lifecycle.exit_code() == code


async def test_what_was_served_before_is_not_part_of_the_stop(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(exit_code_on_loss=3) as world:
        world.request(1)
        world.request(2)
        await trio.sleep(1.5)
        world.lifecycle.request_stop("SIGTERM")
    report = world.lifecycle.report()
    assert report.served_before == 1
    assert report.requests == {Outcome.FINISHED: 1}


# --- one budget ----------------------------------------------------------------------------------


async def test_all_phases_spend_one_budget(running: Running, autojump_clock: MockClock) -> None:
    async with running(Timetable(total=20), hooks=hooks(drain=sleeper(6))) as world:
        world.lifecycle.on_unregister(sleeper(1))
        world.request(100, farewell=1)
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_phase(Phase.DRAINING)
        assert world.now == 6
        assert world.lifecycle.remaining() == 10  # 20 - 4 in reserve - 6
    assert world.outcomes()["draining"] == "timed_out"
    assert world.now == 17


async def test_the_age_of_the_signal_is_already_spent(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(total=20)) as world:
        world.request(100)
        world.lifecycle.request_stop("SIGTERM", age=9)
    assert world.now == 7
    assert world.lifecycle.report().seconds == 16


async def test_a_budget_that_ends_in_grace_passes_the_drain(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(total=5)) as world:
        world.request(100)
        world.lifecycle.request_stop("SIGTERM")
    assert world.now == 4
    assert world.outcomes() == {
        "grace": "timed_out",
        "draining": "skipped",
        "stopping": "completed",
        "unregister": "completed",
    }
    assert world.lifecycle.interrupted.is_set()


async def test_a_total_of_nothing_ends_at_once(running: Running, autojump_clock: MockClock) -> None:
    async with running(Timetable(total=0)) as world:
        world.request(100)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_stopped()
        await trio.testing.wait_all_tasks_blocked()
    assert world.now == 0
    # The farewell and the abort are due in the same instant: whichever task runs first wins.
    (outcome,) = world.lifecycle.report().requests
    assert outcome in (Outcome.CUT, Outcome.LOST)


async def closing(lifecycle: Lifecycle) -> float:
    """How long an engine may close that does not."""
    began = trio.current_time()
    with lifecycle.cleanup(30):
        await trio.sleep(1000)
    return trio.current_time() - began


@pytest.mark.parametrize(("total", "budget"), [(1, 0.8), (2, 1.6)])
async def test_unregistering_that_hangs_leaves_the_engine_its_reserve(
    running: Running, total: float, budget: float, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=9, total=total)) as world:
        world.lifecycle.on_unregister(sleeper(99))
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_phase(Phase.STOPPING)
        assert world.now == budget
        await world.lifecycle.wait_stopped()
        assert world.seconds()["unregister"] == budget
        assert await closing(world.lifecycle) == pytest.approx(total - budget)
        assert world.now == total


async def test_unregistering_that_comes_behind_the_budget_takes_half_of_the_rest(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(http_drain=60, total=10)) as world:
        world.lifecycle.on_unregister(sleeper(99))
        world.request(100, gate=world.lifecycle.http)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_stopped()
        assert world.now == 9
        assert await closing(world.lifecycle) == 1


async def test_after_an_escalation_the_engine_has_five_seconds(
    running: Running, autojump_clock: MockClock
) -> None:
    overdue: list[float] = []
    async with running() as world:
        world.lifecycle.on_overdue(lambda seconds: overdue.append(world.now + seconds))
        world.request(100, farewell=0.5)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        world.lifecycle.escalate("SIGINT")
        await world.lifecycle.wait_stopped()
        assert world.now == 1.5
        assert await closing(world.lifecycle) == 5
    assert overdue[-1] == 1.5 + 5 + 5


async def test_an_escalation_while_the_engine_closes_leaves_it_five_seconds(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=0)) as world:
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_stopped()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(closing, world.lifecycle)
            await trio.sleep(3)
            world.lifecycle.escalate("SIGINT")
        assert world.now == 8


# --- hurrying ------------------------------------------------------------------------------------

#: When to interfere, and the phase that the stop is in then.
WHEN = [(0, Phase.GRACE), (3, Phase.GRACE), (7.5, Phase.DRAINING), (12, Phase.DRAINING)]


@pytest.fixture
def slow_stop(running: Running) -> Any:
    """Unregister 1 s, grace to 6 s, callbacks to 9 s, then requests of 100 s."""
    given = hooks(drain=sleeper(1), pre_shutdown=sleeper(1), cleanup=sleeper(1))
    return lambda: running(Timetable(), hooks=given)


@pytest.mark.parametrize(("when", "phase"), WHEN)
async def test_escalation_goes_straight_to_stopping(
    slow_stop: Any, when: float, phase: Phase, autojump_clock: MockClock
) -> None:
    async with slow_stop() as world:
        world.lifecycle.on_unregister(sleeper(1))
        request = world.request(100, farewell=0.5)
        await trio.sleep(1)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(when)
        assert world.lifecycle.phase is phase
        world.lifecycle.escalate("SIGINT")
        world.lifecycle.escalate("SIGINT")  # once is enough
        assert refused(world)
        await world.lifecycle.wait_phase(Phase.STOPPING)
        assert world.now == 1 + when
    assert request.admission.reason is CutReason.ESCALATED
    assert world.now == 1 + when + (1 if when == 0 else 0.5)  # unregistering goes on beside
    assert world.outcomes()[phase.label] == "cancelled"
    assert world.outcomes()["draining"] == ("skipped" if phase is Phase.GRACE else "cancelled")
    assert world.outcomes()["unregister"] == "completed"
    assert world.lifecycle.interrupted.is_set()
    assert world.lifecycle.exit_code() == 0


async def test_an_escalation_during_the_farewells_changes_nothing(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=0, drain=1, total=60)) as world:
        world.request(100, farewell=0.9)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1.5)
        assert world.lifecycle.remaining() == 60 - 1.5  # the budget has no say any more
        world.lifecycle.escalate("SIGINT")
    assert world.now == 1.9


async def test_an_escalation_out_of_the_blue_is_a_stop(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running() as world:
        world.request(100)
        await trio.sleep(1)
        world.lifecycle.escalate("SIGINT")
    assert world.now == 1
    assert world.lifecycle.cause == "SIGINT"


async def test_a_fatal_error_begins_a_stop_without_grace_and_callbacks(
    running: Running, autojump_clock: MockClock
) -> None:
    given = hooks(drain=broken, pre_shutdown=broken, cleanup=broken)
    async with running(hooks=given) as world:
        world.lifecycle.on_unregister(sleeper(1))
        world.request(8)
        await trio.sleep(3)
        world.lifecycle.fail(ValueError("engine dead"))
        assert refused(world)
        assert phase(world) is Phase.GRACE
        await trio.testing.wait_all_tasks_blocked()
        assert phase(world) is Phase.DRAINING
        assert world.lifecycle.interrupted.is_set()
    assert world.now == 8  # what was in flight may finish
    assert world.outcomes() == {
        "grace": "cancelled",
        "draining": "completed",
        "stopping": "completed",
        "unregister": "completed",
        "drain_callback": "skipped",
        "pre_shutdown_callback": "skipped",
        "cleanup_callback": "skipped",
    }
    assert world.lifecycle.cause == "fatal: ValueError: engine dead"
    assert world.lifecycle.exit_code() == 1
    assert world.lifecycle.report().errors == ("ValueError: engine dead",)


async def test_a_fatal_stop_is_bounded(running: Running, autojump_clock: MockClock) -> None:
    async with running() as world:
        request = world.request(100, farewell=1)
        await trio.sleep(1)
        world.lifecycle.fail(ValueError("engine dead"))
    assert world.now == 1 + 30 - 5 + 1
    assert request.admission is not None
    assert request.admission.reason is CutReason.FATAL


@pytest.mark.parametrize(("when", "phase"), WHEN)
async def test_a_fatal_error_during_a_stop(
    slow_stop: Any, when: float, phase: Phase, autojump_clock: MockClock
) -> None:
    async with slow_stop() as world:
        world.lifecycle.on_unregister(sleeper(1))
        world.request(20)
        await trio.sleep(1)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(when)
        assert world.lifecycle.phase is phase
        world.lifecycle.fail(ValueError("engine dead"))
        world.lifecycle.fail(OSError("and more"))
        assert refused(world)
        await trio.testing.wait_all_tasks_blocked()
        assert world.lifecycle.phase is Phase.DRAINING
        assert world.lifecycle.interrupted.is_set()
    assert world.now == 20
    assert world.lifecycle.cause == "SIGTERM"
    assert world.lifecycle.exit_code() == 1
    assert len(world.lifecycle.errors) == 2
    endings = [ending for name, ending in world.outcomes().items() if "callback" in name]
    assert (
        endings
        == {
            0: ["skipped"] * 3,
            3: ["skipped"] * 3,
            7: ["completed", "cancelled", "skipped"],
            12: ["completed"] * 3,
        }[int(when)]
    )


async def test_a_fatal_error_never_lengthens_a_stop(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(total=20)) as world:
        world.request(100)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(15)
        world.lifecycle.fail(ValueError("engine dead"))
    assert world.now == 16


async def test_a_fatal_error_after_the_end_still_counts(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running() as world:
        world.lifecycle.request_stop("SIGTERM")
    world.lifecycle.fail(ValueError("engine dead"))
    assert world.lifecycle.exit_code() == 1
    assert world.lifecycle.snapshot().errors == ("ValueError: engine dead",)


async def test_the_overdue_time_only_shrinks(running: Running, autojump_clock: MockClock) -> None:
    told: list[float] = []
    async with running(Timetable(total=57)) as world:
        world.lifecycle.on_overdue(told.append)
        world.request(100)
        world.lifecycle.request_stop("SIGTERM", age=2)
        await trio.sleep(3)
        world.lifecycle.fail(ValueError("engine dead"))
        world.lifecycle.escalate("SIGINT")
        late: list[float] = []
        world.lifecycle.on_overdue(late.append)
    # What the farewells leave of their time is given back.
    assert list(dict.fromkeys(told)) == [60, 35, 12, 10]
    assert list(dict.fromkeys(late)) == [12, 10]


# --- other ways to end ---------------------------------------------------------------------------


async def test_fast_exit_only_unregisters(running: Running, autojump_clock: MockClock) -> None:
    async with running(Timetable(fast_exit=True, unregister=5)) as world:
        world.lifecycle.on_unregister(sleeper(3))
        world.request(100)
        world.lifecycle.request_stop("SIGTERM")
        await world.lifecycle.wait_stopped()
        assert world.now == 3
        assert world.lifecycle.in_flight()
        assert refused(world)
        world.work.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
    assert world.outcomes() == {
        "grace": "completed",
        "draining": "skipped",
        "stopping": "skipped",
        "unregister": "completed",
    }


async def test_fast_exit_is_not_for_fatal_errors(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(fast_exit=True)) as world:
        world.request(10)
        await trio.testing.wait_all_tasks_blocked()
        world.lifecycle.fail(ValueError("engine dead"))
    assert world.now == 10


@pytest.mark.parametrize("when", ["serving", "requested", "grace", "draining", "stopping"])
async def test_a_run_that_is_cancelled_still_unregisters_once(
    when: str, autojump_clock: MockClock
) -> None:
    calls = []

    async def unregister() -> None:
        calls.append(trio.current_time())
        await trio.sleep(0.5)
        calls.append(trio.current_time())

    lifecycle = Lifecycle(Timetable(drain=10))
    lifecycle.on_unregister(unregister)
    with lifecycle.work.admit("immovable 1"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lifecycle.run)
            await trio.testing.wait_all_tasks_blocked()
            if when != "serving":
                lifecycle.request_stop("SIGTERM")
            await trio.sleep({"grace": 0.2, "draining": 9, "stopping": 15.6}.get(when, 0))
            nursery.cancel_scope.cancel()
    assert len(calls) == 2
    assert lifecycle.phase is Phase.STOPPED
    assert lifecycle.interrupted.is_set()
    assert not lifecycle.work.is_open
    names = [stage.name for stage in lifecycle.report().phases]
    assert names == ["grace", "draining", "stopping"]
    assert lifecycle.report().phases[-1].ending is not None


async def test_unregistering_that_hangs_cannot_hold_a_cancelled_run(
    autojump_clock: MockClock,
) -> None:
    lifecycle = Lifecycle(Timetable())
    lifecycle.on_unregister(trio.sleep_forever)
    with trio.move_on_after(1):
        await lifecycle.run()
    assert trio.current_time() == 3


# --- shields ----------------------------------------------------------------------


async def test_cleanup_is_shielded_and_bounded(running: Running, autojump_clock: MockClock) -> None:
    async with running() as world:
        with trio.CancelScope() as outer:
            outer.cancel()
            with world.lifecycle.cleanup(4) as scope:
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert world.now == 4
        world.lifecycle.request_stop("SIGTERM")


async def test_cleanup_never_outlives_the_hard_end(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(total=10)) as world:
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(8)
        with world.lifecycle.cleanup(30, name="engine_close"):
            await trio.sleep(1000)
        assert world.now == 10
    assert world.outcomes()["engine_close"] == "timed_out"


async def test_a_shield_that_is_in_force_shrinks_too(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running() as world:

        async def close() -> None:
            with world.lifecycle.cleanup(100):
                await trio.sleep_forever()

        world.work.start_soon(close)
        await trio.sleep(1)
        world.lifecycle.escalate("SIGINT")
        await world.lifecycle.wait_stopped()
        assert world.now == 1  # the stop is over; the engine still closes
    assert world.now == 1 + 5


async def test_the_snapshot_follows_every_change(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=1)) as world:
        assert world.lifecycle.snapshot().phase == "serving"
        world.request(5)
        world.request(3)
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(4)
        snapshot = world.lifecycle.snapshot()
        assert snapshot.phase == "draining"
        assert snapshot.requests == {Outcome.FINISHED: 1}
        assert snapshot.leftovers == ("work 5",)
    assert world.lifecycle.snapshot() == world.lifecycle.report()
    assert world.lifecycle.snapshot().phase == "stopped"
