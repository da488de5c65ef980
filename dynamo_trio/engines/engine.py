"""The engine: one task that steps a core for all requests, and ends it exactly once.

Theory of operation
-------------------
One *turn* of the loop is one call of the core through the host: abort what was left, add
what came, one step, statistics. Between two turns nothing runs in the core, so a turn is
the *step boundary* at which a request enters or leaves it. Requests talk to the loop
through two queues; entering and leaving are synchronous and never wait for the core.

A turn's deltas are given to the sinks of their requests in one go, without a checkpoint
in between, and then the step listeners are told. A listener can thus send what a
whole step produced as one message.

Whatever a step raises ends the engine, and so does a step over its limit. Every open
request is told the cause *before* the loop task raises it into the nursery, where it
cancels the body. What concerns one request alone reaches that request alone.
"""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import trio
from attrs import define, frozen

from dynamo_trio import errors
from dynamo_trio.engines.hosts import Host, Shield, ThreadHost, shielded
from dynamo_trio.engines.protocol import CoreInfo, Delta, Request, Stats, StepCore
from dynamo_trio.engines.stream import DeltaStream
from dynamo_trio.engines.turn import Turn, iterate, settled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    Sink = Callable[[Delta], None]
    StepListener = Callable[[Sequence[Delta]], None]
    #: Given a limit in seconds, a shielded cancel scope; ``lifecycle.cleanup`` is one.

log = logging.getLogger(__name__)


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


@frozen(kw_only=True)
class Limits:
    """How long the calls of a core may take, in seconds.

    ``step`` is DYN_TRIO_ENGINE_STEP_TIMEOUT_SECS. ``interrupt`` is what a call gets to
    return after it was interrupted; past it the engine counts as hung.
    """

    step: float = 30.0
    load: float = 600.0
    close: float = 30.0
    interrupt: float = 5.0


def _nothing(*_: object) -> None:
    """Do nothing."""


@define(eq=False)
class _Open:
    """A request between its entering and its last delta."""

    sink: Sink
    #: Tokens that it may still get.
    left: int


