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

Whatever a step raises ends the engine, and so do a step over its limit and a health check
that does not pass (:mod:`dynamo_trio.engines.health`). Who holds the engine is told first,
and can thus shut the doors, then every open request, all *before* the failure is raised,
where it cancels the body. Nobody waits to be told until a call that hangs was interrupted:
an engine fails at the limit, even if the call then comes back. What concerns one request
alone reaches that request alone.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from dynamo_trio import errors
from dynamo_trio.engines.core_life import CoreLife
from dynamo_trio.engines.health import Checkups
from dynamo_trio.engines.hosts import Host, Shield, ThreadHost, shielded
from dynamo_trio.engines.open_requests import OpenRequest, OpenRequests
from dynamo_trio.engines.pace import Pace
from dynamo_trio.engines.protocol import CoreInfo, Delta, KvEvent, Request, Stats, StepCore
from dynamo_trio.engines.states import Limits, State
from dynamo_trio.engines.stream import DeltaStream
from dynamo_trio.engines.turn import Turn, check, iterate, settled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from dynamo_trio.engines.open_requests import Sink

    StepListener = Callable[[Sequence[Delta]], None]
    KvListener = Callable[[Sequence[KvEvent]], None]

T = TypeVar("T")
log = logging.getLogger(__name__)


def _nothing(*_: object) -> None:
    """Do nothing."""


