"""Where a process stands, and who wants to know."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.lifecycle.phases import Ending, Phase, path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_trio.lifecycle.journal import Journal

logger = logging.getLogger("dynamo_trio.lifecycle")


@attrs.define(eq=False)
class PhaseTrack:
    """Walks the table of phases, and records each as it is entered, passed or ended."""

    journal: Journal
    # Invariant: only grows.
    phase: Phase = Phase.SERVING
    #: The scope of the current phase; its deadline is the phase's limit.
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    # Invariant: set for every phase that was entered or passed.
    _reached: dict[Phase, trio.Event] = attrs.field(
        factory=lambda: {phase: trio.Event() for phase in Phase}
    )

    def __attrs_post_init__(self) -> None:
        self._reached[self.phase].set()

    async def wait(self, phase: Phase) -> None:
        """Wait until the phase is entered or passed."""
        await self._reached[phase].wait()

    def enter(self, phase: Phase) -> None:
        """Enter a phase; those that lie between are passed, and recorded as skipped."""
        if phase is self.phase:
            return  # a request to stop enters its first phase before the sequence gets to it
        self.journal.end(self.phase.label, Ending.CANCELLED)
        *passed, _ = path(self.phase, phase)
        for skipped in passed:
            self.journal.skip(skipped.label)
        self.phase = phase
        if phase is not Phase.STOPPED:  # which has no end to record
            self.journal.begin(phase.label)
        self.journal.changed()
        for reached in (*passed, phase):
            self._reached[reached].set()
        logger.info("phase %s", phase.label)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[trio.CancelScope]:
        """The phase as a block. Its limit is a deadline that the body gives to the scope."""
        self.enter(phase)
        with self.journal.stage(phase.label, trio.CancelScope()) as self.scope:
            yield self.scope
