"""Is the engine well? Who asks waits for an answer from between two steps, but not for ever.

Theory of operation
-------------------
The core takes one call at a time, so a check cannot run beside a step: it is *asked for*,
and the loop of the engine answers it at the next step boundary, after the core itself was
asked if it can be (:class:`~dynamo_trio.engines.protocol.CheckedCore`). Whoever asks while a
check is under way shares its answer.

No answer within the limit is an answer too: the engine hangs, in a step or in the check.
Time in which the whole process was frozen does not count.
"""

from __future__ import annotations

import trio
from attrs import define, field

from dynamo_trio.engines.awake import Allowance
from dynamo_trio.errors import EngineHung


@define(eq=False)
class Checkups:
    """The checks that wait for the next step boundary."""

    #: Seconds from the question to the verdict that the engine hangs.
    limit: float
    # Invariant: set means that somebody has asked and has no answer yet.
    _asked: trio.Event | None = field(default=None, init=False)

    @property
    def wanted(self) -> bool:
        """Does anybody wait for an answer?"""
        return self._asked is not None

    def ask(self) -> trio.Event:
        """What is set with the next answer."""
        if self._asked is None:
            self._asked = trio.Event()
        return self._asked

    def answer(self) -> None:
        """The engine is well, or over: nobody who has asked waits any longer."""
        if self._asked is not None:
            self._asked.set()
            self._asked = None

    async def wait(self, answered: trio.Event) -> None:
        """Wait for the answer.

        Raises:
            EngineHung: there was none within the limit.
        """
        allowance = Allowance(self.limit)
        while not (answered.is_set() or allowance.spent):
            with allowance.spending():
                await answered.wait()
        if not answered.is_set():
            raise self.unanswered()

    def unanswered(self) -> EngineHung:
        """The verdict on an engine that gave no answer within the limit."""
        return EngineHung(f"the engine has not answered a health check within {self.limit:g} s")
