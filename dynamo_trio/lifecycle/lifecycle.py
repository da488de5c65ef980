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

Nothing here closes engines, connections or services: they are closed by the nurseries
around :meth:`Lifecycle.run`, from the inside out.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.lifecycle import handover
from dynamo_trio.lifecycle.admission import Admission, CutReason, Gate
from dynamo_trio.lifecycle.deadlines import Deadlines
from dynamo_trio.lifecycle.hooks import Hook, Hooks
from dynamo_trio.lifecycle.phases import Phase
from dynamo_trio.lifecycle.record import Record
from dynamo_trio.lifecycle.report import ShutdownReport, summary
from dynamo_trio.lifecycle.supervision import supervise
from dynamo_trio.lifecycle.timetable import (
    ESCALATED_ENGINE_CLOSE,
    SLACK,
    GraceMode,
    Timetable,
    reserve_of,
)
from dynamo_trio.lifecycle.withdrawal import Withdrawal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from contextlib import AbstractContextManager

logger = logging.getLogger("dynamo_trio.lifecycle")


def _count(things: Collection[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


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
    #: How many requests the peers have said they can place on other workers.
    places: Callable[[], int] = attrs.field(default=lambda: 0, kw_only=True)
    #: ``DYN_TRIO_EXIT_CODE_ON_LOSS``: replaces 0 when admitted work was lost.
    exit_code_on_loss: int = attrs.field(default=0, kw_only=True)
    #: Who came in by the HTTP front; unused in a process without one.
    http: Gate = attrs.field(init=False, factory=lambda: Gate("http"))
    #: Who came in by an endpoint.
    work: Gate = attrs.field(init=False, factory=lambda: Gate("work"))
    #: Dynamo's ``shutdown_event``: from here on, unfinished requests end by the drain policy.
    interrupted: trio.Event = attrs.field(init=False, factory=trio.Event)

    _deadlines: Deadlines = attrs.field(init=False, factory=Deadlines)
    _record: Record = attrs.field(init=False)
    _withdrawal: Withdrawal = attrs.field(init=False, factory=Withdrawal)
    _abort: list[Callable[[], object]] = attrs.field(init=False, factory=list)
    _requested: trio.Event = attrs.field(init=False, factory=trio.Event)
    _escalated: bool = attrs.field(init=False, default=False)
    _fatal: bool = attrs.field(init=False, default=False)
    # What a fatal error ends at once: waiting for peers, calls that may need the engine.
    _patience: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    # The limit of the front's drain, from the request to stop until that drain is over.
    _front_limit: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)

    def __attrs_post_init__(self) -> None:
        gates = (self.http, self.work) if self._has_front else (self.work, self.http)
        self._record = Record(gates, self._deadlines.budget, self.exit_code_on_loss)

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
        logger.info("%s: stopping gracefully%s; %s", cause, late, self.describe_left())
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
        self._hurry(self.timetable.stop + ESCALATED_ENGINE_CLOSE, reserve=0.0)

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
        self._abort.append(abort)
        return partial(self._abort.remove, abort)

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
        """Seconds left to the current phase, by its own limit or the shared budget; or inf."""
        end = min(self._record.track.scope.deadline, self._deadlines.hard)
        if self.phase < Phase.STOPPING:
            end = min(end, self._front_limit.deadline, self._deadlines.budget.deadline)
        return max(0.0, end - trio.current_time())

    def in_flight(self) -> tuple[Admission, ...]:
        """Every request that is admitted, those in their farewell among them."""
        return self._record.in_flight()

    def describe_left(self) -> str:
        """Who is still here, in words."""
        # A request of the front has another one at an endpoint behind it: it is told of once.
        inside = self.http.admissions() or self.work.admissions()
        labels = [admission.label for admission in inside]
        if not labels:
            return "nothing is in flight"
        endpoints = {label.rpartition(" ")[0] for label in labels}
        shown = ", ".join(labels[:5]) + (", ..." if len(labels) > 5 else "")
        return f"{_count(labels, 'request')} of {_count(endpoints, 'endpoint')} in flight: {shown}"

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

        Cancelled from outside, it still takes the process out of discovery.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._withdrawal.run, self._unregister)
                await self._requested.wait()
                if self.timetable.fast_exit and not self._fatal:
                    await self._only_unregister()
                else:
                    await self._stop()
        finally:
            self._refuse()
            self.interrupted.set()
            self._record.track.enter(Phase.STOPPED)

    async def _stop(self) -> None:
        with self._deadlines.budget:
            if not self._has_front and not self._fatal:
                with self._record.track.within(Phase.GRACE) as scope:
                    self._patience = scope
                    await self._withdrawal.wait()
                    if self.timetable.grace > 0:
                        scope.deadline = self._deadlines.capped(self.timetable.grace)
                        await self._wait_out_grace()
            with self._record.track.within(Phase.DRAINING) as scope:
                if self._has_front:
                    await self._drain_front()
                    await self._withdrawal.wait()
                await self._interrupt_work()
                scope.deadline = self._deadlines.capped(self.timetable.drain)
                if self.work.count:  # an empty gate is drained, even in no time
                    await self.work.wait_idle()
        with self._record.track.within(Phase.STOPPING) as scope:
            await self._farewells(scope)

    async def _only_unregister(self) -> None:
        """The fast exit of a failover group: its peers wait for this process to be gone."""
        with self._record.track.within(self._first):
            await self._withdrawal.wait()

    async def _unregister(self, job: Hook) -> None:
        await self._attempt("unregister", self._deadlines.shield(self.timetable.unregister), job)

    async def _wait_out_grace(self) -> None:
        """Until nobody can send a request here any more, and nobody is here."""
        if self.timetable.grace_mode is GraceMode.FIXED:
            await trio.sleep_forever()
        await trio.sleep(self.timetable.grace_floor)
        await self._wait_for_peers()
        while self.work.count:
            await self.work.wait_empty()
            await self._wait_for_peers()  # one may have appeared meanwhile

    async def _wait_for_peers(self) -> None:
        if self.grace_over is None:
            return
        try:
            await self.grace_over()
        except* Exception as group:
            logger.error("cannot ask the peers; the grace period is kept in full", exc_info=group)
            await trio.sleep_forever()

    async def _drain_front(self) -> None:
        """The HTTP drain to its end, or to its limit: then everybody there says farewell."""
        self.http.close()
        assert self.timetable.http_drain is not None
        self._front_limit = trio.move_on_after(self.timetable.http_drain)
        await self._attempt("http_drain", self._front_limit, self.http.wait_idle)
        self._front_limit = trio.CancelScope()
        if self.http.count:
            self.http.cut_all(CutReason.DRAIN_LIMIT)
            limit = trio.move_on_after(self.timetable.farewell)
            await self._attempt("http_farewells", limit, self.http.wait_empty)

    async def _interrupt_work(self) -> None:
        """The callbacks, and between them the moment from which on new work is refused."""
        await self._call("drain_callback", self.hooks.drain)
        await self._call("pre_shutdown_callback", self.hooks.pre_shutdown)
        self.interrupted.set()
        self.work.shut()
        self._hand_over()
        await self._call("cleanup_callback", self.hooks.cleanup)
        self.work.close()

    def _hand_over(self) -> None:
        left = min(self.timetable.drain, self.remaining())
        inside = self.work.admissions()
        candidates = [handover.Candidate(one.estimate(), one.movable) for one in inside]
        policy = self.timetable.drain_policy
        for index in handover.choose(candidates, policy, left=left, places=self.places()):
            inside[index].cut(CutReason.HANDOVER)

    async def _farewells(self, scope: trio.CancelScope) -> None:
        """Cut softly and leave time for a last word; abort who is still there after it."""
        now, end = trio.current_time(), self._deadlines.capped(self.timetable.stop)
        if self.in_flight():
            logger.warning("cut (%s): %s", self._cut_reason, self.describe_left())
        self._withdrawal.begin()
        self.interrupted.set()
        self.http.close()
        self.work.close()
        # The front first: it ends its own work, and what its client hears is the farewell of
        # the front, not the error of an endpoint that was cut in the same instant.
        farewell = min(self.timetable.farewell, (end - now) / 2)
        self.http.cut_all(self._cut_reason)
        with trio.CancelScope(deadline=now + farewell / 2):
            await self.http.wait_empty()
        self.work.cut_all(self._cut_reason)
        with trio.CancelScope(deadline=now + farewell):
            await self._wait_empty()
        if self.in_flight():
            self._abort_rest()
        scope.deadline = end
        await self._wait_empty()

    def _abort_rest(self) -> None:
        logger.error("the time for farewells is over; %s", self.describe_left())
        for abort in self._abort:
            abort()

    async def _wait_empty(self) -> None:
        await self.http.wait_empty()
        await self.work.wait_empty()

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

    def _refuse(self) -> None:
        self.http.shut()
        self.work.shut()

    async def _attempt(
        self, name: str, block: AbstractContextManager[trio.CancelScope], job: Hook
    ) -> None:
        """One step that must not hold up or break a stop: its failure is logged and passed.

        The ``except`` stands outside the limit: cleanup that raises while the limit cancels
        it comes as a group of both, of which the limit has taken its part by then.
        """
        began = trio.current_time()
        try:
            with self._record.steps.stage(name, block) as scope:
                await job()
            if scope.cancelled_caught:
                self._log_cut(name, scope.deadline, began)
        except* Exception as group:
            logger.error("%s failed; the stop goes on", name, exc_info=group)

    def _log_cut(self, name: str, deadline: float, began: float) -> None:
        why = "a fatal error"
        if trio.current_time() >= deadline:
            why = f"its limit of {round(deadline - began, 2):g} s"
        inside = self.http.admissions() or self.work.admissions()
        logger.warning("%s was ended by %s; %s left", name, why, _count(inside, "request"))

    async def _call(self, name: str, hook: Hook | None) -> None:
        if hook is None:
            return
        if self._fatal:
            self._record.steps.skip(name)
            return
        self._patience = trio.CancelScope(relative_deadline=self.timetable.hook)
        await self._attempt(name, self._patience, hook)
