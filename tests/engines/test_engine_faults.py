"""An engine that fails: who is told, in which order, and that nothing is freed under a call.

Virtual time and an inline host give exact deadlines; the same faults on a thread host
really block, and there the limits are short and only order and counts are asserted.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from dynamo_trio.engines import (
    Delta,
    Engine,
    InlineHost,
    Limits,
    Request,
    State,
    ThreadHost,
    open_engine,
)
from dynamo_trio.engines.faults import Fault
from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.errors import DynamoException, EngineDead, EngineHung, LoadError
from dynamo_trio.testing.cores import WatchedCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

SHORT = Limits(step=0.1, load=0.1, close=0.1, interrupt=0.1)


def request(name: str = "r", max_tokens: int = 100) -> Request:
    return Request(request_id=name, token_ids=(1, 2, 3), max_tokens=max_tokens, ignore_eos=True)


@attrs.define(eq=False)
class Reader:
    """Reads one request to its end, in its own task."""

    name: str
    tokens: int = 0
    error: DynamoException | None = None

    async def read(self, engine: Engine) -> None:
        try:
            async with engine.open(request(self.name)) as deltas:
                async for delta in deltas:
                    self.tokens += len(delta.token_ids)
        except DynamoException as exc:
            self.error = exc


@contextmanager
def sim(*faults: Fault, virtual: bool, itl_ms: float = 100) -> Iterator[WatchedCore]:
    inner = SimCore(SimSettings(itl_ms=itl_ms, virtual=virtual), faults=faults)
    core = WatchedCore(inner)
    try:
        yield core
    finally:
        inner.faults.release()
    core.check()


@asynccontextmanager
async def outliving(core: WatchedCore, *readers: Reader) -> AsyncIterator[Engine]:
    """An engine, and readers in a nursery around it, which its end therefore does not cancel."""
    async with trio.open_nursery() as nursery:
        async with open_engine(core, host=InlineHost()) as engine:
            for reader in readers:
                nursery.start_soon(reader.read, engine)
            await trio.testing.wait_all_tasks_blocked()
            yield engine


# --- a step raises ------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.DIE, Fault.RAISE])
async def test_a_step_that_raises_tells_every_stream_then_leaves_the_nursery(
    fault: Fault, autojump_clock: MockClock
) -> None:
    readers = [Reader("a"), Reader("b")]
    with sim(virtual=True) as core:
        with pytest.RaisesGroup(pytest.RaisesGroup(EngineDead)):
            async with outliving(core, *readers) as engine:
                core.core.arm(fault, after=2)  # type: ignore[attr-defined]  # sim
                await trio.sleep_forever()
        assert core.closes == 1
    assert engine.state is State.DEAD
    assert [type(reader.error) for reader in readers] == [EngineDead, EngineDead]
    assert readers[0].error is not readers[1].error
    assert readers[0].tokens == 4  # of two steps before the fault was armed and two after
    late = Reader("late")
    await late.read(engine)
    assert type(late.error) is EngineDead


async def test_the_cause_of_death_is_kept(autojump_clock: MockClock) -> None:
    with sim(Fault.RAISE, virtual=True) as core:
        with pytest.RaisesGroup(
            pytest.RaisesExc(EngineDead, check=lambda exc: type(exc.__cause__) is RuntimeError)
        ):
            async with open_engine(core, host=InlineHost()) as engine:
                with engine.attach(request(), lambda _: None):
                    await trio.sleep_forever()


async def test_readers_hear_the_cause_before_the_body_is_cancelled(
    autojump_clock: MockClock,
) -> None:
    heard: list[Delta] = []
    with sim(Fault.DIE, virtual=True) as core:
        with pytest.RaisesGroup(EngineDead):
            async with open_engine(core, host=InlineHost()) as engine:
                with engine.attach(request(), heard.append):
                    try:
                        await trio.sleep_forever()
                    finally:
                        assert [type(delta.error) for delta in heard] == [EngineDead]


async def test_more_tokens_than_asked_for_are_a_dead_engine(autojump_clock: MockClock) -> None:
    class Generous(SimCore):
        def step(self) -> list[Delta]:
            return [Delta(delta.request_id, (1,) * 50) for delta in super().step()]

    with pytest.RaisesGroup(EngineDead):
        async with open_engine(Generous(), host=InlineHost()) as engine:
            with engine.attach(request(max_tokens=40), lambda _: None):
                await trio.sleep_forever()


# --- a step does not return ---------------------------------------------------------


async def test_a_hang_is_noticed_at_the_deadline_and_the_core_is_never_closed(
    autojump_clock: MockClock,
) -> None:
    reader = Reader("a")
    with sim(Fault.HANG, virtual=True) as core:
        begin = trio.current_time()
        with pytest.RaisesGroup(pytest.RaisesGroup(EngineHung)):
            async with outliving(core, reader) as engine:
                await trio.sleep_forever()
        assert trio.current_time() - begin == pytest.approx(30 + 5)
        assert core.closes == 0
        assert core.interrupts == 1
    assert engine.state is State.HUNG
    assert type(reader.error) is EngineHung
    late = Reader("late")
    await late.read(engine)
    assert type(late.error) is EngineHung
    await engine.drain()


async def test_a_stall_ends_with_the_interrupt_and_comes_too_late(
    autojump_clock: MockClock,
) -> None:
    reader = Reader("a")
    with sim(Fault.STALL, virtual=True) as core:
        begin = trio.current_time()
        with pytest.RaisesGroup(pytest.RaisesGroup(pytest.RaisesExc(EngineHung, match="30 s"))):
            async with outliving(core, reader) as engine:
                await trio.sleep_forever()
        assert trio.current_time() - begin == pytest.approx(30)
        assert (core.steps, core.interrupts, core.closes) == (1, 1, 1)
    assert engine.state is State.HUNG
    assert reader.tokens == 0
    assert type(reader.error) is EngineHung


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.STALL])
async def test_everybody_is_told_at_the_limit_and_the_core_then(
    fault: Fault, autojump_clock: MockClock
) -> None:
    told: list[tuple[str, int, int]] = []

    def tell(who: str) -> None:
        told.append((who, round(trio.current_time() - begin), core.interrupts))

    with sim(fault, virtual=True) as core:
        begin = trio.current_time()
        with pytest.RaisesGroup(pytest.RaisesExc(EngineHung, match="a step took longer than 30 s")):
            async with open_engine(
                core, host=InlineHost(), on_failed=lambda _: tell("holder")
            ) as engine:
                with engine.attach(request(), lambda _: tell("stream")):
                    await trio.sleep_forever()
    assert told == [("holder", 30, 0), ("stream", 30, 0)]


async def test_what_a_step_raises_too_late_is_logged_and_no_second_failure(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(SimCore):
        def step(self) -> list[Delta]:
            super().step()
            raise RuntimeError("odd")

    told: list[Exception] = []
    slow = WatchedCore(Slow(SimSettings(virtual=True), faults=[Fault.STALL]))
    with pytest.RaisesGroup(pytest.RaisesExc(EngineHung, match="longer than 30 s")):
        async with open_engine(slow, host=InlineHost(), on_failed=told.append) as engine:
            with engine.attach(request(), lambda _: None):
                await trio.sleep_forever()
    assert [type(failure) for failure in told] == [EngineHung]
    assert "the engine died of RuntimeError" in caplog.text
    assert slow.closes == 1


def test_after_a_freeze_the_step_gets_its_limit_again() -> None:
    clock = MockClock(autojump_threshold=0)

    async def scenario() -> int:
        reader = Reader("a")
        with sim(virtual=True, itl_ms=3000) as core:
            async with open_engine(core, host=InlineHost()) as engine:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reader.read, engine)
                    await trio.sleep(4)  # inside the second step
                    clock.jump(1000)
        assert engine.state is State.CLOSED
        assert reader.error is None
        return reader.tokens

    assert trio.run(scenario, clock=clock) == 100


async def test_a_hung_thread_is_abandoned_and_nobody_enters_the_core_again() -> None:
    reader = Reader("a")
    with sim(Fault.HANG, virtual=False) as core:
        with pytest.RaisesGroup(EngineHung):
            async with open_engine(core, host=ThreadHost(), limits=SHORT) as engine:
                await reader.read(engine)
                await trio.sleep_forever()
        assert core.closes == 0
    assert type(reader.error) is EngineHung


async def test_a_stalled_thread_comes_back_when_interrupted_and_is_closed() -> None:
    with sim(Fault.STALL, virtual=False) as core:
        with pytest.RaisesGroup(EngineHung):
            async with open_engine(core, host=ThreadHost(), limits=SHORT) as engine:
                with engine.attach(request(), lambda _: None):
                    await trio.sleep_forever()
        assert core.closes == 1


async def test_cancelling_around_a_stalled_thread_interrupts_it_and_waits() -> None:
    with sim(Fault.STALL, virtual=False) as core:
        with trio.CancelScope() as scope:
            async with open_engine(core, host=ThreadHost()) as engine:
                with engine.attach(request(), lambda _: None):
                    while not core.steps:  # noqa: ASYNC110 - the thread tells nobody
                        await trio.sleep(0.01)
                    scope.cancel()
                    await trio.sleep_forever()
        assert scope.cancelled_caught
        assert core.closes == 1


async def test_cancelling_around_a_hung_step_raises_the_hang(autojump_clock: MockClock) -> None:
    with sim(Fault.HANG, virtual=True) as core:
        begin = trio.current_time()
        with pytest.RaisesGroup(EngineHung):
            with trio.move_on_after(1):
                async with open_engine(core, host=InlineHost()) as engine:
                    with engine.attach(request(), lambda _: None):
                        await trio.sleep_forever()
        assert trio.current_time() - begin == pytest.approx(1 + 30)
        assert core.closes == 0


# --- load ---------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [True, False])
async def test_a_load_that_fails_is_reported_bare_and_cleaned_up_once(virtual: bool) -> None:
    with sim(Fault.LOAD_FAIL, virtual=virtual) as core:
        with pytest.raises(LoadError, match="as it was told to"):
            async with open_engine(core, host=InlineHost() if virtual else ThreadHost()):
                pytest.fail("it cannot load")
        assert core.closes == 1


async def test_what_load_raises_unforeseen_is_a_load_error() -> None:
    class Odd(SimCore):
        def load(self, progress: object) -> None:
            raise KeyError("odd")

    with pytest.raises(LoadError, match="odd"):
        async with open_engine(Odd(), host=InlineHost()):
            pytest.fail("it cannot load")


async def test_a_load_past_its_limit_is_a_load_error(autojump_clock: MockClock) -> None:
    with sim(Fault.LOAD_STALL, virtual=True) as core:
        begin = trio.current_time()
        with pytest.raises(LoadError, match="600 s"):
            async with open_engine(core, host=InlineHost()):
                pytest.fail("it cannot load")
        assert trio.current_time() - begin == pytest.approx(600)
        assert core.closes == 1


async def test_a_load_that_hangs_is_never_closed(autojump_clock: MockClock) -> None:
    with sim(Fault.LOAD_HANG, virtual=True) as core:
        with pytest.raises(EngineHung):
            async with open_engine(core, host=InlineHost()):
                pytest.fail("it cannot load")
        assert core.closes == 0


@pytest.mark.parametrize(
    ("fault", "closes", "raised", "seconds"),
    [(Fault.LOAD_STALL, 1, False, 2), (Fault.LOAD_HANG, 0, True, 2 + 5)],
)
async def test_cancelling_a_load_interrupts_it(
    fault: Fault, closes: int, raised: bool, seconds: float, autojump_clock: MockClock
) -> None:
    with sim(fault, virtual=True) as core:
        begin = trio.current_time()
        hung = False
        with trio.move_on_after(2):
            try:
                async with open_engine(core, host=InlineHost()):
                    pytest.fail("it cannot load")
            except EngineHung:
                hung = True
        assert trio.current_time() - begin == pytest.approx(seconds)
        assert (core.closes, hung) == (closes, raised)


async def test_cancelling_a_load_in_a_thread_interrupts_it() -> None:
    with sim(Fault.LOAD_STALL, virtual=False) as core:
        with trio.move_on_after(0.05) as scope:
            async with open_engine(core, host=ThreadHost()):
                pytest.fail("it cannot load")
        assert scope.cancelled_caught
        assert core.closes == 1


# --- close --------------------------------------------------------------------------


async def test_a_close_that_hangs_is_given_up_at_its_limit(autojump_clock: MockClock) -> None:
    with sim(Fault.CLOSE_HANG, virtual=True) as core:
        begin = trio.current_time()
        with pytest.raises(EngineHung, match="did not close"):
            async with open_engine(core, host=InlineHost()) as engine:
                pass
        assert trio.current_time() - begin == pytest.approx(30)
        assert core.closes == 1
    assert engine.state is State.HUNG


async def test_a_close_that_hangs_in_a_thread_does_not_hold_the_loop() -> None:
    with sim(Fault.CLOSE_HANG, virtual=False) as core:
        with pytest.raises(EngineHung):
            async with open_engine(core, host=ThreadHost(), limits=SHORT):
                pass


async def test_the_caller_bounds_the_close(autojump_clock: MockClock) -> None:
    asked: list[float] = []

    def scope(limit: float) -> trio.CancelScope:
        asked.append(limit)
        return trio.move_on_after(3, shield=True)

    with sim(Fault.CLOSE_HANG, virtual=True) as core:
        begin = trio.current_time()
        with pytest.raises(EngineHung):
            async with open_engine(core, host=InlineHost(), close_scope=scope):
                pass
        assert trio.current_time() - begin == pytest.approx(3)
    assert asked == [30]


async def test_no_time_to_close_is_said_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with sim(virtual=False) as core:
        async with open_engine(
            core, host=ThreadHost(), close_scope=lambda _: trio.move_on_after(0)
        ):
            pass
        assert core.closes == 0
    assert "no time was left to close" in caplog.text


async def test_a_close_that_raises_is_a_dead_engine() -> None:
    class Odd(SimCore):
        def close(self) -> None:
            raise KeyError("odd")

    with pytest.raises(EngineDead, match="while it was closed"):
        async with open_engine(Odd(), host=InlineHost()):
            pass


# --- an engine that wants to end the process ------------------------------------------


class Leaver(SimCore):
    """Ends its thread with something that is no ``Exception``, in the calls that are named."""

    def __init__(self, exit: BaseException, *calls: str) -> None:
        super().__init__()
        self._exit, self._calls = exit, calls

    def _leave(self, call: str) -> None:
        if call in self._calls:
            raise self._exit

    def load(self, progress: Callable[[float], None]) -> None:
        self._leave("load")

    def step(self) -> list[Delta]:
        self._leave("step")
        return super().step()

    def check_health(self) -> None:
        self._leave("check_health")

    def close(self) -> None:
        self._leave("close")
        super().close()


exits = pytest.mark.parametrize("exit", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])


@exits
@pytest.mark.parametrize("call", ["step", "check_health"])
async def test_an_exit_in_a_call_is_a_dead_engine(exit: BaseException, call: str) -> None:
    told: list[Exception] = []
    heard: list[Delta] = []
    with pytest.RaisesGroup(
        pytest.RaisesExc(EngineDead, match=type(exit).__name__, check=lambda e: e.__cause__ is exit)
    ):
        async with open_engine(Leaver(exit, call), on_failed=told.append) as engine:
            with engine.attach(request(), heard.append):
                if call == "check_health":
                    with pytest.raises(EngineDead):
                        await engine.check()
                await trio.sleep_forever()
    assert [type(failure) for failure in told] == [EngineDead]
    assert type(heard[-1].error) is EngineDead


@exits
async def test_an_exit_while_loading_is_a_load_error(exit: BaseException) -> None:
    with pytest.raises(LoadError, match=type(exit).__name__):
        async with open_engine(Leaver(exit, "load")):
            pytest.fail("it cannot load")


@exits
async def test_an_exit_while_closing_is_a_dead_engine(exit: BaseException) -> None:
    with pytest.raises(EngineDead, match="while it was closed"):
        async with open_engine(Leaver(exit, "close")):
            pass


async def test_a_leaked_child_outlives_the_engine(autojump_clock: MockClock) -> None:
    inner = SimCore(faults=[Fault.LEAK_CHILD])
    async with open_engine(inner, host=InlineHost()) as engine:
        await Reader("a").read(engine)
    [child] = inner.faults.children
    try:
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_every_fault_strikes_in_the_call_that_it_names() -> None:
    points = {fault: fault.point for fault in Fault}
    assert {fault for fault, point in points.items() if point == "load"} == {
        Fault.LOAD_FAIL,
        Fault.LOAD_HANG,
        Fault.LOAD_STALL,
    }
    assert points[Fault.CLOSE_HANG] == "close"
    assert points[Fault.DIE] == points[Fault.HANG] == "step"
