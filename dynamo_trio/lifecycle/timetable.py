"""The arithmetic of a stop: who may take how long, and when it must be over.

Theory of operation
-------------------
Everything counts from the signal. With a total, ``hard = t_signal + total`` is the
instant at which the process must be gone, and all phases together spend one budget
that ends at ``hard - reserve``; the reserve belongs to the cleanup that follows
them. Without a total only the limits of the single phases hold.

Times are seconds. 0 means at once. Nothing here looks at a clock.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The reserve for cleanup: so much, or this part of the total when that is less.
RESERVE = 5.0
RESERVE_PART = 1 / 5
#: The watchdog waits so much longer than the stop may take.
SLACK = 5.0
#: Its second line, for a process in which no Python runs any more, comes so much later.
SECOND_LINE = 2.0
#: Before the supervisor's kill, where that is known: the watchdog, then its second line.
BEFORE_KILL = 2.0
SECOND_BEFORE_KILL = 1.0
#: What is closed last, besides the engine, has limits of its own (records 2 s, the store 2 s,
#: a temporary folder 5 s), which add up to less than this.
TEARDOWN = 10.0
#: After an escalation the engine has so long to close.
ESCALATED_ENGINE_CLOSE = 5.0


class DrainPolicy(enum.StrEnum):
    """Who runs on and who is handed over when draining begins (``DYN_TRIO_DRAIN_POLICY``)."""

    AUTO = "auto"  #: what can finish, finishes; what surely cannot is handed over
    FINISH = "finish"  #: everybody runs to the drain limit
    MIGRATE = "migrate"  #: everybody is handed over (what Dynamo's shutdown_event does)


class GraceMode(enum.StrEnum):
    """May the grace period end early (``DYN_TRIO_GRACE_MODE``)?"""

    AUTO = "auto"  #: as soon as no peer can route here any more and nothing is in flight
    FIXED = "fixed"  #: never: the fixed sleep of Dynamo


def reserve_of(total: float) -> float:
    """The part of ``total`` that is kept for cleanup: 5 s or a fifth, whichever is less."""
    return 0.0 if math.isinf(total) else min(RESERVE, total * RESERVE_PART)


@attrs.frozen(kw_only=True)
class Timetable:
    """The limits of one process's stop, in seconds."""

    #: Still serving after the registration is withdrawn. Unused with an HTTP front, which
    #: drains at once (``DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS``).
    grace: float = 5.0
    #: The grace period never ends earlier than this: an acknowledged removal may still be
    #: overtaken by a request that was already on its way.
    grace_floor: float = 0.25
    grace_mode: GraceMode = GraceMode.AUTO
    #: ``DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS``; None: the process has no HTTP front.
    http_drain: float | None = None
    #: ``DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS``; 0 for a process without endpoints.
    drain: float = 900.0
    drain_policy: DrainPolicy = DrainPolicy.AUTO
    #: STOPPING as a whole: the farewells, then the hard cancel of who is still there.
    stop: float = 2.0
    farewell: float = 1.0
    unregister: float = 2.0
    #: Each callback (``DYN_TRIO_SHUTDOWN_CALLBACK_TIMEOUT_SECS``).
    hook: float = 30.0
    #: How many callbacks the process may have; 0 where it has none.
    hooks: int = 3
    #: 0 for a process without an engine.
    engine_close: float = 30.0
    #: A stop that a fatal error began (``DYN_TRIO_FATAL_SHUTDOWN_TIMEOUT_SECS``).
    fatal: float = 30.0
    #: The whole stop, counted from the signal; None: no such limit.
    total: float | None = None
    #: The supervisor's SIGKILL, counted from the signal; None: unknown.
    killed_after: float | None = None
    #: On SIGTERM leave right after the unregistering, whoever is still there; its limit then
    #: (``DYN_GMS_FAILOVER_FAST_EXIT_ON_SIGTERM``, ``DYN_GMS_FAILOVER_UNREGISTER_TIMEOUT_SECS``).
    fast_exit: bool = False
    fast_unregister: float = 5.0

    @property
    def reserve(self) -> float:
        """What of ``total`` is kept for cleanup."""
        return 0.0 if self.total is None else reserve_of(self.total)

    @property
    def budget(self) -> float:
        """What the phases up to STOPPING may spend together, from the signal on."""
        return math.inf if self.total is None else self.total - self.reserve

    @property
    def phases(self) -> float:
        """The phases up to STOPPING if each takes all of its own limit."""
        before = self.grace if self.http_drain is None else self.http_drain + self.farewell
        return self.unregister + before + self.hooks * self.hook + self.drain

    @property
    def longest(self) -> float:
        """The whole stop if everything takes all of its limit."""
        everything = self.phases + self.stop + self.engine_close
        return everything if self.total is None else min(everything, self.total)

    @property
    def watchdog_limit(self) -> float:
        """Seconds from the signal until the watchdog ends the process.

        Always before the supervisor's kill, which would leave no report.
        """
        limit = (self.longest if self.total is None else self.total) + SLACK
        return limit if self.killed_after is None else min(limit, self.killed_after - BEFORE_KILL)

    @property
    def second_line(self) -> float:
        """Seconds from the watchdog to its second line, which has to be before the kill too."""
        if self.killed_after is None:
            return SECOND_LINE
        return min(SECOND_LINE, self.killed_after - SECOND_BEFORE_KILL - self.watchdog_limit)

    @property
    def teardown_limit(self) -> float:
        """Seconds from STOPPED until the watchdog ends the process, at the latest."""
        return self.engine_close + TEARDOWN + SLACK

    def describe(self) -> str:
        """The limits in the order in which they come, as one line for the log.

        Each is what it can really take: no phase outlasts the budget.
        """
        stages = ", ".join(
            f"{name} <= {min(limit, self.budget):g} s{note}" for name, limit, note in self._stages()
        )
        if self.engine_close:
            close = min(self.engine_close, math.inf if self.total is None else self.total)
            stages += f", engine close <= {close:g} s"
        total = "no total" if self.total is None else f"total {self.total:g} s"
        text = f"{stages}; {total}; watchdog after {self.watchdog_limit:g} s"
        if self.fast_exit:
            text = f"on SIGTERM only unregister <= {self.fast_unregister:g} s; else {text}"
        return text

    def _stages(self) -> Iterator[tuple[str, float, str]]:
        if self.http_drain is None:
            yield "unregister", self.unregister, ""
            yield "grace", self.grace, ""
        else:
            yield "HTTP drain", self.http_drain, ""
            yield "farewells", self.farewell, ""
            yield "unregister", self.unregister, ""
        if self.hooks:
            yield "callbacks", self.hook, " each"
        if self.drain:
            yield "drain", self.drain, f" ({self.drain_policy})"
        if self.http_drain is None:
            yield "farewells", self.farewell, ""

    def check(self) -> list[str]:
        """Warnings for a start-up log: what cannot fit into the total."""
        if self.total is None:
            return []
        warnings = []
        if self.phases > self.budget:
            warnings.append(
                f"the stop's phases may take {self.phases:g} s, but their budget ends after "
                f"{self.budget:g} s: what still runs then is cut"
            )
        if self.http_drain is None and self.grace + self.unregister >= self.budget:
            warnings.append(
                f"a grace period of {self.grace:g} s may use up the whole budget of "
                f"{self.budget:g} s: nothing would be left to drain"
            )
        if self.engine_close > self.reserve:
            warnings.append(
                f"closing the engine may take {self.engine_close:g} s, but only the "
                f"{self.reserve:g} s of the reserve are sure"
            )
        return warnings
