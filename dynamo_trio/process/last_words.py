"""The shutdown report on its way out of a process that may be in any state."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

import attrs

from dynamo_trio.lifecycle.report import NO_CAUSE, ShutdownReport
from dynamo_trio.process.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STDERR = 2
#: The phase of a process that has no lifecycle yet.
STARTING = "starting"


def _nothing_known() -> ShutdownReport:
    return ShutdownReport(cause=NO_CAUSE, phase=STARTING, exit_code=0)


@attrs.define(eq=False)
class LastWords:
    """Says the report once: on stderr, and in a file if one is named.

    A signal handler and the watchdog's thread use it too. So it takes no lock, goes past
    Python's buffers, and never waits for a reader longer than it is told.
    """

    #: ``DYN_TRIO_SHUTDOWN_REPORT``, such as /dev/termination-log.
    path: Path | None = None
    source: Callable[[], ShutdownReport] = _nothing_known
    #: The signal that asked to stop, which a busy loop may not have heard of.
    signalled: Callable[[], str | None] = lambda: None
    #: Seconds since it came.
    waited: Callable[[], float] = float
    #: Ends what would outlive the process, and returns its names.
    sweep: Callable[[], tuple[str, ...]] = tuple
    #: Errors that no lifecycle knows of.
    errors: list[str] = attrs.field(factory=list)
    # One item: who takes it speaks. list.pop is atomic.
    _turn: list[None] = attrs.field(init=False, factory=lambda: [None])

    def say(self, exit_code: int, *, patience: float = 0.0) -> None:
        """Write the report, unless that was done.

        Args:
            exit_code: what the process is about to leave with.
            patience: seconds to wait for a reader of stderr who has fallen behind.
        """
        try:
            self._turn.pop()
        except IndexError:
            return
        line = self._line(exit_code)
        if self.path is not None:
            _write_file(self.path, line)
        _write_stderr(line, patience)

    def _line(self, exit_code: int) -> bytes:
        report = self.source()
        leftovers = (*report.leftovers, *self._swept())
        errors = (*report.errors, *self.errors)
        report = attrs.evolve(report, exit_code=int(exit_code), errors=errors, leftovers=leftovers)
        if report.cause == NO_CAUSE:
            report = self._explained(report)
        return report.at_exit().to_json().encode() + b"\n"

    def _explained(self, report: ShutdownReport) -> ShutdownReport:
        """Of a process whose lifecycle nobody told to stop, or whose loop never heard of it."""
        signalled, errors = self.signalled(), report.errors
        otherwise = "SIGINT" if report.exit_code == ExitCode.INTERRUPTED else "main returned"
        cause = errors[0] if errors else signalled or otherwise
        if signalled and report.exit_code == ExitCode.FORCED and report.phase != STARTING:
            errors = (*errors, f"the event loop did not turn: it has not heard of {signalled}")
        return attrs.evolve(report, cause=cause, errors=errors, seconds=self.waited())

    def _swept(self) -> tuple[str, ...]:
        try:
            return self.sweep()
        except Exception as exc:  # no report would be worse
            return (f"cannot end what is left: {exc!r}",)


def _write_file(path: Path, line: bytes) -> None:
    # Non-blocking: the path may be a FIFO without a reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError as exc:
        _write_stderr(f"cannot write the shutdown report to {path}: {exc}\n".encode(), 0.0)


def _write_stderr(line: bytes, patience: float) -> None:
    try:
        _, ready, _ = select.select([], [STDERR], [], patience)
        if ready:
            os.write(STDERR, line)
    except OSError:
        pass  # closed, or its reader is gone: nobody is left to tell