class Engine:
    """A loaded core that serves requests. Made by :func:`open_engine`."""

    def __init__(self, core: StepCore, host: Host, limits: Limits) -> None:
        self._core = core
        self._host = host
        self._limits = limits
        self._state = State.LOADING
        # Invariant: holds every request that is still to get its last delta.
        self._open: dict[str, _Open] = {}
        # Invariant: the core knows none of these yet; each is also in _open.
        self._adds: dict[str, Request] = {}
        # Invariant: the core may know these; none of their deltas is wanted any more.
        self._aborts: list[str] = []
        self._core_busy = False
        self._leaving = False
        self._over = False
        self._wake = trio.Event()
        self._drained = trio.lowlevel.ParkingLot()
        self._listeners: list[StepListener] = []
        self._close_begun = False
        self._core_closed = False
        self._stats = Stats()
        #: Turns of the loop so far.
        self.step_count = 0
        #: Duration of the last turn, pacing included.
        self.last_step_seconds = 0.0
        #: When the running turn began, on Trio's clock; None between turns.
        self.step_started_at: float | None = None

    @property
    def state(self) -> State:
        """Where in its life the engine is."""
        return self._state

    @property
    def info(self) -> CoreInfo:
        """What the core can do."""
        return self._core.info

    @property
    def stats(self) -> Stats:
        """The load of the core after its last step."""
        return self._stats

    @property
    def open_requests(self) -> int:
        """Requests that have not got their last delta yet."""
        return len(self._open)

    def step_age(self) -> float:
        """Seconds since the running step began; 0 between steps. Above the limit: not live."""
        return 0.0 if self.step_started_at is None else trio.current_time() - self.step_started_at

    # --- requests -------------------------------------------------------------------

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[DeltaStream]:
        """Generate: ``async with engine.open(request) as deltas: async for delta in deltas``.

        Leaving the block drops the request: it is aborted at the next step boundary, and
        the block does not wait for that.

        Raises:
            RequestRejected: it does not fit the context, or has an unknown token. Rules
                that only the core can check are raised by the stream.
            EngineClosed: the engine drains or is closed.
            EngineDead, EngineHung: the engine has failed.
        """
        await trio.lowlevel.checkpoint()
        stream = DeltaStream(request)
        with self.attach(request, stream.push) as stream.request:
            try:
                yield stream
            finally:
                stream.close()

    @contextmanager
    def attach(self, request: Request, sink: Sink) -> Iterator[Request]:
        """Like :meth:`open`, but each delta is given to ``sink``, from the engine's own task.

        ``sink`` must not block and must not raise. An error arrives as a delta whose
        ``finish_reason`` is ``error``. Yields the request with ``max_tokens`` settled.
        """
        request = self._settled(request)
        entry = _Open(sink, request.limit)
        self._open[request.request_id] = entry
        self._adds[request.request_id] = request
        self._wake.set()
        try:
            yield request
        finally:
            self._leave(request.request_id, entry)

    def on_step(self, listener: StepListener) -> Callable[[], None]:
        """Call ``listener`` with all deltas of a step, after the sinks got theirs.

        Returns a function that ends it. The listener must not block and must not raise.
        """
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def _settled(self, request: Request) -> Request:
        self._refuse_unless_ready()
        if request.request_id in self._open:
            raise errors.RequestRejected(f"request id {request.request_id!r} is in use")
        return settled(request, self.info)

    def _refuse_unless_ready(self) -> None:
        match self._state:
            case State.READY:
                return
            case State.DEAD:
                raise errors.EngineDead("the engine has died")
            case State.HUNG:
                raise errors.EngineHung("the engine hangs")
            case state:
                raise errors.EngineClosed(f"the engine is {state}")

    def _leave(self, request_id: str, entry: _Open) -> None:
        if self._open.get(request_id) is not entry:
            return  # it has had its last delta
        del self._open[request_id]
        if self._adds.pop(request_id, None) is None:
            self._aborts.append(request_id)
        self._wake.set()

    # --- the loop -------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while await self._wait_for_work():
                await self._turn()
        except errors.EngineHung as exc:
            self._fail(State.HUNG, exc)
            raise
        except Exception as exc:
            self._fail(State.DEAD, exc)
            raise
        finally:
            self._end(errors.EngineClosed("the engine was closed"))

    async def _wait_for_work(self) -> bool:
        """Returns False when the engine is being left."""
        while not (self._leaving or self._adds or self._aborts or self._core_busy):
            self._drained.unpark_all()
            self._wake = trio.Event()
            await self._wake.wait()
        return not self._leaving

    async def _turn(self) -> None:
        adds, self._adds = list(self._adds.values()), {}
        aborts, self._aborts = self._aborts, []
        self.step_started_at = began = trio.current_time()
        try:
            done = await self._host.run(
                partial(iterate, self._core, adds, aborts),
                limit=self._limits.step,
                patience=self._limits.interrupt,
                cancel_patience=self._limits.step,
                interrupt=self._core.interrupt,
                owed_seconds=self._core.owed_seconds,
            )
        finally:
            self.step_started_at = None
            self.last_step_seconds = trio.current_time() - began
            self.step_count += 1
        try:
            self._settle(done.result.unwrap())
        except errors.EngineShutdown:
            raise
        except Exception as exc:
            raise errors.EngineDead(f"the engine died of {type(exc).__name__}") from exc
        if done.overdue:
            raise errors.EngineHung(f"a step took longer than {self._limits.step:g} s")

    def _settle(self, turn: Turn) -> None:
        self._stats = turn.stats
        self._core_busy = turn.has_work
        for delta in turn.deltas:
            self._deliver(delta)
        for listener in self._listeners:
            listener(turn.deltas)

    def _deliver(self, delta: Delta) -> None:
        entry = self._open.get(delta.request_id)
        if entry is None or delta.request_id in self._adds:
            return  # its reader has left, and perhaps come back under the same id
        entry.left -= len(delta.token_ids)
        if entry.left < 0:
            raise errors.EngineDead("the engine generated more tokens than were asked for")
        if delta.finish_reason is not None:
            del self._open[delta.request_id]
        self._give(entry, delta)

    def _give(self, entry: _Open, delta: Delta) -> None:
        try:
            entry.sink(delta)
        except Exception:
            log.exception("the sink of request %s failed; the request is dropped", delta.request_id)
            self._leave(delta.request_id, entry)

    def _fail(self, state: State, cause: Exception) -> None:
        self._state = state
        kind = type(cause) if isinstance(cause, errors.EngineShutdown) else errors.EngineDead
        self._end(kind(str(cause)))

    def _end(self, error: errors.EngineShutdown) -> None:
        """Tell every open request that it gets nothing more."""
        if self._state in (State.READY, State.DRAINING):
            self._state = State.CLOSED
        self._over = True
        self._adds.clear()
        self._aborts.clear()
        open_, self._open = self._open, {}
        for request_id, entry in open_.items():
            again = type(error)(str(error))  # one exception per reader: each adds its traceback
            self._give(entry, Delta(request_id, (), "error", again))
        self._drained.unpark_all()

    # --- the life of the core -------------------------------------------------------

    async def drain(self) -> None:
        """Take no new request, and wait until none is left, in the core neither."""
        if self._state is State.READY:
            self._state = State.DRAINING
        await trio.lowlevel.checkpoint()
        while not self._over and self._busy():
            await self._drained.park()

    def _busy(self) -> bool:
        between_turns = self.step_started_at is None
        return bool(self._open or self._aborts or self._core_busy) or not between_turns

    async def _load(self, progress: Callable[[float], None]) -> None:
        try:
            done = await self._host.run(
                partial(self._core.load, self._host.relay(progress)),
                limit=self._limits.load,
                patience=self._limits.interrupt,
                cancel_patience=self._limits.interrupt,
                interrupt=self._core.interrupt,
                owed_seconds=self._core.owed_seconds,
            )
        except errors.EngineHung:
            self._state = State.HUNG
            raise
        if done.overdue:
            raise errors.LoadError(f"the model did not load within {self._limits.load:g} s")
        try:
            done.result.unwrap()
        except errors.StartupError:
            raise
        except Exception as exc:
            raise errors.LoadError(f"the model could not be loaded: {exc}") from exc
        self._state = State.READY

    def _leave_loop(self) -> None:
        """Nobody wants another step."""
        if self._state in (State.READY, State.DRAINING):
            self._state = State.CLOSED
        self._leaving = True
        self._wake.set()

    async def _close(self, scope: Shield) -> None:
        """Free the core: once, and only if no call is still inside it."""
        if self._close_begun or self._host.poisoned:
            return
        self._close_begun = True
        with scope(self._limits.close):
            await self._close_core()
        if not self._core_closed:
            log.warning("no time was left to close the engine")

    async def _close_core(self) -> None:
        try:
            done = await self._host.run(
                self._core.close,
                limit=math.inf,  # the scope around it limits it
                patience=0.0,
                cancel_patience=0.0,
                interrupt=_nothing,
                owed_seconds=self._core.owed_seconds,
            )
        except errors.EngineHung:
            self._state = State.HUNG
            raise errors.EngineHung("the engine did not close in time") from None
        self._core_closed = True
        try:
            done.result.unwrap()
        except Exception as exc:
            raise errors.EngineDead("the engine failed while it was closed") from exc


