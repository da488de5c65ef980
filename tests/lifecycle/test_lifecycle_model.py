"""The lifecycle against a model: random stops, and what must hold in each of them.

Hypothesis draws a timetable, callbacks, requests at both gates and the moments at which
somebody asks to stop, escalates or reports a fatal error; virtual time lets a stop of an hour
take a millisecond. Five kinds of things are asserted, and all are needed. A bound alone
let three of five mutants live.

* *Safety*: a gate admits exactly as long as it should; callbacks run in order and never after
  a fatal error; the process is unregistered once.
* *Emptiness*: in STOPPED nobody is left, and who was cut has said farewell.
* *Promptness*: at no instant does a phase wait for nothing.
* *Hand-over*: who goes early could not have finished, and somebody has a place for it; who is
  cut goes on elsewhere if that is possible.
* *Bound*: every phase keeps its limit, the stop its budget and its hard end.

``tests/lifecycle/mutants.py`` breaks the lifecycle in many ways, and this test must find each.
"""

from __future__ import annotations

import logging
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from trio.testing import MockClock

import dynamo_trio
from dynamo_trio.errors import Draining
from dynamo_trio.lifecycle import (
    MOVES,
    Admission,
    CutReason,
    DrainPolicy,
    Ending,
    GraceMode,
    Hooks,
    Lifecycle,
    Outcome,
    Peer,
    Phase,
    Prospects,
    Timetable,
)
from dynamo_trio.lifecycle.beside import UNWIND
from dynamo_trio.lifecycle.handover import SHARE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# --- what Hypothesis draws -----------------------------------------------------------------


@attrs.frozen
class Job:
    """A callback, or the unregistering: so many seconds, then it ends in one of these ways."""

    seconds: float = 0.0
    raises: type[BaseException] | None = None
    #: Its own cleanup fails when it is cancelled.
    raises_if_cancelled: bool = False
    #: It cannot be cancelled.
    deaf: bool = False


@attrs.frozen
class Visit:
    """One request."""

    at: float
    front: bool
    seconds: float
    farewell: float = 0.0
    graceful: bool = True
    #: Does not hear a soft cut: only an abort ends it before its time.
    deaf: bool = False
    #: A request of the front that calls an endpoint after so many seconds.
    calls_after: float | None = None
    #: Can another worker continue it?
    movable: bool = True
    #: Is it known when it ends?
    estimated: bool = True
    #: Which of the peers has sent it.
    peer: int = 0
    #: Can its end be told without it, if it does not leave?
    spoken_for: bool = False


@attrs.frozen
class Scenario:
    timetable: Timetable
    visits: tuple[Visit, ...] = ()
    #: (when, "stop" | "escalate" | "fail")
    events: tuple[tuple[float, str], ...] = ((1.0, "stop"),)
    unregister: Job = Job()
    hooks: dict[str, Job] = attrs.field(factory=dict)
    #: When the last peer has acknowledged; None: there are none.
    acknowledged: float | None = None
    #: How many requests each peer can place elsewhere; None: it cannot say.
    places: tuple[int | None, int | None] = (0, None)
    #: When something begins to close that would take an hour.
    closes_at: float | None = None


def quarters(low: float, high: float) -> st.SearchStrategy[float]:
    """Multiples of a quarter: exact in binary, and rich in events at the same instant."""
    return st.integers(int(low * 4), int(high * 4)).map(lambda n: n / 4)


