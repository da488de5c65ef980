"""The callbacks that a program may give to the stop.

They run between the grace period and the drain, in this order: ``drain``,
``pre_shutdown``, then (after the shutdown event is set and new work is refused)
``cleanup``. Each is bounded by its own limit; one that raises or takes too long is
logged and passed, for a stop must not fail. After a fatal error none of them runs:
all three may need the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs

Hook = Callable[[], Awaitable[object]]


@attrs.frozen(kw_only=True)
class Hooks:
    """Dynamo's ``drain_callback``, ``pre_shutdown_callback`` and ``cleanup_callback``."""

    drain: Hook | None = None
    pre_shutdown: Hook | None = None
    cleanup: Hook | None = None
