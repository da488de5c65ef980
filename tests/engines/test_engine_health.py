"""Health checks: between steps, never beside one, and no answer in time is a hung engine."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from dynamo_trio.engines import (
    CoreInfo,
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
from dynamo_trio.errors import EngineClosed, EngineDead, EngineHung, EngineShutdown
from dynamo_trio.testing.cores import WatchedCore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class Asked(SimCore):
    """Notes when it was asked, and ends as told."""

    asked = 0
    error: Exception | None = None

    def check_health(self) -> None:
        self.asked += 1
        super().check_health()
        if self.error is not None:
            raise self.error


class Mute(SimCore):
    """Cannot be asked."""

    @property
    def info(self) -> CoreInfo:
        return attrs.evolve(super().info, health_check=False)

    def check_health(self) -> None:
        pytest.fail("it said that it cannot be asked")


def request(name: str = "r", max_tokens: int = 100) -> Request:
    return Request(request_id=name, token_ids=(1, 2, 3), max_tokens=max_tokens, ignore_eos=True)


def virtual(kind: type[SimCore] = Asked, itl_ms: float = 100) -> SimCore:
    return kind(SimSettings(itl_ms=itl_ms, virtual=True))


@contextmanager
def watched(core: SimCore) -> Iterator[WatchedCore]:
    made = WatchedCore(core)
    try:
        yield made
    finally:
        core.faults.release()
    made.check()


@asynccontextmanager
async def inline(
    core: SimCore, *, told: list[EngineShutdown] | None = None, limits: Limits | None = None
) -> AsyncIterator[Engine]:
    told = [] if told is None else told
    with watched(core) as seen:
        async with open_engine(
            seen, host=InlineHost(), limits=limits, on_failed=told.append
        ) as engine:
            yield engine


async def never_returns(engine: Engine) -> None:
    with pytest.raises(EngineHung):
        await engine.check()


async def test_a_check_asks_the_core(autojump_clock: MockClock) -> None:
    core = virtual()
    async with inline(core) as engine:
        await engine.check()
        await engine.check()
        assert core.asked == 2  # type: ignore[attr-defined]  # Asked
        assert engine.step_count == 0
    with pytest.raises(EngineClosed):
        await engine.check()


async def test_who_asks_at_the_same_time_shares_the_answer(autojump_clock: MockClock) -> None:
    core = virtual()
    async with inline(core) as engine, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(engine.check)
    assert core.asked == 1  # type: ignore[attr-defined]  # Asked


async def test_a_check_waits_for_the_step_that_runs(autojump_clock: MockClock) -> None:
    core = virtual(itl_ms=4000)
    async with inline(core) as engine:
        with engine.attach(request(), lambda _: None):
            await trio.sleep(5)  # in the second step, which takes until 8
            assert engine.step_age() == pytest.approx(1)
            before = trio.current_time()
            await engine.check()
            assert trio.current_time() - before == pytest.approx(3)


async def test_a_core_that_cannot_be_asked_is_well_if_its_steps_return(
    autojump_clock: MockClock,
) -> None:
    async with inline(virtual(Mute)) as engine:
        await engine.check()
        with engine.attach(request(), lambda _: None):
            await engine.check()


async def test_an_engine_that_drains_can_be_checked(autojump_clock: MockClock) -> None:
    async with inline(virtual()) as engine:
        with engine.attach(request(max_tokens=10), lambda _: None):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.drain)
                await trio.testing.wait_all_tasks_blocked()
                await engine.check()
                assert engine.state is State.DRAINING


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("no GPU"), "the engine failed its health check: RuntimeError: no GPU"),
        (EngineDead("the child has died"), "the child has died"),
    ],
)
async def test_a_check_that_raises_is_a_dead_engine(
    error: Exception, words: str, autojump_clock: MockClock
) -> None:
    core = virtual()
    told: list[EngineShutdown] = []
    heard: list[Delta] = []
    with pytest.RaisesGroup(pytest.RaisesExc(EngineDead, match=words)):
        async with inline(core, told=told) as engine:
            with engine.attach(request(), heard.append):
                await trio.sleep(1)
                core.error = error  # type: ignore[attr-defined]  # Asked
                with pytest.raises(EngineDead):
                    await engine.check()
                await trio.sleep_forever()
    assert engine.state is State.DEAD
    assert [str(failure) for failure in told] == [words]
    assert type(heard[-1].error) is EngineDead
    with pytest.raises(EngineDead):
        await engine.check()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.STALL])
@pytest.mark.parametrize("busy", [True, False])
async def test_no_answer_within_the_limit_is_a_hung_engine(
    fault: Fault, busy: bool, autojump_clock: MockClock
) -> None:
    core = virtual()
    told: list[EngineShutdown] = []
    with pytest.RaisesGroup(pytest.RaisesExc(EngineHung, match="within 2 s")):
        async with inline(core, told=told, limits=Limits(check=2)) as engine:
            core.arm(fault, None)
            if busy:
                engine.attach(request(), lambda _: None).__enter__()
            await trio.sleep(1)
            core.faults.set_off()
            before = trio.current_time()
            await never_returns(engine)
            assert trio.current_time() - before == pytest.approx(2)
            assert len(told) == 1
            await trio.sleep_forever()
    # What stalls comes back when it is interrupted; what hangs gets the 5 s of that.
    waited = trio.current_time() - before
    assert waited == pytest.approx(2 if fault is Fault.STALL else 2 + 5)
    assert engine.state is State.HUNG
    assert len(told) == 1


async def test_a_hang_is_told_by_the_loop_wherever_it_was_found(autojump_clock: MockClock) -> None:
    """Also if the one who asked does not stand inside the block of the engine."""
    core = virtual()
    told: list[EngineShutdown] = []
    async with trio.open_nursery() as nursery:
        with pytest.RaisesGroup(EngineHung):
            async with inline(core, told=told, limits=Limits(check=2)) as engine:
                core.arm(Fault.HANG, None)
                core.faults.set_off()
                nursery.start_soon(never_returns, engine)
                await trio.sleep_forever()
    assert len(told) == 1


async def test_without_a_limit_a_check_waits_for_the_limit_of_the_step(
    autojump_clock: MockClock,
) -> None:
    core = virtual()
    with pytest.RaisesGroup(pytest.RaisesExc(EngineHung, match="longer than 50 s")):
        async with inline(core, limits=Limits(check=math.inf, step=50)) as engine:
            core.arm(Fault.HANG)
            with engine.attach(request(), lambda _: None):
                before = trio.current_time()
                await trio.sleep(1)
                await never_returns(engine)
                assert trio.current_time() - before == pytest.approx(50)
                await trio.sleep_forever()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.STALL])
async def test_a_check_that_nobody_waits_for_any_more_has_its_limit(
    fault: Fault, autojump_clock: MockClock
) -> None:
    core = virtual()
    told: list[EngineShutdown] = []
    heard: list[float] = []
    with pytest.RaisesGroup(pytest.RaisesExc(EngineHung, match="within 20 s")):
        async with inline(core, told=told, limits=Limits(check=20)) as engine:
            core.arm(fault, None)
            core.faults.set_off()
            with trio.move_on_after(1):
                await engine.check()
            with engine.attach(request(), lambda _: heard.append(trio.current_time())):
                await trio.sleep(1)
                assert heard == []
                before = trio.current_time()
                await trio.sleep_forever()
    assert [time - before for time in heard] == [pytest.approx(18)]
    assert len(told) == 1


def test_after_a_freeze_the_check_gets_its_limit_again() -> None:
    clock = MockClock(autojump_threshold=0)

    async def scenario() -> None:
        core = virtual(itl_ms=3000)
        async with inline(core, limits=Limits(check=4)) as engine:
            with engine.attach(request(), lambda _: None):
                await trio.sleep(1)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(engine.check)
                    await trio.sleep(1)
                    clock.jump(1000)
                assert engine.state is State.READY

    trio.run(scenario, clock=clock)


async def test_who_holds_the_engine_hears_of_a_failure_first_and_once(
    autojump_clock: MockClock,
) -> None:
    order: list[str] = []
    core = virtual()
    with watched(core) as seen, pytest.RaisesGroup(EngineDead):
        async with open_engine(
            seen, host=InlineHost(), on_failed=lambda cause: order.append(f"holder: {cause}")
        ) as engine:
            core.arm(Fault.RAISE, 3)
            with engine.attach(request(), lambda d: order.append("stream") if d.error else None):
                try:
                    await trio.sleep_forever()
                finally:
                    order.append("body")
    assert order == ["holder: the engine died of RuntimeError", "stream", "body"]


async def test_a_failed_engine_has_a_limit_of_its_own_to_close(autojump_clock: MockClock) -> None:
    core = virtual()
    limits = Limits(close=30, close_failed=7)
    before = trio.current_time()
    with watched(core) as seen:
        core.arm(Fault.CLOSE_HANG, None)
        core.faults.set_off()
        with pytest.raises(EngineHung, match="did not close"):
            async with open_engine(seen, host=InlineHost(), limits=limits) as engine:
                await engine.check()
        assert seen.closes == 1
    assert trio.current_time() - before == pytest.approx(7)


async def test_a_check_in_a_thread_that_never_returns() -> None:
    core = Asked(SimSettings())
    told: list[EngineShutdown] = []
    limits = Limits(check=0.1, interrupt=0.1)
    with watched(core) as seen:
        with pytest.RaisesGroup(EngineHung):
            async with open_engine(
                seen, host=ThreadHost(), limits=limits, on_failed=told.append
            ) as engine:
                core.arm(Fault.HANG, None)
                core.faults.set_off()
                await never_returns(engine)
                await trio.sleep_forever()
        assert seen.closes == 0
    assert len(told) == 1


# --- what is set off --------------------------------------------------------------------


async def test_what_waits_strikes_only_when_it_is_set_off(autojump_clock: MockClock) -> None:
    core = virtual()
    async with inline(core) as engine:
        core.arm(Fault.LEAK_CHILD, None)
        await engine.check()
        with engine.attach(request(max_tokens=5), lambda _: None):
            await trio.sleep(1)
        assert core.faults.children == []
        core.faults.set_off()
        await engine.check()
        await engine.check()
    [child] = core.faults.children
    child.kill()
    child.wait()


async def test_what_was_counted_does_not_strike_in_a_check(autojump_clock: MockClock) -> None:
    core = virtual()
    async with inline(core) as engine:
        core.arm(Fault.DIE, 0)
        core.faults.set_off()
        await engine.check()
    assert engine.state is State.CLOSED


async def test_a_close_that_was_set_off_hangs_though_no_step_came_between(
    autojump_clock: MockClock,
) -> None:
    core = virtual()
    core.arm(Fault.CLOSE_HANG, None)
    with pytest.raises(EngineHung, match="did not close"):
        async with inline(core):
            core.faults.set_off()


# --- at random --------------------------------------------------------------------------

STEP_FAULTS = [Fault.DIE, Fault.RAISE, Fault.HANG, Fault.STALL, Fault.CLOSE_HANG]


@attrs.frozen
class Play:
    """What happens to one engine: times are multiples of 0.1 s, which do not meet its steps."""

    requests: list[tuple[int, int]]  # when, how many tokens
    checks: list[int]
    cancels: list[int]  # the check that began then is given up
    fault: Fault | None
    struck: int
    leave: int


plays = st.builds(
    Play,
    requests=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=4),
    checks=st.lists(st.integers(0, 80), max_size=6),
    cancels=st.lists(st.integers(0, 80), max_size=2),
    fault=st.sampled_from([None, *STEP_FAULTS]),
    struck=st.integers(0, 60),
    leave=st.integers(0, 100),
)


@attrs.define(eq=False)
class Stage:
    core: SimCore
    engine: Engine
    told: list[EngineShutdown]
    #: Requests that ended, by their error or None.
    ended: list[EngineShutdown | None] = attrs.field(factory=list)
    #: Checks that told of a failure before the holder knew of it.
    early: int = 0

    async def ask(self, when: int, name: str, tokens: int) -> None:
        await trio.sleep(when / 10)
        try:
            async with self.engine.open(request(name, tokens)) as deltas:
                async for _ in deltas:
                    pass
        except EngineShutdown as exc:
            self.ended.append(exc)
        else:
            self.ended.append(None)

    async def check(self, when: int, patience: float) -> None:
        await trio.sleep(when / 10)
        with trio.move_on_after(patience):
            try:
                await self.engine.check()
            except EngineClosed:
                pass
            except EngineShutdown:
                self.early += not self.told

    async def strike(self, when: int) -> None:
        await trio.sleep(when / 10)
        self.core.faults.set_off()


@given(plays)
@settings(max_examples=100, deadline=None)
def test_whatever_happens_calls_never_overlap_and_the_core_is_closed_once(play: Play) -> None:
    core = SimCore(SimSettings(itl_ms=37, virtual=True))
    told: list[EngineShutdown] = []
    limits = Limits(step=3, check=2, close=1, close_failed=1, interrupt=1)

    async def scenario(seen: WatchedCore) -> Stage:
        async with trio.open_nursery() as nursery:
            try:
                async with open_engine(
                    seen, host=InlineHost(), limits=limits, on_failed=told.append
                ) as engine:
                    stage = Stage(core, engine, told)
                    if play.fault is not None:
                        core.arm(play.fault, None)
                        nursery.start_soon(stage.strike, play.struck)
                    for i, (when, tokens) in enumerate(play.requests):
                        nursery.start_soon(stage.ask, when, f"r{i}", tokens)
                    for when in play.checks:
                        nursery.start_soon(stage.check, when, math.inf)
                    for when in play.cancels:
                        nursery.start_soon(stage.check, when, 0.05)
                    await trio.sleep(play.leave / 10)
            except* EngineShutdown:
                assert play.fault is not None
        return stage

    with watched(core) as seen:
        stage = trio.run(scenario, seen, clock=MockClock(autojump_threshold=0))
        assert len(stage.ended) == len(play.requests)
        assert len(told) <= 1
        failures = [exc for exc in stage.ended if isinstance(exc, EngineDead | EngineHung)]
        if told:
            assert stage.engine.state.failed
        elif play.fault is not Fault.CLOSE_HANG:  # which may have struck when it was closed
            assert stage.engine.state is State.CLOSED
            assert failures == []
            assert stage.early == 0
        assert seen.closes == (0 if told and play.fault is Fault.HANG else 1)
