"""A drain that can be taken back: its states, its races, and what "safe to delete" means."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from dynamo_trio.errors import Draining
from dynamo_trio.lifecycle import (
    DrainState,
    Gate,
    GraceMode,
    Lifecycle,
    Outcome,
    Phase,
    ReversibleDrain,
    Timetable,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@attrs.define(eq=False)
class Fleet:
    """The others, as the process sees them: a store, and peers that route by it."""

    #: Seconds that the store takes for each withdrawal and each registration; negative: it
    #: takes so long, and then fails. What comes after the last one works at once.
    withdrawals: list[float] = attrs.field(factory=list)
    registrations: list[float] = attrs.field(factory=list)
    #: Seconds from a withdrawal until all peers have acknowledged it.
    acknowledge: float | trio.Event = 0.0
    found: bool = True
    calls: list[str] = attrs.field(factory=list)

    async def withdraw(self) -> None:
        await self._do("withdraw", self.withdrawals)
        self.found = False

    async def leave(self) -> None:
        """As a stop does it."""
        if self.found:
            await trio.sleep(0.5)
        self.found = False

    async def restore(self) -> None:
        await self._do("restore", self.registrations)
        self.found = True

    async def acknowledged(self) -> None:
        if isinstance(self.acknowledge, trio.Event):
            await self.acknowledge.wait()
        else:
            await trio.sleep(self.acknowledge)

    async def _do(self, what: str, seconds: list[float]) -> None:
        self.calls.append(what)
        takes = seconds.pop(0) if seconds else 0.0
        await trio.sleep(abs(takes))
        if takes < 0:
            raise OSError("the store is away")


@attrs.define(eq=False)
class Site:
    lifecycle: Lifecycle
    drain: ReversibleDrain
    fleet: Fleet
    nursery: trio.Nursery
    began: float = attrs.field(factory=trio.current_time)
    ended: list[Outcome] = attrs.field(factory=list)

    def found(self) -> bool:
        return self.fleet.found

    def is_safe(self) -> bool:
        return self.drain.safe_to_delete

    def is_open(self) -> bool:
        return self.lifecycle.work.is_open

    def where(self) -> DrainState:
        return self.drain.state

    @property
    def now(self) -> float:
        return trio.current_time() - self.began

    async def request(self, seconds: float) -> None:
        with self.lifecycle.work.admit(f"request {seconds:g}") as admission:
            with admission.scope:
                await trio.sleep(seconds)
        assert admission.outcome is not None
        self.ended.append(admission.outcome)


@asynccontextmanager
async def open_site(fleet: Fleet | None = None, **limits: float | GraceMode) -> AsyncIterator[Site]:
    fleet = fleet or Fleet()
    lifecycle = Lifecycle(Timetable(**limits), grace_over=fleet.acknowledged)  # type: ignore[arg-type]  # seconds
    lifecycle.on_unregister(fleet.leave)
    drain = ReversibleDrain(lifecycle, fleet.withdraw, fleet.restore)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        nursery.start_soon(drain.run)
        async with trio.open_nursery() as requests:
            await wait_all_tasks_blocked()
            yield Site(lifecycle, drain, fleet, requests)
            lifecycle.escalate("the test is over")
            await lifecycle.wait_stopped()


async def test_it_goes_out_and_comes_back(autojump_clock: MockClock) -> None:
    async with open_site(Fleet(acknowledge=1.0), grace=5.0) as site:
        site.nursery.start_soon(site.request, 3.0)
        await wait_all_tasks_blocked()
        site.drain.begin()
        assert site.where() is DrainState.DRAINING  # at once
        await trio.sleep(1.0)
        await site.request(0.0)  # a peer may not know yet
        await trio.sleep(0.5)
        with pytest.raises(Draining, match="drained"):
            await site.request(1.0)
        assert not site.is_safe()
        await site.drain.wait_settled()
        assert (site.where(), site.now) == (DrainState.DRAINED, 3.0)
        assert site.is_safe()
        assert site.drain.last is not None
        assert (site.drain.last.outcome, site.drain.last.seconds) == ("drained", 3.0)
        site.drain.resume()
        assert not site.is_safe()
        assert site.is_open()
        await site.drain.wait_settled()
        assert site.where() is DrainState.SERVING
        assert site.found()
        await site.request(1.0)
    assert site.ended == [Outcome.FINISHED] * 3


async def test_both_verbs_are_idempotent(autojump_clock: MockClock) -> None:
    async with open_site() as site:
        site.drain.resume()
        assert site.where() is DrainState.SERVING
        site.drain.begin()
        site.drain.begin()
        await site.drain.wait_settled()
        site.drain.begin()
        assert site.where() is DrainState.DRAINED
        site.drain.resume()
        site.drain.resume()
        await site.drain.wait_settled()
        assert site.fleet.calls == ["withdraw", "restore"]


async def test_a_peer_that_cannot_acknowledge_has_the_grace_period(
    autojump_clock: MockClock,
) -> None:
    async with open_site(Fleet(acknowledge=1000.0), grace=5.0) as site:
        site.drain.begin()
        await trio.sleep(4.9)
        await site.request(0.0)  # still admitted
        assert not site.drain.safe_to_delete
        await site.drain.wait_settled()
        assert site.now == pytest.approx(5.0)


async def test_the_grace_period_is_kept_where_it_is_fixed(autojump_clock: MockClock) -> None:
    async with open_site(grace=5.0, grace_mode=GraceMode.FIXED) as site:
        site.drain.begin()
        await site.drain.wait_settled()
        assert site.now == pytest.approx(5.0)


async def test_as_long_as_the_store_is_away_it_serves(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site(Fleet(withdrawals=[-2.0, -2.0, 2.0]), grace=0.0) as site:
        site.drain.begin()
        await trio.sleep(7.5)
        await site.request(0.0)  # others route here, since they still find it
        assert site.found()
        assert not site.drain.safe_to_delete
        await site.drain.wait_settled()
        assert site.now == pytest.approx(8.0)
        assert not site.found()
    assert caplog.text.count("unregistering failed; trying again in 1 s") == 2


async def test_a_drain_that_is_taken_back_in_the_same_instant(autojump_clock: MockClock) -> None:
    known = trio.Event()
    async with open_site(Fleet(acknowledge=known), grace=5.0) as site:
        site.drain.begin()
        await trio.sleep(1.0)
        known.set()  # the drain's task is about to run, and a cancel does not stop it
        site.drain.resume()
        await wait_all_tasks_blocked()
        assert site.is_open()
        assert site.lifecycle.http.is_open
        assert site.where() is DrainState.SERVING
        assert site.drain.last is not None
        await site.request(1.0)
    assert site.ended == [Outcome.FINISHED]


def test_a_gate_that_was_shut_while_it_paused_stays_shut() -> None:
    gate = Gate("work")
    gate.pause()
    gate.shut()
    gate.resume()
    assert not gate.is_open


async def test_a_return_that_is_taken_back(autojump_clock: MockClock) -> None:
    async with open_site(Fleet(registrations=[6.0]), grace=0.0) as site:
        site.drain.begin()
        await site.drain.wait_settled()
        site.drain.resume()
        await trio.sleep(3.0)
        assert site.where() is DrainState.RESUMING
        site.drain.begin()
        await site.drain.wait_settled()
        assert site.now == pytest.approx(3.0)
        assert site.where() is DrainState.DRAINED
        assert site.fleet.calls == ["withdraw", "restore", "withdraw"]
        assert not site.found()


async def test_a_stop_does_not_wait_for_the_grace_period_again(autojump_clock: MockClock) -> None:
    async with open_site(Fleet(acknowledge=1000.0), grace=5.0) as site:
        site.drain.begin()
        await site.drain.wait_settled()
        began = site.now
        site.lifecycle.request_stop("SIGTERM")
        await site.lifecycle.wait_stopped()
        assert site.now == pytest.approx(began)


async def test_a_stop_waits_for_what_is_left_of_the_grace_period(
    autojump_clock: MockClock,
) -> None:
    async with open_site(Fleet(acknowledge=1000.0), grace=5.0) as site:
        site.drain.begin()
        await trio.sleep(2.0)
        site.lifecycle.request_stop("SIGTERM")
        await site.lifecycle.wait_stopped()
        assert site.now == pytest.approx(5.0)


async def test_after_a_return_a_stop_has_its_whole_grace_period(autojump_clock: MockClock) -> None:
    async with open_site(Fleet(acknowledge=1000.0), grace=5.0) as site:
        site.drain.begin()
        await site.drain.wait_settled()
        site.drain.resume()
        await site.drain.wait_settled()
        began = site.now
        site.lifecycle.request_stop("SIGTERM")
        await site.lifecycle.wait_stopped()
        assert site.now == pytest.approx(began + 0.5 + 5.0)  # until it has left, then the grace


async def test_there_is_no_way_back_from_a_stop(autojump_clock: MockClock) -> None:
    async with open_site(grace=5.0) as site:
        site.drain.begin()
        await site.drain.wait_settled()
        site.lifecycle.request_stop("SIGTERM")
        with pytest.raises(Draining, match="stopping"):
            site.drain.resume()
        assert not site.is_open()
        assert site.drain.safe_to_delete
        site.drain.begin()  # the stop drains as well
        await site.lifecycle.wait_stopped()
        assert site.fleet.calls == ["withdraw"]


# --- safe to delete, against a model -----------------------------------------------------------

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "300"))


def quarters(low: float, high: float) -> st.SearchStrategy[float]:
    """Multiples of a quarter: exact in binary, and rich in events at the same instant."""
    return st.integers(int(low * 4), int(high * 4)).map(lambda n: n / 4)


@attrs.frozen
class Scenario:
    grace: float
    fixed: bool
    acknowledge: float
    withdrawals: tuple[float, ...]
    registrations: tuple[float, ...]
    #: (when, what): begin, resume, stop, escalate, fail.
    verbs: tuple[tuple[float, str], ...]
    #: (when, seconds that it takes).
    requests: tuple[tuple[float, float], ...]


store_times = st.lists(quarters(0, 2) | quarters(-1, 0), max_size=4).map(tuple)
often = ["begin"] * 4 + ["resume"] * 3
scenarios = st.builds(
    Scenario,
    grace=st.sampled_from([0.0, 0.25, 2.0, 5.0]),
    fixed=st.booleans(),
    acknowledge=st.sampled_from([0.0, 0.5, 3.0, 1000.0]),
    withdrawals=store_times,
    registrations=store_times,
    verbs=st.lists(
        st.tuples(quarters(0, 12), st.sampled_from([*often, "stop", "escalate", "fail"])),
        min_size=1,
        max_size=6,
    ).map(tuple),
    requests=st.lists(st.tuples(quarters(0, 14), quarters(0, 4)), max_size=8).map(tuple),
)


@attrs.define(eq=False)
class Witness(trio.abc.Instrument):
    """Looks after every step of every task."""

    site: Site
    #: It was said to be safe, and nobody has resumed since.
    was_safe: bool = False
    wrong: list[str] = attrs.field(factory=list)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.look()

    def look(self) -> None:
        if not self.site.drain.safe_to_delete:
            return
        self.was_safe = True
        if self.site.lifecycle.in_flight():
            self.wrong.append(f"safe at {self.site.now} with work present")
        if self.site.fleet.found:
            self.wrong.append(f"safe at {self.site.now}, and others find it")

    def admitted(self) -> None:
        if self.was_safe:
            self.wrong.append(f"admitted at {self.site.now} after it was safe")


async def play(scenario: Scenario) -> None:
    fleet = Fleet(list(scenario.withdrawals), list(scenario.registrations), scenario.acknowledge)
    mode = GraceMode.FIXED if scenario.fixed else GraceMode.AUTO
    async with open_site(fleet, grace=scenario.grace, grace_mode=mode, drain=6.0) as site:
        witness = Witness(site)
        trio.lowlevel.add_instrument(witness)

        async def visit(at: float, seconds: float) -> None:
            await trio.sleep(at)
            with suppress(Draining):
                if site.lifecycle.work.is_open:
                    witness.admitted()
                await site.request(seconds)

        async def tell(at: float, verb: str) -> None:
            await trio.sleep(at)
            act(site, witness, verb)
            witness.look()

        async with trio.open_nursery() as nursery:
            for at, seconds in scenario.requests:
                nursery.start_soon(visit, at, seconds)
            for at, verb in scenario.verbs:
                nursery.start_soon(tell, at, verb)
        check_end(site, await at_the_end(site))
        trio.lowlevel.remove_instrument(witness)
        assert witness.wrong == []


def act(site: Site, witness: Witness, verb: str) -> None:
    match verb:
        case "begin":
            site.drain.begin()
        case "resume" if not site.lifecycle.stopping:
            was_out = site.drain.is_wanted
            site.drain.resume()
            witness.was_safe = witness.was_safe and not was_out
        case "stop":
            site.lifecycle.request_stop("test")
        case "escalate":
            site.lifecycle.escalate("test")
        case "fail":
            site.lifecycle.fail(OSError("test"))


async def at_the_end(site: Site) -> float:
    """Whatever it is on the way to is there in bounded time. Returns how long it took."""
    began = trio.current_time()
    with trio.fail_after(60):
        if site.lifecycle.stopping:
            await site.lifecycle.wait_stopped()
        else:
            await site.drain.wait_settled()
    return trio.current_time() - began


def check_end(site: Site, seconds: float) -> None:
    assert seconds <= 30
    if site.lifecycle.stopping:
        assert site.lifecycle.phase is Phase.STOPPED
        assert site.drain.safe_to_delete
        return
    # A drain alone ends nobody's request.
    assert set(site.ended) <= {Outcome.FINISHED}
    out = site.where() is DrainState.DRAINED
    assert site.drain.safe_to_delete == out
    gates = {site.lifecycle.work.is_open, site.lifecycle.http.is_open}
    assert {site.fleet.found} == gates == {not out}


def run_scenario(scenario: Scenario) -> None:
    trio.run(play, scenario, clock=MockClock(autojump_threshold=0))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios)
def test_safe_to_delete_is_never_said_too_soon(scenario: Scenario) -> None:
    run_scenario(scenario)


@pytest.mark.soak
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenarios)
def test_safe_to_delete_is_never_said_too_soon_in_ten_thousand_schedules(
    scenario: Scenario,
) -> None:
    run_scenario(scenario)
