"""What is known of a request's future: when it ends, and whether another worker can go on.

Shared by an :class:`~dynamo_trio.lifecycle.admission.Admission` and the handler's context: the
handler knows what it serves, the stop of the process judges by it.
"""

from __future__ import annotations

import logging
import math
from numbers import Real
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("dynamo_trio.lifecycle")


def no_estimate() -> float | None:
    """Nobody knows how long the request will take."""
    return None


@attrs.define(eq=False)
class Prospects:
    """How one request may go on."""

    #: Can it be continued elsewhere? Guided decoding and several choices cannot.
    movable: bool = True
    #: Seconds that it still needs at most; None: nobody knows. The handler's own code, so it may
    #: fail: ask :meth:`estimated`.
    estimate: Callable[[], float | None] = no_estimate
    #: When its caller stops waiting, on Trio's clock.
    deadline: float = math.inf
    # Was it said that the estimate is of no use? Once for each request will do.
    _told: bool = attrs.field(init=False, default=False)

    def estimated(self) -> float | None:
        """What ``estimate`` says, not less than 0. One that fails, or says no number, says None."""
        try:
            seconds = self.estimate()
            return None if seconds is None else max(0.0, _finite(seconds))
        # A stop, which is everybody's, must not fail for one request; and nothing is awaited here.
        except BaseException as exc:  # noqa: ASYNC103 - no Cancelled can come
            self._complain(exc)
            return None  # noqa: ASYNC104 - the same

    def _complain(self, exc: BaseException) -> None:
        if not self._told:
            self._told = True
            logger.error("a request's prospects.estimate is of no use: %r", exc, exc_info=exc)

    def needs(self) -> float | None:
        """Seconds until it surely has ended; None: nobody knows how long its work takes.

        A caller who stops waiting sooner ends it sooner. That alone is no estimate of the work.
        """
        estimate = self.estimated()
        if estimate is None:
            return None
        return max(0.0, min(estimate, self.deadline - trio.current_time()))


def _finite(seconds: object) -> float:
    """A number of seconds as a float; raises ValueError if it is none, or OverflowError."""
    if isinstance(seconds, Real) and math.isfinite(seconds):
        return float(seconds)
    raise ValueError(f"{seconds!r} is no finite number of seconds")


@attrs.define(eq=False)
class Peer:
    """Who sent a request, and may continue it on another worker.

    One for each connection that can say how much it takes; all its requests share it.
    """

    #: How many requests it can place on other workers. None: it has no way to say so, as on
    #: Dynamo's tcp plane. 0: none, or it has said nothing yet.
    places: int | None = 0
    _renewed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def renew(self, places: int) -> None:
        """It has said how many it can place from now on."""
        self.places = places
        self._renewed.unpark_all()

    @property
    def may_take(self) -> bool:
        """Has it a place, or can it not say?"""
        return self.places is None or self.places > 0

    def take(self) -> bool:
        """Use up one place. False: there is none, as far as is known."""
        if not self.places:
            return False
        self.places -= 1
        return True

    async def wait_place(self) -> None:
        """Wait until there is a place. Never returns for a peer that cannot say."""
        await trio.lowlevel.checkpoint()
        while not self.places:
            await self._renewed.park()
