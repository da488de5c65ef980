"""The steps of a stop that are somebody else's code: none holds the stop up, none breaks it."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from dynamo_trio.errors import StoreUnavailable
from dynamo_trio.lifecycle.beside import wait_beside
from dynamo_trio.lifecycle.record import Record, counted
from dynamo_trio.lifecycle.report import summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from dynamo_trio.lifecycle.admission import Admission
    from dynamo_trio.lifecycle.hooks import Hook

logger = logging.getLogger("dynamo_trio.lifecycle")

#: A step that ends so many seconds after its limit is told of; less is the loop's own delay.
OVERRUN = 0.1
#: Whose callback the current task belongs to, or was started by.
_callback_of: ContextVar[Steps | None] = ContextVar("callback of", default=None)


@attrs.define(eq=False)
class Steps:
    """Runs them, and records how each of them went."""

    _record: Record
    #: For those that may not end when they must; left last.
    beside: trio.Nursery = attrs.field(init=False)

    @property
    def is_calling(self) -> bool:
        """Is this task one of a callback, which the stop waits for?"""
        return _callback_of.get() is self

    async def call(
        self, name: str, patience: trio.CancelScope, hook: Hook, passed: Callable[[], bool]
    ) -> None:
        """Run a callback, unless it is ``passed``, and wait for it while ``patience`` lasts."""
        step = partial(self._call, name, hook, passed)
        within = _callback_of.set(self)
        try:
            await wait_beside(self.beside, name, step, patience)
        finally:
            _callback_of.reset(within)

    async def _call(
        self, name: str, hook: Hook, passed: Callable[[], bool], limit: trio.CancelScope
    ) -> None:
        if passed():  # asked here: much may happen until a task has its turn
            self._record.steps.skip(name)
        else:
            await self.attempt(name, limit, hook)

    async def insist(
        self, name: str, patience: AbstractContextManager[trio.CancelScope], job: Hook
    ) -> None:
        """Run what is done even while everything is cancelled; wait as long as ``patience``."""
        step = partial(self._limited, name, job)
        await wait_beside(self.beside, name, step, patience, insist=True)

    async def _limited(self, name: str, job: Hook, limit: trio.CancelScope) -> None:
        await self.attempt(name, limit, job)

    async def attempt(
        self, name: str, block: AbstractContextManager[trio.CancelScope], job: Hook
    ) -> None:
        """Run one step within ``block``, which is its limit. A failure is logged and passed.

        ``sys.exit()`` in a callback is such a failure too: a stop has an exit code of its own.

        The ``except`` stands outside the limit: cleanup that raises while the limit cancels
        it comes as a group of both, of which the limit has taken its part by then.
        """
        began = trio.current_time()
        try:
            with self._record.steps.stage(name, block) as scope:
                await job()
            if scope.cancelled_caught:
                self._log_cut(name, scope.deadline, began)
            else:
                _log_overrun(name, scope.deadline, began)
        except* trio.Cancelled:
            raise  # from outside
        except* StoreUnavailable as group:  # the world's doing: where in the code does not matter
            logger.error("%s failed; the stop goes on: %s", name, summary(group))
        except* BaseException as group:
            logger.error("%s failed; the stop goes on", name, exc_info=group)

    def _log_cut(self, name: str, deadline: float, began: float) -> None:
        why = "a fatal error"
        if trio.current_time() >= deadline:
            why = f"its limit of {max(0.0, round(deadline - began, 2)):g} s"
        logger.warning("%s was ended by %s; %s left", name, why, counted(self._inside(), "request"))

    def _inside(self) -> tuple[Admission, ...]:
        """Who is there, as the process's own clients see it."""
        inside = (gate.admissions() for gate in self._record.gates)
        return next(filter(None, inside), ())


def _log_overrun(name: str, deadline: float, began: float) -> None:
    """Say of a step that ran to its end that its limit could not end it."""
    now = trio.current_time()
    if now > deadline + OVERRUN:
        logger.warning(
            "%s took %.1f s instead of at most %.1f s: it blocked the event loop, or was shielded",
            *(name, now - began, deadline - began),
        )
