"""The stop of a process, from the request to the last farewell.

Theory of operation
-------------------
:meth:`Lifecycle.run` is the whole sequence, and reads like the timetable. A phase is a
``with`` block whose deadline is its limit; its body is its work; to skip it is to cancel
its scope. All phases up to STOPPING sit in one outer scope, the *budget*, so that they
spend one time together; code behind that block runs whatever ended it::

    budget        ends at hard - reserve; an escalation cancels it
      GRACE         unregister, then serve on until no peer can route here any more
      DRAINING      callbacks, the shutdown event, then wait until nobody is inside
    STOPPING      cut who is left, softly; give them time for a farewell; then hard
    STOPPED

A process with an HTTP front has no grace period: DRAINING begins with the drain of the
front, to its end or its limit. Meanwhile the gate of the endpoints behind it stays open,
because requests that were admitted in front may still need them. Then the endpoints
follow, with nobody left to wait for as a rule.

To *tell* and to *wait* are different verbs. Whatever begins or hurries a stop
(:meth:`~Lifecycle.request_stop`, :meth:`~Lifecycle.escalate`, :meth:`~Lifecycle.fail`) is
synchronous: what must hold from that instant on (health, refusal, deadlines) holds when
it returns, before any other task runs.

The unregistering is a task of its own that does nothing else. So it happens exactly once,
whoever wants it first: the sequence, an escalation (in parallel with the farewells), a
fatal error, or the end of a ``run`` that was cancelled from outside.

Callbacks and unregistering are other people's code, which may fail to end when it must. The
sequence goes on without them then (:mod:`~dynamo_trio.lifecycle.beside`); only ``run`` waits
for them, and the watchdog's limit shrinks in STOPPED to what closing may take.

Nothing here closes engines, connections or services: they are closed by the nurseries
around :meth:`Lifecycle.run`, from the inside out.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.lifecycle.admission import Admission, CutReason, Gate
from dynamo_trio.lifecycle.deadlines import Deadlines
from dynamo_trio.lifecycle.farewells import Farewells, cut_all
from dynamo_trio.lifecycle.grace import Grace
from dynamo_trio.lifecycle.handover import HandOver
from dynamo_trio.lifecycle.hooks import Hook, Hooks
from dynamo_trio.lifecycle.phases import Phase
from dynamo_trio.lifecycle.record import Record, listed
from dynamo_trio.lifecycle.report import ShutdownReport, summary
from dynamo_trio.lifecycle.steps import Steps
from dynamo_trio.lifecycle.supervision import supervise
from dynamo_trio.lifecycle.timetable import (
    ESCALATED_ENGINE_CLOSE,
    SLACK,
    DrainPolicy,
    Timetable,
    reserve_of,
)
from dynamo_trio.lifecycle.withdrawal import Withdrawal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

logger = logging.getLogger("dynamo_trio.lifecycle")


@attrs.define(eq=False)
class Lifecycle:
    """One process's way from SERVING to STOPPED.

    ``run`` drives it and belongs in a task of its own, outside every nursery that a
    callback of :meth:`on_abort` cancels.
    """

    timetable: Timetable
    hooks: Hooks = attrs.field(default=Hooks(), kw_only=True)
    #: Returns as soon as no peer can route here any more, and at once while that holds.
    #: None: there are no peers.
    grace_over: Callable[[], Awaitable[object]] | None = attrs.field(default=None, kw_only=True)
    #: How many requests the peers have said they can place on other workers, for who watches.
    places: Callable[[], int] = attrs.field(default=lambda: 0, kw_only=True)
    #: ``DYN_TRIO_EXIT_CODE_ON_LOSS``: replaces 0 when admitted work was lost.
    exit_code_on_loss: int = attrs.field(default=0, kw_only=True)
    #: Who came in by the HTTP front; unused in a process without one.
    http: Gate = attrs.field(init=False, factory=lambda: Gate("http"))
    #: Who came in by an endpoint.
    work: Gate = attrs.field(init=False, factory=lambda: Gate("work"))
    #: Dynamo's ``shutdown_event``: from here on, unfinished requests end by the drain policy.
    interrupted: trio.Event = attrs.field(init=False, factory=trio.Event)
    #: The callbacks are over, or passed: nothing is left but to wait for requests, and to leave.
    endpoints_closed: trio.Event = attrs.field(init=False, factory=trio.Event)

    #: Since when others cannot find the process, by Trio's clock, because a drain that can be
    #: taken back has withdrawn it: a stop counts that time as grace. None: they can.
    withdrawn_at: float | None = attrs.field(init=False, default=None)

    _deadlines: Deadlines = attrs.field(init=False, factory=Deadlines)
    _record: Record = attrs.field(init=False)
    _steps: Steps = attrs.field(init=False)
    _hand_over: HandOver = attrs.field(init=False)
    _grace: Grace = attrs.field(init=False)
    _withdrawal: Withdrawal = attrs.field(init=False, factory=Withdrawal)
    _last_words: Farewells = attrs.field(init=False)
    _requested: trio.Event = attrs.field(init=False, factory=trio.Event)
    _escalated: bool = attrs.field(init=False, default=False)
    _fatal: bool = attrs.field(init=False, default=False)
    _leaves_fast: bool = attrs.field(init=False, default=False)
    # What a fatal error ends at once: waiting for peers, calls that may need the engine.
    _patience: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _grace_why: str = attrs.field(init=False, default="")  # what was said last of it
    # The limit of the front's drain, from the request to stop until that drain is over.
    _front_limit: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _front_told: bool = attrs.field(init=False, default=False)  # cut, its farewells over

    def __attrs_post_init__(self) -> None:
        gates = (self.http, self.work) if self._has_front else (self.work, self.http)
        policy, drain = self.timetable.drain_policy, self.timetable.drain
        self._hand_over = HandOver(policy, lambda: min(drain, self.remaining()))
        self._grace = Grace(self.timetable, lambda: self.grace_over, self.explain_grace)
        self._record = Record(gates, self._deadlines.budget, self.exit_code_on_loss)
        self._steps = Steps(self._record)
        self._last_words = Farewells(self.http, self.work)

    # --- telling it -----------------------------------------------------------------

    def request_stop(self, cause: str, *, age: float = 0.0) -> None:
        """Begin the graceful stop; only the first call has an effect.

        Args:
            cause: for the log and the report: the name of a signal, say.
            age: seconds since the signal, when it could not be handled at once. The stop
                counts from the signal, so they are already spent.
        """
        if self.stopping:
            logger.debug("%s: already stopping because of %s", cause, self.cause)
            return
        late = f", {age:.1f} s after the signal" if age >= 0.1 else ""
        how = "only unregistering, then leaving" if self._is_fast(cause) else "stopping gracefully"
        logger.info("%s: %s%s; %s", cause, how, late, self.describe_left())
        self._begin(cause, age)
        if self.timetable.total is not None:
            hard = self._record.began + self.timetable.total
            self._deadlines.shrink(hard, reserve=self.timetable.reserve)
        self._deadlines.overdue_at(self._record.began + self.timetable.watchdog_limit)

    def escalate(self, cause: str) -> None:
        """End the patience of a stop: straight to STOPPING. Begins the stop if none runs."""
        self.request_stop(cause)
        if self._escalated:
            return
        self._escalated = True
        logger.warning("%s: stopping now; %s", cause, self.describe_left())
        self._deadlines.budget.cancel(cause)
        before = self.timetable.stop if self.phase < Phase.STOPPED else 0.0
        self._hurry(before + ESCALATED_ENGINE_CLOSE, reserve=0.0)

    def fail(self, exc: BaseException) -> None:
        """Stop because of a fatal error: the same way without grace and callbacks, then exit 1.

        New requests are refused at once. Those in flight may still end within the limit.
        """
        self.errors.append(exc)
        logger.error("fatal: %s", summary(exc), exc_info=exc)
        if not self.stopping:
            self._begin(f"fatal: {summary(exc)}", age=0.0)
        if not self._fatal:
            self._fatal = True
            self._patience.cancel("fatal error")
            self._hurry(self.timetable.fatal, reserve=reserve_of(self.timetable.fatal))
        self._record.publish()

    def on_unregister(self, unregister: Callable[[], Awaitable[object]]) -> None:
        """Call this, once, to take the process out of discovery."""
        self._withdrawal.ways.append(unregister)

    def on_abort(self, abort: Callable[[], object]) -> Callable[[], None]:
        """Call this, once, if somebody is still there when the time for farewells is over.

        It is the hard way: cancel the nursery of the request tasks, abort connections.
        Returns a function that takes the callback back.
        """
        return self._last_words.on_abort(abort)

    def watch_probes(self, gate: Gate) -> None:
        """Name the gate among what is left while a probe, for which no phase waits, is there."""
        self._record.watch_probes(gate)

    def on_overdue(self, tell: Callable[[float], object]) -> None:
        """Tell this in how many seconds the stop is overdue: when it begins, when it shrinks."""
        self._deadlines.watch(tell)

    # --- asking it ------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._record.track.phase

    @property
    def cause(self) -> str | None:
        """Why the process stops; None while it does not."""
        return self._record.cause

    @property
    def stopping(self) -> bool:
        """Has a stop begun? A signal handler may ask, and so may another thread."""
        return self._record.cause is not None

    @property
    def is_calling(self) -> bool:
        """Is this one of the stop's callbacks, which the stop waits for, or a task of one?"""
        return self._steps.is_calling

    @property
    def leaves_fast(self) -> bool:
        """Is the stop one that only unregisters, so that the process leaves in STOPPED?"""
        return self._leaves_fast

    @property
    def errors(self) -> list[BaseException]:
        """The fatal errors, the first of which began or hurried the stop."""
        return self._record.errors

    async def wait_stop_requested(self) -> None:
        """Wait until a stop begins, whatever its cause."""
        await self._requested.wait()

    async def wait_phase(self, phase: Phase) -> None:
        """Wait until the phase is entered or passed."""
        await self._record.track.wait(phase)

    async def wait_stopped(self) -> None:
        """Wait until the sequence is over."""
        await self.wait_phase(Phase.STOPPED)

    def remaining(self) -> float:
        """Seconds left to the current phase, by its own limit or the shared budget; or inf.

        In STOPPED, to the steps of the cleanup that run (:meth:`cleanup`).
        """
        record = self._record
        limits = record.steps if self.phase is Phase.STOPPED else record.track.scope
        end = min(limits.deadline, self._deadlines.hard)
        if self.phase < Phase.STOPPING:
            end = min(end, self._front_limit.deadline, self._deadlines.budget.deadline)
        return max(0.0, end - trio.current_time())

    def until_cut(self) -> float:
        """Seconds until a request that runs now has to end; or inf.

        In the grace period none has to: the drain is still to come, and callbacks, whose time
        nobody knows.
        """
        left, limits = self.remaining(), self.timetable
        if self.phase is not Phase.GRACE or limits.drain_policy is DrainPolicy.MIGRATE:
            return left
        budget = self._deadlines.budget.deadline - trio.current_time()
        return max(0.0, min(left + limits.drain, budget))

    def remaining_in_all(self) -> float:
        """Seconds left to the whole stop; or inf."""
        return max(0.0, self._deadlines.hard - trio.current_time())

    @property
    def withdrawn(self) -> bool:
        """Has the stop taken the process out of discovery, well or badly?"""
        return self._withdrawal.is_over

    def in_flight(self) -> tuple[Admission, ...]:
        """Every request that is admitted, those in their farewell among them."""
        return self._record.in_flight()

    def describe_left(self) -> str:
        """Who is still here, in words."""
        return self._record.describe_left()

    def exit_code(self) -> int:
        """0; 1 after a fatal error; or ``exit_code_on_loss`` if admitted work was lost."""
        return self._record.exit_code()

    def report(self) -> ShutdownReport:
        """How the stop went, as far as it has gone."""
        return self._record.report()

    def snapshot(self) -> ShutdownReport:
        """The report as of the last change; another thread may read it without a lock."""
        return self._record.snapshot()

    # --- verbs for the tasks of the process -----------------------------------------

    def explain_grace(self, why: str) -> None:
        """Say what the grace period waits for, or why it need not: for the log and the report."""
        if self.phase is Phase.GRACE and why != self._grace_why:
            self._grace_why = why
            logger.info("%s", why)
            self._record.track.journal.explain(Phase.GRACE.label, why)

    def cleanup(
        self, limit: float, *, name: str | None = None
    ) -> AbstractContextManager[trio.CancelScope]:
        """Shield the block for at most ``limit`` seconds; the hard end of a stop comes first.

        The only kind of shield that shrinks when a stop's deadlines do.

        Args:
            limit: seconds.
            name: the step under which a stop's report shows the block.
        """
        shield = self._deadlines.shield(limit)
        return self._record.steps.stage(name, shield) if name and self.stopping else shield

    async def supervise(
        self,
        async_fn: Callable[..., Awaitable[object]],
        *args: object,
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run a service so that its failure stops the process gracefully (:meth:`fail`).

        For ``start_soon`` and ``start`` alike. A service that fails before it has called
        ``started()`` fails its starter instead.
        """
        await supervise(self.fail, async_fn, *args, task_status=task_status)

    # --- the sequence ---------------------------------------------------------------

    async def run(self) -> None:
        """Wait until a stop begins, then stop. Returns in STOPPED.

        Cancelled from outside, it still takes the process out of discovery. A callback that
        cannot be cancelled holds up nothing but its return.
        """
        async with trio.open_nursery() as self._steps.beside:
            await self._run()
            self._steps.beside.cancel_scope.cancel("the stop is over")

    async def _run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._withdrawal.run, self._unregister)
                await self._requested.wait()
                if self._is_fast(self.cause) and not self._fatal:
                    await self._only_unregister()
                else:
                    await self._stop()
        finally:
            self._refuse()
            self._interrupt()
            self.endpoints_closed.set()
            if self._escalated:  # what the farewells have not used is not the engine's
                self._hurry(ESCALATED_ENGINE_CLOSE, reserve=0.0)
            self._record.track.enter(Phase.STOPPED)
            self._record.name_probes()
            if self.stopping:  # whatever the phases have left of their time is not needed
                end = trio.current_time() + self.timetable.teardown_limit
                self._deadlines.overdue_at(end)

    async def _stop(self) -> None:
        with self._deadlines.budget:
            if not self._has_front and not self._fatal:
                with self._record.track.within(Phase.GRACE) as scope:
                    self._patience = scope
                    await self._withdrawal.wait()
                    if (left := self._grace.left(self.timetable.grace, self.withdrawn_at)) > 0:
                        scope.deadline = self._deadlines.capped(left)
                        await self._grace.wait_out(self.work, self.describe_left)
            with self._record.track.within(Phase.DRAINING) as scope:
                if self._has_front:
                    await self._drain_front()
                    await self._withdrawal.wait()
                async with trio.open_nursery() as beside:
                    await self._interrupt_work(beside)
                    scope.deadline = self._deadlines.capped(self.timetable.drain)
                    if self.work.count:  # an empty gate is drained, even in no time
                        await self.work.wait_idle()
                    beside.cancel_scope.cancel("drained")
        with self._record.track.within(Phase.STOPPING) as scope:
            await self._farewells(scope)

    def _is_fast(self, cause: str | None) -> bool:
        return self.timetable.fast_exit and cause == "SIGTERM"

    async def _only_unregister(self) -> None:
        """The fast exit of a failover group: its peers wait for this process to be gone."""
        self._leaves_fast = True
        self._deadlines.overdue_at(trio.current_time() + self.timetable.fast_unregister + SLACK)
        with self._record.track.within(self._first):
            await self._withdrawal.wait()

    async def _unregister(self, job: Hook) -> None:
        timetable = self.timetable
        limit = timetable.fast_unregister
        if not self._leaves_fast:
            limit = min(timetable.unregister, self._deadlines.spare(escalated=self._escalated))
        await self._steps.insist("unregister", self._deadlines.shield(limit), job)

    async def wait_unreachable(self) -> None:
        """Wait until no peer can send a request here any more, once they cannot find us.

        For ever where that cannot be known: the caller's limit is the grace period.
        """
        await self._grace.wait_unreachable()

    async def _drain_front(self) -> None:
        """The HTTP drain to its end, or to its limit: then everybody there says farewell."""
        self.http.close()
        await self._steps.attempt("http_drain", self._front_limit, self.http.wait_idle)
        self._front_limit = trio.CancelScope()
        if self.http.count:
            await cut_all(self.http, lambda: CutReason.DRAIN_LIMIT)
            limit = trio.move_on_after(self.timetable.farewell)
            await self._steps.attempt("http_farewells", limit, self.http.wait_empty)
            self._front_told = True

    async def _interrupt_work(self, beside: trio.Nursery) -> None:
        """The callbacks, and between them the moment from which on new work is refused."""
        await self._call("drain_callback", self.hooks.drain)
        await self._call("pre_shutdown_callback", self.hooks.pre_shutdown)
        self._interrupt()
        self.work.shut()
        self._hand_over.begin(self.work.admissions(), beside)
        await self._call("cleanup_callback", self.hooks.cleanup)
        self._close_endpoints()

    async def _farewells(self, scope: trio.CancelScope) -> None:
        """Cut softly and leave time for a last word; abort who is still there after it."""
        told = self._front_told and not self.work.count  # nobody has the time of a farewell twice
        stop = max(0.0, self.timetable.stop - told * self.timetable.farewell)
        now, end = trio.current_time(), self._deadlines.capped(stop)
        if self.in_flight():
            logger.warning("cut (%s): %s", self._cut_reason, self.describe_left())
        self._withdrawal.begin()
        self._interrupt()
        self.http.close()
        self._close_endpoints()
        farewell = 0.0 if told else min(self.timetable.farewell, (end - now) / 2)
        await self._last_words.say(lambda: self._cut_reason, farewell)
        if self.in_flight():
            logger.error("the time for farewells is over; %s", self.describe_left())
            self._last_words.abort()
        scope.deadline = end
        await self._last_words.over()

    # --- its parts --------------------------------------------------------------------

    @property
    def _has_front(self) -> bool:
        return self.timetable.http_drain is not None

    @property
    def _first(self) -> Phase:
        """The phase that a stop begins with."""
        return Phase.DRAINING if self._has_front else Phase.GRACE

    @property
    def _cut_reason(self) -> CutReason:
        if self._escalated:
            return CutReason.ESCALATED
        return CutReason.FATAL if self._fatal else CutReason.DRAIN_LIMIT

    def _begin(self, cause: str, age: float) -> None:
        self._record.begin(cause, trio.current_time() - age)
        if self.timetable.http_drain is not None:
            self.http.shut()
            end = trio.current_time() + self.timetable.http_drain
            self._front_limit = trio.CancelScope(deadline=end)
        self._record.track.enter(self._first)
        self._requested.set()

    def _hurry(self, limit: float, *, reserve: float) -> None:
        self._refuse()
        self._withdrawal.begin()
        hard = trio.current_time() + limit
        self._deadlines.shrink(hard, reserve=reserve)
        self._deadlines.overdue_at(hard + SLACK)

    def _interrupt(self) -> None:
        self.interrupted.set()
        self.hooks.tell()

    def _close_endpoints(self) -> None:
        if cut := self.work.close():  # nothing waits for them, but nobody is cut in silence
            logger.warning("cut (%s): %s", CutReason.ENDPOINT_CLOSED, listed(cut))
        self.endpoints_closed.set()

    def _refuse(self) -> None:
        self.http.shut()
        self.work.shut()

    async def _call(self, name: str, hook: Hook | None) -> None:
        if hook is not None:
            self._patience = trio.CancelScope(relative_deadline=self.timetable.hook)
            await self._steps.call(name, self._patience, hook, lambda: self._fatal)
