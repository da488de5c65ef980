"""The callbacks that a program may give to the stop.

They run between the grace period and the drain, in this order: ``drain``,
``pre_shutdown``, then (after the shutdown event is set and new work is refused)
``cleanup``. Each is bounded by its own limit; one that raises or takes too long is
logged and passed, for a stop must not fail. After a fatal error none of them runs:
all three may need the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import attrs

logger = logging.getLogger("dynamo_trio.lifecycle")

Hook = Callable[[], Awaitable[object]]


class Settable(Protocol):
    """What is told by being set: a ``trio.Event``, or one of ``threading``."""

    def set(self) -> object: ...


@attrs.frozen(kw_only=True)
class Hooks:
    """Dynamo's ``drain_callback``, ``pre_shutdown_callback`` and ``cleanup_callback``."""

    drain: Hook | None = None
    pre_shutdown: Hook | None = None
    cleanup: Hook | None = None
    #: Dynamo's ``shutdown_event``: set between ``pre_shutdown`` and ``cleanup``, and in any
    #: case, also where the callbacks are passed. Set more than once.
    shutdown_event: Settable | None = None

    def tell(self) -> None:
        """Set the shutdown event, if there is one. Its failure is logged and passed."""
        if self.shutdown_event is None:
            return
        try:
            self.shutdown_event.set()
        except BaseException:  # noqa: ASYNC103 - nothing waits in it; sys.exit() ends no stop
            logger.exception("shutdown_event.set() failed; the stop goes on")

    @property
    def callbacks(self) -> int:
        """How many of the three there are."""
        return sum(hook is not None for hook in (self.drain, self.pre_shutdown, self.cleanup))
