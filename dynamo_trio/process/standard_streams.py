"""File descriptors 0 to 2 of a process that was started without them.

What a process opens takes the lowest free number. Where standard error is closed, a socket or
a pipe of ours would become it, and every report and traceback would be written into that.

Like :mod:`dynamo_trio.process.signals` this module imports nothing that takes time.
"""

from __future__ import annotations

import os
from contextlib import suppress

STDERR = 2


def fill() -> None:
    """Let those that are closed lead to /dev/null, for children too."""
    with suppress(OSError):  # no /dev/null here: as it was will do
        while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
            os.set_inheritable(fd, True)
        os.close(fd)
