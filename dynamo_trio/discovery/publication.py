"""One key of this process in a store: what shall stand there, and the task that sees to it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.discovery.backoff import Backoff
from dynamo_trio.errors import StoreUnavailable

if TYPE_CHECKING:
    from dynamo_trio.discovery.store import Store, StoreKey

logger = logging.getLogger("dynamo_trio.discovery")


@attrs.define(eq=False)
class Publication:
    """Says what is wanted (plain calls), and makes it so (:meth:`run`, one task for each)."""

    store: Store
    at: StoreKey
    #: Not put back sooner after it went, in seconds.
    quiet: float
    wanted: bytes | None = None
    #: Invariant: true only while the store holds exactly what is wanted, as far as is known.
    settled: bool = True
    #: Why the last attempt at what is wanted now failed; None: none was made, or it worked.
    failure: StoreUnavailable | None = None
    #: Somebody waited for the withdrawal that is wanted now, and gave up.
    _was_left: bool = False
    #: On the Trio clock.
    not_before: float = -math.inf
    #: The log waits to hear that what was lost is back.
    _healing: bool = False
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    _backoff: Backoff = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._backoff = Backoff(
            f"cannot write {self.at} in the discovery store; trying again",
            f"can write {self.at} in the discovery store again",
        )

    # --- what is wanted -------------------------------------------------------------------

    def want(self, value: bytes | None) -> None:
        """Let this stand there; None: nothing."""
        if value != self.wanted:
            self.wanted, self.settled, self.failure = value, False, None
            self._was_left = False
            self._changed.unpark_all()

    def lost(self) -> None:
        """It is gone, and nobody here wanted that."""
        self.settled = self.wanted is None
        self._gone()
        if not self.settled:
            self._healing = True
            logger.warning(
                "our record %s no longer stands in the discovery store as we wrote it; unless it"
                " is withdrawn, it is published again %s",
                self.at,
                f"in {self.quiet:.0f} s" if self.quiet else "at once",
            )
        self._changed.unpark_all()

    async def publish(self, value: bytes) -> None:
        """Let ``value`` stand there, and wait until it does or something else is wanted.

        Cancelled, it leaves wanted what was wanted before.
        """
        before = self.wanted
        self.want(value)
        try:
            await trio.lowlevel.checkpoint()
            while self.wanted == value and not self.settled:
                await self._changed.park()
        except BaseException:
            if self.wanted == value:
                self.want(before)
            raise

    async def withdraw(self) -> None:
        """Let nothing stand there, and wait until that is so, or was tried; it is tried on.

        Raises:
            StoreUnavailable: something may still stand there.
        """
        self.want(None)
        await self.wait_withdrawn()

    async def wait_withdrawn(self) -> None:
        """Wait until what is to be withdrawn is, if anything.

        Raises:
            StoreUnavailable: the last attempt failed; it is tried on.
        """
        try:
            await trio.lowlevel.checkpoint()
            while not self.is_withdrawn_or_wanted:
                if self.failure is not None:
                    text = f"{self.at} may still stand in the discovery store: {self.failure}"
                    raise StoreUnavailable(text) from self.failure
                await self._changed.park()
        except trio.Cancelled:
            self._was_left = not self.is_withdrawn_or_wanted
            raise

    @property
    def is_overdue(self) -> bool:
        """It is to be withdrawn, and the store does not let it: it failed, or hangs."""
        failed = self.failure is not None or self._was_left
        return failed and not self.is_withdrawn_or_wanted

    @property
    def is_withdrawn_or_wanted(self) -> bool:
        """False: it is to be withdrawn, and may still stand in the store."""
        return self.wanted is not None or self.settled

    # --- how it comes about ---------------------------------------------------------------

    async def run(self) -> None:
        """Make it so, for ever."""
        while True:
            await trio.lowlevel.checkpoint()
            if self.settled:
                await self._changed.park()
            elif self.wanted is not None and trio.current_time() < self.not_before:
                await self._pause(self.not_before)
            else:
                await self._attempt(self.wanted)

    async def _pause(self, until: float) -> None:
        """Wait until then, or until something else is wanted."""
        with trio.move_on_at(until):
            await self._changed.park()

    async def _attempt(self, value: bytes | None) -> None:
        try:
            await self._bring_about(value)
        except StoreUnavailable as exc:
            delay = self._backoff.failed(exc)
            if value != self.wanted:
                return
            self.failure = exc
            self._changed.unpark_all()
            await self._pause(trio.current_time() + delay)
            return
        self._backoff.worked()
        self._healed(value)
        # Something else may be wanted by now.
        self.settled = value == self.wanted
        self._changed.unpark_all()

    def _healed(self, value: bytes | None) -> None:
        if self._healing and value is not None:
            logger.info("our record %s is published again", self.at)
        self._healing = False

    async def _bring_about(self, value: bytes | None) -> None:
        if value is not None:
            await self.store.put(self.at, value)
            return
        try:
            await self.store.delete(self.at)
        finally:  # it may have been deleted even if the store did not say so
            self._gone()

    def _gone(self) -> None:
        self.not_before = trio.current_time() + self.quiet
