"""SIGUSR1 and SIGUSR2: what an operator or a test asks of a running process.

Neither ends a process, from its first instruction on. SIGUSR1 is answered with the tree of
tasks (:mod:`dynamo_trio.process.tasks`); besides, each may have callbacks, which run in the
loop. A signal that comes before there is a loop, or before anybody listens to it, waits.

Like :mod:`dynamo_trio.process.signals` this module imports nothing that takes time.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import trio

#: The signals that callbacks can be registered for.
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def _say_where() -> None:
    """Before anybody can tell more: where the main thread is, say in which import."""
    import faulthandler
    import select

    with suppress(OSError, ValueError):  # closed, or its reader is gone: nobody is left to tell
        if select.select([], [2], [], 0)[1]:
            faulthandler.dump_traceback(2, all_threads=False)


class Switchboard:
    """Takes user signals, and calls who listens to them."""

    def __init__(self) -> None:
        # Added to by the handler, emptied by pass_on(); both are atomic. A signal that comes
        # again before it was passed on is the same one, as in the kernel.
        self._came: set[signal.Signals] = set()
        self._listeners: dict[signal.Signals, list[Callable[[], object]]] = {}
        self._token: trio.lowlevel.TrioToken | None = None

    def install(self) -> None:
        """Handle SIGUSR1 and SIGUSR2 from now on. Only the main thread may."""
        for signum in USER_SIGNALS:
            signal.signal(signum, self.handle)

    def on_signal(self, signum: signal.Signals, callback: Callable[[], object]) -> None:
        """Call ``callback()`` in the loop each time the signal comes.

        A signal that came when nobody listened calls the first who does. Callbacks are
        called in the order in which they were registered, and must not block. One that
        raises is logged and passed.

        Raises:
            ValueError: the signal is neither SIGUSR1 nor SIGUSR2.
        """
        if signum not in USER_SIGNALS:
            raise ValueError(f"{signal.Signals(signum).name}: only SIGUSR1 and SIGUSR2 are heard")
        self._listeners.setdefault(signum, []).append(callback)
        self._pass_on_soon()

    def attach(self, token: trio.lowlevel.TrioToken) -> None:
        """There is a loop now: pass on what came before, and what will come."""
        self._token = token
        self._pass_on_soon()

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The handler. It may interrupt any Python code, itself included; it takes no lock.

        Without a frame it is no handler, but the thread that answers SIGUSR1.
        """
        came = signal.Signals(signum)
        if came is signal.SIGUSR1 and frame is not None:
            _say_where()
        self._came.add(came)
        self._pass_on_soon()

    def _pass_on_soon(self) -> None:
        if self._token is not None:
            # trio.RunFinishedError: the loop is over, the exit is under way.
            with suppress(RuntimeError):
                self._token.run_sync_soon(self.pass_on, idempotent=True)

    def pass_on(self) -> None:
        """Call those who listen. Runs in the loop."""
        for signum in USER_SIGNALS:
            if signum not in self._came:
                continue
            if signum in self._listeners:
                self._came.discard(signum)
                for callback in tuple(self._listeners[signum]):
                    _call(signum, callback)
            elif signum is signal.SIGUSR2:  # it waits, and says so each time anew
                _log("%s: nothing listens to it", signum.name)


def _call(signum: signal.Signals, callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:  # it would end the process, and a callback is a guest here
        _log("%s: a callback failed", signum.name, failed=True)


def _log(text: str, *args: object, failed: bool = False) -> None:
    import logging  # not at the head: it would lengthen the window before install()

    logger = logging.getLogger("dynamo_trio.process")
    logger.log(logging.ERROR if failed else logging.INFO, text, *args, exc_info=failed)


#: Signals belong to the process, and so does this.
switchboard = Switchboard()