jobs = st.builds(
    Job,
    quarters(0, 6),
    st.sampled_from([None, None, OSError, SystemExit]),
    st.booleans(),
    st.booleans(),
)
visits = st.builds(
    Visit,
    at=quarters(0, 14),
    front=st.booleans(),
    seconds=quarters(0, 20),
    farewell=st.sampled_from([0.0, 0.125, 0.375, 3.0]),
    graceful=st.booleans(),
    deaf=st.booleans(),
    calls_after=st.none() | quarters(0, 6),
    movable=st.booleans(),
    estimated=st.booleans(),
    peer=st.integers(0, 1),
    spoken_for=st.booleans(),
)
timetables = st.builds(
    Timetable,
    grace=st.sampled_from([0.0, 0.25, 2.0, 5.0]),
    grace_mode=st.sampled_from(GraceMode),
    http_drain=st.sampled_from([None, None, 0.0, 1.0, 5.0]),
    drain=st.sampled_from([0.0, 1.0, 8.0, 900.0]),
    drain_policy=st.sampled_from(DrainPolicy),
    hook=st.sampled_from([0.5, 3.0]),
    fatal=st.sampled_from([2.0, 10.0, 30.0]),
    total=st.sampled_from([None, None, 1.0, 5.0, 10.0, 40.0]),
)
events = st.lists(
    st.tuples(quarters(0, 14), st.sampled_from(["stop", "escalate", "fail"])),
    min_size=1,
    max_size=4,
).map(lambda drawn: tuple(sorted(drawn)))
scenarios = st.builds(
    Scenario,
    timetable=timetables,
    visits=st.lists(visits, max_size=6).map(tuple),
    events=events,
    unregister=jobs,
    hooks=st.dictionaries(st.sampled_from(["drain", "pre_shutdown", "cleanup"]), jobs),
    acknowledged=st.none() | quarters(0, 14),
    places=st.tuples(*[st.sampled_from([None, 0, 1, 2, 9])] * 2),
    closes_at=st.none() | quarters(0, 14),
)


# --- one run of it -------------------------------------------------------------------------


@attrs.define(eq=False)
class Guest:
    """A request as the model saw it."""

    visit: Visit
    in_front: bool
    admission: Admission
    entered: float
    cut: float | None = None
    aborted: bool = False
    #: It was called by a request of the front that has been cut.
    orphaned: bool = False
    #: Its end was told in its place.
    told: bool = False
    said_farewell: bool = False
    left: float = math.inf


