"""A stop and a drain say that a process cannot be found only if the store says so, too."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from dynamo_trio.discovery.stored import QUIET, open_stored_discovery
from dynamo_trio.lifecycle import DrainState, Ending, Lifecycle, Stage, Timetable
from dynamo_trio.plane import MemoryPlane
from dynamo_trio.runtime import DistributedRuntime, Endpoint, open_runtime
from dynamo_trio.worker.status import WorkerStatus
from tests.discovery.fake_store import FakeStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from trio.testing import MockClock

NAME = "dynamo.backend.generate"


class Plane(MemoryPlane):
    """One whose addresses can stand in a store."""

    name = "tcp"


async def answer(request: object) -> AsyncGenerator[object, None]:
    yield request


@attrs.frozen(eq=False)
class Site:
    store: FakeStore
    lifecycle: Lifecycle
    runtime: DistributedRuntime
    endpoint: Endpoint
    status: WorkerStatus

    def is_there(self) -> bool:
        return any(at.bucket == "v1/instances" for at in self.store.values)

    def states(self) -> Mapping[str, bool]:
        return self.runtime.endpoint_states()

    async def stop(self) -> Stage:
        """Stop, and tell of the withdrawal."""
        self.lifecycle.request_stop("SIGTERM")
        await self.lifecycle.wait_stopped()
        (step,) = [one for one in self.lifecycle.report().steps if one.name == "unregister"]
        return step


@asynccontextmanager
async def open_site() -> AsyncIterator[Site]:
    store, lifecycle = FakeStore(), Lifecycle(Timetable(grace=1.0))
    status = WorkerStatus(lifecycle)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        async with (
            open_stored_discovery(store) as discovery,
            open_runtime(lifecycle, discovery=discovery, planes=Plane()) as runtime,
        ):
            status.attach(runtime)
            endpoint = runtime.endpoint(NAME)
            async with endpoint.serving(answer):
                yield Site(store, lifecycle, runtime, endpoint, status)
                lifecycle.escalate("the test is over")
                await lifecycle.wait_stopped()
            nursery.cancel_scope.cancel("the test is over")


# --- a stop ------------------------------------------------------------------------------


async def test_a_stop_that_withdraws_says_so(autojump_clock: MockClock) -> None:
    async with open_site() as site:
        assert (await site.stop()).ending is Ending.COMPLETED
        assert not site.is_there()


async def test_a_store_that_refuses_fails_the_step_and_not_the_stop(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        site.store.away = True
        assert (await site.stop()).ending is Ending.FAILED
        assert site.is_there()
        assert site.lifecycle.exit_code() == 0
    told = [record for record in caplog.records if "unregister failed" in record.getMessage()]
    assert len(told) == 1


async def test_a_store_that_hangs_costs_the_step_its_limit(autojump_clock: MockClock) -> None:
    async with open_site() as site:
        site.store.slow = 100.0
        step = await site.stop()
        assert (step.ending, step.seconds) == (Ending.TIMED_OUT, 2.0)


@pytest.mark.parametrize("slow", [0.0, 100.0], ids=["refuses", "hangs"])
@pytest.mark.parametrize("after", [0.1, 60.0])
async def test_a_stop_in_a_drain_that_has_withdrawn_nothing(
    autojump_clock: MockClock, slow: float, after: float
) -> None:
    async with open_site() as site:
        site.store.away, site.store.slow = True, slow
        site.runtime.drain.begin()
        await trio.sleep(after)
        assert site.runtime.drain.state is DrainState.DRAINING
        assert not site.runtime.drain.safe_to_delete
        step = await site.stop()
        assert step.ending is (Ending.TIMED_OUT if slow else Ending.FAILED)


async def test_a_stop_waits_for_the_withdrawal_that_a_drain_has_begun(
    autojump_clock: MockClock,
) -> None:
    async with open_site() as site:
        site.store.slow = 1.0
        site.runtime.drain.begin()
        await trio.sleep(0.25)
        step = await site.stop()
        assert (step.ending, step.seconds) == (Ending.COMPLETED, 0.75)
        assert not site.is_there()


async def test_what_the_program_could_not_withdraw_is_told_by_the_stop(
    autojump_clock: MockClock,
) -> None:
    async with open_site() as site:
        site.store.away = True
        await site.endpoint.unregister_endpoint_instance()
        assert (await site.stop()).ending is Ending.FAILED


# --- a drain -----------------------------------------------------------------------------


async def test_a_drain_waits_for_the_store_without_a_word_too_many(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        site.store.away = True
        site.runtime.drain.begin()
        await trio.sleep(60)
        assert site.runtime.drain.state is DrainState.DRAINING
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        site.store.away = False
        await trio.sleep(5)
        assert site.runtime.drain.safe_to_delete
        assert not site.is_there()


# --- coming back -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wakes", "is well again", "is resumed"])
async def test_who_comes_back_is_not_ready_before_the_store_has_it(
    autojump_clock: MockClock, how: str
) -> None:
    async with open_site() as site, trio.open_nursery() as nursery:
        instance = site.runtime.served(site.endpoint.id)
        assert site.states() == {"generate": True}
        match how:
            case "wakes":
                await site.endpoint.unregister_endpoint_instance()
                nursery.start_soon(site.endpoint.register_endpoint_instance)
            case "is well again":
                await site.runtime.set_healthy(instance, False)
                nursery.start_soon(site.runtime.set_healthy, instance, True)
            case _:
                site.runtime.drain.begin()
                await trio.sleep(0.01)
                site.runtime.drain.resume()
        await trio.sleep(QUIET - 0.1)
        assert not site.is_there()
        assert site.states() == {"generate": False}
        assert site.status.health()[0] == 503
        await trio.sleep(0.2)
        assert site.is_there()
        assert site.states() == {"generate": True}
        assert site.status.health()[0] == 200
