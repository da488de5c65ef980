"""From ``main`` to the exit code: what surrounds the event loop of a dynamo_trio process.

For entry points only. ``run_process`` never returns: engines leave threads and exit
handlers behind that could hold a process for ever, so it flushes and leaves by
``os._exit``. A program that uses dynamo_trio as a library calls ``trio.run`` itself.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import attrs
import trio

from dynamo_trio.errors import StartupError
from dynamo_trio.lifecycle.report import summary
from dynamo_trio.lifecycle.timetable import ESCALATED_ENGINE_CLOSE, SLACK
from dynamo_trio.process import signals
from dynamo_trio.process.exit_codes import ExitCode, strongest
from dynamo_trio.process.inquiry import Inquiry
from dynamo_trio.process.last_words import LastWords
from dynamo_trio.process.leftovers import end_leftovers
from dynamo_trio.process.user_signals import switchboard
from dynamo_trio.process.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from signal import Signals

    from dynamo_trio.lifecycle import Lifecycle

logger = logging.getLogger("dynamo_trio.process")

#: Seconds for flushing at the end, and for a reader of stderr that has fallen behind.
FLUSH_LIMIT = 5.0
REPORT_PATIENCE = 1.0


@attrs.define(eq=False)
class ProcessContext:
    """What ``main`` gets: the way to tie its lifecycle to the process."""

    _last_words: LastWords
    _watchdog: Watchdog
    _inquiry: Inquiry | None = None
    lifecycle: Lifecycle | None = attrs.field(init=False, default=None)

    @property
    def report_path(self) -> Path | None:
        """Where the shutdown report goes besides stderr (``DYN_TRIO_SHUTDOWN_REPORT``)."""
        return self._last_words.path

    @report_path.setter
    def report_path(self, path: Path | None) -> None:
        self._last_words.path = path

    @property
    def stop_pending(self) -> bool:
        """Has a signal asked to stop? To be asked before each long step of a start."""
        return signals.stop_pending()

    def attach(self, lifecycle: Lifecycle) -> None:
        """Let signals, watchdog and report see this lifecycle. Early in ``main``, once.

        A signal that came before is passed on at once, with its age.
        """
        self.lifecycle = lifecycle
        self._last_words.source = lifecycle.snapshot
        self._watchdog.second_line = lambda: lifecycle.timetable.second_line
        lifecycle.on_overdue(self._watchdog.arm)
        token = trio.lowlevel.current_trio_token()
        signals.desk.attach(lifecycle, token)
        switchboard.attach(token)
        if self._inquiry is not None:
            self._inquiry.attach(token)
        if lifecycle.timetable.fast_exit:
            trio.lowlevel.spawn_system_task(self._leave_fast, lifecycle)

    def on_signal(self, signum: Signals, callback: Callable[[], object]) -> None:
        """Call ``callback()`` in the loop each time SIGUSR1 or SIGUSR2 comes.

        For what an operator or a test asks of a running process: the program that simulates
        an engine lets SIGUSR2 set off the fault that ``--sim-fault`` has armed, by
        ``on_signal(signal.SIGUSR2, engine.strike)``. A signal that came while nobody
        listened, say while the engine was loading, calls the first who does. A callback must
        not block; one that raises is logged and passed.

        Raises:
            ValueError: the signal is neither SIGUSR1 nor SIGUSR2.
        """
        switchboard.on_signal(signum, callback)

    async def _leave_fast(self, lifecycle: Lifecycle) -> None:
        await lifecycle.wait_stopped()
        if lifecycle.leaves_fast:
            self.leave(lifecycle.exit_code())

    def leave(self, code: int) -> NoReturn:
        """Flush, say the last words, and be gone."""
        self._watchdog.arm(FLUSH_LIMIT)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        self._last_words.say(code, patience=REPORT_PATIENCE)
        os._exit(code)

    def run(self, main: Callable[[ProcessContext], Awaitable[int | None]]) -> int:
        """Run ``main`` to its end; returns the exit code that it has earned."""
        try:
            own = trio.run(main, self) or 0
        except BaseException as exc:  # noqa: ASYNC103 - the loop is over; the exit code tells it
            self._last_words.errors.append(summary(exc))
            own = _explain(exc)
        if self.lifecycle is None:
            return strongest(own)
        self._last_words.source = self.lifecycle.report
        return strongest(own, self.lifecycle.exit_code())


def run_process(
    main: Callable[[ProcessContext], Awaitable[int | None]], *, report_path: Path | None = None
) -> NoReturn:
    """Run ``main`` in Trio as this process, then exit. Never returns.

    Whatever happens, one line of JSON on stderr tells how the process ended, no stop outlives
    its watchdog, and no child process outlives this one: those that are left are killed.

    Args:
        main: gets a :class:`ProcessContext`; it attaches its lifecycle, and may return an
            exit code of its own.
        report_path: see :attr:`ProcessContext.report_path`.
    """
    signals.install()
    last_words = LastWords(report_path, sweep=end_leftovers)
    watchdog = Watchdog(last_words.say)
    signals.desk.on_early = watchdog.arm_early
    signals.desk.on_late = partial(_arm_late, watchdog)
    last_words.signalled = lambda: signals.desk.cause
    last_words.waited = signals.desk.waited
    signals.desk.last_words = lambda: last_words.say(ExitCode.INTERRUPTED)
    watchdog.start()
    inquiry = Inquiry()
    inquiry.start()
    if signals.stop_pending():  # it came while the imports ran
        watchdog.arm_early()
    context = ProcessContext(last_words, watchdog, inquiry)
    context.leave(context.run(main))


def _arm_late(watchdog: Watchdog, verb: signals.Verb, lifecycle: Lifecycle) -> None:
    """What the lifecycle will order once the loop turns, ordered by the signal handler."""
    timetable = lifecycle.timetable
    if verb is signals.Verb.STOP and timetable.fast_exit and signals.desk.cause == "SIGTERM":
        watchdog.arm(timetable.fast_unregister + SLACK)
    elif verb is signals.Verb.STOP:
        watchdog.arm(timetable.watchdog_limit)
    elif verb is signals.Verb.ESCALATE:
        watchdog.arm(timetable.stop + ESCALATED_ENGINE_CLOSE + SLACK)


def _explain(exc: BaseException) -> int:
    """Log what came out of the loop; a start that failed needs one line, not a traceback."""
    starts = _startup_errors(exc)
    if not starts:
        logger.critical("the process ends by an error", exc_info=exc)
        return ExitCode.FATAL
    for start in starts:
        logger.critical("cannot start: %s", start)
    return strongest(*(start.exit_code for start in starts))


def _startup_errors(exc: BaseException) -> list[StartupError]:
    """The leaves of ``exc`` if each is a :class:`StartupError`, else nothing."""
    if isinstance(exc, StartupError):
        return [exc]
    if not isinstance(exc, BaseExceptionGroup):
        return []
    found = [_startup_errors(inner) for inner in exc.exceptions]
    return [start for starts in found for start in starts] if all(found) else []


def _flush(stream: object) -> None:
    # None, closed, or its reader is gone: then nobody misses what is left in it.
    with suppress(AttributeError, OSError, ValueError):
        stream.flush()  # type: ignore[attr-defined]  # any stream has it