@asynccontextmanager
async def open_engine(
    core: StepCore,
    *,
    host: Host | None = None,
    limits: Limits | None = None,
    close_scope: Shield = shielded,
    recall_scope: Shield = shielded,
    progress: Callable[[float], None] = _nothing,
) -> AsyncIterator[Engine]:
    """Load ``core``, serve requests inside the block, and close the core at its end.

    ``host`` defaults to a thread. ``progress`` is called in the Trio thread with the
    fraction loaded, 0..1. Leaving the block waits for the step that runs (interrupted,
    since nobody wants it any more), ends what is still open with ``EngineClosed``, then
    closes the core within ``close_scope(limits.close)``. A core that hung is not closed.
    A call that was interrupted is waited for within ``recall_scope(...)``.

    Raises:
        StartupError: loading failed.
        EngineDead, EngineHung: as members of an exception group, from the block's nursery;
            bare when it happened while loading or closing.
    """
    host = host or ThreadHost()
    host.shield = recall_scope
    engine = Engine(core, host, limits or Limits())
    try:
        await engine._load(progress)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine._run, name="engine loop")
            try:
                yield engine
            finally:
                engine._leave_loop()
                # Interrupts the step that runs, and waits for it under the shield, no longer.
                nursery.cancel_scope.cancel("the engine is left")
    finally:
        await engine._close(close_scope)
