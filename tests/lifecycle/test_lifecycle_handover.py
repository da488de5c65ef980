"""Who finishes and who is handed over, and how fast."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dynamo_trio.lifecycle import (
    Admission,
    CutReason,
    DrainPolicy,
    Gate,
    Outcome,
    Peer,
    Prospects,
    Timetable,
)
from dynamo_trio.lifecycle.handover import INTERVAL, SHARE, estimate, hopeless

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from tests.lifecycle.conftest import Request, Running, World

# --- the judgement ------------------------------------------------------------------------------


def admitted(
    seconds: float | None, *, deadline: float = math.inf, movable: bool = True
) -> Admission:
    prospects = Prospects(movable, lambda: seconds, deadline)
    return Admission(f"generate {seconds}", 0.0, prospects=prospects)


async def test_the_hopeless_are_those_that_surely_cannot_finish(autojump_clock: MockClock) -> None:
    short, long, longer, unknown = map(admitted, (1, 20, 30, None))
    fixed = admitted(30, movable=False)
    inside = [short, long, fixed, longer, unknown]
    assert hopeless(inside, 10) == [longer, long]
    assert hopeless(inside, math.inf) == []


async def test_what_ends_just_in_time_finishes(autojump_clock: MockClock) -> None:
    assert hopeless([admitted(10)], 10) == []


async def test_a_caller_who_stops_waiting_in_time_needs_no_other_worker(
    autojump_clock: MockClock,
) -> None:
    await trio.sleep(100)
    assert hopeless([admitted(60, deadline=109)], 10) == []
    late = admitted(60, deadline=111)
    assert hopeless([late], 10) == [late]
    # That it waits for long says nothing of how long the work takes.
    assert hopeless([admitted(None, deadline=1000)], 10) == []
    assert admitted(60, deadline=50).prospects.needs() == 0


@pytest.mark.parametrize(
    ("tokens", "pace", "seconds"),
    [(100, 0.05, 5.0), (0, 0.05, 0.0), (None, 0.05, None), (100, None, None)],
)
def test_estimate(tokens: int | None, pace: float | None, seconds: float | None) -> None:
    assert estimate(tokens, pace) == seconds


def broken() -> float:
    raise ZeroDivisionError("no token yet")


def leaving() -> float:
    raise SystemExit(0)


@pytest.mark.parametrize(
    "says", [broken, leaving, lambda: "2.5", lambda: math.nan, lambda: math.inf]
)
async def test_an_estimate_of_no_use_is_said_once_and_harms_nobody(
    running: Running,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    says: Callable[[], Any],
) -> None:
    async with running(Timetable(grace=0.0, drain=30.0)) as world:
        requests = [
            world.request(20, prospects=Prospects(estimate=says), peer=Peer(3)),
            world.request(20, prospects=Prospects(estimate=lambda: 19.0), peer=Peer(3)),
        ]
        await trio.sleep(1)
        bad = requests[0].admission
        world.lifecycle.request_stop("SIGTERM")
        assert bad is not None
        assert bad.prospects.needs() is bad.prospects.estimated() is None
    assert left(requests) == [20, 20]
    assert [r.levelname for r in caplog.records if "of no use" in r.message] == ["ERROR"]


def test_an_estimate_that_has_been_outlived_is_no_time_at_all() -> None:
    assert Prospects(estimate=lambda: -5).estimated() == 0.0


# --- what a cut means -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "movable", "reason", "outcome", "confirmed"),
    [
        (None, True, CutReason.DRAIN_LIMIT, Outcome.HANDED_OVER, False),
        (None, True, CutReason.ESCALATED, Outcome.HANDED_OVER, False),
        (None, True, CutReason.FATAL, Outcome.HANDED_OVER, False),
        (None, True, CutReason.ENDPOINT_CLOSED, Outcome.HANDED_OVER, False),
        (None, True, CutReason.HANDOVER, Outcome.HANDED_OVER, False),
        (None, False, CutReason.DRAIN_LIMIT, Outcome.CUT, False),
        (0, True, CutReason.DRAIN_LIMIT, Outcome.CUT, False),
        (0, True, CutReason.HANDOVER, Outcome.CUT, False),
        (1, True, CutReason.DRAIN_LIMIT, Outcome.HANDED_OVER, True),
        (1, True, CutReason.HANDOVER, Outcome.HANDED_OVER, True),
        (1, False, CutReason.DRAIN_LIMIT, Outcome.CUT, False),
        (1, True, CutReason.CLIENT_LEFT, Outcome.CANCELLED, False),
    ],
)
async def test_what_becomes_of_whom(
    places: int | None, movable: bool, reason: CutReason, outcome: Outcome, confirmed: bool
) -> None:
    gate, peer = Gate("work"), Peer(places)
    with gate.admit("generate 1", prospects=Prospects(movable), peer=peer) as admission:
        admission.cut(reason)
    assert (admission.outcome, admission.confirmed) == (outcome, confirmed)
    assert gate.unconfirmed == (outcome is Outcome.HANDED_OVER and not confirmed)
    assert peer.places == (0 if confirmed else places)


async def test_places_are_used_up_and_renewed() -> None:
    gate, peer = Gate("work"), Peer(1)
    with gate.admit("a 1", peer=peer), gate.admit("a 2", peer=peer), gate.admit("a 3", peer=peer):
        first, second, third = gate.admissions()
        first.cut(CutReason.DRAIN_LIMIT)
        second.cut(CutReason.DRAIN_LIMIT)
        peer.renew(1)
        third.cut(CutReason.DRAIN_LIMIT)
    assert [one.moved for one in (first, second, third)] == [True, False, True]
    assert gate.tally == {Outcome.HANDED_OVER: 2, Outcome.CUT: 1}


# --- the pace -------------------------------------------------------------------------------------


def hopeless_requests(world: World, count: int, peer: Peer) -> list[Request]:
    return [
        world.request(1000, prospects=Prospects(estimate=lambda: 900.0), peer=peer)
        for _ in range(count)
    ]


def left(requests: list[Request]) -> list[float]:
    times = [request.left for request in requests if request.left is not None]
    assert len(times) == len(requests)
    return sorted(times)


async def test_the_hopeless_go_one_at_a_time_for_each_peer(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=0, drain=100)) as world:
        first = hopeless_requests(world, 3, Peer(9))
        second = hopeless_requests(world, 2, Peer(9))
        world.lifecycle.request_stop("SIGTERM")
    assert left(first) == [0, INTERVAL, 2 * INTERVAL]
    assert left(second) == [0, INTERVAL]
    report = world.lifecycle.report()
    assert report.requests == {Outcome.HANDED_OVER: 5}
    assert report.unconfirmed == 0
    assert world.now == 2 * INTERVAL  # and then nothing is waited for


async def test_many_go_in_a_part_of_the_time_that_is_left(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=0, drain=4)) as world:
        requests = hopeless_requests(world, 100, Peer(1000))
        world.lifecycle.request_stop("SIGTERM")
    times = left(requests)
    assert times == pytest.approx([4 * SHARE * n / 100 for n in range(100)])


async def test_no_more_go_than_the_peer_has_places(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=0, drain=10)) as world:
        requests = hopeless_requests(world, 4, peer := Peer(2))
        elsewhere = hopeless_requests(world, 2, Peer(None))
        nowhere = hopeless_requests(world, 1, Peer(0))
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(5)
        peer.renew(1)
    assert left(requests) == [0, INTERVAL, 5, 10]
    assert left(elsewhere) == [10, 10]  # it cannot say: at the limit, and hoped for
    assert left(nowhere) == [10]
    report = world.lifecycle.report()
    assert report.requests == {Outcome.HANDED_OVER: 5, Outcome.CUT: 2}
    assert report.unconfirmed == 2


async def test_who_turns_out_to_be_in_time_stays(
    running: Running, autojump_clock: MockClock
) -> None:
    estimates = {"": 900.0}
    prospects = Prospects(estimate=lambda: estimates[""])
    async with running(Timetable(grace=0, drain=10)) as world:
        request = world.request(3, prospects=prospects, peer=(peer := Peer(0)))
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        estimates[""] = 2.0
        peer.renew(1)
    assert request.left == 3
    assert peer.places == 1


async def test_who_waits_for_a_place_holds_nothing_up(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(Timetable(grace=0, drain=10)) as world:
        [request] = hopeless_requests(world, 1, peer := Peer(0))
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1)
        assert request.admission is not None
        request.admission.cut(CutReason.CLIENT_LEFT)
        await world.lifecycle.wait_stopped()
        assert world.now == 1
        peer.renew(1)
    assert peer.places == 1


async def test_handing_over_goes_on_beside_the_cleanup_callback(
    running: Running, autojump_clock: MockClock
) -> None:
    from dynamo_trio.lifecycle import Hooks

    async def cleanup() -> None:
        await trio.sleep(20)

    timetable = Timetable(grace=0, drain=10)
    async with running(timetable, hooks=Hooks(cleanup=cleanup)) as world:
        requests = hopeless_requests(world, 3, Peer(9))
        world.lifecycle.request_stop("SIGTERM")
    assert left(requests) == [0, INTERVAL, 2 * INTERVAL]
    assert world.now == 20


async def test_finish_hands_nothing_over_early(running: Running, autojump_clock: MockClock) -> None:
    timetable = Timetable(grace=0, drain=10, drain_policy=DrainPolicy.FINISH)
    async with running(timetable) as world:
        requests = [hopeless_requests(world, 2, Peer(places)) for places in (None, 0, 9)]
        world.lifecycle.request_stop("SIGTERM")
    assert [left(some) for some in requests] == [[10, 10]] * 3


MIGRATE = Timetable(grace=0, drain=10, drain_policy=DrainPolicy.MIGRATE)


async def test_migrate_hands_over_at_once_what_the_peers_take(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(MIGRATE, exit_code_on_loss=3) as world:
        requests = [hopeless_requests(world, 2, Peer(places)) for places in (None, 0, 1, 9)]
        fixed = world.request(5, prospects=Prospects(movable=False), peer=Peer(9))
        world.lifecycle.request_stop("SIGTERM")
    assert [left(some) for some in requests] == [[0, 0], [10, 10], [0, 10], [0, 0]]
    assert fixed.left == 5
    report = world.lifecycle.report()
    assert report.requests == {Outcome.HANDED_OVER: 5, Outcome.CUT: 3, Outcome.FINISHED: 1}
    assert report.unconfirmed == 2  # those whose peer cannot say
    assert world.lifecycle.exit_code() == 3


async def test_what_migrate_finds_no_place_for_may_still_finish_or_get_one(
    running: Running, autojump_clock: MockClock
) -> None:
    async with running(MIGRATE, exit_code_on_loss=3) as world:
        short = world.request(4, peer=Peer(0))
        long = hopeless_requests(world, 2, peer := Peer(0))
        world.lifecycle.request_stop("SIGTERM")
        await trio.sleep(3)
        peer.renew(1)
        await trio.sleep(3)
        peer.renew(1)
    assert short.left == 4
    assert left(long) == [3, 6]
    assert world.now == 6
    report = world.lifecycle.report()
    assert report.requests == {Outcome.HANDED_OVER: 2, Outcome.FINISHED: 1}
    assert report.unconfirmed == 0
    assert world.lifecycle.exit_code() == 0
