"""The one clock of a stop: its hard end, its budget, and the shields capped by it."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@attrs.define(eq=False)
class Deadlines:
    """When everything must be over. Times are those of ``trio.current_time()``.

    Invariant: deadlines only shrink. Neither the hard end, nor the budget's, nor that of
    a shield that is already in force, nor the watchdog's is ever moved to a later time.
    """

    #: From the request to STOPPING. Its deadline is the end of the time that all phases
    #: share; to cancel it is to escalate.
    budget: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _hard: float = math.inf
    _overdue: float = math.inf
    _shields: set[trio.CancelScope] = attrs.field(factory=set)
    _watchers: list[Callable[[float], object]] = attrs.field(factory=list)

    @property
    def hard(self) -> float:
        """When the process must be gone."""
        return self._hard

    def shrink(self, hard: float, *, reserve: float) -> None:
        """Let everything end at ``hard``, and the budget ``reserve`` seconds before."""
        self._hard = min(self._hard, hard)
        self.budget.deadline = min(self.budget.deadline, hard - reserve)
        for shield in self._shields:
            shield.deadline = min(shield.deadline, hard)

    def capped(self, limit: float) -> float:
        """The deadline of something that may take ``limit`` seconds from now."""
        return min(trio.current_time() + limit, self._hard)

    def spare(self, *, escalated: bool) -> float:
        """How long something of the stop may shield itself and leave the cleanup its reserve.

        Until the end of the budget. Where that is over, or an escalation has ended it, cleanup
        is next, and gets half of what is left.
        """
        now = trio.current_time()
        if escalated or now >= self.budget.deadline:
            return max(0.0, self._hard - now) / 2
        return self.budget.deadline - now

    @contextmanager
    def shield(self, limit: float) -> Iterator[trio.CancelScope]:
        """Run the block to its end, for at most ``limit`` seconds, whatever cancels it."""
        with trio.CancelScope(deadline=self.capped(limit), shield=True) as scope:
            self._shields.add(scope)
            try:
                yield scope
            finally:
                self._shields.discard(scope)

    def overdue_at(self, time: float) -> None:
        """A stop that still runs at ``time`` is overdue: tell the watchers how long that is."""
        if time < self._overdue:
            self._overdue = time
            for tell in self._watchers:
                tell(time - trio.current_time())

    def watch(self, tell: Callable[[float], object]) -> None:
        """Tell this in how many seconds the stop is overdue, at once if one is running."""
        self._watchers.append(tell)
        if self._overdue < math.inf:
            tell(self._overdue - trio.current_time())
