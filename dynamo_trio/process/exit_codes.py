"""What the exit code of a process says, and which one wins."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Never above 128 + a signal's number by accident: a supervisor must not misread one."""

    OK = 0  #: the graceful stop was completed, an escalated one included
    FATAL = 1  #: engine dead, service crashed, load failed
    USAGE = 64  #: bad configuration, file missing, port in use (sysexits' EX_USAGE)
    FORCED = 70  #: the watchdog ended it (EX_SOFTWARE)
    INTERRUPTED = 130  #: the last SIGINT


#: From the strongest to the weakest. What is not listed (``DYN_TRIO_EXIT_CODE_ON_LOSS``) is
#: weaker than all of these, and stronger than 0.
_STRONGEST_FIRST = (ExitCode.INTERRUPTED, ExitCode.FORCED, ExitCode.USAGE, ExitCode.FATAL)


def strongest(*codes: int) -> int:
    """The code that a process leaves with when several would apply."""
    for code in _STRONGEST_FIRST:
        if code in codes:
            return int(code)
    return next((code for code in codes if code != ExitCode.OK), int(ExitCode.OK))
