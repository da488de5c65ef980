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
    """The memory of one thing that is attempted until it works.

    The log hears of a failure when it begins, every few seconds while it lasts, and when it
    is over.
    """

    #: What the log says while it fails: what does not work, and what comes of it.
    trouble: str
    #: What the log says when it works again.
    over: str
    #: In seconds.
    tell_every: float = TELL_EVERY
    _delay: float = FIRST
    #: On the Trio clock; None: all is well.
    _since: float | None = None
    _told: float = 0.0

    def failed(self, reason: Exception, since: float | None = None) -> float:
        """Note a failure, and tell of it now and then. Returns the delay before the next try.

        ``since``: when the attempt began, on the Trio clock, if that was not just now.
        """
        now = trio.current_time()
        if self._since is None:
            self._since = now if since is None else since
            self._tell(now, reason)
        elif now >= self._told + self.tell_every:
            self._tell(now, reason, f" (for {now - self._since:.0f} s now)")
        delay, self._delay = self._delay, min(self._delay * 2, LONGEST)
        return delay * random.uniform(0.5, 1.0)

    def _tell(self, now: float, reason: Exception, lasts: str = "") -> None:
        self._told = now
        logger.warning("%s%s: %s", self.trouble, lasts, reason)

    def worked(self) -> None:
        """Note a success, and tell of it if there was a failure before."""
        if self._since is not None:
            seconds = trio.current_time() - self._since
            logger.info("%s, after %.1f s", self.over, seconds)
        self._delay, self._since = FIRST, None
