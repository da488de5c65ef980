"""Who may be found: stays known until it is out of the store, and does not come back by itself."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trio.discovery import Instance, MemoryDiscovery
from dynamo_trio.lifecycle import Lifecycle, Phase, Timetable
from dynamo_trio.runtime import DistributedRuntime, Endpoint, open_runtime

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from dynamo_trio.discovery.records import Record

NAMES = ("test.backend.generate", "test.backend.other")


class Store(MemoryDiscovery):
    """A store that takes its time, and may be away."""

    slow: float = 0.0
    #: It refuses the first so many calls from now on.
    away: int = 0

    def __init__(self) -> None:
        super().__init__()
        #: Keys of those that it has refused to let go of.
        self.kept: set[str] = set()

    async def register(self, record: Record) -> None:
        await self._call()
        await super().register(record)

    async def unregister(self, record: Record) -> None:
        try:
            await self._call()
        except OSError:
            self.kept.add(record.key)
            raise
        await super().unregister(record)
        self.kept.discard(record.key)

    async def _call(self) -> None:
        await trio.sleep(self.slow)
        if self.away:
            self.away -= 1
            raise OSError("the store is away")

    async def found(self) -> set[str]:
        async with self.watch(Instance) as watch:
            return {str(instance.endpoint.name) for instance in watch.snapshot.values()}


@attrs.frozen(eq=False)
class Site:
    lifecycle: Lifecycle
    runtime: DistributedRuntime
    store: Store
    endpoint: Endpoint


@asynccontextmanager
async def site(store: Store | None = None) -> AsyncIterator[Site]:
    """Left when the process has stopped; nothing may be in the store then, if it was there."""
    store = store or Store()
    lifecycle = Lifecycle(Timetable())
    async with trio.open_nursery() as services:
        services.start_soon(lifecycle.run)
        async with open_runtime(lifecycle, discovery=store) as runtime:
            yield Site(lifecycle, runtime, store, runtime.endpoint(NAMES[0]))
            lifecycle.request_stop("the test is over")
            await lifecycle.wait_stopped()
    assert store.kept or await store.found() == set()


async def answer(request: object) -> AsyncGenerator[int, None]:
    yield 1


async def ticks(count: int) -> None:
    for _ in range(count):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("count", range(5))
async def test_a_stop_takes_over_the_withdrawal_of_a_drain(
    autojump_clock: trio.testing.MockClock, count: int
) -> None:
    async with site() as process, process.endpoint.serving(answer):
        process.runtime.drain.begin()
        await ticks(count)
        process.lifecycle.request_stop("SIGTERM")
        await process.lifecycle.wait_phase(Phase.DRAINING)
        assert await process.store.found() == set()


@pytest.mark.parametrize("cut", [0.1, 0.25])
async def test_what_was_cut_short_is_done_by_the_next_who_wants_it(
    autojump_clock: trio.testing.MockClock, cut: float
) -> None:
    async with site() as process, process.endpoint.serving(answer):
        process.store.slow = 0.5
        with trio.move_on_after(cut):
            await process.endpoint.unregister_endpoint_instance()
        assert await process.store.found() == {"generate"}
        assert process.runtime.endpoint_states() == {"generate": False}
        await process.endpoint.unregister_endpoint_instance()
        assert await process.store.found() == set()


async def test_a_store_that_is_away_keeps_no_other_instance_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        site() as process,
        process.endpoint.serving(answer),
        process.runtime.endpoint(NAMES[1]).serving(answer),
    ):
        process.store.away = 1
        with pytest.RaisesGroup(OSError):
            await process.runtime.unregister_all()
        assert len(await process.store.found()) == 1
        await process.runtime.unregister_all()
        assert await process.store.found() == set()


async def test_an_endpoint_ends_though_the_store_is_away(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with site() as process:
        async with process.endpoint.serving(answer):
            process.store.away = 1
        assert "may still be found" in caplog.text
        assert await process.store.found() == {"generate"}  # the stop tries again


@pytest.mark.parametrize("count", range(5))
async def test_what_has_ended_does_not_come_back_with_a_drain(
    autojump_clock: trio.testing.MockClock, count: int
) -> None:
    async with site() as process:
        async with process.endpoint.serving(answer):
            process.runtime.drain.begin()
            await process.runtime.drain.wait_settled()
            process.runtime.drain.resume()
            await ticks(count)
        await trio.sleep(30)
        assert await process.store.found() == set()


async def test_what_has_ended_is_registered_by_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with site() as process:
        async with process.endpoint.serving(answer) as instance:
            pass
        await process.runtime.register(instance)
        assert await process.store.found() == set()


# --- whatever happens ---------------------------------------------------------------------

OPS = ("open", "close", "sleep", "wake", "drain", "resume", "ill", "well", "away")
#: (which endpoint, what, seconds until it is given up, seconds until the next).
eighths = st.integers(0, 12).map(lambda n: n / 8)
steps = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(OPS), eighths, eighths), max_size=14
)


@attrs.define(eq=False)
class Fate:
    """One endpoint, opened and closed, and what was last said of it."""

    runtime: DistributedRuntime
    endpoint: Endpoint
    nursery: trio.Nursery
    close: trio.Event | None = None
    instance: Instance | None = None
    #: What was asked for last and not done: it was given up, or has failed.
    undone: set[str] = attrs.field(factory=set)
    asleep: bool = False
    ill: bool = False

    async def serve(self) -> None:
        assert self.close is not None
        try:
            async with self.endpoint.serving(answer) as self.instance:
                await self.close.wait()
        except* OSError:
            pass  # no start without the store
        self.close = self.instance = None

    async def do(self, op: str) -> None:
        if op == "open":
            if self.close is None:
                self.close, self.asleep, self.ill = trio.Event(), False, False
                self.undone.clear()
                self.nursery.start_soon(self.serve)
        elif op == "close":
            if self.close is not None:
                self.close.set()
        elif self.instance is not None:
            await self._change(op, self.instance)

    async def _change(self, op: str, instance: Instance) -> None:
        about = "health" if op in ("ill", "well") else "routing"
        self.undone.add(about)
        match op:
            case "sleep":
                self.asleep = True
                await self.runtime.unregister(instance)
            case "wake":
                self.asleep = False
                await self.runtime.register(instance)
            case "ill" | "well":
                self.ill = op == "ill"
                await self.runtime.set_healthy(instance, not self.ill)
        self.undone.discard(about)


async def live(ops: list[tuple[str, str, float, float]], slow: float) -> None:
    store = Store()
    async with site(store) as process, trio.open_nursery() as nursery:
        runtime = process.runtime
        fates = {name: Fate(runtime, runtime.endpoint(name), nursery) for name in NAMES}
        for fate in fates.values():
            await fate.do("open")
        await trio.sleep(1)
        store.slow = slow
        for name, op, patience, pause in ops:
            match op:
                case "drain":
                    runtime.drain.begin()
                case "resume":
                    runtime.drain.resume()
                case "away":
                    store.away = 1
                case _:
                    with trio.move_on_after(patience):
                        with suppress(OSError):
                            await fates[name].do(op)
            await trio.sleep(pause)
        await trio.sleep(30)
        await check(runtime, store, fates)
        process.lifecycle.request_stop("the test is over")
        await process.lifecycle.wait_stopped()
        for fate in fates.values():
            await fate.do("close")


async def check(runtime: DistributedRuntime, store: Store, fates: dict[str, Fate]) -> None:
    found = await store.found()
    for fate in fates.values():
        name = fate.endpoint.id.name
        if fate.instance is None or runtime.drain.is_wanted:
            assert name not in found or store.kept
        elif not fate.undone:
            assert (name in found) == (not fate.asleep and not fate.ill)


def run_life(ops: list[tuple[str, str, float, float]], slow: float) -> None:
    trio.run(partial(live, ops, slow), clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=100)
@given(steps, eighths)
def test_whatever_happens_only_who_is_to_be_found_is(
    ops: list[tuple[str, str, float, float]], slow: float
) -> None:
    run_life(ops, slow)


@pytest.mark.soak
@pytest.mark.timeout(900)
@settings(max_examples=5000)
@given(steps, eighths)
def test_whatever_happens_in_thousands_of_memberships(
    ops: list[tuple[str, str, float, float]], slow: float
) -> None:
    run_life(ops, slow)
