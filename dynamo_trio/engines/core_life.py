"""The two calls at the ends of a core's life: it is loaded once, and closed once."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

from attrs import define, field

from dynamo_trio import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_trio.engines.hosts import Host, Shield
    from dynamo_trio.engines.protocol import StepCore
    from dynamo_trio.engines.states import Limits

log = logging.getLogger(__name__)


def _nothing() -> None:
    """A close is not interrupted."""


@define(eq=False)
class CoreLife:
    """Loads a core and closes it."""

    core: StepCore
    host: Host
    limits: Limits
    # Invariant: set before the core is asked to close, never set back.
    _close_begun: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)

    async def load(self, progress: Callable[[float], None]) -> None:
        """Raises StartupError; or EngineHung, after which nothing may enter the core."""
        done = await self.host.run(
            partial(self.core.load, self.host.relay(progress)),
            limit=self.limits.load,
            patience=self.limits.interrupt,
            cancel_patience=self.limits.interrupt,
            interrupt=self.core.interrupt,
            owed_seconds=self.core.owed_seconds,
        )
        if done.overdue:
            raise errors.LoadError(f"the model did not load within {self.limits.load:g} s")
        try:
            done.result.unwrap()
        except errors.StartupError:
            raise
        except Exception as exc:
            raise errors.LoadError(f"the model could not be loaded: {exc}") from exc

    async def close(self, scope: Shield, limit: float) -> None:
        """Free the core: once, and only if no call is still inside it.

        Raises:
            EngineHung: it did not close within ``scope(limit)``.
            EngineDead: closing failed.
        """
        if self._close_begun or self.host.poisoned:
            return
        self._close_begun = True
        with scope(limit):
            await self._close()
        if not self._closed:
            log.warning("no time was left to close the engine")

    async def _close(self) -> None:
        try:
            done = await self.host.run(
                self.core.close,
                limit=math.inf,  # the scope around it limits it
                patience=0.0,
                cancel_patience=0.0,
                interrupt=_nothing,
                owed_seconds=self.core.owed_seconds,
            )
        except errors.EngineHung:
            raise errors.EngineHung("the engine did not close in time") from None
        self._closed = True
        try:
            done.result.unwrap()
        except Exception as exc:
            raise errors.EngineDead("the engine failed while it was closed") from exc
