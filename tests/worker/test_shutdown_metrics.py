"""What Prometheus sees of a stop, and the part of ``/health`` that a program says itself."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from dynamo_trio.errors import DynamoException
from dynamo_trio.lifecycle import Hooks, Lifecycle, Timetable
from dynamo_trio.metrics.shutdown import STAGES, WITHIN
from dynamo_trio.runtime import DistributedRuntime, open_runtime
from dynamo_trio.worker.status import WorkerStatus
from dynamo_trio.worker.status_app import StatusApp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from trio.testing import MockClock

GENERATE = "dynamo.backend.generate"
STAGE = "dynamo_component_shutdown_stage_seconds"
REMAINING = "dynamo_component_shutdown_remaining_seconds"
INFLIGHT = "dynamo_component_shutdown_inflight_requests"


async def generate(request: float) -> AsyncGenerator[object, None]:
    yield request
    await trio.sleep(request)


@attrs.define(eq=False)
class Site:
    lifecycle: Lifecycle
    runtime: DistributedRuntime
    http: httpx.AsyncClient
    nursery: trio.Nursery

    async def scrape(self) -> dict[str, float]:
        """Value by name; that of a stage as ``stage reason``."""
        text = (await self.http.get("/metrics")).text
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == STAGE:
                    found[f"{sample.labels['stage']} {sample.labels['reason']}"] = sample.value
                elif sample.name in (REMAINING, INFLIGHT):
                    found[sample.name] = sample.value
        return found

    async def stages(self) -> dict[str, float]:
        return {k: round(v, 3) for k, v in (await self.scrape()).items() if " " in k}

    async def health(self) -> tuple[int, str]:
        answer = await self.http.get("/health")
        return answer.status_code, answer.json()["status"]

    async def request(self, seconds: float) -> None:
        started = trio.Event()
        self.nursery.start_soon(self._request, seconds, started)
        await started.wait()

    async def _request(self, seconds: float, started: trio.Event) -> None:
        async with self.runtime.endpoint(GENERATE).client() as client:
            async with client.generate(seconds) as stream:
                with suppress(DynamoException):
                    async for _ in stream:
                        started.set()


@asynccontextmanager
async def open_site(
    hooks: Hooks = Hooks(),  # noqa: B008 - frozen
    *,
    serves: bool = True,
    **limits: float,
) -> AsyncIterator[Site]:
    lifecycle = Lifecycle(Timetable(**limits), hooks=hooks)  # type: ignore[arg-type]  # seconds
    status = WorkerStatus(lifecycle)
    transport = httpx.ASGITransport(StatusApp(status))
    http = httpx.AsyncClient(transport=transport, base_url="http://w")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.run)
        async with open_runtime(lifecycle) as runtime:
            status.attach(runtime)
            site = Site(lifecycle, runtime, http, nursery)
            if serves:
                async with runtime.endpoint(GENERATE).serving(generate):
                    yield site
                    lifecycle.escalate("the test is over")
                    await lifecycle.wait_stopped()
            else:
                yield site
                lifecycle.escalate("the test is over")
                await lifecycle.wait_stopped()
        nursery.cancel_scope.cancel("the test is over")


async def test_a_process_that_serves(autojump_clock: MockClock) -> None:
    async with open_site() as site:
        assert await site.scrape() == {REMAINING: float("inf"), INFLIGHT: 0}
        await site.request(5.0)
        assert await site.scrape() == {REMAINING: float("inf"), INFLIGHT: 1}


async def test_each_stage_is_told_once_it_is_over(autojump_clock: MockClock) -> None:
    async def hook() -> None:
        await trio.sleep(1.0)

    async def slow() -> None:
        await trio.sleep(100.0)

    hooks = Hooks(drain=hook, cleanup=slow)
    async with open_site(hooks, grace=2.0, drain=100.0, hook=3.0, total=60.0) as site:
        await site.request(20.0)
        site.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1.5)
        seen = await site.scrape()
        assert seen[REMAINING] == pytest.approx(58.5)
        assert seen[INFLIGHT] == 1
        assert await site.stages() == {"unregister completed": 0.0}
        await trio.sleep(1.0)
        assert await site.stages() == {"unregister completed": 0.0, "router_grace timed_out": 2.0}
        await trio.sleep(1.0)
        assert (await site.stages())["stop_admission completed"] == 1.0
        await trio.sleep(3.0)
        assert (await site.stages())["cleanup timed_out"] == 3.0
        await site.lifecycle.wait_stopped()
        assert await site.stages() == {
            "unregister completed": 0.0,
            "router_grace timed_out": 2.0,
            "stop_admission completed": 1.0,
            "cleanup timed_out": 3.0,
            "in_flight completed": 14.0,  # of the 20, without what the others took
            "teardown completed": 0.0,
        }
        assert (await site.scrape())[INFLIGHT] == 0


async def test_what_there_is_no_need_for_is_skipped(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:
        site.lifecycle.request_stop("SIGTERM")
        await site.lifecycle.wait_stopped()
        stages = await site.stages()
        assert {"stop_admission skipped", "cleanup skipped"} <= stages.keys()
        assert {key.split()[0] for key in stages} == set(STAGES)


async def test_an_escalation_cancels_a_stage(autojump_clock: MockClock) -> None:
    async with open_site(grace=5.0) as site:
        await site.request(50.0)
        site.lifecycle.request_stop("SIGTERM")
        await trio.sleep(1.0)
        site.lifecycle.escalate("SIGINT")
        await site.lifecycle.wait_stopped()
        stages = await site.stages()
        assert stages["router_grace cancelled"] == 1.0
        assert "in_flight skipped" in stages


async def test_a_failed_unregistering_is_a_stage_too(autojump_clock: MockClock) -> None:
    async with open_site(grace=0.0) as site:

        async def fail() -> None:
            raise OSError("the store is away")

        site.lifecycle.on_unregister(fail)
        site.lifecycle.request_stop("SIGTERM")
        await site.lifecycle.wait_stopped()
        assert "unregister failed" in await site.stages()


def test_the_inner_steps_are_stages_of_their_own() -> None:
    told = {part for parts in STAGES.values() for part in parts}
    assert {inner for steps in WITHIN.values() for inner in steps} <= told


# --- set_health_status ---------------------------------------------------------------------------


async def test_a_program_can_say_that_it_is_not_healthy(autojump_clock: MockClock) -> None:
    async with open_site() as site:
        assert await site.health() == (200, "ready")
        site.runtime.set_health_status(False)
        assert await site.health() == (503, "notready")
        assert (await site.http.get("/live")).status_code == 200
        site.runtime.set_health_status(True)
        assert await site.health() == (200, "ready")


async def test_a_program_without_endpoints_can_say_that_it_is(autojump_clock: MockClock) -> None:
    async with open_site(serves=False) as site:
        assert await site.health() == (503, "notready")
        site.runtime.set_health_status(True)
        assert await site.health() == (200, "ready")
        site.lifecycle.request_stop("SIGTERM")
        assert await site.health() == (503, "notready")


async def test_an_endpoint_that_is_not_ready_has_the_last_word(autojump_clock: MockClock) -> None:
    async with open_site() as site:
        site.runtime.set_health_status(True)
        await site.runtime.endpoint(GENERATE).unregister_endpoint_instance()
        assert await site.health() == (503, "notready")
