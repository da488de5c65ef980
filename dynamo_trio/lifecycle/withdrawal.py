"""Taking the process out of discovery: exactly once, whoever wants it first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    Job = Callable[[], Awaitable[object]]


async def all_at_once(what: str, jobs: Iterable[Job]) -> None:
    """Do them beside each other; one that fails does not end the others.

    Raises:
        ExceptionGroup: of that name, with what some have failed with.
    """
    errors: list[Exception] = []

    async def one(job: Job) -> None:
        try:
            await job()
        except Exception as exc:  # it must not cancel the others
            errors.append(exc)

    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(one, job)
    if errors:
        raise ExceptionGroup(what, errors)


@attrs.define(eq=False)
class Withdrawal:
    """It happens once because it is a task that does nothing else (:meth:`run`)."""

    ways: list[Job] = attrs.field(factory=list)
    _due: trio.Event = attrs.field(factory=trio.Event)
    _done: trio.Event = attrs.field(factory=trio.Event)

    @property
    def is_over(self) -> bool:
        """Has it happened, well or badly?"""
        return self._done.is_set()

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
            await attempt(partial(all_at_once, "unregistering", self.ways))
            self._done.set()
