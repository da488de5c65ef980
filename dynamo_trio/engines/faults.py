"""Faults that a simulated core commits on request, for tests and demonstrations.

A fault strikes after a number of calls of its kind, or waits to be *set off*
(:meth:`FaultBox.set_off`; a process does that by SIGUSR2). Once set off it strikes in the next
step or health check, whichever comes first, so that an engine at rest can fail as well.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from enum import StrEnum
from typing import Literal

from attrs import define, field

from dynamo_trio import errors

#: The call of a core in which a fault strikes.
Point = Literal["load", "step", "check", "close"]


class Fault(StrEnum):
    """What may go wrong. Each strikes once, in the call that its name or text says.

    What waits to be set off then strikes in a step or in a health check, except that a fault of
    ``load`` waits for nothing.
    """

    #: A step raises ``EngineDead``.
    DIE = "die"
    #: A step raises what no core should.
    RAISE = "raise"
    #: A step never returns, not even when interrupted.
    HANG = "hang"
    #: A step returns only when interrupted.
    STALL = "stall"
    #: A step leaves a child process behind that outlives ``close``.
    LEAK_CHILD = "leak-child"
    #: ``load`` raises ``LoadError``.
    LOAD_FAIL = "load-fail"
    #: ``load`` never returns.
    LOAD_HANG = "load-hang"
    #: ``load`` returns only when interrupted.
    LOAD_STALL = "load-stall"
    #: ``close`` never returns. Set off, it first strikes like ``DIE``, and then in ``close``.
    CLOSE_HANG = "hang-close"

    @property
    def point(self) -> Point:
        """The call in which it strikes."""
        if self is Fault.CLOSE_HANG:
            return "close"
        return "load" if self.value.startswith("load") else "step"


_STUBBORN = (Fault.HANG, Fault.LOAD_HANG, Fault.CLOSE_HANG)
_PATIENT = (Fault.STALL, Fault.LOAD_STALL)


@define(eq=False)
class FaultBox:
    """The armed faults of one core, and the means to be stuck.

    ``virtual``: instead of blocking, a stuck call *owes* endless seconds
    (``StepCore.owed_seconds``), so that a host without threads can be stuck as well.
    """

    virtual: bool = False
    _armed: list[tuple[Fault, int]] = field(factory=list, init=False)
    #: Those that wait to be set off. Like _armed, changed by the calls of the core alone once
    #: there are any, which come one at a time.
    _waiting: list[Fault] = field(factory=list, init=False)
    # Invariant: never set back.
    _set_off: bool = field(default=False, init=False)
    _interrupted: threading.Event = field(factory=threading.Event, init=False)
    _released: threading.Event = field(factory=threading.Event, init=False)
    #: Set while a virtual call is stuck: the fault that holds it.
    stuck: Fault | None = field(default=None, init=False)
    children: list[subprocess.Popen[bytes]] = field(factory=list, init=False)

    def arm(self, fault: Fault, after: int | None = 0) -> None:
        """Let ``fault`` strike after ``after`` more calls of its kind; None: when set off."""
        if after is None and fault.point != "load":
            self._waiting.append(fault)
        else:
            self._armed.append((fault, after or 0))

    def set_off(self) -> None:
        """Let what waits strike in the next step or check. Safe from any thread."""
        self._set_off = True

    def interrupt(self) -> None:
        """End what can be interrupted. Safe from any thread."""
        if self.stuck in _PATIENT:
            self.stuck = None
        self._interrupted.set()

    def release(self) -> None:
        """End every stuck call, so that its thread can go; for the end of a test."""
        self.stuck = None
        self._released.set()
        self._interrupted.set()

    def strike(self, point: Point) -> None:
        """Commit what is due in this call."""
        for fault in (*self._counted(point), *self._triggered(point)):
            self._commit(fault)

    def _counted(self, point: Point) -> list[Fault]:
        """Those whose number of calls has come."""
        due = [fault for fault, after in self._armed if fault.point == point and after == 0]
        self._armed = [
            (fault, after - (fault.point == point))
            for fault, after in self._armed
            if fault not in due
        ]
        return due

    def _triggered(self, point: Point) -> list[Fault]:
        """Those that were set off."""
        if not self._set_off or point == "load":
            return []
        due, self._waiting = self._waiting, []
        if point == "close":
            return [fault for fault in due if fault.point == "close"]
        closing = [fault for fault in due if fault.point == "close"]
        for fault in closing:
            self.arm(fault)
        return [Fault.DIE if fault in closing else fault for fault in due]

    def _commit(self, fault: Fault) -> None:
        match fault:
            case Fault.DIE:
                raise errors.EngineDead("the simulated engine died, as it was told to")
            case Fault.RAISE:
                raise RuntimeError("a simulated failure inside a step")
            case Fault.LOAD_FAIL:
                raise errors.LoadError("the simulated engine does not load, as it was told to")
            case Fault.LEAK_CHILD:
                self._leak()
            case _:
                self._be_stuck(fault)

    def _be_stuck(self, fault: Fault) -> None:
        if self.virtual:
            self.stuck = fault
        elif fault in _STUBBORN:
            self._released.wait()
        else:
            self._interrupted.wait()

    def _leak(self) -> None:
        sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
        self.children.append(subprocess.Popen(sleeper, stdin=subprocess.DEVNULL))
