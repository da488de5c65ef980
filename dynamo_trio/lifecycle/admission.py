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
from collections import Counter, OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import Draining
from dynamo_trio.lifecycle.prospects import Peer, Prospects

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType


class CutReason(enum.StrEnum):
    """Why a request is ended from outside."""

    CLIENT_LEFT = "client_left"  #: nobody reads any more: no farewell
    DRAIN_LIMIT = "drain_limit"
    DEADLINE = "deadline"  #: its caller stops waiting then
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


#: Whoever sent such a request has no use for its end.
_NOBODY_WAITS = (CutReason.CLIENT_LEFT, CutReason.DEADLINE)


@attrs.define(eq=False)
class Admission:
    """One admitted request. Made by :meth:`Gate.admit`."""

    #: The endpoint or route, a space, and the request's id.
    label: str
    admitted_at: float
    #: Does a drain wait for it (``graceful_shutdown=True``)?
    graceful: bool = True
    #: How it may go on.
    prospects: Prospects = attrs.field(factory=Prospects)
    #: Who may continue it elsewhere.
    peer: Peer = attrs.field(factory=Peer)
    #: The soft scope, to be entered once, around waits only.
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    #: Called synchronously by the first cut, to wake an owner who waits under a shield.
    on_cut: list[Callable[[], object]] = attrs.field(factory=list)
    #: Called synchronously when its owner, after a cut, has not left in time for its farewell:
    #: say it in the owner's place, and settle.
    on_abort: list[Callable[[], object]] = attrs.field(factory=list)
    # Invariant: both are written at most once; the first writer wins.
    _reason: CutReason | None = None
    _outcome: Outcome | None = None
    #: It ends here so that another worker continues it. Invariant: decided before it is settled.
    moved: bool = False
    #: The peer had said that it can place it. Otherwise a hand-over may have been a loss.
    confirmed: bool = False
    #: Its last word was said in its owner's place, and it was counted then.
    aborted: bool = False

    @property
    def reason(self) -> CutReason | None:
        """Why the request was cut; None while it was not."""
        if self._reason is None and self.scope.cancelled_caught:
            return CutReason.DEADLINE
        return self._reason

    @property
    def outcome(self) -> Outcome | None:
        """What became of it; None while it runs."""
        return self._outcome

    def cut(self, reason: CutReason) -> bool:
        """End the request softly. False: it was cut before, or its outcome is settled."""
        if self.reason is not None or self._outcome is not None:
            return False
        self._reason = reason
        if reason not in _NOBODY_WAITS:
            self.move()
        self.scope.cancel(reason.value)
        for wake in self.on_cut:
            wake()
        return True

    def end_at(self, deadline: float) -> None:
        """Cut the request at this time, on Trio's clock, if it still runs."""
        self.prospects.deadline = deadline
        if deadline != self.scope.deadline:  # Trio takes a while to move one
            self.scope.deadline = deadline

    def abort(self) -> bool:
        """Its owner has not left in time: let others say its last word. False: nobody can.

        It stays inside until its owner leaves.
        """
        if self._outcome is None:
            for speak in self.on_abort:
                speak()
            self.aborted = self._outcome is not None
            return self.aborted
        return False

    def move(self) -> bool:
        """It must end now: can another worker go on? A place at its peer is used up for that.

        Whoever can say how much it takes must have said that it takes the request; whoever
        cannot is trusted to go on.
        """
        if self.prospects.movable and not self.moved:
            self.confirmed = self.peer.take()
            self.moved = self.confirmed or self.peer.places is None
        return self.moved

    def settle(self, outcome: Outcome) -> bool:
        """Say what became of the request. False: that is already settled."""
        if self._outcome is not None:
            return False
        self._outcome = outcome
        return True

    def verdict(self) -> Outcome:
        """What becomes of it if it ends now, and nothing goes wrong."""
        if self.reason is None:
            return Outcome.FINISHED
        if self.reason in _NOBODY_WAITS:
            return Outcome.CANCELLED
        return Outcome.HANDED_OVER if self.moved else Outcome.CUT

    def settle_by(self, exc: BaseException | None) -> None:
        """Settle what the owner left open, by the exception (or none) that ended its block."""
        if exc is None or self._reason is CutReason.CLIENT_LEFT:
            self.settle(self.verdict())
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
    #: Refuses for now, whatever the stage: a drain that can be taken back.
    _paused: bool = False
    #: Invariant: an admission is in here from before its first work until after its farewell.
    # Ordered: the oldest of a dict is found by passing all that have left.
    _inside: OrderedDict[Admission, None] = attrs.field(factory=OrderedDict)
    #: Invariant: the number of those inside that a drain waits for.
    _awaited: int = 0
    #: Invariant: the number of those inside whose end was told, and counted, in their place.
    _aborted: int = 0
    # Not an Event: one that is replaced at each admission strands who waits on the old one.
    _leavers: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def stage(self) -> GateStage:
        return self._stage

    @property
    def is_open(self) -> bool:
        """Are new requests admitted?"""
        return self._stage is GateStage.OPEN and not self._paused

    @property
    def count(self) -> int:
        """How many are inside, those in their farewell among them."""
        return len(self._inside)

    @property
    def awaited(self) -> int:
        """How many of them a drain waits for."""
        return self._awaited

    @property
    def untold(self) -> int:
        """How many are inside of whom nobody has said yet how they end."""
        return len(self._inside) - self._aborted

    def admissions(self, most: int | None = None) -> tuple[Admission, ...]:
        """Who is inside, the oldest first; only so many of them."""
        return tuple(islice(self._inside, most))

    def admit(
        self,
        label: str,
        *,
        graceful: bool = True,
        prospects: Prospects | None = None,
        peer: Peer | None = None,
    ) -> AbstractContextManager[Admission, None]:
        """Count one request while the block runs, its farewell included.

        Args:
            label: names the request in logs and in the shutdown report: the endpoint or
                route, a space, and the request's id.
            graceful: a drain waits for it.
            prospects: how it may go on. By default nobody knows when it ends.
            peer: who may continue it elsewhere. By default nobody.

        Raises:
            Draining: on entering: the gate is shut.
        """
        return Admitting(self, label, graceful, prospects, peer)

    def shut(self) -> None:
        """Refuse new requests from now on. Those inside run on."""
        if self._stage is GateStage.OPEN:
            self._stage = GateStage.SHUT

    def pause(self) -> None:
        """Refuse new requests until :meth:`resume`. Those inside run on."""
        self._paused = True

    def resume(self) -> None:
        """Admit again, unless the gate was shut meanwhile."""
        self._paused = False

    def close(self) -> tuple[Admission, ...]:
        """Shut, and cut those for whom nothing waits (``graceful_shutdown=False``): these."""
        self._stage = GateStage.CLOSED
        unawaited = (one for one in self.admissions() if not one.graceful)
        return tuple(one for one in unawaited if one.cut(CutReason.ENDPOINT_CLOSED))

    def cut_all(self, reason: CutReason) -> int:
        """Cut everybody inside softly; returns how many had not been cut before."""
        return sum(admission.cut(reason) for admission in self.admissions())

    def abort_all(self) -> None:
        """Let everybody who is still inside be told its end, as far as others can tell it."""
        for admission in self.admissions():
            if admission.abort():
                self._aborted += 1
                self._count(admission)
        self._note()

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
        """Let it in, for :class:`Admitting`.

        Raises:
            Draining: the gate is shut.
        """
        if not self.is_open:
            why = "drained" if self._stage is GateStage.OPEN else "stopping"
            raise Draining(f"the process is {why} and takes no new requests")
        self._inside[admission] = None
        self._awaited += admission.graceful
        self._note()

    def _leave(self, admission: Admission) -> None:
        """It has ended, and is settled: for :class:`Admitting`."""
        del self._inside[admission]
        self._awaited -= admission.graceful
        if admission.aborted:
            self._aborted -= 1
        else:
            self._count(admission)
        self._note()
        if not self._awaited:
            self._leavers.unpark_all()

    def _count(self, admission: Admission) -> None:
        outcome = admission.outcome
        assert outcome is not None
        self.tally[outcome] += 1
        self.unconfirmed += not admission.confirmed and outcome is Outcome.HANDED_OVER

    def _note(self) -> None:
        if self.changed is not None:
            self.changed()


#: A peer that can place nothing. One for all: nobody speaks for it, so it stays so.
_NOBODY = Peer()


@attrs.define(eq=False)
class Admitting:
    """One request's way in, and out. Made by :meth:`Gate.admit`, for a ``with`` block.

    A class, and no generator, since it is for every request.
    """

    _gate: Gate
    _label: str
    _graceful: bool
    _prospects: Prospects | None
    _peer: Peer | None
    _admission: Admission = attrs.field(init=False)

    def __enter__(self) -> Admission:
        prospects, peer = self._prospects or Prospects(), self._peer or _NOBODY
        now = trio.current_time()
        admission = Admission(self._label, now, self._graceful, prospects, peer)
        self._gate._enter(admission)
        self._admission = admission
        return admission

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._admission.settle_by(value)
        self._gate._leave(self._admission)