class Engine:
    """A loaded core that serves requests. Made by :func:`open_engine`."""

    def __init__(
        self,
        core: StepCore,
        host: Host,
        limits: Limits,
        on_failed: Callable[[errors.EngineShutdown], object] = _nothing,
    ) -> None:
        self._core = core
        self._host = host
        self._limits = limits
        self._life = CoreLife(core, host, limits)
        self._on_failed = on_failed
        self._checkups = Checkups(limits.check)
        self._state = State.LOADING
        # Invariant: written once, together with the state that it leads to.
        self._failure: errors.EngineShutdown | None = None
        # Around the loop: what ends a call that is stuck, and the loop with it.
        self._turning = trio.CancelScope()
        # Invariant: holds every request that is still to get its last delta.
        self._open = OpenRequests()
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
        self._kv_listeners: list[KvListener] = []
        self._stats = Stats()
        #: Turns of the loop so far.
        self.step_count = 0
        #: Duration of the last turn, pacing included.
        self.last_step_seconds = 0.0
        self._pace = Pace()
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
    def seconds_per_token(self) -> float | None:
        """Seconds between two tokens of one request, as measured lately; None: not measured yet."""
        return self._pace.seconds_per_token

    @property
    def open_requests(self) -> int:
        """Requests that have not got their last delta yet."""
        return len(self._open)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that are still to be computed, of those that wait as well."""
        return self._open.prompt_tokens

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
        entry = self._open.enter(request, sink)
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

    def on_kv_events(self, listener: KvListener) -> Callable[[], None]:
        """Call ``listener`` with what a step changed in the KV cache, if it changed anything.

        Comes after the step listeners; rules and result are those of :meth:`on_step`. Only a
        core whose ``info.kv_events`` is true tells of its cache, and whoever wants all of it
        listens before the first request.
        """
        self._kv_listeners.append(listener)
        return partial(self._kv_listeners.remove, listener)

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

    async def check(self) -> None:
        """Wait until the engine has shown, between two steps, that it is well.

        The core is asked if its ``info.health_check`` says so. An engine that does not answer
        within ``limits.check`` counts as hung from then on, and ends.

        Raises:
            EngineClosed: it was closed, and no longer needs to be well.
            EngineDead, EngineHung: it has failed, now or before.
        """
        self._refuse_if_over()
        answered = self._checkups.ask()
        self._wake.set()
        try:
            await self._checkups.wait(answered)
        except errors.EngineHung as exc:
            self._fail(exc)
            self._turning.cancel("the engine hangs")
        self._refuse_if_over()

    def _refuse_if_over(self) -> None:
        if self._state is not State.DRAINING:
            self._refuse_unless_ready()

    def _leave(self, request_id: str, entry: OpenRequest) -> None:
        if not self._open.leave(request_id, entry):
            return
        if self._adds.pop(request_id, None) is None:
            self._aborts.append(request_id)
        self._wake.set()

    # --- the loop -------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            with _failing_as_dead(), self._turning:
                await self._loop()
        except errors.EngineShutdown as exc:
            if not self._fail(exc) and exc is not self._failure:
                log.warning("%s", exc)  # what follows from a failure is no other one
        finally:
            self._end(errors.EngineClosed("the engine was closed"))
        if self._failure is not None:
            raise self._failure

    async def _loop(self) -> None:
        while await self._wait_for_work():
            if self._checkups.wanted:
                await self._check_core()
            if self._has_work:
                await self._turn()

    async def _wait_for_work(self) -> bool:
        """Returns False when the engine is being left."""
        while not (self._leaving or self._has_work or self._checkups.wanted):
            self._drained.unpark_all()
            self._wake = trio.Event()
            await self._wake.wait()
        return not self._leaving

    @property
    def _has_work(self) -> bool:
        return bool(self._adds or self._aborts or self._core_busy)

    async def _check_core(self) -> None:
        """Ask the core, if it can be asked, whether it is well."""
        if self.info.health_check:
            # Who waits for the answer has a limit too, but a stop lets nobody wait for it.
            await self._enter(
                partial(check, self._core),
                self._limits.check,
                self._limits.interrupt,
                self._checkups.unanswered(),
            )
        self._checkups.answer()

    async def _turn(self) -> None:
        adds, self._adds = list(self._adds.values()), {}
        aborts, self._aborts = self._aborts, []
        self.step_started_at = began = trio.current_time()
        limit = self._limits.step
        try:
            turn = await self._enter(
                partial(iterate, self._core, adds, aborts),
                limit,
                limit,
                errors.EngineHung(f"a step took longer than {limit:g} s"),
            )
        finally:
            self.step_started_at = None
            self.last_step_seconds = trio.current_time() - began
            self.step_count += 1
        self._settle(turn)

    async def _enter(
        self, fn: Callable[[], T], limit: float, cancel_patience: float, late: errors.EngineHung
    ) -> T:
        """Make one call of the core; at its limit the engine has failed, by ``late``."""
        done = await self._host.run(
            fn,
            limit=limit,
            patience=self._limits.interrupt,
            cancel_patience=cancel_patience,
            interrupt=self._core.interrupt,
            owed_seconds=self._core.owed_seconds,
            on_overdue=partial(self._fail, late),
        )
        result = done.result.unwrap()
        if self._failure is not None:
            raise self._failure  # it came back too late: everybody has been told
        return result

    def _settle(self, turn: Turn) -> None:
        self._stats = turn.stats
        self._core_busy = turn.has_work
        self._measure(turn)
        for delta in turn.deltas:
            self._deliver(delta)
        for listener in self._listeners:
            listener(turn.deltas)
        if turn.kv_events:
            for kv_listener in self._kv_listeners:
                kv_listener(turn.kv_events)

    def _measure(self, turn: Turn) -> None:
        counts = self._open.later_tokens(turn.deltas)
        waiting = bool(counts) or self._open.any_begun()
        self._pace.note(self.last_step_seconds, counts, waiting=waiting)

    def _deliver(self, delta: Delta) -> None:
        if delta.request_id in self._adds:
            return  # its reader has left, and come back under the same id
        if (entry := self._open.take(delta)) is not None:
            self._give(entry, delta)

    def _give(self, entry: OpenRequest, delta: Delta) -> None:
        try:
            entry.sink(delta)
        except Exception:
            log.exception("the sink of request %s failed; the request is dropped", delta.request_id)
            self._leave(delta.request_id, entry)

    def _fail(self, cause: errors.EngineShutdown) -> bool:
        """Say that the engine has failed, to who holds it and then to its requests, once.

        False: it had failed before.
        """
        if self._failure is not None:
            return False
        self._failure = cause
        self._state = State.HUNG if isinstance(cause, errors.EngineHung) else State.DEAD
        self._on_failed(cause)
        self._end(cause)
        return True

    def _end(self, error: errors.EngineShutdown) -> None:
        """Tell every open request that it gets nothing more."""
        if self._state in (State.READY, State.DRAINING):
            self._state = State.CLOSED
        self._over = True
        self._adds.clear()
        self._aborts.clear()
        for request_id, entry in self._open.pop_all():
            again = type(error)(str(error))  # one exception per reader: each adds its traceback
            self._give(entry, Delta(request_id, (), "error", again))
        self._checkups.answer()
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
            await self._life.load(progress)
        except errors.EngineHung:
            self._state = State.HUNG
            raise
        self._state = State.READY

    def _leave_loop(self) -> None:
        """Nobody wants another step."""
        if self._state in (State.READY, State.DRAINING):
            self._state = State.CLOSED
        self._leaving = True
        self._wake.set()

    def _recall_scope(
        self, scope: Shield, limit: float
    ) -> AbstractContextManager[trio.CancelScope]:
        """A call of an engine that has failed gets no patience but to leave when interrupted."""
        return scope(min(limit, self._limits.interrupt) if self._state.failed else limit)

    async def _close(self, scope: Shield) -> None:
        limit = self._limits.close_failed if self._state.failed else self._limits.close
        try:
            await self._life.close(scope, limit)
        except errors.EngineHung:
            self._state = State.HUNG
            raise


@contextmanager
def _failing_as_dead() -> Iterator[None]:
    """Whatever goes wrong in the loop means that the engine is dead, if it does not hang."""
    try:
        yield
    except errors.EngineShutdown:
        raise
    except Exception as exc:
        raise errors.EngineDead(f"the engine died of {type(exc).__name__}") from exc


@asynccontextmanager
async def open_engine(
    core: StepCore,
    *,
    host: Host | None = None,
    limits: Limits | None = None,
    close_scope: Shield = shielded,
    recall_scope: Shield = shielded,
    progress: Callable[[float], None] = _nothing,
    on_failed: Callable[[errors.EngineShutdown], object] = _nothing,
) -> AsyncIterator[Engine]:
    """Load ``core``, serve requests inside the block, and close the core at its end.

    ``host`` defaults to a thread. ``progress`` is called in the Trio thread with the
    fraction loaded, 0..1. Leaving the block waits for the step that runs (interrupted,
    since nobody wants it any more), ends what is still open with ``EngineClosed``, then
    closes the core within ``close_scope(limits.close)``. A core that hung is not closed.
    A call that was interrupted is waited for within ``recall_scope(...)``. ``on_failed`` is
    called, once, when the loaded engine dies or hangs, with what is then raised, and before
    any request hears of it; it must not block and must not raise.

    Raises:
        StartupError: loading failed.
        EngineDead, EngineHung: as members of an exception group, from the block's nursery;
            bare when it happened while loading or closing.
    """
    host = host or ThreadHost()
    engine = Engine(core, host, limits or Limits(), on_failed)
    host.shield = partial(engine._recall_scope, recall_scope)
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
