"""Taking the process out of discovery: exactly once, whoever wants it first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Job = Callable[[], Awaitable[object]]


@attrs.define(eq=False)
class Withdrawal:
    """It happens once because it is a task that does nothing else (:meth:`run`)."""

    ways: list[Job] = attrs.field(factory=list)
    _due: trio.Event = attrs.field(factory=trio.Event)
    _done: trio.Event = attrs.field(factory=trio.Event)

    def begin(self) -> None:
        """Let it happen now, in parallel with whatever else goes on."""
        self._due.set()

    async def wait(self) -> None:
        """Let it happen now, and wait until it is over, well or badly."""
        self._due.set()
        await self._done.wait()

    async def run(self, attempt: Callable[[Job], Awaitable[None]]) -> None:
        """Wait until it is due, or this task is cancelled; then do it.

        Args:
            attempt: runs its argument shielded and bounded, and never raises an ``Exception``.
        """
        try:
            await self._due.wait()
        finally:
            await attempt(self._all_at_once)
            self._done.set()

    async def _all_at_once(self) -> None:
        errors: list[Exception] = []

        async def one(way: Job) -> None:
            try:
                await way()
            except Exception as exc:  # it must not cancel the others
                errors.append(exc)

        async with trio.open_nursery() as nursery:
            for way in self.ways:
                nursery.start_soon(one, way)
        if errors:
            raise ExceptionGroup("unregistering", errors)
