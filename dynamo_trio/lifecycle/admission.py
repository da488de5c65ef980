"""Admitted requests: counted from the first byte of work to the last of the farewell.

Theory of operation
-------------------
A :class:`Gate` lets requests in and knows who is inside. An :class:`Admission` is one
of them, and there are two different ways to end it:

* *soft*: :meth:`Admission.cut` cancels ``admission.scope``, which its owner has entered
  around its waits and nothing else. The owner wakes, leaves the scope, and can still
  say why it ends::

      with gate.admit("POST /v1/completions 7f3a") as admission:
          with admission.scope:
              ...  # wait for tokens, send them
          if admission.reason is not None:
              ...  # the farewell: not inside the scope, so it can still be sent

* *hard*: the nursery around the owner is cancelled. Only shielded code still runs, and
  what was not said stays unsaid. Never use the second to obtain the first.

The admission encloses the farewell: the gate's count falls after it, so a gate that is
empty has nobody left who still wants to say something.
"""

from __future__ import annotations

import enum
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import Draining

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class CutReason(enum.StrEnum):
    """Why a request is ended from outside."""

    CLIENT_LEFT = "client_left"  #: nobody reads any more: no farewell
    DRAIN_LIMIT = "drain_limit"
    HANDOVER = "handover"
    ESCALATED = "escalated"
    FATAL = "fatal"
    ENDPOINT_CLOSED = "endpoint_closed"  #: graceful_shutdown=False: nothing waits for it


class Outcome(enum.StrEnum):
    """What became of a request."""

    FINISHED = "finished"
    HANDED_OVER = "handed_over"
    CUT = "cut"  #: ended early, and told so
    CANCELLED = "cancelled"  #: its client left
    FAILED = "failed"  #: its handler raised
    LOST = "lost"  #: ended without a word


#: What a request that nobody settled counts as, by the reason for which it was cut.
_UNSETTLED = {
    None: Outcome.FINISHED,
    CutReason.CLIENT_LEFT: Outcome.CANCELLED,
    CutReason.HANDOVER: Outcome.HANDED_OVER,
}


@attrs.define(eq=False)
class Admission:
    """One admitted request. Made by :meth:`Gate.admit`."""

    #: The endpoint or route, a space, and the request's id.
    label: str
    admitted_at: float
    #: Does a drain wait for it (``graceful_shutdown=True``)?
    graceful: bool = True
    #: Can the request be continued elsewhere?
    movable: bool = True
    #: Seconds that it still needs at most; None: nobody knows.
    estimate: Callable[[], float | None] = lambda: None
    #: The soft scope, to be entered once, around waits only.
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    #: Called synchronously by the first cut, to wake an owner who waits under a shield.
    on_cut: list[Callable[[], object]] = attrs.field(factory=list)
    # Invariant: both are written at most once; the first writer wins.
    _reason: CutReason | None = None
    _outcome: Outcome | None = None
    #: A hand-over that no peer has acknowledged; it may have been a loss.
    confirmed: bool = True

    @property
    def reason(self) -> CutReason | None:
        """Why the request was cut; None while it was not."""
        return self._reason

    @property
    def outcome(self) -> Outcome | None:
        """What became of it; None while it runs."""
        return self._outcome

    def cut(self, reason: CutReason) -> bool:
        """End the request softly. False: it was cut before, or its outcome is settled."""
        if self._reason is not None or self._outcome is not None:
            return False
        self._reason = reason
        self.scope.cancel(reason.value)
        for wake in self.on_cut:
            wake()
        return True

    def settle(self, outcome: Outcome, *, confirmed: bool = True) -> bool:
        """Say what became of the request. False: that is already settled."""
        if self._outcome is not None:
            return False
        self._outcome, self.confirmed = outcome, confirmed
        return True

    def settle_by(self, exc: BaseException | None) -> None:
        """Settle what the owner left open, by the exception (or none) that ended its block."""
        if exc is None or self._reason is CutReason.CLIENT_LEFT:
            self.settle(_UNSETTLED.get(self._reason, Outcome.CUT), confirmed=False)
        else:
            self.settle(Outcome.FAILED if isinstance(exc, Exception) else Outcome.LOST)


