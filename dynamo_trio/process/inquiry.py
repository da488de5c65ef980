"""SIGUSR1 asks a process who still holds it; the answer goes to standard error.

Theory of operation
-------------------
A thread answers, so that it does not matter what the main thread does: whether the loop
turns, is busy in one task, or waits in a call. It may wait for a reader of standard error
as long as it likes.

The thread must hear of the signal though the main thread never gets to a handler written
in Python. So the handler is that of faulthandler, which is C. It writes where the main
thread stands into a pipe, which wakes the thread; what it writes is not needed, for the
thread sees all stacks itself. faulthandler could call the Python handler too, but then
lets signals interrupt its own work, and a quick succession of them ends the process.

Only code that holds the interpreter lock keeps the thread silent, until it lets go of it,
or until the watchdog ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from dynamo_trio.process.tasks import Loop, task_tree
from dynamo_trio.process.user_signals import switchboard

if TYPE_CHECKING:
    import trio

#: Seconds that the loop has for one turn.
PATIENCE = 1.0

_STDERR = 2
_WIPE = b"\r\x1b[2K"


class Inquiry:
    """Answers SIGUSR1, once it is started. One for a process."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)  # a signal handler must not wait
        # Written once, by the loop.
        self._loop: Loop | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def start(self) -> None:
        """Answer from now on. For the main thread, after the signals were installed."""
        # With its own stack only: those of other threads change while C code reads them.
        faulthandler.register(signal.SIGUSR1, file=self._write, all_threads=False, chain=False)
        threading.Thread(target=self._work, name="inquiry", daemon=True).start()

    def attach(self, token: trio.lowlevel.TrioToken) -> None:
        """From now on there is a loop: the one that calls this."""
        self._loop, self._token = Loop.current(), token

    # --- in the thread ------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._wait()
            say(task_tree(self._loop))
            switchboard.handle(signal.SIGUSR1, None)
            self._judge_loop()

    def _wait(self) -> None:
        """Until somebody asks. Signals that come at once are one question."""
        os.read(self._read, 65536)
        for _ in range(20):
            if not select.select([self._read], [], [], 0.05)[0]:
                return
            os.read(self._read, 65536)

    def _judge_loop(self) -> None:
        """Say so if the loop does not turn; a loop that has ended has no need to."""
        turned = threading.Event()
        if self._token is not None:
            with suppress(RuntimeError):  # trio.RunFinishedError
                self._token.run_sync_soon(turned.set)
                if not turned.wait(PATIENCE):
                    say(f"the event loop has not turned for {PATIENCE:g} s")


def say(text: str) -> None:
    """On standard error; a status line that stands there makes way."""
    data = text.encode(errors="backslashreplace") + b"\n"
    with suppress(OSError):  # closed, or its reader is gone: nobody is left to tell
        if os.isatty(_STDERR):
            data = _WIPE + data
        while data:
            data = data[os.write(_STDERR, data) :]
