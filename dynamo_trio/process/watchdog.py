"""Ends a stop that hangs, whatever hangs.

Theory of operation
-------------------
Two lines. The first is a thread that sleeps until the stop is overdue, then says the last
words and leaves with 70. It takes no lock and logs nothing, for whoever hangs may hold
the lock; what it says was prepared by others.

A thread needs the interpreter. If C code holds the GIL, that thread never wakes; two
seconds later ``faulthandler``, which is C too, writes every thread's traceback in place of
a report and leaves with 1.

The watchdog is armed when a stop begins and stays armed until the process is gone.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from dynamo_trio.process.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

#: So much later than the thread, faulthandler.
SECOND_LINE = 2.0
#: A start that was told to stop before it could say how long that may take.
EARLY_LIMIT = 35.0


class Watchdog:
    """Start it before the loop; arm it from the main thread."""

    def __init__(self, last_words: Callable[[int], object]) -> None:
        self._last_words = last_words
        self._orders: SimpleQueue[float] = SimpleQueue()
        # Invariant: once firm, the deadline only shrinks. Times of time.monotonic().
        self._deadline = math.inf
        self._firm = False

    def start(self) -> None:
        """Start the thread, which waits for an order."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def arm(self, seconds: float) -> None:
        """The process must be gone in so many seconds, or earlier if it was told so before."""
        deadline = time.monotonic() + seconds
        if not self._firm or deadline < self._deadline:
            self._firm = True
            self._order(deadline)

    def arm_early(self) -> None:
        """A signal came while nobody knows a timetable yet; a later :meth:`arm` replaces this."""
        if self._deadline == math.inf:
            self._order(time.monotonic() + EARLY_LIMIT)

    def _order(self, deadline: float) -> None:
        self._deadline = deadline
        self._orders.put(deadline)  # reentrant: a signal handler may be the caller
        left = max(deadline - time.monotonic(), 0.0) + SECOND_LINE
        faulthandler.dump_traceback_later(left, exit=True, file=2)

    def _watch(self) -> None:
        deadline = math.inf
        while True:
            left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
            try:
                deadline = self._orders.get(timeout=left)
            except Empty:
                self._fire()

    def _fire(self) -> None:
        try:
            self._last_words(ExitCode.FORCED)
        finally:
            os._exit(ExitCode.FORCED)
