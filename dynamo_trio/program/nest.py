"""The outermost nursery of a program: what begins first in it ends last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.lifecycle import Lifecycle


@attrs.define(eq=False)
class Nest:
    """Holds the services of a process while what is inside starts, serves and ends.

    A stop that comes before :meth:`ready` ends the start where it stands; one that comes later
    is the lifecycle's affair, and the inside waits for :meth:`Lifecycle.wait_stopped` before
    it lets go of anything.
    """

    lifecycle: Lifecycle
    #: Called when a stop comes before the process is ready.
    on_early_stop: Callable[[], object] = lambda: None
    is_ready: bool = False
    _startup: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self, inside: Callable[[trio.Nursery], Awaitable[None]]) -> None:
        """Run ``inside`` with the nursery of the services, which outlast it."""
        async with trio.open_nursery() as services:
            services.start_soon(self.lifecycle.run)
            services.start_soon(self._attend_early_stop)
            with self._startup:
                await inside(services)
            await self.lifecycle.wait_stopped()
            services.cancel_scope.cancel("everything inside has ended")

    def ready(self) -> None:
        """The start is over: the process wants work."""
        self.is_ready = True

    async def _attend_early_stop(self) -> None:
        await self.lifecycle.wait_stop_requested()
        if not self.is_ready:
            self.on_early_stop()
            self._startup.cancel("a stop was requested during the start")
