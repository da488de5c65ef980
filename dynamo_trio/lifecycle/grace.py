"""How long a process that nobody finds any more may still be sent requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.lifecycle.timetable import GraceMode, Timetable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.lifecycle.admission import Gate

logger = logging.getLogger("dynamo_trio.lifecycle")


@attrs.frozen(eq=False)
class Grace:
    """The waits of the grace period. Their limit, the period itself, is the caller's."""

    _timetable: Timetable
    #: Returns what waits until no peer can route here any more; None: there are no peers.
    _peers: Callable[[], Callable[[], Awaitable[object]] | None]
    #: Told what is waited for.
    _explain: Callable[[str], None]

    def left(self, period: float, withdrawn_at: float | None) -> float:
        """Of the grace period, less what a drain has waited out before the stop."""
        if withdrawn_at is None:
            return period
        left = period - (trio.current_time() - withdrawn_at)
        if left <= 0:
            self._explain("the drain before the stop has lasted for the grace period")
        return left

    async def wait_out(self, work: Gate, describe_left: Callable[[], str]) -> None:
        """Until nobody can send a request here any more, and nobody is here."""
        await self.wait_unreachable()
        while work.count:
            self._explain(f"the grace period goes on: {describe_left()}")
            await work.wait_empty()
            await self._wait_for_peers()  # one may have appeared meanwhile

    async def wait_unreachable(self) -> None:
        """Until no peer can send a request here any more; for ever if that cannot be known."""
        if self._timetable.grace_mode is GraceMode.FIXED:
            self._explain("the full grace period is kept: DYN_TRIO_GRACE_MODE is fixed")
            await trio.sleep_forever()
        await trio.sleep(self._timetable.grace_floor)
        await self._wait_for_peers()

    async def _wait_for_peers(self) -> None:
        if (wait := self._peers()) is None:
            return
        try:
            await wait()
        except* Exception as group:
            logger.error("cannot ask the peers; the grace period is kept in full", exc_info=group)
            await trio.sleep_forever()
