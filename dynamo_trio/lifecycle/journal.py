"""The record of a stop: which phase and which step took how long, and how it ended."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.lifecycle.phases import Ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@attrs.frozen
class Stage:
    """One phase, or one step within a phase, as far as it has got."""

    name: str
    #: Seconds after the signal.
    began: float
    #: None while it runs.
    seconds: float | None = None
    ending: Ending | None = None
    #: What there is to say of it in words.
    detail: str = ""


@attrs.define(eq=False)
class Journal:
    """The stages of one stop, in the order in which they began."""

    #: Seconds since the signal.
    elapsed: Callable[[], float]
    #: The scope around all stages; one that its deadline ended has timed out.
    budget: trio.CancelScope
    changed: Callable[[], object] = lambda: None
    _stages: list[Stage] = attrs.field(factory=list)
    # Invariant: the index in _stages of every stage that has begun and not ended.
    _open: dict[str, int] = attrs.field(factory=dict)
    # The scope of every stage that runs as a block.
    _scopes: dict[str, trio.CancelScope] = attrs.field(factory=dict)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._stages)

    def begin(self, name: str) -> None:
        """A stage begins, unless it already has."""
        if name not in self._open:
            self._open[name] = len(self._stages)
            self._stages.append(Stage(name, self.elapsed()))
            self.changed()

    def end(self, name: str, ending: Ending) -> None:
        """A stage ends. The first word stands: it is that of whoever ended it."""
        index = self._open.pop(name, None)
        if index is not None:
            stage = self._stages[index]
            seconds = self.elapsed() - stage.began
            self._stages[index] = attrs.evolve(stage, seconds=seconds, ending=ending)
            self.changed()

    def explain(self, name: str, detail: str) -> None:
        """Say something of a stage that runs; the last word stands."""
        index = self._open.get(name)
        if index is not None:
            self._stages[index] = attrs.evolve(self._stages[index], detail=detail)
            self.changed()

    def skip(self, name: str) -> None:
        """A stage is passed without being begun."""
        self._stages.append(Stage(name, self.elapsed(), 0.0, Ending.SKIPPED))
        self.changed()

    @property
    def running(self) -> tuple[str, ...]:
        """The names of the stages that have begun and not ended."""
        return tuple(self._open)

    @property
    def deadline(self) -> float:
        """When all blocks that run now are over, by their own limits; inf if there are none."""
        return max((scope.deadline for scope in self._scopes.values()), default=math.inf)

    @contextmanager
    def stage(
        self, name: str, block: AbstractContextManager[trio.CancelScope]
    ) -> Iterator[trio.CancelScope]:
        """Run the body in ``block`` and record how it ended.

        *Completed* means that the body ran to its end, which is not the same as that
        nothing was cancelled: a scope may catch a cancellation that came too late to matter.
        """
        self.begin(name)
        ending, deadline = None, math.inf
        try:
            with block as scope:
                self._scopes[name] = scope
                try:
                    yield scope
                    ending = Ending.COMPLETED
                finally:
                    deadline = scope.deadline
        except BaseException as exc:
            ending = Ending.FAILED if holds_failure(exc) else None
            raise
        finally:
            self._scopes.pop(name, None)
            self.end(name, ending or self._cut_short(deadline))

    def _cut_short(self, deadline: float) -> Ending:
        over = trio.current_time() >= min(deadline, self.budget.deadline)
        return Ending.TIMED_OUT if over else Ending.CANCELLED


def holds_failure(exc: BaseException) -> bool:
    """Is this something else than a cancellation, or a group with such a thing among them?"""
    if isinstance(exc, BaseExceptionGroup):
        return exc.split(trio.Cancelled)[1] is not None
    return not isinstance(exc, trio.Cancelled)
