"""Whether an endpoint counts as healthy, after what its canaries came back with."""

from __future__ import annotations

import math

import attrs

#: A failure so soon after a recovery is a relapse, in seconds.
RELAPSE = 60.0
#: Passes in a row that an endpoint needs at most to be healthy again.
MOST_PASSES = 8


@attrs.define(eq=False)
class Standing:
    """The verdict on one endpoint. Times are seconds on whichever clock :meth:`note` is given.

    One failure is enough to be ill, one pass to be well again. But who relapses needs twice as
    many passes as the last time: peers would rather do without an endpoint than see it come
    and go.
    """

    #: Not before it has answered once.
    healthy: bool = False
    #: Passes in a row since it fell ill.
    _passes: int = 0
    #: Invariant: from 1 to MOST_PASSES.
    _needed: int = 1
    _recovered: float = -math.inf
    #: It has failed at least once.
    was_ill: bool = False

    def note(self, *, passed: bool, now: float) -> bool:
        """Take one result; returns whether the verdict has changed."""
        self.was_ill = self.was_ill or not passed
        if passed == self.healthy:
            self._passes = 0
            return False
        if passed:
            return self._pass(now)
        self.healthy = False
        relapsed = now - self._recovered < RELAPSE
        self._needed = min(2 * self._needed, MOST_PASSES) if relapsed else 1
        return True

    def _pass(self, now: float) -> bool:
        self._passes += 1
        if self._passes < self._needed:
            return False
        self.healthy, self._passes = True, 0
        if self.was_ill:
            self._recovered = now
        return True
