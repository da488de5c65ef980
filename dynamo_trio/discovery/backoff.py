"""How often what failed is tried again, and how often the log hears of it."""

from __future__ import annotations

import logging
import random

import attrs
import trio

logger = logging.getLogger("dynamo_trio.discovery")

#: The first and the longest delay between two attempts, in seconds; each is varied by a half.
FIRST, LONGEST = 0.1, 2.0
#: A failure that lasts is told again so often, in seconds.
TELL_EVERY = 5.0


@attrs.define(eq=False)
class Backoff:
    """The memory of one thing that is attempted until it works."""

    what: str
    _delay: float = FIRST
    _since: float | None = None
    _told: float = 0.0

    def failed(self, reason: Exception) -> float:
        """Note a failure, and tell of it now and then. Returns the delay before the next try."""
        now = trio.current_time()
        if self._since is None:
            self._since = now
        if self._since == now or now >= self._told + TELL_EVERY:
            self._told = now
            logger.warning("%s (for %.0f s; trying on): %s", self.what, now - self._since, reason)
        delay, self._delay = self._delay, min(self._delay * 2, LONGEST)
        return delay * random.uniform(0.5, 1.0)

    def worked(self) -> None:
        """Note a success, and tell of it if there was a failure before."""
        if self._since is not None:
            seconds = trio.current_time() - self._since
            logger.info("%s: that is over, after %.1f s", self.what, seconds)
        self._delay, self._since = FIRST, None
