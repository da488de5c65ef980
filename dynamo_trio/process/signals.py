"""SIGTERM and SIGINT, from the first instruction of a process to its last.

Theory of operation
-------------------
There is one Python-level handler for the whole life of the process, and it is never
removed. :func:`install` is the first statement of each ``__main__``; this module imports
nothing that takes time, so the window in which a signal would still kill is as short as
Python allows. The handler decides at once what a signal means, because that must not
depend on whether an event loop exists, turns or hangs:

=========  ============  ==========================  =============
signal     nothing yet   stopping                    escalated
=========  ============  ==========================  =============
SIGTERM    stop          repeat (logged)             repeat
SIGINT     stop          escalate                    leave now: 130
=========  ============  ==========================  =============

The first three are put into an inbox with the time at which they came. Until a lifecycle
is attached they wait there; a program looks with :func:`stop_pending` before each long
step of its start. From then on they are handed over within the loop. *Leave now* is done
by the handler itself, and so is arming the watchdog: the loop may never turn again.

Trio's own ``open_signal_receiver`` is for programs that use this library. It merges equal
signals that come quickly, hears nothing while the loop is busy, and does not exist before
``trio.run`` nor after it; a process that must answer a third SIGINT needs more.
"""

from __future__ import annotations

import enum
import math
import os
import select
import signal
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from dynamo_trio.process import standard_streams
from dynamo_trio.process.user_signals import switchboard

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

    from dynamo_trio.lifecycle import Lifecycle

HANDLED = (signal.SIGTERM, signal.SIGINT)


class Stage(enum.Enum):
    """How far the signals so far have brought a process."""

    CALM = "calm"
    STOPPING = "stopping"
    ESCALATED = "escalated"


class Verb(enum.Enum):
    """What one signal asks for."""

    STOP = "stop"
    REPEAT = "repeat"
    ESCALATE = "escalate"
    LEAVE = "leave"


#: The table above: what a signal asks for, and the stage after it.
RULES = {
    (Stage.CALM, signal.SIGTERM): (Verb.STOP, Stage.STOPPING),
    (Stage.CALM, signal.SIGINT): (Verb.STOP, Stage.STOPPING),
    (Stage.STOPPING, signal.SIGTERM): (Verb.REPEAT, Stage.STOPPING),
    (Stage.STOPPING, signal.SIGINT): (Verb.ESCALATE, Stage.ESCALATED),
    (Stage.ESCALATED, signal.SIGTERM): (Verb.REPEAT, Stage.ESCALATED),
    (Stage.ESCALATED, signal.SIGINT): (Verb.LEAVE, Stage.ESCALATED),
}

INTERRUPTED = 130


def _leave_at_once() -> None:
    """Before anybody can tell more: the exit of the last SIGINT while the process loads."""
    line = b'{"event":"shutdown_report","cause":"SIGINT","exit_code":130,"phase":"starting"}\n'
    with suppress(OSError, ValueError):  # closed, or its reader is gone: nobody is left to tell
        if select.select([], [2], [], 0)[1]:
            os.write(2, line)


class SignalDesk:
    """Takes signals, keeps them until a lifecycle is attached, and passes them on."""

    def __init__(self) -> None:
        self._stage = Stage.CALM
        # Appended to by the handler, emptied by pass_on(): both are atomic.
        self._inbox: deque[tuple[Verb, str, float]] = deque()
        self._lifecycle: Lifecycle | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        #: Called by the handler for a signal that finds no lifecycle.
        self.on_early: Callable[[], object] = lambda: None
        #: Called by the handler for a signal that finds one: a busy loop may never hear of it.
        self.on_late: Callable[[Verb, Lifecycle], object] = lambda verb, lifecycle: None
        #: Name of the signal that asked to stop, if one did; and when, by time.monotonic().
        self.cause: str | None = None
        self._asked_at = math.inf
        #: Called by the handler right before it leaves with 130.
        self.last_words: Callable[[], object] = _leave_at_once

    def install(self) -> None:
        """Handle signals from now on. Only the main thread may; installing twice is harmless."""
        for signum in HANDLED:
            signal.signal(signum, self.handle)

    @property
    def stop_pending(self) -> bool:
        """Has a signal asked this process to stop?"""
        return self._stage is not Stage.CALM

    def waited(self) -> float:
        """Seconds since the first signal that asked to stop; 0 if none did."""
        return max(0.0, time.monotonic() - self._asked_at)

    @property
    def lifecycle(self) -> Lifecycle | None:
        """Who is told of signals; None: they wait."""
        return self._lifecycle

    def attach(self, lifecycle: Lifecycle, token: trio.lowlevel.TrioToken) -> None:
        """Pass signals to this lifecycle from now on, those that came before first."""
        self._lifecycle, self._token = lifecycle, token
        self.pass_on()

    def handle(self, signum: int, _frame: object) -> None:
        """The handler. It may interrupt any Python code, itself included; it takes no lock."""
        verb, self._stage = RULES[self._current_stage(), signal.Signals(signum)]
        if verb is Verb.LEAVE:
            self._leave()
        name, now = signal.Signals(signum).name, time.monotonic()
        self.cause = self.cause or name
        self._asked_at = min(self._asked_at, now)
        self._inbox.append((verb, name, now))
        if self._lifecycle is None or self._token is None:
            self.on_early()
            return
        self.on_late(verb, self._lifecycle)
        # trio.RunFinishedError: the loop is over, the exit is under way.
        with suppress(RuntimeError):
            self._token.run_sync_soon(self.pass_on, idempotent=True)

    def _leave(self) -> NoReturn:
        try:
            # One more would interrupt the last words, find them taken, and leave without them.
            for signum in HANDLED:
                signal.signal(signum, signal.SIG_IGN)
            self.last_words()
        finally:
            os._exit(INTERRUPTED)

    def _current_stage(self) -> Stage:
        """A stop that something else began counts like one that a signal began."""
        begun = self._lifecycle is not None and self._lifecycle.stopping
        return Stage.STOPPING if begun and self._stage is Stage.CALM else self._stage

    def pass_on(self) -> None:
        """Carry out what is in the inbox. Runs in the loop."""
        lifecycle = self._lifecycle
        assert lifecycle is not None
        while self._inbox:
            verb, name, came = self._inbox.popleft()
            if verb is Verb.STOP:
                lifecycle.request_stop(name, age=time.monotonic() - came)
            elif verb is Verb.ESCALATE:
                lifecycle.escalate(name)
            else:
                _log_repeat(name, lifecycle)


def _log_repeat(name: str, lifecycle: Lifecycle) -> None:
    import logging  # not at the head: it would lengthen the window before install()

    logger = logging.getLogger("dynamo_trio.lifecycle")
    logger.info(
        "%s again: the stop is under way already (phase %s); %s",
        *(name, lifecycle.phase.label, lifecycle.describe_left()),
    )


#: Signals belong to the process, and so does this.
desk = SignalDesk()


def install() -> None:
    """Handle signals from now on: the first statement of each ``__main__``.

    SIGTERM and SIGINT are kept and mean a stop; SIGUSR1 and SIGUSR2 no longer kill. Standard
    streams that are closed lead to /dev/null from then on, before anything else takes their place.
    """
    desk.install()
    switchboard.install()
    standard_streams.fill()


def stop_pending() -> bool:
    """Has a signal asked this process to stop? To be asked before each long step of a start."""
    return desk.stop_pending
