"""Where the blocking calls of a core run, and what happens when one does not come back.

Theory of operation
-------------------
:meth:`Host.run` makes one call of a core and watches it. A call ends in one of three ways:

* it **returns**, in time or after having been interrupted: its result is taken, whatever
  it is, and the core may be used, or at least closed;
* it is **recalled** because its limit passed, or because the caller was cancelled:
  ``interrupt()`` is called and a short patience begins. A cancelled caller thus waits for
  the core to leave the call, so that nothing is ever freed under a running call. Whoever is
  to know that a limit has passed is told first, and does not wait for the core;
* it **hangs**: the patience passed as well. The host is *poisoned*: no further call is
  made, ``close()`` included, and :class:`~dynamo_trio.errors.EngineHung` is raised, also
  when the caller was being cancelled, since it is worse than a cancellation.

Time in which the whole process was frozen was not spent by the core, and does not count
(:mod:`dynamo_trio.engines.awake`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Generic, TypeVar, cast

import outcome
import trio
from attrs import define, field, frozen

from dynamo_trio.engines.awake import Allowance
from dynamo_trio.errors import EngineDead, EngineHung

T = TypeVar("T")


def _nothing() -> None:
    """Nobody is to know."""


def _failing_at_most(result: outcome.Outcome[T]) -> outcome.Outcome[T]:
    """The code of an engine may fail; to end the process (``sys.exit()``) is not its affair."""
    if not isinstance(result, outcome.Error) or isinstance(result.error, Exception):
        return result
    failure = EngineDead(f"the code of the engine raised {type(result.error).__name__}")
    failure.__cause__ = result.error
    return outcome.Error(failure)


@define(eq=False)
class Call(Generic[T]):
    """One call of a core, while it runs and after."""

    fn: Callable[[], T]
    owed_seconds: Callable[[], float]
    #: Tells that its limit has passed, before it is interrupted.
    on_overdue: Callable[[], object] = _nothing
    token: trio.lowlevel.TrioToken = field(factory=trio.lowlevel.current_trio_token)
    result: outcome.Outcome[T] | None = None
    #: The core was entered. False only if the caller was cancelled before that.
    begun: bool = False
    #: When the call had returned, on Trio's clock, once that was noticed.
    _since: float | None = None
    #: The call has returned and what it owed has been slept. Never set back.
    finished: bool = False
    #: Its limit passed before it finished.
    overdue: bool = False
    # Invariant: once abandoned is set, `returned` will be set: by the loop if the result
    # was there first, else by the thread, which writes the result before it looks.
    abandoned: bool = False
    returned: trio.Event = field(factory=trio.Event)

    def __call__(self) -> None:
        """Make the call. Runs in the thread of the host, so it never raises."""
        self.result = _failing_at_most(outcome.capture(self.fn))
        if self.abandoned:
            with suppress(trio.RunFinishedError):  # the loop is gone and nobody waits
                self.token.run_sync_soon(self.returned.set)

    def abandon(self) -> None:
        """Stop waiting for the thread; ``returned`` tells when it is done."""
        self.abandoned = True
        if self.result is not None:
            self.returned.set()

    async def pay(self) -> None:
        """Sleep what the core owes for this call, then mark it finished.

        Whoever is cancelled in this may go on with it later. An interrupted core owes less.
        """
        if self._since is None:
            self._since = trio.current_time()
        due = self._since + self.owed_seconds()
        if due > trio.current_time():
            await trio.sleep_until(due)
        self.finished = True


@frozen
class Done(Generic[T]):
    """A call that came back, in time or ``overdue``."""

    result: outcome.Outcome[T]
    overdue: bool


#: A shield of so many seconds; the one of a lifecycle ends at the stop's hard deadline too.
Shield = Callable[[float], AbstractContextManager[trio.CancelScope]]


def shielded(limit: float) -> trio.CancelScope:
    """The shield of an engine that belongs to no lifecycle."""
    return trio.move_on_after(max(limit, 0.0), shield=True)


#: What an interrupted call gets to return in any case, in seconds, before it counts as hung.
PATIENCE = 2.0


class Host(ABC):
    """Runs the calls of one core, one after the other."""

    def __init__(self) -> None:
        #: Invariant: set as soon as a call did not come back, and never cleared.
        self.poisoned = False
        #: How a call that was interrupted is waited for: for so many seconds, whatever cancels.
        self.shield: Shield = shielded
        self._call: Call[object] | None = None

    @property
    def inflight(self) -> bool:
        """A call is inside the core; for ever if the host is poisoned."""
        return self._call is not None

    @abstractmethod
    async def _perform(self, call: Call[T]) -> None:
        """Make the call and wait for it; set ``call.begun`` if the core was entered.

        Must not be left before the call is over or :meth:`Call.abandon` was called.
        """

    @abstractmethod
    def relay(self, fn: Callable[[float], None]) -> Callable[[float], None]:
        """``fn`` in a form that the core may call while :meth:`run` runs it."""

    async def run(
        self,
        fn: Callable[[], T],
        *,
        limit: float,
        patience: float,
        cancel_patience: float,
        interrupt: Callable[[], None],
        owed_seconds: Callable[[], float],
        on_overdue: Callable[[], object] = _nothing,
    ) -> Done[T]:
        """Make one call, as described in the head of this module. All times are seconds.

        ``patience`` is what it gets after its ``limit``, ``cancel_patience`` what it gets
        when the caller is cancelled. ``on_overdue`` is called when the limit has passed,
        before the call is interrupted; it must not block and must not raise.

        Raises:
            EngineHung: it did not come back.
        """
        assert not self.inflight, "a core takes one call at a time"
        assert not self.poisoned, "a core that hung takes no further call"
        call = Call(fn, owed_seconds, on_overdue)
        self._call = cast("Call[object]", call)
        try:
            await self._watch(call, limit, patience, cancel_patience, interrupt)
        finally:
            if not self.poisoned:
                self._call = None
        if call.result is None:
            raise EngineHung("the process had no time to begin a call of the engine")
        return Done(call.result, call.overdue)

    async def _watch(
        self,
        call: Call[T],
        limit: float,
        patience: float,
        cancel_patience: float,
        interrupt: Callable[[], None],
    ) -> None:
        wait, allowance = cancel_patience, Allowance(limit)
        try:
            while not (call.finished or allowance.spent):
                with allowance.spending():
                    await self._go_on(call)
            if not call.finished:
                call.overdue, wait = True, patience
                call.on_overdue()
        finally:
            if call.begun and not call.finished:
                await self._recall(call, wait, interrupt)

    async def _go_on(self, call: Call[T]) -> None:
        if call.begun:
            await call.returned.wait()
        else:
            await self._perform(call)
        await call.pay()

    async def _recall(self, call: Call[T], wait: float, interrupt: Callable[[], None]) -> None:
        interrupt()
        began = trio.current_time()
        with self.shield(wait):
            await call.returned.wait()
            await call.pay()
        if wait and not call.finished:  # a stop without time left: no verdict without patience
            with shielded(PATIENCE - (trio.current_time() - began)):
                await call.returned.wait()
                await call.pay()
        if not call.finished:
            self.poisoned = True
            raise EngineHung("the engine did not come back from a call, even when interrupted")


class ThreadHost(Host):
    """Runs each call in a worker thread; for cores that release the GIL.

    The limiter is its own, so that no other user of threads can keep the engine waiting,
    and holds one token, which an abandoned call keeps: nobody can enter a stuck core.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limiter = trio.CapacityLimiter(1)

    async def _perform(self, call: Call[T]) -> None:
        try:
            await trio.to_thread.run_sync(call, limiter=self._limiter, abandon_on_cancel=True)
        except trio.Cancelled:
            # Cancelled before the thread started, or while it ran? The token knows.
            call.begun = call.result is not None or self._limiter.borrowed_tokens > 0
            call.abandon()
            raise
        call.begun = True
        call.abandon()  # the thread is done: from here on nobody waits for it

    def relay(self, fn: Callable[[float], None]) -> Callable[[float], None]:
        """Calls ``fn`` in the Trio thread, soon."""
        token = trio.lowlevel.current_trio_token()
        return lambda value: token.run_sync_soon(fn, value)


class InlineHost(Host):
    """Makes each call in the event loop, which stands still meanwhile.

    For simulated cores under a virtual clock, which cannot see threads.
    """

    async def _perform(self, call: Call[T]) -> None:
        call.begun = True
        call()
        call.abandon()
        await trio.lowlevel.checkpoint()

    def relay(self, fn: Callable[[float], None]) -> Callable[[float], None]:
        """``fn`` itself."""
        return fn
