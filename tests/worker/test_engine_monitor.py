"""An engine that fails while it is watched: the doors shut first, then its streams hear of it."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio.engines import Engine, InlineHost, Limits, Request
from dynamo_trio.engines.faults import Fault
from dynamo_trio.engines.sim import SimCore, SimSettings
from dynamo_trio.errors import EngineDead, EngineHung
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.testing.cores import WatchedCore
from dynamo_trio.worker import hold_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from dynamo_trio.engines import Delta

INTERVAL = 2.0


class Counted(SimCore):
    """Counts how often it is asked."""

    asked = 0

    def check_health(self) -> None:
        self.asked += 1
        super().check_health()


@attrs.define(eq=False)
class Site:
    """A process with an engine and nothing else; times count from its beginning."""

    lifecycle: Lifecycle
    core: Counted
    seen: WatchedCore
    engine: Engine
    withdrawn: list[float] = attrs.field(factory=list)
    began: float = attrs.field(factory=trio.current_time)

    @property
    def now(self) -> float:
        return trio.current_time() - self.began

    async def withdraw(self) -> None:
        self.withdrawn.append(self.now)
        await trio.lowlevel.checkpoint()

    def strike(self, fault: Fault) -> None:
        self.core.arm(fault, None)
        self.core.faults.set_off()


@asynccontextmanager
async def site(
    *, interval: float = INTERVAL, limits: Limits | None = None, **timetable: float
) -> AsyncIterator[Site]:
    """Left when the process has stopped."""
    lifecycle = Lifecycle(Timetable(**{"grace": 0.0, **timetable}))  # type: ignore[arg-type]  # numbers
    core = Counted(SimSettings(itl_ms=100, virtual=True))
    seen = WatchedCore(core)
    hold = partial(
        hold_engine, lifecycle, seen, host=InlineHost(), limits=limits, interval=interval
    )
    async with trio.open_nursery() as services:
        services.start_soon(lifecycle.run)
        engine = await services.start(lifecycle.supervise, hold)
        made = Site(lifecycle, core, seen, engine)
        lifecycle.on_unregister(made.withdraw)
        yield made
        await lifecycle.wait_stopped()
    seen.check()


def request(max_tokens: int = 1000) -> Request:
    return Request(request_id="r", token_ids=(1, 2), max_tokens=max_tokens, ignore_eos=True)


async def test_an_engine_at_rest_is_asked_at_each_interval(autojump_clock: MockClock) -> None:
    async with site() as process:
        await trio.sleep(INTERVAL * 5 + 1)
        assert process.core.asked == 5
        process.lifecycle.request_stop("enough")
    assert process.lifecycle.exit_code() == 0


async def test_without_an_interval_it_is_never_asked(autojump_clock: MockClock) -> None:
    async with site(interval=0.0) as process:
        await trio.sleep(1000)
        process.lifecycle.request_stop("enough")
    assert process.core.asked == 0


@pytest.mark.parametrize(
    ("fault", "kind", "found"),
    [
        (Fault.DIE, EngineDead, INTERVAL),
        (Fault.RAISE, EngineDead, INTERVAL),
        (Fault.HANG, EngineHung, INTERVAL + 30),
        (Fault.STALL, EngineHung, INTERVAL + 30),
    ],
)
async def test_a_fault_at_rest_is_found_by_the_next_check(
    fault: Fault, kind: type[Exception], found: float, autojump_clock: MockClock
) -> None:
    async with site() as process:
        process.strike(fault)
        await process.lifecycle.wait_stop_requested()
        assert process.now == pytest.approx(found)
        assert not process.lifecycle.work.is_open
    assert process.withdrawn == [pytest.approx(found)]
    assert [type(error) for error in process.lifecycle.errors] == [kind]
    assert process.lifecycle.exit_code() == 1
    assert process.seen.closes == (0 if fault is Fault.HANG else 1)


async def test_the_doors_are_shut_before_a_stream_hears_of_it(autojump_clock: MockClock) -> None:
    heard: list[tuple[type[Exception], bool, bool]] = []

    def sink(delta: Delta) -> None:
        if delta.error is not None:
            lifecycle = process.lifecycle
            heard.append((type(delta.error), lifecycle.stopping, lifecycle.work.is_open))

    async with site() as process:
        with process.engine.attach(request(), sink):
            await trio.sleep(1)
            process.strike(Fault.RAISE)
            await process.lifecycle.wait_stop_requested()
    assert heard == [(EngineDead, True, False)]
    assert len(process.lifecycle.errors) == 1


async def test_streams_hear_of_a_hang_though_its_call_is_still_waited_for(
    autojump_clock: MockClock,
) -> None:
    heard: list[float] = []

    def sink(delta: Delta) -> None:
        if delta.error is not None:
            heard.append(process.now)

    async with site(limits=Limits(step=math.inf, check=5)) as process:
        with process.engine.attach(request(), sink):
            await trio.sleep(1)
            process.strike(Fault.HANG)
            await process.lifecycle.wait_stop_requested()
            assert process.now == pytest.approx(INTERVAL + 5)
    assert heard == [pytest.approx(INTERVAL + 5)]
    assert process.withdrawn == [pytest.approx(INTERVAL + 5)]
    assert process.now == pytest.approx(INTERVAL + 5 + 5)  # 5 s to come back when interrupted
    assert process.seen.closes == 0


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize(("fault", "comes_back"), [(Fault.HANG, 5.0), (Fault.STALL, 0.0)])
async def test_a_step_over_its_limit_shuts_the_doors_before_it_is_interrupted(
    fault: Fault, comes_back: float, stopping: bool, autojump_clock: MockClock
) -> None:
    heard: list[tuple[int, bool, int]] = []

    def sink(delta: Delta) -> None:
        if delta.error is not None:
            heard.append(
                (round(process.now), process.lifecycle.work.is_open, process.seen.interrupts)
            )

    async with site(limits=Limits(step=4), interval=0.0, drain=100.0) as process:
        process.core.arm(fault, 11)
        with process.lifecycle.work.admit("work 1"), process.engine.attach(request(), sink):
            if stopping:
                process.lifecycle.request_stop("enough")
            while not heard:  # noqa: ASYNC110 - virtual time
                await trio.sleep(0.1)
    assert heard == [(1 + 4, False, 0)]
    assert process.withdrawn == [pytest.approx(0 if stopping else 1 + 4)]
    assert process.now == pytest.approx(1 + 4 + comes_back, abs=0.2)
    assert [type(error) for error in process.lifecycle.errors] == [EngineHung]
    assert process.lifecycle.exit_code() == 1
    assert process.seen.closes == (0 if fault is Fault.HANG else 1)


@pytest.mark.parametrize(
    ("limit", "fatal", "seconds"),
    [(7.0, 30.0, 7.0), (math.inf, 20.0, 20.0), (30.0, 10.0, 10.0)],
)
async def test_a_failed_engine_that_does_not_close_is_left_at_its_limit(
    limit: float, fatal: float, seconds: float, autojump_clock: MockClock
) -> None:
    async with site(limits=Limits(close_failed=limit), fatal=fatal) as process:
        process.strike(Fault.CLOSE_HANG)
        await process.lifecycle.wait_stop_requested()
        assert process.now == pytest.approx(INTERVAL)
    assert process.now == pytest.approx(INTERVAL + seconds)
    assert [type(error) for error in process.lifecycle.errors] == [EngineDead, EngineHung]
    assert process.seen.closes == 1
    [close] = [s for s in process.lifecycle.report().steps if s.name == "engine_close"]
    assert close.ending is not None
    assert close.ending.value == "failed"


async def test_a_stop_that_waits_for_requests_goes_on_asking(autojump_clock: MockClock) -> None:
    async with site(drain=100.0, stop=20.0) as process:
        await trio.sleep(5)
        with process.lifecycle.work.admit("work 1") as admission:
            process.lifecycle.request_stop("enough")
            with admission.scope:
                await trio.sleep_forever()
            assert process.now == pytest.approx(5 + 100)
            asked = process.core.asked
            await trio.sleep(8)  # its farewell
        assert process.core.asked == asked == 105 // INTERVAL
    assert process.lifecycle.exit_code() == 0


async def test_a_stop_that_waits_for_nobody_asks_no_more(autojump_clock: MockClock) -> None:
    async with site() as process:
        await trio.sleep(5)
        process.lifecycle.request_stop("enough")
        await trio.sleep(50)
        assert process.core.asked == 2
    assert process.lifecycle.exit_code() == 0


@pytest.mark.parametrize("grace", [0.0, 60.0])
@pytest.mark.parametrize("fault", [Fault.HANG, Fault.STALL])
@pytest.mark.parametrize("stop", [1.0, INTERVAL + 1, INTERVAL + 4])
async def test_a_hang_that_no_request_can_notice_is_found_while_a_stop_waits(
    stop: float, fault: Fault, grace: float, autojump_clock: MockClock
) -> None:
    """Before a check, while one hangs (``STALL``), or with a step that hangs without a limit."""
    heard: list[tuple[type[Exception], float]] = []

    def sink(delta: Delta) -> None:
        if delta.error is not None:
            heard.append((type(delta.error), process.now))
            ended.set()

    ended = trio.Event()
    async with site(limits=Limits(step=math.inf, check=5), grace=grace, drain=900.0) as process:
        process.strike(fault)
        with process.lifecycle.work.admit("work 1"), process.engine.attach(request(), sink):
            await trio.sleep(stop)
            process.lifecycle.request_stop("enough")
            with trio.fail_after(100):
                await ended.wait()
    [(kind, found)] = heard
    assert kind is EngineHung
    assert found == pytest.approx(INTERVAL + 5)
    assert [type(error) for error in process.lifecycle.errors] == [EngineHung]
    assert process.lifecycle.exit_code() == 1


async def test_a_check_that_runs_when_a_stop_begins_holds_nothing_up(
    autojump_clock: MockClock,
) -> None:
    async with site(limits=Limits(check=math.inf)) as process:
        process.strike(Fault.STALL)
        await trio.sleep(INTERVAL + 1)
        process.lifecycle.request_stop("enough")
        await process.lifecycle.wait_stopped()
        assert process.now == pytest.approx(INTERVAL + 1)
    assert process.now == pytest.approx(INTERVAL + 1)
    assert process.seen.closes == 1


async def test_an_engine_that_fails_in_a_drain_still_counts(autojump_clock: MockClock) -> None:
    async with site(drain=100.0) as process:
        with process.lifecycle.work.admit("work 1"), process.engine.attach(request(), print):
            await trio.sleep(1)
            process.lifecycle.request_stop("enough")
            await trio.sleep(1)
            process.strike(Fault.DIE)
            await trio.sleep(1)
    assert process.lifecycle.report().cause == "enough"
    assert process.lifecycle.exit_code() == 1


# --- half a start -----------------------------------------------------------------------


async def test_a_start_that_fails_behind_the_load_closes_the_engine(
    autojump_clock: MockClock,
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="port in use")):
        async with site() as process:
            seen, lifecycle = process.seen, process.lifecycle
            raise OSError("port in use")
    assert seen.closes == 1
    assert lifecycle.errors == []
    seen.check()


async def test_a_start_that_is_given_up_while_the_engine_loads_closes_it(
    autojump_clock: MockClock,
) -> None:
    lifecycle = Lifecycle(Timetable(grace=0.0))
    seen = WatchedCore(SimCore(SimSettings(load_ms=60_000, virtual=True)))
    hold = partial(hold_engine, lifecycle, seen, host=InlineHost())
    async with trio.open_nursery() as services:
        with trio.move_on_after(5) as starting:
            await services.start(lifecycle.supervise, hold)
    assert starting.cancelled_caught
    assert (seen.interrupts, seen.closes) == (1, 1)
    seen.check()
