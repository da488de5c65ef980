"""Log lines that peers can cause at will, written at most once in a while."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    import logging


@attrs.define(eq=False)
class Seldom:
    """Lines of one kind. Those that are left out are counted by the next one."""

    #: Seconds between two of them.
    every: float = 1.0
    #: On Trio's clock.
    _told_at: float = -math.inf
    _untold: int = 0

    def log(self, logger: logging.Logger, level: int, text: str, *args: object) -> None:
        """Write the line, unless one was written just now."""
        now = trio.current_time()
        if now - self._told_at < self.every:
            self._untold += 1
            return
        more = f" (and {self._untold} more before it)" if self._untold else ""
        logger.log(level, text + "%s", *args, more)
        self._told_at, self._untold = now, 0


@attrs.define(eq=False)
class SeldomEach:
    """Lines of one kind about many, about each of them at most once in a while.

    Peers may make up whom they are about, so only the ``most`` of which there was news last are
    remembered.
    """

    #: Seconds between two lines about the same.
    every: float = 1.0
    most: int = 1000
    #: In the order of the last news.
    _each: dict[str, Seldom] = attrs.field(factory=dict)

    def log(self, whom: str, logger: logging.Logger, level: int, text: str, *args: object) -> None:
        """Write the line, unless there was one about ``whom`` just now."""
        lines = self._each.pop(whom) if whom in self._each else Seldom(self.every)
        self._each[whom] = lines
        if len(self._each) > self.most:
            del self._each[next(iter(self._each))]
        lines.log(logger, level, text, *args)
