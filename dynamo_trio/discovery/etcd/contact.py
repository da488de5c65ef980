"""Is the store there? Who asks it must know, because its silence says nothing of others.

Theory of operation
-------------------
A lease that runs out while the store is away (stopped, cut off, restarted empty) says
nothing about its owner: the owner could not refresh it. So what is missing *during* an
outage and for a while *after* it is in doubt. An outage is seen by the lease keeper's pulse,
which is more frequent than a lease can run out in the dark (``EtcdSettings.away_after``);
lines of a watch do not count as a sign of life, since a stopped server that wakes up may
send the removals that its sleep caused before anything else.
"""

from __future__ import annotations

import logging
import math
import random
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from dynamo_trio.discovery.etcd.settings import EtcdSettings

logger = logging.getLogger("dynamo_trio.discovery.etcd")

#: An outage is told when it begins, and again so often (seconds).
TELL_EVERY = 5.0


@attrs.define
class Backoff:
    """Growing pauses, with jitter so that a thousand workers do not return as one."""

    cap: float
    first: float = 0.05
    _next: float = 0.0

    def pause(self) -> float:
        """How long to wait after one more failure."""
        self._next = min(self.cap, max(self.first, self._next * 2))
        return self._next * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It worked."""
        self._next = 0.0


@attrs.define(eq=False)
class Contact:
    """When the store last answered; what that means for what is missing; and the log of it.

    Who asks the store names itself as a ``part``, so that one that fails all the time beside
    others that do not makes one story in the log.
    """

    _settings: EtcdSettings
    _heard: float = attrs.field(factory=trio.current_time)
    #: It was heard at least once, so there is something that stays in use.
    _was_heard: bool = False
    #: Seconds for which it was there, so far. Owners need these, and no others, to put back
    #: what is missing; so no outage, however often, makes a dead one live longer.
    seconds_there: float = 0.0
    #: Until then an outage is not forgotten.
    _hold_until: float = -math.inf
    _back: trio.Event = attrs.field(factory=trio.Event)
    #: The parts that fail.
    _failing: set[str] = attrs.field(factory=set)
    #: When the first of them began to.
    _failing_since: float = 0.0
    _told: float = -math.inf

    def heard(self, part: str | None = None) -> None:
        """It answered; with a part: to that one's satisfaction."""
        now = trio.current_time()
        if self.is_away:
            self.begin_doubt()
            self._back.set()
            self._back = trio.Event()
        else:
            self.seconds_there += now - self._heard
        self._heard, self._was_heard = now, True
        if part in self._failing:
            self._failing.discard(part)
            if not self._failing and self._told >= self._failing_since:
                logger.info("etcd answers again after %.1f s", now - self._failing_since)

    def failed(self, part: str, why: object) -> None:
        """It did not answer, or not as it should; said in the log, but not every time."""
        now = trio.current_time()
        if not self._failing:
            self._failing_since = now
        self._failing.add(part)
        if now - self._told < TELL_EVERY:
            return
        self._told = now
        lasts = now - self._failing_since
        logger.warning(
            "etcd %s (%s); %s",
            f"has been failing for {lasts:.0f} s" if lasts else "fails",
            why,
            "what was last known of it stays in use" if self._was_heard else "trying on",
        )

    def begin_doubt(self) -> None:
        """There was an outage, or something as bad: it lost what it had."""
        self._hold_until = trio.current_time() + self._settings.hold

    @property
    def is_away(self) -> bool:
        """It has not answered for too long."""
        return trio.current_time() - self._heard > self._settings.away_after

    @property
    def in_doubt(self) -> bool:
        """What goes missing now may do so because of an outage."""
        return self.is_away or trio.current_time() < self._hold_until

    async def wait_back(self) -> None:
        """Wait for the end of an outage."""
        await self._back.wait()
