"""Random lives of an endpoint that falls ill, sleeps, is drained and asked, in virtual time.

Whatever happens, at most one canary lives, and none is sent while the endpoint is to have none.
The store may be away for a moment.
Whenever nothing has happened for a while, others find it exactly if it is well and wanted.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trio.discovery import Instance, MemoryDiscovery
from dynamo_trio.errors import DynamoException, Unknown
from dynamo_trio.health import CanarySettings, is_probe, marked
from dynamo_trio.health.standing import MOST_PASSES
from dynamo_trio.lifecycle import Lifecycle, Timetable
from dynamo_trio.runtime import DistributedRuntime, Endpoint, open_runtime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_trio.discovery.records import Record

WAIT, LIMIT = 10.0, 3.0
#: After which a change has had its consequence: every pass that a relapse may need, and more.
SETTLED = (WAIT + LIMIT) * (MOST_PASSES + 2)

OPS = (
    *("fall ill", "break", "exit", "recover", "sleep", "wake", "drain", "resume"),
    *("ask", "away", "wait", "settle"),
)
steps = st.lists(st.tuples(st.sampled_from(OPS), st.floats(0.0, 25.0)), min_size=1, max_size=14)


class Store(MemoryDiscovery):
    """Refuses the next so many calls."""

    away: int = 0

    async def register(self, record: Record) -> None:
        self._refuse()
        await super().register(record)

    async def unregister(self, record: Record) -> None:
        self._refuse()
        await super().unregister(record)

    def _refuse(self) -> None:
        if self.away:
            self.away -= 1
            raise OSError("the store is away")


async def insist(job: Callable[[], Awaitable[object]]) -> None:
    """As a program does whose store may be away."""
    while True:
        try:
            await job()
        except OSError:
            continue
        return


@attrs.define(eq=False)
class Life:
    """The endpoint, and what it has been through."""

    runtime: DistributedRuntime
    endpoint: Endpoint
    store: Store
    ill: str = ""
    #: Cancelled whenever illness ends: who hangs answers then.
    hanging: trio.Event = attrs.field(factory=trio.Event)
    asleep: bool = False
    drained: bool = False
    alive: int = 0
    most_alive: int = 0
    probes: int = 0
    #: Canaries that came although nobody was to find the endpoint, its health apart.
    stray: int = 0

    async def handle(self, request: dict[str, Any]) -> Any:
        if is_probe(request):
            self.probes += 1
            self.stray += self.asleep or self.drained
        self.alive += is_probe(request)
        self.most_alive = max(self.most_alive, self.alive)
        try:
            if self.ill == "break":
                raise Unknown("broken")
            if self.ill == "exit" and is_probe(request):
                raise SystemExit(0)
            if self.ill:
                await self.hanging.wait()
            yield "well"
        finally:
            self.alive -= is_probe(request)

    async def do(self, op: str, nursery: trio.Nursery) -> None:
        drain = self.runtime.drain
        await trio.testing.wait_all_tasks_blocked()  # a canary may be due at this very moment
        match op:
            case "fall ill" | "break" | "exit":
                self.ill = op
            case "recover":
                self.ill = ""
                self.hanging.set()
                self.hanging = trio.Event()
            case "sleep" if not self.drained:
                await insist(self.endpoint.unregister_endpoint_instance)
                self.asleep = True
            case "wake" if not self.drained:
                self.asleep = False
                await insist(self.endpoint.register_endpoint_instance)
            case "drain":
                self.drained = True
                drain.begin()
            case "resume" if self.drained:
                drain.resume()
                self.drained = False
            case "ask":
                nursery.start_soon(self.ask)
            case "away":
                self.store.away = 2
            case "settle":
                await trio.sleep(SETTLED)
                await self.check()

    async def ask(self) -> None:
        try:
            async with (
                self.endpoint.client() as client,
                client.generate({"who": "somebody"}) as stream,
            ):
                async for _ in stream:
                    pass
        except* DynamoException:
            pass  # nobody to ask, or a broken one

    async def check(self) -> None:
        async with self.runtime.discovery.watch(Instance) as watch:
            found = bool(watch.snapshot)
        assert found == (not self.ill and not self.asleep and not self.drained)
        assert self.runtime.endpoint_states()["generate"] == found


async def live(ops: list[tuple[str, float]]) -> None:
    lifecycle = Lifecycle(Timetable(grace=1.0, drain=1.0))
    checks = CanarySettings(enabled=True, wait=WAIT, limit=LIMIT)
    async with trio.open_nursery() as services, AsyncExitStack() as stack:
        services.start_soon(lifecycle.run)
        store = Store()
        opened = open_runtime(lifecycle, discovery=store, canary=checks)
        runtime = await stack.enter_async_context(opened)
        services.start_soon(runtime.drain.run)
        life = Life(runtime, runtime.endpoint("test.backend.generate"), store)
        payload = marked({})
        serving = life.endpoint.serving(life.handle, health_check_payload=payload)
        await stack.enter_async_context(serving)
        nursery = await stack.enter_async_context(trio.open_nursery())
        for op, pause in ops:
            await life.do(op, nursery)
            await trio.sleep(pause)
        await trio.sleep(SETTLED)
        await life.check()
        await trio.testing.wait_all_tasks_blocked()  # here too
        asked = life.probes
        lifecycle.request_stop("the test is over")
        await lifecycle.wait_stopped()
        nursery.cancel_scope.cancel("the test is over")
        assert (life.probes, life.alive) == (asked, 0)
        assert (life.most_alive, life.stray) == (1, 0)
        services.cancel_scope.cancel("the test is over")


def run_life(ops: list[tuple[str, float]]) -> None:
    trio.run(partial(live, ops), clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=80)
@given(steps)
def test_whatever_happens_health_has_its_consequence(ops: list[tuple[str, float]]) -> None:
    run_life(ops)


@pytest.mark.soak
@pytest.mark.timeout(900)
@settings(max_examples=3000)
@given(steps)
def test_whatever_happens_in_thousands_of_lives(ops: list[tuple[str, float]]) -> None:
    run_life(ops)


def test_every_change_in_one_life() -> None:
    run_life([(op, 0.0) for name in OPS for op in (name, "settle", "recover")])
