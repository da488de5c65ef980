"""When a peer is asked whether it lives, doubted, and given up. Pure: the time is told.

Theory of operation
-------------------
Any byte of the peer shows that it lives. After ``interval`` seconds without one it is asked
(PING); its link reader answers, whatever its engine does, so a prefill of a minute is no
silence. A peer that was asked at least an interval ago, and has been silent for two, is
*silent*; after ``patience`` seconds it is *lost*. A byte takes back the first, not the second.

A process that did not run itself (stopped, its loop blocked by a long computation, suspended
with its machine) finds all its peers silent afterwards, and may not even have sent the
question. It knows by its timer, which is set only a step ahead while an answer is awaited:
time in which that fired late does not count, and if it was an interval late everything counts
anew. So a peer has an interval to answer in which this process ran, and nobody is judged for
our own sleep.
"""

from __future__ import annotations

import enum
from typing import Final

import attrs

#: Looks in an interval in which an answer is awaited.
STEPS: Final = 4
#: The part of an interval by which a timer may fire late in a process that runs.
TOLERANCE: Final = 0.5


class Verdict(enum.Enum):
    """What to do about a peer."""

    WAIT = enum.auto()
    #: Ask whether it is there.
    ASK = enum.auto()
    #: It has become silent.
    SILENT = enum.auto()
    #: It is given up.
    LOST = enum.auto()


@attrs.define(eq=False)
class Heartbeat:
    """The pulse of one peer. All times are seconds on one clock that never goes back."""

    interval: float
    patience: float
    #: When something was heard last; later if we did not run meanwhile.
    heard: float
    #: When it was asked, if nothing was heard since; later if we did not run meanwhile.
    _asked: float | None = None
    #: Invariant: False as soon as anything is heard.
    silent: bool = False
    #: When the timer was set, and for when.
    _set_at: float = attrs.field(init=False)
    _due: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._set_at = self.heard
        self._due = self.heard + self.interval

    def hear(self, now: float) -> None:
        """The peer has said something, whatever it was."""
        self.heard = now
        self._asked = None
        self.silent = False

    def next_look(self, now: float) -> float:
        """When to look at it next; never further away than an interval."""
        awaited = self._asked is not None and not self.silent
        step = self.interval / STEPS if awaited else self.interval
        self._set_at = now
        self._due = min(self._next_event, now + step)
        return self._due

    @property
    def _next_event(self) -> float:
        if self.silent:
            return self.heard + max(self.patience, 2 * self.interval)
        if self._asked is None:
            return self.heard + self.interval
        return max(self.heard + 2 * self.interval, self._asked + self.interval)

    def wake(self, now: float) -> None:
        """The timer fired. Time in which this process did not run is not counted."""
        late = now - self._due
        if late > self.interval:
            self.rearm(now)
        elif late > TOLERANCE * self.interval:
            gap = now - self._set_at  # during which something may have been heard all the same
            self.heard = min(self.heard + gap, now)
            if self._asked is not None:
                self._asked = min(self._asked + gap, now)

    def rearm(self, now: float) -> None:
        """Count anew, since nothing could be heard until now."""
        self.heard = now
        self._asked = None

    def doubts(self, now: float) -> bool:
        """Would :meth:`look` judge? Then whoever hears must have heard all that came."""
        return (self.silent or self._asked is not None) and now >= self._next_event

    def look(self, now: float) -> Verdict:
        """Judge. What has arrived must have been heard before."""
        if now < self._next_event:
            return Verdict.WAIT
        if self.silent:
            return Verdict.LOST
        if self._asked is not None:
            self.silent = True
            return Verdict.SILENT
        self._asked = now
        return Verdict.ASK
