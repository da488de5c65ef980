"""Limits that do not run while the process stands still.

A process that is stopped (SIGSTOP, a suspended machine) finds its timers past when it goes
on, although whoever was to do something in time had none. So a limit is spent in slices, and
a slice whose end is noticed much too late does not count. However long the process stood
still, that costs the limit one slice at most.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A timer this late (seconds) means that the process was frozen.
FROZEN = 1.0
SLICES = 3


@define(eq=False)
class Allowance:
    """So many seconds. Spend them in a loop until what is waited for came, or none are left."""

    limit: float
    _slices: int = field(default=SLICES, init=False)

    @property
    def spent(self) -> bool:
        """Is nothing left?"""
        return not self._slices

    @contextmanager
    def spending(self) -> Iterator[trio.CancelScope]:
        """Cancels its block when a slice is over."""
        with trio.move_on_after(self.limit / SLICES) as scope:
            yield scope
        if scope.cancelled_caught and trio.current_time() <= scope.deadline + FROZEN:
            self._slices -= 1
