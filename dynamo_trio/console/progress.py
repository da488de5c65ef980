"""Progress of what takes long: a line that moves on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_trio.console.terminal import Terminal

logger = logging.getLogger("dynamo_trio.progress")

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_WIDTH = 24

#: A log line at least this often while something goes on, in seconds and in parts of the whole.
LOG_EVERY = 10.0
LOG_STEPS = 4


#: How long the end of a progress line waits for a reader that has stopped, in seconds.
FLUSH_LIMIT = 0.2


class Progress(Protocol):
    """What a long operation reports to. Any thread may call it, as often as it likes."""

    def update(self, done: float, total: float | None = None) -> None:
        """``done`` of ``total`` bytes or parts are there; ``total`` None means not known."""


@define(eq=False)
class Bar:
    """The state of one operation, and how it looks."""

    title: str
    #: True: counts are bytes and shown as MB; False: only the share is shown.
    counts_bytes: bool = False
    done: float = field(default=0.0, init=False)
    total: float | None = field(default=None, init=False)
    # Real time: it is shown to people, and the work may be in a thread.
    started_at: float = field(factory=time.monotonic, init=False)
    _logged_at: float = field(default=0.0, init=False)
    _logged_step: int = field(default=0, init=False)
    _logs: bool = field(default=True, kw_only=True)

    @property
    def seconds(self) -> float:
        """Since the operation began."""
        return time.monotonic() - self.started_at

    @property
    def share(self) -> float | None:
        """From 0 to 1, or None if the whole is not known."""
        if not self.total:
            return None
        return min(max(self.done / self.total, 0.0), 1.0)

    def update(self, done: float, total: float | None = None) -> None:
        self.done = done
        self.total = total if total is not None else self.total
        if self._logs and self._is_worth_a_line():
            logger.info("%s: %s", self.title, self.amount())

    def _is_worth_a_line(self) -> bool:
        step = int((self.share or 0.0) * LOG_STEPS)
        late = self.seconds - self._logged_at >= LOG_EVERY
        if not late and step <= self._logged_step:
            return False
        self._logged_at, self._logged_step = self.seconds, max(step, self._logged_step)
        return True

    def amount(self) -> str:
        """``42 %``, ``39.1 of 93.0 MB (42 %)``, or nothing if nothing is known."""
        percent = "" if self.share is None else f"{self.share:.0%}".replace("%", " %")
        if not self.counts_bytes:
            return percent
        if self.total is None:
            return f"{self.done / 1e6:.1f} MB"
        return f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB ({percent})"

    def render(self) -> str:
        """The line on a terminal, at this moment."""
        seconds = self.seconds
        spin = _SPINNER[int(seconds * 10) % len(_SPINNER)]
        bar = "" if self.share is None else self._bar(self.share)
        parts = (spin, self.title, bar, self.amount(), f"{seconds:.0f} s")
        return " ".join(part for part in parts if part)

    @staticmethod
    def _bar(share: float) -> str:
        full = int(share * _WIDTH)
        return "━" * full + "─" * (_WIDTH - full)


@contextmanager
def progress(terminal: Terminal, title: str, *, counts_bytes: bool = False) -> Iterator[Bar]:
    """Show ``title`` as going on until the block is left, and log how it ended."""
    bar = Bar(title, counts_bytes, logs=not terminal.is_terminal)
    logger.info("%s", title)
    terminal.set_status(bar.render)
    try:
        yield bar
    except BaseException as error:
        terminal.set_status(None)
        if isinstance(error, Exception):
            name = type(error).__name__
            logger.warning("%s: ended by %s after %.1f s", title, name, bar.seconds)
        else:  # a cancellation, as by a stop: nothing has failed
            logger.info("%s: given up after %.1f s", title, bar.seconds)
        raise
    terminal.set_status(None)
    logger.info("%s: done in %.1f s", title, bar.seconds)
    terminal.flush(FLUSH_LIMIT)  # so that what the program prints next stands below