@attrs.define(eq=False)
class Run:
    """Drives one scenario and writes down what happens."""

    scenario: Scenario
    lifecycle: Lifecycle = attrs.field(init=False)
    peers: list[Peer] = attrs.field(init=False)
    guests: list[Guest] = attrs.field(factory=list)
    #: (name, began, ended) of every callback and of the unregistering. One that cannot be
    #: cancelled ends, as far as anybody may wait for it, a moment after it should have.
    calls: list[tuple[str, float, float]] = attrs.field(factory=list)
    #: Those that run, whatever becomes of them.
    busy: set[str] = attrs.field(factory=set)
    entered: dict[Phase, float] = attrs.field(factory=dict)
    stop_began: float = math.inf
    interrupted: float = math.inf
    escalated: float = math.inf
    failed: float = math.inf
    aborting: bool = False
    closed: float = math.inf
    faults: list[str] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        calls: dict[str, Any] = {n: self.call(n, job) for n, job in self.scenario.hooks.items()}
        self.lifecycle = Lifecycle(
            self.scenario.timetable,
            hooks=Hooks(**calls),
            grace_over=None if self.scenario.acknowledged is None else self.acknowledgement,
        )
        self.peers = [Peer(places) for places in self.scenario.places]
        self.lifecycle.on_unregister(self.call("unregister", self.scenario.unregister))

    def call(self, name: str, job: Job) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            began = trio.current_time()
            self.check_call(name)
            index = len(self.calls)
            self.calls.append((name, began, math.inf))
            self.busy.add(name)
            try:
                if job.deaf:
                    await self.endure(index, job.seconds)
                else:
                    await trio.sleep(job.seconds)
                if job.raises is not None:
                    raise job.raises(f"{name} failed")
            except trio.Cancelled:
                if job.raises_if_cancelled:
                    raise ValueError(f"the cleanup of {name} failed") from None
                raise
            finally:
                self.busy.discard(name)
                self.end_call(index, trio.current_time())

        return run

    async def endure(self, index: int, seconds: float) -> None:
        """Work under a shield; note when whoever waits for it must give it up."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.note_cancel, index)
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
            nursery.cancel_scope.cancel("done")

    async def note_cancel(self, index: int) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.end_call(index, trio.current_time() + UNWIND)

    def end_call(self, index: int, at: float) -> None:
        name, began, ended = self.calls[index]
        self.calls[index] = (name, began, min(ended, at))

    def check_call(self, name: str) -> None:
        """Note what is wrong with this call: the lifecycle would only log an assertion."""
        earlier = [called for called, _, _ in self.calls]
        order = ["drain", "pre_shutdown", "cleanup"]
        wrong = {
            "called twice": name in earlier,
            "after a fatal error": name in order and self.failed < math.inf,
            "not while draining": name in order and self.lifecycle.phase is not Phase.DRAINING,
            "on the wrong side of the shutdown event": name in order
            and self.lifecycle.interrupted.is_set() != (name == "cleanup"),
            "out of order": any(other in earlier for other in order[order.index(name) + 1 :])
            if name in order
            else False,
        }
        self.faults += [f"{name}: {fault}" for fault, found in wrong.items() if found]

    async def acknowledgement(self) -> None:
        assert self.scenario.acknowledged is not None
        await trio.sleep_until(max(self.scenario.acknowledged, trio.current_time()))

    async def visit(self, visit: Visit) -> None:
        await trio.sleep_until(visit.at)
        in_front = visit.front and self.scenario.timetable.http_drain is not None
        await self.guest(visit, in_front)

    async def guest(self, visit: Visit, in_front: bool) -> None:
        gate = self.lifecycle.http if in_front else self.lifecycle.work
        end = trio.current_time() + visit.seconds
        prospects = Prospects(visit.movable)
        if visit.estimated:
            prospects.estimate = lambda: end - trio.current_time()
        try:
            admitting = gate.admit(
                f"{gate.name} {len(self.guests)}",
                graceful=visit.graceful,
                prospects=prospects,
                peer=Peer() if in_front else self.peers[visit.peer],
            )
            with admitting as admission:
                assert self.may_enter(in_front), "admitted although it should not be"
                guest = Guest(visit, in_front, admission, trio.current_time())
                self.guests.append(guest)
                admission.on_cut.append(lambda: setattr(guest, "cut", trio.current_time()))
                if visit.spoken_for:
                    admission.on_abort.append(partial(self.speak, guest))
                await self.stay(guest)
        except Draining:
            assert not self.may_enter(in_front), "refused although it should not be"

    def speak(self, guest: Guest) -> None:
        assert not self.aborting, "its connection may be gone by now"
        assert not guest.told, "told twice"
        guest.told = guest.admission.settle(guest.admission.verdict())

    def may_enter(self, in_front: bool) -> bool:
        if min(self.escalated, self.failed) < math.inf:
            return False
        if in_front:
            return self.stop_began == math.inf
        return not self.lifecycle.interrupted.is_set()

    async def stay(self, guest: Guest) -> None:
        visit = guest.visit
        try:
            if visit.deaf:
                await trio.sleep(visit.seconds)
            else:
                with guest.admission.scope:
                    await self.work(guest)
            if guest.admission.reason is not None:
                await trio.sleep(visit.farewell)
            guest.said_farewell = True
        except trio.Cancelled:
            guest.aborted, guest.orphaned = self.aborting, not self.aborting
            raise
        finally:
            guest.left = trio.current_time()

    async def work(self, guest: Guest) -> None:
        visit = guest.visit
        if not guest.in_front or visit.calls_after is None:
            await trio.sleep(visit.seconds)
            return
        await trio.sleep(visit.calls_after)
        behind = attrs.evolve(visit, calls_after=None, graceful=True, farewell=0.0)
        await self.guest(behind, in_front=False)

    async def happen(self) -> None:
        for when, what in self.scenario.events:
            await trio.sleep_until(when)
            now = trio.current_time()
            self.stop_began = min(self.stop_began, now)
            if what == "stop":
                self.lifecycle.request_stop("SIGTERM")
            elif what == "escalate":
                self.escalated = min(self.escalated, now)
                self.lifecycle.escalate("SIGINT")
            else:
                self.failed = min(self.failed, now)
                self.lifecycle.fail(OSError("fatal"))

    async def watch(self, phase: Phase) -> None:
        await self.lifecycle.wait_phase(phase)
        self.entered[phase] = trio.current_time()

    async def watch_interrupt(self) -> None:
        await self.lifecycle.interrupted.wait()
        self.interrupted = trio.current_time()

    async def watch_end(self) -> None:
        await self.lifecycle.wait_stopped()
        self.check_stopped()

    async def close(self) -> None:
        if self.scenario.closes_at is not None:
            await trio.sleep_until(self.scenario.closes_at)
            with self.lifecycle.cleanup(30):
                await trio.sleep(3600)
            self.closed = trio.current_time()

    def abort(self, work: trio.Nursery) -> None:
        self.aborting = True
        work.cancel_scope.cancel("abort")

    async def run(self) -> None:
        with trio.fail_after(100_000):  # a deadlock shows as an hour that never ends
            async with trio.open_nursery() as services:
                for phase in Phase:
                    services.start_soon(self.watch, phase)
                services.start_soon(self.watch_interrupt)
                services.start_soon(self.watch_end)
                services.start_soon(self.lifecycle.run)
                services.start_soon(self.close)
                async with trio.open_nursery() as outer:
                    outer.start_soon(self.happen)
                    async with trio.open_nursery() as work:
                        self.lifecycle.on_abort(lambda: self.abort(work))
                        for visit in self.scenario.visits:
                            work.start_soon(self.visit, visit)
                        await self.lifecycle.wait_stopped()
                        work.cancel_scope.cancel("stopped")
                    outer.cancel_scope.cancel("stopped")
        self.check()

    # --- what must hold ----------------------------------------------------------------------

    @property
    def hard(self) -> float:
        """When the process must be gone, by the words of the rule."""
        timetable = self.scenario.timetable
        ends = [self.failed + timetable.fatal, self.escalated + timetable.stop + 5]
        ends.append(max(self.escalated, self.entered.get(Phase.STOPPED, math.inf)) + 5)
        if self.escalated == math.inf:
            ends.pop()
        if timetable.total is not None and self.first != "fail":
            ends.append(self.stop_began + timetable.total)
        return min(ends)

    @property
    def first(self) -> str:
        return self.scenario.events[0][1]

    def check_stopped(self) -> None:
        """Emptiness, at the instant in which the sequence ends."""
        now = trio.current_time()
        left = self.lifecycle.report().leftovers
        assert {step.removesuffix("_callback") for step in left} >= self.busy, "left in silence"
        if now >= self.hard:
            return  # nothing but the hard end excuses who is left
        assert self.lifecycle.in_flight() == ()
        # Of the time for farewells the front may use one half.
        time = min(2, self.hard - self.entered[Phase.STOPPING]) / 2
        for guest in self.guests:
            assert guest.left <= now, "left behind"
            assert guest.said_farewell or guest.aborted or guest.orphaned, (
                "gone without its farewell"
            )
            quick = guest.visit.farewell < time / 2 and not guest.visit.deaf
            assert not (quick and guest.aborted), "aborted in mid-farewell"
            assert not guest.aborted or guest.told == guest.visit.spoken_for, "not spoken for"

    def check(self) -> None:
        assert self.faults == []
        self.check_record()
        self.check_bounds()
        self.check_unregistering()
        self.check_shield()
        self.check_endings()
        self.check_front_limit()
        for phase in (Phase.GRACE, Phase.DRAINING, Phase.STOPPING):
            self.check_prompt(phase)
        self.check_counts()
        self.check_handover()

    def check_record(self) -> None:
        """Every phase is recorded once, in order, and ended in a way that the table knows."""
        record = self.lifecycle.report().phases
        assert [stage.name for stage in record] == ["grace", "draining", "stopping"]
        known = {move.source.label: move.when for move in MOVES}
        for stage in record:
            assert stage.ending in known[stage.name]
        assert [name for name, _, _ in self.calls].count("unregister") == 1
        assert self.lifecycle.interrupted.is_set()
        assert self.interrupted <= self.entered[Phase.STOPPING]
        times = [self.entered[phase] for phase in Phase]
        assert times == sorted(times)

    def check_bounds(self) -> None:
        timetable, start, stopped = (
            self.scenario.timetable,
            self.stop_began,
            self.entered[Phase.STOPPED],
        )
        grace, draining, stopping = (
            self.entered[phase] for phase in (Phase.GRACE, Phase.DRAINING, Phase.STOPPING)
        )
        front = timetable.http_drain
        jobs = (self.scenario.unregister, *self.scenario.hooks.values())
        moment = sum(job.deaf for job in jobs) * UNWIND
        assert grace == start
        assert draining - grace <= (0 if front is not None else timetable.grace + 2 + moment)
        before = 0 if front is None else front + timetable.farewell + 2
        hooks = len(self.scenario.hooks) * timetable.hook + moment
        assert stopping - draining <= before + hooks + timetable.drain
        assert stopped - stopping <= 2 + moment
        assert stopped <= max(self.hard, start) + moment
        if timetable.total is not None and self.first != "fail":
            reserve = min(5, timetable.total / 5)
            assert stopping <= start + timetable.total - reserve + moment
        reserve = min(5, timetable.fatal / 5)
        assert stopping <= max(self.failed + timetable.fatal - reserve, start) + moment
        assert stopping <= max(self.escalated, start) + moment
        if start <= self.failed < stopping:
            assert draining <= self.failed + moment, "grace after a fatal error"
        for name, _began, ended in self.calls:
            assert name == "unregister" or ended <= stopping, "it goes on though it was passed"

    def check_unregistering(self) -> None:
        """It takes its time, at most two seconds, whatever else is cut short; and at once."""
        [(_name, began, ended)] = [call for call in self.calls if call[0] == "unregister"]
        # What happens in the same instant may come before it, or after.
        spare = [self.spare(began, seen) for seen in ((), (began,))]
        limits = [min(self.scenario.unregister.seconds, 2, limit) for limit in spare]
        ends = [min(began + limit, max(began, self.hard)) for limit in limits]
        if self.scenario.unregister.deaf:
            whole = began + self.scenario.unregister.seconds
            ends = [min(end + UNWIND, whole) for end in ends]
        assert any(math.isclose(ended, end, abs_tol=1e-9) for end in ends)
        assert began <= max(self.stop_began, min(self.failed, self.escalated))

    def spare(self, at: float, seen: tuple[float, ...]) -> float:
        """How long the unregistering may take from then on, and leave the engine its reserve.

        ``seen``: events of these times have happened; all others only if they were before.
        """
        timetable = self.scenario.timetable
        hard, budget = [math.inf], [math.inf]
        if timetable.total is not None and self.first != "fail":
            hard.append(self.stop_began + timetable.total)
            budget.append(hard[-1] - min(5, timetable.total / 5))
        if self.failed < at or self.failed in seen:
            hard.append(self.failed + timetable.fatal)
            budget.append(hard[-1] - min(5, timetable.fatal / 5))
        escalated = self.escalated < at or self.escalated in seen
        if escalated:
            hard.append(self.escalated + timetable.stop + 5)
        if escalated or at >= min(budget):
            return max(0, min(hard) - at) / 2
        return min(budget) - at

    def check_shield(self) -> None:
        """A shield ends with its limit or at the hard end, also one that was there before."""
        if self.scenario.closes_at is not None:
            at = self.scenario.closes_at
            assert self.closed == min(at + 30, max(at, self.hard))

    def check_endings(self) -> None:
        """A phase that is said to be completed has done its work, and the others had to end."""
        timetable, record = self.scenario.timetable, self.lifecycle.report().phases
        grace, draining, stopping = record
        at = self.entered[Phase.DRAINING]
        if grace.ending is Ending.COMPLETED and timetable.grace:
            [unregister] = [call for call in self.calls if call[0] == "unregister"]
            assert self.inside(at, in_front=False) == []
            assert at >= unregister[2] + timetable.grace_floor
            assert at >= (self.scenario.acknowledged or 0)
            assert timetable.grace_mode is GraceMode.AUTO
        at = self.entered[Phase.STOPPING]
        if draining.ending is Ending.COMPLETED:
            assert not any(g.visit.graceful for g in self.inside(at, in_front=False))
        if draining.ending is Ending.TIMED_OUT and self.failed > at and timetable.total is None:
            last = max(ended for _name, _began, ended in self.calls if ended <= at)
            assert at == max(last, self.interrupted) + timetable.drain
        if draining.ending is Ending.CANCELLED:
            assert min(self.escalated, self.failed) <= at
        if stopping.ending is Ending.COMPLETED:
            assert self.inside(self.entered[Phase.STOPPED]) == []

    def inside(self, at: float, in_front: bool | None = None) -> list[Guest]:
        """Who was there before ``at`` and after it."""
        return [
            guest
            for guest in self.guests
            if guest.entered < at < guest.left and in_front in (None, guest.in_front)
        ]

    def check_front_limit(self) -> None:
        """Whoever is in front at the limit of the HTTP drain is cut in that instant."""
        if self.scenario.timetable.http_drain is None:
            return
        limit = self.stop_began + self.scenario.timetable.http_drain
        if limit < self.entered[Phase.STOPPING]:
            for guest in self.inside(limit, in_front=True):
                assert guest.cut is not None
                assert guest.cut <= limit

    def check_prompt(self, phase: Phase) -> None:
        """Each instant of a phase is spent on something."""
        began, ended = self.entered[phase], self.entered[Phase(phase + 1)]
        at = began
        reasons = self.reasons(phase)
        while at < ended:
            covering = [end for start, end in reasons if start <= at < end]
            assert covering, f"{phase.name} waits for nothing at {at}"
            at = max(covering)

    def reasons(self, phase: Phase) -> list[tuple[float, float]]:
        """The intervals in which the phase has something to wait for."""
        timetable = self.scenario.timetable
        reasons = [(began, ended) for _name, began, ended in self.calls]
        [unregister] = [call for call in self.calls if call[0] == "unregister"]
        if phase is Phase.GRACE:
            reasons.append((unregister[2], unregister[2] + timetable.grace_floor))
            if timetable.grace_mode is GraceMode.FIXED:
                reasons.append((unregister[2], unregister[2] + timetable.grace))
            if self.scenario.acknowledged is not None:
                reasons.append((0, self.scenario.acknowledged))
        for guest in self.guests:
            if phase is not Phase.DRAINING or guest.visit.graceful:
                reasons.append((guest.entered, guest.left))
            elif guest.cut is not None and guest.in_front:
                reasons.append((guest.cut, guest.left))  # bounded by the farewell
        return reasons

    def check_counts(self) -> None:
        """Everybody is counted once, as what became of them."""
        report, stopped = self.lifecycle.report(), self.entered[Phase.STOPPED]
        if report.leftovers or stopped >= self.hard:
            return
        during = [g for g in self.guests if g.left >= self.stop_began]
        total = sum(sum(counts.values()) for counts in report.gates.values())
        before = sum(g.left == self.stop_began for g in self.guests)
        assert len(during) - before <= total <= len(during)
        for guest in self.guests:
            outcome = guest.admission.outcome
            assert outcome is not None
            if guest.admission.reason is None and guest.said_farewell:
                assert outcome is Outcome.FINISHED
            assert not guest.told or outcome in (Outcome.CUT, Outcome.HANDED_OVER)
            if not guest.told and guest.aborted and guest.left >= self.entered[Phase.STOPPING]:
                assert outcome is Outcome.LOST
        assert self.lifecycle.exit_code() == (1 if self.failed < math.inf else 0)

    def check_handover(self) -> None:
        """Who is handed over, and when: by the words of the rule."""
        for number, places in enumerate(self.scenario.places):
            sent = [g for g in self.guests if g.visit.peer == number and not g.in_front]
            cut = [g for g in sent if g.admission.reason is not None]
            early = [g for g in cut if g.admission.reason is CutReason.HANDOVER]
            self.check_early(places, sent, early)
            self.check_moved(places, cut)

    def check_moved(self, places: int | None, cut: list[Guest]) -> None:
        """Whoever is told to end goes on elsewhere, if that is possible."""
        movable = [g for g in cut if g.visit.movable]
        assert not any(g.admission.moved for g in cut if g not in movable)
        confirmed = [g for g in movable if g.admission.confirmed]
        assert len(confirmed) == min(places or 0, len(movable))
        for guest in movable:
            assert guest.admission.moved == (places is None or guest.admission.confirmed)
        for guest in cut:
            if guest.said_farewell or guest.told:
                handed = guest.admission.outcome is Outcome.HANDED_OVER
                assert handed == guest.admission.moved

    def check_early(self, places: int | None, sent: list[Guest], early: list[Guest]) -> None:
        policy, at = self.scenario.timetable.drain_policy, self.interrupted
        here = [g for g in sent if g.entered < at < g.left and g.visit.movable]
        here = [g for g in here if g.cut is None or g.cut > at or g in early]
        times = sorted(g.cut for g in early if g.cut is not None)
        assert all(g.visit.movable for g in early)
        if policy is DrainPolicy.FINISH:
            assert early == []
        elif policy is DrainPolicy.MIGRATE:
            assert all(g.admission.moved for g in early), "nobody has a place for it"
            assert set(times) <= {at}
            if self.entered[Phase.STOPPING] > at:
                assert len(early) >= (len(here) if places is None else min(places, len(here)))
        elif early:
            left = self.drain_end(at) - at
            assert all(g.visit.estimated for g in early)
            assert all(g.entered + g.visit.seconds > at + left for g in early), "not hopeless"
            assert times[-1] <= at + left * SHARE, "too slow"
            assert not left or len(set(times)) == len(times), "two at once"
        if policy is DrainPolicy.AUTO:
            # Those for whom nothing waits end in the same instant, and go where there is a place.
            closed = [g for g in sent if g.admission.reason is CutReason.ENDPOINT_CLOSED]
            taken = sum(g.admission.confirmed for g in closed)
            self.check_all_hopeless((places or 0) - taken, here, early)

    def check_all_hopeless(self, places: int, here: list[Guest], early: list[Guest]) -> None:
        """As many as can be placed have gone, if there was the time for it."""
        at = self.interrupted
        left = self.drain_end(at) - at
        hopeless = [
            g for g in here if g.visit.estimated and g.entered + g.visit.seconds > at + left
        ]
        whole = at + left * SHARE < min(self.entered[Phase.STOPPING], self.escalated, self.failed)
        if whole and not any(g.orphaned or g.aborted for g in here):
            assert len(early) >= min(places, len(hopeless))

    def drain_end(self, at: float) -> float:
        """When the drain ends at the latest, as it looked at this time."""
        timetable = self.scenario.timetable
        ends = [at + timetable.drain]
        if timetable.total is not None and self.first != "fail":
            ends.append(self.stop_began + timetable.total - min(5, timetable.total / 5))
        if self.failed <= at:
            ends.append(self.failed + timetable.fatal - min(5, timetable.fatal / 5))
        return min(ends)


#: mutants.py wants to know whether a mistake is found, not its smallest example.
HUNTING = "MODEL_EXAMPLES" in os.environ
assert dynamo_trio.__file__.startswith(os.environ.get("MODEL_PACKAGE", "")), "the wrong package"

BUSY = tuple(Visit(at=0, front=front, seconds=100, farewell=0.375) for front in (False, True))
LONE = (Visit(at=0, front=False, seconds=100),)
#: More than one peer takes; and one that ends in time.
HOPELESS = (
    *(Visit(at=0, front=False, seconds=100 + n, farewell=0.375, peer=n % 2) for n in range(8)),
    Visit(at=0, front=False, seconds=4),
    Visit(at=0, front=False, seconds=60, movable=False),
    Visit(at=0, front=False, seconds=60, estimated=False),
)


@settings(
    max_examples=int(os.environ.get("MODEL_EXAMPLES", "400")),
    phases=[p for p in HypothesisPhase if p is not HypothesisPhase.shrink or not HUNTING],
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(scenarios)
@example(Scenario(Timetable()))
@example(Scenario(Timetable(drain=3), BUSY))
@example(Scenario(Timetable(http_drain=3, drain=3), BUSY))
@example(Scenario(Timetable(grace=0, drain=8), HOPELESS, places=(9, 2)))
@example(Scenario(Timetable(grace=0, drain=0.5), HOPELESS, places=(9, 9)))
@example(Scenario(Timetable(grace=0, drain=8), HOPELESS, places=(0, None)))
@example(Scenario(Timetable(grace=0, drain=8), LONE, places=(9, None)))
@example(
    Scenario(
        Timetable(grace=0, drain=8, drain_policy=DrainPolicy.MIGRATE), HOPELESS, places=(1, None)
    )
)
def test_every_stop_is_safe_empty_prompt_and_bounded(scenario: Scenario) -> None:
    logging.disable()  # a thousand stops have much to say
    try:
        trio.run(Run(scenario).run, clock=MockClock(autojump_threshold=0))
    finally:
        logging.disable(logging.NOTSET)
