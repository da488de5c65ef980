"""What a frontend closes behind its last answer: one limit for all of it together.

Connections to workers and the store are closed one after the other, and each may have to wait
for somebody who does not answer. A frontend has registered nothing that others must see gone,
and who waits for its exit has waited for the drain already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.lifecycle import Phase

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dynamo_trio.lifecycle import Lifecycle

#: Seconds, counted from the end of the stop's phases.
TEARDOWN = 1.0


@attrs.define(eq=False)
class Teardown:
    """Shields what is closed, as :meth:`Lifecycle.cleanup` does, for less and less time."""

    _lifecycle: Lifecycle
    #: When it must be over, by Trio's clock. Invariant: written once, in STOPPED.
    _end: float | None = None

    def cleanup(self, limit: float) -> AbstractContextManager[trio.CancelScope]:
        """A shield of at most ``limit`` seconds."""
        if self._lifecycle.phase is Phase.STOPPED:
            limit = max(0.0, min(limit, self._until() - trio.current_time()))
        return self._lifecycle.cleanup(limit)

    def _until(self) -> float:
        if self._end is None:
            self._end = trio.current_time() + TEARDOWN
        return self._end
