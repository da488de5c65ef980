"""Ends a stop that hangs, whatever hangs.

Theory of operation
-------------------
Two lines. The first is a thread that sleeps until the stop is overdue, then says the last
words and leaves with 70. It takes no lock and logs nothing, for whoever hangs may hold
the lock; what it says was prepared by others.

A thread needs the interpreter. If C code holds the GIL, that thread never wakes; two
seconds later (one, where the supervisor's kill comes next) ``faulthandler``, which is C
too, writes every thread's traceback in place of a report and leaves with 1.

The watchdog is armed when a stop begins and stays armed until the process is gone.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from dynamo_trio.lifecycle.timetable import SECOND_LINE
from dynamo_trio.process.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

#: A start that was told to stop before it could say how long that may take.
EARLY_LIMIT = 35.0


class Watchdog:
    """Start it before the loop; arm it from the main thread, its signal handlers included."""

    def __init__(self, last_words: Callable[[int], object]) -> None:
        self._last_words = last_words
        self._orders: SimpleQueue[None] = SimpleQueue()
        # Times of time.monotonic(). Invariant: once one is firm, the deadline only shrinks.
        # All that were ever named are kept, for a handler may interrupt the naming of one.
        self._firm: list[float] = []
        self._early = math.inf
        #: Seconds from the thread to faulthandler.
        self.second_line: Callable[[], float] = lambda: SECOND_LINE

    def start(self) -> None:
        """Start the thread, which waits for an order."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def arm(self, seconds: float) -> None:
        """The process must be gone in so many seconds, or earlier if it was told so before."""
        deadline = time.monotonic() + seconds
        self._firm.append(deadline)
        if self._deadline() == deadline:
            self._order()

    def arm_early(self) -> None:
        """A signal came while nobody knows a timetable yet; a later :meth:`arm` replaces this."""
        if self._deadline() == math.inf:
            self._early = time.monotonic() + EARLY_LIMIT
            self._order()

    def _deadline(self) -> float:
        return min(self._firm, default=self._early)

    def _order(self) -> None:
        self._orders.put(None)  # reentrant: a signal handler may be the caller
        told = math.nan
        # Again if a handler named a shorter deadline meanwhile: that must not be undone.
        while told != (deadline := self._deadline()):
            told = deadline
            _second_line(max(deadline - time.monotonic(), 0.0) + self.second_line())

    def _watch(self) -> None:
        while (left := self._deadline() - time.monotonic()) > 0:
            with suppress(Empty):
                self._orders.get(timeout=None if left == math.inf else left)
        self._fire()

    def _fire(self) -> None:
        try:
            self._last_words(ExitCode.FORCED)
        finally:
            os._exit(ExitCode.FORCED)


def _second_line(seconds: float) -> None:
    # The thread that this starts has no place in the interpreter. One of the user's signals that
    # came to it before it has masked them would be answered by nobody; so it inherits the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        # RuntimeError: it cannot have a thread. The first line has one already, and must do.
        with suppress(RuntimeError):
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
