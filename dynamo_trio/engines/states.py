"""Where in its life an engine is, and how long the calls of its core may take."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen


class State(StrEnum):
    """The life of an engine; it only moves downwards."""

    LOADING = "loading"
    READY = "ready"
    #: Takes no new request.
    DRAINING = "draining"
    #: A call raised.
    DEAD = "dead"
    #: A call did not return in time.
    HUNG = "hung"
    CLOSED = "closed"

    @property
    def failed(self) -> bool:
        """Has the engine died, or does it hang?"""
        return self in (State.DEAD, State.HUNG)


@frozen(kw_only=True)
class Limits:
    """How long the calls of a core may take, in seconds; ``math.inf``: no limit.

    ``step`` is DYN_TRIO_ENGINE_STEP_TIMEOUT_SECS. ``check`` is a whole health check, the wait
    for the step that runs included (DYN_ENGINE_HEALTH_CHECK_TIMEOUT). ``close_failed`` takes
    the place of ``close`` once the engine has died or hung
    (DYN_ENGINE_HEALTH_SHUTDOWN_TIMEOUT). ``interrupt`` is what a call gets to return after it
    was interrupted; past it the engine counts as hung.
    """

    step: float = 30.0
    load: float = 600.0
    check: float = 30.0
    close: float = 30.0
    close_failed: float = 30.0
    interrupt: float = 5.0
