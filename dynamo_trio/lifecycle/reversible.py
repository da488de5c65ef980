"""A drain that can be taken back: out of routing, then empty, and back, while the process lives.

Theory of operation
-------------------
One task (:meth:`ReversibleDrain.run`) does what was asked for last; the verbs only say what is
wanted, and cancel what it does now. So a withdrawal and a registration never run side by side::

    SERVING    begin()   DRAINING   withdrawn, but served until nobody can route here any more,
                                    or the grace period is over; then the gates refuse
                         DRAINED    nobody is left
               resume()  RESUMING   the gates admit; others are finding the process again
                         SERVING

What must hold from a verb on holds when it returns: after ``begin`` the process is not ready,
after ``resume`` it is not safe to delete, and requests are admitted.

A stop that begins takes over wherever the drain stands, and this task ends. What the drain has
waited out of the grace period is not waited for again (:attr:`Lifecycle.withdrawn_at`), and the
gates that it has closed stay closed.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import Draining

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.lifecycle.admission import Gate
    from dynamo_trio.lifecycle.lifecycle import Lifecycle

logger = logging.getLogger("dynamo_trio.lifecycle")

#: Seconds until a withdrawal or registration that failed is tried again.
RETRY = 1.0


class DrainState(enum.StrEnum):
    """Where a process stands between serving and being empty."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    RESUMING = "resuming"


@attrs.frozen
class Ended:
    """How the last change of state ended."""

    #: ``drained``; ``taken_back`` before it was drained; ``resumed``.
    outcome: str
    #: Seconds from the verb to its end.
    seconds: float


@attrs.define(eq=False)
class ReversibleDrain:
    """Drains a serving process, and lets it serve again."""

    lifecycle: Lifecycle
    #: Takes the process out of discovery. Returns once that has worked.
    withdraw: Callable[[], Awaitable[object]]
    #: Puts it back. Returns once others can find it.
    restore: Callable[[], Awaitable[object]]
    state: DrainState = attrs.field(init=False, default=DrainState.SERVING)
    #: When the state was entered, by Trio's clock; None: it was never left.
    since: float | None = attrs.field(init=False, default=None)
    last: Ended | None = attrs.field(init=False, default=None)
    # Cancelled when something else is wanted: what was done for the old wish then stops.
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _asked_at: float = attrs.field(init=False, default=0.0)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    # --- telling it -----------------------------------------------------------------

    def begin(self) -> None:
        """Drain. No effect if that is under way or done, or while a stop is: it drains as well."""
        if self.is_wanted or self.lifecycle.stopping:
            return
        logger.info("draining until resumed; %s", self.lifecycle.describe_left())
        self._ask(DrainState.DRAINING)

    def resume(self) -> None:
        """Serve again. No effect on a process that is not drained.

        Raises:
            Draining: a stop is under way, and there is no way back from that.
        """
        if self.lifecycle.stopping:
            raise Draining("the process is stopping; it cannot serve again")
        if not self.is_wanted:
            return
        if self.state is DrainState.DRAINING:
            self._ended("taken_back")
        self.lifecycle.withdrawn_at = None
        for gate in self._gates:
            gate.resume()
        self._ask(DrainState.RESUMING)

    # --- asking it ------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Is the process drained, or on the way there?"""
        return self.state in (DrainState.DRAINING, DrainState.DRAINED)

    @property
    def safe_to_delete(self) -> bool:
        """Is nobody here, and nobody to come? Holds for a drain and for a stop."""
        lifecycle = self.lifecycle
        gone = lifecycle.withdrawn_at is not None or lifecycle.withdrawn
        shut = not any(gate.is_open for gate in self._gates)
        return gone and shut and not lifecycle.in_flight()

    async def wait_settled(self) -> None:
        """Wait until the process is drained or serves, whichever was asked for last."""
        await trio.lowlevel.checkpoint()
        while self.state in (DrainState.DRAINING, DrainState.RESUMING):
            await self._changed.park()

    # --- the task -------------------------------------------------------------------

    async def run(self) -> None:
        """Do as asked, until a stop begins."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            await self.lifecycle.wait_stop_requested()
            nursery.cancel_scope.cancel("a stop takes over")

    async def _follow(self) -> None:
        while True:
            with trio.CancelScope() as self._scope:
                await (self._drain() if self.is_wanted else self._resume())

    async def _drain(self) -> None:
        await self._insist("unregistering", self.withdraw)
        self.lifecycle.withdrawn_at = trio.current_time()
        with trio.move_on_after(self.lifecycle.timetable.grace):
            await self.lifecycle.wait_unreachable()
        await _not_if_cancelled()
        for gate in self._gates:  # the front first: its requests may need the endpoints
            gate.pause()
            await gate.wait_empty()
            await _not_if_cancelled()
        self._ended("drained")
        self._enter(DrainState.DRAINED)
        await trio.sleep_forever()

    async def _resume(self) -> None:
        if self.state is DrainState.RESUMING:
            await self._insist("registering again", self.restore)
            self._ended("resumed")
            self._enter(DrainState.SERVING)
        await trio.sleep_forever()

    async def _insist(self, what: str, job: Callable[[], Awaitable[object]]) -> None:
        while True:
            if await self._attempt(what, job):
                break
            await trio.sleep(RETRY)
        await _not_if_cancelled()

    async def _attempt(self, what: str, job: Callable[[], Awaitable[object]]) -> bool:
        worked = False
        try:
            await job()
            worked = True
        except* Exception as group:
            logger.error("%s failed; trying again in %g s", what, RETRY, exc_info=group)
        return worked

    # --- its parts --------------------------------------------------------------------

    @property
    def _gates(self) -> tuple[Gate, Gate]:
        return (self.lifecycle.http, self.lifecycle.work)

    def _ask(self, state: DrainState) -> None:
        self._asked_at = trio.current_time()
        self._enter(state)
        self._scope.cancel(f"{state.value} is wanted")

    def _ended(self, outcome: str) -> None:
        self.last = Ended(outcome, trio.current_time() - self._asked_at)

    def _enter(self, state: DrainState) -> None:
        self.state, self.since = state, trio.current_time()
        logger.info("drain state: %s", state.value)
        self._changed.unpark_all()


async def _not_if_cancelled() -> None:
    """Go on only if nothing else is wanted by now.

    A cancel reaches a task that is about to run only at its next wait: what it waited for has
    come, and in the same instant somebody has asked for the opposite.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