class GateStage(enum.StrEnum):
    """What a gate still does."""

    OPEN = "open"
    SHUT = "shut"  #: refuses; who is inside runs on
    CLOSED = "closed"  #: and who need not be waited for is cut


@attrs.define(eq=False)
class Gate:
    """Lets requests in, counts them, and tells when nobody is left."""

    name: str
    #: Called after each change of who is inside.
    changed: Callable[[], object] | None = None
    #: How many requests of each outcome have left.
    tally: Counter[Outcome] = attrs.field(factory=Counter)
    #: How many hand-overs no peer has acknowledged.
    unconfirmed: int = 0
    #: Invariant: OPEN -> SHUT -> CLOSED, never back.
    _stage: GateStage = GateStage.OPEN
    #: Invariant: an admission is in here from before its first work until after its farewell.
    _inside: dict[Admission, None] = attrs.field(factory=dict)
    #: Invariant: the number of those inside that a drain waits for.
    _awaited: int = 0
    # Not an Event: one that is replaced at each admission strands who waits on the old one.
    _leavers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def stage(self) -> GateStage:
        return self._stage

    @property
    def is_open(self) -> bool:
        """Are new requests admitted?"""
        return self._stage is GateStage.OPEN

    @property
    def count(self) -> int:
        """How many are inside, those in their farewell among them."""
        return len(self._inside)

    @property
    def awaited(self) -> int:
        """How many of them a drain waits for."""
        return self._awaited

    def admissions(self) -> tuple[Admission, ...]:
        """Who is inside, the oldest first."""
        return tuple(self._inside)

    @contextmanager
    def admit(
        self,
        label: str,
        *,
        graceful: bool = True,
        movable: bool = True,
        estimate: Callable[[], float | None] = lambda: None,
    ) -> Iterator[Admission]:
        """Count one request while the block runs, its farewell included.

        Args:
            label: names the request in logs and in the shutdown report: the endpoint or
                route, a space, and the request's id.
            graceful: a drain waits for it.
            movable: it could be continued by another worker.
            estimate: seconds that it still needs at most, or None.

        Raises:
            Draining: the gate is shut.
        """
        if not self.is_open:
            raise Draining("the process is stopping and takes no new requests")
        admission = Admission(label, trio.current_time(), graceful, movable, estimate)
        self._enter(admission)
        try:
            yield admission
        except BaseException as exc:
            admission.settle_by(exc)
            raise
        else:
            admission.settle_by(None)
        finally:
            self._leave(admission)

    def shut(self) -> None:
        """Refuse new requests from now on. Those inside run on."""
        if self.is_open:
            self._stage = GateStage.SHUT

    def close(self) -> None:
        """Shut, and cut those for whom nothing waits (``graceful_shutdown=False``)."""
        self._stage = GateStage.CLOSED
        for admission in self.admissions():
            if not admission.graceful:
                admission.cut(CutReason.ENDPOINT_CLOSED)

    def cut_all(self, reason: CutReason) -> int:
        """Cut everybody inside softly; returns how many had not been cut before."""
        return sum(admission.cut(reason) for admission in self.admissions())

    async def wait_idle(self) -> None:
        """Wait until nobody is inside for whom a drain waits. Final only once the gate is shut."""
        while self._awaited:
            await self._leavers.park()
        await trio.lowlevel.checkpoint()

    async def wait_empty(self) -> None:
        """Wait until nobody is inside at all."""
        while self._inside:
            await self._leavers.park()
        await trio.lowlevel.checkpoint()

    def _enter(self, admission: Admission) -> None:
        self._inside[admission] = None
        self._awaited += admission.graceful
        self._note()

    def _leave(self, admission: Admission) -> None:
        del self._inside[admission]
        self._awaited -= admission.graceful
        assert admission.outcome is not None
        self.tally[admission.outcome] += 1
        self.unconfirmed += not admission.confirmed and admission.outcome is Outcome.HANDED_OVER
        self._note()
        if not self._awaited:
            self._leavers.unpark_all()

    def _note(self) -> None:
        if self.changed is not None:
            self.changed()
